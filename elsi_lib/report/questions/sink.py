"""Is the wave a sink? Profile, choices and CKA without the states of outlying norm, and where these sit in the spectrum.

An attention sink is a position whose state is far longer than the others. It enters few rows of a representative, and there it can
hold most of the trace: the spectrum is then two directions, the sink's and the mean of the rest, and S_1 is close to the binary
entropy of their shares, at most log 2, whatever the other rows hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from elsi_lib.cka import cka_matrix, find_boundaries, transition_scores
from elsi_lib.entropy import gram_entropy
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report.figures import BLUE, ENTROPY, GREEN, GREY, ORANGE, _figure, _layer_axis, _styled
from elsi_lib.report.findings import Finding, late_rise
from elsi_lib.report.measures import quiet_rows, timed
from elsi_lib.report.words import braces, markdown_table, plain, spaced
from elsi_lib.selection import elsi, exhaustive, jaccard, standing
from elsi_lib.survey import Survey

ALL, DROPPED, QUIET = "all positions", "first position dropped", "rows without outlying states"
PREFIX = "shared prefix dropped"
METHODS = ("ELSI m=1", "ELSI m=2", "ELSI m=3", "exhaustive m=3")
More = Mapping[str, Fingerprint | Sequence[Fingerprint | None] | None]


def from_surveys(surveys: Sequence[Survey | None]) -> dict[str, list[Fingerprint | None]]:
    """What a survey adds to :func:`views`: positions of outlying norm, and the tokens that all prompts begin with, left out before the
    filter, each over the survey's own prompts."""
    names = {"norms above 10 medians dropped": "norm 10", PREFIX: "no prefix"}
    return {name: [survey and survey.variants.get(own) for survey in surveys] for name, own in names.items()}


def views(fp: Fingerprint, more: More | None = None) -> dict[str, tuple[Tensor, Tensor | None, list[int]]]:
    """Gram matrices of one target with and without its sinks.

    Args:
        fp: filter on, first position kept.
        more: name -> fingerprint of another calibration, or one per target; those of other targets are passed over.

    Returns:
        Name -> (N, B', B') Gram matrices, (R, N, B', B') bootstrap replicates or None, and the B' rows of the representative used.
    """
    every, quiet = list(range(fp.block)), quiet_rows(fp.grams)
    found = {ALL: (fp.grams, fp.bootstrap, every), DROPPED: (fp.variant(sink=False).grams, None, every)}
    if len(quiet) > 1:
        replicates = fp.bootstrap
        cut = None if replicates is None else replicates[:, :, quiet][..., quiet]
        found[QUIET] = (fp.grams[:, quiet][..., quiet], cut, quiet)
    for name, given in (more or {}).items():
        for other in [given] if isinstance(given, Fingerprint) else given or []:
            if other is not None and other.target == fp.target:
                found[name] = (other.grams, other.bootstrap, list(range(other.block)))
    return found


@timed
def profiles(fps: Sequence[Fingerprint | None], more: More | None = None) -> pd.DataFrame:
    """Entropy and top of the spectrum along depth, with and without sinks.

    Args:
        fps: one or more targets; None is passed over.
        more: see :func:`views`.

    Returns:
        Columns target, variant, layer, entropy, low, high (nats; -/+ 1.96 standard deviations over bootstrap replicates, NaN without),
        top_share and second_share (of the trace, of the two largest eigenvalues), first_row (weight of row 0 in the top
        eigenvector, 0 to 1; NaN where row 0 is left out), loudest_row and loudest_weight (the row of largest weight), rows,
        norm_ratio (first position's norm over the median of the others, of the whole calibration; NaN where not recorded).
    """
    parts = []
    for fp in filter(None, fps):
        ratio = (fp.norms[0] / fp.norms[1]).numpy() if "norms" in fp.tensors else np.nan
        for name, (grams, replicates, rows) in views(fp, more).items():
            entropy = gram_entropy(grams).numpy()
            drawn = None if replicates is None or len(replicates) < 2 else gram_entropy(replicates).numpy()
            spread = np.full_like(entropy, np.nan) if drawn is None else 1.96 * drawn.std(0, ddof=1)
            spectrum, vectors = torch.linalg.eigh(grams)
            share, weight = spectrum / spectrum.sum(-1, keepdim=True), vectors[..., -1].square()
            about = {"target": fp.target, "variant": name, "layer": range(fp.num_layers), "entropy": entropy}
            about |= {"low": np.maximum(entropy - spread, 0.0), "high": entropy + spread}
            about |= {"top_share": share[:, -1].numpy(), "second_share": share[:, -2].numpy()}
            about |= {"first_row": weight[:, 0].numpy() if rows[0] == 0 else np.nan}
            about |= {"loudest_row": np.array(rows)[weight.argmax(-1).numpy()], "loudest_weight": weight.amax(-1).numpy()}
            parts.append(pd.DataFrame({**about, "rows": len(rows), "norm_ratio": ratio}))
    return pd.concat(parts, ignore_index=True)


@timed
def rises(fps: Sequence[Fingerprint | None], more: More | None = None) -> pd.DataFrame:
    """The size of the wave, :func:`~elsi_lib.report.findings.late_rise`, and what share of it is left.

    Returns:
        Columns target, variant, rise (nats), share (of the rise with all positions, 0 where there is none left), low, high (of the
        share, -/+ 1.96 standard deviations over paired bootstrap replicates; NaN where the variant has none), peak (layer).
    """
    rows = []
    for fp in filter(None, fps):
        found = views(fp, more)
        whole = [late_rise(profile)[0] for profile in _replicate_profiles(found[ALL])]
        own = late_rise(gram_entropy(found[ALL][0]).numpy())[0]
        for name, view in found.items():
            rise, peak, _ = late_rise(gram_entropy(view[0]).numpy())
            drawn = [late_rise(profile)[0] for profile in _replicate_profiles(view)]
            share = max(rise, 0.0) / own if own > 0 else np.nan
            paired = name in (ALL, QUIET) and len(drawn) > 1 and own > 0
            spread = 1.96 * float(np.std(np.maximum(drawn, 0) / np.array(whole), ddof=1)) if paired else np.nan
            rows.append((fp.target, name, rise, share, max(share - spread, 0.0) if paired else np.nan, share + spread, peak))
    return pd.DataFrame(rows, columns=["target", "variant", "rise", "share", "low", "high", "peak"])


def _replicate_profiles(view: tuple[Tensor, Tensor | None, list[int]]) -> np.ndarray:
    return np.empty((0, len(view[0]))) if view[1] is None else gram_entropy(view[1]).numpy()


@timed
def choices(fps: Sequence[Fingerprint | None], more: More | None = None) -> pd.DataFrame:
    """What is chosen with and without sinks.

    Returns:
        Columns target, variant, method, layers (as ``2 15 27``), entropy (nats), rank_before (of the set chosen with all
        positions, among all sets under this variant), sets, overlap (Jaccard with the set chosen with all positions), same (share of
        this variant's bootstrap replicates that choose the same set; NaN without), replicates.
    """
    rows = []
    for fp in filter(None, fps):
        before: dict[str, tuple[int, ...]] = {}
        for name, (grams, replicates, _) in views(fp, more).items():
            for method in METHODS:
                size = int(method[-1])
                if size > fp.num_layers:
                    continue
                search = elsi if method.startswith("ELSI") else exhaustive
                chosen = search(grams, size)
                first = before.setdefault(method, chosen.layers)
                place = standing(grams, first)
                resampled = () if replicates is None or search is exhaustive else replicates
                same = [elsi(drawn, size).layers == chosen.layers for drawn in resampled]
                row = (fp.target, name, method, spaced(chosen.layers), chosen.entropy, place.rank, place.sets)
                rows.append((*row, jaccard(first, chosen.layers), float(np.mean(same)) if same else np.nan, len(same)))
    columns = ["target", "variant", "method", "layers", "entropy", "rank_before", "sets", "overlap", "same", "replicates"]
    return pd.DataFrame(rows, columns=columns)


@timed
def similarity(fps: Sequence[Fingerprint | None], more: More | None = None) -> pd.DataFrame:
    """CKA between layers with and without sinks.

    Returns:
        Columns target, variant, debiased, mean (over pairs of layers), lowest, agreement (Spearman's rank correlation over pairs of
        layers with the same estimator's CKA of all positions), boundaries (as ``0 10``: after these layers).
    """
    rows = []
    for fp in filter(None, fps):
        before: dict[bool, np.ndarray] = {}
        above = np.triu_indices(fp.num_layers, 1)
        for name, (grams, _, kept) in views(fp, more).items():
            for debiased in (False, True):
                if len(kept) < 4 and debiased:
                    continue
                M = cka_matrix(grams, debiased)
                pairs = M.numpy()[above]
                agreement = float(spearmanr(before.setdefault(debiased, pairs), pairs).statistic)
                found = spaced(find_boundaries(transition_scores(M)))
                rows.append((fp.target, name, debiased, pairs.mean(), pairs.min(), agreement, found))
    return pd.DataFrame(rows, columns=["target", "variant", "debiased", "mean", "lowest", "agreement", "boundaries"])


HEADS = (
    *("what enters", "ELSI m=1", "m=2", "m=3", "exhaustive m=3"),
    *("$S_1$, m=3 (nats)", "rank of the set of all positions", "mean CKA", "debiased"),
)


def table(chosen: pd.DataFrame, alike: pd.DataFrame) -> str:
    """Choices and CKA for a page, as Markdown, one block per target."""
    blocks = []
    for target, of in chosen.groupby("target", sort=False):
        cka = alike[alike["target"] == target].set_index(["variant", "debiased"])
        lines = []
        for variant, rows in of.groupby("variant", sort=False):
            by = rows.set_index("method")
            sets = [braces(by.loc[name, "layers"]) if name in by.index else "" for name in METHODS]
            last = by.loc["ELSI m=3"] if "ELSI m=3" in by.index else by.iloc[-1]
            means = [f"{cka.loc[(variant, d), 'mean']:.3f}" if (variant, d) in cka.index else "" for d in (False, True)]
            rank = f"{int(last['rank_before']):,} of {int(last['sets']):,}"
            lines.append([variant, *sets, f"{last['entropy']:.4f}", rank, *means])
        blocks.append(f"**{target}**\n\n" + markdown_table(HEADS, lines, right=range(5, 9)))
    return "\n\n".join(blocks)


# Figures

_LOOKS = {ALL: (BLUE, "-"), DROPPED: (ORANGE, "--"), QUIET: (GREEN, ":")}
_FURTHER = list(zip(sns.color_palette("colorblind")[3:9], ("-.", (0, (5, 1)), (0, (1, 1))) * 2, strict=True))


def _looks(data: pd.DataFrame) -> dict[str, tuple]:
    further = iter(_FURTHER * 3)
    return {name: _LOOKS.get(name) or next(further) for name in dict.fromkeys(data["variant"])}


@_styled
def figure(data: pd.DataFrame, chosen: pd.DataFrame) -> Figure:
    """Profiles along depth with and without sinks, and under them the layers that ELSI chooses from each.

    Args:
        data: from :func:`profiles`.
        chosen: from :func:`choices`.
    """
    targets, looks = list(data["target"].unique()), _looks(data)
    fig, axes = _figure(3.4 + 0.42 * len(looks), 2, len(targets), height_ratios=[2.3, 0.3 + 0.42 * len(looks)], sharex="col")
    for (ax, below), target in zip(axes.T, targets, strict=True):
        of = data[data["target"] == target]
        for name, (color, dash) in looks.items():
            one = of[of["variant"] == name]
            if one["low"].notna().any():
                ax.fill_between(one["layer"], one["low"], one["high"], color=color, alpha=0.25, linewidth=0)
            ax.plot(one["layer"], one["entropy"], color=color, linestyle=dash, marker="o", markersize=2.5, label=name)
        ax.axhline(np.log(2), color="0.6", linewidth=0.8)
        ax.annotate("log 2", (0, np.log(2)), (2, 2), textcoords="offset points", color="0.4", fontsize=8)
        ax.set_title(target)
        ax.set_ylim(bottom=0)
        _chosen_panel(below, chosen[chosen["target"] == target], looks)
        _layer_axis(below, int(of["layer"].max()) + 1)
    axes[0, 0].set_ylabel(ENTROPY)
    axes[1, 0].set_ylabel("layers chosen")
    ring = Axes.plot(axes[1, 0], [], [], **_RING, label="exhaustive m=3")[0]
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend([*handles, ring], [*labels, "exhaustive optimum of three"], loc="outside lower center", ncols=2)
    return fig


_RING = {"linestyle": "", "marker": "o", "markersize": 8, "markerfacecolor": "none", "color": "0.25", "markeredgewidth": 0.9}


def _chosen_panel(ax: Axes, of: pd.DataFrame, looks: dict[str, tuple]) -> None:
    y, ticks = 0, []
    for method in METHODS[:3]:
        rows = of[of["method"] == method].set_index("variant")
        ticks.append((y + (len(looks) - 1) / 2, method.removeprefix("ELSI ")))
        for name, (color, _) in looks.items():
            if name in rows.index:
                layers = [int(j) for j in rows.loc[name, "layers"].split()]
                ax.hlines(y, min(layers), max(layers), color=color, linewidth=1, alpha=0.6)
                ax.plot(layers, [y] * len(layers), linestyle="", marker="o", markersize=4.5, color=color)
                best = of[(of["method"] == "exhaustive m=3") & (of["variant"] == name)]
                if method == "ELSI m=3" and len(best):
                    ax.plot([int(j) for j in best["layers"].iloc[0].split()], [y] * 3, clip_on=False, **_RING)
            y += 1
        if method != METHODS[2]:
            ax.axhline(y - 0.25, color="0.88", linewidth=0.8)
        y += 0.5
    ax.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    ax.set_ylim(y - 0.2, -0.8)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="0.94")
    ax.set_axisbelow(True)


@_styled
def spectrum_figure(data: pd.DataFrame) -> Figure:
    """Where the sink sits: share of the largest eigenvalue, weight of rows in its vector, and norm of the first position.

    Args:
        data: from :func:`profiles`.
    """
    targets, looks = list(data["target"].unique()), _looks(data)
    fig, axes = _figure(5.4, 3, len(targets), height_ratios=[1.3, 1.3, 1], sharex="col", sharey="row")
    for (top, middle, below), target in zip(axes.T, targets, strict=True):
        of = data[data["target"] == target]
        for name, (color, dash) in looks.items():
            one = of[of["variant"] == name]
            top.plot(one["layer"], one["top_share"], color=color, linestyle=dash, label=name)
            middle.plot(one["layer"], one["loudest_weight"], color=color, linestyle=dash)
        one = of[of["variant"] == ALL]
        middle.plot(one["layer"], one["first_row"], color=BLUE, linestyle="", marker="o", markersize=3.5, markerfacecolor="white")
        middle.axhline(1 / one["rows"].iloc[0], color="0.6", linewidth=0.8)
        top.set_title(target)
        middle.set_ylim(0, 1.05)
        below.plot(one["layer"], one["norm_ratio"], color=GREY)
        below.axhline(1, color="0.8", linewidth=0.8)
        below.set_yscale("log")
        _layer_axis(below, len(one))
    axes[0, 0].set_ylabel("largest eigenvalue,\nshare of trace")
    axes[1, 0].set_ylabel("top eigenvector,\nweight of one row")
    axes[2, 0].set_ylabel("norm, first position\n/ median of others")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    row = Axes.plot(axes[1, 0], [], [], color=BLUE, linestyle="", marker="o", markersize=3.5, markerfacecolor="white")[0]
    fig.legend([*handles, row], [*labels, "row 0, all positions"], loc="outside lower center", ncols=2)
    return fig


# Finding


def finding(data: pd.DataFrame, left: pd.DataFrame, chosen: pd.DataFrame, alike: pd.DataFrame, mostly: float = 0.5) -> Finding:
    """What the results say.

    Args:
        data, left, chosen, alike: from :func:`profiles`, :func:`rises`, :func:`choices` and :func:`similarity`.
        mostly: share of the rise below which the wave is said to be a sink's.
    """
    paragraphs, values = [], {}
    for number, target in enumerate(data["target"].unique()):
        name = "open_sink" if number == 0 else "open_sink_beside"
        of, rise = data[data["target"] == target], left[left["target"] == target].set_index("variant")
        text, verdict = [], []
        if rise.loc[ALL, "rise"] > 0:
            parts = []
            for variant, row in rise.drop(index=ALL).iterrows():
                within = f" ({100 * row['low']:.0f} to {100 * row['high']:.0f})" if np.isfinite(row["low"]) else ""
                rows = of[of["variant"] == variant]["rows"].iloc[0]
                count = f" ({int(rows)} of {int(of['rows'].iloc[0])})" if variant == QUIET else ""
                parts.append(f"{variant}{count}: {row['rise']:.3f}, {100 * row['share']:.0f} %{within}")
                verdict += [row["share"]] if variant != PREFIX else []  # which holds more than sinks
                values[f"{name}_share_{'_'.join(variant.split()[:2])}"] = row["share"]
            if min(verdict) <= mostly:
                least = rise["share"].drop(index=PREFIX, errors="ignore").idxmin()
                text.append(f"**the wave is a sink's**: {100 * min(verdict):.0f} % of its late rise is left with *{least}*.")
            else:
                text.append(f"**the wave is not a sink's alone**: at least {100 * min(verdict):.0f} % of its late rise is left.")
            text.append(f"With all positions it rises by {rise.loc[ALL, 'rise']:.3f} nats; {'; '.join(parts)} of that.")
            more = [v for v, share in rise["share"].items() if v != ALL and share > mostly]
            if min(verdict) <= mostly and more:
                text.append(f"*{more[0].capitalize()}* is not enough: sinks sit at further positions.")
        else:
            text.append("there is no late rise to explain.")
        text += _choice_words(chosen[chosen["target"] == target], alike[alike["target"] == target], name, values)
        words = " ".join(text)
        paragraphs.append(f"**{target}**: {words}")
    text = "\n\n".join(paragraphs)
    return Finding(text, "Matrix entropy along depth with and without attention sinks. " + plain(text), values)


def spectrum_finding(data: pd.DataFrame, outlying: float = 10.0) -> Finding:
    """Where the sink sits in the spectrum.

    Args:
        data: from :func:`profiles`.
        outlying: norm of the first position over the median of the others from which a layer is said to hold a sink there.
    """
    lines, values = [], {}
    for number, target in enumerate(data["target"].unique()):
        of = data[(data["target"] == target) & (data["variant"] == ALL)]
        name = "open_sink_spectrum" if number == 0 else "open_sink_spectrum_beside"
        lines.append(f"**{target}**: " + " ".join(_spectrum_words(of, outlying, name, values)))
    text = "\n\n".join(lines)
    alt = "Largest eigenvalue, weight of rows in its vector, and norm of the first position along depth. "
    return Finding(text, alt + plain(text), values)


def _spectrum_words(of: pd.DataFrame, outlying: float, name: str, values: dict[str, float]) -> list[str]:
    two = of["top_share"] + of["second_share"]
    gap = (of["entropy"] - _binary(of["top_share"])).abs()
    text = [
        f"The two largest eigenvalues hold at least {100 * two.min():.0f} % of the trace at every layer, in the "
        f"median {100 * two.median():.1f} %, and the binary entropy of the largest one's share differs from $S_1$ by a median of "
        f"{gap.median():.3f} nats: the profile is close to a balance of two directions, which have log 2 = {np.log(2):.3f} at most."
    ]
    held = of[of["first_row"] > 0.5]
    if len(held):
        text.append(f"Row 0 of the representative has more than half of the top eigenvector at layers {_runs(held['layer'])}.")
    loud = of[of["norm_ratio"] >= outlying]
    values |= {f"{name}_two_eigenvalues": two.min(), f"{name}_layers_held_by_row_0": len(held)}
    if len(loud) > 3:
        rho = float(spearmanr(loud["norm_ratio"], loud["entropy"]).statistic)
        text.append(
            f"Over the {len(loud)} layers where the first position is at least {outlying:g} times as long as the others, $S_1$ "
            f"and that ratio have a rank correlation of {rho:+.2f}"
            + (": entropy rises as the sink shrinks beside the rest." if rho < -0.5 else ".")
        )
        values[f"{name}_norm_correlation"] = rho
    return text


def _choice_words(chosen: pd.DataFrame, alike: pd.DataFrame, name: str, values: dict[str, float]) -> list[str]:
    text = []
    of = chosen[chosen["method"] == "ELSI m=3"].set_index("variant")
    if len(of):
        first, other = of.loc[ALL], of.drop(index=ALL)
        again = f", the same in {100 * first['same']:.0f} % of {int(first['replicates'])} redraws of the prompts"
        text.append(f"ELSI m=3 takes {braces(first['layers'])} from all positions{again if first['replicates'] else ''}.")
        if len(other):
            low, high = int(other["rank_before"].min()), int(other["rank_before"].max())
            moved = int((other["overlap"] < 1).sum())
            text.append(
                f"{moved} of {len(other)} ways to leave sinks out lead to another set, and there this one has place {low:,} to "
                f"{high:,} of {int(first['sets']):,}."
            )
        values |= {f"{name}_overlap_{'_'.join(v.split()[:2])}": o for v, o in other["overlap"].items()}
    mean = alike.set_index(["debiased", "variant"])["mean"]
    parts = []
    for debiased, estimator in ((False, "plain"), (True, "debiased")):
        if (debiased, ALL) in mean.index and len(rest := mean[debiased].drop(index=ALL)):
            parts.append(f"{mean[debiased, ALL]:.2f} to {rest.min():.2f}-{rest.max():.2f} ({estimator})")
    if parts:
        text.append(f"Mean CKA between layers goes from {' and from '.join(parts)}.")
    return text


def _binary(p: pd.Series) -> pd.Series:
    q = 1 - p
    return -(p * np.log(p) + np.where(q > 0, q * np.log(np.where(q > 0, q, 1.0)), 0.0))


def _runs(layers: Sequence[int]) -> str:
    """``2-20, 23`` for layers that follow one another."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
