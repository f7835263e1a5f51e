"""How many drafted tokens EAGLE-2's tree gets right, without the whole tree.

Given the text that follows a root, the tree of :mod:`elsi_lib.speculative.tree` matters only as far as it ranks the nodes on that
text's own path. A node is in the tree of ``total`` nodes when fewer than ``total - 1`` candidates precede it; a candidate's children
come after it; so only nodes before the one in question need be expanded, and none where the true next token is no child of the root.
The number of candidates yet unseen is bounded by probability: of the paths through a node with probability P, at most P / p have
probability p or more on each level. All decisions are exact, ties included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SLACK = 1 + 1e-3  # float32 log-probabilities of a node's children add up to 1 within far less


class Node:
    """A candidate of one root's tree.

    Attributes:
        key: places candidates in the stable order by score that ``best_nodes`` and the beam of ``expand`` use: (-score, depth, key of
            the parent, rank among its siblings); smaller is earlier.
        token, depth, parent: as in :class:`elsi_lib.speculative.tree.Nodes`; the parent of the root's children is None.
        row: whatever the caller gave with its children; None before it is expanded.
        children: the candidates below it.
    """

    __slots__ = ("key", "token", "parent", "depth", "row", "children")

    def __init__(self, key: tuple, token: int, parent: Node | None, depth: int) -> None:
        self.key, self.token, self.parent, self.depth = key, token, parent, depth
        self.row: int | None = None
        self.children: list[Node] = []


class LazyTree:
    """The trees of several sizes at one root, matched against the text after it.

    Give it children with :meth:`grow`, first the root's (node None), then those of each node in ``needs``, until that is empty.

    Attributes:
        needs: nodes whose children are needed next.
        accepted: for each size the accepted tokens, None while undecided.

    Args:
        truth: the text after the root; tokens beyond ``depth`` + 1 are ignored.
        limits: drafted nodes of each size, so ``total - 1`` where the root counts.
        depth, top_k: as in :func:`elsi_lib.speculative.tree.expand`.
    """

    __slots__ = ("truth", "limits", "depth", "top_k", "accepted", "needs", "_children", "_path", "_open", "_level")

    def __init__(self, truth: Sequence[int], limits: Sequence[int], depth: int, top_k: int) -> None:
        self.truth, self.limits, self.depth, self.top_k = truth[: depth + 1], limits, depth, top_k
        self.accepted: list[int | None] = [None] * len(limits)
        self.needs: list[Node] = []
        self._children: list[Node] = []
        self._path: list[Node] = []  # the candidates on the true path, as far as it is known
        self._open = True  # whether the path may go on below its last node
        self._level = 1  # of the node on the path that is judged next

    def grow(self, node: Node | None, values: Sequence[float], tokens: Sequence[int], row: int | None = None) -> None:
        """Add the children of a node, best first, with their log-probabilities; call :meth:`advance` after the last of a round."""
        above, key, depth = (-node.key[0], node.key, node.depth + 1) if node else (0.0, (), 1)
        last = None if self._open else self._path[-1].key  # later candidates change nothing
        children = self._children if node is None else node.children
        for rank, (value, token) in enumerate(zip(values, tokens, strict=True)):
            child = Node((-(above + value), depth, key, rank), token, node, depth)
            if last is not None and child.key > last:
                break
            children.append(child)
        if node is not None:
            node.row = row
        if self._open and node is (self._path[-1] if self._path else None):
            true = next((child for child in children if child.token == self.truth[depth - 1]), None) if self.truth else None
            if true is not None:
                self._path.append(true)
            self._open = true is not None and depth < len(self.truth)

    def advance(self) -> None:
        """Decide what can be decided, and name the nodes that are needed for the rest."""
        self.needs = []
        if self._open:
            self.needs = [self._path[-1]]
            return
        while self._level <= len(self._path) and None in self.accepted:
            low, high, unknown = self._before(self._path[self._level - 1])
            for size, limit in enumerate(self.limits):
                if self.accepted[size] is None and low >= limit:
                    self.accepted[size] = self._level - 1
            if any(done is None and high >= limit for done, limit in zip(self.accepted, self.limits, strict=True)):
                self.needs = unknown
                return
            self._level += 1
        self.accepted = [len(self._path) if done is None else done for done in self.accepted]

    def guess(self, size: int) -> int:
        """What ``accepted`` will probably be: a node is likely kept when its probability is above one in the number of nodes."""
        done = self.accepted[size]
        if done is not None:
            return done
        likely = math.log(self.limits[size])
        kept = (level for level, node in enumerate(self._path, 1) if node.key[0] <= likely or level < self._level)
        return max(kept, default=0)

    def _before(self, node: Node) -> tuple[int, float, list[Node]]:
        """Least and greatest number of candidates before a node of the true path, and the nodes to expand for a closer answer.

        A node that is no candidate itself, because its parent is not expanded by the beam, has infinitely many before it.
        """
        key, top_k, low, candidates = node.key, self.top_k, 0, self._children
        for level in range(1, self.depth + 2):
            before = [other for other in candidates if other.key < key]
            low += len(before)
            if level > self.depth or not before:
                break
            if len(before) > top_k:
                before = sorted(before, key=_key)[:top_k]
                if level == node.depth - 1 and node.parent not in before:
                    return 1 << 60, math.inf, []
            unknown = [other for other in before if other.row is None]
            if unknown:
                return low, low + self._unseen(before, level, node), unknown
            candidates = [child for other in before for child in other.children]
        return low, low, []

    def _unseen(self, before: list[Node], level: int, node: Node) -> float:
        """Bound on the candidates before ``node`` below the given ones, the expanded nodes of ``level``; infinite where it is not
        certain that the beam expands the node's parent."""
        top_k = self.top_k
        if level < node.depth - 1 and sum(_mass(other, node.parent) for other in before if other.key < node.parent.key) > top_k:
            return math.inf
        masses, total = [_mass(other, node) for other in before], 0.0
        for below in range(1, self.depth + 2 - level):
            most = top_k**below
            total += min(sum(mass if mass < most else most for mass in masses), top_k * top_k)
        return total - (level < node.depth)  # the node itself


def _key(node: Node) -> tuple:
    return node.key


def _mass(above: Node, node: Node) -> int:
    """At most so many paths through ``above`` end, on any one level, in a node as likely as ``node``."""
    ratio = node.key[0] - above.key[0]
    return int(math.exp(ratio) * _SLACK) if ratio < 40 else 1 << 60  # NaN, of two impossible nodes, compares false
