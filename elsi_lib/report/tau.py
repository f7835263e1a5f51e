"""Statistics of tau, the mean number of tokens one target step yields (paper, tables 2 and 3): averages, intervals, paired tests.

Two forms of data, both pandas frames:

* **steps**, one row per target step: ``question_id, category, turn, method, nodes, temperature, seed, tokens``; tokens = accepted + 1,
  cut after EOS, so at least 1.
* **totals** (:func:`question_totals`), one row per question and setting, both turns together: ``question_id, category, method,
  nodes, temperature, seed, turns, tokens, steps``; turns counts those with a step. An empty answer is a row with steps = tokens = 0.

A setting is (method, nodes, temperature). The question is the unit: its turns and seeds are added up and never parted, for steps
of one answer are alike (intervals over steps as if independent are several times too narrow). Empty answers have no tau: they are
counted, and enter no average and no draw. A method without a tree (prompt lookup) is given under each ``nodes`` it is compared at.

Three averages, which may disagree even in the sign of a difference (vllm#42508): ``pooled`` = sum of tokens / sum of steps, as
Spec-Bench reports it; ``questions`` = mean over questions of their tau; ``categories`` = mean over categories of their pooled tau.
Groups: ``overall``, ``mt-bench`` (the eight two-turn categories of Spec-Bench together), and each category.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.stats import norm

from elsi_lib.errors import ElsiError

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag", *MT_BENCH)  # of Spec-Bench
AVERAGES = ("pooled", "questions", "categories")
SETTING = ["method", "nodes", "temperature"]
STEP_COLUMNS = ["question_id", "category", "turn", *SETTING, "seed", "tokens"]
TOTAL_COLUMNS = ["question_id", "category", *SETTING, "seed", "turns", "tokens", "steps"]
_EXACT_UP_TO = 13  # questions of which all 2^n swaps are tried; beyond, random swaps
_TIE = 1e-9  # relative; the same sum in another order differs in the last bits


def question_totals(steps: pd.DataFrame, questions: pd.DataFrame | None = None) -> pd.DataFrame:
    """Steps -> totals, sorted by setting, seed and question.

    Args:
        steps: see the top of the module; further columns are ignored.
        questions: ``question_id, category`` of every question that was asked. A question without a step at a setting and seed then
            gets its row of zeros, the empty answer; without it such a question is unseen.

    Raises:
        ElsiError: a missing column, no rows, NaN, tokens that are not whole numbers >= 1, a question with two categories or
            not among ``questions``.
    """
    data = _checked(steps, STEP_COLUMNS, "steps", least={"tokens": 1})
    keys = [*SETTING, "seed", "question_id", "category"]
    totals = data.groupby(keys, observed=True).agg(turns=("turn", "nunique"), tokens=("tokens", "sum"), steps=("tokens", "size"))
    if questions is not None:
        asked = _checked(questions, ["question_id", "category"], "questions").drop_duplicates()
        for question, category in pd.MultiIndex.from_frame(data[asked.columns]).difference(pd.MultiIndex.from_frame(asked)):
            raise ElsiError(f"steps of question {question}, {category}: not among the {len(asked)} questions asked")
        every = totals.reset_index()[[*SETTING, "seed"]].drop_duplicates().merge(asked, how="cross")
        totals = totals.reindex(pd.MultiIndex.from_frame(every[keys]), fill_value=0).sort_index()
    return totals.reset_index()[TOTAL_COLUMNS]


def tau_table(totals: pd.DataFrame, *, resamples: int = 10_000, seed: int = 0, level: float = 0.95) -> pd.DataFrame:
    """tau of every setting, group and average, with intervals from a stratified bootstrap over questions.

    Questions are drawn with replacement within their category; the ends are percentiles. n - 1 of a category's n are drawn, each
    counting n / (n - 1) times (Rao and Wu 1988): n of n would give a variance (n - 1) / n times too small, which matters at ten
    questions. Where a category has a single answered question its spread is unknown: NaN ends, also for groups that hold it.

    Returns:
        Columns method, nodes, temperature, group, average, tau, low, high (tokens per step), questions (answered), empty, tokens,
        steps. tau is NaN where every answer of a group is empty.

    Raises:
        ElsiError: bad totals (missing columns, NaN, negative or impossible counts, a row twice), a seed that only some questions
            have, not one answer, ``resamples`` < 2, ``level`` outside (0, 1).
    """
    ends, rows = _ends(resamples, level), []
    for setting, questions in _settings(_checked_totals(totals)).items():
        names, sizes, values = _by_category(questions[questions["steps"] > 0], setting)
        own = _group_sums(values, np.ones((1, len(values))), sizes)
        drawn = _group_sums(values, bootstrap_weights(sizes, resamples, seed), sizes)
        kinds, tokens, steps = (questions[column].to_numpy() for column in ("category", "tokens", "steps"))
        for group, members in groups(questions["category"]):
            inside, of = np.isin(names, members), np.isin(kinds, members)
            taus, draws = _averages(own[:, inside]), _averages(drawn[:, inside])
            empty = int((steps[of] == 0).sum())
            counts = (int(of.sum()) - empty, empty, int(tokens[of].sum()), int(steps[of].sum()))
            for average in AVERAGES:
                rows.append((*setting, group, average, taus[average][0], *np.quantile(draws[average], ends), *counts))
    return pd.DataFrame(rows, columns=[*SETTING, "group", "average", "tau", "low", "high", "questions", "empty", "tokens", "steps"])


def compare(totals: pd.DataFrame, baseline: str, *, resamples: int = 10_000, seed: int = 0, level: float = 0.95) -> pd.DataFrame:
    """Every method against ``baseline`` on the same questions, at each nodes and temperature.

    Interval: the bootstrap of :func:`tau_table`, the same draw for both methods. Test: labels of the two methods are swapped within
    questions (all turns and seeds of a question together, tokens and steps together) and the difference of the average itself is
    recomputed; two-sided p is the share of swaps with |difference| at least the one seen. Under the null that the two methods are
    exchangeable on each question this is exact: all 2^n swaps up to 13 questions, beyond that ``resamples`` random ones, where
    p = (1 + hits) / (1 + resamples) keeps the level. Holm's correction is over the methods compared at one nodes, temperature,
    group and average. Detectable: the true difference found with 80 % power at two-sided 5 %, 2.80 paired standard errors.

    Returns:
        Columns method, baseline, nodes, temperature, group, average, difference, low, high (tokens per step), percent, percent_low,
        percent_high (of the baseline's), standard_error, detectable (tokens per step), p, p_holm, exact, questions; NaN as above.

    Raises:
        ElsiError: as :func:`tau_table`; no such baseline, nothing to compare, or a method and the baseline that do not have the
            same settings, questions, seeds, turns and empty answers: the first thing missing is named.
    """
    ends, rows = _ends(resamples, level), []
    data = _checked_totals(totals)
    _check_pairs(data, baseline)
    tables = _settings(data)
    for (method, *place), questions in tables.items():
        if method == baseline:
            continue
        base = tables[baseline, *place]
        answered = (base["steps"] > 0).to_numpy()
        names, sizes, B = _by_category(base[answered], (baseline, *place))
        A = _by_category(questions[answered], (method, *place))[2]
        both = np.concatenate([A, B], axis=1)
        own = _group_sums(both, np.ones((1, len(B))), sizes)
        drawn = _group_sums(both, bootstrap_weights(sizes, resamples, seed), sizes)
        swapped = _swapped_sums(A, B, sizes, resamples, seed)
        for group, members in groups(base["category"]):
            inside = np.isin(names, members)
            count = int((own_rows := np.repeat(inside, sizes)).sum())
            exact = 0 < count <= _EXACT_UP_TO
            null = _swapped_sums(A[own_rows], B[own_rows], tuple(np.array(sizes)[inside])) if exact else swapped[:, inside]
            seen, draws, null = (_differences(sums) for sums in (own[:, inside], drawn[:, inside], null))
            for average in AVERAGES:
                (difference,), (percent,) = seen[average]
                (low, high), percents = (np.quantile(sample, ends) for sample in draws[average])
                error = float(np.std(draws[average][0], ddof=1))
                hits = int((np.abs(null[average][0]) >= abs(difference) * (1 - _TIE) - _TIE**2).sum())
                p = hits / 2**count if exact else (1 + hits) / (1 + resamples) if count else np.nan
                numbers = (difference, low, high, percent, *percents, error, smallest_detectable(error), p)
                rows.append((method, baseline, *place, group, average, *numbers, exact, count))
    family = ["nodes", "temperature", "group", "average"]
    numbers = ["difference", "low", "high", "percent", "percent_low", "percent_high", "standard_error", "detectable", "p"]
    table = pd.DataFrame(rows, columns=["method", "baseline", *family, *numbers, "exact", "questions"])
    table.insert(table.columns.get_loc("exact"), "p_holm", table.groupby(family)["p"].transform(holm))
    return table


def holm(p: Iterable[float]) -> np.ndarray:
    """Holm's adjusted p-values, in the order given: the running maximum of (m - i) p_(i), i = 0 .. m - 1, at most 1 (Holm 1979).

    NaN, a test that could not be made, stays NaN and is not counted. Raises ElsiError for a p outside 0..1.
    """
    p = np.asarray(list(p), dtype=np.float64)
    if ((p < 0) | (p > 1)).any():
        raise ElsiError(f"p-values {p.tolist()}: they lie between 0 and 1")
    adjusted = np.full_like(p, np.nan)
    order = [i for i in np.argsort(p, kind="stable") if not np.isnan(p[i])]
    adjusted[order] = np.minimum(np.maximum.accumulate(np.arange(len(order), 0, -1) * p[order]), 1.0)
    return adjusted


def smallest_detectable(standard_error: float, alpha: float = 0.05, power: float = 0.80) -> float:
    """The true difference that a two-sided test at ``alpha`` finds with probability ``power``, in the unit of the standard error."""
    return _quantiles(alpha, power) * standard_error


@lru_cache
def _quantiles(alpha: float, power: float) -> float:
    return float(norm.ppf(1 - alpha / 2) + norm.ppf(power))


def groups(categories: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(group, its categories) as reported: overall, mt-bench if any of the eight is there, then each category, Spec-Bench's first."""
    found = _in_order(set(categories))
    mt_bench = tuple(c for c in found if c in MT_BENCH)
    return [("overall", found), *([("mt-bench", mt_bench)] if mt_bench else []), *((c, (c,)) for c in found)]


def _in_order(categories: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(categories, key=lambda c: (CATEGORIES.index(c) if c in CATEGORIES else len(CATEGORIES), c)))


def _by_category(questions: pd.DataFrame, setting: tuple) -> tuple[tuple[str, ...], tuple[int, ...], np.ndarray]:
    """Categories, their sizes, and (n, 4) values per answered question, categories in that order: tokens, steps, tau, 1."""
    if questions.empty:
        raise ElsiError(f"{_named(setting)}: every answer is empty; tau is undefined")
    counts = Counter(questions["category"].tolist())
    names = _in_order(counts)
    sizes = tuple(counts[name] for name in names)
    tokens, steps = (questions[column].to_numpy(dtype=np.float64) for column in ("tokens", "steps"))
    return names, sizes, np.stack([tokens, steps, tokens / steps, np.ones_like(steps)], axis=1)


def _group_sums(values: np.ndarray, weights: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Weights (R, n) on questions, values (n, K) -> sums by category (R, C, K), of which every average is a function."""
    cuts = np.cumsum(sizes)[:-1]
    return np.stack([w @ v for w, v in zip(np.split(weights, cuts, axis=1), np.split(values, cuts), strict=True)], axis=1)


@lru_cache(maxsize=1)
def bootstrap_weights(sizes: tuple[int, ...], resamples: int, seed: int) -> np.ndarray:
    """(R, n) weights of the questions, see :func:`tau_table`; NaN for a question alone in its category."""
    rng = np.random.default_rng([seed, 0])
    weights = [rng.multinomial(n - 1, np.full(n, 1 / n), resamples) * (n / (n - 1) if n > 1 else np.nan) for n in sizes]
    return np.concatenate(weights, axis=1)


def _swapped_sums(A: np.ndarray, B: np.ndarray, sizes: tuple[int, ...], resamples: int | None = None, seed: int = 0) -> np.ndarray:
    """(R, C, 8): sums of A and of B after their rows are swapped by random signs; by all 2^n sign patterns for None."""
    n = len(A)
    if resamples is None:
        swap = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    else:
        swap = np.random.default_rng([seed, 1]).integers(0, 2, (resamples, n), dtype=np.int8)
    middle = _group_sums((A + B) / 2, np.ones((1, n)), sizes)
    apart = _group_sums((A - B) / 2, 1.0 - 2.0 * swap, sizes)
    return np.concatenate([middle + apart, middle - apart], axis=2)


def _averages(sums: np.ndarray) -> dict[str, np.ndarray]:
    """The three averages (R,) from sums by category (R, C, 4); NaN without categories."""
    if not sums.shape[1]:
        return dict.fromkeys(AVERAGES, np.full(len(sums), np.nan))
    tokens, steps, taus, count = np.moveaxis(sums, 2, 0)
    values = tokens.sum(1) / steps.sum(1), taus.sum(1) / count.sum(1), (tokens / steps).mean(1)
    return dict(zip(AVERAGES, values, strict=True))


def _differences(sums: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums (R, C, 8) of A and B -> per average the difference A - B and the same in percent of B, each (R,)."""
    a, b = _averages(sums[..., :4]), _averages(sums[..., 4:])
    return {average: (a[average] - b[average], 100 * (a[average] / b[average] - 1)) for average in AVERAGES}


def _ends(resamples: int, level: float) -> tuple[float, float]:
    if resamples < 2:
        raise ElsiError(f"resamples = {resamples}: at least 2, and some thousand for an interval")
    if not 0 < level < 1:
        raise ElsiError(f"level = {level}: between 0 and 1, 0.95 for 95 % intervals")
    return (1 - level) / 2, (1 + level) / 2


def _checked(data: pd.DataFrame, columns: Sequence[str], what: str, least: dict[str, int] | None = None) -> pd.DataFrame:
    """The columns asked for, of a frame that has them, without NaN, whole counts not below ``least``, one category per question."""
    if missing := [column for column in columns if column not in data.columns]:
        raise ElsiError(f"{what} without column {', '.join(missing)}: {', '.join(columns)} are needed")
    if data.empty:
        raise ElsiError(f"{what} without a row: nothing to average")
    data = data[list(columns)]
    data = data.astype({c: t.categories.dtype for c, t in data.dtypes.items() if isinstance(t, pd.CategoricalDtype)})
    if (holes := data.isna().any()).any():
        question = data[data[holes.idxmax()].isna()].iloc[0]["question_id"]
        raise ElsiError(f"{what}: NaN in column {holes.idxmax()}, first at question {question}; measure it or leave the row out")
    for column, floor in (least or {}).items():
        values = data[column].to_numpy(dtype=np.float64)
        if (bad := ~np.isfinite(values) | (values < floor) | (values != np.floor(values))).any():
            row = data.iloc[int(bad.argmax())]
            raise ElsiError(f"{what}: {column} = {row[column]} at question {row['question_id']}; whole numbers >= {floor} only")
    kinds = data.groupby("question_id")["category"].unique()
    for question, several in kinds[kinds.map(len) > 1].items():
        raise ElsiError(f"{what}: question {question} in categories {', '.join(sorted(several))}")
    return data


def _checked_totals(totals: pd.DataFrame) -> pd.DataFrame:
    data = _checked(totals, TOTAL_COLUMNS, "totals", least={"turns": 0, "tokens": 0, "steps": 0})
    for _, row in data[(data["tokens"] < data["steps"]) | ((data["steps"] == 0) & (data["tokens"] > 0))].iterrows():
        raise ElsiError(f"totals: {row['tokens']} tokens in {row['steps']} steps at question {row['question_id']}: a step yields >= 1")
    for _, row in data[data.duplicated([*SETTING, "seed", "question_id"])].iterrows():
        raise ElsiError(f"totals: question {row['question_id']}, seed {row['seed']} twice at {_named(tuple(row[SETTING]))}")
    return data


def _settings(data: pd.DataFrame) -> dict[tuple, pd.DataFrame]:
    """Per setting one row per question, seeds added up, categories in order, then by question: input order leaves no trace."""
    tables = {}
    for setting, rows in data.groupby(SETTING, observed=True, sort=False):
        every = pd.MultiIndex.from_product([rows["question_id"].unique(), rows["seed"].unique()])
        for question, seed in every.difference(pd.MultiIndex.from_frame(rows[["question_id", "seed"]])):
            raise ElsiError(f"{_named(setting)}: question {question} lacks seed {seed}, which other questions have")
        summed = rows.groupby(["category", "question_id"], observed=True)[["tokens", "steps"]].sum().reset_index()
        place = {name: i for i, name in enumerate(_in_order(summed["category"].unique()))}
        tables[setting] = summed.assign(place=summed["category"].map(place)).sort_values(["place", "question_id"])
    return tables


def _check_pairs(data: pd.DataFrame, baseline: str) -> None:
    """Every method has what the baseline has, and the other way round: settings, questions, seeds, turns, empty answers."""
    methods = dict.fromkeys(data["method"])
    if baseline not in methods:
        raise ElsiError(f"no baseline {baseline!r} in the totals: there are {', '.join(map(str, methods))}")
    if len(methods) == 1:
        raise ElsiError(f"nothing to compare with {baseline!r}: it is the only method in the totals")
    keys, where = ["question_id", "seed", "nodes", "temperature"], "question {}, seed {}, nodes {}, temperature {}"
    base = data[data["method"] == baseline].set_index(keys)["turns"]
    for method in methods:
        other = data[data["method"] == method].set_index(keys)["turns"]
        for lacks, has, one, two in ((method, baseline, other, base), (baseline, method, base, other)):
            if len(missing := two.index.difference(one.index)):
                place = where.format(*missing[0])
                raise ElsiError(f"{lacks} lacks {place}, which {has} has ({len(missing)} such in all): measure both on the same")
        for place, turns in other[other != base.reindex(other.index)].items():
            raise ElsiError(f"{where.format(*place)}: {turns} turns of {method} have steps, {base[place]} of {baseline}")


def _named(setting: tuple) -> str:
    return f"{setting[0]}, nodes {setting[1]}, temperature {setting[2]}"
