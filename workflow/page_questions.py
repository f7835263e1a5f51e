"""What the paper leaves open and a notebook here answers: one paragraph a question, its numbers from the passports of the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from page_parts import Origin, notebook_link, read_csv, read_passport, second

from elsi_lib.report.words import p_value

Values = Mapping[str, float]


@dataclass(frozen=True)
class Question:
    """A question, why it is one, the artefact whose passport has the numbers of ``words``, and the notebook."""

    title: str
    why: str
    artefact: str
    notebook: str
    words: Callable[[Values], str]


def _sink(v: Values) -> str:
    keys = ("open_sink_share_rows_without", "open_sink_beside_share_rows_without")
    both = " and ".join(f"{100 * v[key]:.0f} %" for key in keys if key in v)
    return f"Over the rows that no such state entered {both} of the late rise is left, of the default target and of the second."


def _readings(v: Values) -> str:
    return (
        f"{v['open_readings_combinations']:.0f} combinations of the choices are set beside the reported values; "
        f"{v['open_readings_within']:.0f} of them are no farther behind the nearest than the paper's two targets are from each other, "
        "so the reported values do not tell which was used."
    )


def _stability(v: Values) -> str:
    found: dict[str, dict[int, float]] = {}
    for key, value in v.items():
        if match := re.fullmatch(r"(.+)_kept_same_(\d+)", key):
            found.setdefault(match[1], {})[int(match[2])] = value
    if not found:
        raise KeyError("kept_same")
    parts = [
        f"{target}: {', '.join(f'{100 * share:.0f} % of samples of {size}' for size, share in sorted(of.items()))}"
        for target, of in found.items()
    ]
    return f"Samples of conversations that choose the set of all of them: {'; '.join(parts)}."


def _transfer(v: Values) -> str:
    found = {key.removesuffix("_kept_worst_regret"): value for key, value in v.items() if key.endswith("_kept_worst_regret")}
    if not found:
        raise KeyError("kept_worst_regret")
    parts = [f"{target} {regret:.3f}" for target, regret in found.items()]
    return f"The largest regret of the set chosen on conversations, judged on another kind of text, in nats: {', '.join(parts)}."


def _criteria(v: Values) -> str:
    return (
        "Over the sets of the default target the median rank correlation between two criteria is "
        f"{v['open_criteria_median_spearman']:+.2f}; their best sets of three are {v['open_criteria_best_sets']:.0f} different ones."
    )


def _submodularity(v: Values) -> str:
    return (
        f"$S_1$ breaks submodularity in {100 * v['open_submodularity_not_submodular']:.2g} % of the cases tried on the default "
        f"target; greedy search stays up to {v['open_submodularity_greedy_plain']:.4f} nats below the optimum there."
    )


QUESTIONS = (
    Question(
        "Is the wave a sink?",
        "A few positions carry states far longer than all others, and a norm that large can hold most of a Gram matrix's trace.",
        "open_sink", "08_sink", _sink,
    ),
    Question(
        "Which reading?",
        "Where the paper is silent, [a choice had to be made](#ambiguities): centring, norms of layers, order, averaging of blocks.",
        "open_readings", "09_readings", _readings,
    ),
    Question(
        "Is the choice stable?",
        "The paper calibrates once, on 200 conversations, with one share, one block size and one beam.",
        "open_stability", "10_stability", _stability,
    ),
    Question(
        "Does it transfer?",
        "Layers are chosen on conversations; the draft then serves code, mathematics and translation.",
        "open_transfer", "11_transfer", _transfer,
    ),
    Question(
        "Which criterion?",
        "Matrix entropy is one way to say that layers hold much and repeat little; others come from the same Gram matrices.",
        "open_criteria", "12_criteria", _criteria,
    ),
    Question(
        "Greedy or exhaustive?",
        "A search by a beam has a guarantee only if what a layer adds shrinks as the set grows.",
        "open_submodularity", "13_submodularity", _submodularity,
    ),
)  # fmt: skip


def questions(origin: Origin) -> str:
    """A paragraph per question, and whether entropy or a rival foretells tau."""
    return "\n\n".join([*(_paragraph(question, origin) for question in QUESTIONS), _foretelling(origin)])


def _paragraph(question: Question, origin: Origin) -> str:
    passport = read_passport(question.artefact, origin)
    try:
        words = question.words(passport["results"]) if passport else "*Not run here.*"
    except KeyError:
        words = ""  # the result says it otherwise; its notebook has it
    return f"**{notebook_link(question.title, question.notebook)}** {question.why} {words}".rstrip()


def _foretelling(origin: Origin) -> str:
    """For each target the highest rank correlation of any criterion with measured tau, and whether it is shown."""
    title = notebook_link("Does another criterion foretell tau?", "12_criteria")
    lines = []
    for name in ("open_criteria_tau", second("open_criteria_tau")):
        data, passport = read_csv(f"{name}.csv", origin), read_passport(name, origin)
        if data is None or passport is None:
            continue
        of = data[(data["sets"] != "three layers") & (data["nodes"] == data["nodes"].max())]
        of = of[of["temperature"] == of["temperature"].min()]
        best = of.loc[of["rho"].idxmax()]
        shown = int((of["p_holm"] < 0.05).sum())
        text = (
            f"On {passport['inputs'][0]['target']}, over {int(best['n'])} trained sets, {shown or 'none'} of {len(of)} criteria "
            f"{'are' if shown > 1 else 'is'} shown to foretell tau, after Holm's correction"
        )
        own = of[of["criterion"] == "entropy"]
        if len(own):
            text += f": matrix entropy has a rank correlation of {own['rho'].iloc[0]:+.2f}, the highest is {best['rho']:+.2f}"
            text += f" ({p_value(best['p'])} before the correction)"
        lines.append(f"{text}.")
    return f"**{title}** {' '.join(lines) or '*Not run here.*'}"
