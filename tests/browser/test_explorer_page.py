"""The layer explorer as readers use it, from a file: its numbers, the keyboard, its address, files of their own, a phone."""

import base64
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elsi_lib.choice import describe_choice
from elsi_lib.fingerprint import Fingerprint, read_tensors
from elsi_lib.layers import engine_ids

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from synthetic import fingerprint as synthetic  # noqa: E402

RESULTS = ROOT / "data" / "results"
DEFAULT, BESIDE = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
PATIENCE = 180_000  # milliseconds; machines may be slow and busy
DONE = "document.querySelector('#elsi-explorer').dataset.state === 'ready'"
SAID, NOTICE = ".elsi-said", ".elsi-notice"


@pytest.fixture(scope="module")
def fp():
    return Fingerprint.load(RESULTS / DEFAULT / "fingerprint.safetensors")


@pytest.fixture
def explorer(site, page):
    return lambda hash="", until=DONE: open_explorer(site, page, hash, until)


def open_explorer(site, page, hash="", until=DONE):
    page.goto("about:blank")  # a new hash alone would not load the page again
    page.goto((site / "book" / "explorer.html").as_uri() + hash)
    page.wait_for_function(until, timeout=PATIENCE)
    return page


def settled(page):
    """All numbers are there."""
    page.wait_for_function(DONE, timeout=PATIENCE)


def fact(page, label):
    return page.locator(".elsi-facts > div", has_text=re.compile(f"^{label}")).locator("dd")


def values(page, label):
    return [float(value) for value in fact(page, label).locator("data").evaluate_all("(all) => all.map((one) => one.value)")]


def chosen(page):
    return [int(text) for text in page.locator('.elsi-strip button[aria-pressed="true"]').all_inner_texts()]


@pytest.mark.parametrize(
    ("hash", "target", "variant", "method", "m", "options"),
    [
        ("", DEFAULT, (True, True), "elsi", 3, {}),
        ("#method=eagle3", DEFAULT, (True, True), "eagle3", None, {}),
        (f"#target={BESIDE}&m=2&sink=0", BESIDE, (True, False), "elsi", 2, {}),
        ("#method=exhaustive&m=2&filtered=0&normalize=trace&center=1&alpha=2", DEFAULT, (False, True), "exhaustive", 2,
         {"normalize": "trace", "center": True, "alpha": 2.0}),
        ("#method=elsi-c&m=2&k_pool=4&k_beam=3&after_midpoint=seeds", DEFAULT, (True, True), "elsi-c", 2,
         {"k_pool": 4, "k_beam": 3, "after_midpoint": "seeds"}),
        ("#method=lowest&m=1&alpha=inf", DEFAULT, (True, True), "lowest", 1, {"alpha": math.inf}),
    ],
)  # fmt: skip
def test_numbers_are_the_library_s(explorer, hash, target, variant, method, m, options):
    page = explorer(hash)
    own = Fingerprint.load(RESULTS / target / "fingerprint.safetensors").variant(*variant)
    expected = describe_choice(own, method, m, **options)
    assert chosen(page) == expected["layers"]
    assert values(page, "entropy") == pytest.approx([expected["entropy"]], abs=1e-9)
    assert values(page, "place") == [expected["rank"]]
    assert f"of {expected['sets']:,} sets" in fact(page, "place").inner_text()
    if expected["rank"] > 1:
        assert values(page, "regret") == pytest.approx([expected["regret"]], abs=1e-9)
    if expected["redundancy"] is not None:
        assert values(page, "redundancy") == pytest.approx([expected["redundancy"], expected["redundancy_debiased"]], abs=1e-9)
    if (stability := expected["stability"]) is not None:
        assert values(page, "stability") == pytest.approx([stability["share"], stability["jaccard"]], abs=1e-12)
        assert f"{stability['replicates']} redraws" in fact(page, "stability").inner_text()
    else:
        assert expected["notes"]["stability"] in fact(page, "stability").inner_text()
    said = page.locator(SAID).inner_text()
    assert f"{{{', '.join(map(str, expected['layers']))}}}" in said and f"{expected['entropy']:.4f} nats" in said
    for row, name in zip(page.locator(".elsi-compared tbody tr").all(), ("eagle2", "eagle3", "eagle3-code", "optimum"), strict=True):
        shown = row.locator("data").evaluate_all("(all) => all.map((one) => Number(one.value))")
        rule = expected["baselines"][name]["entropy"]
        assert shown == pytest.approx([rule, expected["entropy"] - rule], abs=1e-9)


def test_choosing_among_what_an_engine_can_capture(explorer, fp):
    page = explorer("#method=exhaustive&m=1&among=sglang&sink=0")
    expected = describe_choice(fp.variant(sink=False), "exhaustive", 1, among=range(fp.num_layers - 1))
    assert chosen(page) == expected["layers"]
    assert f"place {expected['servable']['rank']} of {expected['servable']['sets']}" in fact(page, "among").inner_text()


@pytest.mark.parametrize("layers", [(1, 12, 13), (28, 29)])
def test_every_engine_has_its_ids_or_the_reason(explorer, fp, layers):
    page = explorer(f"#layers={','.join(map(str, layers))}")
    for name, expected in engine_ids(layers, fp.num_layers).items():
        if name == "elsi":
            continue
        box = page.locator(f'.elsi-engine[aria-label="{name}"]')
        assert (expected if isinstance(expected, str) else f"ids {', '.join(map(str, expected))}") in box.inner_text()
        if box.locator("pre").count():
            config = json.loads(box.locator("pre").inner_text())
            while isinstance(config, dict):
                (config,) = config.values()
            assert config == list(expected)


def test_a_copied_config_is_on_the_clipboard(explorer):
    page = explorer("#layers=1,12,13")
    page.evaluate("""navigator.clipboard
      ? (navigator.clipboard.writeText = async (text) => { window.copied = text; })
      : (document.execCommand = () => { window.copied = document.activeElement.value; return true; })""")
    page.get_by_role("button", name="Copy config.json for sglang").click()
    page.wait_for_function("window.copied")
    assert json.loads(page.evaluate("window.copied")) == {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 12, 13]}}


COMMANDS = ["#method=exhaustive&m=2&alpha=2&sink=0", "#method=elsi-c&m=2&debiased=1&among=sglang", "#layers=1,5&center=1"]


@pytest.mark.parametrize("hash", COMMANDS)
def test_the_command_gives_the_same(explorer, hash):
    page = explorer(hash)
    command = page.locator("#elsi-explorer .elsi-snippet pre").last.inner_text()
    python = Path(sys.executable)
    run = [python.with_name("elsi"), *shlex.split(command)[1:]] if command.startswith("elsi ") else [python, "-c", command]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shown = values(page, "entropy")[0]
    assert any(abs(float(text) - shown) < 1e-4 for text in re.findall(r"\d+\.\d+", printed))
    if not hash.startswith("#layers"):
        assert ", ".join(map(str, chosen(page))) in printed


def test_clicks_on_the_wave_and_the_keyboard(explorer, fp):
    page = explorer("#layers=1,12,13")
    page.locator('.elsi-wave [data-layer="20"]').click()
    assert chosen(page) == [1, 12, 13, 20] and page.evaluate("location.hash") == "#layers=1,12,13,20"
    strip = page.locator(".elsi-strip button")
    assert strip.evaluate_all("(all) => all.filter((button) => button.tabIndex === 0).length") == 1
    strip.nth(0).focus()
    for key in ("End", "ArrowLeft", "Space"):
        page.keyboard.press(key)
    assert chosen(page) == [1, 12, 13, 20, 28]
    for key in ("Home", "ArrowDown", "ArrowUp", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert chosen(page) == [12, 13, 20, 28]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    for layer in (12, 13, 20):
        strip.nth(layer).click()
    settled(page)
    assert values(page, "entropy") == pytest.approx([fp.entropy([28])], abs=1e-9)
    strip.nth(28).click()
    assert "an empty layer set" in page.locator(SAID).inner_text() and chosen(page) == []


def test_every_control_is_reached_by_tab_and_has_a_name(explorer):
    page = explorer("#method=eagle3")
    page.get_by_label("Target").focus()
    names = []
    for _ in range(8):
        names.append(page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).textContent.trim()"))
        page.keyboard.press("Tab")
    assert names[:6] == [
        "Target", "Open your own fingerprint…", "Method", "with the token-entropy filter", "with the first position of each prompt",
        "More settings",
    ]  # fmt: skip
    live = page.locator(SAID)
    assert (live.get_attribute("aria-live"), live.get_attribute("role")) == ("polite", "status")


def test_the_address_holds_the_view(explorer, site, page):
    explorer("#method=eagle2")
    page.get_by_label("Method").select_option("elsi")
    page.get_by_label("Layers in the set, m").fill("2")
    page.keyboard.press("Tab")
    page.get_by_label("with the first position").uncheck()
    settled(page)
    page.get_by_label("Estimator of the map").select_option("debiased")
    address, layers = page.evaluate("location.href"), chosen(page)
    assert address.endswith("#m=2&sink=0&map=debiased")
    page.go_back()
    page.go_back()
    settled(page)
    assert page.evaluate("location.hash") == "#m=2" and page.get_by_label("with the first position").is_checked()
    page.go_back()
    page.go_back()
    settled(page)
    assert page.get_by_label("Method").input_value() == "eagle2" and chosen(page) == [29]
    page.go_forward()
    page.go_forward()
    page.go_forward()
    settled(page)
    assert chosen(page) == layers
    open_explorer(site, page, address[address.index("#") :])
    assert chosen(page) == layers and page.evaluate("location.href") == address
    assert page.get_by_label("Estimator of the map").input_value() == "debiased"


def test_an_address_that_cannot_be_read_says_so(explorer):
    page = explorer("#method=best&m=2&target=gpt&among=none&layers=1,99")
    notice = page.locator(NOTICE).inner_text()
    assert "method=best in the address" in notice or 'no fingerprint "gpt"' in notice
    assert "layer set {1, 99} outside 0..29" in page.locator(SAID).inner_text()


def test_wrong_settings_are_refused_beside_their_input(explorer):
    page = explorer("#m=2&method=exhaustive")
    before = page.evaluate("location.hash")
    size = page.get_by_label("Layers in the set, m")
    size.fill("many")
    page.keyboard.press("Tab")
    assert size.get_attribute("aria-invalid") == "true" and page.evaluate("location.hash") == before
    assert "whole number" in page.locator(".elsi-wrong:not(:empty)").inner_text()
    size.fill("31")
    page.keyboard.press("Tab")
    assert "m = 31 outside 1..30" in page.locator(SAID).inner_text()
    size.fill("1")
    page.keyboard.press("Tab")
    settled(page)
    assert len(chosen(page)) == 1 and size.get_attribute("aria-invalid") is None


DROP = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name));
  for (const kind of ["dragover", "drop"]) {
    document.querySelector(".elsi-wave").dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""


def drop(page, path):
    page.evaluate(DROP, [path.name, base64.b64encode(path.read_bytes()).decode()])


@pytest.fixture
def mine(tmp_path):
    return synthetic(name="<img src=x onerror=alert(1)>").save(tmp_path / "mine.safetensors")


def test_a_file_of_the_reader_s_own(explorer, site, page, mine):
    explorer("#m=2")
    drop(page, mine)
    page.wait_for_function("document.querySelectorAll('.elsi-strip button').length === 8", timeout=PATIENCE)
    settled(page)
    own = Fingerprint.load(mine)
    expected = describe_choice(own, "elsi", 2)
    assert chosen(page) == expected["layers"] and values(page, "entropy") == pytest.approx([expected["entropy"]], abs=1e-9)
    assert values(page, "stability")[0] == pytest.approx(expected["stability"]["share"])
    assert own.target in page.locator(".elsi-about").inner_text() and page.locator("#elsi-explorer img").count() == 0
    address = page.evaluate("location.hash")
    assert own.sha256[:16] in address
    # The address alone cannot bring the file; it says so, and the file button brings it.
    open_explorer(site, page, address)
    assert "open that file here" in page.locator(NOTICE).inner_text()
    assert page.get_by_label("Target").input_value() == DEFAULT
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open your own fingerprint").click()
    chooser.value.set_files(mine)
    page.wait_for_function("document.querySelectorAll('.elsi-strip button').length === 8", timeout=PATIENCE)
    settled(page)
    assert chosen(page) == expected["layers"] and page.locator(NOTICE).inner_text() == ""
    page.get_by_label("Target").select_option(DEFAULT)
    settled(page)
    assert len(page.locator(".elsi-strip button").all()) == 30


def _truncated(path):
    path.write_bytes(path.read_bytes()[:-500])


def _picture(path):
    path.write_bytes((RESULTS / DEFAULT / "figure2.png").read_bytes())


def _edited(path):
    tensors, header = read_tensors(path, "elsi-fingerprint-1", "a fingerprint")
    save_file(tensors | {"grams": tensors["grams"] * 2}, path, metadata=header)


def _checkpoint(path):
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_truncated, "it is truncated"),
        (_picture, "does not begin like a safetensors file"),
        (_edited, "edited after it was written"),
        (_checkpoint, "it is not a fingerprint"),
    ],
)
def test_a_bad_file_is_refused_and_the_view_stays(explorer, mine, damage, says):
    page = explorer("#layers=1,12,13")
    before = page.locator(SAID).inner_text(), page.evaluate("location.hash")
    damage(mine)
    drop(page, mine)
    page.wait_for_function(f"document.querySelector('{NOTICE}').textContent", timeout=PATIENCE)
    notice = page.locator(NOTICE).inner_text()
    assert notice.startswith("mine.safetensors cannot be shown: ") and says in notice and "elsi calibrate TARGET -o FILE" in notice
    assert (page.locator(SAID).inner_text(), page.evaluate("location.hash")) == before
    page.locator(".elsi-strip button").nth(20).click()
    assert page.locator(NOTICE).inner_text() == "" and chosen(page) == [1, 12, 13, 20]


def test_on_a_phone(site, open_page):
    with open_page(viewport={"width": 360, "height": 740}) as page:
        open_explorer(site, page, "#layers=11,12,29&map=debiased")
        page.locator("summary", has_text="More settings").click()
        page.get_by_text("what its code does").first.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("""[...document.querySelectorAll("#elsi-explorer *")].every((part) =>
          part.getBoundingClientRect().right <= 361)""")
        page.locator('.elsi-wave [data-layer="20"]').click()
        assert 20 in chosen(page)


def test_the_page_answers_while_it_computes(explorer):
    """Stability of an exhaustive search takes long; a click in the middle of it is taken at once and ends it."""
    page = explorer("#method=exhaustive", until="document.querySelector('#elsi-explorer dd progress[aria-label$=redraws]')?.value > 0")
    page.locator(".elsi-strip button").nth(0).click()
    assert 0 in chosen(page)
    assert page.locator("progress[aria-label$=redraws]").count() == 0


def test_a_target_that_arrives_late_leaves_the_view_alone(explorer, page, fp):
    explorer("#method=exhaustive&m=1")
    held = []
    page.route(f"**/explorer/data/{BESIDE}.js", lambda route: held.append(route))
    with page.expect_request(f"**/explorer/data/{BESIDE}.js"):
        page.get_by_label("Target").select_option(BESIDE)
    page.evaluate(f"location.hash = 'target={DEFAULT}&method=exhaustive&m=2'")
    page.wait_for_selector("#elsi-explorer dd progress[aria-label$=redraws]", timeout=PATIENCE)
    with page.expect_event("requestfinished"):
        held.pop().continue_()
    settled(page)
    expected = describe_choice(fp, "exhaustive", 2)
    assert chosen(page) == expected["layers"] and DEFAULT in page.locator(SAID).inner_text()
    assert values(page, "stability")[0] == pytest.approx(expected["stability"]["share"])


def test_a_site_without_fingerprints_says_what_to_do(site, page, mine):
    page.route("**/explorer/data/site.js", lambda route: route.fulfill(
        body='Elsi.data.site({"fingerprints": [], "conventions": {}});', content_type="text/javascript"
    ))  # fmt: skip
    open_explorer(site, page, until="document.querySelector('.elsi-notice').textContent")
    assert "make book" in page.locator(NOTICE).inner_text()
    drop(page, mine)
    page.wait_for_function("document.querySelectorAll('.elsi-strip button').length === 8", timeout=PATIENCE)


def test_without_scripts_the_page_says_what_it_does(site, browser):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto((site / "book" / "explorer.html").as_uri())
        assert page.locator("noscript").count() and "elsi select" in page.locator("article").inner_text()
        assert not page.locator("#elsi-explorer").is_visible()
