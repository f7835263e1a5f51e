"""Every page of the book as its readers meet it: links, phone, both themes, no scripts, print, downloads."""

import functools
import html
import os
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import axe_playwright_python
import pytest
import yaml
from bs4 import BeautifulSoup
from jupyter_book.config import get_final_config
from sphinx_book_theme.header_buttons import update_context_with_repository_info
from sphinx_book_theme.header_buttons.launch import add_launch_buttons

ROOT = Path(__file__).resolve().parents[2]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
NOTEBOOKS = [name for name in PAGES if name.startswith("notebooks/")]
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
# preload: asks for style sheets again, which browsers refuse to files.
AXE_RUN = """(rules) => axe.run(document, {preload: false, resultTypes: ["violations"], runOnly: rules})"""
ALL_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# axe-core looks at every element, and pages repeat theirs: of each kind the first are enough.
SHORTEN = """() => { const seen = {};
  const drop = (selector, from) => [...document.querySelectorAll(selector)].slice(from).forEach((part) => part.remove());
  drop("dl.py", 6); drop("mjx-container", 1); drop("tbody tr:nth-child(n+3)", 0); drop(".bd-sidebar-secondary li, .bd-sidenav li", 12);
  for (const part of document.querySelectorAll("pre span[class]")) {
    seen[part.className] = (seen[part.className] || 0) + 1;
    if (seen[part.className] > 1) part.remove();
  }
  const still = document.createElement("style"); // a theme is looked at when it has come
  still.textContent = "* { transition: none !important; animation: none !important; }";
  document.head.append(still); }"""
PAGE_BYTES = 1_000_000  # a page with its styles, without scripts and figures


@functools.cache
def parsed(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path: Path) -> set[str]:
    return set(re.findall(r'\sid="([^"]+)"', path.read_text(encoding="utf-8")))


def addresses(path: Path) -> set[str]:
    """What a page points to or shows, within the site."""
    found = map(html.unescape, re.findall(r'<[^>]+\s(?:href|src)="([^"]*)"', path.read_text(encoding="utf-8")))
    return {address for address in found if not urlsplit(address).scheme and not address.startswith("//")}


def uri(site: Path, name: str) -> str:
    return (site / f"{name}.html").as_uri()


# Files, without a browser


@pytest.mark.parametrize("name", PAGES)
def test_links_anchors_and_pictures_are_there(site, name):
    page = site / f"{name}.html"
    missing = []
    for address in addresses(page):
        place = urlsplit(address)
        path = Path(os.path.normpath(page.parent / unquote(place.path))) if place.path else page
        anchor = unquote(place.fragment) if path.suffix == ".html" else ""
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            missing.append(address)
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_pictures_have_words(site, name):
    article = parsed(site / f"{name}.html").find("article")
    for image in article.find_all("img"):
        alt = image.get("alt", "")
        assert len(alt.split()) >= 8, f"{image['src']}: {alt!r}"
        assert not re.search(r"\.(png|svg)$", alt)
        figure = image.find_parent("figure")
        caption = figure.find("figcaption") if figure else None
        assert caption and len(caption.get_text().split()) >= 15, f"{alt!r}: no caption that can be read alone"


@pytest.mark.parametrize("name", PAGES)
def test_no_markup_is_left_in_the_text(site, name):
    article = BeautifulSoup(str(parsed(site / f"{name}.html").find("article")), "html.parser")
    for part in article.select("pre, code, script, style, .math, dl.py"):
        part.decompose()
    text = article.get_text(" ")
    left = re.findall(r"\*\*\w|\w\*\*|\|[-: ]*--|\$[^$\s][^$]*\$|\\\w+\{|\]\(#?\w|\{(?:ref|eq|doc|cite\w*|glue\w*)\}", text)
    assert not left


def test_an_artefact_of_either_target_has_its_own_words_and_files(site):
    page = parsed(site / "notebooks/12_criteria.html")
    shown = [image for image in page.find_all("img") if image.get("alt", "").startswith("Rank correlation of each criterion with tau")]
    assert len(shown) == 2
    for image, target in zip(shown, ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"), strict=True):
        assert target in image["alt"]
        files = image.find_parent("figure").find_next("p", class_="artefact-files")
        assert {Path(link["href"]).parent.name for link in files.find_all("a")} == {target}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_figures_and_tables_offer_their_files(site, name):
    page = parsed(site / f"{name}.html")
    results = Path("..", "data", "results")
    lines = page.select("p.artefact-files")
    outputs = page.select("div.cell_output")
    assert sum(bool(output.find(["figure", "table"])) for output in outputs) <= len(lines)
    for line in lines:
        offered = {link.get_text(): link["href"] for link in line.find_all("a")}
        assert set(offered) in ({"csv", "svg", "png", "passport (json)"}, {"csv", "passport (json)"})
        for address in offered.values():
            assert Path(address).is_relative_to(results)
            assert (site / "notebooks" / address).read_bytes() == (site.parent / "src" / "notebooks" / address).read_bytes()
    for figure in page.select("div.cell_output figure"):
        assert "svg" in [link.get_text() for link in figure.find_next("p", class_="artefact-files").find_all("a")]
    assert page.select(f'a[href="../_sources/{name}.ipynb"]')


@pytest.mark.parametrize("name", PAGES)
def test_page_says_what_it_is_to_those_who_link_to_it(site, name):
    page = site / f"{name}.html"
    tags = {tag.get("property") or tag.get("name"): tag.get("content") for tag in parsed(page).find_all("meta")}
    assert 40 <= len(tags["description"]) <= 160 and tags["og:description"] == tags["description"]
    assert tags["og:title"] in parsed(page).find("title").get_text()
    assert "\\" not in tags["description"]
    card = (page.parent / tags["og:image"]).read_bytes()  # relative while the site has no address
    assert (int.from_bytes(card[16:20], "big"), int.from_bytes(card[20:24], "big")) == (1200, 630)
    assert parsed(page).find("link", rel="icon")["href"].endswith("favicon.svg")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_light(site, name):
    page = site / f"{name}.html"
    styles = [page.parent / urlsplit(link["href"]).path for link in parsed(page).find_all("link", rel="stylesheet")]
    assert page.stat().st_size < PAGE_BYTES
    # Styles come once for all pages.
    assert sum(style.stat().st_size for style in styles) < PAGE_BYTES
    scripts = [tag["src"] for tag in parsed(page).find_all("script", src=True)]
    assert "explorer" in name or not any("explorer/" in script for script in scripts)


# In the browser


@pytest.mark.parametrize("name", PAGES)
def test_page_in_light_and_dark_and_on_a_phone(site, page, name):
    """One load: no error, nothing asked for elsewhere, axe-core in both themes, and no sideways scrolling at 360 pixels."""
    page.emulate_media(color_scheme="light")
    page.goto(uri(site, name))
    page.evaluate("() => window.MathJax?.startup?.promise")
    broken = page.evaluate("[...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src)")
    assert not broken
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, page.evaluate(WIDER)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate(SHORTEN)
    page.evaluate(AXE)
    violations = []
    for theme, rules in {"light": ALL_RULES, "dark": ["color-contrast", "link-in-text-block"]}.items():
        page.evaluate("(theme) => { document.documentElement.dataset.theme = theme; }", theme)
        violations += [
            f"{theme}: {violation['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for violation in page.evaluate(AXE_RUN, rules)["violations"]
            for node in violation["nodes"]
        ]
    assert not violations


WIDER = """[...document.querySelectorAll(".bd-article *")].filter((part) => part.getBoundingClientRect().right > 360)
  .slice(0, 5).map((part) => part.outerHTML.slice(0, 120))"""


# Headings, pictures, tables and the contents that a page has and does not show; its words; its formulas as text.
UNSEEN = """() => { const article = document.querySelector("article.bd-article");
  const parts = [...article.querySelectorAll("h1, h2, figure img, table"), ...document.querySelectorAll("nav.bd-docs-nav a")];
  const folded = (part) => part.closest("details:not([open])"); // opens without scripts
  return [parts.filter((part) => !folded(part) && !part.checkVisibility()).map((part) => part.outerHTML.slice(0, 120)),
    article.innerText.split(/\\s+/).length, [...article.querySelectorAll(".math")].map((part) => part.textContent)]; }"""


def test_pages_can_be_read_before_scripts_run(site, open_page):
    with open_page(java_script_enabled=False) as page:
        for name in PAGES:
            page.goto(uri(site, name), wait_until="domcontentloaded")
            unseen, words, formulas = page.evaluate(UNSEEN)
            assert not unseen, name
            assert words > 40, name
            written = [part.get_text() for part in parsed(site / f"{name}.html").select("article .math")]
            assert formulas == written, name


def test_wide_tables_and_figures_scroll_in_their_own_box(site, open_page):
    with open_page(viewport={"width": 360, "height": 740}) as page:
        page.goto(uri(site, "notebooks/06_table2"))
        page.wait_for_function("document.querySelector('.pst-scrollable-table-container[tabindex]')")
        boxes = page.locator(".pst-scrollable-table-container, .bd-article figure").all()
        wide = [box for box in boxes if box.evaluate("(box) => box.scrollWidth > box.clientWidth + 1")]
        assert len(wide) > 5
        for box in wide:
            assert box.get_attribute("tabindex") == "0"
        wide[0].focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 0")


def test_tables_sort_as_numbers_by_mouse_and_keyboard(site, page):
    page.goto(uri(site, "notebooks/06_table2"))
    table = page.locator("table").first
    heads = table.locator("th")
    last = heads.count() - 1
    shown = lambda column: [text.strip() for text in table.locator(f"tbody td:nth-child({column + 1})").all_inner_texts()]  # noqa: E731
    before = shown(0)
    button = heads.nth(last).get_by_role("button")
    button.click()
    assert heads.nth(last).get_attribute("aria-sort") == "ascending"
    values = [float(text.split()[0]) for text in shown(last)]
    assert values == sorted(values) and shown(0) != before
    button.focus()
    page.keyboard.press("Enter")
    assert heads.nth(last).get_attribute("aria-sort") == "descending"
    assert [float(text.split()[0]) for text in shown(last)] == values[::-1]
    page.keyboard.press("Space")
    assert heads.nth(last).get_attribute("aria-sort") is None and shown(0) == before
    # Sets by their layers, and rows without a value last.
    heads.nth(1).get_by_role("button").click()
    sets = [[int(number) for number in re.findall(r"\d+", text)] for text in shown(1)]
    assert sets[:-1] == sorted(sets[:-1]) and sets[-1] == []


def test_thousands_percent_and_bounds_are_numbers(site, page):
    page.goto(uri(site, "book/compared"))
    page.evaluate(
        """() => { const box = document.createElement("div"); box.id = "tried"; box.innerHTML =
        "<table><thead><tr><th>x</th></tr></thead><tbody>" + ["+109,716 %", "not known", "-48.4 %", "< 0.001", "27 of 0–29", "\u22123"]
        .map((text) => `<tr><td>${text}</td></tr>`).join("") + "</tbody></table>";
        document.querySelector("article").append(box); }"""
    )
    script = (site / "_static" / "book.js").read_text(encoding="utf-8")
    page.evaluate("document.querySelectorAll('article table').forEach((table) => table.closest('#tried') || table.remove())")
    page.evaluate(script)
    page.locator("#tried th button").click()
    order = page.locator("#tried td").all_inner_texts()
    assert order == ["-48.4 %", "\u22123", "< 0.001", "27 of 0–29", "+109,716 %", "not known"]


def test_copy_buttons(served, open_page):
    with open_page(permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto(f"{served}book/index.html")
        block = page.locator("div.highlight").first
        block.hover()
        block.locator("button.copybtn").click()
        page.wait_for_function("document.querySelector('button.copybtn.success')")
        assert page.evaluate("navigator.clipboard.readText()").startswith("make book")


def test_theme_switch_next_and_previous(site, page):
    page.emulate_media(color_scheme="light")
    page.goto(uri(site, "notebooks/02_pairs"))
    switch = page.locator("button.theme-switch-button:visible").first
    seen = set()
    for _ in range(3):
        switch.click()
        seen.add((page.evaluate("document.documentElement.dataset.mode"), page.evaluate("document.documentElement.dataset.theme")))
    assert {("dark", "dark"), ("light", "light")} <= seen
    page.locator("a.right-next").click()
    assert "03_filter" in page.url
    page.locator("a.left-prev").click()
    assert "02_pairs" in page.url


def test_notebook_download_button(site, served, page):
    page.goto(f"{served}notebooks/01_wave.html")
    page.get_by_label("Download this page").click()
    with page.expect_download() as started:
        page.locator("a.btn-download-source-button").click()
    assert started.value.suggested_filename == "01_wave.ipynb"
    assert Path(started.value.path()).read_bytes() == (site / "_sources" / "notebooks" / "01_wave.ipynb").read_bytes()


def test_search(served, page):
    page.goto(f"{served}search.html?q=compartments")
    page.wait_for_selector("#search-results ul.search li a[href*='04_compartments.html']")
    page.wait_for_selector("#search-results .context")


def test_search_of_files(site, browser):
    """The index is a script, so pages are found from files too. Their excerpts are not: browsers refuse files to scripts."""
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(f"{site.as_uri()}/search.html?q=compartments")
        page.wait_for_selector("#search-results ul.search li a[href*='04_compartments.html']")


def test_print_shows_the_text_alone(site, page):
    page.goto(uri(site, "notebooks/01_wave"))
    page.emulate_media(media="print")
    for hidden in (".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-header-article", ".prev-next-footer", ".copybtn"):
        assert not any(part.is_visible() for part in page.locator(hidden).all()), hidden
    assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    link = "getComputedStyle(document.querySelector('a.external'), '::after').content"
    page.goto(uri(site, "book/cite"))
    assert re.search(r"attr\(href\)|https:", page.evaluate(link))


class Config(dict):
    """Sphinx' settings, by name or as attributes."""

    __getattr__ = dict.__getitem__


def launch_links(address: str) -> list[str]:
    """Where the buttons of the notebooks lead, by the book's own settings with another address."""
    import pages

    given = yaml.safe_load((ROOT / "_config.yml").read_text())
    given["repository"]["url"] = address
    settings, _ = get_final_config(user_yaml=given, cli_config={"latex_individualpages": False}, sourcedir=ROOT)
    config = Config(settings | {"html_js_files": [], "html_css_files": []})
    pages.configure(None, config)
    env = SimpleNamespace(doc2path=lambda name: f"/book/{name}.ipynb", metadata={name: {"kernelspec": {}} for name in NOTEBOOKS})
    app = SimpleNamespace(config=config, env=env, builder=SimpleNamespace(theme_options=config.html_theme_options))
    update_context_with_repository_info(app)
    links = []
    for name in NOTEBOOKS:
        context = {**config.html_context, "pagename": name, "sourcename": f"{name}.ipynb", "header_buttons": []}
        add_launch_buttons(app, name, "page.html", context, None)
        links += [button["url"] for group in context["header_buttons"] for button in group["buttons"]]
    return links


def test_print_is_light_and_unfolded(site, page):
    page.emulate_media(color_scheme="dark")
    page.goto(uri(site, "notebooks/06_table2"))
    state = "() => [document.documentElement.dataset.theme, document.querySelectorAll('details:not([open])').length]"
    theme, folded = page.evaluate(state)
    assert theme == "dark" and folded > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(state) == ["light", 0]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(state) == [theme, folded]


def test_launch_buttons_appear_with_the_address_of_the_repository(monkeypatch):
    """The address stands in one place; nothing else is needed for Binder and Colab to open the notebooks."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    assert launch_links("") == []
    links = launch_links("https://github.com/owner/name")
    for name in NOTEBOOKS:
        assert (ROOT / f"{name}.ipynb").is_file()
        assert f"https://mybinder.org/v2/gh/owner/name/main?urlpath=lab/tree/{name}.ipynb" in links
        assert f"https://colab.research.google.com/github/owner/name/blob/main/{name}.ipynb" in links
    assert len(links) == 2 * len(NOTEBOOKS)


def test_binder_finds_what_environment_yml_names():
    *_, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    for line in pip["pip"]:
        place = line.split()[-1]
        assert not Path(place).is_absolute() and (ROOT / place).exists()
