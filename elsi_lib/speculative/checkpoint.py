"""A draft on disk: safetensors and config.json under the names of EAGLE's release, read back only for its own target."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.files import replaced
from elsi_lib.fingerprint import read_tensors, write_tensors
from elsi_lib.selection import check_layers
from elsi_lib.speculative.draft import Draft, DraftConfig, target_identity
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

FORMAT = "elsi-draft-1"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# Of Target.describe(): dtype and package versions may differ between training and use.
_SIZES = ("architecture", "num_layers", "hidden_size", "vocab_size", "parameters")


def save_draft(draft: Draft, folder: str | Path, passport: dict[str, Any] | None = None) -> Path:
    """Write ``model.safetensors`` and ``config.json``; each takes the old one's place when it is whole.

    ``passport`` is added to what the draft's own says. Both files carry the hash of everything, so a pair cut in the middle is
    told apart by :func:`read_draft`.

    Raises:
        AssetError: the folder cannot be written.
    """
    folder, tensors = Path(folder), {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    content = {
        **draft.config.llama(),
        "elsi": {"format": FORMAT, "config": dataclasses.asdict(draft.config) | {"layers": list(draft.config.layers)}},
        "passport": draft.passport | (passport or {}),
    }
    content = json.loads(json.dumps(content))  # as it will be read
    digest = _digest(tensors, content)
    content["elsi"]["sha256"] = digest
    write_tensors(folder / WEIGHTS, tensors, {"format": FORMAT, "sha256": digest})
    try:
        with replaced(folder / CONFIG) as part:
            part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise AssetError(f"{folder / CONFIG} cannot be written ({error}): check permissions and the space on the disk") from error
    return folder


def load_draft(folder: str | Path, target: Target, layers: Sequence[int] | None = None) -> Draft:
    """Read a draft of ``target``, in the dtype in which it was saved, onto the target's device.

    Raises:
        ElsiError: no draft, a damaged or half-written one, one of another target, or of another layer set than ``layers``.
    """
    config, vocabulary, tensors, passport = read_draft(folder)
    _check_target(folder, passport, target)
    if layers is not None and (wanted := check_layers(layers, target.num_layers, target.name)) != config.layers:
        raise ElsiError(f"{folder} is a draft of layers {config.layers}, not of {wanted}: train one of these, or ask for those")
    draft = Draft(config, vocabulary, target.model.get_input_embeddings().weight, passport=passport)
    try:
        draft.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ElsiError(f"tensors of the draft at {folder} do not fit its {CONFIG}: {' '.join(str(error).split())}") from error
    return draft.to(target.device)


def read_draft(folder: str | Path) -> tuple[DraftConfig, DraftVocabulary, dict[str, Tensor], dict[str, Any]]:
    """Configuration, draft vocabulary, tensors and passport of a saved draft, checked against each other; no target is needed.

    Raises:
        ElsiError: a file is missing, truncated, edited, or not a draft of this library; a broken draft vocabulary.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        own = content["elsi"]
        if own["format"] != FORMAT:
            raise ElsiError(f"{folder / CONFIG} is of format {own['format']!r}, expected {FORMAT!r}")
        digest, fields, passport = own.pop("sha256"), dict(own["config"]), content["passport"]
    except FileNotFoundError as error:
        raise ElsiError(f"no draft at {folder}: {CONFIG} is missing; `elsi train` makes one") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ElsiError(f"{folder / CONFIG} is not the configuration of a draft of this library, or is damaged ({error!r})") from error
    tensors, header = read_tensors(folder / WEIGHTS, FORMAT, "a draft")
    if header.get("sha256") != digest:
        raise ElsiError(f"{WEIGHTS} and {CONFIG} of {folder} are of different drafts: the writing was cut short; save it again")
    if _digest(tensors, content) != digest:
        raise ElsiError(f"the draft at {folder} was edited after it was written: its content does not match its hash; save it again")
    try:
        config = DraftConfig(**(fields | {"layers": tuple(fields["layers"])}))
    except (KeyError, TypeError) as error:
        raise ElsiError(f"{folder / CONFIG} names other sizes than a draft has ({error}): another version wrote it") from error
    if {"d2t", "t2d"} - tensors.keys():
        raise ElsiError(f"the draft at {folder} lacks d2t or t2d: without its draft vocabulary it cannot be used")
    return config, DraftVocabulary.from_tensors(tensors["d2t"], tensors["t2d"], str(folder)), tensors, passport


def weights_hash(draft: Draft) -> str:
    """Hash of a draft's weights as they are in memory, in 16 hex digits."""
    digest = hashlib.sha256()
    for weight in draft.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _digest(tensors: dict[str, Tensor], content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy())  # as bytes: NumPy has no bfloat16
    return digest.hexdigest()


def _check_target(folder: str | Path, passport: dict[str, Any], target: Target) -> None:
    trained, given = passport.get("target") or {}, target_identity(target)
    named = [name for name in _SIZES if trained.get(name) != given[name]]
    if trained.get("revision") and given["revision"] and trained["revision"] != given["revision"]:
        named.append("revision")
    if not named:
        norms = given["embedding_norms"]
        close = torch.isclose(torch.tensor(trained.get("embedding_norms") or math.nan), torch.tensor(norms), rtol=0.01, atol=1e-6)
        if not close.all():
            named = ["embedding_norms"]
    if named:
        name = named[0]
        raise ElsiError(
            f"the draft at {folder} belongs to target {trained.get('name')}, not to {target.name} ({name} {trained.get(name)} against "
            f"{given[name]}): load that target, or train a draft of this one"
        )
