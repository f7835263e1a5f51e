import math

import numpy as np
import pandas as pd
import pytest
from synthetic import fingerprint

from elsi_lib.report.questions import readings
from elsi_lib.report.tables import reported_value
from elsi_lib.selection import elsi, elsi_c

FP = fingerprint(layers=9, prompts=7)
DATA = readings.readings([FP, None])
BY = DATA.set_index("reading")


def test_each_change_is_made_alone_and_the_unrun_one_says_so():
    assert list(BY.index) == [
        "default", "mean within blocks", "centred", "layers of equal trace", "α = 2", "bits", "debiased CKA", "filter off",
        "first position dropped", "EAGLE-3 as run",
    ]  # fmt: skip
    assert not BY.loc["mean within blocks", "run"] and BY["run"].sum() == 9
    assert "| mean within blocks | not run here |" in readings.table(DATA)


def test_values_are_those_of_the_selection():
    default = elsi(FP, 3)
    assert BY.loc["default", "elsi3"] == " ".join(map(str, default.layers))
    assert BY.loc["default", "ratio"] == pytest.approx(default.entropy / FP.entropy([2, 4, 6]))
    assert BY.loc["EAGLE-3 as run", "s_eagle3"] == pytest.approx(FP.entropy([1, 3, 5]))
    assert BY.loc["bits", "s_elsi3"] == pytest.approx(default.entropy / math.log(2))
    assert BY.loc["bits", "ratio"] == BY.loc["default", "ratio"]
    assert BY.loc["centred", "s_elsi3"] == pytest.approx(elsi(FP, 3, center=True).entropy)
    assert BY.loc["first position dropped", "s_elsi3"] == pytest.approx(elsi(FP.variant(sink=False), 3).entropy)
    assert BY.loc["debiased CKA", "elsic3"] == " ".join(map(str, elsi_c(FP, 3, debiased=True).layers))
    ratios = [elsi(K, 3).entropy / elsi_rule(K) for K in FP.bootstrap]
    assert BY.loc["default", "ratio_high"] - BY.loc["default", "ratio"] == pytest.approx(1.96 * np.std(ratios, ddof=1))
    assert np.isnan(BY.loc["filter off", "ratio_low"])


def elsi_rule(grams):
    from elsi_lib.entropy import set_entropy

    return set_entropy(grams, (2, 4, 6))


def test_a_calibration_within_blocks_fills_its_row():
    other = fingerprint(layers=9, prompts=7, seed=5)
    data = readings.readings([FP], [other]).set_index("reading")
    assert data["run"].all() and data.loc["mean within blocks", "s_elsi3"] == pytest.approx(elsi(other, 3).entropy)
    assert len(readings.combinations([FP], [other])) == 2 * len(readings.combinations([FP]))


def test_distance_of_the_reported_values_to_themselves_is_zero_and_parts_add_up():
    paper = readings.reported_values()
    apart = readings.distances(paper)
    own = apart[apart["target"] == apart["reported"]]
    np.testing.assert_allclose(own["distance"], 0, atol=1e-12)
    one, other = paper.to_dict("records")
    expected = abs(math.log(one["ratio"] / other["ratio"])) + abs(math.log(one["s_elsi3"] / other["s_elsi3"]))
    assert readings.between_reported() == pytest.approx(expected + abs(one["peak"] - other["peak"]))
    assert one["s_elsi3"] == float(reported_value("Qwen3-4B", "ELSI m=3 S_1"))
    assert one["holds_last"] == 1 and np.isnan(other["holds_last"])


def test_distance_by_hand():
    paper = readings.reported_values().set_index("target").loc["Qwen3-4B"]
    row = {"target": "made", "reading": "r", "run": True, "ratio": math.e * paper["ratio"], "s_elsi3": paper["s_elsi3"] / math.e}
    data = pd.DataFrame([row | {"peak": paper["peak"] - 0.1, "holds_last": False}])
    apart = readings.distances(data).set_index("reported").loc["Qwen3-4B"]
    assert list(apart[list(readings.PARTS)]) == pytest.approx([1, 1, 0.1, readings.LAST_WEIGHT])
    assert apart["distance"] == pytest.approx(2.1 + readings.LAST_WEIGHT)


def test_every_combination_is_there_once():
    every = readings.combinations([FP])
    assert len(every) == 2**7 and every["reading"].is_unique
    default = every.set_index("reading").loc["default"]
    assert default["changes"] == 0 and default["s_elsi3"] == pytest.approx(BY.loc["default", "s_elsi3"])
    both = every.set_index("reading").loc["centred, bits"]
    assert both["s_elsi3"] == pytest.approx(BY.loc["centred", "s_elsi3"] / math.log(2))


def test_finding_and_figure_also_where_eagle3_collides():
    every = readings.combinations([FP])
    found = readings.finding(DATA, every)
    assert "Of all 128 combinations" in found.text and found.values["open_readings_combinations"] == 128
    assert len(readings.figure(DATA, readings.distances(DATA)).axes) == 4
    shallow = fingerprint(layers=5, prompts=7)
    data = readings.readings([shallow])
    assert data["ratio"].isna().all()
    assert "collide" in readings.finding(data, readings.combinations([shallow])).text
    both = pd.concat([DATA, data.assign(target="shallow")], ignore_index=True)
    assert readings.figure(both, readings.distances(both)) and "nan" not in readings.table(both)


def test_rounding_decides_no_place():
    """Two readings that differ in the level alone are equally near without it, whatever a processor's last digits are."""
    rows = [("first", 0.1, 0.1), ("second", 0.1 - 1e-13, 0.2), ("third", 0.1 - 1e-13, 0.1)]
    apart = pd.DataFrame([{**dict.fromkeys(readings.PARTS, 0.0), "reading": n, "ratio_part": r, "level_part": v} for n, r, v in rows])
    apart["distance"] = apart[list(readings.PARTS)].sum(axis=1)
    joined = readings.mean_distances(apart)
    assert list(joined.index) == ["first", "third", "second"]
    assert readings._robust(joined) == "It stays the nearest whichever part of the distance is left out."
