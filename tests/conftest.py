"""Tests never depend on timing: hypothesis' deadline is off, and its examples are the same in every run.

The site is rendered once for all tests that look at it.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

settings.register_profile("elsi", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("elsi")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The site rendered from the committed results, once for all processes of the run: the finished command, and the pages' folder."""
    out = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        out = out.parent
    out, done = out / "site", out / "site.pickle"
    with FileLock(done.with_suffix(".lock")):
        if not done.is_file():
            command = [sys.executable, ROOT / "workflow" / "build_book.py", "site", "--out", out]
            done.write_bytes(pickle.dumps(subprocess.run(command, capture_output=True, text=True, check=False)))
        return pickle.loads(done.read_bytes()), out / "_build" / "html"


@pytest.fixture(scope="session")
def site(request) -> Path:
    """Folder of the rendered pages; ELSI_SITE may name one that was rendered before, where only its tests are worked on."""
    if "ELSI_SITE" in os.environ:
        return Path(os.environ["ELSI_SITE"]).resolve()
    run, html = request.getfixturevalue("rendered")
    if run.returncode:
        pytest.fail(f"the site does not render:\n{run.stdout[-3000:]}{run.stderr[-6000:]}", pytrace=False)
    return html
