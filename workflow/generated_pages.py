"""Pages and parts of pages that are written from results and code when the book is gathered, so that no number is typed by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from page_agreements import agreements, tau_answer
from page_costs import costs, fingerprints
from page_parts import NOT_HERE, Origin, hardware, notebook_link, of_default, place, read_csv, read_passport, second
from page_questions import questions
from page_serving import configs, launch, servable

from elsi_lib.errors import ElsiError
from elsi_lib.layers import CONVENTIONS, engine_ids
from elsi_lib.report.artefacts import status
from elsi_lib.report.study import LOOKUP
from elsi_lib.report.tables import reported, reported_variance_changes
from elsi_lib.report.words import braces, markdown_table
from elsi_lib.selection import layer_rule
from elsi_lib.settings import Settings

NOTEBOOK_OF = {
    "figure1": "01_wave",
    "figure2": "01_wave",
    "figure3": "02_pairs",
    "figure4": "03_filter",
    "figure5": "04_compartments",
    "figure6": "04_compartments",
    "figure7": "05_selection",
    "table1": "05_selection",
    "table2": "06_table2",
    "table2_differences": "06_table2",
    "table2_categories": "06_table2",
    "table2_speed": "06_table2",
    "tau_differences": "06_table2",
    "tau_entropy": "06_table2",
    "tau_training": "06_table2",
    "tau_categories": "06_table2",
    "table3": "07_table3",
    "table3_differences": "07_table3",
    "table3_categories": "07_table3",
    "table3_speed": "07_table3",
    **{second(f"tau_{part}"): "07_table3" for part in ("differences", "entropy", "training", "categories")},
    "open_sink": "08_sink",
    "open_sink_choices": "08_sink",
    "open_sink_spectrum": "08_sink",
    "open_readings": "09_readings",
    "open_readings_sets": "09_readings",
    "open_readings_distances": "09_readings",
    "open_stability": "10_stability",
    "open_parameters": "10_stability",
    "open_profiles": "11_transfer",
    "open_transfer": "11_transfer",
    "open_transfer_sets": "11_transfer",
    "open_criteria": "12_criteria",
    "open_criteria_sets": "12_criteria",
    "open_criteria_agreement": "12_criteria",
    "open_criteria_tau": "12_criteria",
    second("open_criteria_tau"): "12_criteria",
    "open_submodularity": "13_submodularity",
    "open_submodularity_searches": "13_submodularity",
    "open_submodularity_guarantees": "13_submodularity",
}
COMMANDS = ("targets", "fetch", "calibrate", "merge", "select", "show", "train", "evaluate", "study", "export")

SHOWN_WITH_METHOD = ("figure1", "figure2", "figure3", "figure4", "figure5", "figure7")


def generated_pages(origin: Origin) -> dict[str, str]:
    """File name below book/generated -> text. Each is whole even where a result is missing, and then says so."""
    pages: dict[str, Callable[[Origin], str]] = {
        "answer.md": answer,
        "tau_answer.md": tau_answer,
        "picture.md": lambda given: figure("figure2", given),
        "agreements.md": agreements,
        "cost.md": costs,
        "questions.md": questions,
        "serve_config.md": configs,
        "serve_engines.md": servable,
        "serve_launch.md": lambda _: launch(),
        "table1.md": table1,
        "compared.md": compared,
        "variance.md": variance,
        "reported.md": lambda _: reported_values(),
        "artefacts.md": artefacts,
        "runs.md": runs,
        "layer_ids.md": lambda _: conventions(),
        "rule_ids.md": lambda _: rule_ids(),
        "cli.md": lambda _: command_line(),
    }
    for name in SHOWN_WITH_METHOD:
        pages[f"{name}.md"] = lambda given, name=name: figure(name, given, label=name)
    return {name: write(origin).rstrip("\n") + "\n" for name, write in pages.items()}


# Results


def answer(origin: Origin) -> str:
    """What tables 1 to 3 of the default runs say, in a few lines."""
    table = read_csv("table1.csv", origin)
    if table is None:
        return NOT_HERE
    lines = []
    for target, of in table[table["origin"] == "measured"].groupby("target", sort=False):
        row = {record["method"]: record for record in of.to_dict("records")}
        best, printed, chosen = row["exhaustive m=3"], row.get("EAGLE3 as printed"), row["ELSI m=3"]
        text = f"- **{target}**: ELSI takes {braces(chosen['layers'])}, matrix entropy {chosen['entropy']:.3f} nats, "
        if chosen["rank"] == 1:
            text += f"the best of all {int(chosen['sets']):,} sets of three."
        else:
            text += f"place {int(chosen['rank']):,} of {int(chosen['sets']):,} sets of three; the best is {braces(best['layers'])} "
            text += f"with {best['entropy']:.3f}."
        if printed is not None:
            text += f" EAGLE-3's rule, {braces(printed['layers'])}, has {printed['entropy']:.3f} and place {int(printed['rank']):,}."
        text += f" Without the first position of each prompt ELSI's set has place {int(chosen['rank_first_dropped']):,}, and "
        text += f"{braces(chosen['optimum_first_dropped'])} is best."
        if pd.notna(chosen["stability"]):
            share = f"{100 * chosen['stability']:.0f} %"
            text += f" Over {int(chosen['replicates'])} redraws of the prompts ELSI takes the same set in {share}."
        lines.append(text)
    return "\n".join([*lines, *_sink(origin), *_tau(origin)])


def _tau(origin: Origin) -> list[str]:
    """tau of the main rows of tables 2 and 3 at the largest tree and the lowest temperature."""
    lines = []
    for name in ("table2", "table3"):
        path = origin.get(place(f"{name}.csv"))
        if path is None:
            continue
        table = pd.read_csv(path, dtype={"layers": str})
        table = table[table["origin"] == "measured"]
        of = table[table["temperature"] == table["temperature"].min()]
        of = of[of["nodes"] == of["nodes"].max()].set_index("method")
        drafts = of[of["layers"].notna()]
        order = [drafts["tau"].idxmax(), "EAGLE-3", "ELSI m=3", "lowest"]
        parts = [f"{row} {braces(of.loc[row, 'layers'])} {_tau_of(of.loc[row])}" for row in dict.fromkeys(order)]
        floor = f" Prompt lookup, which trains nothing, has {_tau_of(of.loc[LOOKUP])}." if LOOKUP in of.index else ""
        lines.append(
            f"- **{of['target'].iloc[0]}**, tau on {int(of['questions'].max())} questions of Spec-Bench, trees of "
            f"{int(of['nodes'].iloc[0])} nodes, T = {of['temperature'].iloc[0]:g}, with 95 % intervals, the highest of "
            f"{drafts['layers'].nunique()} layer sets trained alike first: {'; '.join(parts)}.{floor}"
        )
    return lines


def _tau_of(row: pd.Series) -> str:
    return f"{row['tau']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _sink(origin: Origin) -> list[str]:
    """How much of each target's wave is left without the first position of a prompt, from figure 2."""
    passport = read_passport("figure2", origin)
    names = {"figure2": 0, "figure2_beside": 1}
    lines = []
    for name, i in names.items():
        about = passport["results"] if passport else {}
        if f"{name}_rise_share_without_first" in about:
            text = (
                f"- **{passport['inputs'][i]['target']}**: entropy rises by {about[f'{name}_rise']:.3f} nats to its late peak, by "
                f"{about[f'{name}_rise_without_first']:.3f} without the first position of each prompt"
            )
            if f"{name}_rise_quiet" in about:
                text += (
                    f", and by {about[f'{name}_rise_quiet']:.3f} over the {about[f'{name}_quiet_rows']:.0f} of "
                    f"{about[f'{name}_rows']:.0f} rows that no state of outlying norm, an attention sink, entered"
                )
            lines.append(f"{text}.")
    return lines


def figure(name: str, origin: Origin, label: str = "") -> str:
    """A figure of the default run with its caption, the notebook that computes it, its alternative text and its status.

    ``label`` is what {ref} finds it by; a figure that stands on two pages can have it on one of them only.
    """
    passport = read_passport(name, origin)
    if passport is None:
        anchor = f"({label})=\n" if label else ""
        return f"{anchor}{NOT_HERE}"
    picture = f"data/results/{Settings().run_name}/{name}"
    state = status(origin[of_default(f"{name}.json")]).capitalize()
    made = notebook_link(f"{_artefact(name)} in its notebook", NOTEBOOK_OF[name])
    caption = f"**{name[:-1].capitalize()} {name[-1]}.** {passport['caption']} Computed here: {made}. *{state}.*"
    alt = " ".join(passport["alt"].split())
    named = f"\n:name: {label}" if label else ""
    return f"```{{figure}} /{picture}.svg{named}\n:alt: {alt}\n:width: 100%\n\n{caption}\n```"


def table1(origin: Origin) -> str:
    path = origin.get(of_default("table1.md"))
    return path.read_text(encoding="utf-8") if path else NOT_HERE


def compared(origin: Origin) -> str:
    """Reported values of the paper's targets beside measured ones of ours, quantity by quantity."""
    measured = _measured(origin)
    if not measured:
        return NOT_HERE
    values = reported()
    paper = list(dict.fromkeys(values["target"]))
    ours = list(dict.fromkeys(target for of in measured.values() for target in of))
    heads = ["quantity", *(f"{target}, reported" for target in paper), *(f"{target}, measured" for target in ours)]
    rows = []
    for quantity, of in measured.items():
        cells = [_reported_cell(values, target, quantity) for target in paper]
        rows.append([_title(quantity), *cells, *(of.get(target, "") for target in ours)])
    return markdown_table(heads, rows)


def _measured(origin: Origin) -> dict[str, dict[str, str]]:
    """Quantity, named as in data/paper/reported.csv -> target -> our value as text."""
    found: dict[str, dict[str, str]] = {}
    if (wave := read_csv("figure2.csv", origin)) is not None:
        whole = wave[wave["first_position"] == "kept"]
        peaks = whole.loc[whole.groupby("target", sort=False)["entropy"].idxmax()]
        found["layer of the peak"] = {row.target: f"{row.layer} of 0–{_last(whole, row.target)}" for row in peaks.itertuples()}
    if (passport := read_passport("figure5", origin)) is not None:
        found["compartments"] = {
            entry["target"]: ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in entry["compartments"])
            for entry in passport["results"]
            if not entry["debiased"]
        }
    if (table := read_csv("table1.csv", origin)) is not None:
        names = {
            "EAGLE3": "EAGLE3 as printed",
            "ELSI m=1": "ELSI m=1",
            "ELSI m=3": "ELSI m=3",
            "negative control": "lowest entropy m=3",
        }
        of = table[table["origin"] == "measured"]
        for name, method in names.items():
            rows = of[of["method"] == method]
            found[f"{name} layers"] = {row.target: braces(row.layers) for row in rows.itertuples()}
            found[f"{name} S_1"] = {row.target: f"{row.entropy:.3f}" for row in rows.itertuples()}
    return found


def variance(origin: Origin) -> str:
    """Change of the variance between prompts by thirds of depth: reported, and ours in every reading, with its control."""
    data = read_csv("figure4.csv", origin)
    if data is None:
        return NOT_HERE
    thirds = ("early", "middle", "late")
    changes = [f"{value:+.1f} %" for value in reported_variance_changes().values()]
    rows = [["Qwen3-4B", "reported", "kept by the filter", "not stated", *changes]]
    change = data[data["quantity"] == "change"]
    for (target, reading, first, positions), of in change.groupby(["target", "reading", "first_position", "positions"], sort=False):
        row = of.set_index("depth")
        cells = [f"{_percent(row.value[t])} % [{_percent(row.low[t])}, {_percent(row.high[t])}]" for t in thirds if t in row.index]
        chosen = "kept by the filter" if positions == "kept" else "as many at random"
        rows.append([target, f"measured, {reading}", chosen, first, *cells])
    return markdown_table(("target", "value", "positions", "first position", *thirds), rows, right=(4, 5, 6))


def reported_values() -> str:
    """Everything known of the paper's numbers, as a table."""
    rows = []
    for row in reported().itertuples():
        value = f"{row.value} to {row.value_to}" if row.value_to else row.value
        rows.append((row.target, row.artefact, row.quantity, value, row.unit, row.note))
    return markdown_table(("target", "artefact", "quantity", "value", "unit", "note"), rows)


def artefacts(origin: Origin) -> str:
    """Status, time and machine of every artefact of the default run."""
    rows = []
    for name, notebook in NOTEBOOK_OF.items():
        passport = read_passport(name, origin)
        if passport is None:
            rows.append((_artefact(name), "", "not run here", "", "", ""))
            continue
        made = f"[{_artefact(name)}](/notebooks/{notebook}.ipynb)"
        targets = ", ".join(entry["target"] for entry in passport["inputs"] if entry)
        seconds = "" if passport["seconds"] is None else f"{passport['seconds']:.1f}"
        state = status(origin[place(f"{name}.json")])
        rows.append((made, targets, state, f"`{passport['code']['method'][:8]}`", seconds, hardware(passport)))
    return markdown_table(("artefact", "targets", "status", "code", "seconds", "hardware"), rows, right=(4,))


def runs(origin: Origin) -> str:
    """Calibrations behind the artefacts, as the passports of the fingerprints tell."""
    from elsi_lib.fingerprint import Fingerprint
    from elsi_lib.settings import is_current

    paths = fingerprints(origin)
    if not paths:
        return NOT_HERE
    heads = ("target", "layers", "prompts used", "tokens", "blocks", "dtype", "code", "current", "seconds", "hardware")
    rows = []
    for path in paths:
        fp = Fingerprint.load(path)
        about, prompts = fp.passport, fp.passport["prompts"]
        blocks = next(iter(prompts["blocks"].values()))
        cells = (
            fp.target,
            fp.num_layers,
            prompts["used"],
            f"{prompts['tokens']:,}",
            f"{blocks:,}",
            about["target"].get("dtype", ""),
            f"`{about['code']['method'][:8]}`",
            "yes" if is_current(fp) else "no: stale",
            "" if about["seconds"] is None else f"{about['seconds']:.0f}",
            hardware(about),
        )
        rows.append(cells)
    return markdown_table(heads, rows, right=(1, 2, 3, 4, 8))


# Code


def conventions() -> str:
    """How every system names layer j, from :data:`elsi_lib.layers.CONVENTIONS`."""
    rows = []
    for name, rule in CONVENTIONS.items():
        own = "*j*" if rule.offset == 0 else f"*j* + {rule.offset}"
        note = f"{rule.note}. Last block: {rule.last}" if rule.last else rule.note
        rows.append((name, own, "no" if rule.last else "yes", note))
    return markdown_table(("system", "id of layer *j*", "names the last block", "what its code does"), rows)


def rule_ids(layers: int = 36) -> str:
    """EAGLE-3's rule, printed and as run, in every convention that can name it."""
    rules = {name: layer_rule(name, layers) for name in ("eagle3", "eagle3-code")}
    rows = []
    named = {name: engine_ids(given, layers) for name, given in rules.items()}
    for system in CONVENTIONS:
        cells = [braces(ids[system]) if not isinstance(ids[system], str) else "cannot name it" for ids in named.values()]
        rows.append((system, *cells))
    return markdown_table(("system", *(f"{braces(given)} here" for given in rules.values())), rows)


def command_line() -> str:
    """Help of every command, as it prints it."""
    elsi = Path(sys.executable).with_name("elsi")
    parts = []
    for name in COMMANDS:
        shown = subprocess.run([elsi, name, "--help"], capture_output=True, text=True, check=False, env=_plain_terminal())
        if shown.returncode:
            raise ElsiError(f"elsi {name} --help failed: {shown.stderr.strip()}")
        parts.append(f"## `elsi {name}`\n\n```text\n{shown.stdout.strip()}\n```")
    return "\n\n".join(parts)


def _plain_terminal() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}


# Parts


def _artefact(name: str) -> str:
    """``figure 2``, ``table 2, differences``, ``tau, entropy``."""
    head, _, part = name.rpartition("/")[2].partition("_")
    return re.sub(r"(?<=[a-z])(?=[0-9])", " ", head) + (f", {part}" if part else "")


def _reported_cell(values: pd.DataFrame, target: str, quantity: str) -> str:
    rows = values[(values["target"] == target) & (values["quantity"] == quantity)]
    if rows.empty:
        return "not known"
    row = rows.iloc[0]
    if quantity.endswith("layers"):
        return braces(row["value"])
    unit = " %" if row["unit"] == "%" else ""
    note = " (about)" if "near" in row["note"] else ""
    if quantity == "compartments":
        return row["value"].replace(" ", ", ").replace("-", "–")
    return f"{row['value']}{unit}{note}"


def _percent(change: float) -> str:
    return f"{change:+,.0f}" if abs(change) >= 1000 else f"{change:+.1f}"


def _title(quantity: str) -> str:
    return quantity.replace("S_1", "$S_1$").replace("negative control", "negative control (ours: the lowest of all)")


def _last(wave: pd.DataFrame, target: str) -> int:
    return int(wave.loc[wave["target"] == target, "layer"].max())
