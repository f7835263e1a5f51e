"""tau against brute force, scipy.stats and closed forms; intervals by their coverage, p-values by their law under the null."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from elsi_lib.errors import ElsiError
from elsi_lib.report import tau
from elsi_lib.report.tau import compare, holm, question_totals, smallest_detectable, tau_table

TWO = ("qa", "coding")


def as_steps(lengths, method="EAGLE3", **setting):
    """{(question, category, turn): tokens of each step} -> steps."""
    setting = {"nodes": 60, "temperature": 0.0, "seed": 0, **setting}
    rows = [
        {"question_id": q, "category": c, "turn": t, "method": method, **setting, "tokens": n}
        for (q, c, t), tokens in lengths.items()
        for n in tokens
    ]
    return pd.DataFrame(rows)


def as_totals(categories, tokens, steps, method="EAGLE3", **setting):
    setting = {"nodes": 60, "temperature": 0.0, "seed": 0, "turns": 1, **setting}
    data = {"question_id": np.arange(len(tokens)) + 81, "category": categories, "method": method, "tokens": tokens, "steps": steps}
    return pd.DataFrame({**data, **setting})


def random_totals(rng, sizes, method="EAGLE3", shift=0.0, **setting):
    """Questions whose tau differ; within a question the length of a step is geometric with that mean."""
    categories = np.repeat(tau.CATEGORIES[: len(sizes)], sizes)
    steps = rng.integers(20, 200, len(categories))
    own = 2 + shift + rng.gamma(2, 0.4, len(categories))
    return as_totals(categories, steps + rng.negative_binomial(steps, 1 / own), steps, method, **setting)


def value(table, column="tau", **where):
    where = {"group": "overall", "average": "pooled", **where}
    (row,) = table[np.logical_and.reduce([table[name] == of for name, of in where.items()])].to_dict("records")
    return row[column]


# averages


LENGTHS = {(81, "writing", 1): [1, 3, 2], (81, "writing", 2): [6], (321, "qa", 1): [1, 1], (322, "qa", 1): [4, 5]}


def test_both_turns_of_a_question_are_one_row():
    totals = question_totals(as_steps(LENGTHS))
    assert totals[["question_id", "turns", "tokens", "steps"]].values.tolist() == [[81, 2, 12, 4], [321, 1, 2, 2], [322, 1, 9, 2]]


def test_averages_by_hand():
    table = tau_table(question_totals(as_steps(LENGTHS)), resamples=50)
    assert table["group"].drop_duplicates().tolist() == ["overall", "mt-bench", "qa", "writing"]
    assert value(table) == pytest.approx(23 / 8)
    assert value(table, average="questions") == pytest.approx((3 + 1 + 4.5) / 3)
    assert value(table, average="categories") == pytest.approx((3 + 11 / 4) / 2)
    assert value(table, group="qa", average="questions") == pytest.approx(2.75)
    assert value(table, group="mt-bench") == 3
    counts = table[(table["group"] == "qa") & (table["average"] == "pooled")]
    assert counts[["questions", "empty", "tokens", "steps"]].values.tolist() == [[2, 0, 11, 4]]


@given(
    st.lists(
        st.tuples(st.sampled_from(tau.CATEGORIES), st.integers(1, 2), st.lists(st.integers(1, 7), min_size=1, max_size=6)),
        min_size=1,
        max_size=12,
    )
)
def test_averages_equal_brute_force(answers):
    lengths = {(q, c, t): tokens for q, (c, turns, tokens) in enumerate(answers) for t in range(1, turns + 1)}
    table = tau_table(question_totals(as_steps(lengths)), resamples=2)
    for group, members in tau.groups(c for _, c, _ in lengths):
        steps = {key: tokens for key, tokens in lengths.items() if key[1] in members}
        assert value(table, group=group) == pytest.approx(np.mean(list(itertools.chain(*steps.values()))))
        questions = [np.mean([n for (q, _, _), tokens in steps.items() if q == of for n in tokens]) for of in {k[0] for k in steps}]
        assert value(table, group=group, average="questions") == pytest.approx(np.mean(questions))
        kinds = [np.mean([n for (_, c, _), tokens in steps.items() if c == of for n in tokens]) for of in members]
        assert value(table, group=group, average="categories") == pytest.approx(np.mean(kinds))


def test_pooled_and_macro_can_disagree_in_sign():
    """vllm#42508: the first method is better on one long answer, the other on three short ones."""
    a = as_totals(["qa"] * 4, [330, 20, 20, 20], [100, 10, 10, 10], "ELSI")
    b = as_totals(["qa"] * 4, [330, 20, 20, 20], [110, 8, 8, 8])
    table = compare(pd.concat([a, b]), "EAGLE3", resamples=100)
    assert value(table, "difference") == pytest.approx(3 - 390 / 134)
    assert value(table, "difference") > 0 > value(table, "difference", average="questions") == pytest.approx(2.325 - 2.625)


def test_mt_bench_is_the_eight_categories_of_two_turns():
    assert len(tau.CATEGORIES) == 13 and len(tau.MT_BENCH) == 8
    groups = tau.groups([*reversed(tau.CATEGORIES), "my own"])
    assert [name for name, _ in groups] == ["overall", "mt-bench", *tau.CATEGORIES, "my own"]
    assert dict(groups)["mt-bench"] == tau.MT_BENCH and dict(groups)["overall"] == (*tau.CATEGORIES, "my own")
    assert [name for name, _ in tau.groups(["rag"])] == ["overall", "rag"]


def test_seeds_of_a_question_stay_together():
    rng = np.random.default_rng(0)
    one = random_totals(rng, (20, 20), temperature=1.0)
    twice = pd.concat([one, one.assign(seed=1)])
    pd.testing.assert_frame_equal(
        tau_table(one, resamples=200).drop(columns=["tokens", "steps"]),
        tau_table(twice, resamples=200).drop(columns=["tokens", "steps"]),
    )


# empty answers


def test_an_empty_answer_is_counted_and_changes_no_average():
    questions = pd.DataFrame({"question_id": [81, 82, 321, 322, 481], "category": ["writing", "writing", "qa", "qa", "rag"]})
    full, plain = (question_totals(as_steps(LENGTHS), asked) for asked in (questions, None))
    assert full[full["steps"] == 0]["question_id"].tolist() == [82, 481]
    table, without = tau_table(full, resamples=50), tau_table(plain, resamples=50)
    assert value(table, "empty") == 2 and value(table, "questions") == 3
    kept = table[table["group"] != "rag"].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept.drop(columns="empty"), without.drop(columns="empty"))
    assert np.isnan(value(table, group="rag")) and value(table, "questions", group="rag") == 0
    both = pd.concat([full, full.assign(method="ELSI", tokens=full["tokens"] + full["steps"])])
    row = compare(both, "EAGLE3", resamples=50).query("group == 'rag'").iloc[0]
    assert np.isnan(row["difference"]) and np.isnan(row["p"]) and np.isnan(row["p_holm"]) and row["questions"] == 0


def test_nothing_but_empty_answers_is_an_error():
    with pytest.raises(ElsiError, match="EAGLE3, nodes 60, temperature 0.0: every answer is empty"):
        tau_table(as_totals(["qa"] * 3, [0, 0, 0], [0, 0, 0]))


def test_an_answer_empty_for_one_method_only_is_named():
    a = as_totals(["qa"] * 3, [4, 0, 5], [2, 0, 2], "ELSI", turns=[1, 0, 1])
    with pytest.raises(ElsiError, match="question 82, seed 0, .*: 0 turns of ELSI have steps, 1 of EAGLE3"):
        compare(pd.concat([a, as_totals(["qa"] * 3, [4, 3, 5], [2, 2, 2])]), "EAGLE3")


# intervals


def linearised_error(a, b=None):
    """Standard error of pooled tau (or of a difference) by the delta method, strata by category."""
    parts = [(t["tokens"] - t["tokens"].sum() / t["steps"].sum() * t["steps"]) / t["steps"].sum() for t in (a, b) if t is not None]
    influence = parts[0] - (parts[1] if b is not None else 0)
    return np.sqrt(influence.groupby(a["category"]).agg(lambda u: len(u) * u.var(ddof=1)).sum())


@pytest.mark.parametrize("sizes", [(80, 80, 10), (5,) * 13])
def test_standard_error_is_that_of_a_stratified_sample(sizes):
    """Also with five questions per category, where plain resampling would be 11 % too narrow."""
    rng = np.random.default_rng(1)
    a, b = random_totals(rng, sizes, "ELSI", 0.2), random_totals(rng, sizes)
    table = compare(pd.concat([a, b]), "EAGLE3", resamples=20_000)
    assert value(table, "standard_error") == pytest.approx(linearised_error(a, b), rel=0.03)
    assert value(table, "detectable") == pytest.approx(2.80159 * value(table, "standard_error"), rel=1e-5)
    single = tau_table(b, resamples=20_000)
    width = value(single, "high") - value(single, "low")
    assert width / (2 * 1.96) == pytest.approx(linearised_error(b), rel=0.04)


def test_interval_agrees_with_scipy():
    totals = random_totals(np.random.default_rng(2), (300,))
    ours = tau_table(totals, resamples=10_000)
    data = (totals["tokens"].to_numpy(), totals["steps"].to_numpy())
    statistic = {
        "pooled": lambda t, s, axis: t.sum(axis) / s.sum(axis),
        "questions": lambda t, s, axis: (t / s).mean(axis),
    }
    for average, function in statistic.items():
        theirs = stats.bootstrap(data, function, paired=True, method="percentile", n_resamples=10_000, rng=3).confidence_interval
        width = theirs.high - theirs.low
        assert abs(value(ours, "low", average=average) - theirs.low) < 0.05 * width
        assert abs(value(ours, "high", average=average) - theirs.high) < 0.05 * width


def test_intervals_over_questions_cover_and_intervals_over_steps_do_not():
    rng = np.random.default_rng(4)
    sizes, runs, held, naive, ratio = (12, 12, 12, 12), 250, 0, 0, []
    centre = np.repeat([1.5, 2.0, 2.5, 3.0], sizes)
    truth = 2.25 + 1.6  # steps do not depend on tau here: E tokens / E steps
    for _ in range(runs):
        own = centre + rng.gamma(2, 0.8, len(centre))
        steps = rng.integers(50, 400, len(centre))
        tokens = rng.geometric(np.repeat(1 / own, steps))
        totals = as_totals(np.repeat(tau.CATEGORIES[:4], sizes), np.add.reduceat(tokens, np.r_[0, steps.cumsum()[:-1]]), steps)
        table = tau_table(totals, resamples=400)
        low, high = (value(table, column) for column in ("low", "high"))
        half = 1.96 * tokens.std() / np.sqrt(len(tokens))
        held += low <= truth <= high
        naive += abs(tokens.mean() - truth) <= half
        ratio.append((high - low) / (2 * half))
    assert 0.90 <= held / runs <= 0.98
    assert naive / runs < 0.6 and np.mean(ratio) > 3


def test_a_question_alone_in_its_category_has_no_interval():
    table = tau_table(as_totals(["qa", "qa", "rag"], [4, 6, 5], [2, 2, 2]), resamples=50)
    assert np.isfinite(value(table, "low", group="qa")) and value(table, group="rag") == 2.5
    assert np.isnan([value(table, "low", group=g) for g in ("rag", "overall")]).all()


def test_seed_decides_and_the_order_of_rows_does_not():
    rng = np.random.default_rng(5)
    totals = pd.concat([random_totals(rng, (20, 9), m, s) for m, s in (("EAGLE3", 0), ("ELSI", 0.1), ("EAGLE2", -0.3))])
    shuffled = totals.sample(frac=1, random_state=0)
    for function in (tau_table, lambda data, **more: compare(data, "EAGLE3", **more)):
        keys = ["method", "group", "average"]
        first, again, other = (
            function(data, resamples=300, seed=seed).sort_values(keys, ignore_index=True)
            for data, seed in ((totals, 0), (shuffled, 0), (totals, 1))
        )
        pd.testing.assert_frame_equal(first, again)
        assert not first["low"].equals(other["low"])
        for column in {"tau", "difference"} & set(first.columns):
            assert first[column].equals(other[column])


# paired differences


def test_a_constant_advantage():
    steps = np.array([10, 20, 30, 40, 50, 60])
    a, b = as_totals(["qa"] * 6, 3 * steps, steps, "ELSI"), as_totals(["qa"] * 6, 2 * steps, steps)
    (row,) = compare(pd.concat([a, b]), "EAGLE3", resamples=100).query("group == 'overall' and average == 'pooled'").itertuples()
    assert (row.difference, row.low, row.high, row.standard_error) == pytest.approx((1, 1, 1, 0), abs=1e-12)
    assert (row.percent, row.percent_low, row.percent_high) == pytest.approx((50, 50, 50))
    assert row.exact and row.p == row.p_holm == 2 / 2**6


def test_equal_methods_have_p_one():
    b = random_totals(np.random.default_rng(6), (20, 5))
    table = compare(pd.concat([b.assign(method="ELSI"), b]), "EAGLE3", resamples=100)
    assert (table["p"] == 1).all() and (table["difference"] == 0).all() and (table["low"] == 0).all()


@pytest.mark.parametrize("average", tau.AVERAGES)
def test_permutation_test_agrees_with_scipy(average):
    """All 2^10 swaps; scipy permutes the question's row as a whole, tokens and steps together."""
    rng = np.random.default_rng(7)
    a, b = random_totals(rng, (6, 4), "ELSI", 0.4), random_totals(rng, (6, 4))
    tokens, steps = (np.r_[a[c], b[c]] for c in ("tokens", "steps"))

    def mean(rows):
        t, s = tokens[rows], steps[rows]
        return {"pooled": t.sum() / s.sum(), "questions": (t / s).mean(),
                "categories": (t[:6].sum() / s[:6].sum() + t[6:].sum() / s[6:].sum()) / 2}[average]  # fmt: skip

    rows = np.arange(10), np.arange(10, 20)
    theirs = stats.permutation_test(
        rows, lambda x, y: mean(x) - mean(y), permutation_type="samples", vectorized=False, n_resamples=2000
    )
    table = compare(pd.concat([a, b]), "EAGLE3", resamples=100)
    assert value(table, "difference", average=average) == pytest.approx(theirs.statistic)
    assert value(table, "p", average=average) == pytest.approx(theirs.pvalue) and value(table, "exact")


def test_random_swaps_come_near_to_all_of_them():
    rng = np.random.default_rng(8)
    a, b = random_totals(rng, (8, 8), "ELSI", 0.25), random_totals(rng, (8, 8))
    A, B = (t[["tokens", "steps"]].to_numpy(float) for t in (a, b))
    swap = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
    first, second = (swap @ x + (1 - swap) @ y for x, y in ((A, B), (B, A)))
    null = np.abs(first[:, 0] / first[:, 1] - second[:, 0] / second[:, 1])
    p = (null >= null[-1] * (1 - 1e-12)).mean()
    table = compare(pd.concat([a, b]), "EAGLE3", resamples=20_000)
    assert not value(table, "exact") and 0.02 < p < 0.98
    assert value(table, "p") == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / 20_000))


def test_p_values_are_uniform_where_the_methods_are_exchangeable():
    """Questions differ in length and in tau far more than methods do; the lengths of both answers are free."""
    rng = np.random.default_rng(9)
    seen = {average: [] for average in tau.AVERAGES}
    for run in range(150):
        sizes = (10, 6)
        level = 1 + rng.gamma(2, 1.0, sum(sizes))
        steps = rng.integers(20, 400, sum(sizes))
        pair = [
            as_totals(np.repeat(TWO, sizes), steps + rng.negative_binomial(steps, 1 / (level + rng.gamma(2, 0.1, 16))), steps, m)
            for m in ("ELSI", "EAGLE3")
        ]
        table = compare(pd.concat(pair), "EAGLE3", resamples=399, seed=run)
        for average, ps in seen.items():
            ps.append(value(table, "p", average=average))
    for ps in seen.values():
        assert stats.kstest(ps, "uniform").pvalue > 0.01
        assert np.mean(np.array(ps) <= 0.05) < 0.09


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five():
    assert stats.norm.sf(1.959964 - smallest_detectable(1.0)) == pytest.approx(0.8, abs=1e-4)
    assert smallest_detectable(0.02, alpha=0.01, power=0.5) == pytest.approx(0.02 * 2.575829, rel=1e-6)


@given(st.integers(0, 1000))
@settings(max_examples=15)
def test_swapping_the_sides_turns_the_sign(seed):
    rng = np.random.default_rng(seed)
    both = pd.concat([random_totals(rng, (7, 9), "ELSI", 0.3), random_totals(rng, (7, 9))])
    one, other = (compare(both, baseline, resamples=50) for baseline in ("EAGLE3", "ELSI"))
    np.testing.assert_allclose(one["difference"], -other["difference"])
    np.testing.assert_allclose(one[["low", "high"]], -other[["high", "low"]], atol=1e-12)
    np.testing.assert_allclose(one["p"], other["p"])


# Holm


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.6, np.nan, 0.5]), [1, np.nan, 1])
    with pytest.raises(ElsiError, match="between 0 and 1"):
        holm([0.5, 1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_the_closure_of_bonferroni(p):
    """p_i adjusted = the largest Bonferroni p-value among the intersections that contain hypothesis i."""
    subsets = [s for size in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), size)]
    expected = [max(min(1, len(s) * min(p[j] for j in s)) for s in subsets if i in s) for i in range(len(p))]
    adjusted = holm(p)
    np.testing.assert_allclose(adjusted, expected)
    assert (adjusted >= np.array(p) - 1e-15).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


def test_holm_is_over_the_methods_of_one_column():
    rng = np.random.default_rng(10)
    methods = {"EAGLE3": 0, "ELSI": 0.2, "EAGLE2": -0.2, "lowest": -0.1}
    settings = [(n, t) for n in (30, 60) for t in (0.0, 1.0)]
    totals = [random_totals(rng, (9, 9), m, s, nodes=n, temperature=t) for m, s in methods.items() for n, t in settings]
    table = compare(pd.concat(totals), "EAGLE3", resamples=99)
    assert len(table) == 3 * 4 * 3 * 3
    for _, family in table.groupby(["nodes", "temperature", "group", "average"]):
        np.testing.assert_allclose(family["p_holm"], holm(family["p"]))
        assert len(family) == 3


# bad input


GOOD = as_totals(["qa", "qa", "rag"], [4, 6, 5], [2, 2, 2])
OTHER = GOOD.assign(method="ELSI")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.drop(columns=["steps", "seed"]), "totals without column seed, steps"),
        (lambda t: t.iloc[:0], "totals without a row"),
        (lambda t: t.assign(tokens=[4, np.nan, 5]), "NaN in column tokens, first at question 82"),
        (lambda t: t.assign(category=["qa", None, "rag"]), "NaN in column category"),
        (lambda t: t.assign(steps=[2, -1, 2]), "steps = -1 at question 82"),
        (lambda t: t.assign(tokens=[4, np.inf, 5]), "tokens = inf at question 82"),
        (lambda t: t.assign(tokens=[4, 1, 5]), "1 tokens in 2 steps at question 82"),
        (lambda t: t.assign(steps=[2, 0, 2]), "6 tokens in 0 steps at question 82"),
        (lambda t: pd.concat([t, t]), "question 81, seed 0 twice at EAGLE3, nodes 60"),
        (lambda t: pd.concat([t, t.iloc[:2].assign(seed=1)]), "question 83 lacks seed 1"),
        (lambda t: pd.concat([t, t.assign(seed=1, category="qa")]), "question 83 in categories qa, rag"),
    ],
)
def test_bad_totals_are_named(change, message):
    with pytest.raises(ElsiError, match=message):
        tau_table(change(GOOD))


@pytest.mark.parametrize("tokens", [0, -1, 1.5, np.nan])
def test_a_step_yields_at_least_one_whole_token(tokens):
    with pytest.raises(ElsiError, match="at question 321|column tokens"):
        question_totals(as_steps({(321, "qa", 1): [3, tokens]}))


def test_steps_of_a_question_that_was_not_asked():
    with pytest.raises(ElsiError, match="question 81, writing: not among the 1 questions asked"):
        question_totals(as_steps({(81, "writing", 1): [2]}), pd.DataFrame({"question_id": [81], "category": ["qa"]}))


@pytest.mark.parametrize(
    "other, message",
    [
        (OTHER.iloc[:2], "ELSI lacks question 83, seed 0, nodes 60, temperature 0.0, which EAGLE3 has"),
        (pd.concat([OTHER, OTHER.assign(nodes=30)]), "EAGLE3 lacks question 81, seed 0, nodes 30, .* which ELSI has .3 such"),
        (OTHER.assign(seed=1), "ELSI lacks question 81, seed 0, "),
        (OTHER.assign(turns=[1, 2, 1]), "question 82, .*: 2 turns of ELSI have steps, 1 of EAGLE3"),
        (GOOD.iloc[:0], "nothing to compare with 'EAGLE3'"),
    ],
)
def test_the_same_questions_and_settings_on_both_sides(other, message):
    with pytest.raises(ElsiError, match=message):
        compare(pd.concat([GOOD, other]), "EAGLE3")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"resamples": 1}, "resamples = 1"),
        ({"level": 95}, "level = 95"),
        ({"baseline": "EAGLE-3"}, "no baseline 'EAGLE-3'.*EAGLE3, ELSI"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ElsiError, match=message):
        compare(pd.concat([GOOD, OTHER]), **{"baseline": "EAGLE3", **options})


def test_categoricals_as_parquet_keeps_them():
    steps = as_steps(LENGTHS)
    asked = pd.DataFrame({"question_id": [81, 321, 322, 401], "category": ["writing", "qa", "qa", "math_reasoning"]})
    packed = steps.astype({"category": "category", "method": "category", "tokens": "uint8", "nodes": "int16"})
    tables = [tau_table(question_totals(data, asked), resamples=20) for data in (steps, packed)]
    pd.testing.assert_frame_equal(*tables, check_dtype=False)
