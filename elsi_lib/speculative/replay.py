"""tau of any draft from the recorded text of the target, exactly and without decoding it again.

EAGLE's trees are deterministic, so what a step accepts is the longest path of the draft's tree that the recorded text follows, at any
temperature. One pass of the target over a dialogue gives the states that every draft reads; a draft's first step runs over all
positions at once; drafted rows are computed in batches over many roots, which share the keys and values of the text before them, and
only where they can change the outcome (:mod:`elsi_lib.speculative.lazy_tree`).

Steps are counted as by EAGLE's scripts: the pass over the prompt gives the first token of an answer, the first root, and is no step.
Every further pass of the target is one, and yields its accepted tokens and one more. So the steps of an answer of n tokens, the one
that ends it included, add up to n - 1, and an answer of one token has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.lazy_tree import LazyTree, Node
from elsi_lib.speculative.tree import children
from elsi_lib.targets import Target

PROMPT_LOOKUP = "prompt lookup"
_ROWS = 128  # of one attention call: fewer read fewer keys of others, more use the matrix units better


def replay(
    target: Target,
    drafts: Mapping[str, Draft],
    answered: Any,
    nodes: Sequence[int] = (30, 60),
    depth: int = 5,
    top_k: int = 10,
    root_counts: bool = True,
) -> list[dict[str, Any]]:
    """Tokens of every step that each draft would take on one recorded dialogue.

    Args:
        drafts: name of the method -> draft, in the dtype to compute in.
        answered: a dialogue of :class:`elsi_lib.speculative.answers.Answers`: ``turns`` with token ids ``prompt`` and ``answer``.
        nodes: sizes of the tree, see :func:`elsi_lib.speculative.tree.best_nodes`, as are ``depth``, ``top_k`` and ``root_counts``.

    Returns:
        A row for each draft, size and turn: ``method, nodes, turn`` (from 0), ``tokens`` (list of int, accepted + 1, cut at the end
        of the answer; empty for an answer of at most one token).

    Raises:
        ElsiError: a draft of another target, sizes below 2, a text longer than the target's context or with ids outside it.
    """
    limits = check_sizes(nodes, depth, top_k, root_counts)
    for name, draft in drafts.items():
        check_draft(draft, target, name)
    ids, spans = text_of(answered)
    if not any(end - start > 1 for start, end in spans):
        return [_row(name, size, turn, []) for name in drafts for size in nodes for turn, _ in enumerate(spans)]
    end = max(end for start, end in spans if end - start > 1)  # the last token is never read
    states = _states(target, ids[: end - 1], {j for draft in drafts.values() for j in draft.config.layers})
    rows = []
    for name, draft in drafts.items():
        with torch.inference_mode():
            steps = _Replay(draft, ids, spans, states, limits, depth, top_k).run()
        for (turn, size), tokens in steps.items():
            rows.append(_row(name, nodes[size], turn, tokens))
    return rows


def prompt_lookup(
    answered: Any, eos: Collection[int], nodes: Sequence[int] = (30, 60), *, candidates: int = 10, ngram: int = 2
) -> list[dict[str, Any]]:
    """The same rows for the prompt-lookup decoding of transformers, which needs no draft and knows no tree.

    Args:
        eos: ids that end an answer; the generator proposes none of them.
        nodes: sizes of the trees that it is compared with; its rows are the same for each.
        candidates, ngram: ``prompt_lookup_num_tokens`` and ``max_matching_ngram_size`` of transformers.
    """
    ids, spans = text_of(answered)
    propose = lookup(eos, candidates, ngram)
    rows = []
    for turn, (start, end) in enumerate(spans):
        tokens, root = [], start
        while root < end - 1:
            accepted = matched(propose(ids[: root + 1]), ids[root + 1 : end])
            tokens.append(min(accepted + 1, end - 1 - root))
            root += tokens[-1]
        rows += [_row(PROMPT_LOOKUP, size, turn, list(tokens)) for size in nodes]
    return rows


def lookup(eos: Collection[int], candidates: int = 10, ngram: int = 2) -> Any:
    """A function from the ids of a text to the list of tokens that transformers' prompt lookup proposes to follow it."""
    ends = torch.tensor(sorted(eos)) if eos else None
    generator = PromptLookupCandidateGenerator(ends, candidates, ngram, max_length=1 << 60)

    def propose(ids: Sequence[int]) -> list[int]:
        return generator.get_candidates(torch.tensor([ids]))[0][0, len(ids) :].tolist()

    return propose


def matched(proposed: Sequence[int], text: Sequence[int]) -> int:
    """How many proposed tokens the text begins with."""
    return next((n for n, (a, b) in enumerate(zip(proposed, text, strict=False)) if a != b), min(len(proposed), len(text)))


def check_sizes(nodes: Sequence[int], depth: int, top_k: int, root_counts: bool = True) -> tuple[int, ...]:
    """Drafted nodes of each size of tree.

    Raises:
        ElsiError: no size, one below 2, depth below 0, top_k below 1.
    """
    if not nodes or min(nodes) < 2:
        raise ElsiError(f"a tree of {min(nodes, default='no')} nodes: at least 2, the root and one drafted node")
    if depth < 0 or top_k < 1:
        raise ElsiError(f"a tree of depth {depth} with top_k {top_k}: depth is 0 or more, top_k 1 or more")
    return tuple(size - root_counts for size in nodes)


def check_draft(draft: Draft, target: Target, name: str = "the draft") -> None:
    """Whether a draft in memory can read this target.

    Raises:
        ElsiError: another number of layers, width or vocabulary, or the embedding of other weights.
    """
    config = draft.config
    embedding = target.model.get_input_embeddings().weight
    for what, own, given in (
        ("layers", config.num_target_layers, target.num_layers),
        ("features", config.hidden_size, target.hidden_size),
        ("token ids", config.vocab_size, target.vocab_size),
    ):
        if own != given:
            raise ElsiError(f"{name} is a draft of a target with {own} {what}, but {target.name} has {given}: load its own target")
    own = draft.embedding
    if own.data_ptr() != embedding.data_ptr():
        rows = torch.linspace(0, len(own) - 1, min(16, len(own))).long()
        one, other = own[rows.to(own.device)].float().cpu(), embedding[rows.to(embedding.device)].float().cpu()
        if not torch.allclose(one, other, rtol=0.02, atol=1e-6):
            raise ElsiError(f"{name} has the embedding of another target than {target.name}: load its own target")


def text_of(answered: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a recorded dialogue, and start and end of each turn's answer among them."""
    ids: list[int] = []
    spans = []
    for turn in answered.turns:
        ids += turn.prompt
        if not ids:
            raise ElsiError(f"dialogue {answered.id} begins with an empty prompt: the target answers something")
        spans.append((len(ids), len(ids) + len(turn.answer)))
        ids += turn.answer
    return ids, spans


def _row(method: str, nodes: int, turn: int, tokens: list[int]) -> dict[str, Any]:
    return {"method": method, "nodes": nodes, "turn": turn, "tokens": tokens}


class _Enough(Exception):
    """Nothing above the last layer that a draft reads is needed."""


def _states(target: Target, ids: Sequence[int], layers: Collection[int]) -> dict[int, Tensor]:
    """The target's states (T, H) of the given layers."""
    states: dict[int, Tensor] = {}

    def keep(j: int, state: Tensor) -> None:
        if j in layers:
            states[j] = state
            if len(states) == len(layers):
                raise _Enough

    try:
        target.run(ids, keep)
    except _Enough:
        return states
    raise ElsiError(f"only {sorted(states)} of layers {sorted(layers)} of {target.name} ran")


class _Replay:
    """One draft over one recorded text.

    Rows are numbered: the first step's rows before every root, span after span, then drafted rows as they come.
    """

    def __init__(
        self,
        draft: Draft,
        ids: list[int],
        spans: list[tuple[int, int]],
        states: Mapping[int, Tensor],
        limits: tuple[int, ...],
        depth: int,
        top_k: int,
    ) -> None:
        self.draft, self.ids, self.spans, self.limits, self.depth, self.top_k = draft, ids, spans, limits, depth, top_k
        self.device = draft.fc.weight.device
        fused = draft.fuse([states[j].to(self.device) for j in draft.config.layers])[None]
        embeddings = draft.embed(torch.tensor(ids[1 : fused.shape[1] + 1], device=self.device))[None]
        queries, self.keys, self.values = draft.project(embeddings, fused, torch.arange(fused.shape[1])[None])
        roots = [root for start, end in spans for root in range(start, end - 1)]
        self.row = {root: row for row, root in enumerate(roots)}
        self.drafted_keys, self.drafted_values = self.keys[:, :, :0], self.values[:, :, :0]
        self.states = fused[0, :0]
        self.trees: dict[int, LazyTree] = {}
        self.first: list[tuple[list[float], list[int]]] = []  # the root's children
        for part in _parts(roots):
            rows = torch.tensor(part, device=self.device) - 1
            attended = self._attend(queries[:, :, rows], rows + 1, [[]] * len(part), None)
            self.first += self._finish(fused[:, rows], attended)

    def run(self) -> dict[tuple[int, int], list[int]]:
        """(turn, index of the size) -> tokens of each step."""
        steps: dict[tuple[int, int], list[int]] = {
            (turn, size): [] for size in range(len(self.limits)) for turn in range(len(self.spans))
        }
        places = {(turn, size): self.spans[turn][0] for turn, size in steps}
        while True:
            open_roots: dict[int, LazyTree] = {}
            for (turn, size), tokens in steps.items():
                places[turn, size] = self._walk(places[turn, size], self.spans[turn][1], size, tokens, open_roots)
            if not open_roots:
                return steps
            self._expand([(root, node) for root in sorted(open_roots) for node in open_roots[root].needs])
            for tree in open_roots.values():
                tree.advance()

    def _walk(self, root: int, end: int, size: int, tokens: list[int], open_roots: dict[int, LazyTree]) -> int:
        """Go on from a root: the steps that are certain go to ``tokens``, roots that the walk probably meets and that are undecided
        to ``open_roots``; returns the first root that is not certain."""
        certain, place = True, root
        while root < end - 1:
            tree = self.trees.get(root)
            if tree is None:
                tree = LazyTree(self.ids[root + 1 : min(end, root + self.depth + 2)], self.limits, self.depth, self.top_k)
                self.trees[root] = tree
                tree.grow(None, *self.first[self.row[root]])
                tree.advance()
            count = tree.guess(size) + 1
            if tree.accepted[size] is None:
                open_roots[root], certain = tree, False
            root = min(root + count, end - 1)
            if certain:
                tokens.append(root - place)
                place = root
        return place

    def _expand(self, wanted: list[tuple[int, Node]]) -> None:
        """Draft the children of nodes, sorted by root."""
        known, first = len(self.states), len(self.row)
        parents = [self.row[root] if node.parent is None else node.parent.row for root, node in wanted]
        hidden = self.states[torch.tensor(parents, device=self.device)][None]
        tokens = torch.tensor([node.token for _, node in wanted], device=self.device)
        roots = torch.tensor([root for root, _ in wanted], device=self.device)
        depths = torch.tensor([node.depth for _, node in wanted], device=self.device)
        queries, keys, values = self.draft.project(self.draft.embed(tokens)[None], hidden, (roots - 1 + depths)[None])
        above = [[row - first for row in _ancestors(node)] for _, node in wanted]
        results = []
        for part in _parts(range(len(wanted))):
            s = slice(part[0], part[-1] + 1)
            attended = self._attend(queries[:, :, s], roots[s], above[s], (keys[:, :, s], values[:, :, s]))
            results += self._finish(hidden[:, s], attended)
        self.drafted_keys = torch.cat([self.drafted_keys, keys], 2)
        self.drafted_values = torch.cat([self.drafted_values, values], 2)
        for row, ((root, node), (scores, below)) in enumerate(zip(wanted, results, strict=True), start=known):
            self.trees[root].grow(node, scores, below, row)

    def _attend(self, queries: Tensor, roots: Tensor, above: list[list[int]], own: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of n rows over the text before their roots, their drafted ancestors, and themselves.

        Args:
            queries: (1, heads, n, head_dim).
            roots: (n,) so many rows of the text each one sees.
            above: drafted rows that each one sees.
            own: keys and values of the rows themselves; None where these are rows of the text.
        """
        n, S = queries.shape[2], int(roots.max())
        columns: dict[int, int] = {}
        pairs = [(i, columns.setdefault(row, len(columns))) for i, rows in enumerate(above) for row in rows]
        mask = torch.arange(S, device=self.device) < roots[:, None]
        keys, values = self.keys[:, :, :S], self.values[:, :, :S]
        if own is not None:
            drafted = torch.zeros(n, len(columns), dtype=torch.bool)
            if pairs:
                drafted[tuple(torch.tensor(pairs).T)] = True
            itself = torch.eye(n, dtype=torch.bool, device=self.device)
            mask = torch.cat([mask, drafted.to(self.device), itself], 1)
            used = torch.tensor(list(columns), dtype=torch.long, device=self.device)
            keys = torch.cat([keys, self.drafted_keys[:, :, used], own[0]], 2)
            values = torch.cat([values, self.drafted_values[:, :, used], own[1]], 2)
        # All heads of a key-value head as rows of one: nothing is repeated but the mask.
        groups = queries.shape[1] // keys.shape[1]
        grouped = queries.reshape(1, keys.shape[1], groups * n, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, mask.repeat(groups, 1)).reshape(queries.shape)

    def _finish(self, hidden: Tensor, attended: Tensor) -> Iterator[tuple[list[float], list[int]]]:
        """Keeps the states of n rows, and gives log-probabilities and tokens of the children of each."""
        state = self.draft.finish(hidden, attended)[0]
        self.states = torch.cat([self.states, state])
        log_probs = torch.log_softmax(self.draft.logits(state), -1, dtype=torch.float32)
        values, columns = children(log_probs, len(state), self.top_k)
        return zip(values.tolist(), self.draft.vocabulary.ids.cpu()[columns].tolist(), strict=True)


def _parts(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    return (rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS))


def _ancestors(node: Node) -> Iterator[int]:
    while (node := node.parent) is not None:
        yield node.row
