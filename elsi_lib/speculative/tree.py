"""EAGLE-2's dynamic draft tree, without a model: expansion, the best nodes, and the match with the target's text.

A tree hangs from its root, the last token that the target itself gave. Drafted nodes are numbered from 0, parents before children;
-1 stands for the root. Everything here is small and lives on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from elsi_lib.errors import ElsiError

_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Frontier:
    """The n nodes of one level that are expanded next.

    Attributes:
        tokens: (n,) their tokens.
        parents: (n,) row of each one's parent in the frontier before; 0 at depth 1, whose frontier before is the root.
        depth: of all of them; the root has 0, so they stand ``depth`` positions after it.
    """

    tokens: Tensor
    parents: Tensor
    depth: int


Step = Callable[[Any, Frontier | None], tuple[Tensor, Any]]


@dataclass(frozen=True, eq=False)
class Nodes:
    """Drafted nodes, level by level.

    Attributes:
        tokens: (n,) int64.
        parents: (n,) int64, index of the parent among these nodes; -1 is the root.
        depths: (n,) int64, 1 for children of the root; also the distance in positions from the root.
        scores: (n,) float64, cumulative log-probability under the draft, nats.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> Tensor:
        """(n,) positions relative to the root's."""
        return self.depths

    @cached_property
    def mask(self) -> Tensor:
        """(n, n) bool: row i is true at node i and its ancestors. The root and all before it are seen by every node."""
        rows, mask = torch.arange(len(self)), torch.eye(len(self), dtype=torch.bool)
        above = self.parents
        while len(rows):
            rows, above = rows[above >= 0], above[above >= 0]
            mask[rows, above] = True
            above = self.parents[above]
        return mask

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    @classmethod
    def empty(cls) -> Nodes:
        """Nothing drafted."""
        none = torch.zeros(0, dtype=torch.long)
        return cls(none, none, none, none.double())

    def first_levels(self, depth: int) -> Nodes:
        """The nodes no deeper than ``depth``; nodes are given level by level, so these come first."""
        n = int((self.depths <= depth).sum())
        return self if n == len(self) else Nodes(self.tokens[:n], self.parents[:n], self.depths[:n], self.scores[:n])

    def with_root(self, token: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the target verifies: tokens (n+1,), mask (n+1, n+1) and relative positions (n+1,), with the root at 0."""
        n = len(self)
        mask = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        mask[:, 0] = True
        mask[1:, 1:] = self.mask
        return torch.cat([torch.tensor([token]), self.tokens]), mask, torch.cat([torch.zeros(1, dtype=torch.long), self.positions])


def expand(step: Step, root_state: Any, depth: int = 5, top_k: int = 10, ids: Tensor | None = None, keep: int | None = None) -> Nodes:
    """Grow a tree and keep every candidate (EAGLE-2): ``depth`` + 1 drafted levels, top_k + depth * top_k^2 nodes at most.

    The root gets its ``top_k`` likeliest children. Then ``depth`` times, the ``top_k`` nodes of the newest level with the highest
    cumulative log-probability are expanded together, each into its ``top_k`` likeliest children.

    Args:
        step: ``step(state, frontier) -> (log_probs, state)`` with log_probs (n, W), row i for the children of node i of the
            frontier. Called first as ``step(root_state, None)`` for the root (n = 1), then with the state it returned last.
        root_state: whatever ``step`` needs to start from.
        depth: 0 or more (EAGLE: 5).
        top_k: 1 or more (EAGLE: 10); the W children of a small vocabulary may be fewer.
        ids: (W,) token of each column, as the draft vocabulary's ``ids``; None where columns are tokens.
        keep: drafted nodes that :func:`best_nodes` will keep; nodes that ``keep`` others precede are not expanded, for their children
            are not kept either, and its result is the same. None expands all.

    Raises:
        ElsiError: depth below 0, top_k below 1, log-probabilities of another shape, above 0, or NaN.
    """
    if depth < 0 or top_k < 1:
        raise ElsiError(f"a tree of depth {depth} with top_k {top_k}: depth is 0 or more, top_k 1 or more")
    ids = ids.cpu() if ids is not None else None
    tokens, parents, depths, scores = [], [], [], []
    rows, above, frontier, first = torch.tensor([-1]), torch.zeros(1, dtype=torch.float64), None, 0
    state = root_state
    for level in range(1, depth + 2):
        log_probs, state = step(state, frontier)
        values, columns = children(log_probs, len(rows), top_k)
        k = values.shape[1]
        tokens.append((columns if ids is None else ids[columns]).reshape(-1))
        parents.append(rows.repeat_interleave(k))
        depths.append(torch.full((len(rows) * k,), level))
        scores.append((above[:, None] + values).reshape(-1))
        best = torch.sort(scores[-1], descending=True, stable=True).indices[:top_k]
        if keep is not None and level <= depth:
            best = best[_rank(torch.cat(scores))[first + best] < keep]
            if not len(best):
                break
        frontier = Frontier(tokens[-1][best], best // k, level)
        rows, above, first = first + best, scores[-1][best], first + len(rows) * k
    return Nodes(torch.cat(tokens), torch.cat(parents), torch.cat(depths), torch.cat(scores))


def best_nodes(candidates: Nodes, total: int, root_counts: bool = True) -> Nodes:
    """The tree that is verified: the candidates with the highest cumulative log-probability.

    A child is never likelier than its parent, and of equals the earlier node wins, so the set is closed under ancestors, and that of
    a smaller ``total`` lies within that of a larger one.

    Args:
        candidates: of :func:`expand`; one expansion serves every ``total``.
        total: nodes of the tree, 2 or more.
        root_counts: whether the root is one of them: by EAGLE's meaning 60 is 59 drafted nodes and the root.

    Raises:
        ElsiError: total below 2.
    """
    if total < 2:
        raise ElsiError(f"a tree of {total} nodes: at least 2, the root and one drafted node")
    order = torch.sort(candidates.scores, descending=True, stable=True).indices
    kept = order[: total - root_counts].sort().values
    place = torch.full((len(candidates) + 1,), -1)  # the last entry is the root's, found by index -1
    place[kept] = torch.arange(len(kept))
    return Nodes(candidates.tokens[kept], place[candidates.parents[kept]], candidates.depths[kept], candidates.scores[kept])


def longest_match(tree: Nodes, continuation: Sequence[int] | Tensor) -> tuple[int, tuple[int, ...]]:
    """The longest path from the root that equals the text which the target gave after the root.

    Returns:
        ``(length, path)``: accepted drafted tokens, and their nodes from the root downwards. The step yields length + 1 tokens.
    """
    tokens = continuation.tolist() if isinstance(continuation, Tensor) else continuation
    path: list[int] = []
    node: int | None = -1
    for token in tokens:
        node = tree.children.get((node, token))
        if node is None:
            break
        path.append(node)
    return len(path), tuple(path)


def _rank(scores: Tensor) -> Tensor:
    """How many candidates precede each one: (n,)."""
    rank = torch.empty(len(scores), dtype=torch.long)
    rank[torch.sort(scores, descending=True, stable=True).indices] = torch.arange(len(scores))
    return rank


def children(log_probs: Tensor, n: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The children that each of n expanded nodes gets: its top_k entries, best first, of equals the lower column first.

    Args:
        log_probs: (n, W), row i for the children of node i. Logits in bfloat16 often tie, so the order of equals matters.

    Returns:
        ``(values, columns)``: (n, k) float64 and int64 on the CPU, k = min(top_k, W).

    Raises:
        ElsiError: another shape, log-probabilities above 0 or NaN.
    """
    if log_probs.ndim != 2 or len(log_probs) != n or not log_probs.shape[1]:
        raise ElsiError(f"log-probabilities of shape {tuple(log_probs.shape)} for {n} nodes: one row for each is expected")
    k = min(top_k, log_probs.shape[1])
    if log_probs.dtype == torch.float32:
        best, columns = _top_float32(log_probs, k)
    else:
        best, columns = (part[:, :k] for part in log_probs.sort(descending=True, stable=True))
    if not bool((best[:, 0] <= 0).all()):  # NaN is above everything to sort and amax, and compares false
        raise ElsiError("log-probabilities above 0 or NaN from the draft: take log_softmax, in float32")
    return best.double().cpu(), columns.cpu()


def _top_float32(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Stable top k of each row of values <= 0; a row with NaN or a value above 0 starts with NaN.

    The k best lie in the k blocks of columns with the best maxima, so most columns are only read once.
    """
    n, W = values.shape
    blocks = -(-W // _BLOCK)
    if blocks > k:
        padded = values if blocks * _BLOCK == W else torch.nn.functional.pad(values, (0, blocks * _BLOCK - W), value=-torch.inf)
        padded = padded.reshape(n, blocks, _BLOCK)
        maxima = padded.amax(-1)
        wrong = ~(maxima <= 0).all(1)
        kept = _order(maxima, torch.arange(blocks, device=values.device)).topk(k).indices
        columns = (kept[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
        rows = kept + torch.arange(n, device=values.device)[:, None] * blocks
        values = padded.flatten(0, 1).index_select(0, rows.flatten()).view(n, -1)
    else:
        wrong = ~(values <= 0).all(1)
        columns = torch.arange(W, device=values.device).expand(n, -1)
    place = _order(values, columns).topk(k).indices
    best, columns = values.gather(1, place), columns.gather(1, place)
    if bool(wrong.any()):
        best[wrong, 0] = torch.nan
    return best, columns


def _order(values: Tensor, columns: Tensor) -> Tensor:
    """Whole numbers in the order of (value, lower column) for float32 values <= 0, whose bits grow with the magnitude."""
    magnitude = (values.contiguous().view(torch.int32) & 0x7FFFFFFF).long()
    return -(magnitude << 32) - columns
