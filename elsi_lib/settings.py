"""What a notebook or a command was asked to do: parameters, presets, and the folders where results live."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.provenance import code_version

PRESETS: dict[str, dict[str, int]] = tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))
SMALLER: dict[str, dict[str, dict[str, int]]] = PRESETS.pop("smaller")  # target -> preset -> numbers that differ for this target
EVALUATIONS = ("spec-bench", "own")
DEFAULT_TARGET = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Settings:
    """Parameters of the notebooks, with the paper's values as defaults where it states them.

    Attributes:
        target: alias, hub id, local folder or .gguf file.
        beside: a second target shown from its fingerprint where figures compare two models; "" for none.
        prompts: calibration data: a known asset or a file.
        samples: number of conversations; 0 takes the preset's.
        rho: share of positions the filter keeps.
        block: B, rows of a representative.
        seed: of sampling, bootstrap and random controls.
        preset: one of quick, cpu, paper.
        evaluation: questions that tau is measured on: "spec-bench", or "own" for the prompts in data/prompts.
    """

    target: str = DEFAULT_TARGET
    beside: str = "qwen2.5-coder-0.5b-instruct"
    prompts: str = "sharegpt"
    samples: int = 0
    rho: float = 0.30
    block: int = 32
    seed: int = 0
    preset: str = "cpu"
    evaluation: str = "spec-bench"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = {"str": str, "int": int, "float": (int, float)}[field.type]
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ElsiError(f"parameter {field.name} = {value!r}: {field.type} is expected (papermill -r keeps a string as it is)")
        if self.preset not in PRESETS:
            raise ElsiError(f"preset {self.preset!r} unknown: one of {', '.join(PRESETS)}")
        if self.evaluation not in EVALUATIONS:
            raise ElsiError(f"evaluation {self.evaluation!r} unknown: one of {', '.join(EVALUATIONS)}")
        if self.samples < 0:
            raise ElsiError(f"samples = {self.samples}: a number of conversations, or 0 for the preset's")
        if not 0 < self.rho <= 1:
            raise ElsiError(f"rho = {self.rho} outside (0, 1]: the share of positions to keep; the paper uses 0.30")
        if self.block < 1:
            raise ElsiError(f"block = {self.block}: a block has at least one token; the paper uses 32")

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Settings from a notebook's globals, right after its parameters cell.

        papermill injects whatever it is given and runs on; here a name that is no parameter is an error.

        Raises:
            ElsiError: unknown names, or a value of the wrong type or range.
        """
        known = {field.name for field in fields(cls)}
        given = {
            name: value
            for name, value in namespace.items()
            if not name.startswith("_")
            and name not in ("In", "Out")
            and not callable(value)
            and not isinstance(value, ModuleType)
        }
        again = any(isinstance(value, cls) for value in namespace.values())  # the cell is run again in a notebook that went on
        if (unknown := sorted(set(given) - known)) and not again:
            raise ElsiError(f"unknown parameter {', '.join(unknown)}: this notebook takes {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in given.items() if name in known})

    def size(self, name: str) -> int:
        """A number of the preset, see presets.toml, or what it has for this target, unless it was given."""
        if name == "samples" and self.samples:
            return self.samples
        own = SMALLER.get(target_slug(self.target), {}).get(self.preset, {})
        return own.get(name, PRESETS[self.preset][name])

    @property
    def run_name(self) -> str:
        """Folder of this run's results: the target, and what differs from the defaults, so that runs never overwrite each other."""
        default = Settings()
        parts = [
            f"{name}-{_slug(value)}" if name != "preset" else _slug(value)
            for name, value in asdict(self).items()
            if name not in ("target", "beside", "samples", "evaluation") and value != getattr(default, name)
        ]
        if self.size("samples") != PRESETS[self.preset]["samples"]:
            parts.append(f"samples-{self.samples}")
        return "@".join([target_slug(self.target), *(["_".join(parts)] if parts else [])])

    def for_target(self, target: str) -> Settings:
        """The same settings for another target."""
        return replace(self, target=target)

    def calibration(self) -> dict[str, Any]:
        """What a fingerprint's passport must say for it to be this calibration."""
        return {
            "rho": float(self.rho),
            "block": self.block,
            "seed": self.seed,
            "bootstrap": self.size("bootstrap"),
            "spectra": self.size("spectra"),
            "source": _file_slug(self.prompts),
            "asked": self.size("samples"),
            "max_tokens": self.size("max_tokens"),
        }

    @property
    def output(self) -> Path:
        """Folder where this run writes: ELSI_RESULTS if set, else data/results of the project."""
        return results_root() / self.run_name


def project_root() -> Path | None:
    """The checkout this package was installed from, or the one around the working directory; None outside of any."""
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / "_toc.yml").is_file() and (folder / "data" / "paper").is_dir():
                return folder
    return None


def results_root() -> Path:
    """Where results are written: the folder ELSI_RESULTS, else data/results of the project, else ./results."""
    if folder := os.environ.get("ELSI_RESULTS"):
        return Path(folder)
    root = project_root()
    return root / "data" / "results" if root else Path("results")


def results_roots() -> list[Path]:
    """Where results are looked for: this run's folder, then those committed with the project."""
    root = project_root()
    return [results_root(), *([root / "data" / "results"] if root else [])]


def find_fingerprint(settings: Settings) -> tuple[Path, Fingerprint] | None:
    """This run's fingerprint: from the results folder, else from those committed with the project; None if neither has it.

    A file whose passport states another calibration is not this run's and is passed over.
    """
    for folder in results_roots():
        path = folder / settings.run_name / "fingerprint.safetensors"
        if path.is_file():
            fingerprint = Fingerprint.load(path)
            if not differences(fingerprint, settings):
                return path, fingerprint
    return None


def is_current(fingerprint: Fingerprint) -> bool:
    """Whether the method's code is still the code that made this fingerprint."""
    return fingerprint.passport["code"].get("calibration") == code_version()["calibration"]


def differences(fingerprint: Fingerprint, settings: Settings, reading: str = "position", dtype: str = "auto") -> tuple[str, ...]:
    """What keeps a fingerprint from being the calibration that the settings describe; empty where it is that one.

    Names of parameters, and ``"target"``, ``"prompts"`` or ``"dtype"``. A local model and a prompt file count by content: their
    hashes are compared, where the passport has them. A hub id counts by name.
    """
    wanted, held = settings.calibration(), _calibration_of(fingerprint)
    differing = [{"source": "prompts", "asked": "samples"}.get(name, name) for name in wanted if wanted[name] != held[name]]
    if fingerprint.passport["parameters"].get("reading", "position") != reading:
        differing.append("reading")
    if dtype not in ("auto", fingerprint.passport["target"].get("dtype")):
        differing.append("dtype")
    if not _same_target(fingerprint.passport["target"], settings.target):
        differing.append("target")
    if "prompts" not in differing and not _same_prompts(fingerprint.passport["prompts"].get("source_sha256"), settings.prompts):
        differing.append("prompts")
    return tuple(differing)


def _same_target(about: dict[str, Any], target: str) -> bool:
    from elsi_lib.assets import ALIASES, ASSETS

    if Path(target).expanduser().exists():
        from elsi_lib.loading import find

        return about.get("revision") == find(target, None, False, False).revision
    name = target.strip().lower()
    if asset := ASSETS.get(ALIASES.get(name, name)):
        return about.get("name") == asset.name and asset.sha256 in ("", about.get("revision"))
    return about.get("source") == target


def _same_prompts(held: str | None, prompts: str) -> bool:
    from elsi_lib.assets import ASSETS, sha256_file

    if held is None or not (path := Path(prompts).expanduser()).is_file():
        return prompts not in ASSETS or ASSETS[prompts].sha256 in ("", held)
    return sha256_file(path) == held


def _calibration_of(fingerprint: Fingerprint) -> dict[str, Any]:
    passport = fingerprint.passport
    names = ("rho", "block", "seed", "bootstrap", "spectra")
    return {name: passport["parameters"][name] for name in names} | {
        name: passport["prompts"].get(name) for name in ("source", "asked", "max_tokens")
    }


def target_slug(target: str) -> str:
    """Folder name of a target: its alias, the last part of its hub id, or the name of its file or folder."""
    from elsi_lib.assets import ALIASES

    return _slug(ALIASES.get(target, target).rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf"))


def _file_slug(source: str) -> str:
    return source.rstrip("/").rsplit("/", 1)[-1]


def _slug(value: Any) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", _file_slug(str(value)).lower()).strip("-.")
