"""Beam searches against brute force with singular values, fixed rules against their formulas, and every refusal."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.cka import linear_cka
from elsi_lib.errors import ElsiError
from elsi_lib.selection import (
    EXHAUSTIVE_LIMIT,
    METHODS,
    all_set_entropies,
    check_layers,
    elsi,
    elsi_c,
    exhaustive,
    jaccard,
    layer_rule,
    layer_sets,
    redundancy,
    select,
    stability,
    standing,
)

seeds = st.integers(0, 2**32 - 1)


def representatives(seed, n, rows=6, d=10):
    """n layers of different norm, effective rank and overlap."""
    rng = np.random.default_rng(seed)
    decay = np.exp(-rng.uniform(0, 2, (n, 1, 1)) * np.arange(d))
    common = rng.standard_normal((1, rows, d))
    return (rng.standard_normal((n, rows, d)) + rng.uniform(0, 2, (n, 1, 1)) * common) * decay * rng.uniform(0.3, 3, (n, 1, 1))


def grams_of(Z):
    Z = torch.from_numpy(Z)
    return Z @ Z.mT


def svd_entropy(Z, layers):
    sigma = np.linalg.svd(np.concatenate([Z[j] for j in layers], axis=1), compute_uv=False)
    p = sigma**2 / (sigma**2).sum()
    return -(p * np.log(p)).sum()


def brute_force(Z, m):
    """Every set of m layers with its entropy, best first."""
    scored = [(layers, svd_entropy(Z, layers)) for layers in itertools.combinations(range(len(Z)), m)]
    return sorted(scored, key=lambda pair: -pair[1])


@given(seeds, st.integers(1, 7), st.integers(1, 4))
def test_exhaustive_equals_brute_force_by_singular_values(seed, n, m):
    m = min(m, n)
    Z = representatives(seed, n)
    ranked = brute_force(Z, m)
    best, worst = exhaustive(grams_of(Z), m, keep=5), exhaustive(grams_of(Z), m, lowest=True)
    assert best.layers == ranked[0][0] and worst.layers == ranked[-1][0]
    assert best.entropy == pytest.approx(ranked[0][1], abs=1e-10) and worst.entropy == pytest.approx(ranked[-1][1], abs=1e-10)
    assert [layers for layers, _ in best.frontier[0]] == [layers for layers, _ in ranked[:5]]
    sets, entropies = all_set_entropies(grams_of(Z), m)
    assert [tuple(s) for s in sets.tolist()] == list(itertools.combinations(range(n), m))
    assert entropies.tolist() == pytest.approx([svd_entropy(Z, s) for s in itertools.combinations(range(n), m)], abs=1e-10)


@given(
    seeds,
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([0.5, 1.0, 2.0, math.inf]),
    st.booleans(),
    st.sampled_from(["none", "trace"]),
)
def test_elsi_without_limits_is_the_optimum(seed, n, m, alpha, center, normalize):
    grams, m = grams_of(representatives(seed, n)), min(m, n)
    reading = {"alpha": alpha, "center": center, "normalize": normalize}
    found = elsi(grams, m, k_beam=None, k_expand=None, after_midpoint="never", **reading)
    best = exhaustive(grams, m, **reading)
    assert found.entropy == pytest.approx(best.entropy, abs=1e-12)
    assert found.layers == best.layers
    assert [len(sets) for sets in found.frontier] == [math.comb(n, size) for size in range(1, m + 1)]


@given(seeds, st.integers(2, 8), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_elsi_follows_algorithm_1(seed, n, m, k_beam, k_expand):
    """The five steps written out with singular values."""
    Z, m = representatives(seed, n), min(m, n)
    beam = sorted(((j,) for j in range(n)), key=lambda s: -svd_entropy(Z, s))[:k_beam]
    frontier = [beam]
    for _ in range(m - 1):
        extended = set()
        for layers in beam:
            others = sorted((j for j in range(n) if j not in layers), key=lambda r: -svd_entropy(Z, (*layers, r)))
            extended |= {tuple(sorted((*layers, r))) for r in others[:k_expand]}
        beam = sorted(extended, key=lambda s: -svd_entropy(Z, s))[:k_beam]
        frontier.append(beam)
    found = elsi(grams_of(Z), m, k_beam=k_beam, k_expand=k_expand, after_midpoint="never")
    assert [[layers for layers, _ in sets] for sets in found.frontier] == frontier
    assert found.layers == beam[0] and found.entropy == pytest.approx(svd_entropy(Z, beam[0]), abs=1e-10)
    assert found.entropy <= exhaustive(grams_of(Z), m).entropy + 1e-12


@given(seeds, st.integers(2, 7), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_elsi_c_follows_algorithm_2(seed, n, m, k_beam, k_pool, debiased):
    """Candidates by delta_L(r) = ||M_L(r, :) - M_L(r-1, :)||^2 of explicitly concatenated states."""
    Z, m = representatives(seed, n), min(m, n)

    def joined(layers, i):
        return np.concatenate([Z[j] for j in sorted({*layers, i})], axis=1)

    def delta(layers, r):
        def similarity(i, j):
            return linear_cka(joined(layers, i), joined(layers, j), debiased)

        return sum((similarity(r, j) - similarity(r - 1, j)) ** 2 for j in range(n))

    beam = sorted(((j,) for j in range(n)), key=lambda s: -svd_entropy(Z, s))[:k_beam]
    for _ in range(m - 1):
        pools = {s: sorted((r for r in range(1, n) if r not in s), key=lambda r: -delta(s, r))[:k_pool] for s in beam}  # noqa: B023
        extended = {tuple(sorted((*s, r))) for s, pool in pools.items() for r in pool}
        if not extended:
            with pytest.raises(ElsiError, match="can be reached"):
                elsi_c(grams_of(Z), m, k_beam=k_beam, k_pool=k_pool, debiased=debiased, after_midpoint="never")
            return
        beam = sorted(extended, key=lambda s: -svd_entropy(Z, s))[:k_beam]
    found = elsi_c(grams_of(Z), m, k_beam=k_beam, k_pool=k_pool, debiased=debiased, after_midpoint="never")
    assert found.entropy == pytest.approx(svd_entropy(Z, found.layers), abs=1e-10)
    assert found.entropy == pytest.approx(svd_entropy(Z, beam[0]), abs=1e-9)


def test_elsi_c_reaches_layer_0_only_as_a_seed():
    Z = representatives(3, 4)
    grams = grams_of(Z)
    every = elsi_c(grams, 2, k_beam=None, k_pool=None)
    assert {s for s, _ in every.frontier[1]} == set(itertools.combinations(range(4), 2))
    late = elsi_c(grams, 2, k_beam=None, k_pool=None, after_midpoint="seeds")
    assert {s for s, _ in late.frontier[1]} == {(1, 2), (1, 3), (2, 3)}


@pytest.mark.parametrize(("n", "late"), [(6, (3, 4, 5)), (7, (3, 4, 5, 6)), (1, (0,)), (2, (1,))])
def test_singletons_lie_after_the_midpoint_unless_told_otherwise(n, late):
    grams = torch.stack([torch.diag(torch.linspace(1, 0.1 + j / n, 5)) for j in reversed(range(n))])  # entropy falls with depth
    assert elsi(grams, 1).layers == (late[0],)
    assert {s for s, _ in elsi(grams, 1).frontier[0]} == {(j,) for j in late}
    assert elsi(grams, 1, after_midpoint="never").layers == (0,)
    if n > 2:
        assert elsi(grams, 2).layers == (0, 1)  # by default the rule binds singletons only
        assert elsi(grams, 2, after_midpoint="seeds").layers == (0, late[0])
        assert elsi_c(grams, 2, after_midpoint="seeds").frontier[0][0][0] == (late[0],)


def test_equal_layers_resolve_to_the_first():
    grams = torch.eye(4).repeat(6, 1, 1)
    assert elsi(grams, 2).layers == exhaustive(grams, 2).layers == exhaustive(grams, 2, lowest=True).layers == (0, 1)
    assert standing(grams, (3, 5)).rank == 1 and standing(grams, (3, 5)).regret == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_search_among_some_layers_is_a_search_of_a_model_that_has_only_those(seed):
    grams = grams_of(representatives(seed, 8))
    allowed = (0, 1, 3, 4, 6)
    alone = exhaustive(grams[list(allowed)], 3)
    expected = tuple(allowed[j] for j in alone.layers)
    wide = {"k_beam": None, "after_midpoint": "never", "among": allowed}
    for found in (exhaustive(grams, 3, among=allowed), elsi(grams, 3, k_expand=None, **wide)):
        assert found.layers == expected and found.entropy == pytest.approx(alone.entropy, abs=1e-12)
    assert set(elsi_c(grams, 3, k_pool=None, **wide).layers) <= set(allowed)
    assert elsi(grams, 1, among=allowed).layers[0] in (4, 6)  # the midpoint stays the model's


def test_a_search_among_no_suitable_layers_is_refused():
    grams = grams_of(representatives(0, 8))
    with pytest.raises(ElsiError, match="m = 3 outside 1..2"):
        exhaustive(grams, 3, among=(1, 2))
    with pytest.raises(ElsiError, match="outside 0..7"):
        elsi(grams, 2, among=(1, 8))
    with pytest.raises(ElsiError, match="none of the layers .* after the midpoint of 8"):
        elsi(grams, 1, among=(0, 1))


def test_a_selection_says_how_it_was_made():
    found = elsi(grams_of(representatives(0, 5)), 2, k_beam=3, alpha=2.0)
    assert found.method == "elsi"
    assert found.parameters == {
        **{"m": 2, "k_beam": 3, "k_expand": 10, "after_midpoint": "singletons"},
        **{"among": None, "alpha": 2.0, "center": False, "normalize": "none"},
    }
    assert found.entropy == found.frontier[-1][0][1]


# Rules (FIELD: names for a layer).


@pytest.mark.parametrize(
    ("n", "printed", "code"),
    [
        (36, (2, 18, 33), (1, 17, 32)),  # Qwen3-4B: the paper's {2, 18, 33}; SpecForge's [1, N//2-1, N-4]
        (32, (2, 16, 29), (1, 15, 28)),
        (30, (2, 15, 27), (1, 14, 26)),
        (24, (2, 12, 21), (1, 11, 20)),
        (7, (2, 3, 4), (1, 2, 3)),
    ],
)
def test_eagle_rules(n, printed, code):
    assert layer_rule("eagle2", n) == (n - 1,)
    assert layer_rule("eagle3", n) == printed
    assert layer_rule("eagle3-code", n) == code == tuple(j - 1 for j in printed)


@pytest.mark.parametrize("n", range(1, 7))
def test_eagle_3_collides_on_six_layers_and_fewer(n):
    """At N = 6 already [2, N//2, N-3] is [2, 3, 3]; below, it repeats, runs backwards or turns negative."""
    for name in ("eagle3", "eagle3-code"):
        with pytest.raises(ElsiError, match=f"on a target of {n} layers"):
            layer_rule(name, n)
    assert layer_rule("eagle2", n) == (n - 1,)


@given(st.integers(1, 80), st.integers(1, 80))
def test_uniform_and_last(n, m):
    if m > n:
        with pytest.raises(ElsiError, match=f"m = {m} outside 1..{n}"):
            layer_rule("uniform", n, m)
        return
    assert layer_rule("last", n, m) == tuple(range(n - m, n))
    layers = layer_rule("uniform", n, m)
    assert check_layers(layers, n) == layers and len(layers) == m
    assert all(abs(j + 0.5 - (i + 0.5) * n / m) <= 0.5 for i, j in enumerate(layers))  # block j spans depths j to j + 1


def test_uniform_examples():
    assert layer_rule("uniform", 36) == (6, 18, 30) and layer_rule("uniform", 5, 5) == (0, 1, 2, 3, 4)


def test_bad_rules():
    with pytest.raises(ElsiError, match="layer rule 'eagle4' unknown: one of eagle2"):
        layer_rule("eagle4", 36)
    with pytest.raises(ElsiError, match="eagle3 always takes 3 layers, not m = 2"):
        layer_rule("eagle3", 36, 2)
    with pytest.raises(ElsiError, match="always takes 1 layers"):
        layer_rule("eagle2", 36, 3)


@pytest.mark.parametrize("method", METHODS)
def test_select_knows_every_method(method):
    Z = representatives(1, 9)
    found = select(grams_of(Z), method)
    assert found.method == method and len(found.layers) == (1 if method == "eagle2" else 3)
    assert found.entropy == pytest.approx(svd_entropy(Z, found.layers), abs=1e-10)
    normalised = select(grams_of(Z), method, normalize="trace")
    unit = Z / np.linalg.norm(Z, axis=(1, 2), keepdims=True)
    assert normalised.entropy == pytest.approx(svd_entropy(unit, normalised.layers), abs=1e-10)


# Where a set stands.


@given(seeds, st.integers(3, 7), st.integers(1, 3))
def test_standing_against_brute_force(seed, n, m):
    Z = representatives(seed, n)
    ranked = brute_force(Z, m)
    for place, (layers, entropy) in enumerate(ranked, start=1):
        found = standing(grams_of(Z), layers[::-1])
        assert found.layers == layers and found.optimum == ranked[0][0]
        assert (found.rank, found.sets) == (place, math.comb(n, m))
        assert found.entropy == pytest.approx(entropy, abs=1e-10)
        assert found.regret >= 0 and found.regret == pytest.approx(ranked[0][1] - entropy, abs=1e-10)
        pairs = [linear_cka(Z[i], Z[j]) for i, j in itertools.combinations(layers, 2)]
        assert found.redundancy == pytest.approx(np.mean(pairs), abs=1e-10) if pairs else math.isnan(found.redundancy)


def test_redundancy_can_be_debiased():
    Z = representatives(0, 4)
    assert standing(grams_of(Z), (1, 2), debiased=True).redundancy == pytest.approx(linear_cka(Z[1], Z[2], debiased=True), abs=1e-10)


def bootstrapped(flat_layers, n=5, rows=4):
    """A stand-in for a fingerprint: all layers have rank one but the flat ones, which have full entropy."""

    def grams(flat):
        K = torch.zeros(n, rows, rows, dtype=torch.float64)
        K[:, 0, 0] = 1
        for j in flat:
            K[j] = torch.eye(rows)
        return K

    replicates = [grams(flat) for flat in flat_layers[1:]]
    return SimpleNamespace(grams=grams(flat_layers[0]), num_layers=n, bootstrap=torch.stack(replicates) if replicates else None)


def test_stability_counts_what_the_replicates_choose():
    fp = bootstrapped([(1, 3), (1, 3), (1, 3), (1, 4), (2, 4)])
    found = stability(fp, "exhaustive", 2)
    assert found.sets == ((1, 3), (1, 3), (1, 4), (2, 4)) and found.replicates == 4
    assert found.share == 0.5
    assert found.layer_share == (0, 0.75, 0.25, 0.5, 0.5)
    assert found.jaccard == pytest.approx((1 + 1 + 1 / 3 + 0) / 4)
    assert jaccard((2, 15, 27), (27, 2, 9)) == 2 / 4 and jaccard([1], [2]) == 0  # two of four layers; none of two
    with pytest.raises(ElsiError, match="empty"):
        jaccard([], [])


def test_a_rule_is_perfectly_stable_and_options_reach_the_method():
    fp = bootstrapped([(0, 4), (1, 2)])
    assert stability(fp, "last", 2).share == 1 and stability(fp, "last", 2).jaccard == 1
    assert stability(fp, "elsi", 1, after_midpoint="never").sets == ((1,),)
    assert stability(fp, "elsi", 1).sets == ((2,),)  # late half: layers 2 to 4


def test_no_bootstrap_no_stability():
    with pytest.raises(ElsiError, match="no bootstrap"):
        stability(bootstrapped([(1, 3)]), "elsi", 2)


# Refusals.


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2, 40), r"layer set \(2, 40\) outside 0..29 of SmolLM2-135M"),
        ((-1, 3), r"layer set \(-1, 3\) outside 0..29"),
        ((3, 3), r"layer set \(3, 3\) names a layer twice"),
        ((), "empty layer set"),
        ((1.5, 2), "whole numbers"),
        (("a",), "whole numbers"),
        ((True, 2), "whole numbers"),
        ((math.nan,), "whole numbers"),
    ],
)
def test_bad_layer_sets(layers, message):
    with pytest.raises(ElsiError, match=message):
        check_layers(layers, 30, "SmolLM2-135M")


def test_good_layer_sets_come_back_sorted():
    assert check_layers([5, np.int64(2), 9], 10) == (2, 5, 9)
    assert check_layers(range(3), 3) == (0, 1, 2)


GRAMS = grams_of(representatives(0, 5))


@pytest.mark.parametrize("m", [0, -1, 6, 2.5, True])
@pytest.mark.parametrize("search", [elsi, elsi_c, exhaustive])
def test_bad_set_sizes(search, m):
    with pytest.raises(ElsiError, match=rf"m = {m} outside 1..5"):
        search(GRAMS, m)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elsi(GRAMS, 2, k_beam=0), "k_beam = 0: at least 1"),
        (lambda: elsi(GRAMS, 2, k_expand=-1), "k_expand = -1"),
        (lambda: elsi_c(GRAMS, 2, k_pool=0), "k_pool = 0"),
        (lambda: exhaustive(GRAMS, 2, keep=0), "keep = 0"),
        (lambda: elsi(GRAMS, 2, after_midpoint=True), "after_midpoint = True: one of singletons, seeds, never"),
        (lambda: elsi(GRAMS, 2, normalise="trace"), "unknown option normalise"),
        (lambda: elsi(GRAMS, 2, normalize="max"), "normalize = 'max'"),
        (lambda: elsi(GRAMS, 2, alpha=0), "alpha = 0"),
        (lambda: select(GRAMS, "best", 2), "method 'best' unknown"),
        (lambda: select(GRAMS, "last", 2, k_beam=3), "unknown option k_beam"),
        (lambda: elsi(GRAMS[0], 1), r"shape \(6, 6\): \(N, B, B\)"),
        (lambda: exhaustive(torch.eye(2).repeat(60, 1, 1), 8), "too many to try one by one"),
        (lambda: standing(GRAMS, (1, 5)), "outside 0..4"),
    ],
)
def test_bad_options(call, message):
    with pytest.raises(ElsiError, match=message):
        call()


def test_the_limit_lets_the_papers_searches_pass():
    assert math.comb(36, 4) < EXHAUSTIVE_LIMIT


# Sets, ranks and redundancy


@given(st.integers(1, 9), st.data())
def test_layer_sets_are_all_combinations_in_order(n, data):
    m = data.draw(st.integers(1, n))
    layers = data.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n, unique=True))
    assert list(map(tuple, layer_sets(layers, m).tolist())) == list(itertools.combinations(layers, m))


def test_twenty_of_twenty_four_layers_are_chosen_in_little_memory():
    """torch.combinations makes a grid of 24^20 cells of them."""
    grams = torch.from_numpy(Z := representatives(3, 24)) @ torch.from_numpy(Z).mT
    sets, entropies = all_set_entropies(grams, 20)
    assert len(sets) == math.comb(24, 20) == standing(grams, range(20)).sets
    one = int(entropies.argmax())
    singular = np.linalg.svd(np.concatenate(list(Z[sets[one].numpy()]), axis=1), compute_uv=False) ** 2
    p = singular / singular.sum()
    assert float(entropies[one]) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-9)


def test_sets_of_equal_entropy_share_a_rank():
    """The same three matrices summed in another order differ in the last bits, which must rank none below the other."""
    Z = torch.from_numpy(representatives(5, 3)[[0, 1, 2, 0, 1, 2]])
    grams = Z @ Z.mT
    alike = [layers for layers in itertools.combinations(range(6), 3) if len({j % 3 for j in layers}) == 3]
    assert len(alike) == 8 and len({standing(grams, layers).entropy for layers in alike}) > 1
    assert len({standing(grams, layers).rank for layers in alike}) == 1


def test_redundancy_is_the_mean_cka_of_its_pairs_and_needs_no_other_layer():
    Z = representatives(8, 5)
    Z[4] = Z[4, :1]  # all rows of a layer outside the set are equal
    grams = torch.from_numpy(Z) @ torch.from_numpy(Z).mT
    expected = np.mean([linear_cka(*(torch.from_numpy(Z[j]) for j in pair)) for pair in itertools.combinations((0, 2, 3), 2)])
    assert redundancy(grams, (0, 2, 3)) == pytest.approx(expected) == standing(grams, (0, 2, 3)).redundancy
    with pytest.raises(ElsiError, match="layer 4: all rows are equal"):
        redundancy(grams, (0, 4))
    assert math.isnan(standing(grams, (0, 4)).redundancy) and math.isnan(standing(grams, (2,)).redundancy)
    with pytest.raises(ElsiError, match="one layer has no pairs"):
        redundancy(grams, (2,))
