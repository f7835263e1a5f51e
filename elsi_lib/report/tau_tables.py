"""Tables 2 and 3: tau by method, differences to EAGLE-3, categories, and speed, each beside what the paper reports."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd

from elsi_lib.errors import ElsiError
from elsi_lib.report.measures import timed
from elsi_lib.report.study import AGAIN, BASELINE, NORMED, PLAIN, Results, in_order, same_draft
from elsi_lib.report.tables import reported
from elsi_lib.report.tau import compare, tau_table

PAPER = {"table2": "Qwen3-4B", "table3": "Llama-3.1-8B"}
OURS = {"EAGLE2": "EAGLE-2", "EAGLE3": BASELINE, "ELSI m=1": "ELSI m=1", "ELSI m=3": "ELSI m=3", "negative control": "lowest"}
HEADLINE = (60, 0.0)  # nodes and temperature that are shown first, where they were measured
ABOVE, BELOW, OPEN, SAME, TWICE = "above", "below", "not decided", "same draft", "training noise"
SPEED_COLUMNS = [
    "method", "nodes", "temperature", "questions", "speedup", "speedup_low", "speedup_high", "ratio", "ratio_low", "ratio_high",
    "tokens_per_second", "plain_tokens_per_second", "tau", "peak_mb",
]  # fmt: skip
RESAMPLES = 4_000  # of questions, and of swaps: p goes down to 1 / 4,001
_LEVEL = 0.05


# Numbers


@timed
def averages(results: Results, *, resamples: int = RESAMPLES) -> pd.DataFrame:
    """tau of every method, setting, group and average: :func:`~elsi_lib.report.tau.tau_table` of the study."""
    return tau_table(results.totals, resamples=resamples)


@timed
def main_table(results: Results, taus: pd.DataFrame, table: str) -> pd.DataFrame:
    """Table 2 or 3, one row per method and setting, and what the paper reports for its own target.

    Args:
        taus: from :func:`averages`.
        table: ``table2`` (the paper's Qwen3-4B) or ``table3`` (its Llama-3.1-8B).

    Returns:
        Columns target (of reported rows the paper's), origin (``measured`` or ``reported``), method, layers, entropy (S_1, nats),
        parameters, loss (nats, mean of the last tenth of training), draft, norm_before_fc, nodes, temperature, tau (pooled), low,
        high (95 % interval), macro (mean over categories), questions, empty, tokens, steps.
    """
    overall = taus[taus["group"] == "overall"].set_index(["method", "nodes", "temperature", "average"])
    parts = []
    for method in in_order(results.rows["method"]):
        row = results.row(method)
        about = {name: row[name] for name in ("layers", "entropy", "parameters", "loss", "draft", "norm_before_fc")}
        for nodes, temperature in settings_of(taus):
            if (method, nodes, temperature, "pooled") not in overall.index:
                continue
            pooled = overall.loc[(method, nodes, temperature, "pooled")]
            counts = {name: pooled[name] for name in ("tau", "low", "high")}
            counts["macro"] = overall.loc[(method, nodes, temperature, "categories"), "tau"]
            counts |= {name: int(pooled[name]) for name in ("questions", "empty", "tokens", "steps")}
            where = {"nodes": nodes, "temperature": temperature}
            parts.append({"target": results.target, "origin": "measured", "method": method, **about, **where, **counts})
    measured = pd.DataFrame(parts)
    paper = reported_taus(table)
    paper.insert(1, "origin", "reported")
    return pd.concat([measured, paper], ignore_index=True)[list(measured.columns)]


@timed
def differences(results: Results, *, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Paired differences of every method to EAGLE-3, and those that tell how far to trust them.

    Families, in column ``family``:

    * ``sets``: the main table's methods against EAGLE-3. Methods that share a draft are one hypothesis: Holm's correction counts it
      once.
    * ``training``: EAGLE-3's set trained again from other initial weights, against EAGLE-3.
    * ``norm``: a set with norm_before_fc against the same set without.

    ``noise`` is the largest distance over all settings, for that group and average, between the two trainings of EAGLE-3's set
    (tokens per step; NaN without a second training): two trainings tell its order of magnitude, no more. ``verdict`` is ``above`` or
    ``below`` where the 95 % interval leaves out zero, p after Holm's correction is below 0.05 and the difference exceeds ``noise``;
    else ``not decided``. A method whose set is the baseline's own is the ``same draft``; the second training is ``training noise``.

    Returns:
        The columns of :func:`~elsi_lib.report.tau.compare` with family, same_as (a method before it that its draft serves too),
        noise and verdict; all averages for ``overall``, the pooled one for the other groups.

    Raises:
        ElsiError: as ``compare``; nothing to compare.
    """
    parts = _sets(results, resamples)
    for method, base, family in [(AGAIN, BASELINE, "training"), *((name, of, "norm") for name, of in NORMED.items())]:
        if method in set(results.totals["method"]):
            parts.append(_pair(results, method, base, resamples).assign(family=family, same_as=""))
    if not parts:
        raise ElsiError(f"nothing to compare with {BASELINE} in the study of {results.target}")
    table = pd.concat(parts, ignore_index=True)
    table = table[(table["average"] == "pooled") | (table["group"] == "overall")].reset_index(drop=True)
    again = table[table["family"] == "training"].assign(noise=lambda of: of["difference"].abs())
    noise = again.groupby(["group", "average"])["noise"].max()
    table["noise"] = [noise.get((group, average), np.nan) for group, average in zip(table["group"], table["average"], strict=True)]
    table["verdict"] = [_verdict(row) for row in table.itertuples()]
    place = {name: i for i, name in enumerate(in_order(table["method"]))}
    order = table.assign(place=table["method"].map(place)).sort_values(["place", "temperature", "nodes"], kind="stable")
    return order.drop(columns="place").reset_index(drop=True)


def overall(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`differences` over all questions, pooled."""
    return data[(data["group"] == "overall") & (data["average"] == "pooled")].reset_index(drop=True)


def _sets(results: Results, resamples: int) -> list[pd.DataFrame]:
    """The family ``sets``: distinct drafts are compared; a method that shares one gets its rows, or zeros for the baseline's own."""
    first = same_draft(results.rows, [BASELINE, *results.methods])
    distinct = [name for name in results.methods if first[name] == name]
    if len(distinct) < 2:
        return []
    own = compare(_of(results, distinct), BASELINE, resamples=resamples).assign(family="sets", same_as="")
    zeros = dict.fromkeys(["difference", "low", "high", "percent", "percent_low", "percent_high", "standard_error"], 0.0)
    nothing = own[own["method"] == own["method"].iloc[0]].assign(**zeros, **dict.fromkeys(["detectable", "p", "p_holm"], np.nan))
    parts = [own]
    for name in results.methods:
        if first[name] != name:
            of = nothing if first[name] == BASELINE else own[own["method"] == first[name]]
            parts.append(of.assign(method=name, same_as=first[name]))
    return parts


def _of(results: Results, methods: list[str]) -> pd.DataFrame:
    return results.totals[results.totals["method"].isin(methods)]


def _pair(results: Results, method: str, base: str, resamples: int) -> pd.DataFrame:
    """One method against one other, at the settings and seeds that both have."""
    both = _of(results, [method, base])
    where = ["nodes", "temperature", "seed"]
    shared = both.groupby(where)["method"].transform("nunique") == 2
    if not shared.any():
        raise ElsiError(f"{method} and {base} have no setting in common: evaluate both at the same nodes and temperature")
    return compare(both[shared], base, resamples=resamples)


def _verdict(row) -> str:
    if row.same_as == row.baseline:
        return SAME
    if row.family == "training":
        return TWICE
    beyond = math.isnan(row.noise) or abs(row.difference) > row.noise
    if not (beyond and row.p_holm < _LEVEL and (row.low > 0 or row.high < 0)):
        return OPEN
    return ABOVE if row.difference > 0 else BELOW


def settings_of(data: pd.DataFrame) -> list[tuple[int, float]]:
    """(nodes, temperature) of a table, by temperature and then nodes."""
    found = data[["nodes", "temperature"]].drop_duplicates().itertuples(index=False)
    return sorted(((int(n), float(t)) for n, t in found), key=lambda setting: (setting[1], setting[0]))


def headline(data: pd.DataFrame) -> tuple[int, float]:
    """60 nodes at T = 0, or what is nearest to it: the most nodes at the lowest temperature."""
    found = settings_of(data)
    return HEADLINE if HEADLINE in found else max((s for s in found if s[1] == found[0][1]), key=lambda s: s[0])


@timed
def categories(results: Results, taus: pd.DataFrame) -> pd.DataFrame:
    """tau of the main table's methods by category, pooled; for ``overall`` and ``mt-bench`` also the mean of their categories.

    Returns:
        Columns method, nodes, temperature, group, average (``pooled`` or ``categories``), tau, low, high, questions, steps.
    """
    wide = taus["group"].isin(["overall", "mt-bench"])
    kept = (taus["average"] == "pooled") | ((taus["average"] == "categories") & wide)
    columns = ["method", "nodes", "temperature", "group", "average", "tau", "low", "high", "questions", "steps"]
    return taus[kept & taus["method"].isin(results.methods)][columns].reset_index(drop=True)


@timed
def speed(results: Results, *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95) -> pd.DataFrame:
    """Live decoding against the target alone, on the same questions.

    ``speedup`` is what Spec-Bench's script prints: the mean over questions of tokens per second, over the target's own mean. ``ratio``
    is the mean of the questions' own ratios. Intervals: percentiles over questions drawn with replacement, n - 1 of n as in
    :func:`~elsi_lib.report.tau.tau_table`; too few are sampled to draw within categories.

    Returns:
        Columns method, nodes, temperature, questions, speedup, speedup_low, speedup_high, ratio, ratio_low, ratio_high,
        tokens_per_second, plain_tokens_per_second (means over questions), tau (live, pooled; an answer's first token comes with
        its prompt's pass, which is no step), peak_mb (largest).

    Raises:
        ElsiError: no run of the target alone at a temperature, seconds or tokens of 0 or less.
    """
    live, columns = results.live, SPEED_COLUMNS
    if live.empty:
        return pd.DataFrame(columns=columns)
    if len(bad := live[(live["tokens"] > 0) & ~(live["seconds"] > 0)]):
        raise ElsiError(f"live.csv: {bad['seconds'].iloc[0]} seconds at question {bad['question_id'].iloc[0]}: measure it again")
    live = live.assign(later=(live["tokens"] - 1).clip(lower=0))
    by_question = live.groupby(["method", "nodes", "temperature", "question_id"], dropna=False)
    summed = by_question[["tokens", "later", "steps", "seconds"]].sum()
    summed = summed[summed["tokens"] > 0].reset_index().assign(speed=lambda of: of["tokens"] / of["seconds"])
    peak = live.groupby(["method", "nodes", "temperature"], dropna=False)["peak_mb"].max()
    plain = {t: of.set_index("question_id") for t, of in summed[summed["method"] == PLAIN].groupby("temperature")}
    rows = []
    for (method, nodes, temperature), of in summed.groupby(["method", "nodes", "temperature"], dropna=False):
        if temperature not in plain:
            raise ElsiError(f"live.csv: {method} at T = {temperature:g} and no run of the target alone there, method {PLAIN!r}")
        base = plain[temperature]
        of = of[of["question_id"].isin(base.index)].sort_values("question_id")
        if of.empty:
            raise ElsiError(f"live.csv: {method} at T = {temperature:g} shares no question with the target alone, method {PLAIN!r}")
        own, alone = of["speed"].to_numpy(), base.loc[of["question_id"], "speed"].to_numpy()
        ratios = _ratios(own, alone, resamples, seed, ((1 - level) / 2, (1 + level) / 2))
        tau = of["later"].sum() / of["steps"].sum()
        more = (own.mean(), alone.mean(), tau, peak.loc[(method, nodes, temperature)])
        rows.append((method, nodes, temperature, len(own), *ratios, *more))
    place = {name: i for i, name in enumerate([PLAIN, *in_order(set(live["method"]) - {PLAIN})])}
    table = pd.DataFrame(rows, columns=columns)
    table = table.assign(place=table["method"].map(place)).sort_values(["temperature", "place", "nodes"], ignore_index=True)
    return table.drop(columns="place")


def _ratios(own: np.ndarray, alone: np.ndarray, resamples: int, seed: int, ends: tuple[float, float]) -> tuple[float, ...]:
    """Ratio of means and mean of ratios, each with its interval; NaN ends for a single question."""
    n = len(own)
    if n < 2:
        return (own[0] / alone[0], np.nan, np.nan) * 2
    weights = np.random.default_rng([seed, 2]).multinomial(n - 1, np.full(n, 1 / n), resamples) / (n - 1)
    of_means, of_ratios = (weights @ own) / (weights @ alone), weights @ (own / alone)
    return (own.mean() / alone.mean(), *np.quantile(of_means, ends), (own / alone).mean(), *np.quantile(of_ratios, ends))


# The paper's values


def reported_taus(table: str) -> pd.DataFrame:
    """tau as the paper reports it for its own target: columns target, method (as here), nodes, temperature, tau."""
    values = reported()
    rows = []
    for row in values[(values["artefact"] == table) & (values["target"] == PAPER[table])].itertuples():
        if found := re.fullmatch(r"tau (.+), (\d+) nodes, T=(\d+)", row.quantity):
            method, nodes, temperature = found.groups()
            rows.append((row.target, OURS[method], int(nodes), float(temperature), float(row.value)))
    return pd.DataFrame(rows, columns=["target", "method", "nodes", "temperature", "tau"])


def reported_beside(taus: pd.DataFrame, table: str) -> pd.DataFrame:
    """What the paper reports of gains, beside the same quantity here, as the mean over the settings measured.

    Over which settings the paper averages is not known. Where the methods it compares are not known, nothing is set beside.

    Returns:
        Columns quantity, target, reported, measured, unit; text.
    """
    values, rows = reported(), []
    for row in values[(values["artefact"] == table) & ~values["quantity"].str.fullmatch(r"tau .+, T=\d+")].itertuples():
        told = f"{row.value} to {row.value_to}" if row.value_to else row.value
        measured = _gain(taus, row.quantity, "%" if row.unit == "%" else "tokens")
        unit = row.unit or ("tokens in ours; not stated in the paper's" if measured else "")
        rows.append((row.quantity, row.target, told, measured or "not comparable", f"{unit}{f' ({row.note})' if row.note else ''}"))
    return pd.DataFrame(rows, columns=["quantity", "target", "reported", "measured", "unit"])


def _gain(taus: pd.DataFrame, quantity: str, unit: str) -> str:
    if found := re.fullmatch(r"average gain in tau, (.+) over (.+)", quantity):
        return _mean_gain(taus, *found.groups(), "overall", unit)
    if found := re.fullmatch(r"gain in tau by task, (.+) over (.+), (.+)", quantity):
        return _mean_gain(taus, *found.groups(), unit)
    if found := re.fullmatch(r"tau of (.+) as a share of (.+)'s", quantity):
        method, base = (_mean_taus(taus, OURS[name], "overall") for name in found.groups())
        return f"{100 * (method / base).mean():.1f}" if len(method) and len(base) else ""
    if quantity == "spread of the average tau of ELSI m=1, 2, 3":
        means = [_mean_taus(taus, f"ELSI m={m}", "overall").mean() for m in (1, 2, 3)]
        return f"{max(means) - min(means):.3f}" if not any(map(math.isnan, means)) else ""
    return ""


def _mean_gain(taus: pd.DataFrame, method: str, base: str, group: str, unit: str) -> str:
    a, b = (_mean_taus(taus, OURS[name], group.lower()) for name in (method, base))
    if not len(a) or not len(b):
        return ""
    gain = (100 * (a / b - 1)).mean() if unit == "%" else (a - b).mean()
    return f"{gain:+.1f}" if unit == "%" else f"{gain:+.3f}"


def _mean_taus(taus: pd.DataFrame, method: str, group: str) -> pd.Series:
    of = taus[(taus["method"] == method) & (taus["group"] == group) & (taus["average"] == "pooled")]
    return of.set_index(["nodes", "temperature"])["tau"]
