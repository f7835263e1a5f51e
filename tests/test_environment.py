"""One list of versions: the lock, and conda's file that refers to it, satisfy what pyproject.toml asks for."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
LOCKED = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LOCK)}


def asked() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        project["build-system"]["requires"],
    ]
    return [Requirement(text) for given in lists for text in given]


def test_lock_is_exact_and_of_no_one_machine():
    for line in LOCK:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9a-z.!]*", line), line
    assert len(LOCKED) == len(LOCK)
    assert sorted(LOCK, key=str.lower) == LOCK


@pytest.mark.parametrize("requirement", asked(), ids=str)
def test_lock_satisfies_pyproject(requirement):
    assert requirement.name in LOCKED or canonicalize_name(requirement.name) in LOCKED
    assert Version(LOCKED[canonicalize_name(requirement.name)]) in requirement.specifier


def test_lock_is_closed():
    """Whatever a locked package needs on this Python and platform is locked too, in a version that it accepts."""
    checked = 0
    for name in LOCKED:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform, or this environment is not made from the lock
            continue
        for need in map(Requirement, needs):
            of_torch = name == "torch" and re.match("nvidia|cuda|triton", need.name)
            if of_torch or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            checked += 1
            assert canonicalize_name(need.name) in LOCKED, f"{name} needs {need}"
            assert need.specifier.contains(LOCKED[canonicalize_name(need.name)], prereleases=True), f"{name} needs {need}"
    assert checked > 100


def test_conda_gets_the_lock_itself():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    *packages, pip = conda["dependencies"]
    assert packages == ["python=3.11", "pip"]
    assert pip == {"pip": ["-r requirements.lock", "-e ."]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert Version("3.11") in Requirement(f"python{project['project']['requires-python']}").specifier


def test_lock_writer_names_this_environment(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "workflow")
    from write_lock import lock

    lines = [line for line in lock().splitlines() if not line.startswith("#")]
    assert "torch==" + metadata.version("torch").partition("+")[0] in lines
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[^+ ]+", line) for line in lines)
    assert not any(line.lower().startswith(("pip==", "elsi")) for line in lines)


def test_no_suitable_python_is_said_clearly():
    found = subprocess.run(
        [ROOT / "workflow" / "find_python", "--version"],
        env={"PYTHON": "/nowhere/python", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "Python 3.11 or newer is needed" in found.stderr and "PYTHON=" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_find_python_runs_what_it_is_given():
    found = subprocess.run(
        [ROOT / "workflow" / "find_python", "-c", "print(6 * 7)"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "42\n"


def test_licence_and_citation():
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"] == "Apache-2.0"
    assert any("2610.12939" in reference["url"] for reference in citation["references"])
