"""What the results say, in sentences made from the numbers, so that no page can contradict its own figure.

Each function takes the data of one figure or table and returns a :class:`Finding`: a paragraph, alternative text for the figure, and
the numbers that other pages quote. Thresholds that turn a number into a word are arguments with their value in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from elsi_lib.report.measures import BLOCKS, QUIET, THIRDS, TOKENS, layer_columns, third_of
from elsi_lib.report.words import braces


@dataclass(frozen=True)
class Finding:
    """What a result says.

    Attributes:
        text: Markdown paragraph.
        alt: alternative text of the figure.
        values: numbers for other pages, rounded to four decimals, so that any machine prints the same.
    """

    text: str
    alt: str
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "values", {name: round(float(value), 4) for name, value in self.values.items()})

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.values.items())


def prompts(data: pd.DataFrame) -> Finding:
    """Figure 1: where along depth the entropies of single prompts differ most."""
    sentences, values = [], {}
    for reading in (TOKENS, BLOCKS):
        of = data[(data["reading"] == reading) & (data["first_position"] == "kept")]
        if len(of) < 2:
            continue
        entropies = layer_columns(of)
        spread = entropies.std(0, ddof=1)
        n = len(spread)
        by_third = {third: spread[[third_of(j, n) == third for j in range(n)]].mean() for third in THIRDS if n >= 3}
        parts = ", ".join(f"{third} {value:.3f}" for third, value in by_third.items())
        ends = "" if n < 3 else f", at the first layer {spread[0]:.3f} and at the last {spread[-1]:.3f}"
        sentences.append(
            f"For {reading} ({len(of)} prompts) the standard deviation between prompts, averaged over the layers of each third of "
            f"depth, is {parts} nats{ends}; it is largest at layer {int(spread.argmax())} ({spread.max():.3f}) and smallest at layer "
            f"{int(spread.argmin())} ({spread.min():.3f})."
        )
        short = reading.split()[0]
        values |= {f"figure1_{short}_sd_{third}": value for third, value in by_third.items()}
        values |= {f"figure1_{short}_most_varied_layer": spread.argmax()}
    target = data["target"].iloc[0]
    text = f"**Measured on {target}.** " + " ".join(sentences)
    return Finding(text, f"Entropy of single prompts along the layers of {target}. " + " ".join(sentences), values)


def late_rise(profile: np.ndarray) -> tuple[float, int, int]:
    """How far a profile rises to its late peak: the size of the wave.

    Args:
        profile: (N,) entropies in nats, N >= 2.

    Returns:
        Nats from the lowest layer before the late peak to the peak, negative for a profile that only falls; the late peak, which is
        the highest layer after the midpoint (j >= N // 2); and that lowest layer.
    """
    middle = len(profile) // 2
    peak = middle + int(profile[middle:].argmax())
    low = int(profile[:peak].argmin())
    return float(profile[peak] - profile[low]), peak, low


def wave(data: pd.DataFrame, mostly: float = 0.5) -> Finding:
    """Figure 2: the shape along depth, and how much of it the first position makes.

    Args:
        mostly: rise to the late peak without the first position, as a share of the rise with it, below which most of the wave is
            said to go with the first position.
    """
    sentences, values = [], {}
    for number, (target, of) in enumerate(data.groupby("target", sort=False)):
        first_kept = of[of["first_position"] == "kept"]
        kept, dropped = first_kept["entropy"].to_numpy(), of[of["first_position"] == "dropped"]["entropy"].to_numpy()
        name = "figure2" if number == 0 else "figure2_beside"
        lines = [
            f"**{target}** ({len(kept)} layers): $S_1$ is highest at layer {int(kept.argmax())} ({kept.max():.3f} nats) and lowest at "
            f"layer {int(kept.argmin())} ({kept.min():.3f})."
        ]
        rise, peak, low = late_rise(kept)
        rise_dropped, peak_dropped, _ = late_rise(dropped)
        values |= {f"{name}_peak_layer": kept.argmax(), f"{name}_peak": kept.max(), f"{name}_low_layer": kept.argmin()}
        values |= {f"{name}_low": kept.min(), f"{name}_late_peak_layer": peak, f"{name}_rise": rise}
        values |= {f"{name}_rise_without_first": rise_dropped}
        if rise > 0:
            share = max(rise_dropped, 0.0) / rise
            quiet = of[of["first_position"] == QUIET]
            line = (
                f"It rises by {rise:.3f} nats from layer {low} to its late peak at layer {peak}. Without the first position of each "
                f"prompt the rise, to layer {peak_dropped}, is {rise_dropped:.3f} nats, {100 * share:.0f} % of that"
            )
            values |= {f"{name}_rise_share_without_first": share}
            what = "it"
            if len(quiet):
                left, _, _ = late_rise(quiet["entropy"].to_numpy())
                share, what = max(left, 0.0) / rise, "them"
                line += (
                    f"; over the {int(quiet['rows'].iloc[0])} of {int(first_kept['rows'].iloc[0])} rows that no state of outlying "
                    f"norm entered, at any position, it is {left:.3f} nats, {100 * share:.0f} %"
                )
                values |= {f"{name}_rise_quiet": left, f"{name}_rise_share_quiet": share}
                values |= {f"{name}_quiet_rows": quiet["rows"].iloc[0], f"{name}_rows": first_kept["rows"].iloc[0]}
            verdict = f"most of the wave goes with {what}" if share <= mostly else f"most of the wave stays without {what}"
            lines.append(f"{line}: {verdict}.")
        else:
            lines.append("It does not rise to a late peak.")
        norm = first_kept["norm_ratio"].to_numpy()
        if np.isfinite(norm).all():
            lines.append(
                f"The first position's state is up to {norm.max():,.0f} times as long as the median of the others "
                f"(layer {int(norm.argmax())})."
            )
        bias = (first_kept["replicate_mean"] - first_kept["entropy"]).to_numpy()
        if np.isfinite(bias).all():
            lines.append(
                f"The mean of {int(first_kept['replicates'].iloc[0])} bootstrap replicates differs from the estimate by at most "
                f"{bias[abs(bias).argmax()]:+.3f} nats (layer {int(abs(bias).argmax())}), an estimate of the bias from few prompts."
            )
        else:
            lines.append("This fingerprint carries no bootstrap, so no band is drawn.")
        sentences.append(" ".join(lines))
    text = "\n\n".join(sentences)
    return Finding(text, "Matrix entropy along depth. " + text.replace("**", "").replace("$", "").replace("\n\n", " "), values)


def pairs(data: pd.DataFrame, num_layers: int) -> Finding:
    """Figure 3: the best pair, and whether pairing adds entropy at all."""
    best = data.loc[data["place"].idxmin()]
    seed = data[data["seed_place"] == 0].iloc[0]
    single = seed["entropy"] - seed["gain"]
    pair = sorted((int(best["seed"]), int(best["layer"])))
    distinct = len({(min(a, b), max(a, b)) for a, b in zip(data["seed"], data["layer"], strict=True)})
    everything = num_layers * (num_layers - 1) // 2
    rank = "the best of all" if best["place"] == 1 else f"number {int(best['place']):,} of all"
    better = 100 * (data["gain"] > 0).mean()
    text = (
        f"The best pair with a seed is {{{pair[0]}, {pair[1]}}} with {best['entropy']:.4f} nats, {rank} {everything:,} pairs of "
        f"layers (the figure shows {distinct:,} of them). The best single layer, {int(seed['seed'])}, has {single:.4f} nats, so the "
        f"second layer changes the entropy by {best['entropy'] - single:+.4f} nats. Of the pairs shown, {better:.0f} % have a higher "
        f"entropy than their seed alone."
    )
    values = {
        "figure3_best_first": pair[0],
        "figure3_best_second": pair[1],
        "figure3_best": best["entropy"],
        "figure3_best_rank": best["place"],
        "figure3_gain": best["entropy"] - single,
    }
    return Finding(text, "Heat map of the entropy of layer pairs. " + text, values)


def variance(data: pd.DataFrame) -> Finding:
    """Figure 4: change of the variance between prompts by thirds, and whether random positions do the same."""
    sentences, values = [], {}
    for (target, reading, first), of in data.groupby(["target", "reading", "first_position"], sort=False):
        about = f"{target}, {reading}, first position {first}, {int(of['prompts'].iloc[0])} prompts"
        lines = [f"filter {_changes(of, 'kept', 'change')}"]
        if (of["positions"] == "random").any():
            lines.append(f"as many random positions {_changes(of, 'random', 'change')}")
            lines.append(f"filter against random {_changes(of, 'kept', 'change against random')}")
        sentences.append(f"- {about}: " + "; ".join(lines) + ".")
        if first == "kept":
            for row in of[(of["quantity"] == "change") & (of["positions"] == "kept")].itertuples():
                name = "figure4" if target == data["target"].iloc[0] else "figure4_beside"
                values[f"{name}_{reading.split()[0]}_{row.depth}"] = row.value
    head = (
        "Change of the variance between prompts (percent, early / middle / late third of depth, 95 % interval; "
        "*falls* or *rises* where the interval leaves out zero):"
    )
    plain = " ".join(sentences).replace("- ", "").replace("*", "")
    return Finding(head + "\n\n" + "\n".join(sentences), f"{head.replace('*', '')} {plain}", values)


def _changes(of: pd.DataFrame, positions: str, quantity: str) -> str:
    words = []
    for row in of[(of["quantity"] == quantity) & (of["positions"] == positions)].itertuples():
        word = " *falls*" if row.high < 0 else " *rises*" if row.low > 0 else ""
        words.append(f"{row.value:+,.0f} ({row.low:+,.0f} to {row.high:+,.0f}){word}")
    return " / ".join(words)


def cka(maps: Sequence[dict], name: str) -> Finding:
    """Figures 5 and 6: the compartments, how high CKA is, and what it would be by chance."""
    lines, values = [], {}
    for entry in maps:
        M = entry["matrix"]
        apart = M[~np.eye(len(M), dtype=bool)]
        runs = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in entry["compartments"])
        estimator = "debiased" if entry["debiased"] else "plain"
        filtered = "filter on" if entry["filtered"] else "filter off"
        lines.append(
            f"- {entry['target']}, {filtered}, {estimator}: {len(entry['compartments'])} compartments, {runs}; mean CKA between "
            f"layers {apart.mean():.3f}, {entry['null']:.3f} after shuffling rows."
        )
        which = "" if entry["target"] == maps[0]["target"] else "_beside"
        key = f"{name}{which}_{'on' if entry['filtered'] else 'off'}_{estimator}"
        values |= {f"{key}_compartments": len(entry["compartments"]), f"{key}_mean": apart.mean(), f"{key}_null": entry["null"]}
    head = "Compartments found, and the mean CKA beside what the same estimator gives when rows do not correspond:"
    if name == "figure6":
        same = [_same_boundaries(maps, target) for target in dict.fromkeys(entry["target"] for entry in maps)]
        lines += [f"- {line}" for line in same if line]
    return Finding(head + "\n\n" + "\n".join(lines), head + " " + " ".join(lines).replace("- ", ""), values)


def _same_boundaries(maps: Sequence[dict], target: str) -> str:
    on, off = (
        next((set(e["boundaries"]) for e in maps if e["target"] == target and e["filtered"] is use), None) for use in (True, False)
    )
    if on is None or off is None:
        return ""
    if on == off:
        return f"{target}: the same boundaries with and without the filter."
    common = len(on & off)
    listed = [f"{common} {'boundary' if common == 1 else 'boundaries'} in common"]
    for what, only in (("only with the filter", on - off), ("only without", off - on)):
        if only:
            listed.append(f"{what} after layer {', '.join(map(str, sorted(only)))}")
    return f"{target}: {'; '.join(listed)}."


def selections(data: pd.DataFrame) -> Finding:
    """Table 1: what ELSI chooses, its regret and stability, and how the fixed rules stand."""
    sentences, values = [], {}
    for number, (target, of) in enumerate(data[data["origin"] == "measured"].groupby("target", sort=False)):
        rows = of.set_index("method")
        name = "table1" if number == 0 else "table1_beside"
        if "ELSI m=3" not in rows.index:
            continue
        chosen = rows.loc["ELSI m=3"]
        found = "the true optimum" if chosen["regret"] < 1e-9 else f"{chosen['regret']:.4f} nats below the true optimum"
        line = f"**{target}**: ELSI m=3 chooses {braces(chosen['layers'])} with {chosen['entropy']:.4f} nats, {found}"
        if np.isfinite(chosen["stability"]):
            share = f"{100 * chosen['stability']:.0f} % of {int(chosen['replicates'])} replicates"
            line += f"; {share} choose the same set (Jaccard {chosen['jaccard']:.2f})"
            values[f"{name}_elsi3_stability"] = chosen["stability"]
        line += f". exp(S_1) is {np.exp(chosen['entropy']):.2f}: so many equal directions would have this entropy."
        if np.isfinite(chosen["rank_first_dropped"]):
            line += (
                f" Without the first position of each prompt the set ranks {int(chosen['rank_first_dropped']):,} of "
                f"{int(chosen['sets']):,}; the best is then {braces(chosen['optimum_first_dropped'])}."
            )
        for rule in ("EAGLE3 as printed", "EAGLE3 as its code runs"):
            if rule in rows.index:
                row = rows.loc[rule]
                place = f"number {int(row['rank']):,} of {int(row['sets']):,}"
                line += f" {rule}, {braces(row['layers'])}: {row['entropy']:.4f} nats, {place}."
        if np.isfinite(chosen["redundancy"]):
            line += f" The layers of ELSI's set have a mean CKA of {chosen['redundancy']:.3f}."
        sentences.append(line)
        values |= {f"{name}_elsi3": chosen["entropy"], f"{name}_elsi3_regret": chosen["regret"]}
        values |= {f"{name}_elsi3_layer{i}": int(layer) for i, layer in enumerate(chosen["layers"].split())}
    text = "\n\n".join(sentences) or "The target has fewer than three layers, so there is no set of three."
    return Finding(text, text.replace("**", ""), values)


def beam(data: pd.DataFrame) -> Finding:
    """Figure 7: the beam's best set at each size, beside the exhaustive optimum."""
    parts, values = [], {}
    for size, of in data.groupby("size"):
        best = of[(of["source"] == "beam") & (of["place"] == 1)].iloc[0]
        layers = "{" + ", ".join(map(str, best["layers"])) + "}"
        end = "the true optimum" if best["regret"] < 1e-9 else f"regret {best['regret']:.4f}"
        parts.append(f"size {size}: {layers}, {best['entropy']:.4f} nats, {end}")
        values |= {f"figure7_size{size}": best["entropy"], f"figure7_size{size}_regret": best["regret"]}
    spread = data[(data["source"] == "beam") & (data["size"] == data["size"].max())]["entropy"]
    text = "; ".join(parts) + f". The {len(spread)} sets of the last beam lie within {np.ptp(spread):.4f} nats of each other."
    return Finding(text[0].upper() + text[1:], "Beam of ELSI: " + text, values)
