"""Arguments and options that several commands of ``elsi`` take."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


def choices(name: str, *values: str) -> type[StrEnum]:
    """The values of an option, spelled out where the module that owns them imports torch; a test holds them equal."""
    return StrEnum(name, {value: value for value in values})


Preset = choices("Preset", "quick", "cpu", "paper")
PresetOption = Annotated[Preset, typer.Option(help="Sizes of a run: quick (minutes), cpu (two cores), paper (GPUs).")]
TargetName = Annotated[str, typer.Argument(metavar="TARGET", help="A name from `elsi targets`, a hub id, a folder or a .gguf file.")]
