"""Matrix entropy against singular values, closed forms, invariances, and what theory says of layer sets."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.entropy import gram_entropy, matrix_entropy, prepare_grams, set_entropy
from elsi_lib.errors import ElsiError

ALPHAS = (0.25, 0.5, 0.99, 1, 1.01, 1.5, 2, 3, 20, 400, math.inf)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 12)
orders = st.sampled_from(ALPHAS)


def by_singular_values(X, alpha):
    """S_alpha from numpy's SVD, in plain float64 arithmetic."""
    sigma = np.linalg.svd(np.asarray(X, dtype=np.float64), compute_uv=False)
    p = sigma**2 / (sigma**2).sum()
    p = p[p > 1e-28]
    if alpha == 1:
        return -(p * np.log(p)).sum()
    if alpha == math.inf:
        return -math.log(p.max())
    return (alpha * math.log(p.max()) + math.log(((p / p.max()) ** alpha).sum())) / (1 - alpha)


def states(seed, *shape, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", [(1, 7), (9, 1), (32, 576), (200, 20), (32, 32)])
def test_entropy_agrees_with_singular_values(shape, alpha):
    X = states(3, *shape)
    assert matrix_entropy(X, alpha) == pytest.approx(by_singular_values(X, alpha), abs=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("layers", [(0,), (1, 4), (0, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_set_entropy_agrees_with_singular_values_of_the_concatenation(layers, alpha):
    """Layers of very different norm, as real ones have, and one row of huge norm, as attention sinks make."""
    Z = states(5, 6, 32, 100) * torch.tensor([1, 3, 10, 30, 100, 300.0])[:, None, None]
    Z[4:, 0] *= 100
    concatenated = torch.cat([Z[j] for j in layers], dim=1)
    assert set_entropy(Z @ Z.mT, layers, alpha) == pytest.approx(by_singular_values(concatenated, alpha), abs=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rank_deficient_states_do_not_pick_up_rounding(alpha):
    """Zero eigenvalues come out as 1e-17 or so; p^0.25 of those would be no longer small."""
    X = states(6, 32, 3) @ states(7, 3, 500)
    expected = by_singular_values(np.linalg.qr(X.numpy().T)[1].T[:, :3], alpha)  # X has at most three singular values
    assert matrix_entropy(X, alpha) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rank_one_is_zero_and_orthonormal_rows_are_log_T(alpha):
    assert matrix_entropy(torch.outer(states(0, 20), states(1, 50)), alpha) == pytest.approx(0, abs=1e-12)
    assert matrix_entropy(torch.eye(20, 50), alpha) == pytest.approx(math.log(20), abs=1e-12)


def test_entropies_are_in_nats():
    assert matrix_entropy(torch.eye(2)) == pytest.approx(0.6931471805599453, abs=1e-15)


def test_closed_forms():
    X = torch.diag(torch.tensor([3.0, 2.0, 1.0]))  # p = 9/14, 4/14, 1/14
    p = np.array([9, 4, 1]) / 14
    assert matrix_entropy(X, 2) == pytest.approx(-math.log((p**2).sum()), abs=1e-14)  # collision entropy
    assert matrix_entropy(X, math.inf) == pytest.approx(-math.log(9 / 14), abs=1e-14)  # min-entropy
    assert matrix_entropy(X, 1) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-14)
    assert matrix_entropy(X, 0.5) == pytest.approx(2 * math.log(np.sqrt(p).sum()), abs=1e-14)
    assert matrix_entropy(X, 1e6) == pytest.approx(-math.log(9 / 14), abs=1e-5)  # large orders tend to the min-entropy
    assert matrix_entropy(X, 1e-9) == pytest.approx(math.log(3), abs=1e-8)  # small orders to log rank


def test_collision_entropy_needs_no_eigenvalues():
    K = (Z := states(8, 4, 10, 30)) @ Z.mT
    expected = [-math.log((k @ k).trace() / k.trace() ** 2) for k in K]
    assert gram_entropy(K, 2).tolist() == pytest.approx(expected, abs=1e-12)


@given(seeds, st.floats(-15, -1.5), st.sampled_from([-1, 1]))
def test_orders_next_to_one_tend_to_shannon(seed, exponent, sign):
    """S_(1 + e) = S_1 - e Var(log p) / 2 + O(e^2); a plain quotient loses its digits here."""
    X = states(seed, 8, 8)
    p = np.linalg.svd(X.numpy(), compute_uv=False) ** 2
    p /= p.sum()
    entropy = -(p * np.log(p)).sum()
    variance = (p * np.log(p) ** 2).sum() - entropy**2
    e = sign * 10**exponent
    e = (1 + e) - 1
    assert matrix_entropy(X, 1 + e) == pytest.approx(entropy - e * variance / 2, abs=20 * e**2 + 1e-12)


@given(seeds, sizes, sizes, orders)
def test_bounds(seed, rows, columns, alpha):
    assert -1e-12 <= matrix_entropy(states(seed, rows, columns), alpha) <= math.log(min(rows, columns)) + 1e-12


@given(seeds, sizes, sizes)
def test_entropy_falls_with_the_order(seed, rows, columns):
    X = states(seed, rows, columns)
    values = [matrix_entropy(X, alpha) for alpha in ALPHAS]
    assert all(later <= earlier + 1e-11 for earlier, later in itertools.pairwise(values))


@given(seeds, sizes, sizes, orders, st.floats(1e-6, 1e6))
def test_invariant_to_orthogonal_maps_scale_transposition_and_row_order(seed, rows, columns, alpha, scale):
    X = states(seed, rows, columns)
    rng = np.random.default_rng(seed)
    left, right = (torch.from_numpy(np.linalg.qr(rng.standard_normal((n, n)))[0]) for n in (rows, columns))
    before = matrix_entropy(X, alpha)
    for other in (X @ right, left @ X, scale * X, -X, X.mT, X[torch.from_numpy(rng.permutation(rows))]):
        assert matrix_entropy(other, alpha) == pytest.approx(before, abs=1e-9)


@given(seeds, orders, st.integers(2, 5))
def test_copies_of_a_layer_add_nothing(seed, alpha, copies):
    X = states(seed, 6, 9)
    assert matrix_entropy(torch.cat([X] * copies, dim=1), alpha) == pytest.approx(matrix_entropy(X, alpha), abs=1e-10)
    grams = prepare_grams(torch.stack([(k + 1.0) * X @ X.mT for k in range(copies)]), normalize="trace")
    assert set_entropy(grams, range(copies), alpha) == pytest.approx(matrix_entropy(X, alpha), abs=1e-10)


@given(seeds, orders)
def test_orthogonal_layers_of_equal_trace_add_log_of_their_number(seed, alpha):
    """Density matrices on orthogonal supports: S(mean rho_i) = log m + S when all S_i are equal."""
    X = states(seed, 4, 6)
    grams = torch.zeros(3, 12, 12, dtype=torch.float64)
    for i in range(3):
        grams[i, 4 * i : 4 * i + 4, 4 * i : 4 * i + 4] = X @ X.mT
    assert set_entropy(grams, (0, 1, 2), alpha) == pytest.approx(math.log(3) + matrix_entropy(X, alpha), abs=1e-10)


@given(seeds, orders)
def test_a_batch_equals_its_members(seed, alpha):
    K = (Z := states(seed, 2, 3, 5, 7)) @ Z.mT
    batch = gram_entropy(K, alpha)
    assert batch.shape == (2, 3) and batch.dtype == torch.float64
    for i, j in itertools.product(range(2), range(3)):
        assert float(batch[i, j]) == pytest.approx(float(gram_entropy(K[i, j], alpha)), abs=1e-13)


@given(seeds, orders)
def test_centring_equals_centred_states(seed, alpha):
    Z = states(seed, 3, 8, 20) + 5
    centred = Z - Z.mean(1, keepdim=True)
    K = prepare_grams(Z @ Z.mT, center=True)
    torch.testing.assert_close(K, centred @ centred.mT, rtol=1e-10, atol=1e-10)
    explicit = by_singular_values(centred[0], alpha) if alpha >= 0.5 else matrix_entropy(centred[0], alpha)
    assert matrix_entropy(Z[0], alpha, center=True) == pytest.approx(explicit, abs=1e-9)


@given(seeds, orders, st.booleans())
def test_trace_normalisation_equals_scaling_the_states(seed, alpha, center):
    Z = states(seed, 3, 6, 10) * torch.tensor([1.0, 20.0, 0.1])[:, None, None]
    source = Z - Z.mean(1, keepdim=True) if center else Z
    unit = source / torch.linalg.matrix_norm(source)[:, None, None]
    K = prepare_grams(Z @ Z.mT, center, "trace")
    assert K.diagonal(dim1=1, dim2=2).sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-13)
    assert set_entropy(K, (0, 1, 2), alpha) == pytest.approx(matrix_entropy(torch.cat(list(unit), 1), alpha), abs=1e-9)


def test_plain_concatenation_lets_large_norms_dominate():
    Z = states(0, 2, 8, 30) * torch.tensor([1.0, 1e4])[:, None, None]
    assert set_entropy(Z @ Z.mT, (0, 1)) == pytest.approx(set_entropy(Z @ Z.mT, (1,)), abs=1e-6)


# Sets of layers (FIELD: Friedland and Gaubert): F(L) = -tr K_L log K_L is submodular, S_1 is not.


@given(seeds, st.integers(1, 6), st.integers(2, 6))
def test_unnormalised_entropy_is_submodular_and_orders_sets_of_one_size_like_S_1(seed, rank, rows):
    rng = np.random.default_rng(seed)
    Z = torch.from_numpy(rng.standard_normal((5, rows, rank)) * np.exp(rng.normal(size=(5, rows, 1)) * 2))
    grams = prepare_grams(Z @ Z.mT, normalize="trace")
    F = {frozenset(): 0.0}
    for size in range(1, 6):
        for layers in itertools.combinations(range(5), size):
            spectrum = np.linalg.eigvalsh(grams[list(layers)].sum(0).numpy()).clip(1e-300)
            F[frozenset(layers)] = value = -(spectrum * np.log(spectrum)).sum()
            # K_L has trace |L|, so S_1 = F / |L| + log |L|: the same order among sets of one size.
            assert set_entropy(grams, layers) == pytest.approx(value / size + math.log(size), abs=1e-9)
    for smaller in F:
        for x, y in itertools.permutations(set(range(5)) - smaller, 2):  # enough: the gain of x falls when any y joins
            assert F[smaller | {x}] - F[smaller] >= F[smaller | {x, y}] - F[smaller | {y}] - 1e-9


def test_plain_matrix_entropy_is_neither_monotone_nor_submodular():
    """Layers 0 and 1: I / 2; layer 2: diag(1, 0); all of trace 1."""
    grams = torch.stack([torch.eye(2) / 2, torch.eye(2) / 2, torch.diag(torch.tensor([1.0, 0.0]))]).double()

    def binary(p):
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    alone, both = set_entropy(grams, (0,)), set_entropy(grams, (0, 1))
    with_2, all_three = set_entropy(grams, (0, 2)), set_entropy(grams, (0, 1, 2))
    assert [alone, both, with_2, all_three] == pytest.approx([math.log(2), math.log(2), binary(3 / 4), binary(2 / 3)], abs=1e-12)
    assert with_2 < alone  # a further layer lowers it
    assert with_2 - alone < all_three - both  # and is worth more to the larger set


# What has no entropy.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(bad):
    X = torch.ones(3, 4)
    X[1, 2] = bad
    with pytest.raises(ElsiError, match="NaN or infinity"):
        matrix_entropy(X)


@pytest.mark.parametrize("alpha", [0, -1, math.nan, -math.inf])
def test_orders_that_do_not_exist_are_refused(alpha):
    with pytest.raises(ElsiError, match="alpha = "):
        matrix_entropy(torch.eye(3), alpha)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (2, 3, 4)])
def test_only_a_non_empty_matrix_is_accepted(shape):
    with pytest.raises(ElsiError, match="non-empty matrix"):
        matrix_entropy(torch.ones(shape))


def test_zero_states_are_refused():
    with pytest.raises(ElsiError, match="zero"):
        matrix_entropy(torch.zeros(3, 4))
    with pytest.raises(ElsiError, match="zero"):
        gram_entropy(torch.stack([torch.eye(3), torch.zeros(3, 3)]))
    with pytest.raises(ElsiError, match="layer 1 has zero trace"):
        prepare_grams(torch.stack([torch.eye(3), torch.zeros(3, 3)]), normalize="trace")


@given(seeds, st.floats(1e-3, 1e6))
def test_equal_rows_are_refused_when_centred_instead_of_scoring_rounding(seed, scale):
    X = states(seed, 1, 50, scale=scale).expand(7, 50) + 0.0
    with pytest.raises(ElsiError, match="all states are equal"):
        matrix_entropy(X, center=True)
    with pytest.raises(ElsiError, match="layer 1: all rows are equal"):
        prepare_grams(torch.stack([states(seed, 7, 50) @ states(seed, 7, 50).mT, X @ X.mT]), center=True)


def test_unknown_normalisation_is_refused():
    with pytest.raises(ElsiError, match="normalize = 'norm': one of none, trace"):
        prepare_grams(torch.eye(2)[None], normalize="norm")


def test_numpy_and_lists_are_taken():
    assert matrix_entropy(np.eye(4, dtype=np.float32)) == pytest.approx(math.log(4))
    assert matrix_entropy([[1.0, 0.0], [0.0, 1.0]]) == pytest.approx(math.log(2))
