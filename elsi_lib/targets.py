"""A target model: loading it, and tapping its decoder blocks.

Layer j is the raw residual output of 0-based decoder block j, before any final norm; :mod:`elsi_lib.layers` has its names
elsewhere.

Where the weights come from is in :mod:`elsi_lib.loading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from elsi_lib import loading
from elsi_lib.errors import ElsiError


class Target:
    """A causal language model in evaluation mode, without gradients, whose decoder blocks can be tapped.

    Attributes: ``name`` (short, fit for file names), ``source`` (hub id, asset or file name), ``revision`` (hub commit,
    or sha256 of the file; for a folder the sha256 of its weights' hashes; None for a model made in memory), ``model``,
    ``tokenizer`` (or None), ``blocks`` (the N decoder blocks), ``num_layers`` N, ``hidden_size`` d, ``vocab_size`` (rows
    of the embedding), ``max_tokens`` (longest prompt; None where the model states none), ``device``, ``dtype``.

    Raises:
        ElsiError: an encoder-decoder, a model that is not causal, one without a list of N blocks, or a tokenizer that
            can produce ids beyond the embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        name: str = "model",
        source: str = "in memory",
        revision: str | None = None,
    ) -> None:
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
        self.source, self.revision, self.tokenizer = source, revision, tokenizer
        self.model = model.eval().requires_grad_(False)
        loading.check_kind(model.config, source)
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self.blocks = find_blocks(model, self.num_layers, source)
        embedding: Tensor = model.get_input_embeddings().weight
        self.vocab_size, self.device, self.dtype = embedding.shape[0], embedding.device, embedding.dtype
        if tokenizer is not None:
            _check_vocabulary(tokenizer, self.vocab_size, source)
        self._check_causal()

    def run(
        self, ids: Sequence[int] | Tensor, on_block: Callable[[int, Tensor], None] | None = None
    ) -> tuple[list[Tensor] | None, Tensor]:
        """One forward pass over one prompt, batch 1, unpadded (padding moves states in bfloat16), without a cache.

        Args:
            ids: T token ids, a list or a 1-D integer tensor.
            on_block: called as ``on_block(j, state)`` inside the hook of block j, in the order of the blocks, with
                state (T, d). The target keeps no reference, so memory holds one layer and not N.

        Returns:
            ``(states, logits)``: N raw block outputs, each (T, d) in the model's dtype, views and not copies, or None with
            ``on_block``; and the logits (T, V). All are inference tensors: clone them before using autograd.

        Raises:
            ElsiError: no ids, ids outside the vocabulary, more than ``max_tokens``; blocks that do not each run once and
                in order, or that give no (1, T, d) state.
        """
        ids = self._checked(ids)
        states: list[Tensor] | None = [] if on_block is None else None
        taken = 0

        def tap(j: int) -> Callable[[nn.Module, tuple, Any], None]:
            def hook(_module: nn.Module, _inputs: tuple, output: Any) -> None:
                nonlocal taken
                state = output[0] if isinstance(output, tuple) else output
                shape = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
                if shape != (1, len(ids), self.hidden_size):
                    raise ElsiError(
                        f"block {j} of {self.source} gives {shape}, not a residual state of shape "
                        f"{(1, len(ids), self.hidden_size)}: this architecture is not supported"
                    )
                if j != taken:
                    raise ElsiError(f"block {j} of {self.source} ran where block {taken} was due: not supported")
                taken += 1
                if states is None:
                    on_block(j, state[0])
                else:
                    states.append(state[0])

            return hook

        handles = []
        try:
            for j, block in enumerate(self.blocks):
                handles.append(block.register_forward_hook(tap(j)))
            with torch.inference_mode():
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        if taken != self.num_layers:
            raise ElsiError(f"only {taken} of the {self.num_layers} blocks of {self.source} ran: not supported")
        return states, logits

    def describe(self) -> dict[str, Any]:
        """What the passport of a result says of its target. No path of this machine is in it."""
        return {
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            "architecture": type(self.model).__name__,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "transformers": transformers.__version__,
        }

    def _checked(self, ids: Sequence[int] | Tensor) -> Tensor:
        ids = torch.as_tensor(ids)
        if ids.numel() == 0:
            raise ElsiError("an empty prompt: give at least one token id")
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ElsiError(f"token ids of shape {tuple(ids.shape)}, {ids.dtype}: give one prompt, a list of integers")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise ElsiError(
                f"a prompt of {len(ids)} tokens, but {self.source} takes at most {self.max_tokens}: truncate it"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ElsiError(
                f"token id {low if low < 0 else high} outside 0..{self.vocab_size - 1} of {self.source}: encode the "
                "prompt with the target's own tokenizer"
            )
        return ids.to(self.device, torch.long)

    def _check_causal(self) -> None:
        """Two prompts that differ in their second token must agree in the first token's logits. Configurations do not
        tell: BERT's has a causal class, and GPT-NeoX's says it is no decoder."""
        probe = torch.tensor([[0, 1], [0, 2]], device=self.device) % self.vocab_size
        with torch.inference_mode():
            first, other = self.model(input_ids=probe, use_cache=False).logits[:, 0].float()
        if (first - other).abs().max() > 4 * torch.finfo(self.dtype).eps * first.abs().max():
            raise ElsiError(
                f"{self.source} ({self.model.config.model_type}) is not causal: a token's logits depend on the tokens "
                "after it; a target must be a decoder-only causal language model"
            )


def find_blocks(model: nn.Module, num_layers: int, of: str = "the model") -> nn.ModuleList:
    """The one list of ``num_layers`` blocks of a decoder; lists within a block (experts) do not count.

    Raises:
        ElsiError: none, or more than one.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for root in (decoder, model):
        if not isinstance(root, nn.Module):
            continue
        lists = {n: m for n, m in root.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers}
        outer = [m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)]
        if len(outer) == 1:
            return outer[0]
        if len(outer) > 1:
            break
    found = "more than one list" if outer else "no list"
    raise ElsiError(
        f"{of} ({type(model).__name__}) has {found} of {num_layers} decoder blocks (num_hidden_layers): this "
        "architecture is not supported"
    )


def _check_vocabulary(tokenizer: Any, rows: int, source: str) -> None:
    """Added tokens beyond the embedding are let pass where neither the template nor a special role uses them: Gemma 3's
    text models ship one for images. ``run`` refuses them all the same."""
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows}
    used = f"{tokenizer.chat_template or ''} {' '.join(map(str, tokenizer.special_tokens_map.values()))}"
    spare = {token for token in beyond if token in tokenizer.get_added_vocab() and token not in used}
    if beyond.keys() - spare:
        raise ElsiError(
            f"the tokenizer of {source} has ids up to {max(beyond.values())}, its embedding {rows} rows: tokenizer and "
            "model do not belong together"
        )


# Loading


def load_target(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Target:
    """Load a target: an asset name or alias, a hub id ``owner/name``, a folder of safetensors, or a GGUF file.

    Args:
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: bfloat16 where the device computes in it (a GPU with
            native support; a CPU with AMX or AVX-512 bf16 instructions), else float32.
        device: ``auto`` is ``cuda`` where there is one, else ``cpu``; or a name that torch knows.
        revision: commit, tag or branch of a hub id.
        trust_remote_code: run code that comes with the model. Off unless asked for.
        progress: bars and notices on standard error, where that is a terminal.

    Raises:
        ElsiError: an unknown name, a missing path, a model that cannot be a target (see :class:`Target`), weights that
            lack tensors, a GGUF file whose RoPE scaling would be lost.
        AssetError: a target that cannot be fetched, verified or kept.
    """
    place = loading.pick_device(device)
    kind = loading.pick_dtype(dtype, place)
    found = loading.find(str(name), revision, trust_remote_code, progress)
    model, tokenizer = loading.load(found, kind, place, trust_remote_code, progress)
    return Target(model, tokenizer, name=found.name, source=found.source, revision=found.revision)
