"""The command line ``elsi``: targets, fetch, calibrate, merge, select, show; drafts are the matter of ``cli_speculative``.

Thin over the functions that notebooks use. Results go to standard output, progress and notes to standard error. An error is one
line, ``elsi: ...``; exit codes: 0 done, 1 the machine or the network is in the way, 2 bad usage or bad input, 130 Ctrl-C, 141 the
reader of a pipe went away. torch and transformers are imported inside the commands that need them, so that help comes at once.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_lib import cli_output as out
from elsi_lib import cli_speculative
from elsi_lib.cli_errors import OneLineErrors
from elsi_lib.cli_options import Preset, PresetOption, TargetName, choices
from elsi_lib.errors import AssetError, ElsiError

if TYPE_CHECKING:
    from elsi_lib.fingerprint import Fingerprint
    from elsi_lib.settings import Settings


# Spelled out, because the modules that own them import torch; a test holds them equal.
Method = choices("Method", "elsi", "elsi-c", "exhaustive", "lowest", "eagle2", "eagle3", "eagle3-code", "uniform", "last")
Reading = choices("Reading", "position", "segment")
DType = choices("DType", "auto", "float32", "bfloat16", "float16")
Midpoint = choices("Midpoint", "singletons", "seeds", "never")
Normalize = choices("Normalize", "none", "trace")
Engine = choices("Engine", "transformers", "eagle", "vllm", "speculators", "sglang", "specforge", "dflash")


def _note(message: str) -> None:
    print(out.plain(message), file=sys.stderr, flush=True)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which layers of a target model should feed its EAGLE-style draft: calibrate the target once, then select layer sets by "
    "matrix entropy (arXiv 2610.12939). Layer j is the raw output of 0-based decoder block j.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"elsi {metadata.version('elsi-lib')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to fail
    if context.invoked_subcommand is None:
        print(context.get_help())


Output = Annotated[Path, typer.Option("-o", "--output", metavar="FP", help="Fingerprint to write, e.g. mine.safetensors.")]
Samples = Annotated[int, typer.Option(help="Conversations; 0 takes the preset's (paper: 200).", show_default=False)]
Rho = Annotated[float, typer.Option(help="Share of positions the token-entropy filter keeps (paper: 0.30).")]
Block = Annotated[int, typer.Option(help="B, tokens of a block = rows of a representative (paper: 32).")]
Seed = Annotated[int, typer.Option(help="Of the sample of conversations, the bootstrap and the random controls.")]
Prompts = Annotated[str, typer.Option(help="A data set of `elsi targets`, or a file of yours: JSON, JSONL, text (paper: ShareGPT).")]


@app.command(short_help="List the known targets and data sets.")
def targets() -> None:
    """List the known targets and data sets: size, licence, origin, and whether they are here."""
    from elsi_lib import assets

    here: dict[str, bool | None] = {}
    problem: AssetError | None = None
    for name in assets.ASSETS:
        try:
            with out.working(f"looking for {name}"):
                here[name] = assets.available(name) is not None
        except AssetError as err:  # say it once, after the list
            here[name], problem = None, problem or err
    out.targets(assets, here)
    if problem:
        raise problem


@app.command(short_help="Fetch a target or a data set once.")
def fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `elsi targets`.")]) -> None:
    """Fetch a target or a data set once, verify it, and print its path."""
    from elsi_lib.assets import fetch

    print(fetch(name))


@app.command(short_help="Make the fingerprint of a target.")
def calibrate(
    target: TargetName,
    output: Output,
    preset: PresetOption = Preset.cpu,
    samples: Samples = 0,
    rho: Rho = 0.30,
    block: Block = 32,
    seed: Seed = 0,
    prompts: Prompts = "sharegpt",
    reading: Annotated[Reading, typer.Option(help="Of block averaging, across blocks or within (paper: open).")] = Reading.position,
    dtype: Annotated[DType, typer.Option(help="Of the target; auto is bfloat16 where the device computes in it.")] = DType.auto,
    part: Annotated[str, typer.Option(metavar="I/N", help="Do part I of N only, 0-based; see `elsi merge`.", show_default=False)] = "",
    force: Annotated[bool, typer.Option("--force", help="Calibrate even where FP is current, or is some other file.")] = False,
) -> None:
    """Run a target once over calibration prompts and save its fingerprint.

    Where FP holds this very calibration already, made by the code as it stands, nothing is done. A fingerprint of another target is
    overwritten only with --force.
    """
    which = _part(part)
    from elsi_lib.settings import Settings

    settings = Settings(target=target, prompts=prompts, samples=samples, rho=rho, block=block, seed=seed, preset=str(preset))
    _check_output(output, "elsi-calibration-part-1" if which else "elsi-fingerprint-1", force)
    if which:
        from elsi_lib.pipeline import run_part
        from elsi_lib.targets import load_target

        loaded = None if dtype == DType.auto else load_target(target, dtype=str(dtype))
        run = run_part(settings, which, loaded, reading=str(reading))
        run.save(output)
        print(f"part {part}: {len(run.prompts)} prompts used, {run.dropped} dropped, saved {output}; join all with `elsi merge`")
        return
    if output.is_file() and not force and _is_current(output, settings, str(reading), str(dtype)):
        print(f"{output} holds this calibration already, by the code as it stands (--force makes it again)")
        return
    from elsi_lib.pipeline import run_calibration
    from elsi_lib.targets import load_target

    loaded = None if dtype == DType.auto else load_target(target, dtype=str(dtype))
    fingerprint = run_calibration(settings, loaded, reading=str(reading))
    out.calibrated(fingerprint, fingerprint.save(output))


@app.command(short_help="Merge the parts of one calibration.")
def merge(
    parts: Annotated[list[Path], typer.Argument(metavar="PART...", help="Every part that `elsi calibrate --part` saved.")],
    output: Output,
    force: Annotated[bool, typer.Option("--force", help="Write FP even where it is some other file.")] = False,
) -> None:
    """Merge the parts of one calibration, made by several processes or machines, into its fingerprint."""
    _check_output(output, "elsi-fingerprint-1", force)
    from elsi_lib.calibration import Calibration

    runs = []
    for path in parts:
        if not path.is_file():
            raise ElsiError(f"no part of a calibration at {path}: make it with `elsi calibrate TARGET --part I/N -o {path.name}`")
        if _format(path) is None:
            raise ElsiError(f"{path} cannot be read as a part of a calibration: it is truncated, or another kind of file")
        runs.append(Calibration.load(path))
    whole = runs[0]
    for other in runs[1:]:
        whole.merge(other)
    seen, asked = len(whole.prompts) + whole.dropped, _used(whole.about_prompts)
    if asked is not None and seen != asked:
        raise ElsiError(f"these parts hold {seen} of the calibration's {asked} prompts: name every part, 0/N to N-1/N")
    fingerprint = whole.fingerprint()
    out.calibrated(fingerprint, fingerprint.save(output))


@app.command(short_help="Choose layers, and say how good the choice is.")
def select(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="FP-or-TARGET", help="A fingerprint, or a target (calibrated first if need be).")],
    m: Annotated[int | None, typer.Option("-m", "--size", help="Layers in the set (paper: 3, and 1 and 2).  [default: 3]")] = None,
    method: Annotated[Method, typer.Option(metavar="METHOD", help=f"How to choose: {', '.join(Method)}.")] = Method.elsi,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    k_beam: Annotated[str, typer.Option(metavar="K", help="elsi, elsi-c: sets kept at each size, or all (paper: 10).")] = "10",
    k_expand: Annotated[str, typer.Option(metavar="K", help="elsi: layers that extend a set, or all (paper: not stated).")] = "10",
    k_pool: Annotated[str, typer.Option(metavar="K", help="elsi-c: layers that extend a set, or all (paper: not stated).")] = "10",
    after_midpoint: Annotated[
        Midpoint, typer.Option(help="elsi, elsi-c: where layers before N/2 are barred (paper: single layers).")
    ] = Midpoint.singletons,
    alpha: Annotated[float, typer.Option(help="Order of the entropy, up to inf (paper: 1).")] = 1.0,
    center: Annotated[bool, typer.Option("--center", help="Subtract the mean row first (paper: not stated).")] = False,
    normalize: Annotated[Normalize, typer.Option(help="trace: every layer weighs the same (paper: not stated).")] = Normalize.none,
    unfiltered: Annotated[bool, typer.Option("--unfiltered", help="Without the token-entropy filter (paper: with).")] = False,
    engine: Annotated[
        Engine | None, typer.Option(help="Choose among the layers that this engine can capture; most leave out the last block.")
    ] = None,
    drop_first: Annotated[bool, typer.Option("--drop-first", help="Without first positions, the sinks (paper: not stated).")] = False,
    preset: PresetOption = Preset.cpu,
    samples: Samples = 0,
    rho: Rho = 0.30,
    block: Block = 32,
    seed: Seed = 0,
    prompts: Prompts = "sharegpt",
) -> None:
    """Choose layers, and say how good the choice is.

    Prints the set, its entropy, rank and regret among all sets of its size, its stability and redundancy, the entropy of EAGLE's
    rules, and the ids of the set for every engine. The options from --preset on say how to calibrate a TARGET.
    """
    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    takes = {"k_beam": ("elsi", "elsi-c"), "k_expand": ("elsi",), "k_pool": ("elsi-c",), "after_midpoint": ("elsi", "elsi-c")}
    values = {
        "k_beam": _limit("--k-beam", k_beam),
        "k_expand": _limit("--k-expand", k_expand),
        "k_pool": _limit("--k-pool", k_pool),
        "after_midpoint": str(after_midpoint),
    }
    for name, methods in takes.items():
        if name in given and method not in methods:
            raise ElsiError(f"--{name.replace('_', '-')} means nothing to method {method}: it belongs to {' and '.join(methods)}")
    options = {name: value for name, value in values.items() if method in takes[name]}
    options |= {"alpha": alpha, "center": center, "normalize": str(normalize)}
    if engine is not None and method not in ("elsi", "elsi-c", "exhaustive", "lowest"):
        raise ElsiError(f"--engine limits a search, and the rule {method} searches nothing: leave it out")

    calibration = ("preset", "samples", "rho", "block", "seed", "prompts")
    path = _fingerprint_file(source)
    if path is None:
        from elsi_lib.settings import Settings

        settings = Settings(target=source, prompts=prompts, samples=samples, rho=rho, block=block, seed=seed, preset=str(preset))
        path, fingerprint, status = _fingerprint_of(settings)
    else:
        from elsi_lib.fingerprint import Fingerprint
        from elsi_lib.settings import is_current

        if used := [name for name in calibration if name in given]:
            raise ElsiError(f"--{used[0]} says how to calibrate a target, but {source} is a fingerprint: leave it out")
        fingerprint = Fingerprint.load(path)
        status = "given" if is_current(fingerprint) else "stale"
    if status == "stale":
        _note(f"{path} was made by another version of the method's code: `elsi calibrate` makes it again")

    from elsi_lib.choice import describe_choice
    from elsi_lib.layers import servable_layers

    if engine is not None:
        options["among"] = servable_layers(str(engine), fingerprint.num_layers)
    with out.working(f"comparing the choice of {method} with all other sets"):
        choice = describe_choice(fingerprint.variant(not unfiltered, not drop_first), str(method), m, **options)
    choice["fingerprint"] = {"path": str(path), "status": status, **choice["fingerprint"]}
    if as_json:
        print(out.as_json(choice))
    else:
        out.choice(choice, None if engine is None else str(engine))


@app.command(short_help="Show what a fingerprint holds.")
def show(fingerprint: Annotated[Path, typer.Argument(metavar="FP", help="A fingerprint.")]) -> None:
    """Show what a fingerprint holds: where it came from, and the entropy of each layer."""
    from elsi_lib.fingerprint import Fingerprint
    from elsi_lib.settings import is_current

    loaded = Fingerprint.load(_fingerprint_file(str(fingerprint)) or fingerprint)
    out.fingerprint(loaded, is_current(loaded))


cli_speculative.register(app)


# Parts of the commands


def _part(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    if not (match := re.fullmatch(r"(\d+)/(\d+)", text)):
        raise ElsiError(f"--part {text}: I/N is expected, from 0/N to N-1/N")
    i, n = int(match[1]), int(match[2])
    if i >= n:
        raise ElsiError(f"--part {text}: parts are numbered 0/{n} to {n - 1}/{n}")
    return i, n


def _limit(option: str, text: str) -> int | None:
    """A number, or None for ``all``."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ElsiError(f"{option} {text}: a number of at least 1 is expected, or all")
    return int(text)


def _fingerprint_file(source: str) -> Path | None:
    """The fingerprint that ``source`` names, a file or the folder of a run's results; None for a target."""
    path = Path(source).expanduser()
    if path.is_dir():
        inside = path / "fingerprint.safetensors"
        return inside if inside.is_file() else None
    return path if path.suffix != ".gguf" and (path.is_file() or path.suffix == ".safetensors") else None


def _format(path: Path) -> str | None:
    """What kind of file of ours this is; None for any other."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get("format")
    except SafetensorError:
        return None


def _check_output(path: Path, kind: str, force: bool) -> None:
    """Find out before an hour's work that its result could not be written, or would replace a file of another kind."""
    if path.is_dir():
        raise ElsiError(f"-o {path} is a folder: name a file in it")
    if path.is_file() and not force and _format(path) != kind:
        raise ElsiError(f"-o {path} exists and is another kind of file: name a new one, or overwrite it with --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))


def _is_current(path: Path, settings: Settings, reading: str, dtype: str) -> bool:
    from elsi_lib.fingerprint import Fingerprint
    from elsi_lib.settings import differences, is_current

    try:
        fingerprint = Fingerprint.load(path)
    except ElsiError as err:
        _note(f"{err}: calibrating again")
        return False
    differs = differences(fingerprint, settings, reading, dtype)
    if "target" in differs:
        raise ElsiError(f"-o {path} holds a fingerprint of {fingerprint.target}: name another file, or overwrite it with --force")
    if differs:
        _note(f"{path} holds another calibration ({', '.join(differs)} differ): calibrating again")
        return False
    if not is_current(fingerprint):
        _note(f"{path} was made by another version of the method's code: calibrating again")
        return False
    return True


def _fingerprint_of(settings: Settings) -> tuple[Path, Fingerprint, str]:
    """The fingerprint of a target: an earlier or a committed one, else made now and kept with the results."""
    from elsi_lib.pipeline import fingerprint_status, run_calibration
    from elsi_lib.settings import find_fingerprint

    found = find_fingerprint(settings)
    if found:
        _note(f"using {found[0]}")
        return *found, fingerprint_status(*found)
    path = settings.output / "fingerprint.safetensors"
    _check_output(path, "elsi-fingerprint-1", force=False)
    _note(
        f"no fingerprint of {settings.target} yet: calibrating on {settings.size('samples')} conversations of {settings.prompts} "
        f"(preset {settings.preset})"
    )
    fingerprint = run_calibration(settings)
    _note(f"saved {fingerprint.save(path)}")
    return path, fingerprint, "measured"


def _used(about_prompts: dict[str, Any]) -> int | None:
    """How many prompts a calibration was given in all, if its parts know."""
    return about_prompts.get("counts", {}).get("sample", {}).get("used")


def main() -> None:
    """Entry point of ``elsi``."""
    app(prog_name="elsi")


if __name__ == "__main__":
    main()
