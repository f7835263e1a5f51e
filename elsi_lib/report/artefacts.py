"""Results on disk: every figure and table with its data and its passport.

A figure is ``name.svg``, ``name.png`` (for screens of double density), ``name.csv`` and ``name.json``; a table is ``name.csv``,
``name.md`` and ``name.json``. The JSON is the passport: parameters, targets, hashes of the inputs, code, environment, seconds, caption
and alternative text. Equal inputs give equal bytes, and no file holds a date or a path.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from elsi_lib.errors import ElsiError
from elsi_lib.files import replaced
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.provenance import code_version, environment, question_version, survey_version, tau_version
from elsi_lib.report.study import file_hashes
from elsi_lib.settings import Settings, find_fingerprint, is_current, project_root, public_name, results_root, target_slug
from elsi_lib.survey import Survey, survey_hashes

FORMAT = "elsi-artefact-1"
SCREEN_DPI = 192  # twice the 96 pixels that browsers give an inch
_QUANTISE_ABOVE = 150_000  # bytes: charts of many lines need no more than 256 colours; the gradients of heat maps stay whole
_WHERE = ("environment", "seconds")  # what differs when another machine, or the same one later, makes the same result


@dataclass(frozen=True, eq=False)
class Artefact:
    """A saved figure or table; shows itself in a notebook as it lies on disk.

    Attributes:
        name: such as ``figure2``.
        folder: where its files are.
        passport: see :func:`save_figure`.
    """

    name: str
    folder: Path
    passport: dict[str, Any]

    def path(self, suffix: str) -> Path:
        """One of its files, e.g. ``path("svg")``."""
        return self.folder / f"{self.name}.{suffix}"

    @property
    def status(self) -> str:
        """See :func:`status`."""
        return status(self.path("json"))

    def __repr__(self) -> str:
        return ", ".join(sorted([*self.passport["files"], f"{self.name}.json"]))

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        if not (path := self.path("png")).is_file():
            return None
        data = path.read_bytes()
        return data, {"width": int.from_bytes(data[16:20], "big") // 2}

    def _repr_markdown_(self) -> str | None:
        return path.read_text(encoding="utf-8") if (path := self.path("md")).is_file() else None


def save_figure(
    fig: Figure,
    name: str,
    data: pd.DataFrame,
    settings: Settings,
    fingerprints: Sequence[Fingerprint | None],
    *,
    caption: str,
    alt: str,
    results: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    study: str | Path | None = None,
    question: str | None = None,
    surveys: Sequence[Survey | None] = (),
) -> Artefact:
    """Write a figure, the numbers it draws and its passport to ``settings.shown``.

    Args:
        fig: the figure.
        name: file name without suffix.
        data: the numbers drawn, one row per mark; written with all digits of its type.
        settings: of this run.
        fingerprints: what the numbers were computed from: this run's target, and for results that compare two targets the one
            beside it, None where there is none.
        caption: what the figure shows, readable alone.
        alt: what a reader who does not see it should know.
        results: further numbers for the passport, e.g. compartments.
        seconds: time the computation took; by default ``data.attrs["seconds"]``, where the measures leave it.
        study: folder of the study that the numbers were computed from too, see :mod:`elsi_lib.report.study`.
        question: module of :mod:`elsi_lib.report.questions` that made the numbers; the result is stale when its code changes.
        surveys: those that the numbers were computed from too, see :mod:`elsi_lib.survey`; None is passed over.

    Raises:
        ElsiError: no caption or alternative text, a name that is not a file name, or a disk that cannot be written.
    """
    if not alt.strip():
        raise ElsiError(f"{name} has no alternative text: say what a reader who does not see it should know")
    files = {f"{name}.svg": _render(fig, "svg"), f"{name}.png": _render(fig, "png"), f"{name}.csv": _csv(data)}
    seconds = seconds or data.attrs.get("seconds")
    return _save(name, files, settings, fingerprints, {"caption": caption, "alt": alt}, results, seconds, study, question, surveys)


def save_table(
    df: pd.DataFrame,
    name: str,
    settings: Settings,
    fingerprints: Sequence[Fingerprint | None],
    *,
    caption: str,
    markdown: str | None = None,
    results: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    study: str | Path | None = None,
    question: str | None = None,
    surveys: Sequence[Survey | None] = (),
) -> Artefact:
    """Write a table as CSV, as Markdown for pages, and its passport; arguments as for :func:`save_figure`.

    Args:
        markdown: how pages show it; by default all of ``df``.
    """
    text = df.to_markdown(index=False) if markdown is None else markdown
    files = {f"{name}.csv": _csv(df), f"{name}.md": (text.rstrip("\n") + "\n").encode()}
    seconds = seconds or df.attrs.get("seconds")
    return _save(name, files, settings, fingerprints, {"caption": caption}, results, seconds, study, question, surveys)


def load_artefact(name: str, settings: Settings) -> Artefact:
    """A result that was saved before.

    Raises:
        ElsiError: it was not.
    """
    path = settings.shown / f"{name}.json"
    if not path.is_file():
        raise ElsiError(f"no {name} in results of {settings.shown_name}: run the notebook that makes it")
    return Artefact(name, path.parent, json.loads(path.read_text(encoding="utf-8")))


def status(passport: str | Path) -> str:
    """What a reader should know before trusting a result.

    Args:
        passport: path of its JSON.

    Returns:
        - ``"not run here"``: there is no such result;
        - ``"stale"``: the method's code, an input (fingerprint, study) or a file of the result has changed since;
        - ``"measured"``: made in this run's results folder, on a machine like this one;
        - ``"cached"``: made elsewhere, and still current.
    """
    path = Path(passport)
    if not path.is_file():
        return "not run here"
    about = json.loads(path.read_text(encoding="utf-8"))
    if about.get("format") != FORMAT or any(about["code"].get(part) != code_version()[part] for part in ("method", "report")):
        return "stale"
    if any(_sha256(path.parent / name) != sha for name, sha in about["files"].items()):
        return "stale"
    if any(entry and entry["code"].get("calibration") != code_version()["calibration"] for entry in about["inputs"]):
        return "stale"
    recorded = [entry and entry["fingerprint"] for entry in about["inputs"]]
    if recorded != _current_inputs(about, path.parent)[: len(recorded)]:
        return "stale"
    if "study" in about and not _study_current(about, path.parent):
        return "stale"
    if "question" in about and not _question_current(about):
        return "stale"
    if "surveys" in about and not _surveys_current(about, path.parent):
        return "stale"
    here = path.resolve().is_relative_to(results_root().resolve()) and about["environment"] == environment()
    return "measured" if here else "cached"


def beside_fingerprint(settings: Settings) -> Fingerprint | None:
    """Fingerprint of the second target under the same calibration, or None; a model is never run for it."""
    if not settings.beside:
        return None
    found = find_fingerprint(settings.for_target(settings.beside))
    return found[1] if found and settings.for_target(settings.beside).run_name != settings.run_name else None


def run_line(settings: Settings, fp: Fingerprint, state: str, *beside: Fingerprint | None) -> str:
    """One or two lines on what a notebook computes from: prompts, fingerprint, its status, and the target beside it.

    Args:
        state: of the fingerprint, from :func:`~elsi_lib.pipeline.obtain_fingerprint`.
        beside: from :func:`beside_fingerprint`, in notebooks that compare two targets; where the settings name a second one and
            there is no fingerprint of it, a line says so.
    """
    lines = [_fingerprint_line(fp, state)]
    for second in filter(None, beside):
        lines.append("beside " + _fingerprint_line(second, "cached" if is_current(second) else "stale"))
    if beside == (None,) and settings.beside and settings.for_target(settings.beside).run_name != settings.run_name:
        lines.append(
            f"beside {settings.beside}: not shown, no fingerprint of this calibration; run this notebook once with "
            f'target = "{settings.beside}" to make it'
        )
    return "\n".join(lines)


def _fingerprint_line(fp: Fingerprint, state: str) -> str:
    used = fp.passport["prompts"]["used"]
    return f"{fp.target}: {used} prompts, {fp.num_layers} layers, fingerprint {fp.sha256[:8]}, {state}"


def _save(name, files, settings, fingerprints, texts, results, seconds, study, question, surveys) -> Artefact:
    if not texts["caption"].strip():
        raise ElsiError(f"{name} has no caption: say what it shows")
    if not fingerprints or fingerprints[0] is None:
        raise ElsiError(f"{name} names no fingerprint it was computed from")
    if Path(name).name != name or not name:
        raise ElsiError(f"artefact name {name!r}: a plain file name without folder is expected")
    parameters = {**asdict(settings), "samples": settings.size("samples"), "prompts": settings.calibration()["source"]}
    # A target given as a path goes by its folder of results: a passport holds no path of the machine it was made on.
    parameters |= {name: public_name(given) if (given := parameters[name]) else "" for name in ("target", "beside")}
    passport = {
        "format": FORMAT,
        "name": name,
        **texts,
        "parameters": parameters,
        "run": settings.run_name,
        "inputs": [fp and _about_input(fp) for fp in fingerprints],
        "files": {file: hashlib.sha256(content).hexdigest() for file, content in files.items()},
        "results": _plain(results or {}),
        "code": code_version(),
        "environment": environment(),
        "seconds": None if seconds is None else round(seconds, 2),
    }
    if study is not None:
        passport |= {"study": {"folder": Path(study).name, "files": file_hashes(study)}, "code": passport["code"] | tau_version()}
    if question is not None:
        passport |= {"question": question, "code": passport["code"] | question_version(question)}
    if any(surveys):
        about = {survey.folder.parent.name.partition("@")[0]: survey_hashes(survey.folder) for survey in surveys if survey}
        passport |= {"surveys": about, "code": passport["code"] | survey_version()}
    folder = settings.shown
    path = folder / f"{name}.json"
    old = _read(path)
    if old is not None and _what(old) == _what(passport) and status(path) in ("measured", "cached"):
        return Artefact(name, folder, old)  # the same result again: its passport keeps saying where it was first made
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # last to come back: a run that is cut leaves no passport for files it does not describe
        for file, content in files.items():
            _write(folder / file, content)
        _write(path, (json.dumps(passport, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise ElsiError(f"{name} cannot be written to {folder} ({error.strerror}): free space or set ELSI_RESULTS") from error
    return Artefact(name, folder, passport)


def _about_input(fp: Fingerprint) -> dict[str, Any]:
    about = fp.passport
    return {
        "target": about["target"].get("name"),
        "revision": about["target"].get("revision"),
        "fingerprint": fp.sha256,
        "prompts": about["prompts"].get("sha256"),
        "prompts_used": about["prompts"].get("used"),
        "code": about["code"],
    }


def _current_inputs(about: dict[str, Any], folder: Path) -> list[str | None]:
    """Hashes of the fingerprints, this run's and the one beside, that stand next to the result or where a run looks for them."""
    settings = Settings(**about["parameters"])
    hashes: list[str | None] = []
    for target in (settings.target, settings.beside):
        run = _run_of(about, target) if target else ""
        sibling = folder.parent / run / "fingerprint.safetensors"
        if not target or (hashes and run == about["run"]):
            hashes.append(None)
        elif sibling.is_file():
            hashes.append(Fingerprint.load(sibling).sha256)
        else:
            found = find_fingerprint(settings.for_target(target))
            hashes.append(found[1].sha256 if found else None)
    return hashes


def _run_of(about: dict[str, Any], target: str) -> str:
    """Name of the run of another target with what this result's run has apart from its own."""
    return target_slug(target) + "".join(about["run"].partition("@")[1:])


def _part_of_run(folder: Path, run: str, part: str) -> Path | None:
    """A folder of a run, such as its study: from the results that ``folder`` is one of, else from those committed with the project."""
    roots = [folder.parent, *([root / "data" / "results"] if (root := project_root()) else [])]
    return next((place for root in roots if (place := root / run / part).is_dir()), None)


def _study_current(about: dict[str, Any], folder: Path) -> bool:
    """Whether the study that stands next to the result, or with the project, is still the one it was made of, by today's code."""
    found = _part_of_run(folder, about["run"], about["study"]["folder"])
    same = found is not None and about["study"]["files"] == file_hashes(found)
    return same and about["code"].get("tau") == tau_version()["tau"]


def _question_current(about: dict[str, Any]) -> bool:
    """Whether today's code still has the question and is the code that answered it."""
    try:
        return about["code"].get("question") == question_version(about["question"])["question"]
    except ElsiError:
        return False


def _surveys_current(about: dict[str, Any], folder: Path) -> bool:
    """Whether the surveys beside the results, or with the project, are still those the result was made of, by today's code."""
    for target, files in about["surveys"].items():
        found = _part_of_run(folder, _run_of(about, target), "survey")
        if found is None or files != survey_hashes(found):
            return False
    return about["code"].get("survey") == survey_version()["survey"]


def _what(passport: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(passport)).items() if name not in _WHERE}


def _render(fig: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "elsi", "svg.fonttype": "path", "savefig.bbox": None}):
        fig.savefig(buffer, format=kind, dpi=SCREEN_DPI, metadata=metadata, facecolor="white")
    if kind == "svg" or buffer.tell() < _QUANTISE_ABOVE:
        return buffer.getvalue()
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def _csv(df: pd.DataFrame) -> bytes:
    return df.to_csv(index=False, lineterminator="\n").encode()


def _plain(value: Any) -> Any:
    """Python types of a nested result; NaN, which JSON does not have, becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write(path: Path, content: bytes) -> None:
    with replaced(path) as part:
        part.write_bytes(content)
