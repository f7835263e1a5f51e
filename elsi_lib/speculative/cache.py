"""Keys and values of a target in preallocated memory, and forward passes over any places of it.

A place is an index into the cache; a token's rotary position is its own affair. So one cache serves text written token by token, a
batch of unequal texts, and trees of drafted tokens, whose rows see their ancestors only. While a pass runs, the target attends
through :func:`grouped_attention`, which reads the cache in place: the queries of a key-value head become rows of one product, and no
key or value is repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from elsi_lib.errors import ElsiError
from elsi_lib.targets import Target

_NAME = "elsi_grouped"
_KINDS = {"full_attention", "sliding_attention"}
_PROBE = 7  # tokens of the pass that compares a target with and without a cache
_GROUPED: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # models that passed the comparison


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of all queries of a key-value head at once, with transformers' signature.

    Args:
        query: (n, heads, T, head_dim).
        key, value: (n, kv_heads, S, head_dim), not repeated.
        attention_mask: (n or 1, 1, T, S) bool, true where a row sees a key.
        scaling: of the scores; head_dim^-0.5 where None.
        softcap: c in c * tanh(score / c), before the mask.
        sliding_window: a row sees keys whose position is less than this many before its own.
        s_aux: (heads,) logits of attention sinks: they take their share of the weights, and give no value.

    Returns:
        (n, T, heads, head_dim) and None, as transformers expects.

    Raises:
        ElsiError: a position bias, which this function cannot serve.
    """
    if more.get("position_bias") is not None:
        raise ElsiError(f"{type(module).__name__} attends with a position bias: decoding this architecture is not supported")
    cache = _AT_WORK[-1]
    cache.attended += 1
    n, heads, T, _ = query.shape
    pairs = key.shape[1]
    group = heads // pairs
    mask = cache.within(attention_mask, sliding_window)
    if group > 1:
        query = query.reshape(n, pairs, group * T, query.shape[-1])
        mask = mask if T == 1 else mask.repeat(1, 1, group, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None or s_aux is not None:
        sinks = None if s_aux is None else s_aux.view(1, pairs, group, 1).repeat_interleave(T, 2)
        out = _by_steps(query, key, value, mask, scaling, softcap, sinks)
    elif T == 1 and key.is_contiguous() and key.device.type == "cpu":
        out = _one_row(query, key, value, cache.bias(mask, query.dtype), scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.reshape(n, heads, T, -1).transpose(1, 2), None


def _one_row(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Attention with one token per text as two batched products: on a CPU, several times faster than the fused kernel, provided that
    keys and values lie without gaps."""
    n, pairs, rows, width = query.shape
    places = key.shape[2]
    query, key, value = query.reshape(n * pairs, rows, width), key.view(n * pairs, places, -1), value.view(n * pairs, places, -1)
    scores = torch.baddbmm(query.new_zeros(1), query, key.transpose(1, 2), beta=0, alpha=scaling).view(n, pairs, rows, places)
    return torch.bmm(scores.add_(bias).softmax(-1).view(n * pairs, rows, places), value)


def _by_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores and sinks (1, kv_heads, rows, 1), which the fused kernels lack."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(len(scores), -1, -1, -1)], -1)
    return scores.softmax(-1, torch.float32)[..., : key.shape[2]].to(query.dtype) @ value


class TargetCache(Cache):
    """Keys and values of every layer, (slots, kv_heads, capacity, head_dim), allocated at the first forward pass.

    Attributes: ``slots``, ``capacity`` (places per slot), ``keys`` and ``values`` (a tensor per layer), ``positions`` ((slots,
    capacity) of the token written at each place).

    Raises:
        ElsiError: slots or capacity below 1.
    """

    is_compileable = False

    def __init__(self, slots: int, capacity: int) -> None:
        if slots < 1 or capacity < 1:
            raise ElsiError(f"a cache of {slots} slots of {capacity} places: both are at least 1")
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions: Tensor | None = None
        self.attended = 0  # layers of the pass at work that attended through grouped_attention

    def forward(
        self,
        target: Target,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        slots: Sequence[int] | None = None,
        states_of: Sequence[int] = (),
        *,
        write: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass of the target over T tokens in each of n slots, whose keys and values are written to the cache.

        Args:
            ids: (n, T) token ids.
            positions: (n, T) rotary positions.
            mask: (n or 1, 1, T, S) bool, true where a token sees a place; the first S places are in use. Every row sees at least
                one place, usually its own. A sliding window of the target is applied on top, by positions.
            slots: n distinct slots; None is the first n. Slots that follow each other are read in place, others are copied.
            states_of: layers whose states are wanted.
            write: (n, T) places; None takes the positions.
            last_only: logits of the last token only.

        Returns:
            Logits (n, T or 1, V), and per layer of ``states_of`` the raw residual output (n, T, d) of that block.

        Raises:
            ElsiError: shapes that do not fit, places outside the cache or beyond S, a target whose attention cannot be served.
        """
        write = positions if write is None else write
        self._check(ids, positions, write, mask, slots)
        if target.model not in _GROUPED:
            _compare(target)
        with torch.inference_mode():
            return self._forward(target, ids, positions, mask, slots, states_of, write, last_only)

    def _forward(self, target, ids, positions, mask, slots, states_of, write, last_only):
        device = target.device
        ids, positions, write, mask = (x.to(device) for x in (ids, positions, write, mask))
        n, self._places = len(ids), mask.shape[3]
        self._slots = list(range(n)) if slots is None else list(slots)
        first = self._slots[0]
        self._span = slice(first, first + n) if self._slots == list(range(first, first + n)) else None
        self._rows = torch.tensor(self._slots, device=device)[:, None]
        self._write, self._now, self._windows, self._biases = write, positions, {}, {}
        if self.positions is None:
            self.positions = torch.zeros(self.slots, self.capacity, dtype=torch.long, device=device)
        self.positions[self._rows, write] = positions
        grouped = _GROUPED[target.model]
        with _attending(target, self, grouped) as plain, _states(target, states_of) as states:
            if not grouped and plain:  # the model's own eager attention adds its mask
                low = torch.finfo(target.dtype).min
                mask = torch.zeros(mask.shape, dtype=target.dtype, device=device).masked_fill_(~mask, low)
            with _last_row(target) if last_only else nullcontext() as more:
                logits = target.model(
                    input_ids=ids, position_ids=positions, attention_mask=mask, cache=self, use_cache=True, **(more or {})
                ).logits
        return logits, states

    def keep(self, slot: int, start: int, places: Sequence[int]) -> None:
        """Move keys and values of a slot from ``places`` to ``start``, ``start`` + 1, ..., in place: what remains of a tree.

        Raises:
            ElsiError: a slot or places outside the cache.
        """
        places = list(places)
        ends = [start, start + len(places) - 1, *places]
        if not 0 <= slot < self.slots or (places and not 0 <= min(ends) <= max(ends) < self.capacity):
            raise ElsiError(f"places {places} of slot {slot} to {start}: the cache has {self.slots} slots of {self.capacity} places")
        if not places or self.positions is None or places == list(range(start, start + len(places))):
            return
        source = torch.tensor(places, device=self.positions.device)
        with torch.inference_mode():
            for tensor in (*self.keys, *self.values):
                tensor[slot, :, start : start + len(places)] = tensor[slot, :, source]
            self.positions[slot, start : start + len(places)] = self.positions[slot, source]

    def move(self, source: int, slot: int, length: int) -> None:
        """Copy the first ``length`` places of one slot over those of another."""
        with torch.inference_mode():
            for tensor in (*self.keys, *self.values, self.positions[:, None, :, None]):
                tensor[slot, :, :length] = tensor[source, :, :length]

    def grow(self, capacity: int) -> None:
        """:meth:`resize` that never drops a place.

        Raises:
            ElsiError: fewer places than there are.
        """
        if capacity < self.capacity:
            raise ElsiError(f"a cache of {self.capacity} places cannot grow to {capacity}: resize it")
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """More or fewer places per slot; what lies in places that remain is copied, once.

        Raises:
            ElsiError: a capacity below 1.
        """
        if capacity < 1:
            raise ElsiError(f"a cache of {capacity} places: at least 1")
        more = capacity - self.capacity
        self.capacity = capacity
        if self.positions is not None:
            with torch.inference_mode():
                self.positions = F.pad(self.positions, (0, more))
                for tensors in (self.keys, self.values):
                    for j, tensor in enumerate(tensors):
                        tensors[j] = F.pad(tensor, (0, 0, 0, more))

    def within(self, mask: Tensor, window: int | None) -> Tensor:
        """The mask, and where there is a sliding window also only places whose token is less than ``window`` positions back."""
        if window is None:
            return mask
        if window not in self._windows:
            keys = self.positions[self._slots, None, None, : self._places]
            self._windows[window] = mask & (self._now[:, None, :, None] - keys < window)
        return self._windows[window]

    def bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a place, else the lowest number: computed once per pass and mask."""
        if id(mask) not in self._biases:
            low = torch.finfo(dtype).min
            self._biases[id(mask)] = mask, torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, low)
        return self._biases[id(mask)][1]

    # What transformers calls

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values (n, kv_heads, T, head_dim); gives the places in use (n, kv_heads, S, head_dim)."""
        if layer_idx == len(self.keys):
            for tensors, new in ((self.keys, key_states), (self.values, value_states)):
                tensors.append(new.new_zeros(self.slots, new.shape[1], self.capacity, new.shape[3]))
        found = []
        for tensor, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            tensor[self._rows, :, self._write] = new.transpose(1, 2)
            found.append((tensor[self._span] if self._span else tensor[self._rows[:, 0]])[:, :, : self._places])
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places in use."""
        return getattr(self, "_places", 0)

    def _check(self, ids: Tensor, positions: Tensor, write: Tensor, mask: Tensor, slots: Sequence[int] | None) -> None:
        if ids.ndim != 2 or not ids.numel() or positions.shape != ids.shape or write.shape != ids.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (ids, positions, write))
            raise ElsiError(f"ids, positions and places of shapes {shapes}: all three are (slots, tokens)")
        n, T = ids.shape
        slots = range(n) if slots is None else slots
        if len(set(slots)) != n or len(slots) != n or not 0 <= min(slots) <= max(slots) < self.slots:
            raise ElsiError(f"slots {list(slots)} for {n} texts: as many different ones of 0..{self.slots - 1}")
        if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[0] not in (1, n) or tuple(mask.shape[1:3]) != (1, T):
            raise ElsiError(f"a mask of shape {tuple(mask.shape)}, {mask.dtype}: ({n} or 1, 1, {T}, places in use), bool")
        low, high, places = int(write.min()), int(write.max()), mask.shape[3]
        if low < 0 or high >= places or places > self.capacity:
            raise ElsiError(
                f"places {low} to {high} of {places} in use, in a cache of {self.capacity}: give the cache more capacity, or "
                "generate fewer tokens"
            )


_AT_WORK: list[TargetCache] = []


@contextmanager
def _attending(target: Target, cache: TargetCache, grouped: bool) -> Iterator[bool]:
    """The target attends through grouped_attention inside; gives whether its own attention is the eager one."""
    config = target.model.config.get_text_config()
    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, grouped_attention)
    _AT_WORK.append(cache)
    cache.attended = 0
    try:
        if grouped:
            config._attn_implementation = _NAME
        yield before == "eager"
    finally:
        config._attn_implementation = before
        _AT_WORK.pop()
    if grouped and cache.attended != target.num_layers:
        raise _unsupported(target, f"{cache.attended} of {target.num_layers} layers attended through transformers' interface")


@contextmanager
def _last_row(target: Target) -> Iterator[dict[str, int]]:
    """Logits of the last token only. The row is laid out anew before the head: a slice of a longer state, even of one row, would
    make the product copy the head's weight."""
    head = target.model.get_output_embeddings()

    def rows(_module: nn.Module, inputs: tuple) -> tuple:
        n, count, width = inputs[0].shape
        return (inputs[0].reshape(n * count, width).view(n, count, width), *inputs[1:])

    handle = None if head is None else head.register_forward_pre_hook(rows)
    try:
        yield {"logits_to_keep": 1}
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _states(target: Target, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Fills a dictionary layer -> raw output (n, T, d) of that block while the target runs."""
    if bad := [j for j in layers if not 0 <= j < target.num_layers]:
        raise ElsiError(f"layers {bad} of {target.name}: it has layers 0..{target.num_layers - 1}")
    states: dict[int, Tensor] = {}

    def tap(j: int):
        def hook(_module: nn.Module, _inputs: tuple, output: Any) -> None:
            states[j] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [target.blocks[j].register_forward_hook(tap(j)) for j in dict.fromkeys(layers)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _unsupported(target: Target, why: str) -> ElsiError:
    return ElsiError(f"{target.name} ({type(target.model).__name__}): {why}; decoding this architecture is not supported")


def _compare(target: Target) -> None:
    """Settle how the target attends, once: grouped, or its own way; either must give the logits of a pass without a cache.

    Raises:
        ElsiError: other logits, or kinds of layers that keep no keys and values of every token.
    """
    config = target.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds:
        raise _unsupported(target, f"layers of kind {', '.join(sorted(kinds))}")
    ids = (torch.arange(_PROBE, device=target.device)[None] * 7 + 1) % target.vocab_size
    with torch.inference_mode():
        expected = target.model(input_ids=ids, use_cache=False).logits[0].float()
    seen = torch.ones(_PROBE, _PROBE, dtype=torch.bool).tril()[None, None]
    place, why = torch.arange(_PROBE)[None], ""
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    for grouped in (True, False):
        if windowed and not grouped:
            continue  # only grouped_attention knows where a window ends in this cache
        cache, half = TargetCache(1, _PROBE), _PROBE // 2
        _GROUPED[target.model] = grouped
        try:
            parts = [
                cache._forward(target, ids[:, s], place[:, s], seen[:, :, s, : s.stop], None, (), place[:, s], False)[0][0]
                for s in (slice(0, half), slice(half, _PROBE))
            ]
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as err:
            why = f"{type(err).__name__}: {err}"
            continue
        gap = (torch.cat(parts).float() - expected).abs().max() / expected.abs().max()
        if len(cache.keys) == target.num_layers and gap < max(1e-3, 32 * torch.finfo(target.dtype).eps):  # a wrong mask gives more
            return
        why = f"logits with a cache differ by {gap:.1e} of their size from those without"
    del _GROUPED[target.model]
    raise _unsupported(target, why.split("\n")[0])
