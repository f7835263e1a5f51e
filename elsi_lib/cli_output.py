"""What the command line prints: plain text and tables that fit 80 columns, on a terminal as in a file."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from elsi_lib.fingerprint import Fingerprint


def _print(renderable: Table | Text) -> None:
    """To standard output; styled only on a terminal, and without the blanks that fill lines up."""
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def plain(text: object) -> str:
    """One line, without control characters: names and messages may come from a file that somebody else made."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing where nobody watches."""
    from elsi_lib.progress import watched

    if not watched():
        yield
        return
    with Console(stderr=True, markup=False, highlight=False).status(plain(what)):
        yield


def _table(*columns: str, right: Iterable[str] = (), fold: Iterable[str] = ()) -> Table:
    """A table without lines; ``right`` columns hold numbers, ``fold`` columns take several lines where they must."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in fold, overflow="fold")
    return table


def _facts(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values in two columns; values wrap, and are never cut."""
    table = _table("name", "value", fold=("value",))
    table.show_header = False
    for name, value in rows:
        table.add_row(Text(name, style="bold"), plain(value))
    _print(table)


def _sentence(text: object) -> None:
    """A line of its own, which wraps."""
    _print(Text(plain(text)))


def _layers(layers: Iterable[int] | None) -> str:
    return "-" if layers is None else ", ".join(map(str, layers))


# elsi targets


def targets(assets: ModuleType, here: dict[str, bool | None]) -> None:
    """The known targets and data sets. ``here``: name -> present, absent, or None for a copy that cannot be used."""
    state = {True: "yes", False: "no", None: "unusable"}
    for kind, title in (("target", "target"), ("data", "prompts")):
        table = _table(title, "layers", "size", "licence", "from", "here", right=("layers", "size"), fold=("licence",))
        for asset in assets.ASSETS.values():
            if asset.kind == kind:
                layers = re.search(r"(\d+) layers", asset.about)
                origin = {"HubRepo": "hub", "Url": "web"}.get(type(asset.source).__name__, "wheel")
                row = (layers[1] if layers else "-", _size(asset), asset.licence, origin, state[here[asset.name]])
                table.add_row(asset.name, *row)
        _print(table)
        print()
    print("short names")
    for alias, name in assets.ALIASES.items():
        print(f"  {alias} = {name}")
    print("\nA hub id (owner/name), a folder of safetensors or a .gguf file is a target as")
    print("well, and any JSON, JSONL or text file of conversations gives prompts.")


def _size(asset: Any) -> str:
    if asset.bytes:
        return f"{asset.bytes / 1e6:,.1f} MB" if asset.bytes < 1e8 else f"{asset.bytes / 1e6:,.0f} MB"
    told = re.search(r"\(([\d.]+ [GM]B)\)", asset.about)
    return told[1] if told else ""


# elsi calibrate, elsi merge


def calibrated(fingerprint: Fingerprint, path: Path) -> None:
    """What a calibration did."""
    entropy = fingerprint.entropy()
    peak, low = int(entropy.argmax()), int(entropy.argmin())
    passport = fingerprint.passport
    _facts([
        ("target", _target(passport)),
        *_prompts(passport),
        ("seconds", _seconds(passport)),
        ("peak", f"layer {peak}, {float(entropy[peak]):.4f} nats; lowest layer {low}, {float(entropy[low]):.4f} nats"),
    ])
    print(f"saved     {path}")


def _target(passport: dict[str, Any]) -> str:
    about = passport["target"]
    return (
        f"{about.get('name')}: {about.get('architecture')}, {about.get('num_layers')} layers, d {about.get('hidden_size')}, "
        f"{about.get('dtype')}"
    )


def _seconds(passport: dict[str, Any]) -> str:
    return "not measured (merged from parts)" if passport.get("seconds") is None else f"{passport['seconds']:,.1f}"


# Beside "used" and "too short" the bare words would seem to be parts of one sum.
_LABELS = {"duplicates": "duplicates in the file", "sampled": "sampled as reserve"}


def _prompts(passport: dict[str, Any]) -> list[tuple[str, str]]:
    about, parameters = passport["prompts"], passport["parameters"]
    blocks = next(iter(about["blocks"].values()))
    rows = [
        (
            "prompts",
            f"{about['used']} of {about.get('source', 'unnamed prompts')} used, {about.get('asked', about['used'])} asked for, "
            f"{about['dropped_too_short']} dropped as too short",
        ),
        ("tokens", f"{about['tokens']:,}; of them {blocks:,} blocks of {parameters['block']} at rho {parameters['rho']}"),
    ]
    counts = about.get("counts", {})
    for section in (s for s in ("read", "repaired", "skipped", "sample") if s in counts):
        rows.append((section, ", ".join(f"{n:,} {_LABELS.get(label, label)}" for label, n in counts[section].items())))
    return rows


# elsi show


def fingerprint(fingerprint: Fingerprint, current: bool) -> None:
    """A fingerprint's passport, and the entropy of each single layer in its four variants."""
    passport = fingerprint.passport
    about, code, where = passport["target"], passport["code"], passport["environment"]
    hardware = where.get("hardware", {})
    code_is = "the installed one" if current else "not the installed one: stale"
    machine = [hardware.get("processor"), f"{hardware.get('cores')} cores", f"{hardware.get('memory_gib', '?')} GiB of memory"]
    rows = [
        ("target", _target(passport)),
        ("", f"vocabulary {about.get('vocab_size', 0):,}, {about.get('parameters', 0) / 1e6:,.1f} million parameters"),
        ("source", f"{about.get('source')}, revision {about.get('revision')}"),
        *_prompts(passport),
        ("parameters", ", ".join(f"{name} {value}" for name, value in passport["parameters"].items())),
        ("code", f"elsi_lib {code['elsi_lib']}, calibration {code.get('calibration', 'unknown')} ({code_is})"),
        ("made with", ", ".join(f"{name} {version}" for name, version in where.get("packages", {}).items())),
        ("on", ", ".join(map(str, [*machine, *hardware.get("accelerators", [])]))),
        ("seconds", _seconds(passport)),
        ("sha256", fingerprint.sha256),
    ]
    _facts(rows)
    print("\nS_1 of each single layer, nats\n")
    columns = ("layer", "filtered", "unfiltered", "filtered,", "unfiltered,")
    table = _table(*columns, "", right=columns)
    table.add_row("", "", "", "no first", "no first", "")
    entropies = [fingerprint.variant(f, s).entropy() for s in (True, False) for f in (True, False)]
    top = float(entropies[0].max()) or 1.0
    for j in range(fingerprint.num_layers):
        row = [float(e[j]) for e in entropies]
        table.add_row(str(j), *(f"{value:.4f}" for value in row), "#" * round(24 * row[0] / top))
    _print(table)


# elsi select


def _setting(value: Any) -> str:
    """A parameter's value; a run of layers as first..last."""
    if value is None:
        return "all"
    if isinstance(value, list) and value == list(range(value[0], value[-1] + 1)):
        return f"{value[0]}..{value[-1]}"
    return str(value)


def choice(found: dict[str, Any], engine: str | None = None) -> None:
    """What :func:`elsi_lib.choice.describe_choice` found; ``engine``: whose layers the search was limited to."""
    from elsi_lib.selection import RULES

    notes, origin, stable = found["notes"], found["fingerprint"], found["stability"]
    variant = "" if origin["filtered"] else ", without the token filter"
    variant += "" if origin["first_position_kept"] else ", without first positions"
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in found["parameters"].items() if name != "m")
    rows = [
        ("target", f"{found['target']}, {found['num_layers']} layers"),
        ("source", origin["path"] if origin["status"] == "given" else f"{origin['path']} ({origin['status']})"),
        ("calibrated", f"on {origin['prompts']} prompts of {origin['source']}{variant}"),
        ("method", f"{found['method']}, m = {found['m']} ({settings})"),
        ("layers", _layers(found["layers"])),
        ("entropy", f"{found['entropy']:.4f} nats"),
    ]
    if found["rank"] is None:
        rows.append(("rank", notes["rank"]))
    else:
        rows.append(("rank", f"{found['rank']:,} of {found['sets']:,} sets of {found['m']}; {_best(found)}"))
    if servable := found["servable"]:
        among = f"sets that {engine} can serve"
        place = notes.get("servable") or f"rank {servable['rank']:,} of {servable['sets']:,} {among}; {_best(servable)}"
        rows.append(("servable", place))
    if found["redundancy"] is None:
        rows.append(("redundancy", notes["redundancy"]))
    else:
        debiased = notes.get("redundancy_debiased") or f"{found['redundancy_debiased']:.3f} debiased"
        rows.append(("redundancy", f"{found['redundancy']:.3f} mean CKA of its pairs ({debiased})"))
    if stable is None:
        rows.append(("stability", notes["stability"]))
    else:
        rows.append((
            "stability",
            f"{stable['share']:.0%} ({stable['interval'][0]:.0%} to {stable['interval'][1]:.0%}) of {stable['replicates']} bootstrap "
            f"replicates choose this set; mean Jaccard similarity {stable['jaccard']:.2f}",
        ))
    _facts(rows)
    print()
    _baselines(found)
    print()
    table = _table("engine", "layer ids", fold=("layer ids",))
    for convention, ids in found["ids"].items():
        table.add_row(convention, _layers(ids) if ids else f"none: {_reason(convention, notes)}")
    _print(table)
    last, searched = found["num_layers"] - 1, found["method"] not in RULES
    if engine is None and searched and last in found["layers"] and found["m"] <= last:
        print()
        _sentence("most engines cannot capture the last block: --engine sglang searches among the layers it can serve")
    print("\nfor the draft's config.json")
    for convention, name in (("sglang", "SGLang"), ("vllm", "vLLM")):
        config = found["config"][convention]
        print(f"  {name:<8}{json.dumps(config)[1:-1] if config else 'has no ids for this set, see above'}")


def _best(place: dict[str, Any]) -> str:
    return f"{place['regret']:.4f} nats below the best" if place["rank"] > 1 else "the best there is"


def _reason(engine: str, notes: dict[str, str]) -> str:
    """Why an engine has no ids for a set, without its own name, and without what is said above of SGLang."""
    reason = notes[engine].partition(": ")[2] or notes[engine]
    same = notes.get("sglang", "").partition(": ")[2]
    return plain(f"{reason.removesuffix(same)}see sglang" if engine != "sglang" and same and reason.endswith(same) else reason)


def as_json(found: dict[str, Any]) -> str:
    """Indented JSON with every list of plain values on one line."""
    text = json.dumps(found, indent=2, allow_nan=False)
    return re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s+\]", lambda match: "[" + re.sub(r"\n\s+", " ", match[1]) + "]", text)


def _baselines(found: dict[str, Any]) -> None:
    """The entropies of EAGLE's rules and of the optimum, and what this choice gains on them."""
    names = {
        "eagle2": "EAGLE-2",
        "eagle3": "EAGLE-3 as printed",
        "eagle3-code": "EAGLE-3 as its code runs",
        "optimum": f"best of {found['sets']:,} sets of {found['m']}",
    }
    missing = []
    table = _table("compared with", "layers", "entropy, nats", "gain", right=("entropy, nats", "gain"), fold=("layers",))
    for key, name in names.items():
        rule = found["baselines"][key]
        if rule["layers"]:
            table.add_row(name, _layers(rule["layers"]), f"{rule['entropy']:.4f}", f"{found['entropy'] - rule['entropy']:+.4f}")
        else:
            missing.append(f"{'optimum' if key == 'optimum' else name}: {found['notes'][key]}")
    _print(table)
    for why in missing:
        _sentence(why)


# elsi train, elsi evaluate


def note(message: str) -> None:
    """A line on standard error."""
    print(plain(message), file=sys.stderr, flush=True)


@contextmanager
def counting(what: str, unit: str) -> Iterator[Any]:
    """Gives a function of (done, in all) that shows progress and the time left: a bar where somebody watches, now and then a line
    in a log."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from elsi_lib.progress import watched

    if not watched():
        start, shown = time.monotonic(), [0.0]

        def tell(done: int, total: int) -> None:
            spent = time.monotonic() - start
            if done == total or spent - shown[0] >= 60:
                shown[0] = spent
                note(f"{what}: {done} of {total} {unit}, {spent / 60:.0f} min")

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def training_plan(plan: Any, sets: list[tuple[int, ...]]) -> None:
    """What :func:`elsi_lib.plan.plan_training` expects."""
    _facts([
        ("layer sets", "; ".join(map(_layers, sets))),
        ("prompts", f"{plan.prompts:,} of {plan.prompt_tokens:,} tokens"),
        ("answers", f"at most {plan.answer_tokens:,} tokens, written by the target"),
        ("steps", f"at most {plan.steps:,} of the optimiser"),
        ("parameters", f"{plan.parameters:,} in {plan.drafts} drafts"),
        ("memory", f"{plan.memory / 2**30:.1f} GiB for weights and optimiser, and as much again as a batch needs"),
        ("answering", f"at most {plan.seconds_answers / 60:,.0f} min"),
        ("training", f"at most {plan.seconds_training / 60:,.0f} min"),
    ])
    _sentence("Times are scaled up from a short trial on this machine. Nothing was written.")


def trained(drafts: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Where the drafts are."""
    for name, layers in drafts.items():
        print(f"draft of layers {_layers(layers)}: {folder / name}")
    print(f"learning curves: {folder / 'training.csv'}")


def evaluated(taus: Any, differences: Any, about: dict[str, Any], path: Path | None) -> None:
    """tau over all questions, and each draft against the first."""
    print(f"{about['prompts']}: {about['questions']} questions, answers of at most {about['max_new_tokens']} tokens\n")
    table = _table("draft", "nodes", "T", "tau", "95 %", "against the first", "Holm's p", right=("nodes", "T", "tau", "Holm's p"))
    keys = ["method", "nodes", "temperature"]
    pooled = [f[(f["group"] == "overall") & (f["average"] == "pooled")].set_index(keys) for f in (taus, differences)]
    for key, row in pooled[0].iterrows():
        against = ("", "")
        if key in pooled[1].index:
            other = pooled[1].loc[key]
            against = (f"{other['difference']:+.3f} ({other['low']:+.3f} to {other['high']:+.3f})", f"{other['p_holm']:.3g}")
        table.add_row(key[0], str(key[1]), f"{key[2]:g}", f"{row['tau']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}", *against)
    _print(table)
    if path is not None:
        print(f"\nsaved {path}")


# elsi export


def exported(made: Any, titles: dict[str, str]) -> None:
    """What :func:`elsi_lib.speculative.export.export_draft` wrote, and the ids by which each engine takes it."""
    _facts([
        ("target", made.target),
        ("layers", _layers(made.layers)),
        ("weights", made.dtype),
    ])
    print()
    table = _table("engine", "layer ids", fold=("layer ids",))
    for name, title in titles.items():
        table.add_row(title, _layers(made.ids[name]) if name in made.ids else plain(f"none, {made.reasons[name]}"))
    _print(table)
    print(f"\nsaved {made.folder}; its README.md says how to serve it")
