"""Tests never depend on timing: hypothesis' deadline is off, and its examples are the same in every run.

The site is rendered once for all tests that look at it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("elsi", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("elsi")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The site rendered from the committed results: the finished command, and the folder of its pages."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "workflow" / "build_book.py", "site", "--out", out]
    return subprocess.run(command, capture_output=True, text=True, check=False), out / "_build" / "html"


@pytest.fixture(scope="session")
def site(request) -> Path:
    """Folder of the rendered pages; ELSI_SITE may name one that was rendered before, where only its tests are worked on."""
    if "ELSI_SITE" in os.environ:
        return Path(os.environ["ELSI_SITE"]).resolve()
    run, html = request.getfixturevalue("rendered")
    if run.returncode:
        pytest.fail(f"the site does not render:\n{run.stdout[-3000:]}{run.stderr[-6000:]}", pytrace=False)
    return html
