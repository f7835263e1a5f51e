"""Pages written from results: numbers are those of the CSV files, verdicts follow the stated rules, no result is no error."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data" / "results"
SMOLLM = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def workflow(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "workflow")


@pytest.fixture
def origin():
    kinds = (".csv", ".json", ".md", ".png", ".svg")
    return {path.relative_to(RESULTS).as_posix(): path for path in RESULTS.rglob("*") if path.suffix in kinds}


def made(tmp_path, **tables: pd.DataFrame):
    """An origin with these tables of the default run."""
    from page_parts import of_default

    found = {}
    for name, data in tables.items():
        data.to_csv(tmp_path / f"{name}.csv", index=False)
        found[of_default(f"{name}.csv")] = tmp_path / f"{name}.csv"
    return found


def csv(name):
    return pd.read_csv(RESULTS / SMOLLM / f"{name}.csv", dtype={"layers": str, "depth": str})


# Verdicts


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([], "not run here"),
        (["agrees", "agrees"], "agrees"),
        (["disagrees"], "disagrees"),
        (["agrees", "disagrees"], "partly"),
        (["agrees", "not decided"], "partly"),
        (["disagrees", "not decided"], "disagrees"),
        (["partly", "disagrees"], "partly"),
        (["not decided", "not decided"], "not decided"),
    ],
)
def test_verdict_of_parts(parts, verdict):
    from page_agreements import overall

    assert overall(parts) == verdict


def test_verdict_of_an_interval():
    from page_agreements import by_interval

    assert by_interval(0.1, 0.2) == by_interval(-0.2, -0.1, above=False) == "agrees"
    assert by_interval(-0.2, -0.1) == by_interval(0.1, 0.2, above=False) == "disagrees"
    assert by_interval(-0.1, 0.1) == by_interval(0.0, 0.1) == by_interval(float("nan"), 0.1) == "not decided"


def test_verdict_of_a_difference_and_of_a_share():
    from page_agreements import decided, near, within

    assert [decided(word) for word in ("above", "below", "not decided", "same draft")] == ["agrees", "disagrees", *["not decided"] * 2]
    assert decided("below", above=False) == "agrees"
    assert near(98.9, 99.6, 99) == near(97.0, 98.5001, 99) == "agrees" and near(99.6, 100.2, 99) == "disagrees"
    assert near(float("nan"), float("nan"), 99) == within(float("nan"), float("nan"), 1) == "not decided"
    assert within(-0.01, 0.02, 0.02) == "agrees" and within(-0.03, 0.01, 0.02) == "not decided"
    assert within(0.021, 0.05, 0.02) == within(-0.05, -0.021, 0.02) == "disagrees"


def test_verdict_of_compartments():
    from page_agreements import compartment_verdict

    assert compartment_verdict([(0, 6), (7, 28), (29, 35)], 36) == "agrees"
    assert compartment_verdict([(0, 22), (23, 23)], 24) == "disagrees"
    assert compartment_verdict([(0, 1), (2, 21), (22, 23)], 24) == "partly"


def wave(entropies, width=0.01):
    of = {"target": "made-up", "first_position": "kept", "layer": range(len(entropies)), "entropy": entropies}
    return pd.DataFrame(of).assign(low=lambda d: d["entropy"] - width, high=lambda d: d["entropy"] + width)


@pytest.mark.parametrize(
    ("entropies", "verdict"),
    [
        ([0.5, 0.1, 0.1, 0.2, 0.9, 0.3], "agrees"),
        ([0.5, 0.9, 0.1, 0.2, 0.3, 0.3], "partly"),  # high, low, but the peak is early
        ([0.1, 0.2, 0.3, 0.4, 0.9, 0.3], "partly"),  # a late peak without a high start
        ([0.1, 0.9, 0.3, 0.4, 0.5, 0.3], "disagrees"),
    ],
)
def test_verdict_of_the_wave(tmp_path, entropies, verdict):
    from page_agreements import rows

    (row,) = [row for row in rows(made(tmp_path, figure2=wave(entropies))) if row.target == "made-up"]
    assert row.verdict == verdict and "Qwen3-4B: high, low, high" in row.reported


def taus(difference_of_elsi: float):
    """Tables of a made-up study: EAGLE-2, EAGLE-3, two sets of ELSI and the control, at one tree size."""
    methods = {
        "EAGLE-2": (1.6, 0.2), "EAGLE-3": (1.8, 0.4), "ELSI m=1": (1.79, 0.5), "ELSI m=3": (1.8 + difference_of_elsi, 0.6),
        "lowest": (1.5, 0.1),
    }  # fmt: skip
    about = {"target": "made-up", "origin": "measured", "layers": "1", "norm_before_fc": "none", "nodes": 60, "temperature": 0.0}
    main = [about | {"method": m, "draft": f"d{i}", "tau": tau, "entropy": s} for i, (m, (tau, s)) in enumerate(methods.items())]
    parts = []
    for method, (tau, _) in methods.items():
        percent = 100 * (tau - 1.8) / 1.8
        word = "above" if percent > 0.2 else "below" if percent < -0.2 else "not decided"
        for group in ("overall", "translation", "summarization", "stem"):
            numbers = {"percent": percent, "percent_low": percent - 0.1, "percent_high": percent + 0.1, "noise": 0.001, "questions": 9}
            where = {"method": method, "baseline": "EAGLE-3", "nodes": 60, "temperature": 0.0, "group": group, "average": "pooled"}
            parts.append(where | numbers | {"verdict": word})
    return {"table2": pd.DataFrame(main), "table2_differences": pd.DataFrame(parts)}


@pytest.mark.parametrize(
    ("difference", "ahead", "behind"), [(0.1, "agrees", "disagrees"), (-0.1, "disagrees", "agrees"), (0, *["not decided"] * 2)]
)
def test_verdicts_of_made_up_taus(tmp_path, difference, ahead, behind):
    from page_agreements import rows, tau_answer

    given = made(tmp_path, **taus(difference))
    found = {row.claim.removeprefix("table 2: "): row for row in rows(given) if row.target == "made-up"}
    assert found["ELSI m=3 has a higher tau than EAGLE-3"].verdict == ahead
    assert found["ELSI m=3 has a lower tau than EAGLE-3"].verdict == behind
    assert found["ELSI m=3 gains on EAGLE-3 in STEM"].verdict == ahead
    assert found["EAGLE-3 has a higher tau than EAGLE-2"].verdict == "agrees"
    # The control is last by its tau; that it is decidedly so takes the study itself.
    assert found["the set of low entropy has the lowest tau"].verdict == "not decided"
    words = {"agrees": "ELSI's draft is ahead:", "disagrees": "ELSI's draft is behind:", "not decided": "it is not decided:"}
    assert f"On **made-up** {words[ahead]}" in tau_answer(given)


# Numbers of the committed results


def test_agreements_have_the_numbers_of_the_results(origin):
    from page_agreements import agreements, rows

    found = {(row.claim, row.target, row.here.partition(", ")[0]): row for row in rows(origin)}
    differences = csv("table2_differences")
    of = differences[
        (differences["average"] == "pooled") & (differences["method"] == "ELSI m=3") & (differences["baseline"] == "EAGLE-3")
    ]
    assert set(of["temperature"]) == {0.0, 1.0}
    for temperature, here in of.groupby("temperature"):
        for task, group in (("translation", "translation"), ("STEM", "stem"), (None, "overall")):
            claim = f"table 2: ELSI m=3 gains on EAGLE-3 in {task}" if task else "table 2: ELSI m=3 has a higher tau than EAGLE-3"
            row, rows_ = found[claim, SMOLLM, f"T = {temperature:g}"], here[here["group"] == group]
            assert len(rows_) == 2
            for one in rows_.itertuples():
                text = f"{one.nodes} nodes {one.percent:+.1f} % [{one.percent_low:+.1f}, {one.percent_high:+.1f}]"
                assert text in row.here
            words = set(rows_["verdict"])
            assert row.verdict == {"above": "agrees", "below": "disagrees"}.get(words.pop(), "not decided") or words
    where = {"target": SMOLLM, "quantity": "change", "positions": "kept", "depth": "early", "reading": "block averages"}
    changes = csv("figure4").query("first_position == 'kept'")
    (early,) = changes[(changes[list(where)] == pd.Series(where)).all(axis=1)].itertuples()
    claim = "figure 4: the token filter lowers the variance between prompts, early third"
    (row,) = [row for row in rows(origin) if (row.claim, row.target) == (claim, SMOLLM)]
    assert f"block averages {early.value:+.1f} % [{early.low:+.1f}, {early.high:+.1f}]" in row.here
    text = agreements(origin)
    verdicts = re.findall(r"\| \*\*(.+?)\*\* \|$", text, re.M)
    counts = ", ".join(
        f"{v} {verdicts.count(v)}" for v in ("agrees", "partly", "disagrees", "not decided", "not run here") if v in verdicts
    )
    assert text.startswith(f"Of {len(verdicts)} rows: {counts}.")


def test_rules_on_the_page_are_those_of_the_code():
    import page_agreements as code

    page = (ROOT / "book" / "compared.md").read_text(encoding="utf-8")
    assert f"correlation along depth of {code.SAME_SHAPE} or more agrees, below {code.OTHER_SHAPE} disagrees" in page
    assert f"pairs of inner layers at {code.NEAR_ONE} or more" in page
    assert f"below {code.LEVEL}" in page and "a sixth of the layers" in page and code.LARGE == 1 / 6
    assert f"**Within {code.ALIKE:g} tokens**" in page


def test_costs_are_those_of_the_passports(origin):
    from page_costs import calibrations, estimate, stages

    from elsi_lib.fingerprint import Fingerprint

    fp = Fingerprint.load(RESULTS / SMOLLM / "fingerprint.safetensors")
    tokens, seconds, parameters = fp.passport["prompts"]["tokens"], fp.passport["seconds"], fp.passport["target"]["parameters"]
    (line,) = [line for line in calibrations(origin).splitlines() if SMOLLM in line]
    assert f"| {tokens:,} |" in line and f"| {tokens / seconds:,.0f} | {2 * parameters * tokens / seconds / 1e9:,.0f} |" in line
    about = json.loads((RESULTS / SMOLLM / "tau" / "passport.json").read_text())
    text = stages(origin)
    assert all(f"| {value:,.0f} |" in text for value in (*about["seconds"].values(), sum(about["seconds"].values())))
    assert "| 4 billion | 409,600 | 3.3 PFLOP |" in estimate() and "an estimate, not measured" in estimate()


def test_a_stage_that_no_page_describes_is_shown_last(origin, tmp_path):
    from page_costs import stages

    about = json.loads((RESULTS / SMOLLM / "tau" / "passport.json").read_text())
    about["seconds"]["a new stage"] = 12.0
    (tmp_path / "passport.json").write_text(json.dumps(about))
    *_, row, total = stages(dict(origin) | {f"{SMOLLM}/tau/passport.json": tmp_path / "passport.json"}).splitlines()
    assert row.startswith("| a new stage |  | 12 |") and total.startswith("| **all** |")


def test_served_ids_are_those_of_the_choice(origin):
    from page_serving import _config, configs, servable, serving_section

    from elsi_lib import Fingerprint, elsi
    from elsi_lib.layers import layer_ids

    fp = Fingerprint.load(RESULTS / SMOLLM / "fingerprint.safetensors")
    layers = elsi(fp, 3).layers
    shown = json.loads(re.search(rf"\*\*{SMOLLM}\*\*.*?```json\n(.*?)```", configs(origin), re.S)[1])
    key = "eagle_aux_hidden_state_layer_ids"
    assert shown[key] == list(layer_ids(layers, fp.num_layers, "vllm"))
    assert shown["eagle_config"][key] == list(layer_ids(layers, fp.num_layers, "sglang"))
    assert shown["num_aux_hidden_states"] == 3
    text = servable(origin)
    assert "it takes exactly 3 layers" in text and "it cannot name the last block" in text and "one layer would skip it" in text
    single = serving_section(_config(fp, elsi(fp, 1).layers))
    assert "sglang.launch_server" not in single and "vllm serve" in single


def test_launch_lines_are_the_model_cards():
    from page_serving import launch

    text = launch()
    for part in (
        "python -m sglang.launch_server",
        "vllm serve TARGET",
        "speculators convert DRAFT",
        "EaModel.from_pretrained",
        "Not tested here",
    ):
        assert part in text
    assert "## " not in text and not re.search(r"ids=\[\d|_ids\": \[\d", text)


# Questions and figures


def test_questions_take_their_numbers_from_passports(origin):
    from page_questions import questions

    passport = origin.get(f"{SMOLLM}/open_sink.json")
    if passport is None:
        pytest.skip("the question was not run")
    share = json.loads(passport.read_text())["results"]["open_sink_share_rows_without"]
    assert f"entered {100 * share:.0f} %" in questions(origin)


def test_a_question_whose_result_says_something_else_still_has_its_paragraph(tmp_path):
    from page_parts import of_default
    from page_questions import questions

    (tmp_path / "open_sink.json").write_text(json.dumps({"results": {}, "inputs": []}))
    text = questions({of_default("open_sink.json"): tmp_path / "open_sink.json"})
    assert text.count("\n\n") == 6 and text.count("Not run here") == 6


def test_figures_name_their_notebook_and_are_labelled_once(origin):
    from generated_pages import SHOWN_WITH_METHOD, figure

    for name in SHOWN_WITH_METHOD:
        text = figure(name, origin, label=name)
        assert f":name: {name}" in text and "](/notebooks/" in text
        assert ":name:" not in figure(name, origin)
        assert figure(name, {}, label=name).startswith(f"({name})=")


def test_notebooks_outside_of_the_book_are_not_linked(monkeypatch):
    import page_parts

    monkeypatch.setattr(page_parts, "in_contents", lambda: frozenset(["notebooks/01_wave"]))
    assert page_parts.notebook_link("wave", "01_wave") == "[wave](/notebooks/01_wave.ipynb)"
    assert page_parts.notebook_link("sink", "08_sink") == "sink"


def test_every_part_stands_where_nothing_was_run():
    from page_agreements import agreements, rows, tau_answer
    from page_costs import costs
    from page_questions import questions
    from page_serving import configs, servable

    assert {row.verdict for row in rows({})} == {"not run here"}
    for text in (agreements({}), tau_answer({}), costs({}), questions({}), configs({}), servable({})):
        assert re.search("not run here", text, re.I)
    assert "nan" not in agreements({})
