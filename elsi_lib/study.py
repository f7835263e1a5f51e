"""A study: from a target and its fingerprint to tau of every row of tables 2 and 3.

Stages: the target answers training prompts; drafts are trained on the answers; the target answers the questions; every draft is
replayed on the answers; a few questions are decoded live for the speed. Each stage writes as it goes and resumes where it was stopped.
What is large (answers, states, drafts) stays in the cache; what is small goes to the results.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from elsi_lib.assets import cache_dir
from elsi_lib.errors import AssetError
from elsi_lib.files import Lines, replaced
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.live import decode_live
from elsi_lib.pipeline import measured_or_cached, obtain_fingerprint
from elsi_lib.progress import track
from elsi_lib.provenance import code_version, environment
from elsi_lib.report.study import FILES, read_passport, write_steps
from elsi_lib.report.words import spaced
from elsi_lib.settings import Settings, results_root, results_roots, same_target
from elsi_lib.speculative.answers import Answers, record, training_texts
from elsi_lib.speculative.checkpoint import load_draft, weights_hash
from elsi_lib.speculative.dialogue import Dialogue, eos_ids, own_dialogues, sharegpt_dialogues, spec_bench_dialogues
from elsi_lib.speculative.distill import CURVE, Recipe, Text, train
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.grid import BASELINE, Row, table_rows
from elsi_lib.speculative.replay import PROMPT_LOOKUP, prompt_lookup, replay
from elsi_lib.speculative.vocabulary import DraftVocabulary, count_tokens
from elsi_lib.targets import Target, load_target

TEMPERATURES = (0.0, 1.0)
NODES = (30, 60)
LIVE = (BASELINE, "ELSI m=3")  # rows decoded live
PROMPT_TOKENS = 512  # longest training prompt
BATCH = 64  # texts that the target continues at once
SECONDS = "seconds.json"


@dataclass(frozen=True)
class Study:
    """Results of a study: their folder, and "measured" (on a machine like this one by the code as it stands), "cached" or "stale"."""

    folder: Path
    status: str


def study_folder(settings: Settings) -> Path:
    """Where a study's results go: ``tau`` beside the fingerprint, ``tau-own`` where the questions are our own."""
    return settings.output / ("tau" if settings.evaluation == "spec-bench" else f"tau-{settings.evaluation}")


def obtain_study(settings: Settings) -> Study:
    """The study of the settings: from this run's results, else from those committed with the project, else made now (hours)."""
    return find_study(settings) or Study(run_study(settings), "measured")


def find_study(settings: Settings) -> Study | None:
    """The study of the settings where there is one, from this run's results, else from those committed with the project.

    One whose passport states another target, other prompts or another run is passed over.
    """
    name = study_folder(settings).relative_to(results_root())
    for folder in (root / name for root in results_roots()):
        if all((folder / file).is_file() for file in FILES):
            passport = read_passport(folder / "passport.json")
            if _is_of(passport, settings):
                return Study(folder, _status(folder, passport))
    return None


def _is_of(passport: dict[str, Any], settings: Settings) -> bool:
    """Whether a study is of these settings; the second target is no part of it."""
    held = passport["settings"]
    wanted = asdict(settings) | {"prompts": settings.calibration()["source"]}
    same = all(held.get(name) == value for name, value in wanted.items() if name not in ("target", "beside", "samples"))
    same = same and replace(settings, samples=held.get("samples", 0)).size("samples") == settings.size("samples")
    return same and same_target(passport["target"], settings.target)


def _status(folder: Path, passport: dict[str, Any]) -> str:
    if passport["code"].get("speculative") != code_version()["speculative"]:
        return "stale"
    return measured_or_cached(folder, passport)


Say = Callable[[str], None]  # told what begins, one line each


def _silent(_: str) -> None:
    pass


def run_study(settings: Settings, *, temperatures: Sequence[float] = TEMPERATURES, say: Say = _silent) -> Path:
    """Run all stages, or those that are left, and write the results.

    Args:
        settings: which target, which preset, which questions.
        temperatures: of the questions' answers; a later call with more of them goes on from the files of this one.
        say: told what begins.

    Returns:
        The folder of the results.

    Raises:
        ElsiError: a target too shallow for the rows, no chat template, files of another study in the cache.
        AssetError: the target, the prompts or the questions cannot be fetched.
    """
    fingerprint, _ = obtain_fingerprint(settings)
    rows, work, target = table_rows(fingerprint, settings.seed), work_folder(settings), load_target(settings.target)
    texts, about = training_texts_of(target, settings, work, say)
    made = new_drafts(target, settings, rows, texts)
    say(f"training {len(made)} drafts on {sum(len(ids) for ids, _ in texts):,} tokens")
    with _timed(work, "training"):
        train(target, made, texts, recipe_of(settings), work / "drafts", passport={"study": settings.run_name})
    drafts = {name: load_draft(work / "drafts" / name, target).to(target.dtype) for name in made}
    recorded, evaluation = record_questions(target, settings, work, say, temperatures)
    steps = replay_all(target, drafts, recorded, work, seed=settings.seed, name=f"replay-{settings.evaluation}", say=say)
    decoded = {row.method: work / "drafts" / row.draft for row in rows if row.method in LIVE}
    asked = spread(next(iter(recorded.values())).dialogues, settings.size("live_questions"))
    say(f"decoding {len(asked)} questions live")
    with _timed(work, "live"):
        path, limit = work / f"live-{settings.evaluation}.jsonl", settings.size("live_tokens")
        live = decode_live(target, decoded, asked, path, named=settings.target, max_new_tokens=limit, seed=settings.seed)

    folder = study_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(_named(steps, rows), folder / "steps.parquet")
    _csv(_table(rows, drafts, fingerprint), folder / "rows.csv")
    _csv(pd.read_csv(work / "drafts" / CURVE), folder / "training.csv")
    _csv(live, folder / "live.csv")
    one = next(iter(drafts.values()))  # all were trained in one run, on one vocabulary
    passport = {
        "target": target.describe(),
        "settings": asdict(settings) | {"target": target.name, "prompts": settings.calibration()["source"]},  # no paths
        "texts": about,
        "training": {name: value for name, value in one.passport["training"].items() if name != "final"},
        "draft_vocabulary": one.vocabulary.size,
        "evaluation": evaluation,
        "seconds": json.loads((work / SECONDS).read_text(encoding="utf-8")),
        "code": code_version(),
        "environment": environment(),
    }
    with replaced(folder / "passport.json") as part:
        part.write_text(json.dumps(passport, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def work_folder(settings: Settings) -> Path:
    """Where a study keeps what is large, in the cache: answers, states, drafts."""
    return cache_dir() / "studies" / settings.run_name


def study_questions(settings: Settings) -> tuple[str, list[Dialogue]]:
    """What the questions are called, and the questions: all, or the preset's number spread over the categories.

    Raises:
        AssetError: Spec-Bench cannot be fetched: the message names the way out.
    """
    if settings.evaluation == "own":
        return "own prompts", spread(own_dialogues(), settings.size("questions"))
    try:
        return "Spec-Bench", spread(spec_bench_dialogues(), settings.size("questions"))
    except AssetError as error:
        raise AssetError(
            f"{error}. tau can be measured on this project's own prompts instead, under their own name: evaluation = 'own'"
        ) from error


def spread(dialogues: Sequence[Any], n: int) -> list[Any]:
    """n dialogues, to be answered or answered, taken in turn from each ``category``, in each from its start; 0 takes all."""
    if not n:
        return list(dialogues)
    by_category: dict[str, list[Any]] = {}
    for dialogue in dialogues:
        by_category.setdefault(dialogue.category, []).append(dialogue)
    rounds = [d for i in range(n) for own in by_category.values() for d in own[i : i + 1]]
    chosen = {d.id for d in rounds[:n]}
    return [d for d in dialogues if d.id in chosen]


def training_texts_of(target: Target, settings: Settings, work: Path, say: Say = _silent) -> tuple[list[Text], dict[str, Any]]:
    """The target's answers to training prompts, half at T = 0 and half at T = 1, and what the passport says of them."""
    size = settings.size
    dialogues = sharegpt_dialogues(settings.prompts, size("dialogues"), settings.seed, 1)
    texts, about = [], {}
    for number, temperature in enumerate(TEMPERATURES):
        part = dialogues[number :: len(TEMPERATURES)]
        say(f"answering {len(part)} training prompts at T = {temperature:g}")
        with _timed(work, f"answers T={temperature:g}"):
            found = record(
                target,
                part,
                work / f"answers-T{temperature:g}.jsonl",
                max_new_tokens=size("answer_tokens"),
                temperature=temperature,
                seed=settings.seed,
                max_turns=1,
                source=settings.prompts,
                batch=BATCH,
                capacity=PROMPT_TOKENS + size("answer_tokens"),
                skip_long=True,
            )
        texts += [(ids, mask) for ids, mask in training_texts(found) if bool(mask[2:].any())]
        about[f"answers T={temperature:g}"] = {
            "sha256": found.sha256, "dialogues": len(found.dialogues), "skipped": len(found.skipped),
            "max_new_tokens": size("answer_tokens"), "source": settings.calibration()["source"],
        }  # fmt: skip
    return texts, about


def new_drafts(target: Target, settings: Settings, rows: Sequence[Row], texts: Sequence[Text]) -> dict[str, Draft]:
    """An untrained draft for each distinct set of the rows; all share the draft vocabulary counted on the texts."""
    counts = count_tokens(texts, target.vocab_size)
    vocabulary = DraftVocabulary.from_counts(counts, min(settings.size("draft_vocabulary"), int((counts > 0).sum())))
    made: dict[str, Draft] = {}
    for row in rows:
        if row.draft not in made:
            seed = settings.seed + row.seed
            made[row.draft] = Draft.for_target(target, row.layers, vocabulary, seed=seed, norm_before_fc=row.norm_before_fc)
    return made


def recipe_of(settings: Settings) -> Recipe:
    """How the preset trains."""
    return Recipe(steps=settings.size("ttt_steps"), epochs=settings.size("epochs"), batch_tokens=settings.size("batch_tokens"))


def record_questions(
    target: Target, settings: Settings, work: Path, say: Say = _silent, temperatures: Sequence[float] = TEMPERATURES
) -> tuple[dict[float, Answers], dict[str, Any]]:
    """The target's answers to the questions, once for each temperature, and what the passport says of them."""
    name, dialogues = study_questions(settings)
    about: dict[str, Any] = {"prompts": name, "questions": len(dialogues), "max_new_tokens": settings.size("new_tokens")}
    recorded = {}
    for temperature in temperatures:
        say(f"answering {len(dialogues)} questions of {name} at T = {temperature:g}")
        with _timed(work, f"questions T={temperature:g}"):
            found = record(
                target,
                dialogues,
                work / f"{settings.evaluation}-T{temperature:g}.jsonl",
                max_new_tokens=settings.size("new_tokens"),
                temperature=temperature,
                seed=settings.seed,
                max_turns=max(len(d.turns) for d in dialogues),
                source=name,
                batch=BATCH,
            )
        recorded[temperature] = found
        turns = [turn for answered in found.dialogues for turn in answered.turns]
        about[f"T={temperature:g}"] = {
            "sha256": found.sha256, "turns": len(turns), "tokens": sum(len(turn.answer) for turn in turns),
            "finish": pd.Series([turn.finish for turn in turns]).value_counts().to_dict(),
        }  # fmt: skip
    return recorded, about


def replay_all(
    target: Target,
    drafts: Mapping[str, Draft],
    recorded: Mapping[float, Answers],
    work: Path,
    *,
    nodes: Sequence[int] = NODES,
    seed: int = 0,
    name: str = "replay",
    say: Say = _silent,
) -> pd.DataFrame:
    """Accepted lengths of every draft and of prompt lookup on every answer: the steps of :mod:`elsi_lib.report.study`, where
    ``method`` is the draft's name. A line for each dialogue is kept in ``work`` as it is done."""
    found, eos = [], eos_ids(target)
    for temperature, answers in recorded.items():
        key = {"recording": answers.sha256, "drafts": {n: weights_hash(draft) for n, draft in drafts.items()}, "nodes": list(nodes)}
        book = Lines(work / f"{name}-T{temperature:g}.jsonl", key)
        left = [answered for answered in answers.dialogues if answered.id not in book.done]
        say(f"replaying {len(left)} dialogues at T = {temperature:g} with {len(drafts)} drafts")
        with _timed(work, f"replay T={temperature:g}"):
            for answered in track(f"replay, T = {temperature:g}", len(left))(left):
                book.add(answered.id, replay(target, drafts, answered, nodes) + prompt_lookup(answered, eos, nodes))
        found += [
            {"question_id": answered.id, "category": answered.category, "temperature": temperature, "seed": seed} | row
            for answered in answers.dialogues
            for row in book.done[answered.id]
        ]
    return pd.DataFrame(found)


def replay_name(drafts: Mapping[str, Draft], settings: Settings) -> str:
    """Name of the file that keeps these drafts' accepted lengths: other drafts have another."""
    digest = hashlib.sha256("".join(f"{name} {weights_hash(draft)}" for name, draft in drafts.items()).encode()).hexdigest()
    return f"replay-{settings.evaluation}-{digest[:12]}"


def _named(steps: pd.DataFrame, rows: Sequence[Row]) -> pd.DataFrame:
    """Steps by draft -> steps by row; rows of equal sets have the same."""
    serves = pd.DataFrame([(row.draft, row.method) for row in rows] + [(PROMPT_LOOKUP, PROMPT_LOOKUP)], columns=["method", "row"])
    return steps.merge(serves, on="method").drop(columns="method").rename(columns={"row": "method"})


def _table(rows: Sequence[Row], drafts: Mapping[str, Draft], fingerprint: Fingerprint) -> pd.DataFrame:
    found = []
    for row in rows:
        draft = drafts[row.draft]
        final = draft.passport["training"]["final"]
        found.append({
            "method": row.method, "layers": spaced(row.layers), "entropy": fingerprint.entropy(row.layers),
            "parameters": sum(p.numel() for p in draft.parameters()), "loss": final["loss"], "accept_0": final["accept_0"],
            "draft": row.draft, "norm_before_fc": row.norm_before_fc, "seed": row.seed,
        })  # fmt: skip
    found.append({"method": PROMPT_LOOKUP, "layers": "", "draft": "", "norm_before_fc": "", "parameters": 0})
    return pd.DataFrame(found)


@contextmanager
def _timed(work: Path, stage: str) -> Iterator[None]:
    """Seconds of a stage, over all the sessions that it took, kept in ``work``."""
    start = time.monotonic()
    try:
        yield
    finally:
        path = work / SECONDS
        seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - start, 1)
        with replaced(path) as part:
            part.write_text(json.dumps(seconds), encoding="utf-8")


def _csv(frame: pd.DataFrame, path: Path) -> None:
    with replaced(path) as part:
        frame.to_csv(part, index=False)
