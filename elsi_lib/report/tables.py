"""Table 1, and the values the paper reports."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from torch import Tensor

from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report.measures import timed
from elsi_lib.report.words import braces, markdown_table, spaced
from elsi_lib.selection import RULES, all_set_entropies, jaccard, redundancy_or_nan, select, stability, standing
from elsi_lib.settings import project_root

# Row of table 1: label, method, m. The label is the method's name in the paper where it has one.
ROWS: tuple[tuple[str, str, int], ...] = (
    ("EAGLE2", "eagle2", 1),
    ("EAGLE3 as printed", "eagle3", 3),
    ("EAGLE3 as its code runs", "eagle3-code", 3),
    ("uniform", "uniform", 3),
    ("last 3", "last", 3),
    ("ELSI m=1", "elsi", 1),
    ("ELSI m=2", "elsi", 2),
    ("ELSI m=3", "elsi", 3),
    ("ELSI-C m=2", "elsi-c", 2),
    ("ELSI-C m=3", "elsi-c", 3),
    ("exhaustive m=2", "exhaustive", 2),
    ("exhaustive m=3", "exhaustive", 3),
    ("lowest entropy m=3", "lowest", 3),
)
COLUMNS = (
    "target", "origin", "method", "m", "layers", "entropy", "rank", "sets", "regret", "stability", "jaccard", "replicates",
    "redundancy", "redundancy_debiased", "rank_first_dropped", "optimum_first_dropped",
)  # fmt: skip
REPORTED_TARGETS = ("Qwen3-4B", "Llama-3.1-8B")
_REPORTED_ROWS = {
    "EAGLE3": "EAGLE3 as printed",
    "ELSI m=3": "ELSI m=3",
    "ELSI m=1": "ELSI m=1",
    "negative control": "negative control",
}


@timed
def table1(fp: Fingerprint) -> pd.DataFrame:
    """Layer sets by method, with their entropy and where it stands among all sets of the size (paper, table 1).

    Returns:
        Columns: target, origin (``measured``), method, m, layers (as ``2 18 33``), entropy (nats), rank (1 is the highest
        entropy), sets (how many of that size there are), regret (nats below the highest), stability (share of bootstrap
        replicates over prompts that choose the same set; NaN for rules, which do not look at the data), jaccard (mean Jaccard
        similarity to the replicates' sets), replicates, redundancy (mean CKA over the set's pairs, plain and debiased),
        rank_first_dropped and optimum_first_dropped (where the set stands, and which is best, without each prompt's first position).
        A rule whose ids collide on a shallow target is left out.
    """
    held, places = _stabilities(fp), {}
    rows = []
    for label, method, m in ROWS:
        try:
            chosen = select(fp, method, None if method.startswith("eagle") else m)
        except ElsiError:
            if fp.num_layers > 5:  # the EAGLE rules collide below, and m can exceed N; nothing else may be passed over
                raise
            continue
        layers = chosen.layers
        if layers not in places:
            places[layers] = standing(fp, layers), standing(fp.variant(fp.filtered, sink=False), layers)
        place, dropped = places[layers]
        row = (fp.target, "measured", label, len(layers), spaced(layers), chosen.entropy)
        row += (place.rank, place.sets, place.regret, *held.get((method, m), (math.nan, math.nan, 0)))
        row += (place.redundancy, redundancy_or_nan(fp, layers, debiased=True))
        rows.append((*row, dropped.rank, spaced(dropped.optimum)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _stabilities(fp: Fingerprint) -> dict[tuple[str, int], tuple[float, float, int]]:
    """Share of replicates with the same set, mean Jaccard similarity, and their number, for each searched row of the table."""
    replicates = fp.bootstrap
    if replicates is None:
        return {}
    found = {}
    for method, m in [(method, m) for _, method, m in ROWS if method not in RULES and m <= fp.num_layers]:
        if method in ("elsi", "elsi-c"):
            held = stability(fp, method, m)
            found[method, m] = (held.share, held.jaccard, held.replicates)
    # One look at all sets of a replicate serves the highest and the lowest: it is the costly part of the table.
    for m in sorted({m for _, method, m in ROWS if method in ("exhaustive", "lowest") and m <= fp.num_layers}):
        ends = [_ends(grams, m) for grams in (fp.grams, *replicates)]
        for place, method in enumerate(("exhaustive", "lowest")):
            chosen, *again = (set(end[place]) for end in ends)
            overlap = float(np.mean([jaccard(chosen, other) for other in again]))
            found[method, m] = (sum(other == chosen for other in again) / len(again), overlap, len(again))
    return found


def _ends(grams: Tensor, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sets of m layers with the highest and the lowest entropy."""
    sets, entropies = all_set_entropies(grams, m)
    return tuple(sets[entropies.argmax()].tolist()), tuple(sets[entropies.argmin()].tolist())


def reported() -> pd.DataFrame:
    """Every value known of the paper, from ``data/paper/reported.csv``, as text with its source.

    Raises:
        ElsiError: the project's data folder is not there.
    """
    root = project_root()
    path = root and root / "data" / "paper" / "reported.csv"
    if path is None or not path.is_file():
        raise ElsiError("data/paper/reported.csv is not there: run inside a checkout of the project")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def reported_value(target: str, quantity: str) -> str:
    """One reported value, as text; how sure it is (``"near" layer 27``) stands in the column ``note`` of :func:`reported`.

    Raises:
        ElsiError: the paper's value is not known.
    """
    values = reported()
    found = values[(values["target"] == target) & (values["quantity"] == quantity)]
    if len(found) != 1:
        raise ElsiError(f"the paper's {quantity} for {target} is not known: data/paper/reported.csv lists what is")
    return found["value"].iloc[0]


def reported_variance_changes() -> dict[str, float]:
    """The paper's change of variance between prompts in percent by third of depth, for Qwen3-4B (figure 4)."""
    name = "variance between prompts, filter on vs off, {}"
    return {third: float(reported_value("Qwen3-4B", name.format(third))) for third in ("early", "middle", "late")}


def reported_rows() -> pd.DataFrame:
    """The paper's part of table 1, in the columns of :func:`table1`, with origin ``reported``; what is not known is empty."""
    values = reported()
    rows = []
    for target in REPORTED_TARGETS:
        of = values[(values["target"] == target) & (values["artefact"] == "table1")].set_index("quantity")["value"]
        for name, label in _REPORTED_ROWS.items():
            layers, entropy = of.get(f"{name} layers", ""), of.get(f"{name} S_1", "")
            if layers or entropy:
                m = len(layers.split()) or {"EAGLE3": 3, "ELSI m=3": 3}[name]
                about = {"target": target, "origin": "reported", "method": label, "m": m, "layers": layers}
                rows.append({**about, "entropy": float(entropy) if entropy else math.nan})
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def table1_markdown(df: pd.DataFrame) -> str:
    """Table 1 for a page: one block per target, the paper's own values in a block of their own."""
    blocks = []
    for target, of in df[df["origin"] == "measured"].groupby("target", sort=False):
        heads = ["method", "layers", "$S_1$ (nats)", "rank", "regret (nats)", "rank, first dropped", "same set"]
        heads += ["mean CKA", "debiased"]
        lines = [
            (
                row.method,
                braces(row.layers),
                f"{row.entropy:.4f}",
                f"{int(row.rank):,} of {int(row.sets):,}",
                f"{row.regret:.4f}",
                f"{int(row.rank_first_dropped):,}",
                "" if math.isnan(row.stability) else f"{100 * row.stability:.0f} %",
                _number(row.redundancy, 3),
                _number(row.redundancy_debiased, 3),
            )
            for row in of.itertuples()
        ]
        blocks.append(f"**{target}**, measured\n\n{markdown_table(heads, lines, right=range(2, len(heads)))}")
    paper = df[df["origin"] == "reported"]
    if len(paper):
        heads = ("target", "method", "layers", "$S_1$ (base not stated)")
        lines = [
            (row.target, row.method, braces(row.layers) if row.layers else "not known", _number(row.entropy, 3) or "not known")
            for row in paper.itertuples()
        ]
        blocks.append(f"**The paper's own targets**, reported, not measured here\n\n{markdown_table(heads, lines, right=(3,))}")
    return "\n\n".join(blocks)


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"
