"""Where a target's weights come from: asset, hub id, folder of safetensors or GGUF file -> model and tokenizer.

GGUF weights are dequantised to dense weights of the asked dtype. Reading a GGUF file takes transformers 5.24 half a
minute to a minute, since it parses the vocabulary four times, so the result is kept as safetensors under
``<cache>/converted``, from where it loads in a second.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import nn
from tqdm import auto as tqdm_auto

from elsi_lib import assets, catalogue
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.progress import watched

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # llama.cpp's names


@dataclass(frozen=True)
class Found:
    """A target on this machine: ``path`` is a folder of safetensors or a GGUF file, ``source`` what the user may call it,
    ``revision`` a hub commit or a sha256."""

    name: str
    source: str
    revision: str
    path: Path


def find(name: str, revision: str | None = None, trust_remote_code: bool = False, progress: bool = True) -> Found:
    """Where the target ``name`` lies, fetched if need be. An existing path comes before an asset, an asset before a hub id.

    Raises:
        ElsiError: a missing path, an unknown name, a data set, a revision of something that has none.
        AssetError: a target that cannot be fetched or verified.
    """
    path = Path(name).expanduser()
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    if path.exists():
        if revision is not None:
            raise ElsiError(f"revision {revision!r} given for the local {path.name}: it applies to hub ids only")
        return _local(path.absolute(), progress)
    if path.suffix == ".gguf" or name.startswith((".", "~", "/")) or "\\" in name or ("/" in name and not hub_id):
        raise ElsiError(f"no such file or folder: {name}")
    if hub_id:
        patterns = (*catalogue.HUB_FILES, "*.py") if trust_remote_code else catalogue.HUB_FILES
        folder = assets.fetch_hub(catalogue.HubRepo(name, revision, patterns=patterns), progress)
        return Found(name.split("/")[1], name, assets.hub_commit(folder) or str(revision), folder)
    try:
        asset = assets.find_asset(name)
    except ElsiError as err:
        raise ElsiError(f"{err}; or name a hub id (owner/name), a folder or a .gguf file") from None
    if asset.kind != "target":
        raise ElsiError(f"{asset.name} is data, not a target: `elsi targets` lists the targets")
    if revision is not None:
        raise ElsiError(f"revision {revision!r} given for the asset {asset.name}: name a hub id (owner/name) instead")
    path = assets.fetch(asset.name, progress)
    return Found(asset.name, asset.name, asset.sha256 or _local(path, progress).revision, path)


def _local(path: Path, progress: bool) -> Found:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ElsiError(f"{path.name} is no model: name a .gguf file, or the folder of its safetensors")
        return Found(path.stem, path.name, assets.sha256_file(path, progress), path)
    weights, ggufs = sorted(path.glob("*.safetensors")), sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() or not weights:
        if len(ggufs) == 1:
            return _local(ggufs[0], progress)
        hint = "name one of its .gguf files" if ggufs else "a target's folder holds config.json and *.safetensors"
        raise ElsiError(f"{path.name} is no folder of a model: {hint}")
    revision = assets.hub_commit(path)
    if revision is None:
        files = [path / "config.json", *weights]
        hashes = "".join(f"{file.name} {assets.sha256_file(file, progress)}\n" for file in files)
        revision = hashlib.sha256(hashes.encode()).hexdigest()
    return Found(path.name, path.name, revision, path)


def load(
    found: Found, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False, progress: bool = True
) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a target.

    Raises:
        ElsiError: files that are no decoder's, are broken, or lack weights; a GGUF file whose RoPE scaling would be lost.
        AssetError: the dense weights of a GGUF file cannot be kept.
    """
    if found.path.is_dir():
        return _read(found.path, found.source, dtype, device, trust_remote_code, progress)
    kind = str(dtype).removeprefix("torch.")
    folder = assets.cache_dir() / "converted" / f"{found.revision[:16]}-{kind}-{transformers.__version__}"
    if not folder.is_dir():
        notice = Console(stderr=True).status(f"converting {found.path.name} to {kind}, once: about a minute")
        with notice if progress and watched() else nullcontext():
            _convert(found, dtype, folder)
    try:
        return _read(folder, found.source, dtype, device, False, progress)
    except ElsiError as err:
        raise AssetError(f"{err}; its converted copy may be damaged: delete {folder}") from err


def _convert(found: Found, dtype: torch.dtype, folder: Path) -> None:
    """GGUF file -> folder of safetensors, which appears at once and whole."""
    model, tokenizer = _read(found.path, found.source, dtype, torch.device("cpu"), False, progress=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _bars(False), tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as scratch:
            part = Path(scratch) / folder.name
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            if not folder.is_dir():  # else another process was faster, with the same result
                part.rename(folder)
    except (OSError, RuntimeError) as err:  # safetensors reports a full disk as its own RuntimeError
        if folder.is_dir():
            return
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
        free = shutil.disk_usage(folder.parent).free / 1e6 if folder.parent.is_dir() else 0.0
        raise AssetError(
            f"{found.source}: its dense weights ({size:,.0f} MB) cannot be kept in {folder.parent} ({free:,.0f} MB free; "
            f"{' '.join(str(err).split())}): set ELSI_CACHE to a writable folder with room"
        ) from err


def _read(
    path: Path, source: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, progress: bool
) -> tuple[nn.Module, Any]:
    """A folder or a GGUF file, by transformers. Weights that it would draw at random are an error and not a warning."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    weights: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    if path.is_file():
        path, options = path.parent, {"gguf_file": path.name}
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if device.type != "cpu":
        weights["device_map"] = {"": device}
    with _bars(progress):
        try:
            config = transformers.AutoConfig.from_pretrained(path, **options)
            check_kind(config, source)
            if "gguf_file" in options:
                _check_rope(path / options["gguf_file"], config)
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(path, **weights, **options)
        except ElsiError:
            raise
        except Exception as err:  # what transformers raises for a file that it cannot read depends on the architecture
            reason = " ".join(str(err).split())
            if "trust_remote_code" in reason:
                reason = "it comes with code of its own, which is not run: pass trust_remote_code=True if you trust it"
            raise ElsiError(f"{source} cannot be loaded as a causal language model: {reason[:300]}") from err
    if lacking := sorted(str(name) for name in (*report["missing_keys"], *report["mismatched_keys"])):
        raise ElsiError(
            f"the weights of {source} lack or misshape {len(lacking)} tensors of {type(model).__name__}, first "
            f"{lacking[0]}: they are incomplete, or of a model without a language model head"
        )
    if odd := next((name for name, p in model.named_parameters() if not p.is_floating_point()), None):
        raise ElsiError(f"{source}: {odd} stayed quantised: use the model's safetensors instead")
    return model, tokenizer


def check_kind(config: Any, source: str) -> None:
    """Raises ElsiError for an encoder-decoder. What else is not causal shows when it runs, see ``Target``."""
    if getattr(config, "is_encoder_decoder", False):
        raise ElsiError(
            f"{source} is an encoder-decoder model ({config.model_type}): a target must be a decoder-only causal "
            "language model"
        )


def _check_rope(path: Path, config: Any) -> None:
    """transformers 5.24 reads neither rope_freqs nor the scaling keys of most architectures: Llama 3.1 would load, answer
    short prompts well, and have wrong positions."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    field = reader.fields.get(f"{arch}.rope.scaling.type")
    signs = [tensor.name for tensor in reader.tensors if tensor.name in ROPE_TENSORS]
    if field is not None and field.contents() != "none":
        signs.append(f"{arch}.rope.scaling.type = {field.contents()}")
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(kind.get("rope_type") for kind in rope.values() if isinstance(kind, dict))}
    if signs and not kinds - {None, "default"}:
        raise ElsiError(
            f"{path.name} scales its RoPE ({', '.join(signs)}), which transformers {transformers.__version__} loses when "
            "it reads a GGUF file: use the model's safetensors instead (a hub id or a folder)"
        )


def pick_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one, else cpu. Raises ElsiError for a device that cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as err:
        raise ElsiError(f"device {name!r} cannot be used ({str(err).splitlines()[0]}): try 'cpu' or 'auto'") from err
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device computes in it: a GPU with native support, a CPU with AMX or AVX-512 bf16
    instructions; else float32. Raises ElsiError for an unknown name."""
    if name == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            cpu = getattr(torch.cpu, "get_capabilities", dict)()  # absent in older torch; float32 is right everywhere
            native = device.type == "cpu" and bool(cpu.get("amx_bf16") or cpu.get("avx512_bf16"))
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise ElsiError(f"dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Progress bars of transformers only where somebody watches. Its GGUF reader takes bars from tqdm directly, past its
    own switch, so tqdm is told."""
    if progress and watched():
        yield
        return
    init = tqdm_auto.tqdm.__init__
    tqdm_auto.tqdm.__init__ = partialmethod(init, disable=True)
    try:
        yield
    finally:
        tqdm_auto.tqdm.__init__ = init
