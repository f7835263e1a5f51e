"""Lossless decoding of one text at a time: a draft's tree, or a chain looked up in the text, verified in one pass of the target.

The token at each index of the text is :func:`elsi_lib.speculative.noise.pick` of the target's own logits there, at any temperature,
and drafted tokens are kept as far as they equal it; so the text is the target's own, up to ties within the rounding of its dtype.
Steps are counted as in :mod:`elsi_lib.speculative.replay`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.cache import TargetCache
from elsi_lib.speculative.dialogue import eos_ids
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.noise import check_temperature, pick_many
from elsi_lib.speculative.replay import PROMPT_LOOKUP, check_draft, check_sizes, lookup
from elsi_lib.speculative.tree import Frontier, Nodes, best_nodes, expand
from elsi_lib.targets import Target

_PLACES = 256  # caches grow by at least as many


@dataclass(frozen=True)
class Decoded:
    """An answer.

    Attributes:
        ids: of the answer, the one that ends it included.
        finish: "eos", "length" (``max_new_tokens``) or "context".
        steps: tokens of each pass of the target after the one over the prompt, which gave the first token.
        seconds: wall-clock time of all, the prompt's pass included.
        prompt_seconds: until the first token.
    """

    ids: tuple[int, ...]
    finish: str
    steps: list[int]
    seconds: float
    prompt_seconds: float


class Decoder:
    """A target with what drafts for it.

    Args:
        draft: a draft of this target, in the dtype to compute in; "prompt lookup", the candidates of transformers' own generator; or
            None, the target alone.
        nodes, depth, top_k, root_counts: of the tree, see :mod:`elsi_lib.speculative.tree`; they do not matter without one.

    Raises:
        ElsiError: a draft of another target, fewer than 2 nodes, another word for the draft.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | str | None = None,
        *,
        nodes: int = 60,
        depth: int = 5,
        top_k: int = 10,
        root_counts: bool = True,
    ) -> None:
        self.target, self.ends = target, eos_ids(target)
        self.layers: tuple[int, ...] = ()
        if isinstance(draft, Draft):
            check_draft(draft, target)
            check_sizes((nodes,), depth, top_k, root_counts)
            self._source: _Drafter | _Lookup | None = _Drafter(draft, nodes, depth, top_k, root_counts)
            self.layers = draft.config.layers
        elif draft == PROMPT_LOOKUP:
            self._source = _Lookup(self.ends)
        elif draft is None:
            self._source = None
        else:
            raise ElsiError(f"draft {draft!r}: a Draft, {PROMPT_LOOKUP!r}, or None for the target alone")
        self._cache = TargetCache(1, _PLACES)

    def decode(self, ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int, question: int | str) -> Decoded:
        """Answer one prompt.

        Args:
            ids: the text so far.
            max_new_tokens: of the answer, the end token included.
            temperature, seed, question: of the picks; the position is the token's index in the text.

        Raises:
            ElsiError: an empty prompt, ids outside the vocabulary, a prompt that leaves no room in the context, max_new_tokens below
                1, a temperature below 0.
        """
        self._check(ids, max_new_tokens)
        key = (check_temperature(temperature), seed, question)
        with torch.inference_mode():
            return self._decode(list(ids), max_new_tokens, key)

    def _decode(self, text: list[int], max_new_tokens: int, key: tuple[float, int, int | str]) -> Decoded:
        begin, start = time.perf_counter(), len(text)
        end = min(start + max_new_tokens, self.target.max_tokens or start + max_new_tokens)
        steps: list[int] = []
        hidden = self._read(text, key)
        first = time.perf_counter()
        while text[-1] not in self.ends and len(text) < end:
            tree = self._source.propose(text, hidden) if self._source else Nodes.empty()
            before, hidden = len(text), self._verify(text, tree.first_levels(end - len(text)), key, end)
            steps.append(len(text) - before)
        finish = "eos" if text[-1] in self.ends else "length" if len(text) - start == max_new_tokens else "context"
        return Decoded(tuple(text[start:]), finish, steps, time.perf_counter() - begin, first - begin)

    def _read(self, text: list[int], key: tuple[float, int, int | str]) -> list[Tensor]:
        """Pass over the prompt: appends the first token, gives the states of the draft's layers, each (T, d)."""
        places = torch.arange(len(text))
        mask = (places <= places[:, None])[None, None]
        logits, states = self._forward(torch.tensor(text), places, places, mask, last_only=True)
        text += self._pick(logits[-1], len(text), key)
        if self._source:
            self._source.start()
        return states

    def _verify(self, text: list[int], tree: Nodes, key: tuple[float, int, int | str], end: int) -> list[Tensor]:
        """One step: appends the accepted tokens and the target's own next one, up to the end of the answer.

        Returns:
            States of the draft's layers at the root and the accepted tokens, each (accepted + 1, d).
        """
        root = len(text) - 1
        tokens, seen, offsets = tree.with_root(text[-1])
        mask = torch.cat([torch.ones(len(tokens), root, dtype=torch.bool), seen], 1)[None, None]
        places = torch.arange(root, root + len(tokens))
        logits, states = self._forward(tokens, root + offsets, places, mask)
        path, node = [], -1
        while len(text) < end:
            text += self._pick(logits[node + 1], len(text), key)
            node = tree.children.get((node, text[-1]))
            if node is None or text[-1] in self.ends:
                break
            path.append(node)
        self._cache.keep(0, root + 1, [root + 1 + node for node in path])
        rows = [0, *(node + 1 for node in path)]
        return [state[rows] for state in states]

    def _pick(self, logits: Tensor, position: int, key: tuple[float, int, int | str]) -> list[int]:
        temperature, seed, question = key
        return pick_many(logits[None], temperature, seed, [question], [position])

    def _forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, mask: Tensor, last_only: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        if (used := mask.shape[3]) > self._cache.capacity:
            self._cache.grow(-(-max(used, self._cache.capacity * 3 // 2) // _PLACES) * _PLACES)
        logits, states = self._cache.forward(
            self.target, tokens[None], positions[None], mask, states_of=self.layers, write=places[None], last_only=last_only
        )
        return logits[0], [states[j][0] for j in self.layers]

    def _check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        V, context = self.target.vocab_size, self.target.max_tokens
        if not len(ids) or min(ids) < 0 or max(ids) >= V:
            raise ElsiError(f"a prompt of {len(ids)} ids: at least one is needed, and all in 0..{V - 1} of {self.target.name}")
        if context is not None and len(ids) >= context:
            raise ElsiError(f"a prompt of {len(ids)} tokens of a context of {context}: no room for an answer; shorten it")
        if max_new_tokens < 1:
            raise ElsiError(f"max_new_tokens = {max_new_tokens}: at least 1")


class _Lookup:
    """Prompt lookup of transformers as a chain of nodes."""

    def __init__(self, ends: frozenset[int]) -> None:
        self._propose = lookup(ends)

    def start(self) -> None:
        pass

    def propose(self, text: list[int], hidden: Any) -> Nodes:
        tokens = torch.tensor(self._propose(text), dtype=torch.long)
        n = len(tokens)
        return Nodes(tokens, torch.arange(-1, n - 1), torch.arange(1, n + 1), torch.zeros(n, dtype=torch.float64))


class _Drafter:
    """A draft with its keys and values: rows 0..length-1 of the text, and after them those of the tree at work."""

    def __init__(self, draft: Draft, nodes: int, depth: int, top_k: int, root_counts: bool) -> None:
        self.draft, self.nodes, self.depth, self.top_k, self.root_counts = draft, nodes, depth, top_k, root_counts
        config, weight = draft.config, draft.fc.weight
        shape = (2, 1, config.num_key_value_heads, 0, config.head_dim)
        self.device, self.cached, self.length = weight.device, weight.new_zeros(shape), 0

    def start(self) -> None:
        self.length = 0

    def propose(self, text: list[int], hidden: list[Tensor]) -> Nodes:
        """The tree at the last token of the text, given the target's states (n, d) of the n tokens before it that are new."""
        state, logits = self._append(text[self.length + 1 :], hidden)
        tree = expand(self._step, (state, logits), self.depth, self.top_k, self.draft.vocabulary.ids, self.nodes - self.root_counts)
        return best_nodes(tree, self.nodes, self.root_counts)

    def _append(self, tokens: list[int], hidden: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of the text; gives state (1, H) and logits (1, D) of the last one, which alone is needed."""
        draft, end = self.draft, self.length + len(tokens)
        fused = draft.fuse([state.to(self.device) for state in hidden])[None]
        embeddings = draft.embed(torch.tensor(tokens, device=self.device))[None]
        queries = self._write(embeddings, fused, torch.arange(self.length, end, device=self.device)[None], self.length)
        self.length = end
        state = self._finish(queries[:, :, -1:], fused[:, -1:], None)
        return state, draft.logits(state)

    def _step(self, past: tuple, frontier: Frontier | None) -> tuple[Tensor, tuple]:
        """Log-probabilities (n, D) of the children of the frontier's nodes. What it hands on: their states (n, H), and which rows of
        the tree each one sees (n, rows of the tree so far)."""
        if frontier is None:
            state, logits = past
            return torch.log_softmax(logits, -1, dtype=torch.float32), (state, torch.zeros(1, 0, dtype=torch.bool))
        above, seen = past
        n, rows = len(frontier.tokens), seen.shape[1]
        parents = frontier.parents
        hidden = above[parents.to(self.device)][None]
        positions = torch.full((1, n), self.length - 1 + frontier.depth, device=self.device)
        queries = self._write(self.draft.embed(frontier.tokens.to(self.device))[None], hidden, positions, self.length + rows)
        seen = torch.cat([seen[parents], torch.eye(n, dtype=torch.bool)], 1)
        mask = torch.cat([torch.ones(n, self.length, dtype=torch.bool), seen], 1)
        state = self._finish(queries, hidden, mask.to(self.device))
        return torch.log_softmax(self.draft.logits(state), -1, dtype=torch.float32), (state, seen)

    def _write(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, start: int) -> Tensor:
        """Writes keys and values from row ``start`` on; gives the queries."""
        queries, keys, values = self.draft.project(embeddings, hidden, positions)
        self.used = start + keys.shape[2]
        if self.used > self.cached.shape[3]:
            more = -(-max(self.used, self.cached.shape[3] * 3 // 2) // _PLACES) * _PLACES - self.cached.shape[3]
            self.cached = F.pad(self.cached, (0, 0, 0, more))
        self.cached[0, :, :, start : self.used], self.cached[1, :, :, start : self.used] = keys, values
        return queries

    def _finish(self, queries: Tensor, hidden: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = self.cached[:, :, :, : self.used]
        groups, n = queries.shape[1] // keys.shape[1], queries.shape[2]
        grouped = queries.reshape(1, keys.shape[1], groups * n, -1)
        attended = F.scaled_dot_product_attention(grouped, keys, values, None if mask is None else mask.repeat(groups, 1))
        return self.draft.finish(hidden, attended.reshape(queries.shape))[0]
