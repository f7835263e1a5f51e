import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import fingerprint

from elsi_lib.entropy import gram_entropy, matrix_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.report import findings, measures
from elsi_lib.selection import elsi, standing
from elsi_lib.settings import Settings, project_root

FP = fingerprint(layers=9, prompts=7)


def change(data, **of):
    for name, value in of.items():
        data = data[data[name] == value]
    (row,) = data.itertuples()
    return row


def test_thirds_share_the_layers():
    assert [measures.third_of(j, 9) for j in range(9)] == ["early"] * 3 + ["middle"] * 3 + ["late"] * 3
    assert [measures.third_of(j, 4) for j in range(4)] == ["early", "early", "middle", "late"]


def test_wave_is_the_entropy_of_the_representatives_with_the_spread_of_the_replicates():
    data = measures.wave([FP, None])
    kept = data[data["first_position"] == "kept"]
    factors = torch.linalg.cholesky(FP.grams[3] + 1e-12 * FP.grams[3].trace() * torch.eye(FP.block, dtype=torch.float64))
    assert kept["entropy"].iloc[3] == pytest.approx(matrix_entropy(factors), abs=1e-6)
    replicates = [matrix_entropy(torch.linalg.cholesky(K[0] + 1e-9 * K[0].trace() * torch.eye(FP.block))) for K in FP.bootstrap]
    expected = 1.96 * np.std(replicates, ddof=1)
    assert kept["high"].iloc[0] - kept["entropy"].iloc[0] == pytest.approx(expected, rel=1e-3)
    assert kept["replicate_mean"].iloc[0] == pytest.approx(np.mean(replicates), rel=1e-4)
    assert data[data["first_position"] == "dropped"]["high"].isna().all()
    np.testing.assert_allclose(kept["norm_ratio"], FP.norms[0] / FP.norms[1])


def test_pairs_are_ranked_among_all_pairs():
    data = measures.pair_entropies(FP, seeds=3)
    grams = FP.grams.numpy()

    def entropy(*layers):
        p = np.linalg.eigvalsh(sum(grams[j] for j in layers)).clip(0)
        p = p[p > 0] / p.sum()
        return -(p * np.log(p)).sum()

    every = {pair: entropy(*pair) for pair in itertools.combinations(range(9), 2)}
    seeds = sorted(range(9), key=lambda j: -entropy(j))[:3]
    assert list(dict.fromkeys(data["seed"])) == seeds
    for row in data.itertuples():
        own = every[min(row.seed, row.layer), max(row.seed, row.layer)]
        assert row.entropy == pytest.approx(own, abs=1e-12)
        assert row.gain == pytest.approx(own - entropy(row.seed), abs=1e-12)
        assert row.place == 1 + sum(value > own + 1e-12 for value in every.values())


def test_change_of_variance_by_hand():
    data = measures.variance_between_prompts(FP, resamples=10)
    on, off = (FP.variant(filtered=use).prompt_entropy().numpy().var(0, ddof=1) for use in (True, False))
    row = change(data, reading=measures.BLOCKS, first_position="kept", positions="kept", quantity="change", depth="late")
    assert row.value == pytest.approx(100 * (on[6:].mean() / off[6:].mean() - 1)) and row.prompts == 7
    random, kept = (FP.token_entropy_spectra(p).numpy().var(0, ddof=1) for p in ("random", "kept"))
    row = change(
        data, reading=measures.TOKENS, first_position="kept", positions="kept", quantity="change against random", depth="early"
    )
    assert row.value == pytest.approx(100 * (kept[:3].mean() / random[:3].mean() - 1)) and row.prompts == 5


def test_resampled_variance_equals_numpy_on_the_drawn_prompts():
    rng = np.random.default_rng(0)
    values = rng.normal(5, 1, (12, 3))
    drawn = rng.integers(0, 12, 12)
    expected = values[drawn].var(0, ddof=1)
    counts = np.bincount(drawn, minlength=12)[None]
    np.testing.assert_allclose(measures._resampled_variance(values, counts)[0], expected)


def test_interval_covers_a_known_change_of_variance(monkeypatch):
    """Gaussian prompts whose variance is halved: the intervals of 100 repetitions hold -50 % about 95 times; paired draws keep
    the interval of no change at all at zero width."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        base = rng.normal(0, 1, (200, 9))
        other = np.sqrt(0.5) * (0.8 * base + 0.6 * rng.normal(0, 1, (200, 9)))
        monkeypatch.setattr(measures, "_readings", lambda fp, pair={"all": base, "kept": other}: [(measures.BLOCKS, True, pair)])
        row = change(measures.variance_between_prompts(FP, 200), quantity="change", depth="early")
        held += row.low <= -50 <= row.high
    assert 88 <= held <= 100
    monkeypatch.setattr(measures, "_readings", lambda fp: [(measures.BLOCKS, True, {"all": base, "kept": base})])
    row = change(measures.variance_between_prompts(FP, 200), quantity="change", depth="early")
    assert (row.value, row.low, row.high) == (0, 0, 0)


def test_two_prompts_have_no_interval():
    with pytest.raises(ElsiError, match="2 prompts with .*at least 3"):
        measures.variance_between_prompts(fingerprint(prompts=2, spectra=0))


def test_the_seed_of_the_draws_matters_and_repeats():
    one, same, other = (measures.variance_between_prompts(FP, 50, seed=s) for s in (0, 0, 1))
    assert one.equals(same) and not one.equals(other)
    assert one["value"].equals(other["value"])


def test_cka_maps_list_layers_without_gap():
    maps = measures.cka_maps([FP], filtered=(True, False), debiased=(False, True))
    assert [(e["filtered"], e["debiased"]) for e in maps] == [(True, False), (True, True), (False, False), (False, True)]
    for entry in maps:
        assert [j for first, last in entry["compartments"] for j in range(first, last + 1)] == list(range(9))
    plain, debiased = maps[0]["null"], maps[1]["null"]
    assert abs(debiased) < plain  # shuffled rows: the debiased estimator is near zero, the plain one is not
    assert len(measures.cka_frame(maps)) == 4 * 36


def test_frontier_regret_is_against_all_sets():
    data = measures.frontier(FP, 3)
    for size, of in data.groupby("size"):
        best = max(FP.entropy(layers) for layers in itertools.combinations(range(9), size))
        beam = of[of["source"] == "beam"]
        assert beam["entropy"].is_monotonic_decreasing
        np.testing.assert_allclose(beam["regret"], best - beam["entropy"], atol=1e-12)


def test_every_set_of_the_beam_has_its_rank_share_and_redundancy():
    data = measures.frontier(FP, 3)
    for row in data.itertuples():
        place = standing(FP, row.layers)
        assert (row.rank, row.sets) == (place.rank, place.sets)
        assert row.redundancy == pytest.approx(place.redundancy, nan_ok=True)
    for size, of in data[data["source"] == "beam"].groupby("size"):
        again = [elsi(grams, size).layers for grams in FP.bootstrap]
        assert list(of["share"]) == [again.count(layers) / len(again) for layers in of["layers"]]


def test_measures_say_how_long_they_took():
    assert measures.wave([FP]).attrs["seconds"] > 0
    assert measures.cka_frame(measures.cka_maps([FP])).attrs["seconds"] > 0


def test_the_wave_is_called_a_sink_only_where_dropping_it_flattens_the_profile():
    about = {"target": "x", "layer": range(6), "replicates": 0, "replicate_mean": np.nan, "norm_ratio": np.nan}

    def told(dropped):
        profiles = (("kept", [1, 0.2, 0, 0, 0.1, 0.8]), ("dropped", dropped))
        return findings.wave(pd.concat([pd.DataFrame({**about, "first_position": f, "entropy": e}) for f, e in profiles])).text

    flat = told([0.5, 0.4, 0.3, 0.3, 0.4, 0.5])
    assert "rises by 0.800 nats from layer 2 to its late peak at layer 5" in flat
    assert "is 0.200 nats, 25 % of that: most of the wave goes with it" in flat
    assert "is 0.700 nats, 88 % of that: most of the wave stays" in told([1, 0.1, 0.1, 0.1, 0.1, 0.8])
    assert "is -0.100 nats, 0 % of that: most of the wave goes with it" in told([1, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_rows_that_a_sink_entered_are_left_out_wherever_it_sits():
    """A flat profile plus a sink of growing norm in two rows of the representatives: the wave is the sink's alone."""
    rng = np.random.default_rng(0)
    states = np.repeat(rng.standard_normal((1, 8, 400)), 6, 0) + 5.0
    wave = states.copy()
    for j, size in enumerate((1, 1, 2, 4, 8, 16)):
        wave[j, [0, 5]] *= size
    grams = torch.from_numpy(wave @ wave.transpose(0, 2, 1))
    assert measures.quiet_rows(grams) == [1, 2, 3, 4, 6, 7]
    quiet = grams[:, [1, 2, 3, 4, 6, 7]][:, :, [1, 2, 3, 4, 6, 7]]
    np.testing.assert_allclose(gram_entropy(quiet), matrix_entropy(states[0, [1, 2, 3, 4, 6, 7]]), atol=1e-12)
    assert measures.quiet_rows(torch.from_numpy(states @ states.transpose(0, 2, 1))) == list(range(8))


def test_the_committed_targets_sinks():
    """SmolLM2's sink is its first position alone; Qwen2.5's chat template holds others, which the filter spreads over rows."""
    results = project_root() / "data" / "results"
    smol, qwen = (Fingerprint.load(results / t / "fingerprint.safetensors") for t in (Settings().target, Settings().beside))
    assert measures.quiet_rows(smol.grams) == list(range(1, 32))
    assert measures.quiet_rows(smol.variant(sink=False).grams) == list(range(32))
    assert 1 < len(measures.quiet_rows(qwen.variant(sink=False).grams)) < 31
    data = measures.wave([smol])
    of = data[data["first_position"] == "quiet rows"]
    np.testing.assert_allclose(of["entropy"], gram_entropy(smol.grams[:, 1:, 1:]))
    assert set(of["rows"]) == {31} and of["low"].isna().all()


def test_the_rise_ends_at_the_highest_layer_after_the_midpoint():
    assert findings.late_rise(np.array([1, 0.25, 0.5, 2, 0.75, 0.5])) == (1.75, 3, 1)
    assert findings.late_rise(np.array([5.0, 4, 3, 2])) == (-1.0, 2, 1)
    assert findings.late_rise(np.array([1.0, 3.0])) == (2.0, 1, 0)


def test_words_follow_the_interval():
    data = measures.variance_between_prompts(FP, resamples=20)
    text = findings.variance(data).text
    for row in data[data["quantity"] == "change"].itertuples():
        word = " *falls*" if row.high < 0 else " *rises*" if row.low > 0 else ""
        assert f"{row.value:+,.0f} ({row.low:+,.0f} to {row.high:+,.0f}){word}" in text
