"""Stability and transfer: numbers counted by hand on small surveys, and figures that draw what they are given."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import fingerprint

from elsi_lib.corpora import AGAIN, CONVERSATIONS
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.jackknife import LeaveOneOut, judged, left_out
from elsi_lib.report.findings import late_rise
from elsi_lib.report.questions import stability, transfer
from elsi_lib.selection import elsi, elsi_c, exhaustive, standing
from elsi_lib.survey import Survey
from elsi_lib.tally import Group


def slim(fp: Fingerprint) -> Fingerprint:
    return Fingerprint({"grams": fp.tensors["grams"][:2]}, fp.passport)


def survey_of(name="synthetic", left_out=None, **tables) -> Survey:
    variants = {n: fingerprint(name=name, seed=seed) for seed, n in enumerate(("default", "rho 0.5", "block 16"))}
    corpora = {n: fingerprint(name=name, seed=seed) for seed, n in enumerate((CONVERSATIONS, AGAIN, "code"), start=3)}
    rows = [(10, g, first, 3, layers, 0.5, 1, regret) for g, (layers, regret) in enumerate([("1 2 3", 0.0), ("1 2 4", 0.2)] * 3)
            for first in ("kept", "dropped")]  # fmt: skip
    rows += [(60, 0, first, 3, "1 2 3", 0.5, 1, 0.0) for first in ("kept", "dropped")]
    columns = ["size", "group", "first_position", "m", "layers", "entropy", "rank", "regret"]
    samples = pd.DataFrame(rows, columns=columns)
    passport = {"target": {"name": name, "dtype": "float32"}, "parts": {"variants": {"seen": 60}}}
    empty = pd.DataFrame()
    both = ({n: slim(fp) for n, fp in group.items()} for group in (variants, corpora))
    return Survey(Path("."), "cached", *both, left_out or {}, tables.get("samples", samples), empty, empty, passport)


def test_samples_are_compared_with_the_set_of_all_prompts():
    data = stability.by_size([survey_of(), None])
    small = data[(data["size"] == 10) & (data["first_position"] == "kept")].iloc[0]
    assert (small["groups"], small["same"], small["worst"]) == (6, 0.5, 0.2)
    assert small["jaccard"] == pytest.approx((1 + 0.5) / 2) and small["regret"] == pytest.approx(0.1)
    assert 0.5 <= small["low"] < 0.75 < small["high"] <= 1
    whole = data[data["size"] == 60].iloc[0]
    assert whole["same"] == 1 and np.isnan(whole["low"])
    finding = stability.finding(data)
    assert "of 6 disjoint samples of 10 prompts 50 % choose the set of all 60" in finding.text
    assert len(stability.figure(data).axes) == 2


def test_one_parameter_is_changed_at_a_time():
    fp, survey = fingerprint(), survey_of()
    data = stability.by_parameter([fp, None], [survey])
    wide = data[(data["parameter"] == "K_beam") & (data["value"] == "all")].iloc[0]
    assert wide["entropy"] == pytest.approx(exhaustive(fp, 3).entropy, abs=1e-12)
    row = data[(data["parameter"] == "rho") & (data["value"] == "0.5")].iloc[0]
    own, other = elsi(survey.variants["default"], 3), elsi(survey.variants["rho 0.5"], 3)
    assert row["layers"] == " ".join(map(str, other.layers)) and row["rank"] == standing(survey.variants["rho 0.5"], own.layers).rank
    assert row["jaccard"] == len(set(own.layers) & set(other.layers)) / len(set(own.layers) | set(other.layers))
    assert -1 <= row["agreement"] <= 1 and data["default"].sum() == 2
    assert "precision" not in set(data["parameter"])  # the same number format
    again = data[data["parameter"] == "other prompts"].iloc[0]
    assert again["layers"] == " ".join(map(str, elsi(survey.corpora[AGAIN], 3).layers))
    text = stability.parameter_finding(data).text
    assert text.startswith("**synthetic**: the default of ELSI m=3 is {") and "$K_\\mathrm{beam}$" in text
    # What concerns ELSI-C is told of its own default, and other prompts are compared with one another, not with the default.
    searched, pooled = text.split("The default of ELSI-C m=3 is {")
    assert "K_\\mathrm{pool}" in pooled and "K_\\mathrm{pool}" not in searched
    assert pooled.startswith(", ".join(map(str, elsi_c(fp, 3).layers)) + "}.") and "other prompts" not in text
    whose = "the default's" if elsi(survey.corpora[AGAIN], 3).layers == elsi(fp, 3).layers else "not the default's"
    assert text.endswith(f"that set is {whose}.")
    assert len(stability.parameter_figure(data, {"synthetic": 8}).axes) == 1
    with pytest.raises(ElsiError, match="at least one fingerprint"):
        stability.parameter_figure(data.iloc[:0], {})


def test_without_a_survey_the_search_alone_is_varied():
    data = stability.by_parameter([fingerprint()], [None])
    assert set(data["parameter"]) == {"default", "K_beam", "K_expand", "K_pool"}


def test_another_number_format_of_the_same_prompts_is_compared():
    fp, survey = fingerprint(), survey_of()
    survey.variants["default"].passport["target"]["dtype"] = "float16"
    data = stability.by_parameter([fp], [survey])
    row = data[data["parameter"] == "precision"].iloc[0]
    assert row["value"] == "float32 → float16" and row["jaccard"] == 1 and row["agreement"] == pytest.approx(1)


def test_a_set_is_judged_by_entropy_on_the_other_text():
    survey = survey_of()
    data = transfer.transfers([survey, None])
    assert len(data) == 2 * 9
    row = data[(data["chosen_on"] == "code") & (data["judged_on"] == CONVERSATIONS) & (data["first_position"] == "kept")].iloc[0]
    layers = elsi(survey.corpora["code"], 3).layers
    place = standing(survey.corpora[CONVERSATIONS], layers)
    assert row["layers"] == " ".join(map(str, layers)) and row["rank"] == place.rank and row["sets"] == 56
    assert row["entropy"] == pytest.approx(place.entropy) and row["regret"] == pytest.approx(place.regret)
    own = data[data["chosen_on"] == data["judged_on"]]
    assert (own["jaccard"] == 1).all() and (own["regret"] >= 0).all()
    assert "1 other kinds of text lead to the set of conversations" in transfer.finding(data).text
    assert transfer.table(data).count("\n") == 7
    assert len(transfer.transfer_figure(data).axes) == 1


def left_out_of(survey: Survey) -> dict[str, LeaveOneOut]:
    """Every corpus without each of 12 prompts that scatter about its own representative."""
    views = [[fp.variant(sink=sink) for fp in survey.corpora.values()] for sink in (True, False)]
    sets = [[find(view, 3).layers for find in (elsi, exhaustive) for view in side] for side in views]
    found = {}
    for index, name in enumerate(survey.corpora):
        grams = torch.stack([side[index].grams for side in views])
        means = torch.linalg.cholesky(grams + 1e-9 * torch.eye(grams.shape[-1]))
        generator = torch.Generator().manual_seed(index)
        scatter = [0.03 * means.abs().mean() * torch.randn(means.shape, generator=generator) for _ in range(12)]
        found[name] = judged(left_out([Group(means + one, torch.ones(2), 1) for one in scatter]), sets)
    return found


def by_hand(estimate: float, without: np.ndarray) -> tuple[float, float]:
    """Ends by the formula: t times sqrt((n - 1) / n times the sum of squared deviations)."""
    half = 2.201 * (11 / 12 * sum((without - without.mean()) ** 2)) ** 0.5  # t at 0.975 with 11 degrees of freedom
    return pytest.approx((estimate - half, estimate + half), abs=1e-4)


def test_regret_and_choice_say_what_chance_does():
    survey = survey_of()
    survey = survey_of(left_out=left_out_of(survey))
    data = transfer.transfers([survey])
    without = survey.left_out["code"]
    for side, (sink, first) in enumerate({True: "kept", False: "dropped"}.items()):
        row = data[(data["chosen_on"] == CONVERSATIONS) & (data["judged_on"] == "code") & (data["first_position"] == first)].iloc[0]
        places = [tuple(one) for one in without.sets[side].tolist()]
        own, best = places.index(_layers(row["layers"])), places.index(exhaustive(survey.corpora["code"].variant(sink=sink), 3).layers)
        lead = (without.entropy[side, :, best] - without.entropy[side, :, own]).numpy()
        assert (row["regret_low"], row["regret_high"]) == by_hand(row["regret"], lead)
        chosen = [tuple(layers) for layers in without.chosen[side].tolist()]
        assert row["same"] == pytest.approx(chosen.count(_layers(row["layers"])) / 12)
    row = data[(data["chosen_on"] == "code") & (data["judged_on"] == CONVERSATIONS) & (data["first_position"] == "kept")].iloc[0]
    shown = "{:.1f} ({:.1f} to {:.1f})".format(*(1000 * row[["regret", "regret_low", "regret_high"]]))
    assert row["regret_high"] < 0.1  # larger ones have no digit behind the point
    assert shown in transfer.table(data).replace("\u00a0", " ")
    text = transfer.finding(data).text
    row = data[(data["chosen_on"] == CONVERSATIONS) & (data["judged_on"] == AGAIN) & (data["first_position"] == "kept")].iloc[0]
    assert f"On a second sample of conversations it loses {row['regret']:.3f}" in text and "of 1 other kinds of text" in text


def test_the_wave_on_a_corpus_has_an_interval():
    survey = survey_of()
    survey = survey_of(left_out=left_out_of(survey))
    profiles = transfer.profiles([survey])
    line = profiles[(profiles["corpus"] == "code") & (profiles["first_position"] == "kept")]
    without = survey.left_out["code"].profile[0].numpy()
    assert (line["low"].iloc[5], line["high"].iloc[5]) == by_hand(line["entropy"].iloc[5], without[:, 5])
    rises = np.array([late_rise(one)[0] for one in without])
    assert tuple(line[["rise_low", "rise_high"]].iloc[0]) == by_hand(line["rise"].iloc[0], rises)
    assert f"code {line['rise'].iloc[0]:.3f} ({line['rise_low'].iloc[0]:.2f} to " in transfer.profile_finding(profiles).text
    assert len(transfer.figure(profiles).axes[0].collections) == 2  # bands of conversations and code


def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def test_a_corpus_of_one_prompt_has_no_intervals():
    survey = survey_of()
    data, profiles = transfer.transfers([survey]), transfer.profiles([survey])
    assert data[["regret_low", "regret_high", "same"]].isna().all(axis=None) and profiles[["low", "high"]].isna().all(axis=None)
    assert "left out" not in transfer.finding(data).text
    assert "nan" not in transfer.table(data) + transfer.profile_finding(profiles).text


def test_profiles_hold_every_layer_of_every_corpus():
    survey = survey_of()
    data = transfer.profiles([survey])
    assert len(data) == 3 * 2 * 8
    of = data[(data["corpus"] == AGAIN) & (data["first_position"] == "dropped")]
    torch.testing.assert_close(torch.tensor(of["entropy"].to_numpy()), survey.corpora[AGAIN].variant(sink=False).entropy())
    text = transfer.profile_finding(data).text
    line = data[(data["corpus"] == "code") & (data["first_position"] == "kept")]["entropy"].to_numpy()
    rise, peak, _ = late_rise(line)
    assert f"code {rise:.3f} at layer {peak}" in text and len(transfer.figure(data).axes) == 2
