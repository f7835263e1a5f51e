import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import fingerprint

from elsi_lib.entropy import gram_entropy, prepare_grams
from elsi_lib.errors import ElsiError
from elsi_lib.report.questions import submodularity
from elsi_lib.selection import elsi, exhaustive

FP = fingerprint(layers=6, hidden=10, prompts=5, bootstrap=3)
BROKEN = submodularity.violations([FP, None])
FOUND = submodularity.searches([FP])


def values_by_hand(grams, form):
    """Every set's value by its definition, no shortcut through S_1."""
    grams = prepare_grams(grams, normalize="none" if form == submodularity.PLAIN else "trace")
    values = {}
    for m in range(1, 6):
        for L in itertools.combinations(range(len(grams)), m):
            K = grams[list(L)].sum(0)
            lam = torch.linalg.eigvalsh(K).clamp_min(0)
            values[L] = float(torch.special.entr(lam).sum() if form == submodularity.F else gram_entropy(K))
    return values


@pytest.mark.parametrize("form", [submodularity.PLAIN, submodularity.TRACE, submodularity.F])
def test_violations_are_those_of_brute_force(form):
    value = values_by_hand(FP.grams, form)
    at = lambda given: value[tuple(sorted(given))]  # noqa: E731
    for a, b in ((1, 2), (1, 3), (2, 3), (1, 4), (3, 4)):
        slack = [
            at((*A, j)) - at(A) - at((*B, j)) + at(B)
            for B in itertools.combinations(range(6), b)
            for A in itertools.combinations(B, a)
            for j in set(range(6)) - set(B)
        ]
        row = BROKEN[(BROKEN["objective"] == form) & (BROKEN["size_a"] == a) & (BROKEN["size_b"] == b)].iloc[0]
        assert row["all"] and row["tried"] == len(slack)
        assert row["violated"] == pytest.approx(np.mean(np.array(slack) < -1e-9), abs=1e-9)
        assert row["worst"] == pytest.approx(max(0.0, -min(slack)), abs=1e-9)
    gains = [at((*B, j)) - at(B) for B in itertools.combinations(range(6), 2) for j in set(range(6)) - set(B)]
    row = BROKEN[(BROKEN["objective"] == form) & (BROKEN["property"] == "monotone") & (BROKEN["size_b"] == 2)].iloc[0]
    assert row["violated"] == pytest.approx(np.mean(np.array(gains) < -1e-9), abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_f_is_never_broken_and_no_case_is_new_in_a_sample(seed):
    fp = fingerprint(layers=5, hidden=6, prompts=3, bootstrap=0, spectra=2, seed=seed)
    broken = submodularity.violations([fp], largest=4, limit=10)
    f = broken[(broken["objective"] == submodularity.F) & (broken["property"] == "submodular")]
    assert (f["violated"] == 0).all() and (f["worst"] == 0).all() and not f["all"].any() and (f["tried"] == 10).all()


def test_orthogonal_layers_are_submodular_and_monotone_under_every_objective():
    grams = torch.stack([torch.diag(row) for row in torch.eye(6, dtype=torch.float64)])
    values = submodularity._Values(grams, "none", 3)
    sets = np.array([[4, 1], [0, 5]])
    np.testing.assert_allclose(values(sets, submodularity.PLAIN), math.log(2))
    np.testing.assert_allclose(values(np.array([[0, 1, 2, 3]]), submodularity.PLAIN), math.log(4))  # beyond the tables
    np.testing.assert_allclose(values(sets, submodularity.F), 0, atol=1e-12)


def test_rank_is_the_place_in_lexicographic_order():
    for m in (1, 2, 3, 4):
        sets = np.array(list(itertools.combinations(range(7), m)))
        assert submodularity._rank(sets, 7).tolist() == list(range(len(sets)))


def test_triples_are_all_or_a_seeded_sample():
    every, whole = submodularity.triples(5, 1, 2, 1000)
    seen = {(tuple(row[:1]), tuple(sorted(row[:2])), row[2]) for row in every.tolist()}
    assert whole and len(every) == len(seen) == math.comb(5, 2) * 2 * 3
    drawn, whole = submodularity.triples(5, 1, 2, 8, seed=3)
    assert not whole and drawn.shape == (8, 3) and all(len(set(row)) == 3 for row in drawn.tolist())
    assert (drawn == submodularity.triples(5, 1, 2, 8, seed=3)[0]).all()
    with pytest.raises(ElsiError, match=r"sizes 2 and 2 of 5 layers: 1 <= \|A\| < \|B\| < N"):
        submodularity.triples(5, 2, 2, 8)


def test_searches_against_the_optimum():
    for row in FOUND.itertuples():
        normalize = submodularity.NORMALIZE[row.objective]
        best = exhaustive(FP, row.m, normalize=normalize)
        assert row.optimum == " ".join(map(str, best.layers))
        own = FP.entropy([int(j) for j in row.layers.split()], normalize=normalize)
        assert row.entropy == pytest.approx(own) and row.regret == pytest.approx(best.entropy - own, abs=1e-12)
        if row.width == 0:  # unlimited is exhaustive: a beam that keeps everything says the same
            assert elsi(FP, row.m, k_beam=None, k_expand=None, after_midpoint="never", normalize=normalize).layers == best.layers
            assert row.rank == 1
    greedy = FOUND[(FOUND["width"] == 1) & (FOUND["objective"] == submodularity.PLAIN)].set_index("m")["layers"]
    chain = [set(greedy[m].split()) for m in (1, 2, 3, 4)]
    assert all(a < b for a, b in itertools.pairwise(chain))
    resampled = FOUND[FOUND["replicates"] > 0]
    assert set(resampled["width"]) == {1, 10} and set(resampled["m"]) == {2, 3} and resampled["found"].between(0, 1).all()


def test_the_guarantee_holds_and_is_the_formula():
    bound = submodularity.guarantees([FP])
    assert (bound["greedy"] >= bound["guaranteed"] - 1e-12).all() and (bound["best"] >= bound["greedy"] - 1e-12).all()
    row = bound[(bound["reading"] == "centred") & (bound["m"] == 2)].iloc[0]
    grams = prepare_grams(FP.grams, True, "trace")
    for L in itertools.combinations(range(6), 4):  # c keeps every eigenvalue of the sets that the proof compares at 1 / e or below
        assert row["scale"] * float(torch.linalg.eigvalsh(grams[list(L)].sum(0))[-1]) <= 1 / math.e + 1e-12
    said = (1 - 1 / math.e) * row["best"] - math.log(1 / (2 * row["scale"])) / math.e
    assert row["guaranteed"] == pytest.approx(max(said, 0.0))


def test_finding_and_figure():
    found = submodularity.finding(BROKEN, FOUND)
    assert "F shows no violation" in found.text and found.values["open_submodularity_f_violations"] == 0
    assert submodularity.figure(BROKEN, FOUND) and "| m |" in submodularity.search_table(FOUND)
    bound = submodularity.guarantees([FP])
    assert "guarantee" in submodularity.bound_finding(bound).text and submodularity.guarantee_table(bound).count("\n") == 9
