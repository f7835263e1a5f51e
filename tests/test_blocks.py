"""Block averages against a plain loop that follows the paper's words."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib.blocks import BlockAverage, block_sum
from elsi_lib.errors import ElsiError


def loop(states: np.ndarray, block: int, reading: str) -> tuple[np.ndarray, int]:
    """(n, d) -> mean block (B, d) and the number of blocks, one row at a time."""
    whole = len(states) // block
    rows = []
    for b in range(block):
        if reading == "position":
            rows.append(sum(states[k * block + b] for k in range(whole)) / whole)
        else:
            rows.append(sum(states[b * whole + k] for k in range(whole)) / whole)
    return np.stack(rows), whole if reading == "position" else 1


@given(st.integers(1, 6), st.integers(0, 40), st.sampled_from(["position", "segment"]), st.integers(0, 2**32))
def test_block_sum_equals_a_plain_loop(block, extra, reading, seed):
    states = torch.randn(2, block + extra, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sums, blocks = block_sum(states, block, reading)
    assert sums.shape == (2, block, 3) and sums.dtype == torch.float32
    for layer in range(2):
        mean, count = loop(states[layer].numpy(), block, reading)
        assert blocks == count
        np.testing.assert_allclose(sums[layer].numpy() / blocks, mean, atol=1e-5)


def test_the_readings_differ_as_the_paper_leaves_open():
    states = torch.arange(6.0)[:, None]  # tokens 0..5 in blocks of two
    assert (block_sum(states, 2, "position")[0] / 3).flatten().tolist() == [2.0, 3.0]  # means of 0, 2, 4 and of 1, 3, 5
    assert block_sum(states, 2, "segment")[0].flatten().tolist() == [1.0, 4.0]  # means of 0, 1, 2 and of 3, 4, 5
    assert block_sum(states, 2, "position")[1] == 3 and block_sum(states, 2, "segment")[1] == 1


def test_what_follows_the_last_whole_block_is_left_out():
    states = torch.ones(7, 2)
    states[6] = 1000
    assert block_sum(states, 3)[0].max() == 2 and block_sum(states, 3, "segment")[0].max() == 1


def test_bfloat16_states_are_summed_in_float32():
    states = torch.full((512, 1), 1.0078125).bfloat16()  # a running bfloat16 sum of these stalls at 256
    assert block_sum(states, 1)[0].item() == 512 * 1.0078125


@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.sampled_from(["position", "segment"]), st.integers(0, 8))
def test_online_equals_all_at_once_and_parts_merge(lengths, reading, cut):
    """The mean is over all blocks of all prompts, not over prompts: a long prompt weighs more."""
    generator = torch.Generator().manual_seed(len(lengths))
    prompts = [torch.randn(3, n, 4, generator=generator) for n in lengths]
    online, left, right = (BlockAverage(3, 2, 4) for _ in range(3))
    for i, states in enumerate(prompts):
        sums, blocks = block_sum(states, 2, reading)
        online.add(sums, blocks)
        (left if i < cut else right).add(sums, blocks)
    left.merge(right)
    total = sum(float(loop(np.eye(n), 2, reading)[1]) for n in lengths)
    Z = np.stack([
        sum(loop(s[j].double().numpy(), 2, reading)[0] * loop(s[j].numpy(), 2, reading)[1] for s in prompts) / total for j in range(3)
    ])
    assert online.blocks == left.blocks == total
    np.testing.assert_allclose(online.grams().numpy(), Z @ Z.transpose(0, 2, 1), atol=1e-5)
    torch.testing.assert_close(left.grams(), online.grams(), rtol=1e-12, atol=1e-12)


def test_grams_are_float64_and_symmetric():
    average = BlockAverage(2, 4, 5)
    average.add(torch.randn(2, 4, 5), 3)
    K = average.grams()
    assert K.shape == (2, 4, 4) and K.dtype == torch.float64
    torch.testing.assert_close(K, K.mT, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("states", "block", "reading", "message"),
    [
        (torch.ones(31, 4), 32, "position", "block = 32 is larger than the 31 positions kept"),
        (torch.ones(31, 4), 32, "segment", "block = 32 is larger than the 31 positions kept"),
        (torch.ones(0, 4), 1, "position", "block = 1 is larger than the 0 positions"),
        (torch.ones(8, 4), 0, "position", "block = 0"),
        (torch.ones(8, 4), -2, "position", "block = -2"),
        (torch.ones(8, 4), 2, "within", "reading 'within' unknown: one of position, segment"),
    ],
)
def test_errors(states, block, reading, message):
    with pytest.raises(ElsiError, match=message):
        block_sum(states, block, reading)


def test_no_block_seen():
    with pytest.raises(ElsiError, match="no block was seen"):
        BlockAverage(1, 2, 3).grams()
