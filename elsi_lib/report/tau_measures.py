"""The numbers behind the figures to tables 2 and 3: entropy against tau, rank correlations, learning curves."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from elsi_lib.report.measures import timed
from elsi_lib.report.study import Results, in_order, same_draft
from elsi_lib.report.tables import reported
from elsi_lib.report.tau_tables import settings_of

# The paper's name of a task -> ours, and of those that it tells of at T = 1 alone, for its second target.
REPORTED_TASKS = {"translation": "translation", "summarization": "summarization", "STEM": "stem"}
REPORTED_TASKS_T1 = ("roleplay", "coding", "writing")
_EXACT_UP_TO = 7


@timed
def entropy_against_tau(results: Results, taus: pd.DataFrame) -> pd.DataFrame:
    """S_1 and tau of every set with a draft of its own, EAGLE-3's second training and the norms left out.

    Returns:
        Columns method, layers, size (layers of the set), entropy (nats), nodes, temperature, tau, low, high.
    """
    methods = results.methods
    first = same_draft(results.rows, methods)
    pooled = taus[(taus["group"] == "overall") & (taus["average"] == "pooled")]
    parts = []
    for method in methods:
        row = results.row(method)
        if first[method] != method or pd.isna(row["entropy"]):
            continue
        of = pooled[pooled["method"] == method][["nodes", "temperature", "tau", "low", "high"]]
        about = {"method": method, "layers": row["layers"], "size": len(row["layers"].split()), "entropy": row["entropy"]}
        parts.append(of.assign(**about)[[*about, *of.columns]])
    return pd.concat(parts, ignore_index=True)


def rank_correlation(entropy: np.ndarray, tau: np.ndarray) -> tuple[float, float]:
    """Spearman's rho and its two-sided p by permutation: of all orders up to seven sets, of 9,999 seeded ones beyond.

    NaN below three sets, or where one of the two is the same for all.
    """
    if len(entropy) < 3 or np.ptp(entropy) == 0 or np.ptp(tau) == 0:
        return float("nan"), float("nan")
    x, y = (rankdata(values) - (len(values) + 1) / 2 for values in (entropy, tau))
    scale = np.sqrt((x @ x) * (y @ y))
    rho, exact = float(x @ y / scale), len(x) <= _EXACT_UP_TO
    orders = np.array(list(permutations(y))) if exact else np.random.default_rng(0).permuted(np.tile(y, (9_999, 1)), axis=1)
    hits = int((np.abs(orders @ x) / scale >= abs(rho) - 1e-12).sum())
    return rho, hits / len(orders) if exact else (1 + hits) / (1 + len(orders))


@timed
def correlations(data: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation of S_1 and tau in each setting, over all sets and over those of three layers.

    Returns:
        Columns sets (``all`` or ``three layers``), nodes, temperature, n, rho, p.
    """
    rows = []
    for name, of in (("all", data), ("three layers", data[data["size"] == 3])):
        for nodes, temperature in settings_of(data):
            one = of[(of["nodes"] == nodes) & (of["temperature"] == temperature)]
            rows.append((name, nodes, temperature, len(one), *rank_correlation(one["entropy"].to_numpy(), one["tau"].to_numpy())))
    return pd.DataFrame(rows, columns=["sets", "nodes", "temperature", "n", "rho", "p"])


@timed
def curves(results: Results, points: int = 60) -> pd.DataFrame:
    """Learning curves, averaged over up to ``points`` equal stretches of training.

    Returns:
        Columns draft, methods (those it serves), tokens (seen at the stretch's end), loss (nats, of step 0), accept_0, accept_1, ...
        (share of rows whose likeliest token is the target's).
    """
    data = results.training
    served = results.rows[results.rows["draft"] != ""].groupby("draft")["method"].agg(lambda of: ", ".join(in_order(of)))
    shares = [name for name in data.columns if name.startswith("accept_")]
    columns = ["draft", "methods", "tokens", "loss", *shares]
    if data.empty:
        return pd.DataFrame(columns=columns)
    place = {step: i for i, step in enumerate(sorted(data["step"].unique()))}
    stretch = data["step"].map(place) * min(points, len(place)) // len(place)
    means = data.groupby([data["draft"], stretch.rename("stretch")])
    means = means.agg({"tokens": "max", "loss": "mean"} | dict.fromkeys(shares, "mean"))
    means = means.reset_index().assign(methods=lambda of: of["draft"].map(served).fillna(""))
    return means[columns]


def reported_tasks(table: str) -> dict[str, tuple[float, float]]:
    """Group -> the gain of ELSI m=3 over EAGLE-3 in percent as the paper reports it by task; empty where it does not."""
    values, found = reported(), {}
    for row in values[values["artefact"] == table].itertuples():
        name = row.quantity.removeprefix("gain in tau by task, ELSI m=3 over EAGLE3, ")
        if name in REPORTED_TASKS:
            found[REPORTED_TASKS[name]] = (float(row.value), float(row.value_to))
    return found
