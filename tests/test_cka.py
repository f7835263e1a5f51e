"""Linear CKA against published values, distance correlation, U-statistics, explicit centring, and layers with known compartments."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform

from elsi_lib.cka import (
    cka_matrix,
    compartments,
    conditional_cka_matrix,
    find_boundaries,
    linear_cka,
    permutation_null,
    transition_scores,
)
from elsi_lib.errors import ElsiError

seeds = st.integers(0, 2**32 - 1)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def by_definition(X, Y):
    """<HKH, HLH> / (||HKH|| ||HLH||) with H written out."""
    H = np.eye(len(X)) - 1 / len(X)
    K, L = H @ np.asarray(X @ X.T) @ H, H @ np.asarray(Y @ Y.T) @ H
    return (K * L).sum() / math.sqrt((K**2).sum() * (L**2).sum())


def test_published_value_for_gaussians_of_seed_1337():
    rng = np.random.RandomState(1337)
    X = rng.randn(100, 10)
    Y = rng.randn(100, 10) + X
    assert linear_cka(X, Y) == pytest.approx(0.55761, abs=5e-6)
    assert linear_cka(X, Y, debiased=True) == pytest.approx(0.51346, abs=5e-6)


def test_published_value_for_iris():
    path = Path(scipy.__file__).parent / "spatial" / "tests" / "data" / "iris.txt"
    if not path.is_file():
        pytest.skip("this build of scipy comes without its test data")
    iris = np.loadtxt(path)
    iris[34], iris[37] = (4.9, 3.1, 1.5, 0.2), (4.9, 3.6, 1.4, 0.1)  # Fisher's rows, which the UCI copy has wrong
    assert linear_cka(iris[:, :2], iris[:, 2:]) == pytest.approx(0.7702935540, abs=1e-10)
    assert linear_cka(iris[:, :2], iris[:, 2:], debiased=True) == pytest.approx(0.7697278628, abs=1e-10)


def distance_correlation(X, Y, unbiased):
    """Squared distance correlation of exponent 2, from distances between rows alone: Szekely, Rizzo and Bakirov 2007, and with
    U-centring Szekely and Rizzo 2014. A library for it, dcor, brings a compiler for this one comparison."""
    n, centred = len(X), []
    for rows in (X, Y):
        D = squareform(pdist(rows.numpy(), "sqeuclidean"))
        one, total = (n - 2, (n - 1) * (n - 2)) if unbiased else (n, n * n)
        A = D - D.sum(0) / one - D.sum(1)[:, None] / one + D.sum() / total
        if unbiased:
            np.fill_diagonal(A, 0)
        centred.append(A)
    A, B = centred
    return (A * B).sum() / math.sqrt((A * A).sum() * (B * B).sum())


@pytest.mark.parametrize("debiased", [False, True])
@given(seeds, st.integers(4, 20), st.integers(1, 8), st.integers(1, 8), st.floats(0, 3))
def test_both_estimators_are_distance_correlations(debiased, seed, rows, d, e, mixed):
    X, Y = normal(seed, rows, d), normal(seed + 1, rows, e)
    Y = Y + mixed * X[:, :1]
    assert linear_cka(X, Y, debiased=debiased) == pytest.approx(distance_correlation(X, Y, debiased), abs=1e-9)


def unbiased_hsic(K, L):
    """The U-statistic, written out over all quadruples of distinct rows (Song et al. 2012, equation 4)."""
    terms = [K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q]) for i, j, q, r in itertools.permutations(range(len(K)), 4)]
    return math.fsum(terms) / len(terms)


@pytest.mark.parametrize(("seed", "rows"), [(0, 4), (1, 5), (2, 7)])
def test_the_debiased_estimator_is_made_of_u_statistics(seed, rows):
    X, Y = normal(seed, rows, 3), normal(seed + 1, rows, 2)
    K, L = (X @ X.T).numpy(), (Y @ Y.T).numpy()
    expected = unbiased_hsic(K, L) / math.sqrt(unbiased_hsic(K, K) * unbiased_hsic(L, L))
    assert linear_cka(X, Y, debiased=True) == pytest.approx(expected, abs=1e-9)


@given(seeds, st.integers(2, 15), st.integers(1, 6))
def test_biased_estimator_is_the_papers_formula(seed, rows, d):
    X, Y = normal(seed, rows, d) + 3, normal(seed + 1, rows, 4) * 7
    assert linear_cka(X, Y) == pytest.approx(by_definition(X, Y), abs=1e-10)


@given(seeds, st.booleans(), st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_invariances(seed, debiased, scale, shift):
    X, Y = normal(seed, 12, 5), normal(seed + 1, 12, 7)
    rotation = torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).standard_normal((5, 5)))[0])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(12))
    before = linear_cka(X, Y, debiased)
    moved = scale * (X @ rotation + shift)
    for pair in ((moved, Y), (Y, X), (X[order], Y[order])):
        assert linear_cka(*pair, debiased) == pytest.approx(before, abs=1e-9)
    assert linear_cka(X, moved, debiased) == pytest.approx(1, abs=1e-9)


def test_biased_estimator_saturates_with_few_rows_and_the_debiased_does_not():
    """32 rows of 2560 independent Gaussians: d / (d + 32) against 0; a standard error over the 200 pairs is below 0.001."""
    rng = np.random.default_rng(0)
    Z = torch.from_numpy(rng.standard_normal((21, 32, 2560)))
    upper = torch.triu_indices(21, 21, 1).unbind()
    biased, debiased = (cka_matrix(Z @ Z.mT, flag)[upper] for flag in (False, True))
    assert float(biased.mean()) == pytest.approx(2560 / (2560 + 32), abs=0.002)
    assert float(debiased.mean()) == pytest.approx(0, abs=0.01) and float(debiased.min()) < 0


@given(seeds, st.booleans())
def test_matrix_holds_every_pair_and_batches(seed, debiased):
    Z = normal(seed, 2, 3, 6, 4)
    M = cka_matrix(Z @ Z.mT, debiased)
    assert M.shape == (2, 3, 3) and M.dtype == torch.float64
    torch.testing.assert_close(M, M.mT)
    for b in range(2):
        for i in range(3):
            assert M[b, i, i] == 1
            for j in range(3):
                assert float(M[b, i, j]) == pytest.approx(linear_cka(Z[b, i], Z[b, j], debiased), abs=1e-10)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("layers", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_conditional_cka_equals_cka_of_explicit_concatenations(layers, debiased):
    Z = normal(4, 4, 9, 5)
    M = conditional_cka_matrix(Z @ Z.mT, layers, debiased)
    joined = [torch.cat([Z[j] for j in sorted({*layers, i})], dim=1) for i in range(4)]
    for i in range(4):
        for j in range(4):
            assert float(M[i, j]) == pytest.approx(linear_cka(joined[i], joined[j], debiased), abs=1e-10)


def test_transition_scores_by_brute_force():
    M = normal(2, 7, 7)
    expected = [sum((M[l + 1, j] - M[l, j]).item() ** 2 for j in range(7)) for l in range(6)]  # noqa: E741 - the paper's l
    assert transition_scores(M).tolist() == pytest.approx(expected)
    with pytest.raises(ElsiError, match="square"):
        transition_scores(M[:3])


def layers_in_compartments(sizes, noise=0.02):
    """Layers that share one representative within a compartment, up to noise; (N, B, B)."""
    rng = np.random.default_rng(0)
    Z = np.concatenate([np.repeat(rng.standard_normal((1, 16, 200)), size, axis=0) for size in sizes])
    Z = torch.from_numpy(Z + noise * rng.standard_normal(Z.shape))
    return Z @ Z.mT


@pytest.mark.parametrize("sizes", [(7, 22, 7), (1, 11), (11, 1), (3, 4, 5, 6), (1, 1, 1), (2, 1, 2), (5,)])
@pytest.mark.parametrize("debiased", [False, True])
def test_compartments_of_constructed_layers_are_found(sizes, debiased):
    M = cka_matrix(layers_in_compartments(sizes), debiased)
    edges = np.cumsum(sizes)
    if len(sizes) == 1:
        return  # one compartment has no scale to measure its noise by; see the flat case below
    boundaries = find_boundaries(transition_scores(M))
    if 1 in sizes[1:-1]:  # two boundaries that touch make one plateau or slope: at least one of them is found
        assert set(boundaries) <= set((edges[:-1] - 1).tolist()) and boundaries
        return
    assert boundaries == tuple((edges[:-1] - 1).tolist())
    assert compartments(boundaries, sum(sizes)) == tuple((int(e - s), int(e) - 1) for s, e in zip(sizes, edges, strict=True))


def test_the_papers_compartments():
    assert compartments((6, 28), 36) == ((0, 6), (7, 28), (29, 35))
    assert compartments((), 4) == ((0, 3),)


def test_prominence_is_a_share_of_the_largest_score():
    delta = torch.tensor([0.0, 1.0, 0.0, 0.2, 0.15, 0.3, 0.0])
    assert find_boundaries(delta, 0.1) == (1, 5)  # 0.2 rises 0.05 above its saddle to 0.3
    assert find_boundaries(delta, 0.04) == (1, 3, 5)
    assert find_boundaries(delta, 0.5) == (1,)
    assert find_boundaries(delta * 1e-6, 0.1) == (1, 5)
    assert find_boundaries(torch.tensor([5.0, 1.0, 4.0]), 0.1) == (0, 2)  # first and last transition count too
    assert find_boundaries(torch.zeros(5)) == () and find_boundaries(torch.zeros(0)) == ()


@pytest.mark.parametrize("prominence", [0, -1, 1.5, math.nan])
def test_prominence_outside_its_range(prominence):
    with pytest.raises(ElsiError, match="prominence"):
        find_boundaries(torch.ones(3), prominence)


def test_permutation_null():
    Z = normal(9, 3, 32, 8)
    K = Z @ Z.mT
    null = permutation_null(K, repeats=300, seed=1, debiased=True)
    assert null.shape == (300, 3, 3)
    # The expectation over all permutations of centred Gram matrices is exact: the debiased estimator's is 0.
    assert null.mean(0).abs().max() < 0.03
    assert null.diagonal(dim1=1, dim2=2).max() < 0.9  # a layer against itself, shuffled, is not 1
    torch.testing.assert_close(null, permutation_null(K, 300, 1, True))
    assert not torch.equal(null, permutation_null(K, 300, 2, True))
    # Mean over permutations of <HKH, P HLH P'> is tr(HKH) tr(HLH) / (T - 1).
    H = torch.eye(32, dtype=torch.float64) - 1 / 32
    C = H @ K @ H
    trace, norm = C.diagonal(dim1=1, dim2=2).sum(-1), torch.linalg.matrix_norm(C)
    expected = torch.outer(trace / norm, trace / norm) / 31
    torch.testing.assert_close(permutation_null(K, 300, 3).mean(0), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize(("rows", "debiased"), [(1, False), (3, True)])
def test_too_few_rows(rows, debiased):
    with pytest.raises(ElsiError, match=f"got {rows}"):
        linear_cka(torch.rand(rows, 5), torch.rand(rows, 5), debiased)


@pytest.mark.parametrize("debiased", [False, True])
def test_equal_rows_have_no_cka(debiased):
    X = (normal(1, 1, 50) * 1e3).expand(8, 50)
    with pytest.raises(ElsiError, match="layer 1: all rows are equal"):
        cka_matrix(torch.stack([normal(2, 8, 50) @ normal(2, 8, 50).mT, X @ X.mT]), debiased)


def test_other_bad_input():
    with pytest.raises(ElsiError, match="same rows"):
        linear_cka(torch.rand(4, 5), torch.rand(5, 5))
    with pytest.raises(ElsiError, match="NaN or infinity"):
        linear_cka(torch.full((4, 5), math.nan), torch.rand(4, 5))
