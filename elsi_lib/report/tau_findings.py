"""What tables 2 and 3 say, in sentences made from their numbers. Where the numbers do not decide, the sentence says so."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pandas as pd

from elsi_lib.report.findings import Finding
from elsi_lib.report.study import AGAIN, BASELINE, LOOKUP, NORMED, PLAIN, Results, in_order
from elsi_lib.report.tau_markdown import setting_name
from elsi_lib.report.tau_tables import ABOVE, BELOW, OPEN, SAME, headline, overall, settings_of
from elsi_lib.report.words import braces, p_value

ELSI = "ELSI m=3"


def main(data: pd.DataFrame, results: Results, table: str) -> Finding:
    """Table 2 or 3: who is highest and lowest, what the floor is, and whether the averages agree."""
    measured = data[(data["origin"] == "measured") & data["method"].isin(results.methods)]
    setting = headline(measured)
    of = _at(measured, setting).set_index("method")
    trained = of[of["draft"] != ""].sort_values("tau", ascending=False)
    best, worst = trained.iloc[0], trained.iloc[-1]
    drafts, served = trained["draft"].nunique(), ", ".join(in_order(trained.index[trained["draft"] == best["draft"]]))
    lines = [
        f"**{results.target}**, {results.prompts}, {setting_name(setting)}: of {drafts} trained drafts that of {served}, "
        f"{braces(best['layers'])}, has the highest pooled tau, {_with_interval(best)}, and that of {worst.name}, "
        f"{braces(worst['layers'])}, the least, {_with_interval(worst)}."
    ]
    winners = {s: _at(measured[measured["draft"] != ""], s).sort_values("tau").iloc[-1]["draft"] for s in settings_of(measured)}
    same = sum(winner == best["draft"] for winner in winners.values())
    if len(winners) > 1:
        lines.append(f"The same draft is highest in {same} of {len(winners)} settings.")
    values = {f"{table}_best_tau": best["tau"], f"{table}_lowest_tau": worst["tau"], f"{table}_best_in_settings": same}
    if LOOKUP in of.index:
        floor = of.loc[LOOKUP]
        above = int((trained.groupby("draft")["tau"].first() > floor["tau"]).sum())
        which = "every trained draft is" if above == drafts else f"{above} of {drafts} trained drafts are"
        lines.append(f"Prompt lookup, which trains nothing, has {_with_interval(floor)}; {which} above it.")
        values[f"{table}_lookup_tau"] = floor["tau"]
    for method in (BASELINE, ELSI):
        if method in of.index:
            values[f"{table}_{_key(method)}_tau"] = of.loc[method, "tau"]
    order = trained.drop_duplicates("draft")
    macro = order.sort_values("macro", ascending=False).iloc[0]
    if macro["draft"] != best["draft"]:
        lines.append(f"By the mean over categories the highest is another, {macro.name} with {macro['macro']:.3f}.")
    if empty := int(of["empty"].max()):
        lines.append(f"{empty} of {int(of['questions'].max()) + empty} questions were answered with nothing and have no tau.")
    text = " ".join(lines)
    return Finding(text, text.replace("**", ""), values)


def differences(data: pd.DataFrame, results: Results, table: str) -> Finding:
    """Differences to EAGLE-3: ELSI m=3 first, then the others, the noise of training, and what could have been found."""
    pooled = overall(data)
    sets, sentences = pooled[pooled["family"] == "sets"], []
    noise = pooled["noise"].iloc[0]
    values: dict[str, float] = {}
    chosen = sets[sets["method"] == ELSI]
    if len(chosen):
        sentences.append(_elsi(chosen, noise))
        at = _at(chosen, headline(chosen)).iloc[0]
        key = f"{table}_elsi_m3_difference"
        numbers = {key: at["difference"], f"{key}_low": at["low"], f"{key}_high": at["high"], f"{key}_percent": at["percent"]}
        values |= {name: value for name, value in numbers.items() if not math.isnan(value)}
        values[f"{table}_elsi_m3_above"] = (chosen["verdict"] == ABOVE).sum()
        values[f"{table}_elsi_m3_below"] = (chosen["verdict"] == BELOW).sum()
    setting = headline(sets if len(sets) else pooled)
    of = _at(sets[(sets["method"] != LOOKUP) & (sets["same_as"] == "")], setting)
    if len(of):
        named = {verdict: ", ".join(of[of["verdict"] == verdict]["method"]) or "none" for verdict in (ABOVE, BELOW, OPEN)}
        sentences.append(
            f"All sets against {BASELINE} at {setting_name(setting)}: above, {named[ABOVE]}; below, {named[BELOW]}; "
            f"not decided, {named[OPEN]}."
        )
        values |= {f"{table}_decided_{verdict}": (of["verdict"] == verdict).sum() for verdict in (ABOVE, BELOW)}
        low, high = of["detectable"].min(), of["detectable"].max()
        if not math.isnan(high):
            sentences.append(
                f"With these questions a true difference of {low:.3f} to {high:.3f} tokens, depending on the set, would have been "
                "found with 80 % probability at 5 %, before any correction and for these drafts as they were trained."
            )
            values[f"{table}_detectable"] = high
    again = pooled[pooled["family"] == "training"]
    if len(again):
        listed = ", ".join(f"{row.difference:+.3f} ({setting_name((row.nodes, row.temperature))})" for row in again.itertuples())
        sentences.append(
            f"**Noise of training**: {BASELINE}'s set trained again from other initial weights differs from the first by {listed} "
            f"tokens. A difference has to exceed the largest of these, {noise:.3f}, to count as decided here. One repetition gives "
            "the size of this noise, not its distribution."
        )
        values[f"{table}_noise"] = noise
    else:
        sentences.append(
            "No set was trained twice, so the noise of training is not known: a difference between two drafts need not be one of "
            "their layers."
        )
    for method, base in NORMED.items():
        normed = pooled[(pooled["family"] == "norm") & (pooled["method"] == method)]
        if len(normed):
            row = _at(normed, headline(normed)).iloc[0]
            sentences.append(
                f"A norm before `fc` changes {base} by {row['difference']:+.3f}{_interval(row)} tokens ({row['verdict']}, "
                f"{setting_name(headline(normed))})."
            )
            values[f"{table}_norm_{_key(base)}"] = row["difference"]
    text = "\n\n".join(sentences)
    plain = text.replace("**", "").replace("`", "").replace("\n\n", " ")
    return Finding(text, f"Forest plot of paired differences in tau to {BASELINE}, one panel per setting. {plain}", values)


def _elsi(of: pd.DataFrame, noise: float) -> str:
    """Whether ELSI m=3 is above EAGLE-3, and if not, at which hurdle it stays."""
    counts = {verdict: int((of["verdict"] == verdict).sum()) for verdict in (ABOVE, BELOW, OPEN, SAME)}
    if counts[SAME]:
        return f"{ELSI} chooses the set of {BASELINE}, so there is nothing to compare."
    listed = "; ".join(
        f"{setting_name((row.nodes, row.temperature))}: {row.difference:+.3f}{_interval(row)} tokens, {row.percent:+.1f} %, "
        f"{row.verdict}"
        for row in of.itertuples()
    )
    n, settings = len(of), "settings" if len(of) > 1 else "setting"
    if counts[ABOVE] == n:
        head = f"{ELSI} is above {BASELINE} in all {n} {settings}"
    elif counts[BELOW] == n:
        head = f"{ELSI} is below {BASELINE} in all {n} {settings}"
    elif counts[OPEN] == n:
        head = f"Whether {ELSI} is above {BASELINE} is not decided in any of {n} {settings}"
    else:
        head = (
            f"{ELSI} against {BASELINE}: above in {counts[ABOVE]}, below in {counts[BELOW]}, not decided in {counts[OPEN]} of {n} "
            f"{settings}"
        )
    text = f"**{head}** ({listed})."
    clear = of[(of["low"] > 0) | (of["high"] < 0)]
    swallowed = clear[clear["difference"].abs() <= noise] if not math.isnan(noise) else clear.iloc[:0]
    if len(swallowed):
        text += (
            f" In {len(swallowed)} of {n} the interval over questions leaves out zero, but two trainings of one set lie as far apart "
            f"({noise:.3f} tokens): that difference may be luck of training."
        )
    return text


def by_category(data: pd.DataFrame, differences: pd.DataFrame, results: Results, table: str) -> Finding:
    """Where ELSI m=3 gains and loses, and whether pooled and macro averages agree about it."""
    setting = headline(data)
    of = _at(differences[differences["method"] == ELSI], setting)
    pooled = of[of["average"] == "pooled"].set_index("group")
    single = pooled.drop(index=["overall", "mt-bench"], errors="ignore")
    if single.empty:
        return Finding(f"{ELSI} was not compared by category.", "tau by category.", {})
    up = single[single["difference"] > 0]
    clear = single[(single["low"] > 0) | (single["high"] < 0)]
    lines = [
        f"{setting_name(setting)}, {ELSI} against {BASELINE}: higher in {len(up)} of {len(single)} categories; the 95 % interval, not "
        f"corrected for the number of categories, leaves out zero in {len(clear)}"
    ]
    lines[0] += f" ({', '.join(f'{name} {row.percent:+.1f} %' for name, row in clear.iterrows())})." if len(clear) else "."
    best, worst = single["percent"].idxmax(), single["percent"].idxmin()
    lines.append(
        f"The difference is largest in {best}, {single.loc[best, 'percent']:+.1f} %, and least in {worst}, "
        f"{single.loc[worst, 'percent']:+.1f} %."
    )
    macro = of[(of["average"] == "categories") & (of["group"] == "overall")].iloc[0]
    total = pooled.loc["overall"]
    agree = "agree" if np.sign(macro["difference"]) == np.sign(total["difference"]) else "disagree"
    lines.append(
        f"Pooled over all steps the difference is {total['difference']:+.3f}{_interval(total)}, as the mean over categories "
        f"{macro['difference']:+.3f}{_interval(macro)}: the two {agree} in sign."
    )
    taus = _at(data[(data["average"] == "pooled") & (data["method"] == BASELINE)], setting).set_index("group")["tau"]
    taus = taus.drop(index=["overall", "mt-bench"], errors="ignore").dropna()
    lines.append(f"{BASELINE} itself reaches from {taus.min():.2f} in {taus.idxmin()} to {taus.max():.2f} in {taus.idxmax()}.")
    text = " ".join(lines)
    key = f"{table}_categories"
    values = {f"{key}_higher": len(up), f"{key}_clear": len(clear), f"{key}_macro_difference": macro["difference"]}
    return Finding(text, "tau by category with intervals, and the gain of ELSI m=3 over EAGLE-3. " + text, values)


def entropy(rho: pd.DataFrame, table: str) -> Finding:
    """Whether sets of higher entropy have higher tau, and how little so few sets can tell.

    Args:
        rho: from :func:`~elsi_lib.report.tau_measures.correlations`.
    """
    lines, values = [], {}
    for name, of in rho.groupby("sets", sort=False):
        n = int(of["n"].max())
        what = f"all {n} sets" if name == "all" else f"the {n} sets of three layers"
        if not of["rho"].notna().any():
            lines.append(f"Over {what} there is no rank correlation to give: too few sets.")
            continue
        named = [(row, setting_name((row.nodes, row.temperature))) for row in of.itertuples()]
        listed = ", ".join(f"{row.rho:+.2f} ({setting}, {p_value(row.p)})" for row, setting in named)
        lines.append(f"Rank correlation (Spearman) of $S_1$ and tau over {what}: {listed}.")
        at = _at(of, headline(of)).iloc[0]
        values[f"{table}_rho_{'all' if name == 'all' else 'three'}"] = at["rho"]
        if name == "all":
            needed = critical_rho(n)
            values[f"{table}_rho_needed"] = needed
            beyond = int((of["rho"].abs() >= needed).sum())
            lines.append(
                f"With {n} sets |ρ| has to reach {needed:.2f} for p below 5 %; it does in {beyond} of {len(of)} settings, which share "
                "their drafts and are not independent."
            )
    lines.append(
        "Sets were chosen by rules and by entropy itself, not at random, and single layers differ from triples in more than entropy: "
        "this is a description of these sets, not a test of entropy as a criterion."
    )
    text = " ".join(lines)
    alt = "tau against matrix entropy, one point per layer set and panel per setting. " + text.replace("$S_1$", "S_1")
    return Finding(text, alt, {name: value for name, value in values.items() if not math.isnan(value)})


def critical_rho(n: int, alpha: float = 0.05, draws: int = 100_000) -> float:
    """The smallest |rho| of n untied pairs that chance reaches with a probability below alpha, 1 where none is so rare: from all
    orders up to nine pairs, from random ones beyond."""
    ranks = np.arange(n) - (n - 1) / 2
    exact = n <= 9
    orders = np.array(list(permutations(ranks))) if exact else np.random.default_rng(0).permuted(np.tile(ranks, (draws, 1)), axis=1)
    found = np.sort(np.abs(orders @ ranks) / (ranks @ ranks))
    values, first = np.unique(np.round(found, 10), return_index=True)
    below = values[(len(found) - first) / len(found) < alpha]
    return float(below[0]) if len(below) else 1.0


def training(data: pd.DataFrame, results: Results, table: str) -> Finding:
    """Learning curves: losses at the end, and whether they order the sets as tau does."""
    if data.empty:
        return Finding("This study kept no learning curves.", "No learning curves.", {})
    rows = results.rows[results.rows["loss"].notna() & (results.rows["draft"] != "")].drop_duplicates("draft").set_index("method")
    best, worst = rows["loss"].idxmin(), rows["loss"].idxmax()
    tokens, steps = data["tokens"].max() / 1e6, results.training["step"].nunique()
    tail = max(1, steps // 10)  # as in training itself
    lines = [
        f"{data['draft'].nunique()} drafts saw {tokens:.2f} million tokens each. The loss at the end, a mean over the last {tail} of "
        f"{steps} reported batches, which all drafts share, is lowest for {best}, {rows.loc[best, 'loss']:.3f} nats, and highest for "
        f"{worst}, {rows.loc[worst, 'loss']:.3f}."
    ]
    if {BASELINE, AGAIN} <= set(rows.index):
        apart = abs(rows.loc[AGAIN, "loss"] - rows.loc[BASELINE, "loss"])
        lines.append(f"The two trainings of {BASELINE}'s set end {apart:.3f} nats apart.")
    last = results.training["step"].drop_duplicates().nlargest(tail)
    ends = results.training[(results.training["draft"] == rows.loc[best, "draft"]) & results.training["step"].isin(last)]["loss"]
    lines.append(f"Single batches of that stretch are far apart: {ends.min():.2f} to {ends.max():.2f} nats for {best}.")
    text = " ".join(lines)
    values = {f"{table}_lowest_loss": rows["loss"].min(), f"{table}_highest_loss": rows["loss"].max()}
    values[f"{table}_million_tokens"] = tokens
    return Finding(text, "Learning curves of all drafts: loss and agreement with the target. " + text, values)


def speed(data: pd.DataFrame, table: str) -> Finding:
    """Whether live decoding is faster than the target alone, and than prompt lookup."""
    drafted = data[data["method"] != PLAIN]
    if drafted.empty:
        return Finding("This study decoded nothing live, so it says nothing of seconds.", "No live decoding.", {})
    lines, values = [], {}
    for temperature, of in drafted.groupby("temperature"):
        best = of.loc[of["speedup"].idxmax()]
        told = f"{best['speedup']:.2f}{_interval(best, 'speedup_low', 'speedup_high', 2)}"
        low, high = best["speedup_low"], best["speedup_high"]
        tree = f" ({int(best['nodes'])} nodes)" if best["nodes"] > 0 and best["method"] != LOOKUP else ""
        word = "faster than it" if low > 1 else "slower than it" if high < 1 else "not clearly different from it"
        lines.append(
            f"T = {temperature:g}, {int(best['questions'])} questions: {best['method']}{tree} is the fastest, "
            f"{told} times the target alone, {word}."
        )
        if len(lookup := of[of["method"] == LOOKUP]) and best["method"] != LOOKUP:
            lines.append(f"Prompt lookup reaches {lookup['speedup'].max():.2f}.")
        values |= {f"{table}_speedup_T{temperature:g}": best["speedup"], f"{table}_live_questions_T{temperature:g}": best["questions"]}
        order = of.dropna(subset=["tau", "speedup"])
        if len(order) > 1 and order.loc[order["tau"].idxmax(), "method"] != best["method"]:
            lines.append(f"The highest tau there, {order['tau'].max():.2f}, belongs to {order.loc[order['tau'].idxmax(), 'method']}.")
    text = " ".join(lines)
    return Finding(text, text, values)


def _at(data: pd.DataFrame, setting: tuple[int, float]) -> pd.DataFrame:
    return data[(data["nodes"] == setting[0]) & (data["temperature"] == setting[1])]


def _interval(row, low: str = "low", high: str = "high", digits: int = 3) -> str:
    a, b = (row[name] if isinstance(row, pd.Series) else getattr(row, name) for name in (low, high))
    sign = "+" if low == "low" else ""
    return "" if math.isnan(a) else f" [{a:{sign}.{digits}f}, {b:{sign}.{digits}f}]"


def _with_interval(row: pd.Series) -> str:
    return f"{row['tau']:.3f}" + ("" if math.isnan(row["low"]) else f" [{row['low']:.3f}, {row['high']:.3f}]")


def _key(method: str) -> str:
    return method.lower().replace("=", "").replace("-", "").replace(" ", "_")
