"""Pages as a browser shows them: an installed Chromium, driven by playwright, which here never downloads one.

Nothing outside the site may be asked for: every request that does not go to the site is aborted, and fails the test.
"""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (  # no sandbox: containers run tests as root; and a browser that asks no one for anything
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
# Left behind for another page; a script where scripts are off.
EXPECTED = ("net::ERR_ABORTED", "csp")
NO_BROWSER = "no Chromium found: install one (Debian: apt-get install chromium) or name it in ELSI_CHROMIUM"


def find_browser() -> str | None:
    """Path of an installed Chromium; ELSI_CHROMIUM goes first."""
    given = os.environ.get("ELSI_CHROMIUM")
    return given if given and Path(given).is_file() else next(filter(None, map(shutil.which, NAMES)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests last: playwright's event loop runs until the session ends, and no other can be started beside it."""
    items.sort(key=lambda item: Path(__file__).parent in item.path.parents)


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} browser tests were skipped, {NO_BROWSER}")


class Watched:
    """What pages of a context do that a test should know: messages of errors, requests that leave the site, broken files."""

    def __init__(self, context: BrowserContext) -> None:
        self.errors: list[str] = []
        self.external: list[str] = []
        context.route("**/*", self._route)
        context.on("page", self._page)

    def _route(self, route) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("file", "data", "blob") or address.hostname in ("localhost", "127.0.0.1"):
            route.continue_()
        else:
            self.external.append(route.request.url)
            route.abort()

    def _page(self, page: Page) -> None:
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("requestfailed", self._failed)

    def _failed(self, request) -> None:
        if request.failure not in EXPECTED and request.url not in self.external:
            self.errors.append(f"{request.url}: {request.failure}")

    def check(self) -> None:
        """Fail where anything was noted."""
        assert not self.external, f"asked for, outside of the site: {self.external}"
        assert not self.errors, f"errors: {self.errors}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    path = find_browser()
    if path is None:
        pytest.skip(NO_BROWSER)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield running
        running.close()


@contextmanager
def watched_page(browser: Browser, **options) -> Iterator[Page]:
    """A page of a fresh context; at its end it must have caused no error and asked for nothing outside of the site."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options) as context:
        watched = Watched(context)
        yield context.new_page()
    watched.check()


@pytest.fixture
def page(browser) -> Iterator[Page]:
    """A page of its own for one test, see :func:`watched_page`."""
    with watched_page(browser) as shown:
        yield shown


@pytest.fixture
def open_page(browser) -> Callable[..., AbstractContextManager[Page]]:
    """Pages of other contexts, e.g. ``with open_page(java_script_enabled=False, viewport={"width": 360, "height": 640}) as page``."""
    return functools.partial(watched_page, browser)


@pytest.fixture(scope="session")
def served(site) -> Iterator[str]:
    """Address of the site over HTTP on this machine, for what browsers refuse to files: ends with a slash."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()
