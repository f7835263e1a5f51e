"""Is the choice stable? Other prompts, more or fewer of them, and every parameter that the paper fixes or leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from elsi_lib.corpora import AGAIN, CONVERSATIONS
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report.figures import BLUE, GREY, ORANGE, _figure, _styled
from elsi_lib.report.findings import Finding
from elsi_lib.report.measures import timed
from elsi_lib.report.words import braces, plain, spaced
from elsi_lib.selection import Selection, all_set_entropies, elsi, elsi_c, jaccard, standing
from elsi_lib.survey import Survey
from elsi_lib.tally import BLOCKS, DEFAULT, RHOS

BEAMS = (1, 2, 5, 20, None)
WIDTHS = (1, 2, 5, None)  # of the expansion and of the pool; 10 is the default
FIRST = {"kept": BLUE, "dropped": ORANGE}
FEW = 5  # groups; fewer give no interval
PAPER = 200  # prompts of the paper's calibration
ELSI, POOLED = "ELSI m=3", "ELSI-C m=3"
OTHERS = "other prompts"
SYMBOLS = {f"K_{part}": f"$K_\\mathrm{{{part}}}$" for part in ("beam", "expand", "pool")} | {"rho": "$\\rho$", "B": "$B$"}


@timed
def by_size(surveys: Sequence[Survey | None]) -> pd.DataFrame:
    """How choices from n prompts compare with the choice from all of them.

    Args:
        surveys: one or more targets; None is passed over.

    Returns:
        Columns target, first_position, m, size, groups (disjoint, of that many prompts), same (share of them that choose the set of
        all prompts), jaccard (mean, with that set), low, high (of jaccard: 95 % over groups by bootstrap, n - 1 of n drawn; NaN below
        5 groups), regret (nats, mean over groups, of their sets on all prompts), worst (the largest regret).
    """
    rows = []
    for survey in filter(None, surveys):
        target = survey.target
        for (first, m), of in survey.samples.groupby(["first_position", "m"], sort=False):
            whole = _set(of.loc[of["size"].idxmax(), "layers"])
            for size, groups in of.groupby("size"):
                overlap = np.array([jaccard(_set(layers), whole) for layers in groups["layers"]])
                low, high = _interval(overlap)
                rows.append((
                    target, first, int(m), int(size), len(groups), float((overlap == 1).mean()), float(overlap.mean()), low, high,
                    float(groups["regret"].mean()), float(groups["regret"].max()),
                ))  # fmt: skip
    columns = ["target", "first_position", "m", "size", "groups", "same", "jaccard", "low", "high", "regret", "worst"]
    return pd.DataFrame(rows, columns=columns)


@timed
def by_parameter(fps: Sequence[Fingerprint | None], surveys: Sequence[Survey | None]) -> pd.DataFrame:
    """ELSI m=3 (ELSI-C for K_pool) with one thing changed, against the default of the same prompts.

    Args:
        fps: the fingerprints of the same targets, for what needs no other calibration.
        surveys: see :func:`by_size`.

    Returns:
        Columns target, parameter, value, default (whether it is the default's own row), layers (as ``2 15 27``), entropy (nats; of
        that calibration, so rows of other shares and blocks have other levels), jaccard (with the default's set of its own method),
        rank (of the default's set among all ``sets`` under the changed calibration; a search has no other ranks, NaN), agreement
        (Spearman over all sets of three with the default's entropies; NaN for searches).
    """
    rows = []
    by_target = {survey.target: survey for survey in surveys if survey}
    for fp in filter(None, fps):
        for parameter, value, own, chosen, against, base in _variations(fp, by_target.get(fp.target)):
            rank = agreement = np.nan
            if against is not None:
                place = standing(against, base.layers)
                rank = place.rank
                agreement = float(spearmanr(all_set_entropies(against, 3)[1], all_set_entropies(own, 3)[1]).statistic)
            rows.append((
                fp.target, parameter, value, against is None and chosen is base, spaced(chosen.layers), chosen.entropy,
                jaccard(chosen.layers, base.layers), rank, agreement,
            ))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "parameter", "value", "default", "layers", "entropy", "jaccard", "rank", "agreement"])


Variation = tuple[str, str, Fingerprint, Selection, Fingerprint | None, Selection]


def _variations(fp: Fingerprint, survey: Survey | None) -> Iterator[Variation]:
    """Parameter, value, the default's fingerprint, the choice, the fingerprint it was made on where that is another, and the default
    choice."""
    base, pooled = elsi(fp, 3), elsi_c(fp, 3)
    yield "default", ELSI, fp, base, None, base
    for width in BEAMS:
        yield "K_beam", _count(width), fp, elsi(fp, 3, k_beam=width), None, base
    for width in WIDTHS:
        yield "K_expand", _count(width), fp, elsi(fp, 3, k_expand=width), None, base
    yield "default", POOLED, fp, pooled, None, pooled
    for width in WIDTHS:
        yield "K_pool", _count(width), fp, elsi_c(fp, 3, k_pool=width), None, pooled
    if survey is None:
        return
    own = survey.variants[DEFAULT]
    chosen = elsi(own, 3)
    for name, values in (("rho", RHOS), ("block", BLOCKS)):
        for value in values:
            if (other := survey.variants.get(f"{name} {value:g}")) is not None:
                yield {"block": "B"}.get(name, name), f"{value:g}", own, elsi(other, 3), other, chosen
    one, other = (str(given.passport["target"].get("dtype")) for given in (fp, own))
    counts = [{name: given.passport["prompts"].get(name) for name in ("used", "tokens")} for given in (fp, own)]
    if one != other and counts[0] == counts[1]:
        yield "precision", f"{one} → {other}", fp, chosen, own, base
    if {CONVERSATIONS, AGAIN} <= survey.corpora.keys():
        one, other = survey.corpora[CONVERSATIONS], survey.corpora[AGAIN]
        yield OTHERS, "", one, elsi(other, 3), other, elsi(one, 3)


def _count(width: int | None) -> str:
    return "all" if width is None else str(width)


def _set(layers: str) -> set[int]:
    return set(map(int, layers.split()))


def _interval(values: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    if len(values) < FEW:
        return np.nan, np.nan
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values) - 1)).mean(1)  # n - 1 of n, as for tau
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


@_styled
def figure(data: pd.DataFrame) -> Figure:
    """Agreement with the choice of all prompts (above) and its price in nats (below) against the number of prompts.

    Args:
        data: from :func:`by_size`; sets of three are drawn.
    """
    targets = list(data["target"].unique())
    fig, axes = _figure(4.6, 2, len(targets), sharex="col", sharey="row", height_ratios=[1.4, 1])
    for column, target in enumerate(targets):
        top, bottom = axes[:, column]
        for first, color in FIRST.items():
            of = data[(data["target"] == target) & (data["first_position"] == first) & (data["m"] == 3)].sort_values("size")
            top.plot(of["size"], of["jaccard"], color=color, marker="o", markersize=4, label=f"first position {first}")
            top.fill_between(of["size"], of["low"], of["high"], color=color, alpha=0.2, linewidth=0)
            bottom.plot(of["size"], of["regret"], color=color, marker="o", markersize=4)
            bottom.plot(of["size"], of["worst"], color=color, linewidth=0.9, linestyle=":")
        counts = data[(data["target"] == target) & (data["first_position"] == "kept") & (data["m"] == 3)]
        for size, groups in zip(counts["size"], counts["groups"], strict=True):
            clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # of the line at the paper's number
            top.annotate(str(groups), (size, 0.02), ha="center", va="bottom", fontsize=7.5, color=GREY, bbox=clear)
        if counts["size"].max() >= PAPER:
            for ax in (top, bottom):
                ax.axvline(PAPER, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
            place = {"xytext": (-3, 0), "textcoords": "offset points", "ha": "right", "fontsize": 7.5, "color": GREY}
            bottom.annotate("the paper's", (PAPER, 0.9), xycoords=("data", "axes fraction"), **place)
        top.set_title(target)
        top.set_ylim(0, 1.04)
        bottom.set_xscale("log")
        bottom.set_xticks(counts["size"], counts["size"].astype(str))
        bottom.minorticks_off()
        bottom.set_xlabel("prompts of a sample")
    axes[0, 0].set_ylabel("Jaccard similarity to the\nset from all prompts")
    axes[1, 0].set_ylabel("regret on all\nprompts (nats)")
    axes[0, 0].annotate("disjoint samples:", (0.02, 0.12), xycoords="axes fraction", fontsize=7.5, color=GREY)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@_styled
def parameter_figure(data: pd.DataFrame, depths: dict[str, int]) -> Figure:
    """The sets chosen under each value of each parameter, as marks on the layer axis.

    Args:
        data: from :func:`by_parameter`.
        depths: target -> N.
    """
    if data.empty:
        raise ElsiError("no choice to draw: give at least one fingerprint")
    targets = list(data["target"].unique())
    labels = list(dict.fromkeys(zip(data["parameter"], data["value"], strict=True)))
    fig, axes = _figure(0.9 + 0.2 * len(labels), 1, len(targets), sharey=True)
    places = {label: place for place, label in enumerate(labels)}
    for ax, target in zip(axes[0], targets, strict=True):
        of = data[data["target"] == target]
        for row in of.itertuples():
            y = places[row.parameter, row.value]
            color = BLUE if row.jaccard == 1 else sns.desaturate(ORANGE, 0.35 + 0.65 * (1 - row.jaccard))
            layers = sorted(_set(row.layers))
            ax.plot(layers, [y] * len(layers), color=color, linewidth=0.8, marker="o", markersize=5.5 if row.default else 4.5)
        for place, (parameter, _) in enumerate(labels):
            if parameter == "default":
                ax.axhspan(place - 0.5, place + 0.5, color="0.93", linewidth=0, zorder=0)
        ax.set_xlim(-0.7, depths[target] - 0.3)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        ax.set_title(target)
        ax.set_xlabel("chosen layers")
    names = [f"{SYMBOLS.get(parameter, parameter)} {value}".removeprefix("default ").strip() for parameter, value in labels]
    axes[0, 0].set_yticks(range(len(labels)), names)
    axes[0, 0].tick_params(axis="y", length=0)
    return fig


def finding(data: pd.DataFrame) -> Finding:
    """What the numbers of :func:`by_size` say."""
    paragraphs, values = [], {}
    for target, of in data.groupby("target", sort=False):
        sentences = []
        three = of[of["m"] == 3]
        most = int(three["size"].max())
        for first in FIRST:
            rows = three[three["first_position"] == first].sort_values("size")
            inner = rows[rows["size"] <= most / 2]
            sizes = {int(rows["size"].min())} | {int(size) for size in inner["size"] if size == PAPER or size == inner["size"].max()}
            parts = []
            for row in rows[rows["size"].isin(sizes)].itertuples():
                values[f"{target}_{first}_same_{row.size}"] = row.same
                kind = "disjoint samples" if not parts else "samples"
                number = f"{row.size}, the paper's number," if row.size == PAPER else f"{row.size} prompts"
                chosen = f"choose the set of all {most:,}" if not parts else "do"
                parts.append(
                    f"of {row.groups} {kind} of {number} {_percent(row.same)} {chosen} (mean Jaccard {row.jaccard:.2f}, mean regret "
                    f"{row.regret:.3f} nats, largest {row.worst:.3f})"
                )
            head = f"**{target}**, first position {first}: " if first == "kept" else f"With the first position {first}: "
            sentences.append(f"{head}{'; '.join(parts)}.")
        paragraphs.append(" ".join(sentences))
    alt = (
        "Line charts against the number of prompts on a logarithmic axis, one column per target: above, the mean Jaccard similarity "
        "of the sets chosen from disjoint samples to the set from all prompts; below, their regret in nats. "
        + plain(" ".join(paragraphs))
    )
    note = "Samples of one size are disjoint; all are part of the whole, so large ones agree with it by construction."
    return Finding("\n\n".join([*paragraphs, note]), alt, values)


def parameter_finding(data: pd.DataFrame) -> Finding:
    """What the numbers of :func:`by_parameter` say."""
    sentences, values = [], {}
    for target, of in data.groupby("target", sort=False):
        defaults = dict(of.loc[of["parameter"] == "default", ["value", "layers"]].to_numpy())
        parts = {method: [] for method in defaults}
        same = {method: [] for method in defaults}
        changed = of[~of["parameter"].isin(["default", OTHERS])]
        for parameter, rows in changed.groupby("parameter", sort=False):
            method = POOLED if parameter == "K_pool" else ELSI
            name, different = SYMBOLS.get(parameter, parameter), rows[rows["jaccard"] < 1]
            values[f"{target}_{parameter}_changed"] = len(different)
            if len(different):
                sets = [f"{row.value}: {braces(row.layers)}" for row in different.itertuples()]
                parts[method].append(f"{name} changes it in {len(different)} of {len(rows)} values ({'; '.join(sets)})")
            else:
                same[method].append(name)
        text = f"**{target}**: "
        for method, layers in defaults.items():
            text += f"{'the' if method == ELSI else 'The'} default of {method} is {braces(layers)}. "
            text += f"{'; '.join(parts[method])}. " if parts[method] else ""
            text += f"It stays under all of {', '.join(same[method])}. " if same[method] else ""
        for row in of[of["parameter"] == OTHERS].itertuples():
            values[f"{target}_other_prompts_changed"] = int(row.jaccard < 1)
            whose = "the default's" if row.layers == defaults[ELSI] else "not the default's"
            text += f"Of two disjoint samples of fewer and shorter conversations ELSI chooses {braces(row.layers)} on the second, "
            text += f"{'as' if row.jaccard == 1 else 'and not'} on the first; that set is {whose}."
        sentences.append(text.strip())
    alt = (
        "Rows of dots on the layer axis, one row per value of a parameter and one panel per target; blue where the set is the "
        "default's, orange where it is another. " + plain(" ".join(sentences))
    )
    return Finding("\n\n".join(sentences), alt, values)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
