"""The paper's figures 1 to 7, from the data frames of :mod:`elsi_lib.report.measures`; one function each, one style for all.

Figures are seven inches wide with text of nine points and more, on white, in colours that colour-blind readers can tell apart.
They are returned detached from pyplot, so a notebook shows what it is told to show, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import matplotlib as mpl
import matplotlib.patheffects as pe
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from elsi_lib.report.measures import BLOCKS, QUIET, THIRDS, TOKENS, layer_columns

ENTROPY = "matrix entropy $S_1$ (nats)"
LAYER = "decoder block $j$ (0-based)"
WIDTH = 7.0  # inches
BLUE, ORANGE, GREEN, GREY = (*sns.color_palette("colorblind", 3), "0.45")
YELLOW = "#ffd60a"
STYLE = {
    **sns.axes_style("ticks", {"axes.spines.right": False, "axes.spines.top": False}),
    **sns.plotting_context("paper"),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize", "font.size"), 9.0),
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.0,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}
_ENTROPY_MAP, _CKA_MAP = "mako", "Blues"


def _figure(height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, np.ndarray]:
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **options)


def _styled(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw within the house style, whatever the caller's is."""

    @functools.wraps(function)
    def draw(*args, **kwargs):
        with mpl.rc_context(STYLE):
            fig = function(*args, **kwargs)
            fig.draw_without_rendering()  # the layout of square panels settles on the second pass, which saving is
            return fig

    return draw


def _layer_axis(ax: Axes, n: int, label: bool = True) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlim(-0.5, n - 0.5)
    if label:
        ax.set_xlabel(LAYER)


@_styled
def figure1(data: pd.DataFrame) -> Figure:
    """Entropy of single prompts along depth: thin lines, median, and the band that holds 80 % of the prompts.

    Args:
        data: from :func:`~elsi_lib.report.measures.prompt_entropies`.
    """
    readings = [r for r in (TOKENS, BLOCKS) if (data["reading"] == r).any()]
    fig, axes = _figure(3.3, 1, len(readings))
    for ax, reading in zip(axes[0], readings, strict=True):
        of = data[data["reading"] == reading]
        values = layer_columns(of[of["first_position"] == "kept"])
        layers = np.arange(values.shape[1])
        ax.plot(layers, values.T, color="0.6", alpha=0.3, linewidth=0.5, rasterized=len(values) > 40)
        low, middle, high = np.percentile(values, [10, 50, 90], axis=0)
        ax.fill_between(layers, low, high, color=BLUE, alpha=0.25, linewidth=0, label="10 to 90 % of prompts")
        ax.plot(layers, middle, color=BLUE, linewidth=2, label="median prompt")
        dropped = layer_columns(of[of["first_position"] == "dropped"])
        if len(dropped):
            ax.plot(layers, np.median(dropped, axis=0), color=ORANGE, linestyle="--", label="median, first position dropped")
        ax.set_title(f"{reading} ({len(values)} prompts)")
        ax.set_ylim(bottom=0)
        _layer_axis(ax, len(layers))
    axes[0, 0].set_ylabel(ENTROPY)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


@_styled
def figure2(data: pd.DataFrame) -> Figure:
    """The wave: entropy of each layer's representative along depth, with and without each prompt's first position.

    Args:
        data: from :func:`~elsi_lib.report.measures.wave`.
    """
    targets = list(data["target"].unique())
    norms = data["norm_ratio"].notna().any()
    fig, axes = _figure(
        4.6 if norms else 3.0, 2 if norms else 1, len(targets), height_ratios=[2.2, 1] if norms else None, sharex="col"
    )
    for column, target in enumerate(targets):
        of = data[data["target"] == target]
        ax = axes[0, column]
        looks = {"kept": (BLUE, "-", "all positions"), "dropped": (ORANGE, "--", "first position of each prompt dropped")}
        looks[QUIET] = (GREEN, ":", "rows without outlying states")
        for first, (color, dash, label) in looks.items():
            one = of[of["first_position"] == first]
            if one.empty:
                continue
            if one["low"].notna().any():
                about = {"color": color, "alpha": 0.25, "linewidth": 0, "label": "±1.96 s.d. over prompts"}
                ax.fill_between(one["layer"], one["low"], one["high"], **about)
            ax.plot(one["layer"], one["entropy"], color=color, linestyle=dash, marker="o", markersize=2.5, label=label)
        ax.set_title(target)
        ax.set_ylim(bottom=0)
        one = of[of["first_position"] == "kept"]
        _layer_axis(ax, len(one), label=not norms)
        if norms:
            below = axes[1, column]
            below.axhline(1, color="0.8", linewidth=0.8)
            below.plot(one["layer"], one["norm_ratio"], color=GREY)
            below.set_yscale("log")
            below.set_ylim(bottom=min(0.8, one["norm_ratio"].min()))
            _layer_axis(below, len(one))
    axes[0, 0].set_ylabel(ENTROPY)
    if norms:
        axes[1, 0].set_ylabel("norm, first position\n/ median of others")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = dict(sorted(zip(labels, handles, strict=True), key=lambda pair: not pair[0].startswith("all")))
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2)
    return fig


@_styled
def figure3(data: pd.DataFrame) -> Figure:
    """Entropy of layer pairs: the layers of highest entropy, each paired with all others; the best pair is boxed.

    Args:
        data: from :func:`~elsi_lib.report.measures.pair_entropies`.
    """
    table = data.pivot(index="seed_place", columns="layer", values="entropy")
    seeds = data.groupby("seed_place")["seed"].first()
    fig, axes = _figure(1.3 + 0.24 * len(table))
    ax = axes[0, 0]
    ax.set_facecolor("0.88")  # a seed with itself is no pair
    image = ax.imshow(np.ma.masked_invalid(table.to_numpy()), cmap=_ENTROPY_MAP, aspect="auto", interpolation="none")
    best = data.loc[data["place"].idxmin()]
    box = {"fill": False, "edgecolor": YELLOW, "linewidth": 2.2, "path_effects": _outline()}
    ax.add_patch(mpl.patches.Rectangle((best["layer"] - 0.5, best["seed_place"] - 0.5), 1, 1, **box))
    ax.set_yticks(range(len(table)), [f"{seed}" for seed in seeds])
    ax.set_ylabel("seed (highest entropy on top)")
    _layer_axis(ax, len(table.columns))
    sns.despine(ax=ax, left=True, bottom=True)
    fig.colorbar(image, ax=ax, label=f"{ENTROPY} of the pair", pad=0.01)
    pair = tuple(sorted((int(best["seed"]), int(best["layer"]))))
    ax.set_title(f"best of these pairs: {{{pair[0]}, {pair[1]}}}, {best['entropy']:.3f} nats (boxed)")
    return fig


@_styled
def figure4(data: pd.DataFrame, reported: dict[str, float] | None = None) -> Figure:
    """What the token filter does to single prompts: the shape along depth, and the variance between prompts by thirds of depth.

    Args:
        data: from :func:`~elsi_lib.report.measures.variance_between_prompts`.
        reported: the paper's change of variance (percent) by third, for another target; drawn hollow and labelled as reported.
    """
    readings = [r for r in (TOKENS, BLOCKS) if (data["reading"] == r).any()]
    names = {"all": "all positions", "kept": "kept by the filter", "random": "as many at random"}
    looks = {"all": (GREY, "-", "s"), "kept": (BLUE, "-", "o"), "random": (ORANGE, "--", "D")}
    fig, axes = _figure(2.9 * len(readings) + 0.4, len(readings), 2, width_ratios=[1, 1.05])
    for row, reading in enumerate(readings):
        of = data[data["reading"] == reading]
        ax = axes[row, 0]
        for positions, (color, dash, _) in looks.items():
            one = of[(of["positions"] == positions) & (of["first_position"] == "kept")]
            mean, variance = (one[one["quantity"] == q]["value"].to_numpy(dtype=float) for q in ("mean", "variance"))
            if len(mean) == 0:
                continue
            layers, sd = np.arange(len(mean)), np.sqrt(variance)
            ax.fill_between(layers, np.maximum(mean - sd, 0), mean + sd, color=color, alpha=0.15, linewidth=0)
            ax.plot(layers, mean, color=color, linestyle=dash, label=names[positions])
        ax.set_title(f"{reading}: mean ± s.d. over prompts")
        ax.set_ylabel(ENTROPY)
        ax.set_ylim(bottom=0)
        _layer_axis(ax, len(mean) or len(layers), label=row == len(readings) - 1)
        _variance_panel(axes[row, 1], of, looks, reported, row == len(readings) - 1)
    handles = [
        mpl.lines.Line2D([], [], color=c, linestyle=d, marker=k, markersize=5, label=names[p]) for p, (c, d, k) in looks.items()
    ]
    handles.append(
        mpl.lines.Line2D([], [], color="0.2", marker="o", markerfacecolor="white", linestyle="", label="first position dropped")
    )
    if reported:
        handles.append(mpl.lines.Line2D([], [], color="0.2", marker="*", markersize=9, markerfacecolor="white", linestyle="",
                                        label="reported, Qwen3-4B"))  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _variance_panel(ax: Axes, of: pd.DataFrame, looks: dict, reported: dict[str, float] | None, last: bool) -> None:
    change = of[of["quantity"] == "change"]
    series = [
        (positions, first)
        for positions in ("kept", "random")
        for first in ("kept", "dropped")
        if ((change["positions"] == positions) & (change["first_position"] == first)).any()
    ]
    values = pd.concat([change["value"], change["low"], change["high"], pd.Series(list((reported or {}).values()), dtype=float)])
    low, high = max(min(values.min(), -50.0), -98.0), min(max(values.max(), 100.0), 1000.0)
    left, right = 100 * ((1 + low / 100) * 0.85 - 1), 100 * ((1 + high / 100) * 1.15 - 1)
    step = 0.8 / (len(series) + bool(reported))
    for index, (positions, first) in enumerate(series):
        color, _, marker = looks[positions]
        one = change[(change["positions"] == positions) & (change["first_position"] == first)].set_index("depth").reindex(THIRDS)
        face = color if first == "kept" else "white"
        for third, (value, start, end) in enumerate(one[["value", "low", "high"]].to_numpy(dtype=float)):
            y = third - 0.4 + step * (index + 0.5)
            ax.hlines(y, max(start, left), min(end, right), color=color, linewidth=1.4)
            if value > right:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                ax.annotate(f"×{1 + value / 100:,.0f}", (right, y), (-8, 0), textcoords="offset points", ha="right", va="center",
                            color=color, bbox=box, zorder=4)  # fmt: skip
            beyond = ">" if value > right else "<" if value < left else marker
            ax.plot(np.clip(value, left, right), y, marker=beyond, markersize=5, color=color, markerfacecolor=face, clip_on=False)
    if reported:
        y = np.arange(3) - 0.4 + step * (len(series) + 0.5)
        ax.plot([reported[third] for third in THIRDS], y, linestyle="", marker="*", markersize=9, color="0.2", markerfacecolor="white")
    ax.axvline(0, color="0.3", linewidth=0.8)
    for y in (0.5, 1.5):
        ax.axhline(y, color="0.9", linewidth=0.8)
    # Variance ratios are skewed: an axis in the log of the ratio shows halving and doubling as equal steps.
    ax.set_xscale("function", functions=(lambda x: np.log1p(np.maximum(x, -99.9) / 100), lambda y: 100 * np.expm1(y)))
    wide = np.log1p(right / 100) - np.log1p(left / 100) > 4
    ticks = [t for t in ((-95, -80, 0, 400) if wide else (-90, -75, -50, 0, 100, 300)) if left <= t <= right]
    ax.set_xlim(left, right)
    ax.set_xticks(ticks, [f"{t:+d}" if t else "0" for t in ticks])
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.set_yticks(range(3), [f"{third}\nthird" for third in THIRDS])
    ax.set_ylim(2.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.set_title("change of variance, 95 % intervals")
    if last:
        ax.set_xlabel("change against all positions (%)")


@_styled
def figure5(maps: Sequence[dict]) -> Figure:
    """CKA between all layers with compartment boundaries in yellow: one column per target, one row per estimator (one target: a row).

    Args:
        maps: from :func:`~elsi_lib.report.measures.cka_maps` with ``debiased=(False, True)``.
    """
    return _cka_grid(maps, "debiased", {False: "plain (biased) CKA", True: "debiased CKA"})


@_styled
def figure6(maps: Sequence[dict]) -> Figure:
    """CKA between all layers with and without the token filter, boundaries by the same detector; laid out as figure 5.

    Args:
        maps: from :func:`~elsi_lib.report.measures.cka_maps` with ``filtered=(True, False)``.
    """
    return _cka_grid(maps, "filtered", {True: "filter on", False: "filter off"})


def _cka_grid(maps: Sequence[dict], row_key: str, row_names: dict[bool, str]) -> Figure:
    targets = list(dict.fromkeys(entry["target"] for entry in maps))
    kinds = [value for value in row_names if any(entry[row_key] == value for entry in maps)]
    alone = len(targets) == 1  # then its maps stand side by side
    rows, columns = (1, len(kinds)) if alone else (len(kinds), len(targets))
    fig, axes = _figure(3.45 * rows + 0.2, rows, columns)
    # Plain CKA lies close to 1: its scale begins at the tenth below the lowest value, or nothing would be seen.
    lowest = min((float(np.min(entry["matrix"])) for entry in maps if not entry["debiased"]), default=0.0)
    images = {}
    for entry in maps:
        kind = kinds.index(entry[row_key])
        ax = axes[(0, kind) if alone else (kind, targets.index(entry["target"]))]
        # The debiased estimate can be far below zero: a diverging scale, so that no value is clipped.
        plain = {"cmap": _CKA_MAP, "vmin": np.floor(10 * min(lowest, 0.9)) / 10}
        scale = {"cmap": "vlag_r", "vmin": -1} if entry["debiased"] else plain
        image = ax.imshow(entry["matrix"], vmax=1, interpolation="none", origin="upper", **scale)
        images.setdefault(entry["debiased"], (image, []))[1].append(ax)
        n = len(entry["matrix"])
        for b in entry["boundaries"]:
            for line in (ax.axhline, ax.axvline):
                line(b + 0.5, color=YELLOW, linewidth=1.3, path_effects=_outline(2.3))
        ax.set_title(f"{entry['target']}\n{row_names[entry[row_key]]}\n{_runs(entry['compartments'])}", fontsize=9)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlim(-0.5, n - 0.5)
        ax.set_ylim(n - 0.5, -0.5)
        if ax in axes[-1]:
            ax.set_xlabel(LAYER)
        if ax in axes[:, 0]:
            ax.set_ylabel(LAYER)
        sns.despine(ax=ax, left=True, bottom=True)
    for debiased, (image, of) in images.items():
        name = "debiased CKA" if debiased else "linear CKA"
        fig.colorbar(image, ax=of, label=name, shrink=0.6 if rows > 1 and len(images) == 1 else 0.9, pad=0.02)
    return fig


def _runs(compartments: Sequence[tuple[int, int]], limit: int = 6) -> str:
    """Compartments as ``0–6 | 7–28``, at most ``limit`` in a line."""
    runs = [f"{first}" if first == last else f"{first}–{last}" for first, last in compartments]
    lines = [" | ".join(runs[start : start + limit]) for start in range(0, len(runs), limit)]
    return " |\n".join(lines)


@_styled
def figure7(data: pd.DataFrame, num_layers: int) -> Figure:
    """The beam of ELSI: its sets at every size as dots on the layer axis, their entropies, and the exhaustive optimum as rings.

    Args:
        data: from :func:`~elsi_lib.report.measures.frontier`.
        num_layers: N of the target.
    """
    sizes = sorted(data["size"].unique())
    beams = {size: data[(data["size"] == size) & (data["source"] == "beam")] for size in sizes}
    heights = [len(beam) + 1.6 for beam in beams.values()]
    fig, axes = _figure(0.155 * sum(heights) + 1.2, len(sizes), 2, height_ratios=heights, width_ratios=[2.4, 1])
    for (ax, dots), size in zip(axes, sizes, strict=True):
        beam, best = beams[size], data[(data["size"] == size) & (data["source"] == "exhaustive")].iloc[0]
        y = np.arange(len(beam))
        for at, layers in zip(y, beam["layers"], strict=True):
            color = BLUE if at == 0 else "0.55"
            ax.hlines(at, min(layers), max(layers), color=color, linewidth=0.8, alpha=0.6)
            ax.plot(layers, [at] * len(layers), linestyle="", marker="o", markersize=4.5, color=color)
        found = np.flatnonzero([layers == best["layers"] for layers in beam["layers"]])
        at = found[0] if len(found) else len(beam)
        ax.plot(best["layers"], [at] * size, linestyle="", marker="o", markersize=9, markerfacecolor="none", color=ORANGE)
        dots.scatter(beam["entropy"], y, s=20, color=[BLUE, *["0.55"] * (len(beam) - 1)], zorder=3)
        dots.plot(best["entropy"], at, linestyle="", marker="o", markersize=9, markerfacecolor="none", color=ORANGE)
        dots.annotate(f"{beam['entropy'].iloc[0]:.4f}", (beam["entropy"].iloc[0], 0), (-8, 0), textcoords="offset points",
                      ha="right", va="center", color=BLUE)  # fmt: skip
        regret = beam["regret"].iloc[0]
        ax.set_title(
            f"size {size}: regret {regret:.4f} nats" if regret > 1e-9 else f"size {size}: the beam's best is the true optimum"
        )
        for one in (ax, dots):
            one.set_ylim(max(len(beam), at + 1) - 0.3, -0.8)
            one.set_yticks([0], ["best"] if one is ax else [])
            one.tick_params(axis="y", length=0)
        _layer_axis(ax, num_layers, label=size == sizes[-1])
        margin = 0.12 * (best["entropy"] - beam["entropy"].min()) or 0.1
        dots.set_xlim(beam["entropy"].min() - margin, best["entropy"] + margin)  # dots, so the axis need not start at zero
        dots.xaxis.set_major_locator(MaxNLocator(nbins=3, min_n_ticks=2))
        dots.ticklabel_format(axis="x", useOffset=False)
        ax.grid(axis="x", color="0.93")
        ax.set_axisbelow(True)
        sns.despine(ax=ax, left=True)
    axes[-1, 1].set_xlabel(ENTROPY)
    ring = mpl.lines.Line2D(
        [], [], color=ORANGE, marker="o", markersize=9, markerfacecolor="none", linestyle="", label="exhaustive optimum"
    )
    dot = mpl.lines.Line2D([], [], color=BLUE, marker="o", markersize=4.5, label="best of the beam")
    rest = mpl.lines.Line2D([], [], color="0.55", marker="o", markersize=4.5, label="other sets of the beam")
    fig.legend(handles=[dot, rest, ring], loc="outside lower center", ncols=3)
    return fig


def _outline(width: float = 3.2) -> list:
    return [pe.Stroke(linewidth=width, foreground="black", alpha=0.55), pe.Normal()]
