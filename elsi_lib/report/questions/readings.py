"""Which reading? What every choice that the paper leaves open does to table 1, and which reading comes closest to what it reports.

A reading is one value for each of: block mean by position or within blocks, centring, trace normalisation, order alpha, base of the
logarithm, estimator of CKA (for ELSI-C), token filter, first position, and EAGLE-3's layers as printed or as its code runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from elsi_lib.entropy import prepare_grams, set_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import VARIANTS, Fingerprint
from elsi_lib.report.figures import BLUE, ORANGE, _figure, _styled
from elsi_lib.report.findings import Finding
from elsi_lib.report.measures import timed
from elsi_lib.report.tables import REPORTED_TARGETS, reported_value
from elsi_lib.report.words import braces, markdown_table, spaced
from elsi_lib.selection import TIE, all_set_entropies, elsi, elsi_c, layer_rule

DEPTHS = {"Qwen3-4B": 36, "Llama-3.1-8B": 32}  # N of the paper's targets
NOT_RUN = "not run here"
LAST_WEIGHT = 0.25  # what it adds to the distance that one set holds the last layer and the other does not
PARTS = ("ratio_part", "level_part", "peak_part", "last_part")


@dataclass(frozen=True)
class Reading:
    """One reading of the paper; the defaults are those of this project.

    Attributes:
        segment: mean within blocks in place of the mean by position; needs a calibration of its own.
        center, normalize, alpha: see :mod:`elsi_lib.entropy`.
        bits: logarithm to base 2, a factor of 1 / log 2 only.
        debiased: estimator of the CKA in ELSI-C.
        filtered, sink: token filter on, first position kept.
        as_run: EAGLE-3's layers as its code runs, one before those printed.
    """

    segment: bool = False
    center: bool = False
    normalize: str = "none"
    alpha: float = 1.0
    bits: bool = False
    debiased: bool = False
    filtered: bool = True
    sink: bool = True
    as_run: bool = False

    @property
    def name(self) -> str:
        """What differs from the default, ``default`` where nothing does."""
        words = [word for field, (_, word) in CHANGES.items() if getattr(self, field) != getattr(DEFAULT, field)]
        return ", ".join(words) or "default"


DEFAULT = Reading()
# Field -> (its other value, name of the reading that changes it alone).
CHANGES: dict[str, tuple[Any, str]] = {
    "segment": (True, "mean within blocks"),
    "center": (True, "centred"),
    "normalize": ("trace", "layers of equal trace"),
    "alpha": (2.0, "α = 2"),
    "bits": (True, "bits"),
    "debiased": (True, "debiased CKA"),
    "filtered": (False, "filter off"),
    "sink": (False, "first position dropped"),
    "as_run": (True, "EAGLE-3 as run"),
}
ALONE = (DEFAULT, *(replace(DEFAULT, **{field: value}) for field, (value, _) in CHANGES.items()))


@timed
def readings(fps: Sequence[Fingerprint | None], segment: Sequence[Fingerprint | None] = ()) -> pd.DataFrame:
    """Table 1 under the default reading and under each single change of it.

    Args:
        fps: one or more targets, calibrated with the block mean by position; None is passed over.
        segment: the same targets calibrated with ``reading="segment"``, where there are any.

    Returns:
        Columns target, reading, run (whether it was), unit (nats or bits), elsi1, elsi2, elsi3, elsic2, elsic3, eagle3 (layers as
        ``2 15 27``), s_elsi3 and s_eagle3 (in ``unit``), ratio, ratio_low, ratio_high (S(ELSI m=3) / S(EAGLE-3) -/+ 1.96 standard
        deviations over bootstrap replicates, both choices made anew in each; NaN without replicates), replicates, peak (layer of
        ELSI m=1 over N - 1), holds_last (whether ELSI m=3 does), rank_eagle3 among ``sets``.
    """
    rows = []
    for fp in filter(None, fps):
        drawn: dict[tuple, list[float]] = {}
        for reading in ALONE:
            given = _of(fp, reading, segment)
            if given is None:
                rows.append({"target": fp.target, "reading": reading.name, "run": False})
                continue
            rows.append({"target": fp.target, "reading": reading.name, "run": True, **_row(given, reading)})
            rows[-1] |= _interval(given, reading, rows[-1]["ratio"], drawn)
    return pd.DataFrame(rows)


@timed
def combinations(fps: Sequence[Fingerprint | None], segment: Sequence[Fingerprint | None] = ()) -> pd.DataFrame:
    """Every combination of the choices that move S_1 (the estimator of CKA does not), for :func:`distances`.

    Returns:
        Columns target, reading, changes (from the default), elsi3, s_elsi3, s_eagle3, ratio, peak, holds_last.
    """
    fields = [field for field in CHANGES if field != "debiased"]
    rows = []
    for fp in filter(None, fps):
        for changed in itertools.product((False, True), repeat=len(fields)):
            chosen = {field: CHANGES[field][0] for field, use in zip(fields, changed, strict=True) if use}
            if chosen.get("bits") or chosen.get("as_run"):
                continue  # they follow from the others, below
            reading = replace(DEFAULT, **chosen)
            given = _of(fp, reading, segment)
            if given is None:
                continue
            for also in itertools.product((False, True), repeat=2):
                one = replace(reading, bits=also[0], as_run=also[1])
                if not also[0] and not also[1]:
                    base = _choice(given, one)
                about = {"target": fp.target, "reading": one.name, "changes": len(chosen) + sum(also)}
                rows.append({**about, **_scored(given, one, *base)})
    return pd.DataFrame(rows)


def reported_values() -> pd.DataFrame:
    """What the paper reports that can be set beside another target.

    Returns:
        Columns target, ratio, s_elsi3, peak, holds_last (NaN: not known), as in :func:`readings`.
    """
    rows = []
    for target in REPORTED_TARGETS:
        level, eagle3 = (float(reported_value(target, f"{name} S_1")) for name in ("ELSI m=3", "EAGLE3"))
        peak = float(reported_value(target, "layer of the peak")) / (DEPTHS[target] - 1)
        try:
            last = float(DEPTHS[target] - 1 in map(int, reported_value(target, "ELSI m=3 layers").split()))
        except ElsiError:  # the set is not known
            last = math.nan
        rows.append((target, level / eagle3, level, peak, last))
    return pd.DataFrame(rows, columns=["target", "ratio", "s_elsi3", "peak", "holds_last"])


def distances(data: pd.DataFrame, last_weight: float = LAST_WEIGHT) -> pd.DataFrame:
    """How far readings are from the reported values: |log of the ratio over the reported one| + |log of the level over the reported
    one| + |difference of the peak's share of depth| + ``last_weight`` where only one of the two sets holds the last layer.

    Ratio is S(ELSI m=3) / S(EAGLE-3), level S(ELSI m=3). A part the paper does not report counts nothing.

    Args:
        data: from :func:`readings` or :func:`combinations`, or :func:`reported_values` itself, with ``target``.

    Returns:
        One row per target, reading and reported target: columns target, reading, reported, ratio_part, level_part, peak_part,
        last_part, distance.
    """
    rows = []
    run = data[data["run"]] if "run" in data else data
    for one, of in itertools.product(run.to_dict("records"), reported_values().to_dict("records")):
        differs = np.isfinite([float(one["holds_last"]), of["holds_last"]]).all() and float(one["holds_last"]) != of["holds_last"]
        parts = {
            "ratio_part": abs(math.log(one["ratio"] / of["ratio"])),
            "level_part": abs(math.log(one["s_elsi3"] / of["s_elsi3"])),
            "peak_part": abs(one["peak"] - of["peak"]),
            "last_part": last_weight * differs,
        }
        about = {"target": one["target"], "reading": one.get("reading", "reported"), "reported": of["target"]}
        rows.append({**about, **parts, "distance": sum(parts.values())})
    return pd.DataFrame(rows)


_DIGITS = 9  # of a distance: what differs behind them is rounding, which processors do differently


def mean_distances(apart: pd.DataFrame) -> pd.DataFrame:
    """Mean over targets and reported targets: index reading, columns the parts and distance, nearest first; of readings as near as
    one another, but for rounding, the one that came first."""
    found = apart.groupby("reading", sort=False)[[*PARTS, "distance"]].mean()
    return found.sort_values("distance", kind="stable", key=lambda distance: distance.round(_DIGITS))


def nearest_table(joined: pd.DataFrame, rows: int = 10) -> str:
    """The nearest combinations and the default for a page, as Markdown; ``joined`` from :func:`mean_distances`."""
    heads = ("place", "reading", "ratio", "level", "peak", "last layer", "distance")
    shown = [(i, *one) for i, one in enumerate(joined.iterrows(), start=1) if i <= rows or one[0] == DEFAULT.name]
    lines = [(place, name, *(f"{row[part]:.3f}" for part in (*PARTS, "distance"))) for place, name, row in shown]
    return markdown_table(heads, lines, right=(0, *range(2, 7)))


def between_reported() -> float:
    """Distance of the paper's two targets from each other, under whatever one reading the paper has: what it cannot resolve."""
    apart = distances(reported_values())
    return float(apart[apart["target"] != apart["reported"]]["distance"].mean())


HEADS = (
    *("reading", "ELSI m=1", "m=2", "m=3", "ELSI-C m=2", "m=3"),
    *("$S$ EAGLE-3", "$S$ ELSI m=3", "ratio", "peak", "EAGLE-3's rank"),
)


def table(data: pd.DataFrame) -> str:
    """Sets under each reading for a page, as Markdown, one block per target."""
    blocks = []
    for target, of in data.groupby("target", sort=False):
        lines = []
        for row in of.to_dict("records"):
            if not row["run"]:
                lines.append([row["reading"], NOT_RUN, *[""] * 9])
                continue
            sets = [braces(row[name]) for name in ("elsi1", "elsi2", "elsi3", "elsic2", "elsic3")]
            unit = " bits" if row["unit"] == "bits" else ""
            numbers = [f"{row['s_eagle3']:.4f}{unit}", f"{row['s_elsi3']:.4f}{unit}", f"{row['ratio']:.3f}", f"{row['peak']:.2f}"]
            rank = ""
            if np.isfinite(row["ratio"]):
                rank = f"{int(row['rank_eagle3']):,} of {int(row['sets']):,}"
            else:  # EAGLE-3's layers collide on so shallow a target
                numbers[0] = numbers[2] = ""
            lines.append([row["reading"], *sets, *numbers, rank])
        blocks.append(f"**{target}**\n\n" + markdown_table(HEADS, lines, right=range(6, 11)))
    return "\n\n".join(blocks)


def _of(fp: Fingerprint, reading: Reading, segment: Sequence[Fingerprint | None]) -> Fingerprint | None:
    if not reading.segment:
        return fp.variant(reading.filtered, reading.sink)
    found = next((other for other in segment if other is not None and other.target == fp.target), None)
    if found is None or (not reading.filtered and len(found.tensors["grams"]) < len(VARIANTS)):
        return None  # a survey keeps the filtered variants only
    return found.variant(reading.filtered, reading.sink)


def _options(reading: Reading) -> dict[str, Any]:
    return {"alpha": reading.alpha, "center": reading.center, "normalize": reading.normalize}


def _eagle3(num_layers: int, reading: Reading) -> tuple[int, ...]:
    return layer_rule("eagle3-code" if reading.as_run else "eagle3", num_layers)


def _choice(fp: Fingerprint, reading: Reading) -> tuple[tuple[int, ...], float, tuple[int, ...]]:
    """Layers and entropy in nats of ELSI m=3, and the layer of ELSI m=1."""
    three = elsi(fp, 3, **_options(reading))
    return three.layers, three.entropy, elsi(fp, 1, **_options(reading)).layers


def _scored(fp: Fingerprint, reading: Reading, layers: tuple[int, ...], entropy: float, peak: tuple[int, ...]) -> dict[str, Any]:
    n, unit = fp.num_layers, math.log(2) if reading.bits else 1.0
    try:
        eagle3 = fp.entropy(_eagle3(n, reading), **_options(reading))
    except ElsiError:  # too shallow for the rule
        eagle3 = math.nan
    return {
        "elsi3": spaced(layers),
        "s_elsi3": entropy / unit,
        "s_eagle3": eagle3 / unit,
        "ratio": entropy / eagle3,
        "peak": peak[0] / (n - 1),
        "holds_last": n - 1 in layers,
    }


def _row(fp: Fingerprint, reading: Reading) -> dict[str, Any]:
    options = _options(reading)
    row = _scored(fp, reading, *_choice(fp, reading))
    row |= {"unit": "bits" if reading.bits else "nats", "elsi1": spaced(elsi(fp, 1, **options).layers)}
    row |= {"elsi2": spaced(elsi(fp, 2, **options).layers)}
    row |= {f"elsic{m}": spaced(elsi_c(fp, m, debiased=reading.debiased, **options).layers) for m in (2, 3)}
    _, entropies = all_set_entropies(fp, 3, **options)
    row |= {"rank_eagle3": math.nan, "sets": len(entropies), "eagle3": ""}
    if np.isfinite(row["ratio"]):
        own = fp.entropy(_eagle3(fp.num_layers, reading), **options)
        row |= {"rank_eagle3": int((entropies > own + TIE).sum()) + 1, "eagle3": spaced(_eagle3(fp.num_layers, reading))}
    return row


def _interval(fp: Fingerprint, reading: Reading, ratio: float, drawn: dict[tuple, list[float]]) -> dict[str, Any]:
    """Interval of the ratio; ``drawn`` keeps the entropies of ELSI m=3 in each replicate, which several readings share."""
    replicates = fp.bootstrap
    if replicates is None or len(replicates) < 2 or not np.isfinite(ratio):
        return {"ratio_low": math.nan, "ratio_high": math.nan, "replicates": 0}
    prepared = [prepare_grams(grams, reading.center, reading.normalize) for grams in replicates]
    key = (reading.segment, *_options(reading).values())
    if key not in drawn:
        drawn[key] = [elsi(grams, 3, alpha=reading.alpha).entropy for grams in prepared]
    eagle3 = _eagle3(fp.num_layers, reading)
    ratios = [top / set_entropy(grams, eagle3, reading.alpha) for top, grams in zip(drawn[key], prepared, strict=True)]
    spread = 1.96 * float(np.std(ratios, ddof=1))
    return {"ratio_low": ratio - spread, "ratio_high": ratio + spread, "replicates": len(replicates)}


# Figure

_LIMITS = {"ratio": (0.8, 3.3), "s_elsi3": (0, 2.1), "peak": (0, 1.05), None: (0, 1.6)}  # beyond: an arrow with the number


@_styled
def figure(data: pd.DataFrame, apart: pd.DataFrame) -> Figure:
    """Ratio, level, peak and distance under each reading, both targets, with the reported values as lines.

    Args:
        data: from :func:`readings`.
        apart: from :func:`distances` of it.
    """
    names, targets = list(dict.fromkeys(data["reading"])), list(data["target"].unique())
    fig, axes = _figure(1.35 + 0.27 * len(names), 1, 4, sharey=True, width_ratios=[1.2, 1, 1, 1])
    paper = reported_values().set_index("target")
    columns = ("ratio", "s_elsi3", "peak")
    titles = ("S(ELSI m=3)\n/ S(EAGLE-3)", "S(ELSI m=3),\nnats or bits", "peak, share\nof depth", "distance to\nthe reported")
    looks = list(zip(targets, ((BLUE, "o"), (ORANGE, "D")) * len(targets), strict=False))
    for ax, column, title in zip(axes[0], (*columns, None), titles, strict=True):
        ax.set_title(title, fontsize=9)
        if column:
            for (_, value), dash in zip(paper[column].items(), ("--", ":"), strict=True):
                ax.axvline(value, color="0.35", linestyle=dash, linewidth=1.1, zorder=1)
        for place, (target, (color, marker)) in enumerate(looks):
            of = data[data["target"] == target].set_index("reading")
            far = apart[apart["target"] == target].groupby("reading")["distance"].mean()
            for y, name in enumerate(names):
                at = y + 0.16 * (2 * place - 1)
                if not of.loc[name, "run"]:
                    continue
                value = of.loc[name, column] if column else far[name]
                right = _LIMITS[column][1]
                if value > right:
                    about = {"ha": "right", "va": "center", "color": color, "fontsize": 8}
                    ax.annotate(f"{value:.3g} →", (right, y + 0.23 * (2 * place - 1)), (-1, 0), textcoords="offset points", **about)
                    continue
                if column == "ratio" and np.isfinite(of.loc[name, "ratio_low"]):
                    ax.hlines(at, *of.loc[name, ["ratio_low", "ratio_high"]].astype(float), color=color, linewidth=1.4)
                ax.plot(value, at, linestyle="", marker=marker, markersize=4.5, color=color, zorder=3, clip_on=False)
        for y in np.arange(len(names) - 1) + 0.5:
            ax.axhline(y, color="0.93", linewidth=0.7, zorder=0)
        ax.set_xlim(*_LIMITS[column])
        ax.tick_params(axis="y", length=0)
    missing = [name for name in names if not data.loc[data["reading"] == name, "run"].any()]
    axes[0, 0].set_yticks(range(len(names)), [f"{name}\n({NOT_RUN})" if name in missing else name for name in names])
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    handles = [mpl.lines.Line2D([], [], color=c, marker=k, markersize=4.5, linestyle="", label=t) for t, (c, k) in looks]
    handles += [
        mpl.lines.Line2D([], [], color="0.35", linestyle=dash, linewidth=1.1, label=f"reported, {target}")
        for target, dash in zip(paper.index, ("--", ":"), strict=True)
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


# Finding


def finding(data: pd.DataFrame, every: pd.DataFrame) -> Finding:
    """Which reading comes closest, and what that can mean.

    Args:
        data: from :func:`readings`.
        every: from :func:`combinations`.
    """
    values: dict[str, float] = {}
    lines = [_effects(data, target) for target in data["target"].unique()]
    alone, joined = mean_distances(distances(data)), mean_distances(distances(every))
    if alone["distance"].isna().all():
        text = "EAGLE-3's layers collide on every target here, so there is no ratio to compare."
        return Finding(text, text, values)
    noise, near = between_reported(), joined.iloc[0]
    within = int((joined["distance"] <= near["distance"] + noise).sum())
    held = _robust(joined)
    parts = ", ".join(f"{part.split('_')[0]} {near[part]:.2f}" for part in PARTS).replace("last", "last layer")
    text = (
        f"Distance is |log ratio of ratios| + |log ratio of levels| + |difference of the peak's share of depth| + "
        f"{LAST_WEIGHT} where "
        f"one set holds the last layer and the other does not, averaged over the targets here and the reported ones. Changing "
        f"one choice at a time, the nearest is *{alone.index[0]}* ({alone['distance'].iloc[0]:.2f}), the farthest "
        f"*{alone.index[-1]}* ({alone['distance'].iloc[-1]:.2f}); the default has {alone.loc['default', 'distance']:.2f}. Of all "
        f"{len(joined)} combinations the nearest is *{joined.index[0]}* ({near['distance']:.2f}: {parts}). "
        f"The paper's two targets are {noise:.2f} from each other, under one reading; {within} combinations lie no farther than "
        f"that behind the nearest, so **the reported numbers do not tell which reading the paper used**"
        f"{_excluded(joined, near['distance'] + noise)}. {held} Other targets, other widths and depths, and another number "
        f"of averaged blocks stand between these values and the paper's; above all the level moves with the blocks averaged."
    )
    values |= {"open_readings_nearest": near["distance"], "open_readings_default": alone.loc["default", "distance"]}
    values |= {"open_readings_between_reported": noise, "open_readings_within": within, "open_readings_combinations": len(joined)}
    full = "\n".join(lines) + "\n\n" + text
    plain = full.replace("**", "").replace("*", "").replace("$", "").replace("\n\n", " ").replace("\n", " ")
    return Finding(full, "Ratio, level, peak and distance under each reading. " + plain, values)


def _effects(data: pd.DataFrame, target: str) -> str:
    """Which single changes give another set of three, and where the ratio goes."""
    of = data[(data["target"] == target) & data["run"]].set_index("reading")
    own = of.loc["default"]
    others = of.drop(index="default")
    moved = others[others["elsi3"] != own["elsi3"]]
    kept = others[others["elsi3"] == own["elsi3"]]
    cka = others[(others["elsic3"] != own["elsic3"]) & (others["elsi3"] == own["elsi3"])]
    line = f"- **{target}**: by default ELSI m=3 takes {braces(own['elsi3'])}"
    if np.isfinite(own["ratio"]):
        within = f" ({own['ratio_low']:.2f} to {own['ratio_high']:.2f} over prompts)" if np.isfinite(own["ratio_low"]) else ""
        line += f", {own['ratio']:.2f} times EAGLE-3's entropy{within}"
    if len(moved):
        said = [f"{name} {braces(row['elsi3'])}, ratio {row['ratio']:.2f}" for name, row in moved.iterrows()]
        line += ". Another set: " + "; ".join(said)
    if len(kept):
        line += ". The same set: " + ", ".join(kept.index)
    if len(cka):
        line += ". Another set of ELSI-C only: " + "; ".join(f"{name} {braces(row['elsic3'])}" for name, row in cka.iterrows())
    return line + "."


def _excluded(joined: pd.DataFrame, limit: float) -> str:
    """Choices that no combination within ``limit`` makes, or that all make."""
    near = joined[joined["distance"] <= limit].index
    words = {word for field, (_, word) in CHANGES.items() if any(word in name.split(", ") for name in joined.index)}
    never = [w for _, w in CHANGES.values() if w in words and not any(w in name.split(", ") for name in near)]
    always = [w for _, w in CHANGES.values() if w in words and all(w in name.split(", ") for name in near)]
    said = []
    if never:
        said.append(f"none of these has *{', '.join(never)}*")
    if always:
        said.append(f"all of them have *{', '.join(always)}*")
    return f", though {' and '.join(said)}" if said else ""


def _robust(joined: pd.DataFrame) -> str:
    """The nearest reading when one part of the distance is left out."""
    names = {"ratio_part": "the ratio", "level_part": "the level", "peak_part": "the peak", "last_part": "the last layer"}
    other = {part: (joined["distance"] - joined[part]).round(_DIGITS).idxmin() for part in PARTS}  # the first of equals
    changed = [f"without {names[part]} *{name}*" for part, name in other.items() if name != joined.index[0]]
    if not changed:
        return "It stays the nearest whichever part of the distance is left out."
    return f"The nearest depends on the parts: {'; '.join(changed)}."
