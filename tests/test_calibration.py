"""A calibration against a plain loop that follows the paper's text in numpy float64, in parts, and with bad input."""

import hashlib
import json
import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_target

from elsi_lib.calibration import Calibration, calibrate, check_finite, kept_positions_needed
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.fingerprint import VARIANTS, Fingerprint, read_tensors, write_tensors

N, D, V = 4, 16, 50
SIZES = {"rho": 0.4, "block": 5, "bootstrap": 12, "spectra": 3, "window": 10}


class FakeTarget:
    """States and logits drawn from the prompt's first token id; the first position is large from the middle on."""

    num_layers, hidden_size = N, D

    def __init__(self, name="fake", dtype=torch.float32):
        self.name, self.dtype = name, dtype

    def describe(self):
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch."), "num_layers": N}

    def run(self, ids):
        generator = torch.Generator().manual_seed(int(ids[0]))
        states = torch.randn(N, len(ids), D, generator=generator) + torch.linspace(0, 2, N)[:, None, None]
        states[N // 2 :, 0] *= 30
        return list(states.to(self.dtype)), (torch.randn(len(ids), V, generator=generator) * 3).to(self.dtype)


def prompt(i, length):
    return SimpleNamespace(id=str(i), key=hashlib.sha256(str(i).encode()).hexdigest(), ids=[i] * length)


PROMPTS = [prompt(i, length) for i, length in enumerate([30, 14, 61, 25, 44, 33, 40])]


# The paper's text, one prompt, one layer and one position at a time.


def entropy_of(matrix):
    sigma = np.linalg.svd(matrix, compute_uv=False)
    p = sigma**2 / (sigma**2).sum()
    p = p[p > 1e-25]
    return -(p * np.log(p)).sum()


def filtered_positions(logits, rho, first):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    H = -(p * np.log(p)).sum(-1)
    positions = range(first, len(H))
    kept = sorted(positions, key=lambda t: (-H[t], t))[: math.ceil(round(rho * len(positions), 9))]
    return sorted(kept)


def reference(target, prompts, rho, block, reading, filtered, sink):
    """Mean block (N, B, d) over all blocks of all prompts, and each prompt's own mean block (P, N, B, d)."""
    first = 0 if sink else 1
    total, count, own = np.zeros((target.num_layers, block, target.hidden_size)), 0, []
    for one in prompts:
        states, logits = target.run(one.ids)
        states = torch.stack(states).double().numpy()
        logits = logits.double().numpy()
        positions = filtered_positions(logits, rho, first) if filtered else list(range(first, len(one.ids)))
        whole = len(positions) // block
        if reading == "position":
            blocks = [states[:, positions[k * block : (k + 1) * block]] for k in range(whole)]
        else:
            rows = [states[:, positions[b * whole : (b + 1) * whole]].mean(1) for b in range(block)]
            blocks = [np.stack(rows, axis=1)]
        total, count = total + sum(blocks), count + len(blocks)
        own.append(sum(blocks) / len(blocks))
    return total / count, np.stack(own), count


@pytest.mark.parametrize("reading", ["position", "segment"])
@pytest.mark.parametrize(
    "target",
    [FakeTarget(), FakeTarget(dtype=torch.bfloat16), pytest.param("tiny", id="tiny model")],
    ids=lambda t: t if isinstance(t, str) else str(t.dtype).removeprefix("torch."),
)
def test_calibration_equals_the_papers_text(target, reading):
    if target == "tiny":
        target = tiny_target("llama", layers=N, hidden=32)
        rng = np.random.default_rng(0)
        prompts = [SimpleNamespace(id=p.id, key=p.key, ids=rng.integers(5, 60, len(p.ids)).tolist()) for p in PROMPTS]
    else:
        prompts = PROMPTS
    fp = calibrate(target, prompts, reading=reading, **SIZES)
    for filtered, sink in VARIANTS:
        Z, own, count = reference(target, prompts, SIZES["rho"], SIZES["block"], reading, filtered, sink)
        view = fp.variant(filtered, sink)
        K = Z @ Z.transpose(0, 2, 1)
        np.testing.assert_allclose(view.grams.numpy(), K, atol=1e-5 * np.abs(K).max())
        expected = np.array([[entropy_of(z) for z in layers] for layers in own])
        np.testing.assert_allclose(view.prompt_entropy().numpy(), expected, atol=1e-5)
        label = f"{'filtered' if filtered else 'unfiltered'}-first {'kept' if sink else 'dropped'}"
        assert fp.passport["prompts"]["blocks"][label] == count


def test_raw_token_spectra_and_norms():
    target = FakeTarget()
    fp = calibrate(target, PROMPTS, **SIZES)
    window, rho = SIZES["window"], SIZES["rho"]
    norms = []
    for i in range(SIZES["spectra"]):
        states, logits = target.run(PROMPTS[i].ids)
        states = torch.stack(states).double().numpy()[:, :window]
        lengths = np.linalg.norm(states, axis=-1)
        norms.append([lengths[:, 0], np.sort(lengths[:, 1:], axis=1)[:, (window - 2) // 2]])
        for sink in (True, False):
            first = 0 if sink else 1
            view = fp.variant(sink=sink)
            kept = filtered_positions(logits.double().numpy()[:window], rho, first)
            for positions, chosen in (("all", list(range(first, window))), ("kept", kept)):
                expected = [entropy_of(s[chosen]) for s in states]
                np.testing.assert_allclose(view.token_entropy_spectra(positions)[i].numpy(), expected, atol=1e-6)
            # The random control has as many rows; being random, only its bound is known.
            assert (view.token_entropy_spectra("random")[i] <= math.log(len(kept)) + 1e-6).all()
    np.testing.assert_allclose(fp.norms.numpy(), np.mean(norms, axis=0), rtol=1e-5)
    assert fp.token_entropy_spectra().shape == (3, N)
    other = calibrate(target, PROMPTS, **SIZES, seed=1)
    assert torch.equal(other.token_entropy_spectra("kept"), fp.token_entropy_spectra("kept"))
    assert not torch.equal(other.token_entropy_spectra("random"), fp.token_entropy_spectra("random"))


# The bootstrap.


def weights_of(run, keys):
    """The Poisson weights (R, P), read off by adding prompts whose sums are unit vectors."""
    run.replicates = torch.zeros(run.parameters["bootstrap"], len(keys))
    for i, key in enumerate(keys):
        run._bootstrap(key, torch.eye(len(keys))[i], 1)
    run._flush()
    return run.replicates.double().numpy()


def fresh(**sizes):
    return Calibration(FakeTarget(), **{**SIZES, **sizes})


def test_weights_are_poisson_of_mean_one():
    weights = weights_of(fresh(bootstrap=200), [f"prompt {i}" for i in range(300)]).ravel()
    assert np.array_equal(weights, weights.round()) and weights.min() == 0
    n = len(weights)
    assert weights.mean() == pytest.approx(1, abs=5 / math.sqrt(n))  # five standard errors
    assert weights.var() == pytest.approx(1, abs=5 * math.sqrt(3 / n))  # fourth central moment 4, so var of (w - 1)^2 is 3
    share = [(weights == k).mean() for k in range(4)]
    assert share == pytest.approx([math.exp(-1) / math.factorial(k) for k in range(4)], abs=0.01)


def test_weights_depend_on_prompt_and_seed_only():
    keys = [f"prompt {i}" for i in range(40)]
    weights = weights_of(fresh(), keys)
    assert np.array_equal(weights_of(fresh(), keys[::-1]), weights[:, ::-1])
    assert np.array_equal(weights_of(fresh(block=3, rho=1.0), keys), weights)
    assert not np.array_equal(weights_of(fresh(seed=1), keys), weights)
    assert len({tuple(column) for column in weights.T}) > 35  # prompts are drawn independently
    assert abs(np.corrcoef(weights[:6])[np.triu_indices(6, 1)]).max() < 0.6  # and so are replicates


def test_replicates_are_weighted_means_over_prompts():
    target = FakeTarget()
    fp = calibrate(target, PROMPTS, **SIZES)
    weights = weights_of(fresh(), [p.key for p in PROMPTS])
    _, own, _ = reference(target, PROMPTS, SIZES["rho"], SIZES["block"], "position", True, True)
    blocks = np.array([math.ceil(round(SIZES["rho"] * len(p.ids), 9)) // SIZES["block"] for p in PROMPTS])
    usable = [w for w in weights if w @ blocks > 0]
    assert fp.passport["prompts"]["empty_replicates"] == SIZES["bootstrap"] - len(usable)
    assert fp.bootstrap.shape == (len(usable), N, SIZES["block"], SIZES["block"])
    for replicate, w in zip(fp.bootstrap, usable, strict=True):
        Z = np.einsum("p,pnbd->nbd", w * blocks, own) / (w @ blocks)
        K = Z @ Z.transpose(0, 2, 1)
        np.testing.assert_allclose(replicate.numpy(), K, atol=2e-4 * np.abs(K).max(axis=(1, 2), keepdims=True).max())


def test_no_bootstrap_and_no_spectra():
    fp = calibrate(FakeTarget(), PROMPTS, **{**SIZES, "bootstrap": 0, "spectra": 0})
    assert fp.bootstrap is None and set(fp.tensors) == {"grams", "prompt_entropy"}


def test_a_replicate_that_draws_no_prompt_is_left_out():
    run = fresh(bootstrap=30)
    run.add(0, PROMPTS[0])
    fp = run.fingerprint()
    empty = fp.passport["prompts"]["empty_replicates"]
    assert 0 < empty < 30 and len(fp.bootstrap) == 30 - empty  # a weight is 0 with probability 1 / e
    torch.testing.assert_close(fp.bootstrap, fp.grams.expand_as(fp.bootstrap), rtol=1e-5, atol=1e-5)  # one prompt: always itself


# In parts.


def assert_same(mine, whole):
    assert mine.tensors.keys() == whole.tensors.keys()
    for name in ("grams", "prompt_entropy", "token_spectra", "norms"):
        expected = whole.tensors[name]
        torch.testing.assert_close(mine.tensors[name], expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    torch.testing.assert_close(mine.bootstrap, whole.bootstrap, rtol=1e-4, atol=1e-4 * float(whole.grams.abs().max()))
    assert mine.passport == whole.passport


@pytest.mark.parametrize("split", [lambda i: i % 2, lambda i: i >= 3, lambda i: i < 6, lambda i: 0])
@pytest.mark.parametrize("swapped", [False, True])
def test_two_halves_saved_loaded_and_merged_equal_the_whole(tmp_path, split, swapped):
    target, about = FakeTarget(), {"source": "fake", "counts": {"read": 8}}
    prompts = [*PROMPTS, prompt(99, 3)]  # the last is too short
    whole, *parts = (Calibration(target, **SIZES, about_prompts=about) for _ in range(3))
    for i, one in enumerate(prompts):
        whole.add(i, one)
    for i, one in reversed(list(enumerate(prompts))):
        parts[split(i)].add(i, one)
    loaded = [Calibration.load(part.save(tmp_path / str(k))) for k, part in enumerate(parts)]
    first, second = loaded[::-1] if swapped else loaded
    first.merge(second)
    assert sorted(first.prompts) == list(range(7)) and first.dropped == 1
    assert_same(first.fingerprint(), whole.fingerprint())
    assert_same(Calibration.load(whole.save(tmp_path / "whole")).fingerprint(), whole.fingerprint())


def test_a_real_tiny_targets_parts_merge_too(tmp_path):
    target = tiny_target("qwen3", layers=3, hidden=32)
    rng = np.random.default_rng(1)
    prompts = [SimpleNamespace(id=str(i), key=str(i), ids=rng.integers(5, 60, 40).tolist()) for i in range(4)]
    whole, left, right = (Calibration(target, **SIZES) for _ in range(3))
    for i, one in enumerate(prompts):
        whole.add(i, one)
        (left if i < 2 else right).add(i, one)
    left.merge(Calibration.load(right.save(tmp_path / "right")))
    assert_same(left.fingerprint(), whole.fingerprint())


def test_overlapping_parts_are_refused():
    left, right = fresh(), fresh()
    left.add(0, PROMPTS[0])
    right.add(0, PROMPTS[0])
    with pytest.raises(ElsiError, match="both parts hold prompt 0"):
        left.merge(right)
    with pytest.raises(ElsiError, match="prompt 0 was added twice"):
        left.add(0, PROMPTS[0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: fresh(rho=0.5, seed=3), "their parameters differ in rho, seed"),
        (lambda: Calibration(FakeTarget("other"), **SIZES), "their target differ in name"),
        (lambda: Calibration(FakeTarget(), **SIZES, about_prompts={"asked": 9}), "their prompts differ in asked"),
    ],
)
def test_parts_of_different_calibrations_are_refused(other, message):
    with pytest.raises(ElsiError, match=message):
        fresh().merge(other())


def test_parts_of_two_versions_of_the_code_are_refused(tmp_path):
    left, right = fresh(), fresh()
    left.add(0, PROMPTS[0])
    right.add(1, PROMPTS[1])
    right.code = "another"
    again = Calibration.load(right.save(tmp_path / "part"))
    with pytest.raises(ElsiError, match="different versions of the method's code: make them all again"):
        left.merge(again)
    assert again.fingerprint().passport["code"]["calibration"] == "another"  # and so it counts as stale


@pytest.mark.parametrize("state", [None, "{", "{}", '{"parameters": {}}', "[]"])
def test_a_part_without_its_state_is_damaged(tmp_path, state):
    run = fresh()
    run.add(0, PROMPTS[0])
    path = run.save(tmp_path / "part")
    tensors, header = read_tensors(path, "elsi-calibration-part-1", "a part")
    header.pop("state")
    write_tensors(path, tensors, header if state is None else header | {"state": state})
    with pytest.raises(ElsiError, match="no readable state of a calibration: it is damaged"):
        Calibration.load(path)


def test_finite_states_whose_sum_overflows_pass():
    check_finite([torch.full((4, 4), 3e38)])
    with pytest.raises(ElsiError, match="infinity in the states of layer 1 of it"):
        check_finite([torch.zeros(1, 2), torch.tensor([[math.inf, -math.inf]])], "it")
    with pytest.raises(ElsiError, match="NaN in the states of layer 0"):
        check_finite(torch.tensor([[math.nan, 0.0]]))


def test_files_that_are_no_part(tmp_path):
    fp = calibrate(FakeTarget(), PROMPTS, **SIZES).save(tmp_path / "fp")
    with pytest.raises(ElsiError, match="is not a part of a calibration"):
        Calibration.load(fp)
    part = fresh().save(tmp_path / "part")
    with pytest.raises(ElsiError, match="is not a fingerprint"):
        Fingerprint.load(part)
    part.write_bytes(part.read_bytes()[:-5])
    for path in (part, tmp_path / "none"):
        with pytest.raises(ElsiError, match="cannot be read as a part of a calibration"):
            Calibration.load(path)
    with pytest.raises(AssetError, match="cannot be written"):
        fresh().save(part / "below a file")


# What stays behind.


def test_the_passport():
    about = {"source": "fake", "asked": 9, "counts": {"read": 12}}
    fp = calibrate(FakeTarget(), [*PROMPTS, prompt(50, 4), prompt(51, 11)], **SIZES, about_prompts=about)
    found = fp.passport
    assert found["target"] == FakeTarget().describe()
    assert found["parameters"] == {**SIZES, "reading": "position", "seed": 0}
    about_prompts = found["prompts"]
    assert about_prompts["source"] == "fake" and about_prompts["counts"] == {"read": 12}
    assert (about_prompts["used"], about_prompts["dropped_too_short"]) == (7, 2)
    assert about_prompts["tokens"] == sum(len(p.ids) for p in PROMPTS)
    assert about_prompts["sha256"] == hashlib.sha256("".join(p.key for p in PROMPTS).encode()).hexdigest()
    assert found["seconds"] >= 0 and found["code"] and found["environment"]
    assert json.loads(json.dumps(found)) == found


def test_progress_wraps_the_prompts():
    seen = []
    calibrate(FakeTarget(), PROMPTS, **SIZES, track=lambda items: (seen.append(item.id) or item for item in items))
    assert seen == [p.id for p in PROMPTS]


def test_memory_does_not_grow_with_the_prompts():
    """The sums keep their size, the queue its bound, and a prompt leaves only a handful of numbers."""
    run = fresh()
    sizes = []
    for i in range(70):
        run.add(i, prompt(i, 40))
        assert len(run._queue) < 16
        sizes.append((*(tuple(a.total.shape) for a in run.averages), tuple(run.replicates.shape)))
    assert len(set(sizes)) == 1
    assert {name: tuple(t.shape) for name, t in run.rows[69].items()} == {"prompt_entropy": (4, N)}
    assert sum("token_spectra" in row for row in run.rows.values()) == SIZES["spectra"]
    owned = [row["prompt_entropy"].untyped_storage().nbytes() for row in run.rows.values()]
    assert max(owned) == 4 * N * 8  # no view into a larger tensor


def test_python_objects_stay_few():
    run = fresh(spectra=0)
    tracemalloc.start()
    try:
        for i in range(64):
            run.add(i, prompt(i, 40))
        before = tracemalloc.get_traced_memory()[0]
        for i in range(64, 128):
            run.add(i, prompt(i, 40))
        assert tracemalloc.get_traced_memory()[0] - before < 64 * 4096
    finally:
        tracemalloc.stop()


# Bad input.


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_states_name_the_layer(bad, dtype):
    target = FakeTarget(dtype=dtype)
    states, logits = target.run(PROMPTS[0].ids)
    states[2][7, 3] = states[3][1, 1] = bad
    target.run = lambda ids: (states, logits)
    with pytest.raises(ElsiError, match=r"(NaN|infinity) in the states of layer 2 of fake \(prompt 5, dtype .*dtype=float32"):
        Calibration(target, **SIZES).add(5, PROMPTS[0])


def test_a_broken_layer_of_a_real_model_is_named_though_it_spoils_the_logits():
    target = tiny_target("llama", layers=4, hidden=32)
    with torch.no_grad():
        target.blocks[2].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(ElsiError, match="states of layer 2 of tiny-llama"):
        calibrate(target, [SimpleNamespace(id="0", key="0", ids=list(range(5, 45)))], **SIZES)


def test_bad_logits_over_good_states_are_the_logits_fault():
    target = FakeTarget()
    states, logits = target.run(PROMPTS[0].ids)
    logits[4] = math.nan
    target.run = lambda ids: (states, logits)
    with pytest.raises(ElsiError, match="logits at position 4"):
        Calibration(target, **SIZES).add(0, PROMPTS[0])


def test_no_usable_prompt():
    with pytest.raises(ElsiError, match="no usable prompt: block = 5 needs 12 tokens a prompt at rho = 0.4, and all 2 prompts"):
        calibrate(FakeTarget(), [prompt(0, 11), prompt(1, 1)], **SIZES)
    with pytest.raises(ElsiError, match="no usable prompt"):
        calibrate(FakeTarget(), [], **SIZES)


def test_the_shortest_usable_prompt_is_used():
    fp = calibrate(FakeTarget(), [prompt(0, 12)], **SIZES)
    assert fp.passport["prompts"]["used"] == 1


@given(st.integers(1, 100), st.integers(1, 60))
def test_tokens_needed_against_brute_force(percent, block):
    """Fewest tokens of which, the first left out, the filter still keeps a block."""
    length = next(n for n in range(1, 10_000) if -(-percent * (n - 1) // 100) >= block)
    assert kept_positions_needed(percent / 100, block) == length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 0}, r"rho = 0 outside \(0, 1\]"),
        ({"rho": 1.2}, "rho = 1.2 outside"),
        ({"block": 0}, "block = 0"),
        ({"reading": "inside"}, "reading 'inside' unknown"),
        ({"bootstrap": -1}, "bootstrap = -1"),
        ({"spectra": -1}, "spectra = -1"),
        ({"window": 2}, "window = 2 leaves fewer than two positions"),
    ],
)
def test_bad_parameters(changes, message):
    with pytest.raises(ElsiError, match=message):
        Calibration(FakeTarget(), **{**SIZES, **changes})
