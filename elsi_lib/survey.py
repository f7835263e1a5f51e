"""A survey: one pass of the target over more prompts, summed up in many ways at once, for the questions that the paper leaves open.

A calibration takes one share of positions, one size of block, one kind of text. A survey keeps the representatives of many such
choices from the same forward passes, so that they differ in the choice alone: shares, blocks, the other reading of block averages,
positions of outlying norm left out, groups of prompts of every size, and other kinds of text. It also measures what rival criteria
need: block influence (ShortGPT) and a ridge probe. Results are small and lie in ``survey`` beside the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from elsi_lib.assets import cache_dir, sha256_file
from elsi_lib.calibration import kept_positions_needed
from elsi_lib.corpora import CORPORA, load_corpus
from elsi_lib.errors import ElsiError
from elsi_lib.files import replaced
from elsi_lib.fingerprint import Fingerprint, read_tensors, write_tensors
from elsi_lib.jackknife import LeaveOneOut, M, judged, left_out, read_left_out, write_left_out
from elsi_lib.pipeline import measured_or_cached, prepare
from elsi_lib.probe import all_sets, probe_sets
from elsi_lib.provenance import code_version, environment, survey_version
from elsi_lib.selection import elsi, exhaustive
from elsi_lib.settings import Settings, results_root, results_roots, same_target
from elsi_lib.tally import DEFAULT, FORMAT, GROUP, Choice, Tally, choices, samples, sum_up
from elsi_lib.targets import Target, load_target

FILES = (
    "variants.safetensors", "corpora.safetensors", "left_out.safetensors",
    "samples.csv", "influence.csv", "probe.csv", "passport.json",
)  # fmt: skip
_GROUPS = 40  # of a kind of text at most, each of which is left out in turn


@dataclass(frozen=True)
class Survey:
    """Results of a survey.

    Attributes:
        folder: where they lie.
        status: "measured", "cached" or "stale", as for a fingerprint.
        variants: name (see :func:`~elsi_lib.tally.choices`) -> fingerprint of the filtered variants: grams only, no bootstrap.
        corpora: name (see :data:`~elsi_lib.corpora.CORPORA`) -> the same for another kind of text.
        left_out: name -> that text without each of its prompts. The sets judged there are those of three that ELSI takes on each of
            the corpora, in their order, then the best of all. Kinds of text with one prompt have none.
        samples: choices made from disjoint groups of prompts of each size: columns size, group, first_position, m, layers, entropy,
            rank and regret (of the set among all, judged on all prompts together), eagle3 (entropy of EAGLE-3's set on the group).
        influence: columns layer, influence (1 - mean cosine of a block's input and output, ShortGPT), error (standard error over
            prompts), prompts.
        probe: columns layers, r2_same, r2_next, see :func:`~elsi_lib.probe.probe_sets`.
        passport: target, prompts of each part, code, environment, seconds.
    """

    folder: Path
    status: str
    variants: dict[str, Fingerprint]
    corpora: dict[str, Fingerprint]
    left_out: dict[str, LeaveOneOut]
    samples: pd.DataFrame
    influence: pd.DataFrame
    probe: pd.DataFrame
    passport: dict[str, Any]

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.passport["target"]["name"]


def survey_folder(settings: Settings) -> Path:
    """Where a survey's results go."""
    return settings.output / "survey"


def survey_hashes(folder: str | Path) -> dict[str, str]:
    """File name -> sha256 of a survey's files that are there."""
    paths = [path for name in FILES if (path := Path(folder) / name).is_file()]
    return {path.name: sha256_file(path) for path in paths}


def find_survey(settings: Settings) -> Survey | None:
    """The survey of these settings, from this run's results, else from those committed with the project; None if there is none.

    One whose passport states another target, other prompts or other parameters is passed over.
    """
    name = survey_folder(settings).relative_to(results_root())
    for folder in (root / name for root in results_roots()):
        if all((folder / file).is_file() for file in FILES):
            survey = load_survey(folder)
            if _is_of(survey.passport, settings):
                return survey
    return None


def _is_of(passport: dict[str, Any], settings: Settings) -> bool:
    wanted = settings.calibration()
    held = passport["parameters"] | {"source": passport["parts"]["variants"]["prompts"]["source"]}
    same = all(held[name] == wanted[name] for name in ("rho", "block", "seed", "source"))
    return same and same_target(passport["target"], settings.target)


def obtain_survey(settings: Settings) -> Survey:
    """The survey of these settings, made now if there is none (minutes to an hour)."""
    return find_survey(settings) or load_survey(run_survey(settings))


def beside_survey(settings: Settings) -> Survey | None:
    """Survey of the second target, or None; a model is never run for it."""
    return find_survey(settings.for_target(settings.beside)) if settings.beside else None


def survey_line(*surveys: Survey | None) -> str:
    """A line on each survey: target, prompts, status."""
    lines = []
    for survey in filter(None, surveys):
        parts = survey.passport["parts"]
        seen = parts["variants"]["seen"]
        more = f" ({seen + parts['samples']['seen']:,} in groups)" if "samples" in parts else ""
        lines.append(f"{survey.target}: survey of {seen} prompts{more}, {len(survey.corpora)} corpora, {survey.status}")
    return "\n".join(lines)


def load_survey(folder: str | Path) -> Survey:
    """Read a survey's results.

    Raises:
        ElsiError: a file is missing, damaged, or of another kind.
    """
    folder = Path(folder)
    if missing := [file for file in FILES if not (folder / file).is_file()]:
        raise ElsiError(f"no survey in {folder}: {', '.join(missing)} missing; run the notebook of the question")
    code = code_version() | survey_version()
    try:
        passport = json.loads((folder / "passport.json").read_text(encoding="utf-8"))
        passport["target"]["name"], passport["parameters"], passport["parts"]["variants"]["prompts"]
        stale = any(passport["code"].get(part) != code[part] for part in ("calibration", "survey"))
        samples, probe = (pd.read_csv(folder / name, dtype={"layers": str}) for name in ("samples.csv", "probe.csv"))
        influence = pd.read_csv(folder / "influence.csv")
    except (ValueError, KeyError, TypeError) as error:
        raise ElsiError(f"the survey in {folder} is damaged ({error}): delete it and run the notebook of the question") from error
    return Survey(
        folder,
        "stale" if stale else measured_or_cached(folder, passport),
        _read_grams(folder / "variants.safetensors"),
        _read_grams(folder / "corpora.safetensors"),
        read_left_out(folder / "left_out.safetensors"),
        samples,
        influence,
        probe,
        passport,
    )


def run_survey(
    settings: Settings,
    target: Target | None = None,
    *,
    in_every_way: int | None = None,
    in_groups: int | None = None,
    of_each_corpus: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make a survey. A run that was cut goes on from the last of its sums.

    Args:
        settings: which target, prompts and preset.
        target: already loaded, to save the time.
        in_every_way: prompts summed up in all ways, where that is not the preset's ``survey_samples``; the passport counts them.
        in_groups: prompts summed up in the default way alone, by groups, where that is not the preset's ``stability_samples``; those
            above are the first of them.
        of_each_corpus: prompts of each kind of text, where that is not the preset's ``corpus_samples``.
        say: told what begins.

    Returns:
        The folder of the results.

    Raises:
        ElsiError: prompts too short for any block.
        AssetError: the target or the prompts cannot be fetched. A corpus that cannot be had is left out, and the passport says why.
    """
    target = target or load_target(settings.target)
    ways = in_every_way or settings.size("survey_samples")
    _, prompts, about = prepare(replace(settings, samples=max(ways, in_groups or settings.size("stability_samples"))), target)
    prompts, more = prompts[:ways], prompts[ways:]
    prefix = len(os.path.commonprefix([prompt.ids for prompt in prompts]))
    named = choices(settings, prefix)
    work = cache_dir() / "surveys" / settings.run_name / _identity(settings, target, about)
    say(f"surveying {len(prompts)} prompts in {len(named)} ways")
    tally = Tally(target, named, group=GROUP, probe=-(-settings.size("probe_tokens") // len(prompts)), seed=settings.seed)
    seconds = {"variants": sum_up(tally, prompts, work / "variants.safetensors")}
    parts: dict[str, Any] = {"variants": tally.about() | {"prompts": about}}
    groups = tally.groups
    if more:
        say(f"surveying {len(more)} more prompts in groups")
        further = Tally(target, {DEFAULT: named[DEFAULT]}, group=GROUP)
        seconds["samples"] = sum_up(further, more, work / f"samples-from-{len(prompts)}.safetensors")
        parts["samples"] = further.about()
        groups = [*groups, *further.groups]
    grams = tally.fingerprints()
    folder = survey_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    found = _survey_corpora(settings, target, named[DEFAULT], of_each_corpus or settings.size("corpus_samples"), work, folder, say)
    parts, seconds = parts | found[0], seconds | found[1]
    say("probing layer sets")
    started = time.perf_counter()
    probed = probe_sets(tally.probe, all_sets(target.num_layers))
    seconds["probe"] = round(time.perf_counter() - started, 1)
    _write_grams(folder / "variants.safetensors", grams)
    for name, frame in (("samples", samples(groups)), ("influence", tally.influence()), ("probe", probed)):
        with replaced(folder / f"{name}.csv") as part:
            frame.to_csv(part, index=False, float_format="%.9g")
    passport = {
        "target": target.describe(),
        "parameters": {"rho": settings.rho, "block": settings.block, "seed": settings.seed}
        | {"corpus_tokens": _longest(settings, target)},
        "parts": parts,
        "ridge": probed.attrs["ridge"],
        "probe": {"positions": sum(part.shape[1] for part in tally.probe.states), "prompts": len(tally.probe.states)},
        "seconds": seconds,
        "code": code_version() | survey_version(),
        "environment": environment(),
    }
    with replaced(folder / "passport.json") as part:
        part.write_text(json.dumps(passport, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def _survey_corpora(
    settings: Settings, target: Target, choice: Choice, count: int, work: Path, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Sum up ``count`` prompts of each kind of text, with and without each; writes both files to ``folder``. Gives what the passport
    says of each part, and seconds."""
    parts, seconds, corpora, grams = {}, {}, {}, {}
    needed, longest = kept_positions_needed(settings.rho, settings.block), _longest(settings, target)
    for name in CORPORA:
        try:
            texts = load_corpus(
                name, target, count, seed=settings.seed, max_tokens=longest, min_tokens=needed, prompts=settings.prompts
            )  # fmt: skip
        except ElsiError as error:  # not fetched, or no text of that length
            parts[name] = {"not run": re.split(": (?:set|lower) ", str(error))[0]}
            continue
        say(f"surveying {len(texts)} prompts of {name}")
        one = Tally(target, {name: choice}, group=-(-len(texts) // _GROUPS))
        seconds[name] = sum_up(one, texts, work / f"{name.replace(' ', '-')}.safetensors")
        parts[name] = one.about()
        corpora |= one.fingerprints()
        grams[name] = left_out(one.groups)
    _write_grams(folder / "corpora.safetensors", corpora)
    say("leaving out each prompt of each kind of text")
    started = time.perf_counter()
    held = _read_grams(folder / "corpora.safetensors").values()
    views = [[fp.variant(sink=sink) for fp in held] for sink in (True, False)]
    sets = [[find(view, M).layers for find in (elsi, exhaustive) for view in side] for side in views]
    write_left_out(folder / "left_out.safetensors", {name: judged(one, sets) for name, one in grams.items() if one is not None})
    seconds["left out"] = round(time.perf_counter() - started, 1)
    return parts, seconds


def _longest(settings: Settings, target: Target) -> int:
    """Tokens at which the texts of all kinds are cut."""
    return min(settings.size("corpus_tokens"), target.max_tokens or settings.size("corpus_tokens"))


def _identity(settings: Settings, target: Target, about: dict[str, Any]) -> str:
    """What sums depend on, the number of prompts apart: those of other weights, texts or code lie in another folder."""
    code = {"calibration": code_version()["calibration"], "sums": survey_version()["sums"]}
    given = {"source": about["source_sha256"], "max_tokens": about["max_tokens"], "corpus": settings.size("corpus_tokens")}
    given |= {"rho": settings.rho, "block": settings.block, "seed": settings.seed}
    text = json.dumps([target.describe(), given, code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_grams(path: Path, found: dict[str, Fingerprint]) -> None:
    """Gram matrices of several fingerprints in one file, in float32: their entropies move by less than 1e-6 nats."""
    about = {name: fp.passport for name, fp in found.items()}  # in the order of the choices
    tensors = {name: fp.tensors["grams"].float() for name, fp in found.items()}
    write_tensors(path, tensors, {"format": FORMAT, "passports": json.dumps(about)})


def _read_grams(path: Path) -> dict[str, Fingerprint]:
    tensors, header = read_tensors(path, FORMAT, "a survey's Gram matrices")
    about = json.loads(header["passports"])
    return {name: Fingerprint({"grams": tensors[name].double()}, about[name]) for name in about}
