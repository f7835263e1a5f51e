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
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node."""
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    def with_root(self, token: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the target verifies: tokens (n+1,), mask (n+1, n+1) and relative positions (n+1,), with the root at 0."""
        n = len(self)
        mask = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        mask[:, 0] = True
        mask[1:, 1:] = self.mask
        return torch.cat([torch.tensor([token]), self.tokens]), mask, torch.cat([torch.zeros(1, dtype=torch.long), self.positions])


def expand(step: Step, root_state: Any, depth: int = 5, top_k: int = 10, ids: Tensor | None = None) -> Nodes:
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
        values, columns = _children(log_probs, len(rows), top_k)
        k = values.shape[1]
        tokens.append((columns if ids is None else ids[columns]).reshape(-1))
        parents.append(rows.repeat_interleave(k))
        depths.append(torch.full((len(rows) * k,), level))
        scores.append((above[:, None] + values).reshape(-1))
        best = torch.sort(scores[-1], descending=True, stable=True).indices[:top_k]
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


def _children(log_probs: Tensor, n: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k entries of each row, best first, of equals the lower column first: (n, k) float64 and their columns."""
    if log_probs.ndim != 2 or len(log_probs) != n or not log_probs.shape[1]:
        raise ElsiError(f"log-probabilities of shape {tuple(log_probs.shape)} for {n} nodes: one row for each is expected")
    k, W = min(top_k, log_probs.shape[1]), log_probs.shape[1]
    values, columns = log_probs.topk(min(k + 1, W))
    if not bool((values[:, 0] <= 0).all()):  # NaN is above everything to topk, and compares false
        raise ElsiError("log-probabilities above 0 or NaN from the draft: take log_softmax, in float32")
    if k < W and bool((values[:, k - 1] == values[:, k]).any()):  # topk takes any of equals at its border
        values, columns = log_probs.sort(descending=True, stable=True)
    values, columns = values[:, :k].double().cpu(), columns[:, :k].cpu()
    columns, order = columns.sort(1)
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    return values, columns.gather(1, order)
