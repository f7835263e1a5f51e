"""A whole study on a tiny target: every stage, stopped and resumed, and what is left on disk."""

import json
import re

import pandas as pd
import pytest
from tiny import tiny_folder
from typer.testing import CliRunner

from elsi_lib import cli, live
from elsi_lib import study as studies
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.files import Lines
from elsi_lib.report.study import read_steps
from elsi_lib.settings import Settings
from elsi_lib.speculative.dialogue import Dialogue, own_dialogues
from elsi_lib.speculative.grid import table_rows
from elsi_lib.study import obtain_study, run_study, spread, study_questions


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny target of eight layers and conversations of letters, with their own cache and results."""
    root = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELSI_CACHE", str(root / "cache"))
        patch.setenv("ELSI_RESULTS", str(root / "results"))
        tiny_folder(root / "tiny", layers=8, max_position_embeddings=4096)
        lines = [
            {"id": str(i), "conversations": [
                {"from": "human", "value": f"question {chr(97 + i % 26)} " * (3 + i % 3)},
                {"from": "gpt", "value": f"answer {chr(97 + i // 26)} " * 20},
            ]} for i in range(60)
        ]  # fmt: skip
        (root / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield root


def settings_of(root, **more) -> Settings:
    files = {"target": str(root / "tiny"), "prompts": str(root / "talk.jsonl")}
    return Settings(**files, preset="quick", evaluation="own", **more)


class Killed(Exception):
    pass


def test_a_study_resumes_and_leaves_all_its_results(place, monkeypatch):
    settings, told = settings_of(place), []

    def stop_at(word):
        def say(text):
            told.append(text)
            if word in text:
                raise Killed(text)

        return say

    for word in ("training", "questions of own prompts at T = 1", "replaying 13 dialogues at T = 1", "live"):
        with pytest.raises(Killed):
            run_study(settings, say=stop_at(word))
    monkeypatch.setattr(live, "peak_memory", lambda named, draft, tree, ids, options: 100.0 + len(ids))  # a process each: slow
    monkeypatch.setattr(studies, "train", lambda *_, **__: None)  # drafts are done: they are read and not trained
    folder = run_study(settings)
    assert folder == place / "results" / settings.run_name / "tau-own"

    steps, rows = read_steps(folder / "steps.parquet"), pd.read_csv(folder / "rows.csv")
    asked = spread(own_dialogues(), 13)
    assert {d.category for d in asked} == {d.category for d in own_dialogues()}
    assert set(steps["question_id"]) == {d.id for d in asked}
    assert set(steps["method"]) == set(rows["method"]) and set(steps["nodes"]) == {30, 60} and set(steps["temperature"]) == {0.0, 1.0}
    # The same text is walked by every method, so the tokens of a turn add up alike, whatever the steps.
    totals = steps.assign(tokens=steps["tokens"].map(sum)).groupby(["question_id", "turn", "temperature"])["tokens"].nunique()
    assert (totals == 1).all()
    larger = steps.assign(count=steps["tokens"].map(len)).pivot_table(
        index=["question_id", "turn", "temperature", "method"], columns="nodes", values="count"
    )
    assert larger[60].sum() <= larger[30].sum()
    # Rows of equal sets are served by one draft and have the same steps.
    shared = rows[rows["draft"].notna() & rows.duplicated("draft", keep=False)]
    for _, group in shared.groupby("draft"):
        own = [steps[steps["method"] == m].drop(columns="method").reset_index(drop=True) for m in group["method"]]
        for other in own[1:]:
            assert own[0].astype(str).equals(other.astype(str))

    decoded = pd.read_csv(folder / "live.csv")
    assert {"plain", "prompt lookup", "EAGLE-3", "ELSI m=3"} <= set(decoded["method"]) and (decoded["seconds"] > 0).all()
    texts = decoded.groupby(["question_id", "temperature"])["tokens"].nunique()
    assert (texts == 1).all()
    passport = json.loads((folder / "passport.json").read_text())
    assert passport["evaluation"]["prompts"] == "own prompts" and str(place) not in json.dumps(passport)
    assert passport["code"]["speculative"] and passport["seconds"]["training"] > 0
    assert obtain_study(settings).status == "measured"

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "rows.csv").unlink()
    common = ("--prompts", place / "talk.jsonl", "--preset", "quick", "--questions", "own")
    again = elsi("study", place / "tiny", *common)  # goes on from what is kept: only the results are written
    assert again.exit_code == 0 and again.stdout == f"saved     {folder}\n", again.output
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {n for n in before if before[n] != after[n]} <= {"passport.json"}  # seconds of another run


def test_memory_is_of_a_process_of_its_own_and_its_failure_is_told(place):
    options = {"max_new_tokens": 2, "temperature": 0.0, "seed": 0}
    peak = live.peak_memory(str(place / "tiny"), None, {}, [1, 2, 3], options)
    assert 50 < peak < 4000  # MB: Python, torch and a target of a few thousand weights
    with pytest.raises(AssetError, match="the process that measures memory failed.*no-such-folder"):
        live.peak_memory(str(place / "no-such-folder"), None, {}, [1, 2, 3], options)


def elsi(*args):
    return CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="elsi", env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_train_and_evaluate_on_the_command_line(place, tmp_path):
    common = [place / "tiny", "--prompts", place / "talk.jsonl", "--preset", "quick"]
    sets = ["--layers", "1,3,5", "--layers", "7"]
    dry = elsi("train", *common, *sets, "-o", tmp_path / "none", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "1, 3, 5; 7" in dry.stdout and re.search(r"memory .* GiB", dry.stdout) and not (tmp_path / "none").exists()
    done = elsi("train", *common, *sets, "-o", tmp_path / "drafts")
    assert done.exit_code == 0, done.output
    names = ("1-3-5", "7")
    assert all(f": {tmp_path / 'drafts' / name}\n" in done.stdout for name in names)
    folders = [tmp_path / "drafts" / name for name in names]
    asked = ["--questions", "own", "--preset", "quick"]
    measured = elsi("evaluate", place / "tiny", *folders, *asked, "--nodes", 8, "-o", tmp_path / "s.parquet")
    assert measured.exit_code == 0, measured.output
    assert "own prompts: 13 questions" in measured.stdout and "Spec-Bench" not in measured.stdout
    assert set(read_steps(tmp_path / "s.parquet")["method"]) == {*names, "prompt lookup"}
    other = elsi("evaluate", place / "tiny", folders[0], folders[0], *asked)
    assert other.exit_code == 2 and "two drafts are named 1-3-5" in other.stderr
    wrong = elsi("train", *common, "--layers", "1;3", "-o", tmp_path / "x")
    assert wrong.exit_code == 2 and "--layers 1;3" in wrong.stderr
    outside = elsi("train", *common, "--layers", "1,99", "-o", tmp_path / "x")
    assert outside.exit_code == 2 and "99" in outside.stderr and "answering" not in outside.stderr  # refused before the long work


def test_spread_takes_categories_in_turn():
    dialogues = [Dialogue(f"{c}{i}", c, ()) for c in "abc" for i in range(4)]
    assert [d.id for d in spread(dialogues, 5)] == ["a0", "a1", "b0", "b1", "c0"]
    assert spread(dialogues, 0) == dialogues and len(spread(dialogues, 99)) == 12


def test_without_spec_bench_the_error_names_our_own_prompts(monkeypatch):
    def missing():
        raise AssetError("spec-bench cannot be fetched")

    monkeypatch.setattr(studies, "spec_bench_dialogues", missing)
    with pytest.raises(AssetError, match="evaluation = 'own'"):
        study_questions(Settings())


def test_a_line_cut_in_the_middle_is_dropped_and_other_results_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    book = Lines(path, {"of": 1})
    book.add("a", [{"n": 1}])
    book.add("b", [{"n": 2}])
    path.write_bytes(path.read_bytes()[:-4])
    again = Lines(path, {"of": 1})
    assert again.done == {"a": [{"n": 1}]}
    again.add("b", [{"n": 3}])
    assert Lines(path, {"of": 1}).done == {"a": [{"n": 1}], "b": [{"n": 3}]}
    with pytest.raises(ElsiError, match="of another run"):
        Lines(path, {"of": 2})
    whole = path.read_bytes().splitlines(keepends=True)
    for number, line in ((1, b"{\n"), (2, b"\xff\n"), (2, b"[]\n"), (2, b'{"id": 1}\n')):
        path.write_bytes(b"".join([*whole[: number - 1], line, *whole[number:]]))
        with pytest.raises(ElsiError, match=f"line {number}: damaged; delete the file"):
            Lines(path, {"of": 1})


def test_rows_are_the_papers_and_random_sets_are_new():
    from elsi_lib.fingerprint import Fingerprint
    from elsi_lib.settings import project_root

    for target, eagle in (("smollm2-135m-instruct", (2, 15, 27)), ("qwen2.5-coder-0.5b-instruct", (2, 12, 21))):
        fp = Fingerprint.load(project_root() / "data" / "results" / target / "fingerprint.safetensors")
        rows = {row.method: row for row in table_rows(fp)}
        N = fp.num_layers
        assert rows["EAGLE-2"].layers == (N - 1,) and rows["EAGLE-3"].layers == eagle
        assert rows["EAGLE-3 (code)"].layers == (1, N // 2 - 1, N - 4)
        chosen = [row.layers for name, row in rows.items() if not name.startswith("random")]
        randoms = [rows["random 1"].layers, rows["random 2"].layers]
        assert randoms[0] != randoms[1] and not set(randoms) & set(chosen)
        assert rows["EAGLE-3 (seed 1)"].draft != rows["EAGLE-3"].draft and rows["EAGLE-3 norm"].norm_before_fc == "each"
