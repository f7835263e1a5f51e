import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import fingerprint
from synthetic_study import TRUTH, write_study

from elsi_lib.errors import ElsiError
from elsi_lib.report.questions import criteria
from elsi_lib.report.study import read_study
from elsi_lib.report.tau_findings import critical_rho
from elsi_lib.selection import exhaustive

FP = fingerprint(layers=9, prompts=7)
SCORES = criteria.all_scores([FP, None])


def test_best_by_entropy_is_the_exhaustive_optimum():
    best = criteria.best_sets(SCORES).set_index("criterion")
    optimum = exhaustive(FP, 3)
    assert best.loc["entropy", "layers"] == " ".join(map(str, optimum.layers)) and best.loc["entropy", "entropy_rank"] == 1
    assert best.loc["entropy", "score"] == pytest.approx(optimum.entropy) and (best["sets"] == math.comb(9, 3)).all()
    equal = exhaustive(FP, 3, normalize="trace")
    assert best.loc["entropy_trace", "layers"] == " ".join(map(str, equal.layers))


def test_agreement_is_symmetric_over_criteria_and_bounded():
    alike = criteria.agreement(SCORES)
    assert len(alike) == math.comb(len(criteria._criteria(SCORES)), 2)
    made = SCORES.assign(chi=SCORES["entropy"] ** 3, chi_equal=-SCORES["entropy"])
    alike = criteria.agreement(made).set_index(["criterion", "other"])
    row = alike.loc[("entropy", "chi")]
    assert row["spearman"] == pytest.approx(1) and row["kendall"] == pytest.approx(1) and row["jaccard"] == 1
    assert alike.loc[("entropy", "chi_equal"), "spearman"] == pytest.approx(-1)


def test_influence_and_probe_enter_where_they_are_given():
    influence = pd.DataFrame({"layer": range(9), "influence": np.arange(9) / 10})
    few = pd.DataFrame({"layers": ["0 1 2", "6 7 8"], "r2_same": [0.1, 0.9], "r2_next": [0.2, 0.3]})
    data = criteria.all_scores([FP], influence={FP.target: influence}, probe={FP.target: few})
    best = criteria.best_sets(data).set_index("criterion")
    assert best.loc["influence", "layers"] == "6 7 8" and best.loc["influence", "score"] == pytest.approx(2.1)
    assert best.loc["r2_same", "layers"] == "6 7 8" and data["r2_next"].notna().sum() == 2
    alike = criteria.agreement(data).set_index(["criterion", "other"])
    assert alike.loc[("influence", "r2_same"), "sets"] == 2 and np.isnan(alike.loc[("influence", "r2_same"), "spearman"])
    with pytest.raises(ElsiError, match="lacks layer 8: one row for each of 0..8"):
        criteria.all_scores([FP], influence={FP.target: influence[:8]})
    with pytest.raises(ElsiError, match="without column influence"):
        criteria.all_scores([FP], influence={FP.target: influence[["layer"]]})
    with pytest.raises(ElsiError, match="without column r2_next"):
        criteria.all_scores([FP], probe={FP.target: few[["layers", "r2_same"]]})
    with pytest.raises(ElsiError, match="layers 0 1 2 twice"):
        criteria.all_scores([FP], probe={FP.target: pd.concat([few, few[:1]])})


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("study") / "tau", target="deep", sizes=(2, 2), steps=100)
    return read_study(folder if folder is not None else tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def deep():
    return fingerprint(layers=30, hidden=12, prompts=5, bootstrap=0, name="deep")


def test_measured_sets_count_once_and_without_second_trainings(study, deep):
    data = criteria.against_tau(study, deep)
    of = data[(data["nodes"] == 60) & (data["temperature"] == 0)]
    assert of["layers"].is_unique and len(of) == 10 and (of["size"] == 3).sum() == 7
    assert not set(of["method"]) & {"EAGLE-3 (seed 1)", "EAGLE-3 norm", "ELSI m=3 norm", "ELSI-C m=2", "prompt lookup"}
    assert of.set_index("method")["tau"]["ELSI m=3"] == pytest.approx(TRUTH["ELSI m=3"][2], abs=0.02)
    assert of.set_index("method")["entropy"]["EAGLE-3"] == pytest.approx(deep.entropy([2, 15, 27]))
    with pytest.raises(ElsiError, match="fingerprint of synthetic, tau of deep"):
        criteria.against_tau(study, FP)


def test_a_criterion_that_is_tau_foretells_it(study, deep):
    data = criteria.against_tau(study, deep)
    data["chi"] = data["tau"]
    told = criteria.foretelling(data, study, resamples=50)
    of = told[(told["criterion"] == "chi") & (told["sets"] == criteria.FEW)]
    row = of[(of["nodes"] == 60) & (of["temperature"] == 0)].iloc[0]
    assert row["n"] == 7 and row["rho"] == pytest.approx(1)
    assert row["p"] == pytest.approx(2 / math.factorial(7)) and row["p_holm"] >= row["p"]
    assert row["low"] <= row["rho"] and row["high"] <= 1
    found = criteria.tau_finding(told, "deep", "table3")
    at = told[(told["nodes"] == 60) & (told["temperature"] == 0)]
    count, every = at[at["p_holm"] < 0.05]["criterion"].nunique(), at["criterion"].nunique()
    assert count and found.text.startswith(f"**{count} of {every} criteria go with tau over these sets** (deep, 60 nodes, T = 0)")
    assert "[table 3](#table3-differences)" in found.text
    assert found.values["open_criteria_table3_three_n"] == 7
    assert len(criteria.tau_figure(told).axes) == 2
    single = told[(told["criterion"] == "dispersion") & (told["sets"] == criteria.ALL_SETS)]
    assert (single["n"] == 8).all()  # two sets are single layers


def test_without_a_study_it_says_so():
    assert "No tau of deep was measured" in criteria.tau_finding(None, "deep").text


def test_the_correlation_that_few_sets_need():
    # n = 4: |rho| = 1 has probability 2 / 24 > 0.05, so no value is enough; n = 5: only |rho| = 1, 2 / 120
    assert critical_rho(4) == 1.0 and critical_rho(5) == pytest.approx(1.0)
    x = np.arange(7) - 3
    all_rhos = np.abs([x @ np.array(order) / 28 for order in itertools.permutations(x)])
    needed = critical_rho(7)
    assert (all_rhos >= needed - 1e-9).mean() < 0.05 <= (all_rhos >= needed - 1 / 28 - 1e-9).mean()


def test_findings_and_figures():
    best, alike = criteria.best_sets(SCORES), criteria.agreement(SCORES)
    found = criteria.finding(SCORES, best, alike)
    assert "criteria have" in found.text and found.values["open_criteria_best_sets"] == best["layers"].nunique()
    assert criteria.figure(best, {FP.target: 9}) and criteria.agreement_figure(alike)
    assert criteria.across_targets(alike).text and criteria.table(best).count("\n") == len(best) + 1
    torch.testing.assert_close(torch.tensor(SCORES["entropy"].max()), torch.tensor(exhaustive(FP, 3).entropy), check_dtype=False)
