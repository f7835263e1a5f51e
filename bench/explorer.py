"""The layer explorer in a browser, on a fingerprint of 36 layers: `make bench`.

(i) from a click on a layer to the frame that shows the set's entropy;                goal: within 50 ms
(j) from asking for the best of all 7,140 triples to the frame that shows it;          goal: within 2 s

Beside (j) stands the library's own search on one thread, in the same run. Both need a Chromium and a rendered site (`make site`);
where one is missing that is said. Numbers, not a test.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Page, sync_playwright

from elsi_lib.fingerprint import Fingerprint
from elsi_lib.selection import exhaustive

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests")]  # of the two files named conftest.py the browser's
from conftest import NO_BROWSER, QUIET, find_browser  # noqa: E402
from synthetic import fingerprint as synthetic  # noqa: E402

PAGE = ROOT / "_build" / "html" / "book" / "explorer.html"
LAYERS, REPEATS = 36, 5
PATIENCE = 120_000  # milliseconds
READY = "document.querySelector('#elsi-explorer').dataset.state === 'ready'"
# Frames until the sentence on the set has changed and holds a number, then to the end of the frame that shows it.
SHOWN = """
const said = () => document.querySelector(".elsi-said").textContent;
const frame = () => new Promise(requestAnimationFrame);
async function timed(act, done) {
  const start = performance.now();
  act();
  while (!done(said())) await frame();
  await new Promise((end) => setTimeout(end)); // this frame is painted before a timer runs
  return performance.now() - start;
}
"""
CLICK = f"""async (button) => {{ {SHOWN}
  const before = said();
  return timed(() => button.click(), (now) => now !== before && now.includes("nats"));
}}"""
SEARCH = f"""async (method) => {{ {SHOWN}
  return timed(() => {{ location.hash = method; }}, (now) => now.includes("trying all sets") && now.includes("nats"));
}}"""


def open_fingerprint(page: Page, path: Path) -> str:
    """Show a file's fingerprint; gives its name in the address."""
    page.goto("about:blank")
    page.goto(PAGE.as_uri())
    page.wait_for_function(READY, timeout=PATIENCE)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open your own fingerprint").click()
    chooser.value.set_files(path)
    page.wait_for_function(f"document.querySelectorAll('.elsi-strip button').length === {LAYERS}", timeout=PATIENCE)
    page.wait_for_function(READY, timeout=PATIENCE)
    return page.evaluate("new URLSearchParams(location.hash.slice(1)).get('target')")


def milliseconds(values: list[float]) -> str:
    return f"{np.median(values):,.0f} ms ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    browser_path = find_browser()
    if browser_path is None:
        return print(f"(i), (j) not measured: {NO_BROWSER}")
    if not PAGE.is_file():
        return print(f"(i), (j) not measured: {PAGE.relative_to(ROOT)} is not there, `make site` renders it")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        made = synthetic(layers=LAYERS, hidden=48, prompts=5, length=220, block=32, bootstrap=4, name="deep")
        path = made.save(Path(folder, "deep.safetensors"))
        browser = playwright.chromium.launch(executable_path=browser_path, args=list(QUIET))
        page = browser.new_page()
        searches, clicks = [], []
        for _ in range(REPEATS):  # a page of its own each time: it remembers what it has computed
            target = open_fingerprint(page, path)
            searches.append(page.evaluate(SEARCH, f"target={target}&method=exhaustive"))
            page.wait_for_function(READY, timeout=PATIENCE)
        for button in page.locator(".elsi-strip button").all()[::3]:
            clicks.append(page.evaluate(CLICK, button.element_handle()))
            page.wait_for_function(READY, timeout=PATIENCE)
        browser.close()
        fp = Fingerprint.load(path)
        torch.set_num_threads(1)
        own = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            exhaustive(fp, 3)
            own.append(1000 * (time.perf_counter() - start))
    print(f"(i) a click on a layer of {LAYERS}, shown after {milliseconds(clicks)}; goal within 50 ms")
    print(f"(j) best of all triples of {LAYERS} layers shown after {milliseconds(searches)}; goal within 2,000 ms")
    ratio = np.median(searches) / np.median(own)
    print(f"    the library's search on one thread: {milliseconds(own)}; explorer / library {ratio:.1f}")


if __name__ == "__main__":
    main()
