"""Where a result came from: code, packages, hardware. The part of a passport that every result shares."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from elsi_lib.errors import ElsiError

# A change to one of these modules can change a number; prose, plots and the command line cannot.
CALIBRATION_MODULES = (
    *("filtering", "blocks", "entropy", "calibration", "fingerprint"),
    *("prompts", "conversations", "repair", "targets", "loading"),
)
METHOD_MODULES = (*CALIBRATION_MODULES, "cka", "selection")
SPECULATIVE_MODULES = tuple(
    f"speculative.{name}"
    for name in ("draft", "vocabulary", "attention", "loss", "distill", "noise", "dialogue", "generate", "answers")
    + ("tree", "lazy_tree", "replay", "decode", "grid")
)
REPORT_MODULES = ("report.measures", "report.tables", "report.findings")
SUMS_MODULES = ("tally", "corpora", "probe")
SURVEY_MODULES = (*SUMS_MODULES, "jackknife", "survey")
TAU_MODULES = ("report.tau", "report.study", "report.tau_tables", "report.tau_measures", "report.tau_findings")
# Code now -> the earlier code that makes the same numbers, bit for bit: what was measured by that is not stale. An edit of a
# module changes its hash even where it only adds a refusal; `python workflow/same_numbers.py REV` compares and prints these lines.
SAME_NUMBERS = {
    "3b1e9fea6d1506d7": "dbd31ca9f5639a3e",  # calibration
    "5f7cf70e91ca457a": "46550519a5057760",  # survey
}
PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors")


@cache
def code_version() -> dict[str, str]:
    """Version of the library and hashes of its code, which comments and docstrings do not change.

    ``calibration`` covers what a fingerprint depends on, ``method`` that and the selection, ``speculative`` drafts and tau,
    ``report`` what makes figures and tables of it: a figure may be stale where the fingerprint under it is not.
    """
    return {
        "elsi_lib": metadata.version("elsi-lib"),
        "calibration": _hash_of(CALIBRATION_MODULES),
        "method": _hash_of(METHOD_MODULES),
        "speculative": _hash_of(SPECULATIVE_MODULES),
        "report": _hash_of(REPORT_MODULES),
    }


@cache
def tau_version() -> dict[str, str]:
    """Hash of the code that makes tables 2 and 3 and their figures of a study's results, as in :func:`code_version`."""
    return {"tau": _hash_of(TAU_MODULES)}


@cache
def survey_version() -> dict[str, str]:
    """Hashes of the code that makes a survey, and of that alone which its sums over prompts depend on; as in :func:`code_version`."""
    return {"survey": _hash_of(SURVEY_MODULES), "sums": _hash_of(SUMS_MODULES)}


@cache
def question_version(name: str) -> dict[str, str]:
    """Hash of the code of one open question, :mod:`elsi_lib.report.questions`, and of the criteria that questions share.

    Raises:
        ElsiError: no such question.
    """
    if not (Path(__file__).parent / "report" / "questions" / f"{name}.py").is_file():
        raise ElsiError(f"question {name!r}: no module of that name in elsi_lib/report/questions")
    return {"question": _hash_of((f"report.questions.{name}", "criteria"))}


def _hash_of(modules: tuple[str, ...]) -> str:
    raw = raw_hash(modules)
    return SAME_NUMBERS.get(raw, raw)


def raw_hash(modules: tuple[str, ...]) -> str:
    """Hash of modules of elsi_lib as they stand, named from there (``report.tau``), without comments and docstrings."""
    digest = hashlib.sha256()
    for name in modules:
        tree = ast.parse((Path(__file__).parent / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                body.pop(0)
        digest.update(_dump(tree).encode())
    return digest.hexdigest()[:16]


def _dump(node: Any) -> str:
    """A syntax tree as text that every Python version writes alike: ``ast.dump`` shows empty fields in some and not in others."""
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    present = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in present)})"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def environment() -> dict[str, Any]:
    """Python and package versions, processor, cores and memory; no host name and no paths."""
    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "hardware": _hardware(),
    }


def _hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    if torch.cuda.is_available():
        found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
