"""A trained draft as one folder that serving engines and training codes load: tensors, config.json with their ids, a model card.

One checkpoint serves all: names of EAGLE's release, ids in both numberings. A loader that meets ids it cannot capture, or tensors it
does not know, often drops them without a word and drafts badly; so what a loader would get wrong is refused here, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsi_lib.choice import KEY
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.files import replaced
from elsi_lib.fingerprint import write_tensors
from elsi_lib.layers import engine_ids
from elsi_lib.provenance import code_version
from elsi_lib.speculative.card import model_card
from elsi_lib.speculative.checkpoint import CONFIG, WEIGHTS, read_draft
from elsi_lib.speculative.draft import DraftConfig

FORMAT = "elsi-export-1"
CARD = "README.md"
DTYPES = ("bfloat16", "float16", "float32")


def _sglang(config: DraftConfig) -> str:
    if len(config.layers) == 1:
        return "it applies fc only where the captured states are wider than the draft's, so one layer would skip it"
    return ""


def _specforge(config: DraftConfig) -> str:
    return "it has no norm over the concatenation before fc, only one per layer" if config.norm_before_fc == "concat" else ""


def _eagle(config: DraftConfig) -> str:
    N, ids = config.num_target_layers, tuple(j + 1 for j in config.layers)
    if ids != (fixed := (2, N // 2, N - 3)):
        return f"its code captures ids {', '.join(map(str, fixed))} of a target of {N} layers, whatever the draft's config.json says"
    if config.norm_before_fc != "none":
        return "it has no norm before fc"
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        return f"its heads have {config.hidden_size} / {config.num_attention_heads} features, not {config.head_dim}"
    return ""


@dataclass(frozen=True)
class Loader:
    """A program that loads drafts: its title, why it cannot load one (besides the layers' names), and what was read of it."""

    title: str
    refuses: Callable[[DraftConfig], str]
    read: str


LOADERS: dict[str, Loader] = {
    "sglang": Loader("SGLang", _sglang, "sglang 0.5.23: srt/models/llama_eagle3.py, spec_aux_hidden_state.py, llama.py, qwen2.py"),
    "vllm": Loader("vLLM", lambda config: "", "models/llama_eagle3.py with num_aux_hidden_states, and the worker's layer ids"),
    "specforge": Loader("SpecForge", _specforge, "sgl-project/SpecForge a6b6b02: modeling/draft/llama3_eagle.py"),
    "speculators": Loader("speculators", lambda config: "", "speculators 0.9.0: models/eagle3/core.py, convert/eagle"),
    "eagle": Loader("EAGLE", _eagle, "SafeAILab/EAGLE cb7e084: model/cnets.py, ea_model.py, modeling_llama_kv.py"),
}


@dataclass(frozen=True)
class Export:
    """What :func:`export_draft` wrote: the folder, the draft's layers, the ``ids`` of every loader that can take the draft, and
    ``reasons``, why the others cannot, each the rest of a sentence that begins with the loader's name."""

    folder: Path
    target: str
    layers: tuple[int, ...]
    dtype: str
    ids: dict[str, tuple[int, ...]]
    reasons: dict[str, str]


def loader_ids(config: DraftConfig) -> dict[str, tuple[int, ...] | str]:
    """For every loader its ids of the draft's layers, or why it cannot take this draft (one line, beginning with its name)."""
    found = {name: ids for name, ids in engine_ids(config.layers, config.num_target_layers).items() if name in LOADERS}
    for name, loader in LOADERS.items():
        if not isinstance(found[name], str) and (reason := loader.refuses(config)):
            found[name] = f"{name} cannot take this draft: {reason}"
    return {name: found[name] for name in LOADERS}


def export_config(config: DraftConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of an export: Llama fields, and the layer ids under the keys of every engine that can capture them.

    SGLang and SpecForge read ``eagle_config`` (ids j), vLLM the top level (ids j + 1). ``num_aux_hidden_states`` sizes ``fc`` in
    SGLang and vLLM, whose default is three. ``norm_output`` stays out: its absence means the recurrent state before ``norm``
    everywhere, its values differ in meaning.
    """
    ids = loader_ids(config)
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    content = config.llama() | {"rope_scaling": None, "torch_dtype": dtype, "num_aux_hidden_states": len(config.layers)}
    if not isinstance(ids["sglang"], str):
        nested[KEY] = list(ids["sglang"])
    if not isinstance(ids["vllm"], str):
        content[KEY] = list(ids["vllm"])
    if config.norm_before_fc != "none":
        content["fc_norm" if config.norm_before_fc == "each" else "norm_before_fc"] = True
    return content | {"eagle_config": nested}


def export_draft(
    draft: str | Path, folder: str | Path, *, engines: Sequence[str] = (), dtype: str = "bfloat16"
) -> Export:
    """Write ``model.safetensors``, ``config.json`` and ``README.md`` for a draft that ``save_draft`` wrote.

    Args:
        draft: its folder; no target is needed.
        folder: new, empty, or an earlier export, whose files are replaced one by one, config.json last.
        engines: of :data:`LOADERS`; each must be able to take the draft. The ids of all that can are written in any case.
        dtype: of the weights, one of :data:`DTYPES`. ``d2t`` stays int64 offsets and ``t2d`` bool.

    Raises:
        ElsiError: no draft, an engine that is unknown or cannot take it, a folder that holds something else, an unknown dtype,
            weights that are not finite or leave the range of ``dtype``.
        AssetError: the folder cannot be written.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ElsiError(f"dtype {dtype!r} of an export: one of {', '.join(DTYPES)}")
    if unknown := [name for name in engines if name not in LOADERS]:
        raise ElsiError(f"no engine {unknown[0]!r} to export for: one of {', '.join(LOADERS)}")
    config, _, tensors, passport = read_draft(draft)
    found = loader_ids(config)
    for name in engines:
        if isinstance(reason := found[name], str):
            raise ElsiError(f"{reason}; leave out --engine {name}, or train a draft that it can take")
    _check_folder(folder)
    tensors = {name: _cast(name, tensor, dtype) for name, tensor in tensors.items()}
    ids = {name: given for name, given in found.items() if not isinstance(given, str)}
    reasons = {name: given.removeprefix(f"{name} ") for name, given in found.items() if isinstance(given, str)}
    own = {
        "format": FORMAT,
        "layers": list(config.layers),
        "num_target_layers": config.num_target_layers,
        "target": (passport.get("target") or {}).get("name"),
        "elsi_lib": code_version()["elsi_lib"],
    }
    card = model_card(config, passport, ids, reasons, {name: loader.title for name, loader in LOADERS.items()}, dtype)
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})  # transformers refuses any other format
    _write(folder / CARD, card)
    _write(folder / CONFIG, json.dumps(export_config(config, dtype) | {"elsi": own}, indent=2, sort_keys=True) + "\n")
    return Export(folder, str(own["target"] or "unknown"), config.layers, dtype, ids, reasons)


def _cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(getattr(torch, dtype))
    if not torch.isfinite(tensor).all():
        raise ElsiError(f"{name} of the draft holds values that are not finite: it diverged in training; take an earlier checkpoint")
    if not torch.isfinite(cast).all():
        raise ElsiError(f"{name} of the draft reaches {tensor.abs().max():.3g}, beyond {dtype}: export it as bfloat16 or float32")
    return cast


def _check_folder(folder: Path) -> None:
    """Nothing but an earlier export is written over."""
    if folder.exists() and not folder.is_dir():
        raise ElsiError(f"-o {folder} is a file: name a new folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["elsi"]["format"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != FORMAT:
        raise ElsiError(f"-o {folder} holds something else than an export, and is left as it is: name a new or an empty folder")


def _write(path: Path, text: str) -> None:
    try:
        with replaced(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AssetError(f"{path} cannot be written ({error}): check permissions and the space on the disk") from error
