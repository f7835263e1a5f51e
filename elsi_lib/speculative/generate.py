"""The target's own text for many prompts at once: continuous batching over the slots of one cache.

A slot whose answer ends takes the next prompt at once. The token at index p of a text is ``noise.pick`` at position p under the text's
key, so in exact arithmetic the text depends neither on the batch nor on the order; in float32 it does not either but for ties closer
than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.cache import TargetCache
from elsi_lib.speculative.dialogue import eos_ids
from elsi_lib.speculative.noise import check_temperature, pick_many
from elsi_lib.speculative.packing import packed
from elsi_lib.targets import Target

FINISHES = ("eos", "length", "context")
_PLACES = 64  # the cache has a multiple of them


@dataclass(frozen=True)
class Request:
    """A text to be continued; ``key`` names it to the noise."""

    key: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """New ids, the one that ends the answer included; ``finish`` is "eos", "length" (max_new_tokens) or "context"."""

    ids: tuple[int, ...]
    finish: str


@dataclass
class _Slot:
    request: Request
    text: list[int] = field(default_factory=list)
    cached: int = 0  # places that hold keys and values of the text

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.text[len(self.request.ids) :])


def generate(
    target: Target,
    requests: Iterable[Request],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int = 64,
    capacity: int | None = None,
) -> Iterator[tuple[str, Answer]]:
    """Answers as they end, in any order.

    Args:
        requests: read one by one as slots become free; prompts of similar length side by side cost least.
        max_new_tokens: per answer, the end token included.
        temperature, seed: of the picks, see :func:`elsi_lib.speculative.noise.pick`.
        batch: slots.
        capacity: tokens a text may have, prompt and answer; None is the target's own limit.

    Raises:
        ElsiError: max_new_tokens or batch below 1, a temperature below 0, an empty prompt, ids outside the vocabulary, a prompt
            that leaves no room for a token.
    """
    source = iter(requests)
    yield from run(
        target, lambda: next(source, None), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, batch=batch,
        capacity=capacity,
    )  # fmt: skip


def context_of(target: Target, capacity: int | None) -> int | None:
    """Tokens that a text may have: the smaller of the target's limit and ``capacity``; None where there is neither."""
    limits = [limit for limit in (target.max_tokens, capacity) if limit is not None]
    return min(limits, default=None)


def run(
    target: Target,
    pull: Callable[[], Request | None],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int = 64,
    capacity: int | None = None,
) -> Iterator[tuple[str, Answer]]:
    """As :func:`generate`, with requests from ``pull()``, which gives None when there is none for now: it is asked again after an
    answer was given out. A request that goes on with the text of the slot that has just become free keeps its keys and values."""
    if max_new_tokens < 1 or batch < 1:
        raise ElsiError(f"max_new_tokens = {max_new_tokens}, batch = {batch}: both are at least 1")
    temperature = check_temperature(temperature)
    writer = _Writer(target, max_new_tokens, temperature, seed, batch, capacity)
    with packed(target):
        while True:
            while len(writer.slots) < batch and (request := pull()) is not None:
                writer.add(request)
            ended = writer.ended() or writer.step()
            for i, finish in ended:
                slot = writer.slots[i]
                yield slot.request.key, Answer(slot.answer, finish)
                if (request := pull()) is not None:
                    writer.replace(i, request)
                else:
                    writer.leave(i)
            if not writer.slots and not ended:
                return


class _Writer:
    """Slots 0..n-1 at work, and their cache."""

    def __init__(self, target: Target, max_new_tokens: int, temperature: float, seed: int, batch: int, capacity: int | None) -> None:
        self.target, self.max_new_tokens, self.temperature, self.seed = target, max_new_tokens, temperature, seed
        self.context, self.ends = context_of(target, capacity), eos_ids(target)
        self.cache = TargetCache(batch, _PLACES)
        self.slots: list[_Slot] = []

    def add(self, request: Request) -> None:
        """Read a prompt into the next free slot and write its first token."""
        self.slots.append(_Slot(request))
        self._read(len(self.slots) - 1)

    def replace(self, i: int, request: Request) -> None:
        """Slot i takes another request."""
        old, new = self.slots[i], _Slot(request)
        if tuple(old.text) == tuple(request.ids[: len(old.text)]):
            new.cached = old.cached
        self.slots[i] = new
        self._read(i)

    def leave(self, i: int) -> None:
        """Slot i goes; the last one takes its place."""
        last = self.slots.pop()
        if i < len(self.slots):
            self.slots[i] = last
            self.cache.move(len(self.slots), i, last.cached)

    def ended(self) -> list[tuple[int, str]]:
        """Slots whose answers have ended, the last first, so that leaving moves no other of them."""
        found = [(i, finish) for i, slot in enumerate(self.slots) if (finish := self._finish(slot))]
        return found[::-1]

    def step(self) -> list[tuple[int, str]]:
        """One token in every slot; gives what :meth:`ended` gives."""
        if not self.slots:
            return []
        places = torch.tensor([[len(slot.text) - 1] for slot in self.slots])
        self._room()
        mask = (torch.arange(self.cache.capacity) <= places)[:, None, None]
        ids = torch.tensor([slot.text[-1:] for slot in self.slots])
        logits, _ = self.cache.forward(self.target, ids, places, mask, last_only=True)
        self._write(self.slots, logits[:, -1])
        return self.ended()

    def _read(self, i: int) -> None:
        slot = self.slots[i]
        ids = self._checked(slot.request)
        start, used = slot.cached, len(ids)
        self._room()
        places = torch.arange(start, used)
        mask = (torch.arange(used) <= places[:, None])[None, None]
        part = torch.tensor([ids[start:]])
        logits, _ = self.cache.forward(self.target, part, places[None], mask, [i], last_only=True)
        slot.text = list(ids)
        self._write([slot], logits[:, -1])

    def _write(self, slots: list[_Slot], logits: torch.Tensor) -> None:
        keys, positions = [slot.request.key for slot in slots], [len(slot.text) for slot in slots]
        for slot, token in zip(slots, pick_many(logits, self.temperature, self.seed, keys, positions), strict=True):
            slot.cached = len(slot.text)
            slot.text.append(token)

    def _finish(self, slot: _Slot) -> str:
        if slot.text[-1] in self.ends:
            return "eos"
        if len(slot.text) - len(slot.request.ids) == self.max_new_tokens:
            return "length"
        return "context" if len(slot.text) == self.context else ""

    def _checked(self, request: Request) -> tuple[int, ...]:
        ids = request.ids
        if not ids or min(ids) < 0 or max(ids) >= self.target.vocab_size:
            raise ElsiError(f"prompt {request.key}: at least one id, all in 0..{self.target.vocab_size - 1}")
        if self.context is not None and len(ids) >= self.context:
            raise ElsiError(f"prompt {request.key} has {len(ids)} tokens of a context of {self.context}: no room for an answer")
        return ids

    def _room(self) -> None:
        """Just enough places for every text: attention is fastest where keys and values lie without gaps."""
        used = max(len(slot.request.ids) if not slot.text else len(slot.text) for slot in self.slots)
        places = -(-used // _PLACES) * _PLACES
        if not places <= self.cache.capacity <= places * 3 // 2:
            self.cache.resize(places)
