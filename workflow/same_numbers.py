"""Whether the code as it stands makes the numbers of an earlier revision, bit for bit: `python workflow/same_numbers.py REV`.

A refusal that is added to a hashed module changes its hash (:mod:`elsi_lib.provenance`) and no number. Where this script finds the
numbers equal, it prints the lines for ``provenance.SAME_NUMBERS`` that keep earlier results current. It calibrates the default target
on a few conversations, whole and in parts, surveys it in all ways, and compares every tensor and table.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(revision: str) -> int:
    """Run both and compare; exit code 0 where all is equal."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder / "then"), revision], check=True)
        try:
            found = {name: _run(code, folder / name) for name, code in (("then", folder / "then"), ("now", ROOT))}
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "then")], check=True)
    then, now = found["then"]["numbers"], found["now"]["numbers"]
    differing = sorted(name for name in then if then[name] != now.get(name))
    for name in differing:
        print(f"differs: {name}")
    for name in sorted(now.keys() - then.keys()):
        print(f"new: {name}")
    print(f"{len(then) - len(differing)} of {len(then)} tensors and tables of {revision} are made today")
    if not differing:
        for part, raw in found["now"]["raw"].items():
            if raw != (old := found["then"]["hashes"][part]):
                print(f'    "{raw}": "{old}",  # {part}')
    return bool(differing)


def _run(code: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Numbers and hashes of one version of the code, in a process of its own that imports that alone."""
    about = {"PYTHONPATH": str(code), "ELSI_RESULTS": str(folder / "results"), "ELSI_CACHE": str(_cache(folder / "cache"))}
    command = [sys.executable, str(Path(__file__).resolve()), "--numbers", str(code)]
    done = subprocess.run(command, env=os.environ | about, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _cache(folder: Path) -> Path:
    """A cache with the targets and data that are here, and without sums that a survey could go on from."""
    from elsi_lib.assets import cache_dir

    folder.mkdir(parents=True)
    for path in cache_dir().glob("*"):
        if path.name not in ("surveys", "studies"):
            (folder / path.name).symlink_to(path)
    return folder


def _numbers(code: Path) -> None:
    """Print, as JSON: hashes of all tensors and tables, and the versions of the code that made them."""
    import elsi_lib

    if not Path(elsi_lib.__file__).is_relative_to(code):
        raise SystemExit(f"{elsi_lib.__file__} was imported, not the code in {code}")
    from elsi_lib import provenance
    from elsi_lib.calibration import Calibration
    from elsi_lib.fingerprint import read_tensors
    from elsi_lib.pipeline import run_calibration, run_part
    from elsi_lib.settings import Settings, results_root
    from elsi_lib.survey import run_survey
    from elsi_lib.tally import FORMAT
    from elsi_lib.targets import load_target

    settings, root = Settings(preset="quick"), results_root()
    target = load_target(settings.target)
    numbers = {}

    def keep(name: str, tensors: dict) -> None:
        for key, tensor in tensors.items():
            numbers[f"{name}: {key}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    keep("calibration", run_calibration(settings, target).tensors)
    parts = [Calibration.load(run_part(settings, (i, 2), target).save(root / f"part{i}")) for i in range(2)]
    parts[0].merge(parts[1])
    keep("merged parts", parts[0].fingerprint().tensors)
    keep("segments", run_calibration(settings, target, reading="segment").tensors)
    folder = run_survey(settings, target)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            keep(path.name, read_tensors(path, FORMAT, "")[0])
        elif path.suffix == ".csv":
            numbers[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    groups = {"calibration": provenance.CALIBRATION_MODULES, "survey": provenance.SURVEY_MODULES, "sums": provenance.SUMS_MODULES}
    versions = provenance.code_version() | provenance.survey_version()
    found = {"numbers": numbers, "hashes": {part: versions[part] for part in groups}}
    if hasattr(provenance, "raw_hash"):
        found["raw"] = {part: provenance.raw_hash(modules) for part, modules in groups.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--numbers"]:
        _numbers(Path(sys.argv[2]))
    elif len(sys.argv) == 2:
        raise SystemExit(main(sys.argv[1]))
    else:
        raise SystemExit(__doc__)
