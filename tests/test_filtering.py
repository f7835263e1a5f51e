"""Predictive entropy and the rho filter against torch.distributions, scipy and the definition."""

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.errors import ElsiError
from elsi_lib.filtering import kept_count, token_entropy, top_entropy_positions


def test_entropy_agrees_with_torch_distributions_and_scipy():
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)) * 4
    H = token_entropy(logits)
    assert H.shape == (50,) and H.dtype == torch.float32
    torch.testing.assert_close(H, torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-5, atol=1e-5)
    p = np.exp(logits.double().numpy() - scipy.special.logsumexp(logits.double().numpy(), axis=-1, keepdims=True))
    np.testing.assert_allclose(H.numpy(), scipy.stats.entropy(p, axis=-1), rtol=1e-5)


def test_rows_that_span_several_chunks_are_all_scored():
    logits = torch.randn(7, 70_000, generator=torch.Generator().manual_seed(1))  # fewer than two rows fit one chunk
    torch.testing.assert_close(token_entropy(logits), torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 2, 49_152, 151_936])
def test_equal_logits_give_log_of_the_vocabulary(vocabulary):
    assert token_entropy(torch.full((3, vocabulary), 7.0)).tolist() == pytest.approx([math.log(vocabulary)] * 3, abs=1e-5)


def test_an_impossible_token_contributes_nothing():
    inf = math.inf
    logits = torch.tensor([[0.0, 0.0, -inf, -inf], [5.0, -inf, -inf, -inf], [1.0, 2.0, 3.0, -inf]])
    expected = [math.log(2), 0.0, scipy.stats.entropy(np.exp([1.0, 2.0, 3.0]))]
    assert token_entropy(logits).tolist() == pytest.approx(expected, abs=1e-6)


def test_large_logits_neither_overflow_nor_lose_the_answer():
    logits = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -3e38, -3e38], [0.0, -2e4, -3e4]])
    assert token_entropy(logits).tolist() == pytest.approx([math.log(2), math.log(3), 0.0], abs=1e-6)


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(token_entropy(logits).double(), expected, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_are_kept_and_the_logits_are_not_changed():
    logits = torch.randn(2, 3, 11)
    before = logits.clone()
    H = token_entropy(logits)
    assert H.shape == (2, 3) and torch.equal(logits, before)
    assert torch.equal(H.flatten(), token_entropy(logits.reshape(6, 11)))


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_what_is_no_distribution_is_refused_with_its_position(bad):
    with pytest.raises(ElsiError, match="position 1 "):
        token_entropy(torch.tensor([[0.0, 1.0], bad]))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 100))
def test_filter_keeps_the_highest_in_order_and_the_earlier_among_equals(values, percent):
    kept = top_entropy_positions(torch.tensor(values, dtype=torch.float32), percent / 100).tolist()
    count = -(-percent * len(values) // 100)
    by_definition = sorted(range(len(values)), key=lambda t: (-values[t], t))[:count]
    assert kept == sorted(by_definition)


@given(st.integers(1, 5000), st.integers(1, 1000))
def test_the_share_is_rounded_up_exactly(length, thousandths):
    assert kept_count(length, thousandths / 1000) == math.ceil(Fraction(thousandths, 1000) * length)


@pytest.mark.parametrize(
    ("length", "rho", "count"), [(10, 0.3, 3), (100, 0.07, 7), (1, 1e-12, 1), (0, 0.3, 0), (104, 0.3, 32), (7, 1, 7)]
)
def test_share_examples(length, rho, count):
    assert kept_count(length, rho) == count


@pytest.mark.parametrize("rho", [0, -0.3, 1.01, 30, math.nan, math.inf])
def test_rho_outside_its_range_is_named(rho):
    with pytest.raises(ElsiError, match=r"rho = .* outside \(0, 1\]"):
        top_entropy_positions(torch.rand(10), rho)


@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_only_one_prompts_vector_is_accepted(shape):
    with pytest.raises(ElsiError, match="one prompt's non-empty vector"):
        top_entropy_positions(torch.rand(shape), 0.3)
