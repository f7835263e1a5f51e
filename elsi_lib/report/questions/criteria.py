"""Which criterion? Whether other scores of a layer set (:mod:`elsi_lib.criteria`) choose what S_1 chooses, and which foretells tau."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import kendalltau, rankdata, spearmanr
from torch import Tensor

from elsi_lib import criteria
from elsi_lib.cka import cka_matrix
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report.figures import BLUE, _figure, _layer_axis, _styled
from elsi_lib.report.findings import Finding
from elsi_lib.report.measures import timed
from elsi_lib.report.study import Results, read_study
from elsi_lib.report.tau import bootstrap_weights, holm
from elsi_lib.report.tau_findings import critical_rho
from elsi_lib.report.tau_measures import entropy_against_tau, rank_correlation
from elsi_lib.report.tau_tables import averages
from elsi_lib.report.words import braces, markdown_table, p_value, plain, spaced
from elsi_lib.selection import TIE, jaccard, layer_sets

# Column of a score -> how figures and sentences call it.
NAMES = {
    "entropy": "S₁",
    "entropy_trace": "S₁, layers of equal trace",
    "chi": "Holevo χ, by trace",
    "chi_equal": "Holevo χ, equal weights",
    "log_det": "log det(I + cK)",
    "effective_rank": "effective rank",
    "cka_det": "log det of CKA",
    "cka_det_debiased": "log det of CKA, debiased",
    "coverage": "coverage, 1 − CKA",
    "coverage_debiased": "coverage, debiased",
    "dispersion": "dispersion, 1 − CKA",
    "dispersion_debiased": "dispersion, debiased",
    "influence": "block influence, summed",
    "r2_same": "probe R², this token",
    "r2_next": "probe R², next token",
}
FEW, ALL_SETS = "three layers", "all"  # measured sets, as in the table of correlations
Given = Mapping[str, pd.DataFrame]  # name of a target -> its table


def scores(
    fp: Fingerprint, sets: Tensor | Sequence[Sequence[int]], influence: Given | None = None, probe: Given | None = None
) -> pd.DataFrame:
    """Every criterion on layer sets of one size.

    Args:
        fp: of the target, for the variant in force.
        sets: (C, m).
        influence: target -> columns layer, influence (ShortGPT's block influence of every layer).
        probe: target -> columns layers (as ``2 15 27``), r2_same, r2_next of a ridge probe, of all sets or of some.

    Returns:
        Columns target, layers, and a key of :data:`NAMES` each; those of ``influence`` and ``probe`` where they are given.

    Raises:
        ElsiError: a set outside of the target, a layer without influence.
    """
    sets, K = torch.as_tensor(sets), fp.grams
    plain, debiased = cka_matrix(K), cka_matrix(K, debiased=True) if fp.block >= 4 else None
    found = {
        "entropy": criteria.set_entropies(K, sets),
        "entropy_trace": criteria.set_entropies(K, sets, normalize="trace"),
        "chi": criteria.holevo_chi(K, sets, "trace"),
        "chi_equal": criteria.holevo_chi(K, sets, "equal"),
        "log_det": criteria.log_det_information(K, sets),
        "effective_rank": criteria.effective_rank(K, sets),
    }
    for ending, M in (("", plain), ("_debiased", debiased)):
        if M is not None:
            found |= {f"cka_det{ending}": criteria.log_det_similarity(M, sets)}
            found |= {f"coverage{ending}": criteria.facility_location(M, sets)}
            found |= {f"dispersion{ending}": criteria.dispersion(M, sets)}
    if influence and fp.target in influence:
        found["influence"] = criteria.summed(_by_layer(influence[fp.target], fp), sets)
    data = pd.DataFrame({name: found[name].numpy() for name in NAMES if name in found})
    data.insert(0, "layers", [spaced(layers) for layers in sets.tolist()])
    data.insert(0, "target", fp.target)
    if probe and fp.target in probe:
        given = probe[fp.target]
        if missing := [name for name in ("layers", "r2_same", "r2_next") if name not in given]:
            raise ElsiError(f"probe of {fp.target} without column {', '.join(missing)}: layers, r2_same and r2_next are needed")
        if (twice := given["layers"].duplicated()).any():
            raise ElsiError(f"probe of {fp.target}: layers {given['layers'][twice].iloc[0]} twice")
        data = data.merge(given[["layers", "r2_same", "r2_next"]], on="layers", how="left")
    return data


@timed
def all_scores(
    fps: Sequence[Fingerprint | None], m: int = 3, influence: Given | None = None, probe: Given | None = None
) -> pd.DataFrame:
    """:func:`scores` of every set of m layers of each target; None is passed over."""
    parts = [
        scores(fp, layer_sets(range(fp.num_layers), m), influence, probe)
        for fp in fps
        if fp is not None and fp.num_layers >= m
    ]
    return pd.concat(parts, ignore_index=True)


@timed
def best_sets(data: pd.DataFrame) -> pd.DataFrame:
    """The set that each criterion likes best, and what S_1 says of it.

    Returns:
        Columns target, criterion, layers, score, entropy (S_1 of that set, nats), entropy_rank (1 for the highest), sets.
    """
    rows = []
    for target, of in data.groupby("target", sort=False):
        for name in _criteria(of):
            best = of.loc[of[name].idxmax()]
            rank = int((of["entropy"] > best["entropy"] + TIE).sum()) + 1
            rows.append((target, name, best["layers"], best[name], best["entropy"], rank, len(of)))
    return pd.DataFrame(rows, columns=["target", "criterion", "layers", "score", "entropy", "entropy_rank", "sets"])


@timed
def agreement(data: pd.DataFrame) -> pd.DataFrame:
    """How alike two criteria order all sets.

    Returns:
        Columns target, criterion, other, spearman, kendall (over the sets that both score), sets, jaccard (of their best sets).
    """
    rows = []
    for target, of in data.groupby("target", sort=False):
        for one, other in itertools.combinations(_criteria(of), 2):
            both = of[[one, other]].notna().all(axis=1)
            x, y = (rankdata(of.loc[both, name]) for name in (one, other))
            best = [map(int, of.loc[of[name].idxmax(), "layers"].split()) for name in (one, other)]
            rank = (float(spearmanr(x, y).statistic), float(kendalltau(x, y).statistic)) if both.sum() > 2 else (np.nan, np.nan)
            rows.append((target, one, other, *rank, int(both.sum()), jaccard(*best)))
    return pd.DataFrame(rows, columns=["target", "criterion", "other", "spearman", "kendall", "sets", "jaccard"])


@timed
def against_tau(results: Results, fp: Fingerprint, influence: Given | None = None, probe: Given | None = None) -> pd.DataFrame:
    """Every criterion on the layer sets whose tau was measured; equal sets once, second trainings and norms left out.

    Args:
        results: of the study.
        fp: of the study's target.

    Returns:
        Columns method, layers, size, nodes, temperature, tau (pooled, tokens per target step), and those of :func:`scores`.

    Raises:
        ElsiError: the fingerprint is of another target than the study.
    """
    if fp.target != results.target:
        raise ElsiError(f"fingerprint of {fp.target}, tau of {results.target}: give that of the study's target")
    measured = entropy_against_tau(results, averages(results, resamples=2)).drop(columns=["entropy", "low", "high"])
    parts = []
    for _, of in measured.groupby("size"):
        sets = [[int(j) for j in layers.split()] for layers in dict.fromkeys(of["layers"])]
        parts.append(scores(fp, sets, influence, probe))
    return measured.merge(pd.concat(parts, ignore_index=True).drop(columns="target"), on="layers")


@timed
def foretelling(data: pd.DataFrame, results: Results, resamples: int = 2_000, seed: int = 0) -> pd.DataFrame:
    """Spearman's rank correlation of each criterion with tau in each setting.

    Args:
        data: from :func:`against_tau`.
        resamples: draws of questions, within categories, for the intervals; they say how far tau's own noise moves the order of
            these sets, not what other sets would give.

    Returns:
        Columns criterion, sets (``three layers`` or ``all``), nodes, temperature, n, rho, p (two-sided, by permutation of the sets),
        p_holm (over the criteria of one setting and choice of sets), low, high (95 % over questions). NaN below three sets.
    """
    rows = []
    for (nodes, temperature), setting in data.groupby(["nodes", "temperature"], sort=True):
        drawn = _drawn_taus(results, list(setting["method"]), nodes, temperature, resamples, seed)
        for kind, inside in ((FEW, (setting["size"] == 3).to_numpy()), (ALL_SETS, np.full(len(setting), True))):
            for name in _criteria(setting):
                use = inside & setting[name].notna().to_numpy()
                x, y = (setting[column].to_numpy(dtype=float)[use] for column in (name, "tau"))
                rho, p = rank_correlation(rankdata(x), y)
                low, high = _interval(x, drawn[:, use]) if np.isfinite(rho) else (np.nan, np.nan)
                rows.append((name, kind, nodes, temperature, int(use.sum()), rho, p, low, high))
    table = pd.DataFrame(rows, columns=["criterion", "sets", "nodes", "temperature", "n", "rho", "p", "low", "high"])
    table.insert(7, "p_holm", table.groupby(["sets", "nodes", "temperature"])["p"].transform(holm))
    return table


def beside_tau(
    folder: str | Path | None,
    fp: Fingerprint | None,
    influence: Given | None = None,
    probe: Given | None = None,
    table: str = "table2",
) -> tuple[pd.DataFrame | None, Finding]:
    """What a study of a target says of every criterion, as numbers and in words.

    Args:
        folder: of the study, see :mod:`elsi_lib.report.study`; None where no tau of this target was measured.
        fp: of the study's target; None for none.
        table: see :func:`tau_finding`.

    Returns:
        From :func:`foretelling`, or None where there is no study; and :func:`tau_finding` of it.
    """
    if folder is None or fp is None:
        return None, tau_finding(None, fp.target if fp else "a second target", table)
    results = read_study(folder)
    told = foretelling(against_tau(results, fp, influence, probe), results)
    return told, tau_finding(told, fp.target, table)


def _drawn_taus(results: Results, methods: list[str], nodes: int, temperature: float, resamples: int, seed: int) -> np.ndarray:
    """(R, methods) pooled tau, the same questions drawn for all of them; NaN where a category has a single question."""
    of = results.totals
    of = of[(of["nodes"] == nodes) & (of["temperature"] == temperature) & of["method"].isin(methods)]
    wide = of.pivot_table(index=["category", "question_id"], columns="method", values=["tokens", "steps"], aggfunc="sum")
    drawn = bootstrap_weights(tuple(wide.groupby(level="category", sort=False).size()), resamples, seed)
    return (drawn @ wide["tokens"][methods].to_numpy(dtype=float)) / (drawn @ wide["steps"][methods].to_numpy(dtype=float))


def _interval(score: np.ndarray, drawn: np.ndarray) -> tuple[float, float]:
    if np.isnan(drawn).any():
        return np.nan, np.nan
    x, y = rankdata(score), rankdata(drawn, axis=1)
    x, y = x - x.mean(), y - y.mean(1, keepdims=True)
    scale = np.sqrt((x @ x) * (y**2).sum(1))
    some = scale > 0  # a draw in which all sets have the same tau has no rank correlation
    return tuple(np.percentile((y @ x)[some] / scale[some], [2.5, 97.5])) if some.any() else (np.nan, np.nan)


def _criteria(data: pd.DataFrame) -> list[str]:
    return [name for name in NAMES if name in data.columns and data[name].notna().any()]


def _by_layer(table: pd.DataFrame, fp: Fingerprint) -> np.ndarray:
    if missing := [name for name in ("layer", "influence") if name not in table]:
        raise ElsiError(f"influence of {fp.target} without column {', '.join(missing)}: layer and influence are needed")
    by = table.set_index("layer")["influence"]
    if lacking := sorted(set(range(fp.num_layers)) - set(by.index)):
        raise ElsiError(f"influence of {fp.target} lacks layer {lacking[0]}: one row for each of 0..{fp.num_layers - 1} is needed")
    return by.reindex(range(fp.num_layers)).to_numpy(dtype=float, copy=True)


def table(best: pd.DataFrame) -> str:
    """Best sets for a page, as Markdown."""
    targets = list(dict.fromkeys(best["target"]))
    lines = []
    for name in dict.fromkeys(best["criterion"]):
        cells = []
        for target in targets:
            of = best[(best["target"] == target) & (best["criterion"] == name)]
            if of.empty:
                cells += ["not run here", ""]
            else:
                row = of.iloc[0]
                cells += [braces(row["layers"]), f"{row['entropy']:.4f}, {int(row['entropy_rank']):,} of {int(row['sets']):,}"]
        lines.append([NAMES[name], *cells])
    heads = [head for target in targets for head in (target, "$S_1$, rank")]
    return markdown_table(["criterion", *heads], lines, right=range(2, 2 * len(targets) + 1, 2))


# Figures


@_styled
def figure(best: pd.DataFrame, depths: Mapping[str, int]) -> Figure:
    """The best set of each criterion as dots on the layer axis, one panel per target.

    Args:
        best: from :func:`best_sets`.
        depths: target -> N.
    """
    names, targets = [n for n in NAMES if n in set(best["criterion"])], list(dict.fromkeys(best["target"]))
    fig, axes = _figure(0.8 + 0.22 * len(names), 1, len(targets), sharey=True)
    for ax, target in zip(axes[0], targets, strict=True):
        of = best[best["target"] == target].set_index("criterion")
        for y, name in enumerate(names):
            if name not in of.index:
                continue
            layers = [int(j) for j in of.loc[name, "layers"].split()]
            color = BLUE if name == "entropy" else "0.35"
            ax.hlines(y, min(layers), max(layers), color=color, linewidth=0.9, alpha=0.6)
            ax.plot(layers, [y] * len(layers), linestyle="", marker="o", markersize=5, color=color)
        ax.set_title(target)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="0.93")
        ax.set_axisbelow(True)
        _layer_axis(ax, depths[target])
    axes[0, 0].set_yticks(range(len(names)), [NAMES[name] for name in names])
    return fig


@_styled
def agreement_figure(data: pd.DataFrame) -> Figure:
    """Rank correlation between criteria over all sets: above the diagonal the first target, below it the second.

    Args:
        data: from :func:`agreement`.
    """
    targets = list(dict.fromkeys(data["target"]))
    used = set(data["criterion"]) | set(data["other"])
    names = [name for name in NAMES if name in used]
    table = np.full((len(names), len(names)), np.nan)
    for place, target in enumerate(targets[:2]):
        for row in data[data["target"] == target].itertuples():
            i, j = names.index(row.criterion), names.index(row.other)
            table[(i, j) if place == 0 else (j, i)] = row.spearman
    fig, axes = _figure(1.9 + 0.27 * len(names))
    ax = axes[0, 0]
    ax.set_facecolor("0.9")
    image = ax.imshow(np.ma.masked_invalid(table), cmap="vlag_r", vmin=-1, vmax=1, interpolation="none", aspect="auto")
    for i, j in zip(*np.nonzero(np.isfinite(table)), strict=True):
        text = f"{table[i, j]:.2f}".replace("0.", ".").replace("-", "−")
        ax.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if abs(table[i, j]) > 0.75 else "0.15")
    labels = [NAMES[name] for name in names]
    ax.set_yticks(range(len(names)), labels)
    ax.set_xticks(range(len(names)), labels, rotation=40, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    below = f"; below: {targets[1]}" if len(targets) > 1 else ""
    ax.set_title(f"above the diagonal: {targets[0]}{below}")
    fig.colorbar(image, ax=ax, label="Spearman's rank correlation", pad=0.01)
    return fig


@_styled
def tau_figure(data: pd.DataFrame) -> Figure:
    """Rank correlation of each criterion with measured tau, over the sets of three layers and over all sets.

    Args:
        data: from :func:`foretelling`.
    """
    shown = _headline(data)
    names = [name for name in NAMES if name in set(shown["criterion"])]
    fig, axes = _figure(1.2 + 0.23 * len(names), 1, 2, sharey=True, sharex=True)
    for ax, kind in zip(axes[0], (FEW, ALL_SETS), strict=True):
        of = shown[shown["sets"] == kind].set_index("criterion")
        ax.axvline(0, color="0.3", linewidth=0.8)
        for y, name in enumerate(names):
            if name not in of.index or not np.isfinite(of.loc[name, "rho"]):
                continue
            row = of.loc[name]
            color = BLUE if name == "entropy" else "0.3"
            ax.hlines(y, row["low"], row["high"], color=color, linewidth=1.3)
            face = color if row["p_holm"] < 0.05 else "white"
            ax.plot(row["rho"], y, linestyle="", marker="o", markersize=5.5, color=color, markerfacecolor=face, zorder=3)
            ax.annotate(p_value(row["p"]), (1.06, y), ha="left", va="center", fontsize=8, color="0.35", annotation_clip=False)
        sizes = of["n"].max() if len(of) else 0
        title = "sets of three layers" if kind == FEW else "all measured sets"
        ax.set_title(f"{title} ({int(sizes)})")
        ax.set_xlim(-1.05, 1.45)
        ax.set_xticks([-1, -0.5, 0, 0.5, 1])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(r"rank correlation with $\tau$")
    axes[0, 0].set_yticks(range(len(names)), [NAMES[name] for name in names])
    handles = [
        mpl.lines.Line2D([], [], color="0.3", marker="o", markersize=5.5, linestyle="", label="p < 0.05 after Holm"),
        mpl.lines.Line2D([], [], color="0.3", marker="o", markersize=5.5, markerfacecolor="white", linestyle="", label="not decided"),
        mpl.lines.Line2D([], [], color="0.3", linewidth=1.3, label="95 % over questions"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _headline(data: pd.DataFrame) -> pd.DataFrame:
    """The setting shown: the largest tree at the lowest temperature."""
    of = data[data["temperature"] == data["temperature"].min()]
    return of[of["nodes"] == of["nodes"].max()]


# Findings


def finding(data: pd.DataFrame, best: pd.DataFrame, alike: pd.DataFrame) -> Finding:
    """Whether the criteria choose the same sets.

    Args:
        data, best, alike: from :func:`all_scores`, :func:`best_sets` and :func:`agreement`.
    """
    lines, values = [], {}
    for number, target in enumerate(dict.fromkeys(best["target"])):
        own, pairs = best[best["target"] == target].set_index("criterion"), alike[alike["target"] == target]
        with_s1 = pairs[pairs["criterion"] == "entropy"].set_index("other")
        near, far = with_s1["spearman"].idxmax(), with_s1["spearman"].idxmin()
        same = [NAMES[name] for name in own.index if name != "entropy" and own.loc[name, "layers"] == own.loc["entropy", "layers"]]
        undefined = int(np.isneginf(data.loc[data["target"] == target, [n for n in _criteria(data) if "det" in n]]).any(axis=1).sum())
        line = (
            f"- **{target}**: {len(own)} criteria have {own['layers'].nunique()} different best sets of three; their mean overlap "
            f"(Jaccard) is {pairs['jaccard'].mean():.2f}. {braces(own.loc['entropy', 'layers'])}, the best of S₁, is "
            + (f"also the best of {', '.join(same)}. " if same else "no other's best. ")
            + f"Over all {int(own['sets'].iloc[0]):,} sets S₁ orders most like {NAMES[near]} "
            f"(Spearman {with_s1.loc[near, 'spearman']:+.2f}, "
            f"Kendall {with_s1.loc[near, 'kendall']:+.2f}) and least like {NAMES[far]} ({with_s1.loc[far, 'spearman']:+.2f}, "
            f"{with_s1.loc[far, 'kendall']:+.2f}); the median Spearman over all pairs of criteria is "
            f"{pairs['spearman'].median():+.2f}."
        )
        if undefined:
            line += f" {undefined:,} sets have no positive determinant under the debiased CKA and stand last there."
        lines.append(line)
        name = "open_criteria" if number == 0 else "open_criteria_beside"
        values |= {f"{name}_best_sets": own["layers"].nunique(), f"{name}_jaccard": pairs["jaccard"].mean()}
        values |= {f"{name}_median_spearman": pairs["spearman"].median(), f"{name}_lowest_with_entropy": with_s1["spearman"].min()}
    median = alike["spearman"].median()
    verdict = "largely agree" if median > 0.7 else "agree in part" if median > 0.3 else "do not agree"
    text = f"**The criteria {verdict}**: what a set is scored by decides which set is taken.\n\n" + "\n".join(lines)
    if verdict == "largely agree":
        text = text.replace(": what a set is scored by decides which set is taken", "")
    return Finding(text, "Best layer sets by criterion. " + plain(text), values)


def agreement_alt(alike: pd.DataFrame) -> str:
    """Alternative text of :func:`agreement_figure`."""
    parts = []
    for target, of in alike.groupby("target", sort=False):
        low, high = of.loc[of["spearman"].idxmin()], of.loc[of["spearman"].idxmax()]
        parts.append(
            f"{target}: from {low['spearman']:+.2f} ({NAMES[low['criterion']]} and {NAMES[low['other']]}) to "
            f"{high['spearman']:+.2f} "
            f"({NAMES[high['criterion']]} and {NAMES[high['other']]}), median {of['spearman'].median():+.2f}."
        )
    return "Heat map of rank correlations between criteria over all sets of three. " + " ".join(parts)


def across_targets(alike: pd.DataFrame) -> Finding:
    """Whether two criteria that agree on one target agree on the other."""
    text = agreement_alt(alike).partition(". ")[2]
    values = {}
    targets = list(dict.fromkeys(alike["target"]))
    if len(targets) > 1:
        wide = alike.pivot_table(index=["criterion", "other"], columns="target", values="spearman").dropna()
        values["open_criteria_across_targets"] = rho = float(spearmanr(wide[targets[0]], wide[targets[1]]).statistic)
        how = "much the same pairs agree on both targets" if rho > 0.7 else "which criteria agree depends on the target"
        text += f" Over the {len(wide)} pairs of criteria, agreement on one target and on the other have a rank correlation "
        text += f"of {rho:+.2f}: {how}."
    return Finding(text, agreement_alt(alike), values)


def tau_finding(told: pd.DataFrame | None, target: str, table: str = "table2") -> Finding:
    """Which criterion foretells tau, and how little so few sets can say.

    Args:
        told: from :func:`foretelling`; None where no tau of this target was measured.
        target: its name.
        table: ``table2`` or ``table3``, where its tau stands; the names of the values begin with it.
    """
    if told is None:
        text = f"No tau of {target} was measured, so no criterion can be set beside it."
        return Finding(text, text)
    shown, values, lines = _headline(told), {}, []
    place = f"{target}, {int(shown['nodes'].iloc[0])} nodes, T = {shown['temperature'].iloc[0]:g}"
    for kind, words in ((FEW, "sets of three layers"), (ALL_SETS, "measured sets of any size")):
        of = shown[(shown["sets"] == kind) & shown["rho"].notna()].set_index("criterion")
        if of.empty:
            continue
        first, last = of["rho"].idxmax(), of["rho"].idxmin()
        own, decided = of.loc["entropy"], of[of["p_holm"] < 0.05]
        lines.append(
            f"- {int(of['n'].max())} {words}: S₁ has a rank correlation with τ of {own['rho']:+.2f} ({own['low']:+.2f} to "
            f"{own['high']:+.2f} "
            f"over questions, {p_value(own['p'])} by permutation); the highest is {NAMES[first]} ({of.loc[first, 'rho']:+.2f}, "
            f"{p_value(of.loc[first, 'p'])}, {p_value(of.loc[first, 'p_holm'])} after Holm's correction over {len(of)} criteria), "
            f"the lowest "
            f"{NAMES[last]} ({of.loc[last, 'rho']:+.2f}). "
            + (f"Decided: {', '.join(NAMES[name] for name in decided.index)}." if len(decided) else "None is decided.")
        )
        key = f"open_criteria_{table}_{'three' if kind == FEW else 'all'}"
        values |= {f"{key}_entropy": own["rho"], f"{key}_entropy_p": own["p"]}
        values |= {f"{key}_highest": of["rho"].max(), f"{key}_n": of["n"].max()}
    if not lines:
        text = "Fewer than three layer sets have a measured tau, so nothing can be ranked."
        return Finding(text, text, values)
    few = shown[shown["sets"] == FEW]["n"].max()
    everything = told[told["sets"] == ALL_SETS]
    signs = everything[everything["criterion"] == "entropy"]["rho"]
    settled = bool((shown["p_holm"] < 0.05).any())
    count = int((shown["p_holm"] < 0.05).groupby(shown["criterion"]).any().sum())
    head = "**No criterion is shown to foretell tau**"
    if settled:
        head = f"**{count} of {shown['criterion'].nunique()} criteria go with tau over these sets**"
    text = (
        f"{head} ({place}).\n\n" + "\n".join(lines) + f"\n\nWith {int(few)} sets of three a rank correlation has to reach about "
        f"{critical_rho(int(few)):.2f} to have p < 0.05 for one criterion alone, and more for the best of many. The sets were not "
        f"drawn at random, each was trained once, and training again moves tau too ([{table[:5]} {table[5:]}](#{table}-differences)). "
        f"Over the {len(signs)} settings S₁'s correlation over all measured sets goes from {signs.min():+.2f} to "
        f"{signs.max():+.2f}. Sets of different size differ in more than their layers, so a correlation over all of them is also "
        f"one with size."
    )
    return Finding(text, "Rank correlation of each criterion with tau. " + plain(text), values)
