"""Replay against whole trees at every root, the lazy tree against brute force on languages with ties, and every refusal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_target
from transformers import GenerationConfig

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.answers import Answered, Turn
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.lazy_tree import LazyTree
from elsi_lib.speculative.replay import check_sizes, matched, prompt_lookup, replay, text_of
from elsi_lib.speculative.tree import best_nodes, children, expand, longest_match
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

V, WORDS = 64, 6  # words of the recorded texts: few, so that random drafts are right now and then
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def make_draft(target, layers=(0, 3), ids=range(0, 10), seed=0, **changes):
    """A draft with random weights, sharp enough that its trees differ in shape."""
    draft = Draft.for_target(target, layers, DraftVocabulary(torch.tensor(list(ids)), V), **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + (weight.ndim == 1))
    return draft.eval()


def dialogue(*lengths, seed=0, words=WORDS):
    """Turns of random tokens; lengths of prompt, answer, prompt, answer, ..."""
    rng = np.random.default_rng(seed)
    parts = [tuple(rng.integers(0, words, n).tolist()) for n in lengths]
    return Answered("1", "qa", tuple(Turn(p, a, "length") for p, a in zip(parts[::2], parts[1::2], strict=True)))


def whole_trees(target, draft, answered, total, depth, top_k, root_counts=True):
    """By the definition: at each root a tree is grown in full from the draft's forward over the text, then cut and matched."""
    ids, turns = [], []
    for turn in answered.turns:
        start = len(ids) + len(turn.prompt)
        ids += [*turn.prompt, *turn.answer]
        tokens, root = [], start
        while root < len(ids) - 1:
            tree = best_nodes(full_tree(target, draft, ids[: root + 1], depth, top_k), total, root_counts)
            length, _ = longest_match(tree, ids[root + 1 :])
            tokens.append(min(length + 1, len(ids) - 1 - root))
            root += length + 1
        turns.append(tokens)
    return turns


def full_tree(target, draft, ids, depth, top_k):
    with torch.inference_mode():
        states, _ = target.run(ids[:-1])
        cache = []
        hidden = draft.fuse([states[j] for j in draft.config.layers])[None]
        state, logits = draft(draft.embed(torch.tensor(ids[1:]))[None], hidden, cache=cache)

        def step(past, frontier):
            if frontier is None:
                return torch.log_softmax(logits[0, -1:], -1), [(state[0, -1], list(cache))]
            rows, out = [], []
            for token, parent in zip(frontier.tokens, frontier.parents, strict=True):
                above, kept = past[int(parent)]
                own = list(kept)
                position = torch.tensor([[len(ids) - 2 + frontier.depth]])
                below, scores = draft(draft.embed(token[None])[None], above[None, None], positions=position, cache=own)
                rows.append(torch.log_softmax(scores[0, 0], -1))
                out.append((below[0, 0], own))
            return torch.stack(rows), out

        return expand(step, None, depth, top_k, draft.vocabulary.ids)


def by_turn(rows, method, nodes):
    return [row["tokens"] for row in sorted(rows, key=lambda r: r["turn"]) if (row["method"], row["nodes"]) == (method, nodes)]


@settings(max_examples=15)
@given(
    seed=seeds,
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4).filter(lambda n: len(n) % 2 == 0),
    layers=st.sampled_from([(3,), (0, 3), (0, 1, 2)]),
    norm=st.sampled_from(["none", "each", "concat"]),
    ids=st.sampled_from([range(0, 8), range(0, 64, 2), range(3, 9), range(64)]),
    sizes=st.lists(st.integers(2, 14), min_size=1, max_size=3, unique=True),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    root_counts=st.booleans(),
)
def test_equals_whole_trees_at_every_root(target, seed, lengths, layers, norm, ids, sizes, shape, root_counts):
    answered = dialogue(*lengths, seed=seed)
    drafts = {"a": make_draft(target, layers, ids, seed % 1000, norm_before_fc=norm), "b": make_draft(target, seed=seed % 999)}
    rows = replay(target, drafts, answered, sizes, *shape, root_counts)
    assert len(rows) == 2 * len(sizes) * len(answered.turns)
    for name, draft in drafts.items():
        for total in sizes:
            assert by_turn(rows, name, total) == whole_trees(target, draft, answered, total, *shape, root_counts)


# The lazy tree alone


def language(seed, width, steps, sharp):
    """log-probabilities of the children of each path; with ``steps``, few distinct values, so that ties are everywhere."""

    def log_probs(path):
        weights = np.random.default_rng([seed, *path]).uniform(0.1, 1, width) ** sharp
        if steps:
            weights = np.ceil(weights * steps)
        return torch.from_numpy(np.log(weights / weights.sum())).float()[None]

    return log_probs


def lazily(log_probs, truth, limits, depth, top_k):
    """Accepted lengths, and how many nodes were expanded."""
    tree, expanded = LazyTree(truth, limits, depth, top_k), 0
    paths = {None: ()}
    values, columns = children(log_probs(()), 1, top_k)
    tree.grow(None, values[0].tolist(), columns[0].tolist())
    tree.advance()
    while tree.needs:
        assert all(node.row is None and node.depth <= depth for node in tree.needs) and len(tree.needs) <= top_k
        for node in tree.needs:
            paths[node] = (*paths[node.parent], node.token)
            values, columns = children(log_probs(paths[node]), 1, top_k)
            tree.grow(node, values[0].tolist(), columns[0].tolist(), expanded)
            expanded += 1
        tree.advance()
    assert [tree.guess(size) for size in range(len(limits))] == tree.accepted
    return tree.accepted, expanded


@settings(max_examples=250)
@given(
    seed=seeds,
    width=st.integers(1, 12),
    steps=st.sampled_from([None, None, 1, 2, 4]),
    sharp=st.sampled_from([1, 4, 20]),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    limits=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 13), max_size=6),
)
def test_lazy_tree_accepts_what_the_whole_tree_does(seed, width, steps, sharp, shape, limits, picks):
    log_probs, truth = language(seed, width, steps, sharp), []
    for pick in picks:  # a text that is likely under the language, mostly
        order = children(log_probs(tuple(truth)), 1, width)[1][0].tolist() if max(truth, default=0) < width else []
        truth.append(order[pick // 3] if pick // 3 < len(order) else pick)

    def step(state, frontier):
        pairs = [] if frontier is None else zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        paths = [()] if frontier is None else [(*state[parent], token) for parent, token in pairs]
        return torch.cat([log_probs(path) for path in paths]), paths

    whole = expand(step, None, *shape)
    accepted, expanded = lazily(log_probs, truth, limits, *shape)
    for limit, found in zip(limits, accepted, strict=True):
        assert found == longest_match(best_nodes(whole, limit + 1), truth)[0]
    assert expanded <= shape[0] * (shape[1] + 1)  # nodes of the true path are expanded even if the beam would not


def test_ties_go_to_the_earlier_node():
    def certain(path):  # one child as likely as its parent, the others impossible: all of them tie
        return torch.tensor([[-math.inf, 0.0, -math.inf]])

    for truth, limits in [([1, 1, 1, 1], [1, 2, 3, 30]), ([0, 0], [3, 4, 30]), ([1, 0], [4, 5, 6, 30]), ([2], [30])]:
        whole = expand(lambda _, frontier: (certain(()).repeat(len(frontier.tokens) if frontier else 1, 1), None), None, 3, 3)
        expected = [longest_match(best_nodes(whole, limit + 1), truth)[0] for limit in limits]
        assert lazily(certain, truth, limits, 3, 3)[0] == expected
    assert lazily(certain, [1, 1, 1, 1], [2, 30], 3, 3)[0] == [2, 4]


def test_nothing_is_expanded_where_nothing_depends_on_it():
    log_probs = language(0, 12, None, 4)
    best = children(log_probs(()), 1, 12)[1][0].tolist()
    assert lazily(log_probs, [99], [59], 5, 10) == ([0], 0)
    assert lazily(log_probs, best[10:11], [59], 5, 10) == ([0], 0)  # beyond the top ten
    assert lazily(log_probs, best[:1], [59], 5, 10) == ([1], 0)  # the best child is in every tree, and the text ends here
    assert lazily(log_probs, [], [59], 5, 10) == ([0], 0)


# What is counted


def test_steps_add_up_to_the_answer_without_its_first_token(target):
    answered = dialogue(5, 9, 3, 1, 2, 30, 4, 2)
    rows = replay(target, {"a": make_draft(target), "b": make_draft(target, (2,))}, answered, nodes=(4, 20), depth=2, top_k=4)
    assert [row["turn"] for row in rows if row["nodes"] == 4 and row["method"] == "a"] == [0, 1, 2, 3]
    for row in rows + prompt_lookup(answered, {63}):
        assert sum(row["tokens"]) == [8, 0, 29, 1][row["turn"]] and all(count >= 1 for count in row["tokens"])
    assert max(max(row["tokens"], default=0) for row in rows) <= 4


def test_empty_answers_have_no_steps(target):
    draft = make_draft(target)
    for lengths in [(4, 0), (4, 1), (4, 0, 3, 0), (4, 0, 3, 1)]:
        rows = replay(target, {"a": draft}, dialogue(*lengths), nodes=(4, 6))
        assert [row["tokens"] for row in rows] == [[]] * len(lengths) and {row["nodes"] for row in rows} == {4, 6}
        assert all(row["tokens"] == [] for row in prompt_lookup(dialogue(*lengths), set()))
    rows = replay(target, {"a": draft}, dialogue(4, 0, 3, 5), nodes=(4,))
    assert [len(row["tokens"]) > 0 for row in rows] == [False, True]


def test_a_perfect_draft_takes_the_depth_of_the_tree(target):
    """All tokens equal and a draft vocabulary of that one: every step accepts the whole chain of depth + 1."""
    answered = Answered("1", "qa", (Turn((5, 5), (5,) * 20, "length"),))
    rows = replay(target, {"a": make_draft(target, ids=[5])}, answered, nodes=(3, 60), depth=3)
    assert [row["tokens"] for row in rows] == [[3] * 6 + [1], [5, 5, 5, 4]]
    other = make_draft(target, ids=[6, 7])
    assert replay(target, {"a": other}, answered, nodes=(60,))[0]["tokens"] == [1] * 19


def test_replay_is_not_changed_by_company_or_by_text_after_the_answer(target):
    drafts = {name: make_draft(target, layers, seed=len(layers)) for name, layers in {"a": (0, 3), "b": (1,), "c": (1, 2, 3)}.items()}
    answered = dialogue(6, 40, 4, 20, seed=3)
    rows = replay(target, drafts, answered, nodes=(5, 12), depth=3, top_k=4)
    alone = [row for name in drafts for row in replay(target, {name: drafts[name]}, answered, nodes=(5, 12), depth=3, top_k=4)]
    assert rows == alone and len({str(row["tokens"]) for row in rows}) > 4
    assert [r for r in rows if r["nodes"] == 12] == replay(target, drafts, answered, nodes=(12,), depth=3, top_k=4)
    first = Answered("1", "qa", answered.turns[:1])
    assert [r for r in rows if r["turn"] == 0] == replay(target, drafts, first, nodes=(5, 12), depth=3, top_k=4)


def test_bfloat16_runs_and_counts(target):
    half = Target(tiny_target("llama").model.bfloat16(), None, name="half")
    answered = dialogue(5, 60, seed=8)
    draft = make_draft(half, ids=range(0, 40)).bfloat16()
    rows = replay(half, {"a": draft}, answered, nodes=(4, 8), depth=3, top_k=4)
    assert [sum(row["tokens"]) for row in rows] == [59, 59]


# Prompt lookup


def test_prompt_lookup_by_hand():
    text = dict(prompt=(10, 11, 12, 13, 14, 20, 21), answer=(10, 11, 12, 13, 30, 10, 11, 12, 63), finish="eos")
    answered = Answered("1", "qa", (Turn(**text),))
    rows = prompt_lookup(answered, {63}, nodes=(30, 60))
    # Root 10: after the first 10 stood 11 12 13 14 20 21 10, so 11 12 13 are right and 30 is given. Root 30: unseen. Root 10: 11, 12
    # and 13 follow, of which two are right.
    assert [row["tokens"] for row in rows] == [[4, 1, 3]] * 2
    assert [(row["method"], row["nodes"], row["turn"]) for row in rows] == [("prompt lookup", 30, 0), ("prompt lookup", 60, 0)]
    assert prompt_lookup(answered, {63}, candidates=1)[0]["tokens"] == [2, 2, 1, 2, 1]


def test_prompt_lookup_proposes_no_end():
    answered = Answered("1", "qa", (Turn((1, 63, 1), (63, 1, 63), "eos"),))
    assert prompt_lookup(answered, {63}, nodes=(60,))[0]["tokens"] == [2]
    assert prompt_lookup(answered, set(), nodes=(60,))[0]["tokens"] == [2]
    long = Answered("1", "qa", (Turn((1, 2, 63, 3), (1, 2, 63), "eos"),))
    assert prompt_lookup(long, {63}, nodes=(60,))[0]["tokens"] == [2]  # 2 is proposed, 63 is given
    assert prompt_lookup(long, {3}, nodes=(60,))[0]["tokens"] == [2]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prompt_lookup_takes_the_steps_of_transformers_generate(seed):
    """transformers proposes before it reads the prompt, so it starts where our first root is given."""
    model, prompt = tiny_target("llama", seed=seed).model, np.random.default_rng(seed).integers(3, 9, 12).tolist()
    model.generation_config.eos_token_id = None
    ids, calls = torch.tensor([prompt]), []
    with torch.inference_mode():
        plain = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0].tolist()
        forward = model.forward

        def counted(*args, **more):
            calls.append(more["input_ids"].shape[1])
            return forward(*args, **more)

        model.forward = counted
        config = GenerationConfig(max_new_tokens=29, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=10)
        found = model.generate(torch.tensor([plain[:13]]), generation_config=config)[0].tolist()
    assert found == plain
    answered = Answered("1", "qa", (Turn(tuple(prompt), tuple(plain[12:]), "length"),))
    tokens = prompt_lookup(answered, set(), nodes=(60,))[0]["tokens"]
    assert len(tokens) == len(calls)


# Refusals


def test_refusals(target):
    draft, answered = make_draft(target), dialogue(4, 6)
    for nodes in [(1,), (60, 0), (-3,), ()]:
        with pytest.raises(ElsiError, match="a tree of (1|0|-3|no) nodes: at least 2"):
            replay(target, {"a": draft}, answered, nodes)
    for depth, top_k in [(-1, 3), (2, 0)]:
        with pytest.raises(ElsiError, match=f"a tree of depth {depth} with top_k {top_k}"):
            replay(target, {"a": draft}, answered, depth=depth, top_k=top_k)
    for other, message in [
        (tiny_target("llama", layers=6), "a target with 4 layers, but tiny-llama has 6"),
        (tiny_target("llama", hidden=64), "a target with 32 features, but tiny-llama has 64"),
        (tiny_target("llama", seed=1), "ELSI has the embedding of another target than tiny-llama"),
    ]:
        with pytest.raises(ElsiError, match=message):
            replay(other, {"ELSI": draft}, answered)
    with pytest.raises(ElsiError, match="begins with an empty prompt"):
        replay(target, {"a": draft}, dialogue(0, 5))
    with pytest.raises(ElsiError, match="129 tokens, but tiny-llama takes at most 128"):
        replay(target, {"a": draft}, dialogue(100, 30))
    with pytest.raises(ElsiError, match="token id 64 outside 0..63"):
        replay(target, {"a": draft}, Answered("1", "qa", (Turn((64, 1), (2, 3), "length"),)))
    assert replay(target, {"a": draft}, dialogue(100, 29), nodes=(2,))[0]["tokens"]  # the last token is never read


def test_sizes_and_texts():
    assert check_sizes((30, 60), 5, 10) == (29, 59) and check_sizes((30,), 0, 1, root_counts=False) == (30,)
    assert matched([1, 2, 3], [1, 2, 4]) == 2 and matched([1, 2], [1]) == 1 and matched([], [1]) == 0 and matched([5], [1]) == 0
    answered = Answered("1", "qa", (Turn((7, 8), (1, 2), "eos"), Turn((9,), (), "length")))
    assert text_of(answered) == ([7, 8, 1, 2, 9], [(2, 4), (5, 5)])
