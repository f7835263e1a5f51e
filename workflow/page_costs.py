"""What a calibration and a study of tau cost here, from their passports, and how many operations the paper's targets would take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from page_parts import NOT_HERE, Origin, hardware, study_passport

from elsi_lib.catalogue import ASSETS, HubRepo
from elsi_lib.report.words import markdown_table
from elsi_lib.settings import PRESETS

FLOP = 2  # per parameter and token: one multiplication and one addition
STAGES = {
    "answers": "the target answers prompts, what drafts learn from",
    "training": "all drafts of the table together",
    "questions": "the target answers Spec-Bench",
    "replay": "trees of every draft along these answers",
    "live": "decoding with and without a draft, for seconds",
}


def costs(origin: Origin) -> str:
    """Calibrations and studies that were run, and an estimate for those that were not."""
    return "\n\n".join([calibrations(origin), stages(origin), estimate()])


def calibrations(origin: Origin) -> str:
    """Measured: tokens per second and achieved operations of each calibration that has a fingerprint here."""
    from elsi_lib.fingerprint import Fingerprint

    rows = []
    for path in fingerprints(origin):
        fp = Fingerprint.load(path)
        about, target = fp.passport, fp.passport["target"]
        tokens, seconds, parameters = about["prompts"]["tokens"], about["seconds"], target.get("parameters")
        if not seconds:
            continue
        speed = tokens / seconds
        flops = f"{FLOP * parameters * speed / 1e9:,.0f}" if parameters else ""
        size = f"{parameters / 1e6:,.0f} M" if parameters else ""
        counts = (f"{tokens:,}", target.get("dtype", ""), f"{seconds:,.0f}", f"{speed:,.0f}", flops)
        rows.append((fp.target, size, fp.num_layers, *counts, hardware(about)))
    if not rows:
        return NOT_HERE
    heads = ("target", "parameters", "layers", "tokens", "dtype", "seconds", "tokens/s", "GFLOP/s", "hardware")
    return f"**Calibrations**, measured\n\n{markdown_table(heads, rows, right=(1, 2, 3, 5, 6, 7))}"


def stages(origin: Origin) -> str:
    """Measured: seconds of each stage of the studies behind tables 2 and 3."""
    found = [study_passport(table, origin) for table in ("table2", "table3")]
    studies = [json.loads(path.read_text(encoding="utf-8")) for path in found if path]
    if not studies:
        return f"**A study of tau**: {NOT_HERE}"
    order = {stage: place for place, stage in enumerate(STAGES)}
    taken = {name for about in studies for name in about["seconds"]}
    names = sorted(taken, key=lambda name: (order.get(name.split()[0], len(order)), name))
    rows = []
    for name in names:
        took = [_seconds(about["seconds"].get(name)) for about in studies]
        rows.append((name.replace("=", " = "), STAGES.get(name.split()[0], ""), *took))
    rows.append(("**all**", "", *(_seconds(sum(about["seconds"].values())) for about in studies)))
    whats = []
    for about in studies:
        training, evaluation = about["training"], about["evaluation"]
        whats.append(
            f"{about['target']['name']} on {hardware(about)}: {training['texts']:,} answers, {training['tokens']:,} tokens, for "
            f"training; {evaluation['questions']:,} questions, answers of at most {evaluation['max_new_tokens']} tokens"
        )
    heads = ("stage", "what it does", *(f"{about['target']['name']}, seconds" for about in studies))
    table = markdown_table(heads, rows, right=range(2, len(heads)))
    return f"**Studies of tau**, measured. {'. '.join(whats)}.\n\n{table}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.0f}"


def estimate() -> str:
    """Not measured: operations of a calibration of the paper's targets with the preset ``paper``."""
    samples, length = PRESETS["paper"]["samples"], PRESETS["paper"]["max_tokens"]
    rows = []
    for name, billions in _papers_targets():
        flop = FLOP * billions * 1e9 * samples * length
        rows.append((name, f"{billions:g} billion", f"{samples * length:,}", f"{flop / 1e15:.1f} PFLOP"))
    text = (
        f"**The paper's targets**, an estimate, not measured: {samples} prompts of {length:,} tokens each, an upper bound "
        f"since conversations are shorter; {FLOP} operations per parameter and token, parameters as in the target's name. Divide the "
        "operations by what your own hardware achieves."
    )
    return f"{text}\n\n{markdown_table(('target', 'parameters', 'tokens', 'operations'), rows, right=(1, 2, 3))}"


def _papers_targets() -> Iterator[tuple[str, float]]:
    for asset in ASSETS.values():
        if asset.kind == "target" and isinstance(asset.source, HubRepo):
            name = asset.source.repo.rpartition("/")[2]
            yield name, float(re.search(r"-(\d+(?:\.\d+)?)B\b", name).group(1))


def fingerprints(origin: Origin) -> list[Path]:
    """Fingerprints beside the results: a target that runs only beside another has one and no artefact of its own."""
    roots = {path.parent.parent for path in origin.values() if (path.parent / "fingerprint.safetensors").is_file()}
    return sorted({path for root in roots for path in root.glob("*/fingerprint.safetensors")}, key=lambda path: path.parent.name)
