"""Does the choice transfer? Layers chosen on one kind of text, judged on another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from elsi_lib.corpora import AGAIN, CONVERSATIONS
from elsi_lib.jackknife import LeaveOneOut, interval
from elsi_lib.report.figures import GREY, LAYER, _figure, _layer_axis, _styled
from elsi_lib.report.findings import Finding, late_rise
from elsi_lib.report.measures import timed
from elsi_lib.report.words import braces, markdown_table, plain, spaced
from elsi_lib.selection import TIE, all_set_entropies, elsi, jaccard
from elsi_lib.survey import Survey

FIRST = {True: "kept", False: "dropped"}
NO_BREAK = "\u00a0"


@timed
def profiles(surveys: Sequence[Survey | None]) -> pd.DataFrame:
    """S_1 along depth on every corpus.

    Args:
        surveys: one or more targets; None is passed over.

    Returns:
        Columns target, corpus, first_position, layer, entropy (nats), low, high (95 %, by leaving out each prompt of the corpus, see
        :func:`~elsi_lib.jackknife.interval`; NaN where that was not done), prompts, tokens, rise (nats to the late peak, see
        :func:`~elsi_lib.report.findings.late_rise`; the same on all layers of a profile), rise_low, rise_high.
    """
    parts = []
    for survey in filter(None, surveys):
        for corpus, fp in survey.corpora.items():
            prompts = fp.passport["prompts"]
            without = survey.left_out.get(corpus)
            for side, (sink, first) in enumerate(FIRST.items()):
                entropy = fp.variant(sink=sink).entropy().numpy()
                rise, again = late_rise(entropy)[0], without.profile[side].numpy() if without else np.full((2, fp.num_layers), np.nan)
                low, high = interval(entropy, again)
                rise_low, rise_high = interval(rise, np.array([late_rise(one)[0] for one in again]))
                about = {"target": fp.target, "corpus": corpus, "first_position": first, "layer": range(fp.num_layers)}
                about |= {"entropy": entropy, "low": low, "high": high, "prompts": prompts["used"], "tokens": prompts["tokens"]}
                about |= {"rise": rise, "rise_low": rise_low, "rise_high": rise_high}
                parts.append(pd.DataFrame(about))
    return pd.concat(parts, ignore_index=True)


@timed
def transfers(surveys: Sequence[Survey | None], m: int = 3) -> pd.DataFrame:
    """The set that ELSI chooses on each corpus, judged on every corpus.

    Returns:
        Columns target, first_position, chosen_on, judged_on, layers (as ``2 15 27``), entropy (nats, where judged), regret (nats below
        the best set there), regret_low, regret_high (95 % of the difference between those two sets, leaving out each prompt that they
        are judged on; below 0 where their order is not decided, NaN where that was not done), rank, sets, jaccard (with the set chosen
        where it is judged), same (share of the prompts without which ELSI takes this very set there), prompts (of the chosen_on).
    """
    rows = []
    for survey in filter(None, surveys):
        for side, (sink, first) in enumerate(FIRST.items()):
            views = {corpus: fp.variant(sink=sink) for corpus, fp in survey.corpora.items()}
            chosen = {corpus: elsi(view, m).layers for corpus, view in views.items()}
            for judged, view in views.items():
                sets, entropies = all_set_entropies(view, m)
                place = {tuple(layers): i for i, layers in enumerate(sets.tolist())}
                best = tuple(sets[int(entropies.argmax())].tolist())
                for corpus, layers in chosen.items():
                    own = float(entropies[place[layers]])
                    regret = max(float(entropies.max()) - own, 0.0)
                    low, high, same = _by_chance(survey.left_out.get(judged), side, layers, best, regret)
                    rows.append((
                        survey.target, first, corpus, judged, spaced(layers), own, regret, low, high,
                        int((entropies > own + TIE).sum()) + 1, len(sets), jaccard(layers, chosen[judged]), same,
                        views[corpus].passport["prompts"]["used"],
                    ))  # fmt: skip
    about = ["target", "first_position", "chosen_on", "judged_on", "layers", "entropy", "regret", "regret_low", "regret_high"]
    return pd.DataFrame(rows, columns=[*about, "rank", "sets", "jaccard", "same", "prompts"])


def _by_chance(
    without: LeaveOneOut | None, side: int, layers: tuple[int, ...], best: tuple[int, ...], regret: float
) -> tuple[float, float, float]:
    """Ends of a set's regret, and the share of prompts without which it is chosen; NaN where it was not judged."""
    places = {tuple(one): place for place, one in enumerate(without.sets[side].tolist())} if without else {}
    if not {layers, best} <= places.keys():
        return np.nan, np.nan, np.nan
    own, top = (without.entropy[side, :, places[one]].numpy() for one in (layers, best))
    low, high = interval(regret, top - own)
    return float(low), float(high), float((without.chosen[side] == torch.tensor(layers)).all(-1).float().mean())


@_styled
def figure(data: pd.DataFrame) -> Figure:
    """The wave on every corpus, first position kept (above) and dropped (below).

    Args:
        data: from :func:`profiles`.
    """
    targets, corpora = list(data["target"].unique()), list(data["corpus"].unique())
    fig, axes = _figure(5.2, 2, len(targets), sharex="col")
    colors = dict(zip(corpora, sns.color_palette("colorblind", len(corpora)), strict=True))
    for column, target in enumerate(targets):
        for ax, first in zip(axes[:, column], FIRST.values(), strict=True):
            of = data[(data["target"] == target) & (data["first_position"] == first)]
            for corpus in corpora:
                line = of[of["corpus"] == corpus]
                reference = corpus in (CONVERSATIONS, AGAIN)
                style = {"color": "black" if reference else colors[corpus], "linewidth": 2.2 if corpus == CONVERSATIONS else 1.3}
                style["linestyle"] = ":" if corpus == AGAIN else "-"
                ax.plot(line["layer"], line["entropy"], label=corpus, zorder=3 if reference else 2, **style)
                if corpus != AGAIN:
                    ax.fill_between(line["layer"], line["low"], line["high"], color=style["color"], alpha=0.13, linewidth=0, zorder=1)
            ax.set_title(target if first == "kept" else "")
            ax.annotate(f"first position {first}", (0.5, 0.97), xycoords="axes fraction", ha="center", va="top", color=GREY)
            ax.set_ylim(bottom=0)
            _layer_axis(ax, int(of["layer"].max()) + 1, label=first == "dropped")
    for ax in axes[:, 0]:
        ax.set_ylabel("$S_1$ (nats)")
    axes[1, 0].set_xlabel(LAYER)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


@_styled
def transfer_figure(data: pd.DataFrame) -> Figure:
    """Regret of the set chosen on a row's corpus, on a column's corpus, first position kept.

    Args:
        data: from :func:`transfers`.
    """
    targets, corpora = list(data["target"].unique()), list(data["chosen_on"].unique())
    fig, axes = _figure(0.9 + 2.9 * len(targets), len(targets), 1, sharex=True)
    kept = data[data["first_position"] == "kept"]
    top = max(float(kept["regret"].max()), 1e-9)
    for ax, target in zip(axes[:, 0], targets, strict=True):
        of = kept[kept["target"] == target]
        table = of.pivot(index="chosen_on", columns="judged_on", values="regret").reindex(index=corpora, columns=corpora)
        sns.heatmap(
            table, ax=ax, cmap="mako_r", vmin=0, vmax=top, cbar=False, annot=table.map(lambda v: f"{1000 * v:.0f}"), fmt="",
            annot_kws={"fontsize": 7.5}, linewidths=0.5,
        )  # fmt: skip
        prompts = of.drop_duplicates("chosen_on").set_index("chosen_on")["prompts"].reindex(corpora)
        ax.set_yticklabels([f"{corpus} ({int(count)})" for corpus, count in prompts.items()], rotation=0)
        ax.set_title(target)
        ax.set_xlabel("")
        ax.set_ylabel("chosen on (prompts)")
        ax.tick_params(length=0)
    axes[-1, 0].set_xlabel("judged on; regret in thousandths of a nat")
    axes[-1, 0].set_xticklabels(axes[-1, 0].get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    return fig


def table(data: pd.DataFrame) -> str:
    """The sets as Markdown: chosen on each corpus, the share of its prompts without which they stay, and rank on conversations."""
    heads = ("target", "first position", "chosen on (prompts)", "layers", "same without one", "rank there", "regret there (10⁻³ nats)")
    own = data[data["chosen_on"] == data["judged_on"]].set_index(["target", "first_position", "chosen_on"])["same"]
    lines = []
    for row in data[data["judged_on"] == CONVERSATIONS].itertuples():
        same = own[row.target, row.first_position, row.chosen_on]
        ends = [1000 * row.regret_low, 1000 * row.regret_high]
        regret = f"{1000 * row.regret:.1f}{_ends(*ends, int(max(map(abs, ends)) < 100))}".replace(" ", NO_BREAK)
        about = row.target, row.first_position, f"{row.chosen_on} ({row.prompts})", braces(row.layers)
        lines.append([*about, "" if np.isnan(same) else f"{100 * same:.0f} %", f"{row.rank:,} of {row.sets:,}", regret])
    return markdown_table(heads, lines, right=(4, 5, 6))


def _ends(low: float, high: float, digits: int = 3) -> str:
    return "" if np.isnan(low) or low == high else f" ({low:.{digits}f} to {high:.{digits}f})"


def finding(data: pd.DataFrame) -> Finding:
    """What the numbers of :func:`transfers` say."""
    sentences, values = [], {}
    for (target, first), of in data.groupby(["target", "first_position"], sort=False):
        here = of[of["judged_on"] == CONVERSATIONS].set_index("chosen_on")
        others = here.drop(index=[CONVERSATIONS, AGAIN], errors="ignore")
        back = of[(of["chosen_on"] == CONVERSATIONS) & ~of["judged_on"].isin([CONVERSATIONS, AGAIN])]
        worst = back.loc[back["regret"].idxmax()]
        same = int((others["jaccard"] == 1).sum())
        own = braces(here.loc[CONVERSATIONS, "layers"])
        stable = here.loc[CONVERSATIONS, "same"]
        values |= {f"{target}_{first}_same": same, f"{target}_{first}_worst_regret": worst["regret"]}
        text = f"**{target}**, first position {first}: {same} of {len(others)} other kinds of text lead to the set of conversations, "
        text += own
        if not np.isnan(stable):
            often = "whichever conversation is" if stable == 1 else f"in {100 * stable:.0f} % of cases when a conversation is"
            text += f", which stays {often} left out"
        text += (
            f". That set loses most on {worst['judged_on']}: {worst['regret']:.3f} nats"
            f"{_ends(worst['regret_low'], worst['regret_high'])}, place {int(worst['rank']):,} of {int(worst['sets']):,}."
        )
        again = of[(of["chosen_on"] == CONVERSATIONS) & (of["judged_on"] == AGAIN)]
        low, high = again[["regret_low", "regret_high"]].iloc[0] if len(again) else (np.nan, np.nan)
        if not np.isnan(high):
            beyond = list(back.loc[back["regret_low"] > max(high, 0), "judged_on"])
            values[f"{target}_{first}_decided"] = len(beyond)
            text += (
                f" On a second sample of conversations it loses {again['regret'].iloc[0]:.3f}{_ends(low, high)}; more than that, with "
                f"intervals apart, on {len(beyond)} of {len(back)} other kinds of text"
                + (f" ({', '.join(beyond)})." if beyond else ".")
            )
        sentences.append(text)
    text = "\n\n".join(sentences)
    alt = "Heat maps of regret, one per target: the set chosen on the row's kind of text, judged on the column's. " + plain(text)
    return Finding(text, alt, values)


def profile_finding(data: pd.DataFrame) -> Finding:
    """What the numbers of :func:`profiles` say: where the wave has its late peak on each corpus, and how high it rises to it."""
    sentences, values = [], {}
    for (target, first), of in data.groupby(["target", "first_position"], sort=False):
        rises, said = {}, {}
        for corpus, line in of.groupby("corpus", sort=False):
            rises[corpus], peak, _ = late_rise(line["entropy"].to_numpy())
            values[f"{target}_{first}_{corpus}_rise".replace(" ", "_")] = rises[corpus]
            said[corpus] = f"{corpus} {rises[corpus]:.3f}{_ends(*line[['rise_low', 'rise_high']].iloc[0], 2)} at layer {peak}"
        own = ", ".join(said[name] for name in (CONVERSATIONS, AGAIN) if name in said)
        others = sorted(set(rises) - {CONVERSATIONS, AGAIN}, key=rises.get)
        text = f"**{target}**, first position {first}: entropy rises to its late peak by, in nats, {own}"
        if len(others) > 1:
            text += f"; of {len(others)} other kinds of text least on {said[others[0]]}, most on {said[others[-1]]}"
        elif others:
            text += f", {said[others[0]]}"
        sentences.append(f"{text}.")
    text = "\n\n".join(sentences)
    alt = "Line charts of matrix entropy along depth, a line for each kind of text, one column per target. "
    return Finding(text, alt + plain(text), values)
