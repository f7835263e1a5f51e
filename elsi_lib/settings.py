"""What a notebook or a command was asked to do: parameters, presets, and the folders where results live."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
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
        if self.seed < 0:
            raise ElsiError(f"seed = {self.seed}: a whole number from 0")

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
        """Folder of this run's fingerprint, survey and study: the target, and what differs from the defaults, so that runs never
        overwrite each other. A local model has a hash of its place in it, a prompt file one of its contents."""
        default = Settings()
        parts = {
            "prompts": prompts_slug(self.prompts) if prompts_slug(self.prompts) != default.prompts else "",
            "rho": float(self.rho) if self.rho != default.rho else "",
            "block": self.block if self.block != default.block else "",
            "seed": self.seed or "",
        }
        named = [f"{name}-{value}" for name, value in parts.items() if value != ""]
        named += [self.preset] if self.preset != default.preset else []
        named += [f"samples-{self.samples}"] if self.size("samples") != PRESETS[self.preset]["samples"] else []
        return "@".join([target_slug(self.target), *(["_".join(named)] if named else [])])

    @property
    def shown_name(self) -> str:
        """Folder of this run's figures and tables: :attr:`run_name`, and what else they are made of where that is not the default."""
        beside = target_slug(self.beside) if self.beside else "none"
        named = [f"beside-{beside}"] if beside != target_slug(Settings().beside) else []
        named += [f"evaluation-{self.evaluation}"] if self.evaluation != EVALUATIONS[0] else []
        return "".join([self.run_name, *(["_" if "@" in self.run_name else "@", "_".join(named)] if named else [])])

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
            "source": _known(self.prompts) or Path(self.prompts).name,
            "asked": self.size("samples"),
            "max_tokens": self.size("max_tokens"),
        }

    @property
    def output(self) -> Path:
        """Folder where this run writes: ELSI_RESULTS if set, else data/results of the project."""
        return results_root() / self.run_name

    @property
    def shown(self) -> Path:
        """Folder where this run writes figures and tables, beside :attr:`output` or the same."""
        return results_root() / self.shown_name


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
    if not same_target(fingerprint.passport["target"], settings.target):
        differing.append("target")
    if "prompts" not in differing and not _same_prompts(fingerprint.passport["prompts"].get("source_sha256"), settings.prompts):
        differing.append("prompts")
    return tuple(differing)


def same_target(about: Mapping[str, Any], target: str) -> bool:
    """Whether a passport's ``target`` entry is of the target of that name: a local one counts by content, a hub id by name."""
    from elsi_lib.assets import ASSETS

    if (path := Path(target).expanduser()).exists():
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        seen = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        return about.get("revision") == _revision(path.absolute(), seen)
    if asset := ASSETS.get(_known(target)):
        return about.get("name") == asset.name and asset.sha256 in ("", about.get("revision"))
    return about.get("source") == target


@cache
def _revision(path: Path, seen: tuple) -> str:
    """Hash of a local target, read once while its files are those ``seen``."""
    from elsi_lib.loading import find

    return find(str(path), None, False, False).revision


def _same_prompts(held: str | None, prompts: str) -> bool:
    from elsi_lib.assets import ASSETS, stamped_sha256

    if known := _known(prompts):
        return ASSETS[known].sha256 in ("", held)
    return held is None or not (path := Path(prompts).expanduser()).is_file() or stamped_sha256(path) == held


def _calibration_of(fingerprint: Fingerprint) -> dict[str, Any]:
    passport = fingerprint.passport
    names = ("rho", "block", "seed", "bootstrap", "spectra")
    return {name: passport["parameters"][name] for name in names} | {
        name: passport["prompts"].get(name) for name in ("source", "asked", "max_tokens")
    }


def public_name(target: str) -> str:
    """What a passport calls a target: its known name, its hub id, or for a local one its folder of results; never a path."""
    return _known(target) or (target if _is_hub_id(target) else target_slug(target))


def target_slug(target: str) -> str:
    """Folder name of a target: its known name, ``owner--name`` of a hub id, or name and hash of place of a local file or folder."""
    path = Path(target).expanduser()
    if path.exists():
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        return f"{_slug(path.absolute().name.removesuffix('.gguf'))}-{place[:8]}"
    if _is_hub_id(target):
        return "--".join(map(_slug, target.split("/")))
    return _known(target) or "--".join(map(_slug, path.name.removesuffix(".gguf").split("--")))


def prompts_slug(prompts: str) -> str:
    """The same for prompts: a known data set's name, or name and hash of the contents of a file."""
    from elsi_lib.assets import stamped_sha256

    path = Path(prompts).expanduser()
    if known := _known(prompts):
        return known
    return _slug(path.name) + (f"-{stamped_sha256(path)[:8]}" if path.is_file() else "")


def _known(name: str) -> str:
    """The name of a known target or data set, by name or alias in any case; "" for any other, and for a target that lies here."""
    from elsi_lib.assets import ALIASES, ASSETS

    key = name.strip().lower()
    key = ALIASES.get(key, key)
    local = key in ASSETS and ASSETS[key].kind == "target" and Path(name).expanduser().exists()
    return key if key in ASSETS and not local else ""


def _is_hub_id(target: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", target) is not None and not Path(target).exists()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-.")
