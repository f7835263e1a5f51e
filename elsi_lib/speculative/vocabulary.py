"""The draft vocabulary: the target ids a draft can propose, and their two tensors in a checkpoint (EAGLE-3).

``d2t[i] = target_id - i`` is an OFFSET for each of D draft ids, ``t2d`` a mask over the V target ids. Plain ids in ``d2t`` load
everywhere and draft nonsense, so they are told apart and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from elsi_lib.errors import ElsiError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """D target ids, sorted.

    Attributes:
        ids: (D,) int64, strictly increasing: the target id of each draft id.
        target_size: V, ids of the target.
        coverage: share of the counted tokens that are in the vocabulary, 0 to 1; None where it was not counted (read from a
            checkpoint).

    Raises:
        ElsiError: no ids, ids that do not increase, or ids outside the target's vocabulary.
    """

    ids: Tensor
    target_size: int
    coverage: float | None = None

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ElsiError(f"draft vocabulary of shape {tuple(ids.shape)}, {ids.dtype}: a vector of target ids is expected")
        if int(ids.min()) < 0 or int(ids.max()) >= self.target_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ElsiError(f"target id {wrong} of the draft vocabulary outside 0..{self.target_size - 1}: it is another target's")
        if (ids.diff() <= 0).any():
            raise ElsiError("the target ids of the draft vocabulary do not increase: they are sorted and distinct")
        object.__setattr__(self, "ids", ids.long())

    @classmethod
    def from_counts(
        cls, counts: Tensor | Mapping[int, int] | Sequence[int], size: int, target_size: int | None = None
    ) -> DraftVocabulary:
        """The ``size`` most frequent target ids; of equally frequent ones the lower id.

        Args:
            counts: how often each id stands at a loss position: (V,), see :func:`count_tokens`, or a mapping id -> count.
            size: D. The whole vocabulary (``size == V``) may hold ids that never occur; a smaller one may not, because the head's
                rows for them would be trained on nothing.
            target_size: V, needed with a mapping.

        Raises:
            ElsiError: size below 1, above V, or above the number of ids that occur; no counts, negative ones, ids outside V.
        """
        counts = _counts(counts, target_size)
        total, occurring, V = int(counts.sum()), int((counts > 0).sum()), len(counts)
        if not total:
            raise ElsiError("no tokens at loss positions: a draft vocabulary is counted on the answers of the training data")
        if not 1 <= size <= V:
            raise ElsiError(f"draft vocabulary of {size} ids: between 1 and the target's {V}")
        if occurring < size < V:
            raise ElsiError(
                f"draft vocabulary of {size} ids, but only {occurring} ids occur at loss positions: ask for at most {occurring}, "
                f"or for all {V}, or give more data"
            )
        ids = torch.sort(counts, descending=True, stable=True).indices[:size].sort().values
        return cls(ids, V, int(counts[ids].sum()) / total)

    @classmethod
    def whole(cls, target_size: int) -> DraftVocabulary:
        """Every id of the target: draft ids are target ids, coverage 1."""
        return cls(torch.arange(target_size), target_size, 1.0)

    @classmethod
    def from_tensors(cls, d2t: Tensor, t2d: Tensor, of: str = "the checkpoint") -> DraftVocabulary:
        """The vocabulary that a checkpoint's ``d2t`` (D,) and ``t2d`` (V,) say, if they say the same.

        Raises:
            ElsiError: wrong shapes or types, plain ids in ``d2t``, ids that are unsorted or outside V, masks that differ.
        """
        if d2t.ndim != 1 or t2d.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool or t2d.is_floating_point():
            raise ElsiError(
                f"d2t {tuple(d2t.shape)} {d2t.dtype} and t2d {tuple(t2d.shape)} {t2d.dtype} of {of}: whole offsets (D,) and a "
                "mask (V,) are expected"
            )
        kept, ids = t2d.nonzero()[:, 0], d2t.long() + torch.arange(len(d2t), device=d2t.device)
        if not torch.equal(ids, kept) and torch.equal(d2t.long(), kept):
            raise ElsiError(f"d2t of {of} holds plain target ids, not offsets (target id - draft id): subtract 0, 1, 2, ... from it")
        try:
            found = cls(ids, len(t2d))
        except ElsiError as error:
            raise ElsiError(f"d2t of {of}: {error}") from error
        if not torch.equal(ids, kept):
            raise ElsiError(f"t2d of {of} marks {len(kept)} ids, not the {len(ids)} that d2t names: the two do not belong together")
        return found

    @property
    def size(self) -> int:
        """D, ids of the draft."""
        return len(self.ids)

    @property
    def d2t(self) -> Tensor:
        """(D,) int64 offsets: target id - draft id."""
        return self.ids - torch.arange(self.size, device=self.ids.device)

    @property
    def t2d(self) -> Tensor:
        """(V,) bool: whether the draft can propose a target id."""
        return torch.zeros(self.target_size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)

    @cached_property
    def draft_ids(self) -> Tensor:
        """(V,) int64: the draft id of each target id, -1 where it has none."""
        index = torch.full((self.target_size,), -1, device=self.ids.device)
        index[self.ids] = torch.arange(self.size, device=self.ids.device)
        return index


def count_tokens(texts: Iterable[tuple[Sequence[int] | Tensor, Sequence[bool] | Tensor]], target_size: int) -> Tensor:
    """How often each target id stands at a loss position.

    Args:
        texts: pairs of token ids (T,) and loss mask (T,), true where the token is one that the draft learns to predict.
        target_size: V.

    Returns:
        (V,) int64.

    Raises:
        ElsiError: a mask of another length, or ids outside V.
    """
    counts = torch.zeros(target_size, dtype=torch.long)
    for number, (ids, mask) in enumerate(texts):
        ids, mask = torch.as_tensor(ids), torch.as_tensor(mask, dtype=torch.bool)
        if ids.shape != mask.shape:
            raise ElsiError(f"text {number}: {ids.numel()} token ids and a loss mask of {mask.numel()}: one entry per token")
        kept = ids[mask].long()
        if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < target_size:
            wrong = int(kept.min()) if int(kept.min()) < 0 else int(kept.max())
            raise ElsiError(f"text {number}: token id {wrong} outside 0..{target_size - 1}: encode with the target's own tokenizer")
        counts += torch.bincount(kept.cpu(), minlength=target_size)
    return counts


def _counts(counts: Tensor | Mapping[int, int] | Sequence[int], target_size: int | None) -> Tensor:
    if isinstance(counts, Mapping):
        if target_size is None:
            raise ElsiError("counts by id do not tell the size of the target's vocabulary: give target_size")
        outside = [i for i in counts if not 0 <= i < target_size]
        if outside:
            raise ElsiError(f"token id {outside[0]} outside 0..{target_size - 1}: the counts are another target's")
        full = torch.zeros(target_size, dtype=torch.long)
        full[list(counts.keys())] = torch.tensor(list(counts.values()), dtype=torch.long)
        counts = full
    counts = torch.as_tensor(counts)
    if counts.ndim != 1 or counts.is_floating_point() or len(counts) != (target_size or len(counts)):
        raise ElsiError(f"counts of shape {tuple(counts.shape)}, {counts.dtype}: one whole number for each id of the target")
    if (counts < 0).any():
        raise ElsiError(f"a negative count for token id {int((counts < 0).nonzero()[0])}: counts are 0 or more")
    return counts.long()
