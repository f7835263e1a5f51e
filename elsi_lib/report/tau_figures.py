"""Figures to tables 2 and 3: differences to EAGLE-3, entropy against tau, learning curves, categories; styled as figures 1 to 7."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from elsi_lib.report.figures import BLUE, ENTROPY, GREEN, GREY, ORANGE, _figure, _styled
from elsi_lib.report.study import AGAIN, BASELINE, LOOKUP, NORMED, Results, groups_in
from elsi_lib.report.tau_markdown import setting_name
from elsi_lib.report.tau_tables import ABOVE, BELOW, PAPER, headline, settings_of

PURPLE = sns.color_palette("colorblind")[4]
TAU = r"$\tau$ (tokens per target step)"
# Family of methods -> colour and marker; every figure uses the same.
LOOKS = {
    "EAGLE": (GREY, "s"),
    "ELSI": (BLUE, "o"),
    "ELSI-C": (ORANGE, "D"),
    "lowest": (GREEN, "v"),
    "random": ("black", "X"),
    LOOKUP: (PURPLE, "^"),
}
MAIN = ("EAGLE-2", BASELINE, "ELSI m=1", "ELSI m=3", "lowest", LOOKUP)


def family(method: str) -> str:
    """Family of a method, a key of :data:`LOOKS`."""
    return next((name for name in ("ELSI-C", "ELSI", "EAGLE", "random") if method.startswith(name)), method)


def _look(method: str) -> tuple:
    return LOOKS.get(family(method), ("0.3", "o"))


# Differences


@_styled
def differences_figure(data: pd.DataFrame) -> Figure:
    """Forest plot: paired difference of each method to EAGLE-3 with its interval, one panel per setting.

    Filled where the verdict is above or below, hollow where it is not decided; the band is the training noise. Methods far off the
    others, as prompt lookup, are an arrow at the edge with their number.

    Args:
        data: from :func:`~elsi_lib.report.tau_tables.overall`.
    """
    shown = data[data["family"].isin(["sets", "training"])]
    methods, settings = list(dict.fromkeys(shown["method"])), settings_of(shown)
    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    fig, axes = _figure(rows * (0.19 * len(methods) + 0.75) + 0.4, rows, columns, sharex=True, sharey=True)
    left, right = _limits(shown)
    for ax, setting in zip(axes.flat, settings, strict=False):
        of = shown[(shown["nodes"] == setting[0]) & (shown["temperature"] == setting[1])].set_index("method")
        noise = of["noise"].iloc[0]
        if np.isfinite(noise):
            ax.axvspan(-noise, noise, color="0.92", linewidth=0, zorder=0)
        ax.axvline(0, color="0.3", linewidth=0.8)
        for y, method in enumerate(methods):
            if method in of.index:
                _forest_row(ax, y, of.loc[method], left, right)
        ax.set_title(setting_name(setting))
        ax.set_xlim(left, right)
        ax.set_ylim(len(methods) - 0.5, -0.5)
        ax.set_yticks(range(len(methods)), ["EAGLE-3 again" if name == AGAIN else name for name in methods])
        ax.tick_params(axis="y", length=0)
    for ax in axes.flat[len(settings) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel(rf"difference in $\tau$ to {BASELINE} (tokens)")
    handles = [
        mpl.lines.Line2D([], [], color="0.2", marker="o", markersize=5, label="decided"),
        mpl.lines.Line2D([], [], color="0.2", marker="o", markersize=5, markerfacecolor="white", label="not decided"),
    ]
    if shown["noise"].notna().any():
        handles.append(mpl.patches.Patch(color="0.92", label="training noise"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _limits(shown: pd.DataFrame) -> tuple[float, float]:
    """Limits that hold every interval but prompt lookup's, zero and the band of training noise."""
    near = shown[shown["method"] != LOOKUP] if (shown["method"] != LOOKUP).any() else shown
    noise = shown["noise"].max()
    low = np.nanmin([near["low"].min(), near["difference"].min(), 0.0, -noise])
    high = np.nanmax([near["high"].max(), near["difference"].max(), 0.0, noise])
    margin = 0.12 * (high - low) or 0.05
    return low - margin, high + margin


def _forest_row(ax: Axes, y: int, row: pd.Series, left: float, right: float) -> None:
    color, marker = _look(row.name)
    decided = row["verdict"] in (ABOVE, BELOW)
    value, ends = row["difference"], [x for x in (row["low"], row["high"]) if np.isfinite(x)]
    if not left < min([value, *ends]) or not max([value, *ends]) < right:
        at, sign = (left, 1) if value < (left + right) / 2 else (right, -1)
        face = color if decided else "white"
        ax.plot(at, y, marker="<" if sign == 1 else ">", color=color, markerfacecolor=face, markersize=5, clip_on=False)
        align = "left" if sign == 1 else "right"
        ax.annotate(f"{value:+.2f}", (at, y), (7 * sign, 0), textcoords="offset points", ha=align, va="center", color=color)
        return
    if ends:
        ax.hlines(y, row["low"], row["high"], color=color, linewidth=1.4)
    ax.plot(value, y, marker=marker, markersize=5, color=color, markerfacecolor=color if decided else "white")


# Entropy


@_styled
def entropy_figure(data: pd.DataFrame, rho: pd.DataFrame) -> Figure:
    """tau against S_1, one point per layer set, one panel per setting with its rank correlation.

    Args:
        data: from :func:`~elsi_lib.report.tau_measures.entropy_against_tau`.
        rho: from :func:`~elsi_lib.report.tau_measures.correlations`.
    """
    settings = settings_of(data)
    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    fig, axes = _figure(2.5 * rows + 0.5, rows, columns, sharex=True, sharey="row")
    every = rho[rho["sets"] == "all"].set_index(["nodes", "temperature"])
    sizes = {1: 4.0, 2: 5.5}
    for ax, setting in zip(axes.flat, settings, strict=False):
        of = data[(data["nodes"] == setting[0]) & (data["temperature"] == setting[1])]
        # These two are near one another on most targets: the name of the lower one goes below or beside it.
        pair = of[of["method"].isin([BASELINE, "ELSI m=3"])]
        lower = pair.loc[pair["tau"].idxmin(), "method"] if len(pair) > 1 else ""
        for row in of.itertuples():
            color, marker = _look(row.method)
            about = {"color": color, "marker": marker, "markersize": sizes.get(row.size, 7.0), "linestyle": ""}
            if np.isfinite(row.low):
                ax.vlines(row.entropy, row.low, row.high, color=color, linewidth=0.9, alpha=0.6)
            ax.plot(row.entropy, row.tau, **about)
            if row.method in (BASELINE, "ELSI m=3", "lowest"):
                below = row.method == lower
                edge = row.entropy > data["entropy"].quantile(0.85)
                if below and not edge:
                    place, shift, align = row.tau, (5, -1), "left"
                else:
                    end = row.low if below else row.high
                    place, shift = (end if np.isfinite(end) else row.tau), (0, -2 if below else 2)
                    align = "right" if edge else "center"
                ax.annotate(
                    row.method, (row.entropy, place), shift, textcoords="offset points", ha=align, va="top" if below else "bottom"
                )
        found = every.loc[setting]
        told = "" if np.isnan(found["rho"]) else rf": $\rho$ = {found['rho']:+.2f}, n = {int(found['n'])}"
        ax.set_title(f"{setting_name(setting)}{told}")
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
        ax.margins(0.09, 0.1)
    for ax in axes.flat[len(settings) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel(ENTROPY)
    for ax in axes[:, 0]:
        ax.set_ylabel(TAU)
    found = [name for name in LOOKS if name in {family(method) for method in data["method"]}]
    handles = [mpl.lines.Line2D([], [], color=LOOKS[f][0], marker=LOOKS[f][1], linestyle="", label=f) for f in found]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


# Training


SMOOTHED = 7  # lines of a learning curve that a point of the figure averages


@_styled
def training_figure(data: pd.DataFrame) -> Figure:
    """Learning curves: loss and share of likeliest tokens that are the target's, and that share by step at the end.

    Args:
        data: from :func:`~elsi_lib.report.tau_measures.curves`.
    """
    fig, axes = _figure(3.0, 1, 3)
    shares = [name for name in data.columns if name.startswith("accept_")]
    named = [*("EAGLE-2", BASELINE, AGAIN, "ELSI m=3", "lowest"), *NORMED]
    looks = {AGAIN: ("0.45", ":"), "EAGLE-2": ("black", "-."), **dict.fromkeys(NORMED, None)}
    drawn: dict[str, mpl.lines.Line2D] = {}
    for _, of in data.groupby("draft", sort=False):
        name = next((m for m in named if m in of["methods"].iloc[0].split(", ")), "other sets")
        color, dash = looks.get(name) or (_look(name)[0], "--" if name in NORMED else "-")
        about = {"color": "0.82", "linewidth": 0.9, "zorder": 1} if name == "other sets" else {"color": color, "linestyle": dash}
        millions = of["tokens"] / 1e6
        smooth = of[["loss", "accept_0"]].rolling(SMOOTHED, min_periods=1).mean()  # batches are small, and differ
        (line,) = axes[0, 0].plot(millions, smooth["loss"], **about)
        axes[0, 1].plot(millions, 100 * smooth["accept_0"], **about)
        end = of.iloc[-max(1, len(of) // 10) :]
        axes[0, 2].plot(range(len(shares)), 100 * end[shares].mean(), marker="o", markersize=3, **about)
        drawn.setdefault(name, line)
    for ax, title in zip(axes[0], ("loss (nats)", "agreement, step 0 (%)", "agreement, end (%)"), strict=True):
        ax.set_title(title)
        ax.set_xlabel("step" if ax is axes[0, 2] else "million tokens")
    axes[0, 2].set_xticks(range(len(shares)))
    for ax in axes[0, 1:]:
        ax.set_ylim(bottom=0)
    # The first stretches fall from ln of the vocabulary and would flatten the rest.
    later = data[data["tokens"] > 0.1 * data["tokens"].max()]["loss"]
    if len(later):
        axes[0, 0].set_ylim(later.min() - 0.1 * np.ptp(later) - 1e-3, later.max() + 0.25 * np.ptp(later) + 1e-3)
    order = sorted(drawn, key=lambda name: (*named, "other sets").index(name))
    fig.legend([drawn[name] for name in order], order, loc="outside lower center", ncols=4)
    return fig


# Categories


@_styled
def categories_figure(
    data: pd.DataFrame, differences: pd.DataFrame, results: Results, tasks: dict[str, tuple[float, float]]
) -> Figure:
    """tau by category with intervals, and ELSI m=3 against EAGLE-3 there in percent, at the headline setting.

    Args:
        data: from :func:`~elsi_lib.report.tau_tables.categories`.
        differences: from :func:`~elsi_lib.report.tau_tables.differences`.
        tasks: from :func:`~elsi_lib.report.tau_measures.reported_tasks`; drawn as bands labelled as reported.
    """
    setting = headline(data)
    of = _at(data[data["average"] == "pooled"], setting)
    against = differences[(differences["average"] == "pooled") & (differences["method"] == "ELSI m=3")]
    against = _at(against, setting).set_index("group")
    groups, methods = groups_in(of["group"]), [name for name in MAIN if (of["method"] == name).any()]
    fig, axes = _figure(0.3 * len(groups) + 1.1, 1, 2, sharey=True, width_ratios=[1.5, 1])
    ax, right = axes[0]
    for number, method in enumerate(methods):
        color, marker = _look(method)
        hollow = method in ("EAGLE-2", "ELSI m=1")
        one = of[of["method"] == method].set_index("group").reindex(groups)
        y = np.arange(len(groups)) - 0.32 + 0.64 * (number + 0.5) / len(methods)
        ax.hlines(y, one["low"], one["high"], color=color, linewidth=0.9)
        ax.plot(one["tau"], y, linestyle="", marker=marker, markersize=4, color=color, markerfacecolor="white" if hollow else color,
                label=method)  # fmt: skip
    ax.set_xlabel(TAU)
    ax.set_title(setting_name(setting))
    right.axvline(0, color="0.3", linewidth=0.8)
    for y, group in enumerate(groups):
        if group in tasks:
            label = {} if right.patches else {"label": f"reported, {PAPER['table2']}"}
            right.barh(y, tasks[group][1] - tasks[group][0], 0.7, tasks[group][0], facecolor="white", edgecolor="0.4", hatch="////",
                       linewidth=0.8, **label)  # fmt: skip
        if group in against.index:
            row = against.loc[group]
            beyond = row["percent_low"] > 0 or row["percent_high"] < 0
            right.hlines(y, row["percent_low"], row["percent_high"], color=BLUE, linewidth=1.4)
            right.plot(row["percent"], y, marker="o", markersize=5, color=BLUE, markerfacecolor=BLUE if beyond else "white")
    right.set_title(f"ELSI m=3 over {BASELINE}")
    right.set_xlabel(r"gain in $\tau$ (%)")
    ax.set_yticks(range(len(groups)), [results.group_name(group) for group in groups])
    ax.set_ylim(len(groups) - 0.5, -0.5)
    for one in (ax, right):
        one.tick_params(axis="y", length=0)
        for y in range(len(groups) - 1):
            one.axhline(y + 0.5, color="0.93", linewidth=0.8, zorder=0)
    entries = [one.get_legend_handles_labels() for one in (ax, right)]
    fig.legend([h for e in entries for h in e[0]], [t for e in entries for t in e[1]], loc="outside lower center", ncols=4)
    return fig


def _at(data: pd.DataFrame, setting: tuple[int, float]) -> pd.DataFrame:
    return data[(data["nodes"] == setting[0]) & (data["temperature"] == setting[1])]
