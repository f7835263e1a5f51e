"""The commands of ``elsi`` that deal with drafts: train, evaluate, study, export.

As in :mod:`elsi_lib.cli`, torch is imported inside the commands, results go to standard output and notes to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elsi_lib import cli_output as out
from elsi_lib.cli_options import Preset, PresetOption, TargetName, choices

# Spelled out, because the module that owns them imports torch; a test holds them equal.
Loader = choices("Loader", "sglang", "vllm", "specforge", "speculators", "eagle")
Weights = choices("Weights", "bfloat16", "float16", "float32")

DraftFolder = Annotated[Path, typer.Argument(metavar="DRAFT", help="The folder of a trained draft.")]
Questions = choices("Questions", "spec-bench", "own")
SeedOption = Annotated[int, typer.Option(help="Of the prompts, the answers' noise and the drafts' first weights.")]


def train(
    target: TargetName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Gets learning curves and a folder per draft.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="J,J,J", help="A layer set, as 2,15,27; may be repeated: drafts train together.  [default: ELSI m=3]"),
    ] = None,
    preset: PresetOption = Preset.cpu,
    prompts: Annotated[str, typer.Option(help="A data set of `elsi targets`, or a file of yours, for prompts.")] = "sharegpt",
    seed: SeedOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take: tokens, steps, memory, time.")] = False,
) -> None:
    """Train drafts of a target on its own answers.

    The target answers prompts, half at T = 0 and half at T = 1; drafts of all layer sets named learn from one pass over the answers.
    Stopped at any moment, the same command goes on. Answers are kept in the cache for further drafts.
    """
    from elsi_lib.settings import Settings

    settings = Settings(target=target, prompts=prompts, seed=seed, preset=str(preset))
    sets = [_layer_set(text) for text in layers or ()]
    from elsi_lib import study
    from elsi_lib.selection import check_layers
    from elsi_lib.speculative import distill
    from elsi_lib.speculative.grid import Row
    from elsi_lib.targets import load_target

    if not sets:
        from elsi_lib.pipeline import obtain_fingerprint
        from elsi_lib.selection import elsi

        sets = [elsi(obtain_fingerprint(settings)[0], 3).layers]
    loaded = load_target(target)
    sets = [check_layers(chosen, loaded.num_layers) for chosen in sets]  # before the target answers a single prompt
    rows = [Row(",".join(map(str, chosen)), tuple(sorted(chosen))) for chosen in sets]
    if dry_run:
        from elsi_lib.plan import plan_training

        with out.working("trying each stage for a moment"):
            plan = plan_training(loaded, settings, rows)
        out.training_plan(plan, [row.layers for row in rows])
        return
    texts, _ = study.training_texts_of(loaded, settings, study.work_folder(settings), out.note)
    made = study.new_drafts(loaded, settings, rows, texts)
    with out.counting("training", "steps") as watch:
        distill.train(loaded, made, texts, study.recipe_of(settings), output, watch=watch)
    out.trained({name: draft.config.layers for name, draft in made.items()}, output)


def evaluate(
    target: TargetName,
    drafts: Annotated[list[Path], typer.Argument(metavar="DRAFT...", help="Folders of trained drafts of this target.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Accepted lengths, as Parquet.")] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Of the tree, with the root; may be repeated.  [default: 30, 60]")] = None,
    questions: Annotated[Questions, typer.Option(help="Spec-Bench, or this project's own prompts.")] = Questions["spec-bench"],
    preset: PresetOption = Preset.cpu,
    seed: SeedOption = 0,
) -> None:
    """Measure tau of drafts: tokens per pass of the target, with 95 % intervals over questions, at T = 0 and T = 1.

    The target answers the questions once; the answers are kept in the cache, and every draft is replayed on them exactly. The first
    draft is what the others are compared with.
    """
    from elsi_lib import study
    from elsi_lib.errors import ElsiError
    from elsi_lib.report.study import write_steps
    from elsi_lib.report.tau import compare, question_totals, tau_table
    from elsi_lib.settings import Settings
    from elsi_lib.speculative.checkpoint import load_draft
    from elsi_lib.targets import load_target

    settings = Settings(target=target, seed=seed, preset=str(preset), evaluation=str(questions))
    names = [path.name for path in drafts]
    if len(set(names)) < len(names):
        raise ElsiError(f"two drafts are named {max(names, key=names.count)}: results go by the names of the folders, rename one")
    loaded = load_target(target)
    read = {path.name: load_draft(path, loaded).to(loaded.dtype) for path in drafts}
    work = study.work_folder(settings)
    recorded, about = study.record_questions(loaded, settings, work, out.note)
    sizes, name = tuple(nodes or study.NODES), study.replay_name(read, settings)
    # In a folder of its own: seconds of these replays are not the study's.
    steps = study.replay_all(loaded, read, recorded, work / "evaluations", nodes=sizes, seed=seed, name=name, say=out.note)
    if output is not None:
        write_steps(steps, output)
    long = steps.explode("tokens").dropna(subset="tokens").astype({"tokens": int})
    totals = question_totals(long, steps[["question_id", "category"]].drop_duplicates())
    out.evaluated(tau_table(totals), compare(totals, names[0]), about, output)


def study(
    target: TargetName,
    preset: PresetOption = Preset.cpu,
    prompts: Annotated[str, typer.Option(help="A data set of `elsi targets`, or a file of yours, for prompts.")] = "sharegpt",
    questions: Annotated[Questions, typer.Option(help="Spec-Bench, or this project's own prompts.")] = Questions["spec-bench"],
    seed: SeedOption = 0,
) -> None:
    """Make what tables 2 and 3 show: answers, drafts of all rows, accepted lengths, live decoding.

    Results go to the folder that ELSI_RESULTS names, where the notebooks find them. Stopped at any moment, the same command goes on:
    what was made is kept in the cache.
    """
    from elsi_lib.settings import Settings
    from elsi_lib.study import run_study

    settings = Settings(target=target, prompts=prompts, seed=seed, preset=str(preset), evaluation=str(questions))
    print(f"saved     {run_study(settings, say=out.note)}")


def _layer_set(text: str) -> tuple[int, ...]:
    from elsi_lib.errors import ElsiError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ElsiError(f"--layers {text}: numbers of blocks from 0, with commas between them, are expected, as 2,15,27") from None


def export(
    draft: DraftFolder,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A new folder, or an earlier export.")],
    engine: Annotated[
        list[Loader] | None,
        typer.Option(metavar="NAME", help=f"Refuse unless this one can take the draft: {', '.join(Loader)}. May be repeated."),
    ] = None,
    dtype: Annotated[Weights, typer.Option(help="Of the weights.")] = Weights.bfloat16,
) -> None:
    """Write a trained draft as one folder for serving engines, with a model card.

    One folder for SGLang, vLLM, SpecForge, speculators and EAGLE's code, with the layer ids in the numbering of each. What cannot
    take the draft is listed with the reason, and its keys are left out.
    """
    from elsi_lib.speculative.export import LOADERS, export_draft

    made = export_draft(draft, output, engines=[str(name) for name in engine or ()], dtype=str(dtype))
    out.exported(made, {name: loader.title for name, loader in LOADERS.items()})


def register(app: typer.Typer) -> None:
    """Add these commands to ``elsi``."""
    app.command(short_help="Train drafts on the target's own answers.")(train)
    app.command(short_help="Measure tau of drafts on Spec-Bench.")(evaluate)
    app.command(short_help="Make tables 2 and 3 anew: drafts and their tau.")(study)
    app.command(short_help="Write a trained draft for serving engines.")(export)
