"""Tables 2 and 3 as pages show them: Markdown from the data frames of :mod:`elsi_lib.report.tau_tables`."""

from __future__ import annotations

import itertools
import math

import pandas as pd

from elsi_lib.report.study import EXTRAS, LOOKUP, PLAIN, Results, groups_in
from elsi_lib.report.tau_tables import headline, overall, settings_of
from elsi_lib.report.words import braces, markdown_table


def main_markdown(data: pd.DataFrame, results: Results) -> str:
    """Table 2 or 3 for a page: the rows, those beside them, and the paper's values in a block of their own."""
    measured = data[data["origin"] == "measured"]
    settings = settings_of(measured)
    blocks = [_main_block(measured, [m for m in results.methods], settings, f"**{results.target}**, measured on {results.prompts}")]
    extras = [name for name in EXTRAS if name in set(measured["method"])]
    if extras:
        blocks.append(_main_block(measured, extras, settings, "**Beside the table**: a set trained again, and a norm before `fc`"))
    paper = data[data["origin"] == "reported"]
    if len(paper):
        shown = settings_of(paper)
        lines = []
        for method, of in paper.groupby("method", sort=False):
            known = {(int(row.nodes), float(row.temperature)): row.tau for row in of.itertuples()}
            lines.append([method, *(f"{known[s]:.2f}" if s in known else "not known" for s in shown)])
        title = f"**{paper['target'].iloc[0]}**, the paper's own target: *reported*, not measured here"
        blocks.append(f"{title}\n\n{_numbers(['method', *map(setting_name, shown)], lines)}")
    return "\n\n".join(blocks)


def _main_block(data: pd.DataFrame, methods: list[str], settings: list[tuple[int, float]], title: str) -> str:
    heads, lines = ["method", "layers", "$S_1$ (nats)", "parameters", "loss (nats)", *map(setting_name, settings)], []
    for method in methods:
        of = data[data["method"] == method]
        if of.empty:
            continue
        row = of.iloc[0]
        taus = {(int(r.nodes), float(r.temperature)): f"{r.tau:.3f} {_interval(r.low, r.high, 3)}" for r in of.itertuples()}
        size = "" if pd.isna(row["parameters"]) or not row["parameters"] else f"{row['parameters'] / 1e6:.1f} M"
        cells = [method, braces(row["layers"]) if row["layers"] else "", _number(row["entropy"], 3), size, _number(row["loss"], 3)]
        lines.append([*cells, *(taus.get(s, "") for s in settings)])
    return f"{title}\n\n{_numbers(heads, lines, words=2)}"


def differences_markdown(data: pd.DataFrame, results: Results, beside: pd.DataFrame) -> str:
    """Differences for a page: the headline setting open, the others folded, and the paper's gains beside ours.

    Args:
        data: from :func:`differences`.
        beside: from :func:`reported_beside`.
    """
    shown = overall(data)
    first = headline(shown)
    parts = [f"**{setting_name(first)}**\n\n{_difference_block(shown, first, results)}"]
    parts += [_folded(setting_name(s), _difference_block(shown, s, results)) for s in settings_of(shown) if s != first]
    if len(beside):
        heads = ["quantity", f"{beside['target'].iloc[0]}, reported", f"{results.target}, measured", "unit"]
        lines = markdown_table(heads, [(row.quantity, row.reported, row.measured, row.unit) for row in beside.itertuples()])
        parts.append(f"**The paper's gains** beside the same quantities here, means over the settings measured\n\n{lines}")
    return "\n\n".join(parts)


def _difference_block(data: pd.DataFrame, setting: tuple[int, float], results: Results) -> str:
    heads = ["method", "against", "difference (tokens)", "percent", "p", "p, Holm", "detectable (tokens)", "verdict"]
    lines = []
    of = data[(data["nodes"] == setting[0]) & (data["temperature"] == setting[1])]
    for row in of.itertuples():
        name = row.method + (f" (as {row.same_as})" if row.same_as else "")
        holm_p = _p(row.p_holm) if row.family == "sets" else ""
        numbers = [f"{row.difference:+.3f} {_interval(row.low, row.high, 3, True)}", f"{row.percent:+.1f} %", _p(row.p), holm_p]
        lines.append([name, row.baseline, *numbers, _number(row.detectable, 3), row.verdict])
    return _numbers(heads, lines, words=2)


def categories_markdown(data: pd.DataFrame, results: Results) -> str:
    """tau by category for a page, one block per setting, the headline one open."""
    first = headline(data)
    parts = [f"**{setting_name(first)}**\n\n{_category_block(data, first, results)}"]
    parts += [_folded(setting_name(s), _category_block(data, s, results)) for s in settings_of(data) if s != first]
    return "\n\n".join(parts)


def _category_block(data: pd.DataFrame, setting: tuple[int, float], results: Results) -> str:
    of = data[(data["nodes"] == setting[0]) & (data["temperature"] == setting[1])]
    methods = [name for name in results.methods if name in set(of["method"])]
    values = of.set_index(["group", "average", "method"])["tau"].to_dict()
    counts = of[of["average"] == "pooled"].groupby("group")["questions"].first()
    lines = []
    for group, average in itertools.product(groups_in(of["group"]), ("pooled", "categories")):
        cells = [values.get((group, average, method)) for method in methods]
        if any(cell is not None for cell in cells):
            name = results.group_name(group)
            name = f"**{name}**, pooled" if group == "overall" and average == "pooled" else name
            name = f"{results.group_name(group)}, mean of categories" if average == "categories" else name
            shown = ["" if cell is None or math.isnan(cell) else f"{cell:.2f}" for cell in cells]
            lines.append([name, str(counts[group]) if average == "pooled" else "", *shown])
    return _numbers(["category", "questions", *methods], lines)


def speed_markdown(data: pd.DataFrame) -> str:
    """The speed table for a page."""
    if data.empty:
        return "*No live decoding in this study.*"
    blocks = []
    for temperature, of in data.groupby("temperature"):
        heads = ["method", "nodes", "questions", "speed-up", "mean of ratios", "tokens/s", r"$\tau$, live", "peak memory (MB)"]
        lines = []
        for row in of.itertuples():
            alone = row.method == PLAIN
            name = "target alone" if alone else row.method
            nodes = "" if alone or row.method == LOOKUP or pd.isna(row.nodes) else f"{int(row.nodes)}"
            ratios = ["1", "1"] if alone else [
                f"{row.speedup:.2f} {_interval(row.speedup_low, row.speedup_high, 2)}",
                f"{row.ratio:.2f} {_interval(row.ratio_low, row.ratio_high, 2)}",
            ]  # fmt: skip
            more = [f"{row.tokens_per_second:.1f}", f"{row.tau:.2f}", _whole(row.peak_mb)]
            lines.append([name, nodes, f"{row.questions}", *ratios, *more])
        blocks.append(f"**T = {temperature:g}**\n\n{_numbers(heads, lines)}")
    return "\n\n".join(blocks)


def setting_name(setting: tuple[int, float]) -> str:
    """A setting in words."""
    return f"{setting[0]} nodes, T = {setting[1]:g}"


def _folded(title: str, block: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{block}\n\n</details>"


def _numbers(heads: list[str], lines: list[list[str]], words: int = 1) -> str:
    """A table whose first ``words`` columns are words and the others numbers."""
    return markdown_table(heads, lines, right=range(words, len(heads)))


def _interval(low: float, high: float, digits: int, signed: bool = False) -> str:
    if math.isnan(low) or math.isnan(high):
        return ""
    sign = "+" if signed else ""
    return f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _number(value: float, digits: int) -> str:
    return "" if pd.isna(value) else f"{value:.{digits}f}"


def _whole(value: float) -> str:
    return "" if pd.isna(value) else f"{value:,.0f}"


def _p(value: float) -> str:
    return "" if pd.isna(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"
