import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_lib import criteria
from elsi_lib.entropy import matrix_entropy
from elsi_lib.errors import ElsiError

ORTHOGONAL = torch.stack([torch.diag(torch.eye(4, dtype=torch.float64)[i]) for i in range(4)])  # layer i is e_i e_i^T
EQUAL = torch.stack([torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))] * 3)
PAIR = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])  # two rank-one layers at 45 degrees, traces 2 and 2


def random_grams(seed, layers=5, rows=4, features=3):
    states = torch.randn(layers, rows, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    states *= torch.arange(1, layers + 1)[:, None, None]
    return states @ states.mT


def test_orthogonal_layers_have_the_entropy_of_their_weights():
    sets = [[0, 1, 2], [1, 2, 3]]
    for values in (
        criteria.set_entropies(ORTHOGONAL, sets),
        criteria.holevo_chi(ORTHOGONAL, sets, "trace"),
        criteria.holevo_chi(ORTHOGONAL, sets, "equal"),
    ):
        np.testing.assert_allclose(values, math.log(3), atol=1e-12)
    np.testing.assert_allclose(criteria.effective_rank(ORTHOGONAL, sets), 3)
    np.testing.assert_allclose(criteria.log_det_information(ORTHOGONAL, sets, 2.0), 3 * math.log(3))
    np.testing.assert_allclose(criteria.von_neumann(ORTHOGONAL, sets), 0, atol=1e-12)


def test_weights_of_chi_are_the_traces_or_equal():
    grams = ORTHOGONAL[:2] * torch.tensor([3.0, 1.0])[:, None, None]
    of_weights = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(criteria.holevo_chi(grams, [[0, 1]], "trace")) == pytest.approx(of_weights)
    assert float(criteria.holevo_chi(grams, [[0, 1]], "equal")) == pytest.approx(math.log(2))


def test_equal_layers_add_nothing():
    single = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(criteria.set_entropies(EQUAL, [[0, 1, 2]])) == pytest.approx(single)
    for weights in criteria.WEIGHTS:
        assert float(criteria.holevo_chi(EQUAL, [[0, 2]], weights)) == pytest.approx(0, abs=1e-12)
    roots = math.sqrt(3) / (1 + math.sqrt(3)), 1 / (1 + math.sqrt(3))
    assert float(criteria.effective_rank(EQUAL, [[0, 1]])) == pytest.approx(math.exp(-sum(p * math.log(p) for p in roots)))


def test_two_by_two_by_hand():
    # K = [[3, 1], [1, 1]]: eigenvalues 2 +- sqrt 2, trace 4
    lam = np.array([2 + math.sqrt(2), 2 - math.sqrt(2)])
    p = lam / 4
    s1 = -(p * np.log(p)).sum()
    assert float(criteria.set_entropies(PAIR, [[0, 1]])) == pytest.approx(s1)
    assert float(criteria.holevo_chi(PAIR, [[0, 1]])) == pytest.approx(s1)  # each layer alone has rank one
    assert float(criteria.log_det_information(PAIR, [[0, 1]], 1.0)) == pytest.approx(math.log(7))  # det [[4, 1], [1, 2]]
    assert float(criteria.log_det_information(PAIR, [[0, 1]])) == pytest.approx(math.log(7))  # B over the mean trace is 2 / 2
    assert float(criteria.von_neumann(PAIR, [[0, 1]])) == pytest.approx(-(lam / 2 * np.log(lam / 2)).sum())
    sigma = np.sqrt(lam) / np.sqrt(lam).sum()
    assert float(criteria.effective_rank(PAIR, [[0, 1]])) == pytest.approx(math.exp(-(sigma * np.log(sigma)).sum()))


def test_on_similarity_by_hand():
    M = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.0]])
    assert criteria.log_det_similarity(M, [[0, 1], [0, 2]]).tolist() == pytest.approx([math.log(0.75), 0])
    assert criteria.facility_location(M, [[0, 1], [0, 2], [1, 2]]).tolist() == pytest.approx([-0.8, -0.5, -0.5])
    assert criteria.dispersion(M, [[0, 1, 2]]).tolist() == pytest.approx([0.5])
    assert criteria.dispersion(M, [[0, 1], [1, 2]]).tolist() == pytest.approx([0.5, 0.8])
    assert criteria.dispersion(M, [[1]]).isnan().all()
    same = torch.ones(2, 2)
    assert criteria.log_det_similarity(same, [[0, 1]]).tolist() == [-math.inf]
    beyond = torch.tensor([[1.0, 1.5], [1.5, 1.0]])  # as a debiased estimate can be
    assert criteria.log_det_similarity(beyond, [[0, 1]]).tolist() == [-math.inf]


def test_set_entropy_is_that_of_the_concatenation_and_f_its_shift():
    states = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grams = states @ states.mT
    joined = torch.cat([states[0], states[2], states[3]], dim=1)
    assert float(criteria.set_entropies(grams, [[0, 2, 3]])) == pytest.approx(matrix_entropy(joined))
    entropy = criteria.set_entropies(grams, [[0, 2, 3], [0, 1, 2]], normalize="trace")
    np.testing.assert_allclose(criteria.von_neumann(grams, [[0, 2, 3], [0, 1, 2]]), 3 * (entropy - math.log(3)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_submodular_as_the_docstrings_say_over_all_subsets(seed):
    grams = random_grams(seed)
    M = torch.rand(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    M = ((M + M.T) / 2).fill_diagonal_(1.0)
    functions = {
        "f": lambda sets: criteria.von_neumann(grams, sets),
        "det": lambda sets: criteria.log_det_information(grams, sets),
        "coverage": lambda sets: criteria.facility_location(M, sets),
    }
    for name, function in functions.items():
        value = {L: float(function([list(L)])) for m in range(1, 6) for L in itertools.combinations(range(5), m)}
        if name != "coverage":
            value[()] = 0.0
        at = lambda given, value=value: value[tuple(sorted(given))]  # noqa: E731
        for B in value:
            for A in (A for m in range(len(B)) for A in itertools.combinations(B, m) if A in value):
                for j in set(range(5)) - set(B):
                    assert at((*A, j)) - at(A) >= at((*B, j)) - at(B) - 1e-9
                    if name != "f":
                        assert at((*B, j)) >= at(B) - 1e-9


def test_summed():
    assert criteria.summed([0.5, 0.1, 0.2], [[0, 2], [1, 2]]).tolist() == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: criteria.set_entropies(EQUAL, [[0, 3]]), r"layer set \(0, 3\) outside 0..2"),
        (lambda: criteria.set_entropies(EQUAL, [[1, 1]]), r"layer set \(1, 1\) names a layer twice"),
        (lambda: criteria.effective_rank(EQUAL, [0, 1]), r"layer sets of shape \(2,\)"),
        (lambda: criteria.effective_rank(EQUAL[0], [[0, 1]]), r"shape \(2, 2\): \(N, B, B\)"),
        (lambda: criteria.holevo_chi(EQUAL, [[0, 1]], "even"), "weights = 'even': one of trace, equal"),
        (lambda: criteria.log_det_information(EQUAL, [[0, 1]], 0.0), "scale = 0.0: above 0"),
        (lambda: criteria.set_entropies(EQUAL * torch.tensor([1, 0, 1])[:, None, None], [[0, 2]]), "layer 1 has zero trace"),
        (lambda: criteria.set_entropies(EQUAL * math.nan, [[0, 1]]), "NaN or infinity in the Gram matrices"),
        (lambda: criteria.dispersion(torch.ones(2, 3), [[0, 1]]), r"square layer-by-layer similarity is expected, got shape \(2, 3\)"),
        (lambda: criteria.facility_location(torch.full((2, 2), math.nan), [[0, 1]]), "NaN or infinity in the similarity"),
        (lambda: criteria.summed(torch.ones(2, 2), [[0, 1]]), r"values of shape \(2, 2\): one per layer"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ElsiError, match=words):
        call()
