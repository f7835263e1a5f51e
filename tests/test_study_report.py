"""The report on tau against studies whose truth is known: closed forms, brute force, published critical values."""

import functools
import itertools
import json
import math
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from scipy import stats
from synthetic import fingerprint
from synthetic_study import SETTINGS, TRUTH, draft_of, live_frame, rows_frame, steps_frame, tau_of, training_frame, write_study

from elsi_lib.errors import ElsiError
from elsi_lib.report import tau_figures, tau_findings, tau_markdown, tau_measures, tau_tables
from elsi_lib.report.artefacts import _render, save_table, status
from elsi_lib.report.study import (
    BASELINE,
    EXTRAS,
    METHODS,
    file_hashes,
    in_order,
    read_steps,
    read_study,
    same_draft,
    steps_totals,
    study_line,
    write_steps,
)
from elsi_lib.report.tau import holm, question_totals
from elsi_lib.settings import Settings

FEW = 400  # resamples, where the ends of an interval do not matter


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Every answer has the true tau of its method."""
    return read_study(write_study(tmp_path_factory.mktemp("exact") / "tau"))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Answers differ between questions, and ELSI m=3 is truly no better than EAGLE-3."""
    truth = TRUTH | {"ELSI m=3": ("10 11 28", 0.642, 2.10), "EAGLE-3 (seed 1)": ("2 15 27", 0.526, 2.16)}
    folder = tmp_path_factory.mktemp("noisy") / "tau"
    write_study(folder, truth=truth, steps=25)
    steps = read_steps(folder / "steps.parquet")
    rng = np.random.default_rng(1)
    steps["tokens"] = [np.clip(t + rng.integers(-1, 2, len(t)), 1, 7).astype(np.int8) for t in steps["tokens"]]
    write_steps(steps, folder / "steps.parquet")
    return read_study(folder)


@functools.cache
def numbers(results):
    return tau_tables.averages(results, resamples=FEW), tau_tables.differences(results, resamples=FEW)


@pytest.fixture(scope="module")
def tables(exact):
    return numbers(exact)


# steps on disk


def test_steps_come_back_as_they_went_whatever_the_order_of_rows(tmp_path):
    frame = steps_frame(methods=(BASELINE, "prompt lookup"), sizes=(1, 1), steps=9)
    frame.at[3, "tokens"] = np.array([], dtype=np.int8)  # an empty answer
    frame.at[4, "tokens"] = [1, 127, 2]
    write_steps(frame, tmp_path / "a.parquet")
    write_steps(frame.sample(frac=1, random_state=1), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    keys = [name for name in frame.columns if name != "tokens"]
    back = read_steps(tmp_path / "a.parquet").set_index(keys)["tokens"].map(list)
    assert back.map(lambda row: all(isinstance(value, np.int8) for value in row)).all()
    pd.testing.assert_series_equal(back.sort_index(), frame.set_index(keys)["tokens"].map(list).sort_index(), check_index_type=False)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".parquet"] == []


def test_steps_of_the_whole_benchmark_are_small(tmp_path):
    """480 questions, 560 turns, 14 methods, two tree sizes and temperatures: near the entropy of the tokens themselves."""
    rng = np.random.default_rng(0)
    keys = itertools.product(range(560), METHODS + EXTRAS[:2], SETTINGS)
    rows = [
        {"question_id": str(q), "category": "qa", "turn": 0, "method": m, "nodes": n, "temperature": t, "seed": 0,
         "tokens": np.minimum(rng.geometric(1 / 2.2, 80), 7)} for q, m, (n, t) in keys
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    write_steps(frame, tmp_path / "steps.parquet")
    counts = np.bincount(np.concatenate(frame["tokens"].tolist()))
    bits = stats.entropy(counts, base=2) * counts.sum()
    assert (tmp_path / "steps.parquet").stat().st_size < min(1.3 * bits / 8, 1_500_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="seed"), "no column seed"),
        (lambda frame: frame.iloc[:0], "not a single answer"),
        (lambda frame: pd.concat([frame, frame.iloc[[2]]]), "twice at one setting"),
        (lambda frame: frame.assign(tokens=[np.array([2, 0])] * len(frame)), r"tokens \[2, 0\] at question 81"),
        (lambda frame: frame.assign(tokens=[np.array([200])] * len(frame)), "1 to 127"),
        (lambda frame: frame.assign(tokens=[np.array([1.5])] * len(frame)), "whole tokens"),
    ],
)
def test_bad_steps_are_not_written(tmp_path, change, message):
    frame = steps_frame(methods=(BASELINE,), sizes=(1, 0), steps=3)
    with pytest.raises(ElsiError, match=message):
        write_steps(change(frame), tmp_path / "steps.parquet")
    assert not list(tmp_path.iterdir())


def test_a_half_written_or_missing_file_is_an_error_that_names_it(tmp_path):
    folder = write_study(tmp_path / "tau", sizes=(1, 1), steps=5)
    whole = (folder / "steps.parquet").read_bytes()
    (folder / "steps.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ElsiError, match=r"tau/steps.parquet cannot be read"):
        read_study(folder)
    (folder / "steps.parquet").unlink()
    with pytest.raises(ElsiError, match=r"tau/steps.parquet is not there"):
        read_study(folder)
    (folder / "passport.json").write_text('{"target"')
    with pytest.raises(ElsiError, match=r"tau/passport.json is no passport"):
        read_study(folder)
    (folder / "passport.json").write_text(json.dumps({"target": "x", "settings": {"seed": 0}, "evaluation": {"prompts": "something"}}))
    with pytest.raises(ElsiError, match="prompts 'something'"):
        read_study(folder)


def test_rows_and_steps_have_to_name_the_same_methods(tmp_path):
    folder = write_study(tmp_path / "tau", sizes=(1, 1), steps=5)
    rows = rows_frame()
    for kept, message in (
        (rows[rows["method"] != "random 1"], "steps of random 1, which rows.csv does not name"),
        (rows[rows["method"] != BASELINE], "no row EAGLE-3"),
        (pd.concat([rows, rows.iloc[[1]]]), "method EAGLE-3 twice"),
        (pd.concat([rows, rows.iloc[[0]].assign(method="other", draft="9")]), "no steps of other"),
        (rows.drop(columns="draft"), "no column draft"),
    ):
        kept.to_csv(folder / "rows.csv", index=False)
        with pytest.raises(ElsiError, match=message):
            read_study(folder)


def test_totals_equal_those_of_one_row_per_step():
    frame = steps_frame(methods=(BASELINE, "lowest"), sizes=(2, 1), steps=7, exact=False)
    frame.at[0, "tokens"] = np.array([], dtype=np.int8)
    long = frame.explode("tokens").dropna(subset="tokens").astype({"tokens": int})
    wanted = question_totals(long, frame[["question_id", "category"]])
    keys = ["method", "nodes", "temperature", "question_id"]
    own = steps_totals(frame).set_index(keys).sort_index()
    pd.testing.assert_frame_equal(own, wanted.set_index(keys).sort_index(), check_dtype=False)


def test_methods_of_one_draft_share_its_steps(tmp_path, exact):
    assert draft_of("ELSI-C m=2") == draft_of("ELSI m=2")
    folder = write_study(tmp_path / "tau")
    steps = read_steps(folder / "steps.parquet")
    write_steps(steps[steps["method"] != "ELSI-C m=2"], folder / "steps.parquet")  # measured once, under one name
    totals = read_study(folder).totals
    own, shared = (totals[totals["method"] == m].drop(columns="method").reset_index(drop=True) for m in ("ELSI m=2", "ELSI-C m=2"))
    pd.testing.assert_frame_equal(own, shared)
    first = same_draft(exact.rows, exact.methods)
    assert first["ELSI-C m=2"] == "ELSI m=2" and first["prompt lookup"] == "prompt lookup" and first[BASELINE] == BASELINE


def test_order_of_methods_and_the_line_of_a_notebook(exact):
    assert exact.methods == METHODS and in_order(["zz", *reversed(METHODS + EXTRAS)]) == (*METHODS, *EXTRAS, "zz")
    line = study_line(exact, "cached")
    assert line.startswith("synthetic: Spec-Bench, 36 questions, 52 turns; 13 drafts; T = 0, 1; study ") and line.endswith(", cached")


# tables


def test_main_table_recovers_the_true_taus(exact, tables):
    data = tau_tables.main_table(exact, tables[0], "table2")
    measured = data[data["origin"] == "measured"]
    assert len(measured) == len(METHODS + EXTRAS) * len(SETTINGS) and data.attrs["seconds"] > 0
    for row in measured.itertuples():
        assert row.tau == pytest.approx(tau_of(row.method, row.nodes, row.temperature), abs=1e-9)
        assert row.macro == pytest.approx(row.tau, abs=1e-9) and row.low <= row.tau <= row.high
        assert row.steps == 52 * 100 and row.questions == 36
    one = measured[measured["method"] == "ELSI m=3"].iloc[0]
    assert (one["layers"], one["entropy"], one["parameters"], one["loss"]) == ("10 11 28", 0.642, 9_800_000, pytest.approx(3.1))


@pytest.mark.parametrize(("table", "target", "count"), [("table2", "Qwen3-4B", 7), ("table3", "Llama-3.1-8B", 3)])
def test_reported_taus_are_the_papers_and_labelled_so(exact, tables, table, target, count):
    data = tau_tables.main_table(exact, tables[0], table)
    paper = data[data["origin"] == "reported"].set_index(["method", "nodes"])["tau"]
    assert len(paper) == count and set(data.loc[data["origin"] == "reported", "target"]) == {target}
    known = {
        "table2": {("EAGLE-2", 30): 4.00, ("EAGLE-3", 30): 4.20, ("ELSI m=1", 30): 4.24, ("ELSI m=3", 30): 4.29, ("lowest", 30): 4.04,
                   ("EAGLE-3", 60): 4.48, ("ELSI m=3", 60): 4.57},
        "table3": {("EAGLE-2", 60): 4.66, ("EAGLE-3", 60): 4.89, ("ELSI m=1", 60): 4.84},
    }  # fmt: skip
    assert paper.to_dict() == known[table]
    text = tau_markdown.main_markdown(data, exact)
    block = text.split("\n\n**")[-1]
    assert block.startswith(f"{target}**, the paper's own target: *reported*, not measured here")
    assert "4.48" not in text.replace(block, "") and "4.89" not in text.replace(block, "")


def test_differences_recover_the_truth_and_compare_with_the_noise_of_training(exact, tables):
    gaps = tau_tables.overall(tables[1])
    sets = gaps[gaps["family"] == "sets"]
    assert set(sets["method"]) == set(METHODS) - {BASELINE}
    for row in sets.itertuples():
        truth = tau_of(row.method, row.nodes, row.temperature) - tau_of(BASELINE, row.nodes, row.temperature)
        assert row.difference == pytest.approx(truth, abs=1e-9)
    again = gaps[gaps["family"] == "training"]
    assert gaps["noise"].nunique() == 1 and gaps["noise"].iloc[0] == again["difference"].abs().max()
    verdict = sets[(sets["nodes"] == 60) & (sets["temperature"] == 0)].set_index("method")["verdict"]
    assert verdict["ELSI m=3"] == "above" and verdict["lowest"] == verdict["prompt lookup"] == "below"
    # 0.01 above, on every question alike: significant, and no larger than what a second training does
    small = sets[sets["method"] == "ELSI-C m=3"].iloc[0]
    assert small["low"] > 0 and small["p_holm"] < 0.05 and small["verdict"] == "not decided"
    norms = gaps[gaps["family"] == "norm"].set_index(["method", "baseline"])["difference"]
    assert norms["EAGLE-3 norm", BASELINE].mean() == pytest.approx(0.1)
    assert norms["ELSI m=3 norm", "ELSI m=3"].mean() == pytest.approx(-0.05)


def test_holm_counts_a_shared_draft_once(noisy):
    gaps = tau_tables.overall(numbers(noisy)[1])
    for _, of in gaps[gaps["family"] == "sets"].groupby(["nodes", "temperature"]):
        distinct = of[of["same_as"] == ""]
        assert len(distinct) == len(METHODS) - 2
        np.testing.assert_allclose(distinct["p_holm"], holm(distinct["p"]))
        twin = of[of["same_as"] != ""].iloc[0]
        assert (twin["method"], twin["same_as"]) == ("ELSI-C m=2", "ELSI m=2")
        own = of[of["method"] == "ELSI m=2"].iloc[0]
        assert (twin["difference"], twin["p_holm"], twin["verdict"]) == (own["difference"], own["p_holm"], own["verdict"])


def test_a_method_with_the_baselines_own_set_is_said_to_be_the_same(tmp_path):
    truth = TRUTH | {"ELSI m=3": TRUTH[BASELINE]}
    results = read_study(write_study(tmp_path / "tau", truth=truth, methods=("EAGLE-2", BASELINE, "ELSI m=3"), sizes=(1, 1), steps=9))
    gaps = tau_tables.differences(results, resamples=FEW)
    same = gaps[gaps["method"] == "ELSI m=3"]
    assert set(same["verdict"]) == {"same draft"} and (same["difference"] == 0).all() and same["p"].isna().all()
    assert "nothing to compare" in tau_findings.differences(gaps, results, "table2").text
    assert tau_figures.differences_figure(tau_tables.overall(gaps))


def test_without_a_second_training_the_report_says_that_its_noise_is_unknown(tmp_path):
    results = read_study(write_study(tmp_path / "tau", methods=METHODS, sizes=(1, 1), steps=9))
    gaps = tau_tables.differences(results, resamples=FEW)
    assert gaps["noise"].isna().all() and set(gaps["family"]) == {"sets"}
    text = tau_findings.differences(gaps, results, "table2").text
    assert "noise of training is not known" in text and not re.search(r"\bnan\b", text)
    # one question in each category: no interval, so nothing is decided, whatever p is
    assert gaps["low"].isna().all() and set(gaps["verdict"]) == {"not decided"}
    with pytest.raises(ElsiError, match="nothing to compare with EAGLE-3"):
        tau_tables.differences(read_study(write_study(tmp_path / "one", methods=(BASELINE,), sizes=(1, 0), steps=3)))


def test_gains_are_set_beside_the_papers_in_the_same_quantity(tables):
    beside = tau_tables.reported_beside(tables[0], "table2").set_index(["quantity", "unit"])
    quantity = "average gain in tau, ELSI m=3 over EAGLE3"
    percent = np.mean([100 * (tau_of("ELSI m=3", *s) / tau_of(BASELINE, *s) - 1) for s in SETTINGS])
    assert float(beside.loc[(quantity, "%"), "measured"]) == pytest.approx(percent, abs=0.051)
    assert float(beside.loc[(quantity, "tokens"), "measured"]) == pytest.approx(0.3)
    assert beside.loc[(quantity, "%"), "reported"] == "1.6 to 2.2"
    other = tau_tables.reported_beside(tables[0], "table3").set_index("quantity")
    share = np.mean([100 * tau_of("ELSI m=1", *s) / tau_of(BASELINE, *s) for s in SETTINGS])
    assert float(other.loc["tau of ELSI m=1 as a share of EAGLE3's", "measured"]) == pytest.approx(share, abs=0.051)
    assert float(other.loc["spread of the average tau of ELSI m=1, 2, 3", "measured"]) == pytest.approx(0.4)
    assert (other.filter(like="T=1", axis=0)["measured"] == "not comparable").all()


def test_categories_hold_all_groups_and_both_averages(exact, tables):
    data = tau_tables.categories(exact, tables[0])
    text = tau_markdown.categories_markdown(data, exact)
    first = text.split("<details>")[0]
    assert first.startswith("**60 nodes, T = 0**") and text.count("<details>") == text.count("</details>") == 3
    names = [line.split("|")[1].strip() for line in first.splitlines() if line.startswith("| ")][1:]
    assert names[:4] == ["**overall**, pooled", "overall, mean of categories", "mt-bench", "mt-bench, mean of categories"]
    assert len(names) == 4 + 13 and names[4] == "translation" and names[-1] == "humanities"


def test_own_prompts_never_go_by_the_name_of_the_benchmark(tmp_path):
    methods = (BASELINE, "ELSI m=3", "prompt lookup")
    results = read_study(write_study(tmp_path / "tau", prompts="own prompts", methods=methods, sizes=(1, 1), steps=5))
    taus, gaps = numbers(results)
    data, split = tau_tables.main_table(results, taus, "table2"), tau_tables.categories(results, taus)
    texts = [study_line(results, "measured"), tau_markdown.main_markdown(data, results)]
    texts.append(tau_markdown.categories_markdown(split, results))
    texts.append(tau_findings.main(data, results, "table2").text)
    texts.append(tau_findings.by_category(split, gaps, results, "table2").text)
    figure = tau_figures.categories_figure(split, gaps, results, {})
    texts += [text.get_text() for text in figure.findobj(Text)]
    assert not [text for text in texts if "spec-bench" in text.lower() or "mt-bench" in text.lower()]
    assert "own prompts" in texts[0] and "own prompts" in texts[1]


def test_speed_in_closed_form(exact):
    data = tau_tables.speed(exact, resamples=FEW).set_index("method")
    assert list(data.index) == ["plain", BASELINE, "ELSI m=3", "prompt lookup"]
    live = live_frame()
    for method in (BASELINE, "ELSI m=3", "prompt lookup"):
        of = live[live["method"] == method]
        ratios = of["tokens"] / of["steps"] / 1.25  # a step costs 1.25 times that of the target alone
        assert data.loc[method, "ratio"] == pytest.approx(ratios.mean())
        speeds = of["tokens"] / of["seconds"]
        assert data.loc[method, "speedup"] == pytest.approx(speeds.mean() / 50)
        assert data.loc[method, "tau"] == pytest.approx((of["tokens"] - 1).sum() / of["steps"].sum())
        assert data.loc[method, "peak_mb"] == 1007
    assert data.loc["plain", "speedup"] == data.loc["plain", "ratio"] == data.loc["plain", "tau"] == 1


def test_the_two_speed_ups_weigh_questions_differently(tmp_path):
    """Plain 10 and 100 tokens/s, draft 20 and 100: ratio of means 120 / 110, mean of ratios 1.5."""
    folder = write_study(tmp_path / "tau", methods=(BASELINE, "EAGLE-2"), sizes=(1, 0), steps=3)
    where = {"category": "qa", "nodes": 60, "temperature": 0.0, "tokens": 100, "steps": 50, "peak_mb": 1}
    rows = [("81", "plain", 10.0), ("82", "plain", 1.0), ("81", BASELINE, 5.0), ("82", BASELINE, 1.0)]
    live = pd.DataFrame([{**where, "question_id": q, "method": m, "seconds": s} for q, m, s in rows])
    live.to_csv(folder / "live.csv", index=False)
    one = tau_tables.speed(read_study(folder)).set_index("method").loc[BASELINE]
    assert one["speedup"] == pytest.approx(120 / 110) and one["ratio"] == pytest.approx(1.5)
    assert one["ratio_low"] == pytest.approx(1) and one["ratio_high"] == pytest.approx(2)
    live[live["method"] != "plain"].to_csv(folder / "live.csv", index=False)
    with pytest.raises(ElsiError, match="no run of the target alone"):
        tau_tables.speed(read_study(folder))
    live.assign(seconds=0.0).to_csv(folder / "live.csv", index=False)
    with pytest.raises(ElsiError, match="0.0 seconds at question 81"):
        tau_tables.speed(read_study(folder))


# entropy and training


def test_rank_correlation_is_scipys_with_an_exact_p(exact, tables):
    data = tau_measures.entropy_against_tau(exact, tables[0])
    assert set(data["method"]) == set(METHODS) - {"prompt lookup", "ELSI-C m=2"}  # one point per draft
    rho = tau_measures.correlations(data)
    for row in rho.itertuples():
        of = data[(data["nodes"] == row.nodes) & (data["temperature"] == row.temperature)]
        of = of if row.sets == "all" else of[of["layers"].str.split().str.len() == 3]
        assert row.n == len(of) and row.rho == pytest.approx(stats.spearmanr(of["entropy"], of["tau"]).statistic)
    x, y = np.arange(5.0), np.array([1.0, 0, 2, 3, 4])
    count = sum(abs(stats.spearmanr(x, p).statistic) >= 0.9 - 1e-12 for p in itertools.permutations(y))
    assert tau_measures.rank_correlation(x, y) == (pytest.approx(0.9), pytest.approx(count / math.factorial(5)))
    assert all(map(math.isnan, tau_measures.rank_correlation(x[:2], y[:2])))
    assert all(map(math.isnan, tau_measures.rank_correlation(np.ones(5), y)))


@pytest.mark.parametrize(("n", "value"), [(5, 1.0), (6, 0.886), (7, 0.786), (8, 0.738), (9, 0.700), (10, 0.648)])
def test_critical_rho_is_the_published_one(n, value):
    assert tau_findings.critical_rho(n) == pytest.approx(value, abs=0.006)


def test_curves_are_means_over_stretches(exact):
    data = tau_measures.curves(exact, points=12)
    raw = training_frame(rows_frame())
    draft = draft_of(BASELINE)
    of, own = data[data["draft"] == draft], raw[raw["draft"] == draft]
    assert len(of) == 12 and of["methods"].unique().tolist() == [BASELINE]
    np.testing.assert_allclose(of["loss"], own["loss"].to_numpy().reshape(12, 10).mean(1), atol=1e-12)
    assert of["tokens"].tolist() == own["tokens"].to_numpy().reshape(12, 10).max(1).tolist()
    assert "ELSI m=2, ELSI-C m=2" in set(data["methods"])


# findings


def told(results, table="table2"):
    taus, gaps = numbers(results)
    rho = tau_measures.correlations(tau_measures.entropy_against_tau(results, taus))
    return [
        tau_findings.main(tau_tables.main_table(results, taus, table), results, table),
        tau_findings.differences(gaps, results, table),
        tau_findings.by_category(tau_tables.categories(results, taus), gaps, results, table),
        tau_findings.entropy(rho, table),
        tau_findings.training(tau_measures.curves(results), results, table),
        tau_findings.speed(tau_tables.speed(results, resamples=FEW), table),
    ]


def test_findings_say_who_wins_where_the_truth_has_a_winner(exact):
    main, differences, split, entropy, training, speed = told(exact)
    assert "that of ELSI m=3, {10, 11, 28}, has the highest pooled tau" in main.text and "that of lowest, {0, 9, 10}" in main.text
    assert "highest in 4 of 4 settings" in main.text and "every trained draft is above it" in main.text
    assert "**ELSI m=3 is above EAGLE-3 in all 4 settings**" in differences.text
    assert "not decided, EAGLE-3 (code), ELSI-C m=3." in differences.text
    assert "higher in 13 of 13 categories" in split.text and "agree in sign" in split.text
    assert "|ρ| has to reach 0.65" in entropy.text and "+0.70" in entropy.text
    assert "lowest for ELSI m=3, 3.100 nats" in training.text and "0.020 nats apart" in training.text
    assert "ELSI m=3 (60 nodes) is the fastest" in speed.text and "faster than it" in speed.text


def test_findings_leave_open_what_the_numbers_leave_open(noisy):
    text = told(noisy)[1].text
    assert "Whether ELSI m=3 is above EAGLE-3 is not decided in any of 4 settings" in text
    assert "is above EAGLE-3 in all" not in text


def test_a_difference_that_training_could_make_is_said_to_be_no_decision(tmp_path):
    truth = TRUTH | {"ELSI m=3": ("10 11 28", 0.642, 2.15), "EAGLE-3 (seed 1)": ("2 15 27", 0.526, 2.03)}
    methods = (BASELINE, "EAGLE-2", "ELSI m=3", "EAGLE-3 (seed 1)")
    results = read_study(write_study(tmp_path / "tau", truth=truth, methods=methods))
    text = told(results)[1].text
    assert "is not decided in any of 4 settings" in text and "that difference may be luck of training" in text


def test_values_are_finite_and_named_by_their_table(exact, noisy):
    for results, table in ((exact, "table2"), (noisy, "table3")):
        found = told(results, table)
        keys = [key for finding in found for key in finding.values]
        assert len(keys) == len(set(keys)) and all(key.startswith(table) for key in keys)
        assert all(math.isfinite(value) for finding in found for value in finding.values.values())
        assert all(finding.text and finding.alt and not re.search(r"\bnan\b", finding.text + finding.alt) for finding in found)


# figures


def draw(name, results):
    taus, gaps = numbers(results)
    if name == "tau_differences":
        return tau_figures.differences_figure(tau_tables.overall(gaps))
    if name == "tau_entropy":
        data = tau_measures.entropy_against_tau(results, taus)
        return tau_figures.entropy_figure(data, tau_measures.correlations(data))
    if name == "tau_training":
        return tau_figures.training_figure(tau_measures.curves(results))
    tasks = tau_measures.reported_tasks("table2")
    return tau_figures.categories_figure(tau_tables.categories(results, taus), gaps, results, tasks)


FIGURES = ("tau_differences", "tau_entropy", "tau_training", "tau_categories")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_readable_and_small(name, noisy):
    figure = draw(name, noisy)
    assert figure.get_size_inches()[0] == 7 and len(_render(figure, "png")) < 300_000 and len(_render(figure, "svg")) < 300_000
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text().strip()):
        assert text.get_fontsize() >= 9, text.get_text()
        box = text.get_window_extent()
        clipped = text.get_text().lstrip("−-+").replace(".", "").isdigit()
        assert clipped or (box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1), text.get_text()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_drawn_of_one_setting_and_few_methods(name, tmp_path):
    options = {"methods": ("EAGLE-2", BASELINE, "ELSI m=3"), "settings": [(30, 0.0)], "sizes": (1, 1), "steps": 5}
    assert draw(name, read_study(write_study(tmp_path / "tau", **options))).axes


def test_the_forest_fills_what_is_decided_and_points_at_what_is_far(exact, tables):
    gaps = tau_tables.overall(tables[1])
    first, ax, *_ = tau_figures.differences_figure(gaps).axes  # 30 and 60 nodes at T = 0
    methods = [label.get_text() for label in first.get_yticklabels()]
    assert methods[-1] == "EAGLE-3 again" and BASELINE not in methods
    marks = {methods[round(line.get_ydata()[0])]: line for line in ax.get_lines() if line.get_marker() not in ("None", "")}
    assert marks["ELSI-C m=3"].get_markerfacecolor() == marks["EAGLE-3 again"].get_markerfacecolor() == "white"
    assert marks["ELSI m=3"].get_markerfacecolor() != "white" and marks["prompt lookup"].get_marker() == "<"
    wanted = gaps[(gaps["method"] == "ELSI m=3") & (gaps["nodes"] == 60) & (gaps["temperature"] == 0)]["difference"].item()
    assert marks["ELSI m=3"].get_xdata()[0] == wanted
    assert any("-0.7" in text.get_text() for text in ax.texts)


def test_reported_gains_are_drawn_for_the_papers_target_alone(exact, tables):
    split = tau_tables.categories(exact, tables[0])
    assert tau_measures.reported_tasks("table2") == {"translation": (2.6, 5.6), "summarization": (2.1, 4.2), "stem": (2.4, 3.9)}
    assert tau_measures.reported_tasks("table3") == {}
    for table, labelled in (("table2", True), ("table3", False)):
        figure = tau_figures.categories_figure(split, tables[1], exact, tau_measures.reported_tasks(table))
        assert ("reported, Qwen3-4B" in [text.get_text() for text in figure.legends[0].get_texts()]) is labelled


# passports


def test_a_result_is_stale_when_its_study_changes(tmp_path, monkeypatch, exact):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path))
    settings = Settings(target="tiny-a", samples=6, block=8, preset="quick")
    fp = fingerprint(block=8, bootstrap=8, spectra=8, name="tiny-a")
    fp.save(settings.output / "fingerprint.safetensors")
    folder = shutil.copytree(exact.folder, settings.output / "tau")
    data = pd.DataFrame({"tau": [2.5]})
    saved = save_table(data, "table2", settings, [fp], caption="A table.", study=folder)
    assert saved.passport["study"] == {"folder": "tau", "files": file_hashes(folder)}
    assert set(file_hashes(folder)) == {"steps.parquet", "rows.csv", "training.csv", "live.csv", "passport.json"}
    assert saved.status == "measured"
    without = save_table(data, "plain", settings, [fp], caption="A table.")
    (folder / "rows.csv").write_text("method\n")
    assert saved.status == status(settings.output / "table2.json") == "stale" and without.status == "measured"
    shutil.rmtree(folder)
    assert saved.status == "stale" and "study" not in without.passport
