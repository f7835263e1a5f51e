"""The law of the picks, their keys, and that accepting the picked child has the law of EAGLE's rejection."""

import hashlib
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, gumbel_r, kstest

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.noise import check_temperature, gumbel, pick, pick_many
from elsi_lib.speculative.tree import Nodes, longest_match

LOGITS = torch.tensor([2.0, 1.0, 0.0, -0.5, 1.5, -math.inf, 0.3])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_picks_have_the_law_of_softmax(temperature):
    n = 6000
    picks = Counter(pick(LOGITS, temperature, 11, question, position) for question in range(60) for position in range(n // 60))
    weights = np.exp(LOGITS.double().numpy() / temperature)
    expected = n * weights / weights.sum()
    assert 5 not in picks
    observed = np.array([picks[i] for i in range(len(LOGITS))])
    assert chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 0.01


def test_the_noise_is_gumbel_along_the_vocabulary_and_along_positions():
    assert kstest(gumbel(3, "q", 5, 20_000).numpy(), gumbel_r.cdf).pvalue > 0.01
    assert kstest([float(gumbel(3, "q", position, 2)[1]) for position in range(4000)], gumbel_r.cdf).pvalue > 0.01
    one, two = gumbel(3, 81, 5, 20_000), gumbel(3, 81, 6, 20_000)
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.03  # neighbours are independent


def philox(key, blocks):
    """Philox 4x64-10 (Salmon et al., 2011), counters 1, 2, ..., in Python integers."""
    low = 2**64 - 1
    for block in range(1, blocks + 1):
        c, k = [block, 0, 0, 0], [key & low, key >> 64]
        for _ in range(10):
            left, right = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
            c = [(right >> 64) ^ c[1] ^ k[0], right & low, (left >> 64) ^ c[3] ^ k[1], left & low]
            k = [(k[0] + 0x9E3779B97F4A7C15) & low, (k[1] + 0xBB67AE8584CAA73B) & low]
        yield from c


def test_the_stream_is_philox_keyed_by_a_hash():
    """Recordings depend on it: neither NumPy's version nor a change here may move it."""
    key = int.from_bytes(hashlib.sha256(b'[7, "81", 12]').digest()[:16], "little")
    expected = [-math.log(-math.log(((word >> 12) + 0.5) / 2**52)) for word in philox(key, 5)]
    found = gumbel(7, 81, 12, 20)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_rarest_words_give_finite_noise(monkeypatch):
    class Extremes:
        def __init__(self, key):
            pass

        def random_raw(self, size):
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extremes)
    assert gumbel(0, "q", 0, 2).tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)], rel=1e-9)


@given(st.integers(0, 2**63), st.one_of(st.integers(0, 999), st.text(max_size=9)), st.integers(0, 10**6), st.integers(1, 50))
def test_a_key_gives_one_noise_and_other_keys_others(seed, question, position, size):
    noise = gumbel(seed, question, position, size)
    assert noise.shape == (size,) and torch.isfinite(noise).all()
    assert torch.equal(gumbel(seed, str(question), position, size), noise)
    assert torch.equal(gumbel(seed, question, position, size + 7)[:size], noise)
    for other in ((seed + 1, question, position), (seed, f"{question}0", position), (seed, question, position + 1)):
        assert not torch.equal(gumbel(*other, size), noise)
    # The parts cannot run into each other: ("1", 12) is not ("11", 2).
    assert not torch.equal(gumbel(seed, f"{question}1", 2, size), gumbel(seed, question, 12, size))


@given(st.permutations(range(8)))
def test_picks_do_not_depend_on_order_or_on_the_generators_of_others(order):
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    alone = [pick(logits[i], 1.0, 5, "q", i) for i in range(8)]
    torch.manual_seed(order[0])
    np.random.seed(order[1])
    assert {i: pick(logits[i], 1.0, 5, "q", i) for i in order} == dict(enumerate(alone))
    assert len(set(alone)) > 1


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(0, 9))
def test_greedy_is_the_first_of_the_largest_and_tiny_temperatures_agree(values, seed):
    logits = torch.tensor(values, dtype=torch.float32)
    best = values.index(max(values))
    assert pick(logits, 0, seed, "q", 3) == best
    assert values[pick(logits, 1e-300, seed, "q", 3)] == max(values)
    assert values[pick(logits * 1e30, 1e-30, seed, "q", 3)] == max(values)
    assert pick(logits.bfloat16(), 0.7, seed, "q", 3) == pick(logits, 0.7, seed, "q", 3)  # small integers are exact


def test_refusals():
    for temperature in (-0.1, -math.inf, math.inf, math.nan):
        with pytest.raises(ElsiError, match=f"temperature {temperature}"):
            pick(LOGITS, temperature, 0, "q", 0)
        with pytest.raises(ElsiError, match="temperature"):
            check_temperature(temperature)
    assert check_temperature(0) == 0.0 and check_temperature(1) == 1.0
    for temperature in (0, 1):
        for logits, message in [
            (torch.tensor([0.0, math.nan]), "hold NaN or infinity"),
            (torch.tensor([0.0, math.inf]), "hold NaN or infinity"),
            (torch.full((3,), -math.inf), "exclude every token"),
            (torch.zeros(1, 3), "one position's vector"),
            (torch.zeros(0), "one position's vector"),
        ]:
            with pytest.raises(ElsiError, match=message):
                pick(logits, temperature, 0, "q", 0)
    with pytest.raises(ElsiError, match="noise of size 0"):
        gumbel(0, "q", 0, 0)


# Accepting the child that equals x ~ p, against EAGLE's rejection, exactly


def tree_of(paths):
    """Nodes for a set of token paths, with every prefix of them, level by level."""
    prefixes = sorted({path[:i] for path in paths for i in range(1, len(path) + 1)}, key=lambda p: (len(p), p))
    parents = [prefixes.index(p[:-1]) if len(p) > 1 else -1 for p in prefixes]
    tokens = [p[-1] for p in prefixes]
    return Nodes(*(torch.tensor(x) for x in (tokens, parents, [len(p) for p in prefixes])), torch.zeros(len(prefixes)).double())


def sequential_rejection(tree, law, node=-1, path=()):
    """EAGLE at T > 0 with q = 1: {(accepted tokens and bonus): probability}. Siblings in order, each accepted with p(x) of what is
    left of p; a refused one is zeroed and p renormalised; when none is left the bonus is drawn from the remainder."""
    p, reach, out = dict(law(path)), Fraction(1), Counter()
    for child in [n for n in range(len(tree)) if int(tree.parents[n]) == node]:
        x = int(tree.tokens[child])
        for text, chance in sequential_rejection(tree, law, child, (*path, x)).items():
            out[text] += reach * p[x] * chance
        reach *= 1 - p[x]
        p[x] = Fraction(0)
        if not reach:
            return out
        total = sum(p.values())
        p = {token: share / total for token, share in p.items()}
    for token, share in p.items():
        out[(*path, token)] += reach * share
    return out


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3))
def test_accepting_the_picked_child_is_eagles_rejection(seed, size, depth):
    rng = np.random.default_rng(seed)
    tree = tree_of([tuple(map(int, rng.integers(0, size, rng.integers(1, depth + 1)))) for _ in range(4)])
    laws = {}

    def law(path):
        if path not in laws:
            weights = [int(w) for w in rng.integers(0, 6, size)]
            weights[int(rng.integers(size))] += 1
            laws[path] = {token: Fraction(w, sum(weights)) for token, w in enumerate(weights)}
        return laws[path]

    picked, written = Counter(), Counter()
    for text in itertools.product(range(size), repeat=depth + 1):  # the target's own text, drawn one token after the other
        chance = math.prod((law(text[:i])[token] for i, token in enumerate(text)), start=Fraction(1))
        length, path = longest_match(tree, text)
        assert [int(tree.tokens[n]) for n in path] == list(text[:length])
        picked[text[: length + 1]] += chance
        written[text] += chance
    rejected = sequential_rejection(tree, law)
    assert {t: c for t, c in picked.items() if c} == {t: c for t, c in rejected.items() if c}
    # The text goes on from p after either: together they are p, whatever the tree.
    for text, chance in written.items():
        total = Fraction(0)
        for step, share in rejected.items():
            if text[: len(step)] == step:
                total += share * math.prod((law(text[:i])[text[i]] for i in range(len(step), len(text))), start=Fraction(1))
        assert total == chance


@given(
    st.sampled_from([1, 2, 64, 3000]), st.sampled_from([0, 0.01, 0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_many_picks_are_the_picks_one_by_one(size, temperature, scale, seed, coarse):
    """Flat, usual and steep distributions, with ties, excluded tokens, and the logits left as they were."""
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(seed)) * scale
    logits[:, 1::5] = -math.inf
    logits = logits.bfloat16() if coarse else logits
    before, names, places = logits.clone(), ["a", 2, "c", "d", "e", "f"], [0, 5, 2, 3, 3, 9]
    found = pick_many(logits, temperature, seed, names, places)
    assert found == [pick(row, temperature, seed, n, p) for row, n, p in zip(logits, names, places, strict=True)]
    assert torch.equal(logits, before)


def test_many_picks_win_against_the_whole_noise_where_a_rare_token_wins():
    """The winner is far from the top: among 40,000 equal tokens the noise decides."""
    logits = torch.zeros(4, 40_000)
    logits[:, 7] = 1.0
    found = pick_many(logits, 1.0, 3, [0, 1, 2, 3], [0] * 4)
    expected = [int((logits[0].double() + gumbel(3, question, 0, 40_000)).argmax()) for question in range(4)]
    assert found == expected and 7 not in found


def test_many_picks_need_a_row_each_and_finite_logits():
    with pytest.raises(ElsiError, match="2 questions and 3 positions: one row for each"):
        pick_many(torch.zeros(3, 4), 1.0, 0, [1, 2], [1, 2, 3])
    broken = torch.zeros(3, 4)
    broken[1] = math.nan
    with pytest.raises(ElsiError, match="logits of position 5 of question b hold NaN"):
        pick_many(broken, 1.0, 0, ["a", "b", "c"], [4, 5, 6])
