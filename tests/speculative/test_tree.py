"""The dynamic tree against brute force over all paths of small random trees, EAGLE's counts, budgets, masks, matches and ties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.tree import Nodes, best_nodes, children, expand, longest_match

seeds = st.integers(0, 2**32 - 1)


class Language:
    """A distribution for every path of tokens, and a step that answers from it, checking what expand hands over."""

    def __init__(self, seed, width, steps=None):
        self.seed, self.width, self.steps, self.calls = seed, width, steps, []

    def log_probs(self, path):
        weights = np.random.default_rng([self.seed, *path]).uniform(0.1, 1, self.width) ** 3
        if self.steps:  # few distinct values: ties everywhere
            weights = np.ceil(weights * self.steps)
        return np.log(weights / weights.sum())

    def step(self, state, frontier):
        """The state is the list of paths of the frontier before."""
        if frontier is None:
            assert state == "root"
            paths = [()]
        else:
            pairs = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
            paths = [(*state[parent], token) for parent, token in pairs]
            assert all(len(path) == frontier.depth for path in paths)
        self.calls.append(len(paths))
        return torch.tensor(np.array([self.log_probs(path) for path in paths])), paths


def paths_of(nodes):
    paths = []
    for token, parent in zip(nodes.tokens.tolist(), nodes.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def score(language, path):
    return sum(language.log_probs(path[:i])[token] for i, token in enumerate(path))


def by_hand(language, depth, top_k):
    """EAGLE-2 on paths: all candidates, level by level."""
    level, candidates = [()], []
    for _ in range(depth + 1):
        grown = []
        for path in level:
            values = language.log_probs(path)
            grown += [(*path, token) for token in sorted(range(len(values)), key=lambda t: (-values[t], t))[:top_k]]
        candidates += grown
        level = sorted(grown, key=lambda p: -score(language, p))[:top_k]
    return candidates


@given(seeds, st.integers(1, 6), st.integers(0, 4), st.integers(1, 5))
def test_equals_the_procedure_on_paths(seed, width, depth, top_k):
    language = Language(seed, width)
    nodes = expand(language.step, "root", depth, top_k)
    expected = by_hand(language, depth, top_k)
    assert paths_of(nodes) == expected
    assert nodes.depths.tolist() == nodes.positions.tolist() == [len(path) for path in expected]
    assert nodes.scores.tolist() == pytest.approx([score(language, path) for path in expected], abs=1e-12)
    assert nodes.scores.dtype == torch.float64
    assert len(language.calls) == depth + 1 and max(language.calls) <= top_k


@given(seeds, st.integers(1, 3), st.integers(0, 3), st.integers(2, 20))
def test_without_limits_it_is_brute_force_over_all_paths(seed, width, depth, total):
    language = Language(seed, width)
    every = [p for n in range(1, depth + 2) for p in itertools.product(range(width), repeat=n)]
    ranked = sorted(every, key=lambda p: -score(language, p))
    candidates = expand(language.step, "root", depth, top_k=width ** (depth + 1))
    assert sorted(paths_of(candidates)) == sorted(every)
    assert sorted(paths_of(best_nodes(candidates, total))) == sorted(ranked[: total - 1])
    assert sorted(paths_of(best_nodes(candidates, total, root_counts=False))) == sorted(ranked[:total])


def test_eagles_counts():
    language = Language(0, 40)
    candidates = expand(language.step, "root")
    assert len(candidates) == 10 + 5 * 100 and language.calls == [1, 10, 10, 10, 10, 10]
    assert candidates.depths.max() == 6
    for total in (30, 60):
        assert len(best_nodes(candidates, total)) == total - 1 and len(best_nodes(candidates, total, root_counts=False)) == total
    assert set(paths_of(best_nodes(candidates, 30))) < set(paths_of(best_nodes(candidates, 60)))
    chain = expand(language.step, "root", top_k=1)
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4] and len(best_nodes(chain, 60)) == 6


shapes = st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(1, 5))


@given(seeds, shapes, st.integers(2, 40), st.integers(0, 40), st.sampled_from([None, 1, 2]))
def test_closed_under_ancestors_and_nested_with_ties_too(seed, shape, total, more, steps):
    width, depth, top_k = shape
    candidates = expand(Language(seed, width, steps).step, "root", depth, top_k)
    small, large = best_nodes(candidates, total), best_nodes(candidates, total + more)
    paths = paths_of(small)
    assert len(small) == min(total - 1, len(candidates)) and len(set(paths)) == len(paths)
    assert set(paths) <= set(paths_of(large)) <= set(paths_of(candidates))
    assert all(path[:-1] in paths for path in paths if len(path) > 1)
    assert small.depths.tolist() == [len(path) for path in paths]  # a lost parent would make its child the root's
    assert all(parent < node for node, parent in enumerate(small.parents.tolist()))
    dropped = sorted(candidates.scores.tolist(), reverse=True)[len(small) :]
    assert not dropped or max(dropped) <= small.scores.min()
    for i, path in enumerate(paths):
        assert small.mask[i].tolist() == [path[: len(other)] == other for other in paths]


def test_ties_go_to_the_lower_column_and_the_earlier_node():
    def step(state, frontier):
        n = 1 if frontier is None else len(frontier.tokens)
        return torch.full((n, 8), -math.log(8.0)), None

    nodes = expand(step, None, depth=1, top_k=3)
    assert nodes.tokens.tolist() == [0, 1, 2] * 4 and nodes.parents.tolist() == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3

    def certain(state, frontier):  # children as likely as their parents, at the lowest columns of float32
        n = 1 if frontier is None else len(frontier.tokens)
        return torch.tensor([[-math.inf, 0.0, -math.inf]]).repeat(n, 1), None

    for total in (2, 4, 6):
        chain = best_nodes(expand(certain, None, depth=4, top_k=2), total)
        assert chain.tokens.tolist() == [1] * (total - 1) and chain.scores.tolist() == [0.0] * (total - 1)
        assert chain.depths.tolist() == [*range(1, total)] and chain.parents.tolist() == [*range(-1, total - 2)]


@given(seeds, st.integers(5, 50), st.integers(1, 12))
def test_children_of_float32_rows_with_ties_are_a_stable_sort(seed, width, top_k):
    values = torch.from_numpy(np.random.default_rng(seed).integers(-4, 0, (1, width)).astype(np.float32))
    nodes = expand(lambda state, frontier: (values, None), None, depth=0, top_k=top_k)
    assert nodes.tokens.tolist() == sorted(range(width), key=lambda t: (-values[0, t], t))[:top_k]


@given(seeds, shapes, st.integers(2, 40), st.booleans(), st.sampled_from([None, 1, 2]))
def test_what_will_not_be_kept_need_not_be_expanded(seed, shape, total, root_counts, steps):
    width, depth, top_k = shape
    whole, lazy = Language(seed, width, steps), Language(seed, width, steps)
    expected = best_nodes(expand(whole.step, "root", depth, top_k), total, root_counts)
    found = best_nodes(expand(lazy.step, "root", depth, top_k, keep=total - root_counts), total, root_counts)
    for name in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert sum(lazy.calls) <= sum(whole.calls)
    assert sum(lazy.calls[1:]) <= depth * (total - root_counts)


@given(seeds, st.integers(1, 3), st.sampled_from([5, 63, 64, 65, 700, 1280]), st.integers(1, 12), st.sampled_from([2, 30, 10_000]))
def test_children_are_a_stable_sort_whatever_the_width(seed, n, width, top_k, distinct):
    """Wide rows are searched block by block; bfloat16 logits make ties across blocks."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(-rng.integers(0, distinct, (n, width)).astype(np.float32) / 7)
    values[rng.random((n, width)) < 0.05] = -math.inf
    found, columns = children(values, n, top_k)
    for row in range(n):
        order = sorted(range(width), key=lambda t: (-values[row, t].item(), t))[:top_k]
        assert columns[row].tolist() == order and found[row].tolist() == values[row, order].tolist()
    for wrong in (math.nan, 0.1):
        values[n - 1, rng.integers(width)] = wrong
        with pytest.raises(ElsiError, match="above 0 or NaN"):
            children(values, n, top_k)


def test_columns_become_target_ids():
    ids, language = torch.tensor([3, 10, 11, 400]), Language(5, 4)
    seen = []

    def step(state, frontier):
        if frontier is not None:
            seen.extend(frontier.tokens.tolist())
        return torch.tensor(np.array([language.log_probs(())] * (1 if frontier is None else len(frontier.tokens)))), None

    plain, mapped = expand(step, None, 2, 3), expand(step, None, 2, 3, ids=ids)
    assert mapped.tokens.tolist() == ids[plain.tokens].tolist() and torch.equal(mapped.parents, plain.parents)
    assert set(seen[len(seen) // 2 :]) <= set(ids.tolist())


@given(seeds, st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(2, 30), st.lists(st.integers(0, 3), max_size=6))
def test_longest_match_is_the_longest_path_that_starts_the_text(seed, width, depth, top_k, total, text):
    tree = best_nodes(expand(Language(seed, width).step, "root", depth, top_k), total)
    paths = paths_of(tree)
    length, path = longest_match(tree, text)
    assert length == max((len(p) for p in paths if p == tuple(text[: len(p)])), default=0) == len(path)
    assert length == 0 or (paths[path[-1]] == tuple(text[:length]) and tree.depths[list(path)].tolist() == [*range(1, length + 1)])
    assert longest_match(tree, torch.tensor(text, dtype=torch.long)) == (length, path)
    inner = best_nodes(tree, 2)  # a smaller tree within never matches more
    assert longest_match(inner, text)[0] <= length


def test_what_the_target_verifies():
    tree = best_nodes(expand(Language(1, 5).step, "root", 2, 2), 7)
    tokens, mask, positions = tree.with_root(42)
    assert tokens.tolist() == [42, *tree.tokens.tolist()] and positions.tolist() == [0, *tree.depths.tolist()]
    paths = [(), *paths_of(tree)]
    for i, path in enumerate(paths):
        assert mask[i].tolist() == [path[: len(other)] == other for other in paths]
    empty = Nodes.empty()
    assert longest_match(empty, [1, 2]) == (0, ()) and empty.with_root(1)[1].tolist() == [[True]]


@given(seeds, shapes, st.integers(0, 6))
def test_first_levels(seed, shape, most):
    tree = expand(Language(seed, shape[0]).step, "root", shape[1], shape[2])
    assert paths_of(tree.first_levels(most)) == [path for path in paths_of(tree) if len(path) <= most]


def test_refusals():
    language = Language(0, 4)
    for depth, top_k in [(-1, 3), (2, 0), (2, -1)]:
        with pytest.raises(ElsiError, match=f"a tree of depth {depth} with top_k {top_k}"):
            expand(language.step, "root", depth, top_k)
    candidates = expand(language.step, "root", 1, 2)
    for total in (1, 0, -5):
        with pytest.raises(ElsiError, match=f"a tree of {total} nodes: at least 2"):
            best_nodes(candidates, total)
    for log_probs, message in [
        (torch.zeros(3), r"shape \(3,\) for 1 nodes"),
        (torch.zeros(2, 3), r"shape \(2, 3\) for 1 nodes"),
        (torch.zeros(1, 0), r"shape \(1, 0\)"),
        (torch.tensor([[-1.0, 0.1]]), "above 0 or NaN"),
        (torch.tensor([[-1.0, math.nan, -2.0]]), "above 0 or NaN"),
    ]:
        with pytest.raises(ElsiError, match=message):
            expand(lambda state, frontier, log_probs=log_probs: (log_probs, None), None, 0, 2)
