"""Leaving out each prompt against prompts summed without it, Student's t-test of a mean, and how often intervals hold the truth."""

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from elsi_lib.entropy import set_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import write_tensors
from elsi_lib.jackknife import interval, judged, left_out, read_left_out, write_left_out
from elsi_lib.selection import elsi
from elsi_lib.tally import FORMAT, Group


def groups_of(count, layers=5, block=4, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Group(torch.randn(2, layers, block, width, generator=generator), torch.tensor([i % 3 + 1.0, i % 2 + 1.0]), 1)
        for i in range(count)
    ]


def test_the_representative_is_that_of_the_other_prompts():
    groups = groups_of(4)
    found = left_out(groups)
    assert found.shape == (2, 4, 5, 4, 4)
    for i in range(4):
        others = groups[:i] + groups[i + 1 :]
        for side in (0, 1):
            mean = sum(g.total[side].double() for g in others) / sum(float(g.blocks[side]) for g in others)
            torch.testing.assert_close(found[side, i], torch.stack([one @ one.T for one in mean]))


def test_prompts_without_a_block_do_not_count_and_one_prompt_says_nothing_of_chance():
    groups, empty = groups_of(3), Group(torch.zeros(2, 5, 4, 6), torch.zeros(2), 1)
    assert torch.equal(left_out([*groups, empty]), left_out(groups))
    assert left_out(groups[:1]) is None and left_out([groups[0], empty]) is None and left_out([]) is None


def test_the_interval_of_a_mean_is_that_of_a_t_test():
    values = np.random.default_rng(1).normal(3, 2, (9, 4))
    without = (values.sum(0) - values) / 8
    for level in (0.9, 0.95):
        expected = ttest_1samp(values, 0).confidence_interval(level)
        np.testing.assert_allclose(interval(values.mean(0), without, level), (expected.low, expected.high))


def test_intervals_of_an_entropy_hold_what_many_prompts_give():
    """200 samples of 12 prompts that scatter about one representative: 95 % of the intervals hold the mean of all estimates, and the
    estimates themselves stay inside their own, which the percentiles of a bootstrap do not."""
    rng = np.random.default_rng(0)
    centre = torch.from_numpy(rng.normal(size=(4, 6)) @ np.diag([4, 2, 1, 0.5, 0.3, 0.2]))
    estimates, ends = [], []
    for _ in range(200):
        noise = torch.from_numpy(rng.normal(size=(12, 1, 4, 6)))
        groups = [Group((centre + one).expand(2, 1, 4, 6), torch.ones(2), 1) for one in noise]
        mean = centre + noise.mean(0)[0]
        estimates.append(set_entropy((mean @ mean.T)[None], (0,)))
        without = [set_entropy(one, (0,)) for one in left_out(groups)[0]]
        ends.append(interval(estimates[-1], np.array(without)))
    low, high = np.array(ends).T
    held = np.mean((low <= np.mean(estimates)) & (np.mean(estimates) <= high))
    assert 0.9 <= held <= 0.99 and (low <= estimates).all() and (estimates <= high).all()


def test_sets_are_judged_without_each_prompt(tmp_path):
    grams = left_out(groups_of(6, seed=2))
    sets = [[(0, 1, 2), (1, 3, 4)], [(0, 1, 2), (0, 2, 4)]]
    found = judged(grams, sets)
    assert found.profile.shape == (2, 6, 5) and found.entropy.shape == (2, 6, 2)
    assert torch.equal(found.sets, torch.tensor(sets, dtype=torch.int16))
    for side in (0, 1):
        for i, one in enumerate(grams[side]):
            assert tuple(found.chosen[side, i].tolist()) == elsi(one, 3).layers
            assert found.entropy[side, i].tolist() == pytest.approx([set_entropy(one, layers) for layers in sets[side]], abs=1e-6)
            assert found.profile[side, i].tolist() == pytest.approx([set_entropy(one, (j,)) for j in range(5)], abs=1e-6)
    write_left_out(tmp_path / "left_out", {"code": found, "long documents": judged(grams, sets)})
    again = read_left_out(tmp_path / "left_out")
    assert list(again) == ["code", "long documents"]
    assert torch.equal(again["code"].entropy, found.entropy) and torch.equal(again["code"].chosen, found.chosen)


def test_a_file_that_lacks_a_part_is_named(tmp_path):
    write_tensors(tmp_path / "left_out", {"code.profile": torch.zeros(1)}, {"format": FORMAT})
    with pytest.raises(ElsiError, match=r"left_out lacks 'code\.chosen': it is damaged; delete the survey"):
        read_left_out(tmp_path / "left_out")
