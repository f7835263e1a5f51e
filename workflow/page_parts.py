"""What the writers of generated pages share: where results lie, and how a set, a machine or a missing result is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from elsi_lib.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
TARGET_OF = {"table3": "qwen2.5-coder-0.5b-instruct"}  # artefacts of another target than the default one
NOT_HERE = "*Not run here: `make book` computes it.*"

Origin = Mapping[str, Path]  # name below data/results -> where the file lies


def of_default(name: str) -> str:
    return f"{Settings().run_name}/{name}"


def second(name: str) -> str:
    """An artefact of table 3's target that table 2's has under the same name."""
    return f"{Settings().for_target(TARGET_OF['table3']).run_name}/{name}"


def place(file: str) -> str:
    """Where a file of an artefact lies below data/results; a name with its folder stays as it is."""
    if "/" in file:
        return file
    target = TARGET_OF.get(file.partition(".")[0].partition("_")[0])
    return f"{Settings().for_target(target).run_name}/{file}" if target else of_default(file)


def study_passport(table: str, origin: Origin) -> Path | None:
    """The passport of the study that table 2 or 3 was made of."""
    return origin.get(f"{place(table).rpartition('/')[0]}/tau/passport.json")


def read_csv(name: str, origin: Origin) -> pd.DataFrame | None:
    path = origin.get(place(name))
    return pd.read_csv(path, dtype={"layers": str, "depth": str}) if path else None


def read_passport(name: str, origin: Origin) -> dict[str, Any] | None:
    path = origin.get(place(f"{name}.json"))
    return json.loads(path.read_text(encoding="utf-8")) if path else None


def hardware(passport: Mapping[str, Any]) -> str:
    about = passport["environment"]["hardware"]
    return ", ".join([*about.get("accelerators", []), about["processor"], f"{about['cores']} cores"])


@cache
def in_contents() -> frozenset[str]:
    """Pages and notebooks that _toc.yml lists; only these can be linked."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return frozenset([toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])])


def notebook_link(text: str, notebook: str) -> str:
    """A link to a notebook, or its bare name where the book does not have it yet."""
    return f"[{text}](/notebooks/{notebook}.ipynb)" if f"notebooks/{notebook}" in in_contents() else text
