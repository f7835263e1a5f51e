"""Greedy or exhaustive? Whether S_1 of a Gram sum is submodular or monotone, and what beams of every width lose.

A set function f is submodular if a layer adds no more to a larger set, f(A + j) - f(A) >= f(B + j) - f(B) for A in B and j outside B,
and monotone if no layer takes away. Greedy search of a function that is both, and 0 for the empty set, reaches at least 1 - 1/e of the
optimum (Nemhauser, Wolsey and Fisher 1978). With layers of equal trace F(L) = - tr K_L log K_L is submodular (Friedland and Gaubert
2013) and S_1(L) = F(L) / m + log m, but F is not monotone where an eigenvalue exceeds 1 / e. F of c K, c small enough, is:
:func:`guarantees` says what its bound is worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import comb
from torch import Tensor

from elsi_lib.criteria import set_entropies
from elsi_lib.entropy import prepare_grams
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report.figures import BLUE, GREEN, ORANGE, _figure, _styled
from elsi_lib.report.findings import Finding
from elsi_lib.report.measures import timed
from elsi_lib.report.words import braces, markdown_table, plain, spaced
from elsi_lib.selection import TIE, elsi, exhaustive, layer_sets

PLAIN, TRACE, F = "S₁", "S₁, layers of equal trace", "F = −tr K log K"
NORMALIZE = {PLAIN: "none", TRACE: "trace"}
WIDTHS = (1, 2, 5, 10)  # of the beam; 1 is greedy
TOLERANCE = 1e-9  # nats; what rounding may move a difference of four entropies by


def _rank(sets: np.ndarray, n: int) -> np.ndarray:
    """Place of each set (C, m), increasing, among all of its size in lexicographic order."""
    m = sets.shape[1]
    return (math.comb(n, m) - 1 - comb(n - 1 - sets, m - np.arange(m)).sum(-1)).astype(np.int64)


class _Values:
    """S_1 of every set up to ``whole`` layers, computed once; of larger ones as they are asked for."""

    def __init__(self, grams: Tensor, normalize: str, whole: int):
        self.grams, self.normalize, self.n = grams, normalize, len(grams)
        self.kept: tuple[bytes, np.ndarray] = (b"", np.empty(0))  # one sample of larger sets serves all sizes of A, and F
        self.tables = {
            size: set_entropies(grams, layer_sets(range(self.n), size), normalize=normalize).numpy()
            for size in range(1, min(whole, self.n) + 1)
        }

    def __call__(self, sets: np.ndarray, form: str) -> np.ndarray:
        """Values of the objective on (C, m) sets; F follows from S_1 of layers of equal trace."""
        sets = np.sort(sets, axis=1)
        m = sets.shape[1]
        if m in self.tables:
            entropy = self.tables[m][_rank(sets, self.n)]
        else:
            key = sets.tobytes()
            if self.kept[0] != key:
                self.kept = key, set_entropies(self.grams, torch.from_numpy(sets), normalize=self.normalize).numpy()
            entropy = self.kept[1]
        return m * (entropy - math.log(m)) if form == F else entropy


def triples(n: int, a: int, b: int, limit: int, seed: int = 0) -> tuple[np.ndarray, bool]:
    """Rows that hold B with A in front, then j: (T, b + 1); all there are, or a seeded sample of ``limit``, and whether all.

    Args:
        n: layers.
        a, b: sizes of A in B, 1 <= a < b < n.
    """
    if not 1 <= a < b < n:
        raise ElsiError(f"sizes {a} and {b} of {n} layers: 1 <= |A| < |B| < N is needed")
    count = math.comb(n, b) * math.comb(b, a) * (n - b)
    if count > limit:
        order = np.random.default_rng(seed).permuted(np.tile(np.arange(n), (limit, 1)), axis=1)
        return order[:, : b + 1], False
    rows = []
    inner = layer_sets(range(b), a).tolist()
    for larger in layer_sets(range(n), b).tolist():
        outside = [j for j in range(n) if j not in larger]
        for places in inner:
            front = [larger[i] for i in places] + [larger[i] for i in range(b) if i not in places]
            rows += [[*front, j] for j in outside]
    return np.array(rows), True


@timed
def violations(fps: Sequence[Fingerprint | None], largest: int = 5, limit: int = 20_000, seed: int = 0) -> pd.DataFrame:
    """How often, and by how much, each objective breaks submodularity and monotonicity.

    Args:
        fps: one or more targets; None is passed over.
        largest: sets up to this size are met; the size of B + j.
        limit: triples (A, B, j) tried for each pair of sizes: all where there are no more, else so many drawn with ``seed``.

    Returns:
        Columns target, objective, property (submodular or monotone), size_a, size_b, tried, all (whether those are all), violated
        (share), worst (nats, the size of the largest violation, 0 for none), typical (median size of a violation, nats; NaN for none).
        A monotone row is of B and j, its size_a is 0.
    """
    rows = []
    for fp in filter(None, fps):
        top = min(largest, fp.num_layers)
        for form, normalize in ((PLAIN, "none"), (TRACE, "trace"), (F, "trace")):
            if form != F:
                values = _Values(fp.grams, normalize, top - 1)
            for b in range(1, top):
                for a in range(1, b):
                    found, every = triples(fp.num_layers, a, b, limit, seed)
                    last = found[:, -1:]
                    gain_a = values(np.hstack([found[:, :a], last]), form) - values(found[:, :a], form)
                    gain_b = values(found, form) - values(found[:, :b], form)
                    rows.append((fp.target, form, "submodular", a, b, len(found), every, *_broken(gain_a - gain_b)))
                pairs, every = _pairs(fp.num_layers, b, limit, seed)
                gain = values(pairs, form) - values(pairs[:, :b], form)
                rows.append((fp.target, form, "monotone", 0, b, len(pairs), every, *_broken(gain)))
    columns = ["target", "objective", "property", "size_a", "size_b", "tried", "all", "violated", "worst", "typical"]
    return pd.DataFrame(rows, columns=columns)


def _pairs(n: int, b: int, limit: int, seed: int) -> tuple[np.ndarray, bool]:
    """(T, b + 1) rows of B, then j."""
    if math.comb(n, b) * (n - b) > limit:
        return np.random.default_rng(seed).permuted(np.tile(np.arange(n), (limit, 1)), axis=1)[:, : b + 1], False
    return np.array([[*B, j] for B in layer_sets(range(n), b).tolist() for j in range(n) if j not in B]), True


def _broken(slack: np.ndarray) -> tuple[float, float, float]:
    below = -slack[slack < -TOLERANCE]
    return float(len(below) / len(slack)), float(below.max(initial=0.0)), float(np.median(below)) if len(below) else math.nan


def over_sizes(broken: pd.DataFrame) -> pd.DataFrame:
    """Violations over all sizes: columns target, objective, property, tried, violated (share), worst (nats)."""
    of = broken.assign(count=broken["violated"] * broken["tried"])
    of = of.groupby(["target", "objective", "property"], sort=False)
    of = of.agg(tried=("tried", "sum"), count=("count", "sum"), worst=("worst", "max"))
    return of.assign(violated=of["count"] / of["tried"]).drop(columns="count").reset_index()


@timed
def searches(fps: Sequence[Fingerprint | None], largest: int = 4, resampled: int = 3) -> pd.DataFrame:
    """Beams of every width against the true optimum, S_1 with and without layers of equal trace.

    Each set of the beam is extended by every layer, and seeds may lie anywhere, so that width 1 is greedy search.

    Args:
        largest: sizes 1 to this.
        resampled: sizes up to this are searched again in every bootstrap replicate of the prompts, by S_1 as the paper has it,
            greedily and with the beam of ten.

    Returns:
        Columns target, objective, m, width (0: unlimited, which is the exhaustive search), layers, entropy (nats), regret (nats below
        the optimum), rank, sets, optimum, found (share of the replicates in which the beam's set is the optimum), regret_high
        (97.5 % percentile of its regret over replicates), replicates.
    """
    rows = []
    for fp in filter(None, fps):
        n, top = fp.num_layers, min(largest, fp.num_layers)
        for form, normalize in NORMALIZE.items():
            values = _Values(fp.grams, normalize, top)
            beams = {w: elsi(fp, top, k_beam=w, k_expand=None, after_midpoint="never", normalize=normalize).frontier for w in WIDTHS}
            again = _resampled(fp, min(resampled, top)) if form == PLAIN else {}
            for m in range(1, top + 1):
                entropies = values.tables[m]
                best = tuple(layer_sets(range(n), m)[int(entropies.argmax())].tolist())
                for width in (*WIDTHS, 0):
                    layers = beams[width][m - 1][0][0] if width else best
                    own = float(values(np.array([layers]), form)[0])
                    regret = max(float(entropies.max()) - own, 0.0)
                    rank = int((entropies > own + TIE).sum()) + 1
                    drawn = again.get((m, width), np.array([]))
                    found = float((drawn <= 1e-9).mean()) if len(drawn) else math.nan
                    high = float(np.percentile(drawn, 97.5)) if len(drawn) else math.nan
                    row = (fp.target, form, m, width, spaced(layers), own, regret, rank, len(entropies), spaced(best))
                    rows.append((*row, found, high, len(drawn)))
    columns = ["target", "objective", "m", "width", "layers", "entropy", "regret", "rank", "sets", "optimum"]
    return pd.DataFrame(rows, columns=[*columns, "found", "regret_high", "replicates"])


def _resampled(fp: Fingerprint, top: int) -> dict[tuple[int, int], np.ndarray]:
    """(m, width) -> regret in each replicate, S_1 as the paper has it, greedy and the beam of ten."""
    regrets: dict[tuple[int, int], list[float]] = {}
    for grams in () if fp.bootstrap is None else fp.bootstrap:
        best = {m: exhaustive(grams, m).entropy for m in range(2, top + 1)}
        for width in (1, 10):
            frontier = elsi(grams, top, k_beam=width, k_expand=None, after_midpoint="never").frontier
            for m, highest in best.items():
                regrets.setdefault((m, width), []).append(max(highest - frontier[m - 1][0][1], 0.0))
    return {key: np.array(found) for key, found in regrets.items()}


@timed
def guarantees(fps: Sequence[Fingerprint | None], largest: int = 4) -> pd.DataFrame:
    """What 1 - 1/e is worth for S_1 with layers of equal trace.

    F of c K is submodular, 0 for the empty set, and monotone on the sets that the proof compares, of up to 2 m layers, if no
    eigenvalue of c K_L exceeds 1 / e there. With the c that the sum of the 2 m largest single-layer eigenvalues allows, and
    F_c(L) = c m (S_1(L) + log 1 / (c m)), the bound on F_c reads S_1(greedy) >= (1 - 1/e) S_1(best) - log(1 / (c m)) / e.

    Returns:
        Columns target, reading (uncentred, centred), m, scale (c), guaranteed (nats; 0 where the bound
        says less), greedy, best (nats).
    """
    rows = []
    for fp in filter(None, fps):
        for reading, center in (("uncentred", False), ("centred", True)):
            grams = prepare_grams(fp.grams, center, "trace")
            top = torch.linalg.eigvalsh(grams)[:, -1].sort(descending=True).values
            sizes = min(largest, fp.num_layers)
            frontier = elsi(grams, sizes, k_beam=1, k_expand=None, after_midpoint="never").frontier
            for m in range(1, sizes + 1):
                c = 1 / (math.e * float(top[: 2 * m].sum()))
                best = exhaustive(grams, m).entropy
                bound = (1 - 1 / math.e) * best - math.log(1 / (c * m)) / math.e
                rows.append((fp.target, reading, m, c, max(bound, 0.0), frontier[m - 1][0][1], best))
    return pd.DataFrame(rows, columns=["target", "reading", "m", "scale", "guaranteed", "greedy", "best"])


HEADS = (
    *("objective", "m", "greedy", "regret (nats)", "rank"),
    *("beam of 10", "regret", "optimum", "greedy finds it, replicates"),
)


def search_table(found: pd.DataFrame) -> str:
    """Greedy, the beam of ten and the optimum for a page, as Markdown."""
    blocks = []
    for target, of in found.groupby("target", sort=False):
        lines = []
        for (form, m), rows in of.groupby(["objective", "m"], sort=False):
            by = rows.set_index("width")
            one, ten = by.loc[1], by.loc[10]
            share = f"{100 * one['found']:.0f} %" if one["replicates"] else ""
            rank = f"{int(one['rank']):,} of {int(one['sets']):,}"
            greedy = braces(one["layers"]), f"{one['regret']:.4f}", rank
            beam = braces(ten["layers"]), f"{ten['regret']:.4f}"
            lines.append([form, m, *greedy, *beam, braces(one["optimum"]), share])
        blocks.append(f"**{target}**\n\n" + markdown_table(HEADS, lines, right=(1, 3, 4, 6, 8)))
    return "\n\n".join(blocks)


def guarantee_table(bound: pd.DataFrame) -> str:
    """The bounds for a page, as Markdown."""
    lines = []
    for row in bound.itertuples():
        said = f"{row.guaranteed:.4f}" if row.guaranteed > 0 else "nothing"
        lines.append([row.target, row.reading, row.m, said, f"{row.greedy:.4f}", f"{row.best:.4f}"])
    return markdown_table(("target", "reading", "m", "guaranteed (nats)", "greedy", "best"), lines, right=range(2, 6))


# Figure

_SIZES = {2: (BLUE, "o"), 3: (ORANGE, "D"), 4: (GREEN, "s")}


@_styled
def figure(broken: pd.DataFrame, found: pd.DataFrame) -> Figure:
    """Share of violations by objective (above) and regret by width of the beam (below), one column per target.

    Args:
        broken: from :func:`violations`.
        found: from :func:`searches`.
    """
    targets, total = list(dict.fromkeys(found["target"])), over_sizes(broken)
    fig, axes = _figure(4.7, 2, len(targets), sharey="row", height_ratios=[1, 1.25])
    high = max(1e3 * found["regret"].max(), 1e-3)
    for (above, below), target in zip(axes.T, targets, strict=True):
        _violation_panel(above, total[total["target"] == target])
        above.set_title(target)
        of = found[(found["target"] == target) & (found["m"] > 1)]
        for form, dash in ((PLAIN, "-"), (TRACE, ":")):
            for m, (color, marker) in _SIZES.items():
                one = of[(of["objective"] == form) & (of["m"] == m)]
                face = color if form == PLAIN else "white"
                look = {"color": color, "linestyle": dash, "marker": marker, "markersize": 4.5, "markerfacecolor": face}
                below.plot(range(len(one)), 1e3 * one["regret"], **look)
        below.set_xticks(range(len(WIDTHS) + 1), [f"{w}" for w in WIDTHS] + ["all"])
        below.set_xlabel("width of the beam (1: greedy)")
        below.set_ylim(-0.04 * high, 1.1 * high)
    axes[1, 0].set_ylabel("regret of its best set\n(thousandths of a nat)")
    line = mpl.lines.Line2D
    handles = [line([], [], color=color, marker=marker, markersize=4.5, label=f"m = {m}") for m, (color, marker) in _SIZES.items()]
    handles += [
        line([], [], color="0.3", linestyle=dash, marker="o", markersize=4.5, markerfacecolor=face, label=form)
        for form, dash, face in ((PLAIN, "-", "0.3"), (TRACE, ":", "white"))
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    return fig


def _violation_panel(ax: Axes, total: pd.DataFrame) -> None:
    forms = (PLAIN, TRACE, F)
    for y, form in enumerate(forms):
        for shift, kind, hatch in ((-0.19, "submodular", ""), (0.19, "monotone", "////")):
            row = total[(total["objective"] == form) & (total["property"] == kind)]
            if row.empty:
                continue
            share = 100 * row["violated"].iloc[0]
            about = {"height": 0.34, "edgecolor": "0.45", "hatch": hatch, "linewidth": 0.8}
            ax.barh(y + shift, share, color="0.45" if kind == "submodular" else "white", **about)
            words = f"always {kind}" if share == 0 else f"{share:.3g} % not {kind}" if share >= 0.1 else f"{share:.2g} % not {kind}"
            ax.annotate(words, (share, y + shift), (4, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(range(len(forms)), forms)
    ax.set_ylim(len(forms) - 0.5, -0.5)
    ax.set_xlim(0, 160)
    ax.set_xticks([0, 25, 50, 75, 100])
    ax.set_xlabel("share of cases that violate (%)")
    ax.tick_params(axis="y", length=0)


# Findings


def finding(broken: pd.DataFrame, found: pd.DataFrame) -> Finding:
    """Whether the objectives are submodular and monotone, and what beams lose.

    Args:
        broken, found: from :func:`violations` and :func:`searches`.
    """
    total, lines, values = over_sizes(broken), [], {}
    for number, target in enumerate(dict.fromkeys(found["target"])):
        name = "open_submodularity" if number == 0 else "open_submodularity_beside"
        of = total[total["target"] == target].set_index(["objective", "property"])
        words = []
        for form in (PLAIN, TRACE, F):
            sub, mono = of.loc[(form, "submodular")], of.loc[(form, "monotone")]
            words.append(f"{form} breaks submodularity in {_share(sub)} and monotonicity in {_share(mono)}")
        own = of.loc[(PLAIN, "submodular")]
        values |= {f"{name}_not_submodular": own["violated"], f"{name}_worst": own["worst"]}
        values |= {f"{name}_not_monotone": of.loc[(PLAIN, "monotone"), "violated"]}
        values |= {f"{name}_f_violations": of.loc[(F, "submodular"), "violated"]}
        cases = int(of["tried"].groupby("objective").sum().iloc[0])
        lines.append(f"- **{target}** ({cases:,} cases each): {'; '.join(words)}. {_lost(found, target, name, values)}")
    clean = total[(total["objective"] == F) & (total["property"] == "submodular")]["violated"].max() == 0
    verdict = _verdict(found)
    theory = (
        "F shows no violation of submodularity, as the theorem says. It is not monotone, since nearly all of a layer's trace "
        "of 1 lies in one eigenvalue, far above 1/e; so the bound of 1 − 1/e does not hold for it as it stands."
        if clean
        else "F shows violations, which the theorem excludes: the Gram matrices or the arithmetic are at fault."
    )
    last = "All sets of three can be tried, so at this depth a search needs no guarantee."
    text = f"{verdict}\n\n" + "\n".join(lines) + f"\n\n{theory} {last}"
    return Finding(text, "Violations of submodularity and monotonicity, and regret by width of the beam. " + plain(text), values)


def _verdict(found: pd.DataFrame) -> str:
    of = found[found["m"] > 1].assign(part=lambda data: data["regret"] / (data["entropy"] + data["regret"]))
    said = []
    for form in (PLAIN, TRACE):
        greedy, ten = (of[(of["objective"] == form) & (of["width"] == width)] for width in (1, 10))
        missed, lost = (int((one["regret"] > 1e-9).sum()) for one in (greedy, ten))
        cases = f"greedy search misses the optimum in {missed} of {len(greedy)} cases, a beam of ten in {lost or 'none'}"
        far = f"greedy by up to {greedy['regret'].max():.3f} nats ({100 * greedy['part'].max():.0f} % of the optimum)"
        said.append((cases, far + (f", a beam of ten by up to {ten['regret'].max():.3f}" if lost else "")))
    (first, far), (equal, equal_far) = said
    wider = of[of["width"] > 0].sort_values("width").groupby(["target", "objective", "m"])["regret"]
    worse = int((wider.apply(lambda regrets: regrets.diff().max()) > 1e-9).sum())
    return (
        f"**By S₁ as the paper has it {first}**, {far}; a case is a target and a size from two. "
        f"With layers of equal trace {equal}, {equal_far}."
        + (f" A wider beam finds a worse set than a narrower one in {worse} of {len(wider)} cases." if worse else "")
    )


def _share(row: pd.Series) -> str:
    if row["violated"] == 0:
        return "no case"
    return f"{100 * row['violated']:.3g} % (by up to {row['worst']:.3f} nats)"


def _lost(found: pd.DataFrame, target: str, name: str, values: dict[str, float]) -> str:
    words = []
    for form in NORMALIZE:
        of = found[(found["target"] == target) & (found["objective"] == form) & (found["m"] > 1)]
        greedy = of[of["width"] == 1]
        missed = greedy[greedy["regret"] > 1e-9]
        key = f"{name}_greedy_{'plain' if form == PLAIN else 'trace'}"
        values[key] = greedy["regret"].max()
        if missed.empty:
            text = f"by {form} greedy finds every optimum up to m = {int(greedy['m'].max())}"
        else:
            parts = [f"m = {int(r.m)} by {r.regret:.4f} nats (rank {int(r.rank):,} of {int(r.sets):,})" for r in missed.itertuples()]
            exact = [w for w in WIDTHS if of[of["width"] == w]["regret"].max() <= 1e-9]
            text = f"by {form} greedy misses {', '.join(parts)}"
            text += f"; a beam of {exact[0]} misses none" if exact else "; no width here finds all"
        resampled = greedy[greedy["replicates"] > 0]
        if len(resampled):
            worst = resampled.loc[resampled["found"].idxmin()]
            text += (
                f"; over {int(worst['replicates'])} redraws of the prompts greedy finds the optimum of m = {int(worst['m'])} in "
                f"{100 * worst['found']:.0f} % (regret up to {worst['regret_high']:.4f})"
            )
        words.append(text)
    text = "; ".join(words)
    return text[0].upper() + text[1:] + "."


def bound_finding(bound: pd.DataFrame) -> Finding:
    """What the guarantee is worth.

    Args:
        bound: from :func:`guarantees`.
    """
    words, values = [], {}
    for reading, of in bound.groupby("reading", sort=False):
        useful = of[(of["guaranteed"] > 0) & (of["m"] > 1)]
        cases = of[of["m"] > 1]
        if useful.empty:
            low, high = cases["best"].min(), cases["best"].max()
            words.append(
                f"{reading}, it promises nothing in any of {len(cases)} cases, as the best sets have {low:.2f} to {high:.2f} nats only"
            )
        else:
            share = (useful["guaranteed"] / useful["best"]).max()
            words.append(
                f"{reading}, it promises something in {len(useful)} of {len(cases)} cases, {100 * share:.0f} % of the best at most"
            )
        values[f"open_submodularity_bound_{reading}"] = of["guaranteed"].max()
        kept = (cases["greedy"] / cases["best"]).min()
        words[-1] += (
            "; greedy finds the best there" if kept > 1 - 1e-9 else f"; greedy has at least {100 * kept:.0f} % of the best there"
        )
    text = (
        "**The guarantee explains little of what greedy reaches.** The bound of 1 − 1/e, made to hold by scaling and read back as "
        f"$S_1$ of layers of equal trace, two layers and more: {'; '.join(words)}."
    )
    return Finding(text, plain(text), values)
