"""What the pages of the site have beyond the theme: words for those who link to them, a lighter and stricter HTML, launch buttons.

The buttons of Binder and Colab stand in _config.yml and appear once ``repository: url`` is set there.
"""

import html
import re
from pathlib import Path
from urllib.parse import urljoin

from docutils import nodes

RESULTS = Path("data", "results")
CARD = "_static/social_card.png"
CARD_ALT = "The question of this companion, above its figure 2: matrix entropy of each layer along the depth of two targets."
SIZE = (1200, 630)  # pixels, what those who show cards ask for
PLACES = ("binderhub_url", "colab_url")
INTERVAL = re.compile(r"[\[{(][-+<\d.,%/ \u2013\u2212]+[\]})]|(?<=\w) = (?=\w)|< (?=\d)|(?<=\d) of (?=\d)|(?<=\d) (?=[%M]\b|%)")
PERCENT = re.compile(r"(?<=\d) (?=%)")
MARKUP = (
    (re.compile(r'<span class="pre">([^<]*)</span>'), r"\1"),  # marks words that must not break; here they may
    (re.compile(r'<span class="[nopw]">([^<]*)</span>(?=[^\n]*</dt>)'), r"\1"),  # names, brackets and blanks of signatures
    (re.compile(r'(<a class="reference internal" href="[^"#]*#([^"]+)") title="\2"'), r"\1"),  # says what the link says
    (re.compile(r'<th class="head([^"]*)"><p></p></th>'), r'<td class="head\1"></td>'),  # a corner is not a header
    (re.compile(r'<th class="head'), '<th scope="col" class="head'),
    (re.compile(r'(<div class="citation"[^>]*) role="doc-biblioentry"'), r'\1 role="listitem"'),
)


def configure(app, config) -> None:
    """Launch buttons need a repository; scripts in subfolders of _static belong to one page, which asks for them itself.

    Captions carry the paper's numbers, which Sphinx's own count over all pages would contradict; sphinx-jupyterbook-latex
    switches that on whatever _config.yml says.
    """
    config.numfig = False
    if not config.html_theme_options.get("repository_url"):
        buttons = config.html_theme_options.get("launch_buttons", {})
        config.html_theme_options["launch_buttons"] = {key: value for key, value in buttons.items() if key not in PLACES}
    for files in (config.html_js_files, config.html_css_files):
        named = [file if isinstance(file, str) else file[0] for file in files]
        files[:] = [file for file, name in zip(files, named, strict=True) if "/" not in name or "//" in name]


def keep_together(app, doctree: nodes.document) -> None:
    """Sets, intervals and places in tables stay on one line, and everywhere a percentage with its sign."""
    for text in list(doctree.findall(nodes.Text)):
        parts = INTERVAL if _is_in(text, nodes.entry) else PERCENT
        if not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.math | nodes.math_block | nodes.raw):
            kept = parts.sub(lambda found: found.group().replace(" ", "\u00a0"), text.astext())
            if kept != text.astext():
                text.parent.replace(text, nodes.Text(kept))


def _is_in(node: nodes.Node, kind: type[nodes.Node]) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, kind):
            return True
    return False


def describe(app, pagename: str, templatename: str, context: dict, doctree: nodes.document | None) -> None:
    """Description and Open Graph tags; lighter and stricter markup."""
    if body := context.get("body"):
        for pattern, new in MARKUP:
            body = pattern.sub(new, body)
        context["body"] = body
    # Live code is off, and its scripts, there twice, would stop each other.
    for files in ("script_files", "css_files"):
        context[files] = [file for file in context[files] if not _of_thebe(file)]
    if doctree is None:
        return
    title = html.unescape(re.sub(r"<[^>]+>", "", context["title"]))
    card, base = f"{'../' * pagename.count('/')}{CARD}", app.config.html_baseurl
    tags = {
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:title": title,
        "og:description": description(doctree),
        "og:image": urljoin(base, CARD) if base else card,
        "og:image:width": SIZE[0],
        "og:image:height": SIZE[1],
        "og:image:alt": CARD_ALT,
    }
    if base:  # an address is whole or not there
        tags["og:url"] = urljoin(base, app.builder.get_target_uri(pagename))
    named = {"description": tags["og:description"], "twitter:card": "summary_large_image"}
    lines = [f'<meta property="{name}" content="{html.escape(str(value))}" />' for name, value in tags.items()]
    lines += [f'<meta name="{name}" content="{html.escape(value)}" />' for name, value in named.items()]
    context["metatags"] = context.get("metatags", "") + "\n" + "\n".join(lines) + "\n"


def _of_thebe(file) -> bool:
    about = getattr(file, "attributes", {})
    return "sphinx-thebe" in str(getattr(file, "filename", file)) or "THEBE_JS_URL" in str(about.get("body", ""))


def description(doctree: nodes.document, length: int = 160) -> str:
    """First words of a page, cut at a word; of its formulas only those that are letters."""
    words: list[str] = []
    for paragraph in doctree.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, nodes.entry) and len(" ".join(words)) < length:
            words += "".join(map(_plain, paragraph.findall(nodes.Text))).split()
    text = " ".join(words)
    return text if len(text) <= length else text[: length - 1].rpartition(" ")[0].rstrip(",;:.") + "…"


def _plain(text: nodes.Text) -> str:
    if not isinstance(text.parent, nodes.math | nodes.math_block):
        return text.astext()
    letter = text.astext().replace(r"\tau", "τ").replace(r"\rho", "ρ")
    return letter if letter.isalpha() else ""


def draw_card(app, exception: Exception | None) -> None:
    """The picture that a link to the site is shown with: its question above its figure 2."""
    found = sorted((Path(app.srcdir) / RESULTS).glob("*/figure2.png"))
    if exception is not None or app.builder.format != "html":
        return
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    fig = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="white")
    fig.text(0.04, 0.93, "Which layers should feed the draft?", fontsize=30, weight="bold", color="#14325a", va="top")
    fig.text(0.04, 0.815, app.config.html_title, fontsize=17, color="#3c4650", va="top")
    if found:
        axes = fig.add_axes((0.02, 0.02, 0.96, 0.72))
        axes.imshow(imread(found[0]), interpolation="lanczos")
        axes.set_axis_off()
    fig.savefig(Path(app.outdir) / CARD, metadata={"Software": None})


def setup(app) -> dict[str, bool]:
    app.connect("config-inited", configure, priority=900)
    app.connect("doctree-read", keep_together)
    app.connect("html-page-context", describe, priority=900)  # after all that add to pages
    app.connect("build-finished", draw_card)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
