"""The small results of a study on disk: what every target step yielded, the drafts' rows, learning curves and live decoding.

A study's folder (``data/results/<target>/tau``, ``tau-own`` for our own prompts) holds ``steps.parquet``, ``rows.csv``,
``training.csv``, ``live.csv`` and ``passport.json``; all that tables 2 and 3 say follows from them, without a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from elsi_lib.errors import ElsiError
from elsi_lib.files import replaced
from elsi_lib.report.tau import CATEGORIES, MT_BENCH, SETTING, STEP_COLUMNS, TOTAL_COLUMNS

BASELINE = "EAGLE-3"
AGAIN = "EAGLE-3 (seed 1)"  # the baseline's set trained once more from other initial weights
LOOKUP = "prompt lookup"
PLAIN = "plain"  # the target alone, in live decoding
METHODS = (
    "EAGLE-2", BASELINE, "EAGLE-3 (code)", "ELSI m=1", "ELSI m=2", "ELSI m=3", "ELSI-C m=2", "ELSI-C m=3", "lowest", "random 1",
    "random 2", LOOKUP,
)  # fmt: skip
NORMED = {"EAGLE-3 norm": BASELINE, "ELSI m=3 norm": "ELSI m=3"}  # norm_before_fc on -> the same set with it off
EXTRAS = (AGAIN, *NORMED)
FILES = ("steps.parquet", "rows.csv", "training.csv", "live.csv", "passport.json")
SPEC_BENCH = "Spec-Bench"
OWN_PROMPTS = "own prompts"
ROW_COLUMNS = ["method", "layers", "entropy", "parameters", "loss", "draft", "norm_before_fc"]
LIVE_COLUMNS = ["question_id", "category", "method", "nodes", "temperature", "tokens", "steps", "seconds", "peak_mb"]
_KEYS = [name for name in STEP_COLUMNS if name != "tokens"]
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("question_id", "category")),
        ("turn", pa.int8()),
        ("method", pa.string()),
        ("nodes", pa.int16()),
        ("temperature", pa.float64()),
        ("seed", pa.int32()),
        ("tokens", pa.list_(pa.int8())),
    ]
)


def write_steps(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the steps of all answers as Parquet; equal frames, in any order of rows, give equal files.

    Args:
        frame: one row per ``question_id, category, turn, method, nodes, temperature, seed``; ``tokens`` is the list of what each
            target step yielded, accepted + 1. An empty list is an empty answer.
        path: replaced in one move, so that a cut leaves the old file or the new one.

    Raises:
        ElsiError: a missing column, a row twice, tokens that are not whole numbers from 1 to 127.
    """
    frame = _checked_steps(frame, str(path))
    place = {name: i for i, name in enumerate(in_order(frame["method"].unique()))}
    # Nodes and methods of one answer side by side: their steps are alike, and compress so.
    frame = frame.assign(place=frame["method"].map(place))
    frame = frame.sort_values(["question_id", "turn", "temperature", "seed", "place", "nodes"], ignore_index=True)
    columns = {name: frame[name].tolist() for name in _SCHEMA.names}
    table = pa.table({**columns, "tokens": [np.asarray(row, dtype=np.int8) for row in columns["tokens"]]}, schema=_SCHEMA)
    with replaced(path) as part:
        pq.write_table(table, part, compression="zstd", compression_level=19, row_group_size=1 << 20, use_dictionary=True)


def read_steps(path: str | Path) -> pd.DataFrame:
    """Steps as :func:`write_steps` took them; ``tokens`` are int8 arrays.

    Raises:
        ElsiError: no such file, a file that is not whole, or other contents.
    """
    if not Path(path).is_file():
        raise ElsiError(f"{_shown(path)} is not there: `elsi evaluate` makes it, or take the committed results")
    try:
        frame = pq.read_table(path).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise ElsiError(f"{_shown(path)} cannot be read as Parquet ({_first_line(error)}): remove it and evaluate again") from error
    return _checked_steps(frame, _shown(path))


def steps_totals(steps: pd.DataFrame) -> pd.DataFrame:
    """Totals per question and setting, as :func:`~elsi_lib.report.tau.question_totals` of one row per step, and faster.

    An answer without a step gives a row with tokens = steps = 0.
    """
    lengths = np.fromiter((len(row) for row in steps["tokens"]), dtype=np.int64, count=len(steps))
    flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in steps["tokens"]])
    ends = np.concatenate([[0], np.cumsum(flat)])[np.cumsum(lengths)]
    counted = steps[_KEYS].assign(turns=(lengths > 0).astype(int), tokens=np.diff(ends, prepend=0), steps=lengths)
    summed = counted.groupby([*SETTING, "seed", "question_id", "category"], observed=True)[["turns", "tokens", "steps"]].sum()
    return summed.reset_index()[TOTAL_COLUMNS]


@dataclass(frozen=True, eq=False)
class Results:
    """What a study left.

    Attributes:
        folder: where its files are.
        passport: target, training, evaluation, code, environment, seconds.
        rows: one per method: method, layers (as ``2 15 27``), entropy (nats), parameters, loss (nats), draft, norm_before_fc.
        totals: per question and setting, see :mod:`elsi_lib.report.tau`.
        training: learning curves; empty where none were kept.
        live: live decoding of sampled questions; empty where none was done.
        turns: answers per setting and seed, both turns of a question counted.
    """

    folder: Path
    passport: dict[str, Any]
    rows: pd.DataFrame
    totals: pd.DataFrame
    training: pd.DataFrame
    live: pd.DataFrame
    turns: int

    @property
    def target(self) -> str:
        """Name of the target."""
        about = self.passport["target"]
        return about["name"] if isinstance(about, dict) else about

    @property
    def prompts(self) -> str:
        """``Spec-Bench`` or ``own prompts``."""
        return self.passport["evaluation"]["prompts"]

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of the main table, in its order."""
        return in_order(method for method in self.rows["method"] if method not in EXTRAS)

    @property
    def questions(self) -> int:
        """Number of questions."""
        return self.totals["question_id"].nunique()

    def row(self, method: str) -> pd.Series:
        """The row of one method."""
        (place,) = self.rows.index[self.rows["method"] == method]
        return self.rows.loc[place]

    def group_name(self, group: str) -> str:
        """How a group of categories is called: ``mt-bench`` is the name of Spec-Bench's questions only."""
        return "two-turn categories" if group == "mt-bench" and self.prompts != SPEC_BENCH else group

    def sha256(self) -> dict[str, str]:
        """File name -> hash, for the passports of what is computed from them."""
        return file_hashes(self.folder)


def file_hashes(folder: str | Path) -> dict[str, str]:
    """File name -> sha256 of a study's files that are there."""
    paths = [path for name in FILES if (path := Path(folder) / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def read_study(folder: str | Path) -> Results:
    """Read a study. Methods that share a draft share its steps, whichever of them the file names.

    Raises:
        ElsiError: a file that is missing, half-written or of other contents; a method with steps and no row, or the reverse.
    """
    folder = Path(folder)
    passport = read_passport(folder / "passport.json")
    rows = _csv(folder / "rows.csv", ROW_COLUMNS, {"layers": str, "draft": str, "norm_before_fc": str}, needed=True)
    rows["layers"], rows["draft"] = rows["layers"].fillna(""), rows["draft"].fillna("")
    rows["norm_before_fc"] = rows["norm_before_fc"].fillna("none")
    if (twice := rows["method"].duplicated()).any():
        raise ElsiError(f"{_shown(folder / 'rows.csv')}: method {rows['method'][twice].iloc[0]} twice")
    if BASELINE not in set(rows["method"]):
        raise ElsiError(f"{_shown(folder / 'rows.csv')} has no row {BASELINE}, with which all others are compared")
    steps = read_steps(folder / "steps.parquet")
    if unknown := sorted(set(steps["method"]) - set(rows["method"])):
        raise ElsiError(f"{_shown(folder / 'steps.parquet')} has steps of {', '.join(unknown)}, which rows.csv does not name")
    one = steps.groupby(SETTING + ["seed"], observed=True).size()
    return Results(
        folder=folder,
        passport=passport,
        rows=rows,
        totals=_shared(steps_totals(steps), rows, folder),
        training=_csv(folder / "training.csv", ["step", "tokens", "draft", "loss"], {"draft": str}),
        live=_csv(folder / "live.csv", LIVE_COLUMNS, {"question_id": str}),
        turns=int(one.max()),
    )


def study_line(results: Results, status: str) -> str:
    """One line on what a notebook computes from."""
    temperatures = sorted(results.totals["temperature"].unique())
    hashed = hashlib.sha256(json.dumps(results.sha256(), sort_keys=True).encode()).hexdigest()[:8]
    drafts = results.rows["draft"].replace("", pd.NA).nunique()
    return (
        f"{results.target}: {results.prompts}, {results.questions} questions, {results.turns} turns; {drafts} drafts; "
        f"T = {', '.join(f'{t:g}' for t in temperatures)}; study {hashed}, {status}"
    )


def in_order(methods: Iterable[str]) -> tuple[str, ...]:
    """Methods in the order of the tables; further ones follow by name."""
    known = (*METHODS, *EXTRAS)
    return tuple(sorted(dict.fromkeys(methods), key=lambda name: (known.index(name) if name in known else len(known), name)))


def same_draft(rows: pd.DataFrame, methods: Iterable[str]) -> dict[str, str]:
    """Method -> the first of ``methods`` that its draft serves; itself for one that has a draft of its own, or none."""
    first: dict[str, str] = {}
    drafts = dict(zip(rows["method"], rows["draft"], strict=True))
    return {name: first.setdefault(drafts[name], name) if drafts[name] else name for name in methods}


def groups_in(found: Iterable[str]) -> list[str]:
    """Groups as reported, of those found: overall, mt-bench, then the categories."""
    found = set(found)
    known = ["overall", "mt-bench", *(name for name in CATEGORIES if name not in MT_BENCH), *MT_BENCH]
    return [*(name for name in known if name in found), *sorted(found - set(known))]


def _shared(totals: pd.DataFrame, rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Totals with those of a shared draft under each method it serves."""
    measured = set(totals["method"])
    parts = [totals]
    for row in rows.itertuples():
        if row.method in measured:
            continue
        others = [name for name in rows.loc[rows["draft"] == row.draft, "method"] if name in measured] if row.draft else []
        if not others:
            raise ElsiError(f"{_shown(folder / 'steps.parquet')} has no steps of {row.method}, which rows.csv names: evaluate it")
        parts.append(totals[totals["method"] == others[0]].assign(method=row.method))
    return pd.concat(parts, ignore_index=True)


def _checked_steps(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    if missing := [name for name in STEP_COLUMNS if name not in frame.columns]:
        raise ElsiError(f"{what}: no column {', '.join(missing)}; steps have {', '.join(STEP_COLUMNS)}")
    if frame.empty:
        raise ElsiError(f"{what}: not a single answer")
    frame = frame[STEP_COLUMNS]
    if (twice := frame.duplicated(_KEYS)).any():
        row = frame[twice].iloc[0]
        raise ElsiError(f"{what}: question {row['question_id']}, turn {row['turn']} of {row['method']} twice at one setting")
    for place, row in enumerate(frame["tokens"]):
        values = np.asarray(row)
        if values.size and not (values.dtype.kind in "iu" and values.min() >= 1 and values.max() <= 127):
            question = frame["question_id"].iloc[place]
            raise ElsiError(f"{what}: tokens {values.tolist()[:8]} at question {question}; a step yields 1 to 127 whole tokens")
    return frame


def read_passport(path: Path) -> dict[str, Any]:
    """The passport of a study. Raises ElsiError where the file is not there or is not one."""
    if not path.is_file():
        raise ElsiError(f"{_shown(path)} is not there: this folder holds no finished study")
    try:
        passport = json.loads(path.read_text(encoding="utf-8"))
        prompts = passport["evaluation"]["prompts"]
        passport["target"], passport["settings"]["seed"]
    except (ValueError, KeyError, TypeError) as error:
        raise ElsiError(f"{_shown(path)} is no passport of a study ({_first_line(error)}): evaluate again") from error
    if prompts not in (SPEC_BENCH, OWN_PROMPTS):
        raise ElsiError(f"{_shown(path)}: prompts {prompts!r}; {SPEC_BENCH!r} or {OWN_PROMPTS!r}")
    return passport


def _csv(path: Path, columns: list[str], dtypes: dict[str, type], needed: bool = False) -> pd.DataFrame:
    """A table of the study; an empty one where the study did without it."""
    if not path.is_file():
        if needed:
            raise ElsiError(f"{_shown(path)} is not there: this folder holds no finished study")
        return pd.DataFrame(columns=columns)
    try:
        data = pd.read_csv(path, dtype=dtypes)
    except ValueError as error:
        raise ElsiError(f"{_shown(path)} cannot be read ({_first_line(error)}): evaluate again") from error
    if missing := [name for name in columns if name not in data.columns]:
        raise ElsiError(f"{_shown(path)}: no column {', '.join(missing)}; it needs {', '.join(columns)}")
    return data


def _shown(path: str | Path) -> str:
    return "/".join(Path(path).parts[-3:])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
