"""The command line: what it prints, its errors and exit codes. A random tiny model stands for a target."""

import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic import fingerprint
from tiny import tiny_folder
from typer.testing import CliRunner

from elsi_lib import choice, cli, loading, pipeline, selection, settings
from elsi_lib.blocks import READINGS
from elsi_lib.calibration import Calibration
from elsi_lib.choice import describe_choice
from elsi_lib.entropy import NORMALIZE
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.layers import CONVENTIONS, engine_ids
from elsi_lib.settings import PRESETS, Settings, differences

SMALL = ("--preset", "quick", "--samples", "8", "--block", "4")


def elsi(*args, env=None):
    return CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="elsi", env={"COLUMNS": "80", **(env or {})})


def done(*args, env=None):
    result = elsi(*args, env=env)
    assert result.exit_code == 0, result.output
    return result


def failed(code, *args, env=None):
    """The message of a command that must fail with this exit code, on exactly one line of standard error."""
    result = elsi(*args, env=env)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert re.fullmatch(r"elsi: [^\n]+\n", result.stderr), result.stderr
    return result.stderr.removeprefix("elsi: ").rstrip()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A fingerprint of 12 layers, in a file."""
    return fingerprint(layers=12, source="a file").save(tmp_path_factory.mktemp("fp") / "saved.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("targets") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    words = random.Random(0)
    text = ["".join(words.choices("abcdefghij klm", k=60 + 5 * i)) for i in range(14)]
    turns = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in text]
    path = tmp_path_factory.mktemp("prompts") / "mine.json"
    path.write_text(json.dumps([{"id": str(i), "messages": messages} for i, messages in enumerate([*turns, *turns[:2]])]))
    return path


@pytest.fixture(scope="module")
def measured(model, prompts, tmp_path_factory):
    """A calibration by the command line."""
    path = tmp_path_factory.mktemp("measured") / "tiny.safetensors"
    result = done("calibrate", model, "-o", path, "--prompts", prompts, *SMALL)
    return path, result


def test_choices_are_those_of_the_library():
    assert tuple(cli.Method) == selection.METHODS
    assert tuple(cli.Preset) == tuple(PRESETS)
    assert tuple(cli.Reading) == READINGS
    assert tuple(cli.Normalize) == NORMALIZE
    assert {"elsi", *cli.Engine} == set(CONVENTIONS)
    assert tuple(cli.DType) == ("auto", *loading.DTYPES)
    for rule in cli.Midpoint:
        selection.elsi(torch.eye(3).expand(3, 3, 3), 1, after_midpoint=str(rule))


def test_help():
    commands = ("targets", "fetch", "calibrate", "merge", "select", "show", "train", "evaluate", "study", "export")
    overview = done("--help").stdout
    assert done().stdout == done("-h").stdout == overview
    assert all(f"\n  {name} " in overview for name in commands)
    pages = {name: done(name, "--help").stdout for name in commands}
    for page in (overview, *pages.values()):
        assert page.isascii() and "\x1b" not in page
        assert "..." not in page.partition("Commands:")[2]  # no summary is cut
        assert max(map(len, page.splitlines())) <= 80
    calibration = " ".join(pages["calibrate"].split())
    assert all(f"(paper: {value})" in calibration for value in ("200", "0.30", "32"))
    select = " ".join(pages["select"].split())
    assert "or all (paper: 10)" in select and "(paper: 3, and 1 and 2)" in select
    assert all(method in select for method in selection.METHODS)


def test_version():
    assert re.fullmatch(r"elsi \d+\.\d+\.\d+\n", done("--version").stdout)


def test_targets_and_fetch(tmp_path):
    env = {"ELSI_CACHE": str(tmp_path / "cache"), "ELSI_ASSETS": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    shown = done("targets", env=env).stdout
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    assert {"smollm2-135m-instruct", "llama-3.1-8b-instruct", "sharegpt", "spec-bench"} <= rows.keys()
    assert rows["smollm2-135m-instruct"].split() == ["smollm2-135m-instruct", "30", "98.4", "MB", "Apache-2.0", "wheel", "no"]
    assert "hub id" in shown and ".gguf" in shown and "smollm2-135m = smollm2-135m-instruct" in shown
    assert max(map(len, shown.splitlines())) <= 80 and shown.isascii()

    folder = tmp_path / "llama-3.1-8b-instruct"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()
    assert done("fetch", "llama-3.1-8b", env=env).stdout == f"{folder}\n"
    here = done("targets", env=env).stdout.splitlines()
    assert next(line for line in here if line.startswith("llama-3.1-8b-instruct ")).endswith("yes")

    (tmp_path / "question.jsonl").write_text("another file")
    result = elsi("targets", env=env)  # the list all the same, and what is wrong in one line
    assert result.exit_code == 1 and "unusable" in result.stdout and "smollm2" in result.stdout
    assert re.fullmatch(r"elsi: \S+question.jsonl has sha256 [^\n]+\n", result.stderr)


# Errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["calibrate", "smollm2-135m"], "Missing option '-o'"),
        (["select", "{fp}", "--nonsense"], "No such option: --nonsense"),
        (["select", "{fp}", "-m", "three"], "Invalid value for '-m' / '--size'"),
        (["select", "{fp}", "--method", "guess"], "'guess' is not one of 'elsi', 'elsi-c'"),
        (["select"], "Missing argument 'FP-or-TARGET'"),
        (["merge", "-o", "{tmp}/new"], "Missing argument 'PART...'"),
    ],
)
def test_bad_usage(args, message, saved, tmp_path):
    said = failed(2, *(a.format(fp=saved, tmp=tmp_path) for a in args))
    assert message in said and "--help`)" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["select", "{fp}", "-m", "13"], "m = 13 outside 1..12"),
        (["select", "{fp}", "-m", "0"], "m = 0 outside 1..12"),
        (["select", "{fp}", "--method", "eagle3", "-m", "2"], "rule eagle3 always takes 3 layers, not m = 2"),
        (["select", "{fp}", "--alpha", "0"], "alpha = 0.0"),
        (["select", "{fp}", "--alpha", "nan"], "alpha = nan"),
        (["select", "{fp}", "--k-beam", "0"], "--k-beam 0: a number of at least 1 is expected, or all"),
        (["select", "{fp}", "--k-pool", "5"], "--k-pool means nothing to method elsi: it belongs to elsi-c"),
        (["select", "{fp}", "--method", "last", "--after-midpoint", "seeds"], "--after-midpoint means nothing to method last"),
        (["select", "{fp}", "--preset", "quick"], "--preset says how to calibrate a target, but {fp} is a fingerprint"),
        (["select", "{tmp}/none.safetensors"], "no fingerprint at {tmp}/none.safetensors"),
        (["select", "{tmp}/text"], "{tmp}/text cannot be read as a fingerprint"),
        (["select", "no-such-target", "--preset", "quick"], "no asset named 'no-such-target'"),
        (["show", "{tmp}/cut"], "{tmp}/cut cannot be read as a fingerprint"),
        (["show", "{tmp}"], "no fingerprint at {tmp}"),
        (["fetch", "sharegtp"], "did you mean sharegpt?"),
        (["calibrate", "sharegpt", "-o", "{tmp}/new"], "sharegpt is data, not a target"),
        (["calibrate", "{model}", "-o", "{tmp}/new", "--rho", "0"], "rho = 0.0 outside (0, 1]"),
        (["calibrate", "{model}", "-o", "{tmp}/new", "--block", "999"], "block = 999 at rho = 0.3 needs prompts of"),
        (["calibrate", "{model}", "-o", "{tmp}/new", "--prompts", "{tmp}/none"], "no prompt file {tmp}/none"),
        (["calibrate", "{model}", "-o", "{tmp}"], "-o {tmp} is a folder"),
        (["calibrate", "{model}", "-o", "{tmp}/text"], "-o {tmp}/text exists and is another kind of file"),
        (["calibrate", "{model}", "-o", "{fp}", "--part", "0/2"], "-o {fp} exists and is another kind of file"),
        (["calibrate", "{model}", "-o", "{tmp}/new", "--part", "2/2"], "--part 2/2: parts are numbered 0/2 to 1/2"),
        (["calibrate", "{model}", "-o", "{tmp}/new", "--part", "half"], "--part half: I/N is expected"),
        (["select", "{fp}", "--method", "uniform", "--engine", "sglang"], "--engine limits a search"),
        (["merge", "{fp}", "-o", "{tmp}/new"], "{fp} is not a part of a calibration"),
        (["merge", "{tmp}/text", "-o", "{tmp}/new"], "{tmp}/text cannot be read as a part"),
        (["merge", "{tmp}/none", "-o", "{tmp}/new"], "no part of a calibration at {tmp}/none"),
    ],
)
def test_bad_input(args, message, saved, model, tmp_path):
    (tmp_path / "text").write_text("not a fingerprint\nat all")
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:-100])
    before = saved.read_bytes()
    places = {"fp": saved, "tmp": tmp_path, "model": model}
    env = {"ELSI_RESULTS": str(tmp_path / "results")}
    result = elsi(*(a.format(**places) for a in args), env=env)
    assert result.exit_code == 2 and result.stdout == ""
    *notes, last = result.stderr.splitlines()
    assert last.startswith("elsi: ") and message.format(**places) in last
    assert not notes or (args[0] == "select" and notes[0].startswith("no fingerprint of"))
    assert not (tmp_path / "new").exists() and saved.read_bytes() == before


def test_trouble_of_the_environment(saved, model, prompts, tmp_path, monkeypatch):
    said = failed(1, "fetch", "sharegpt", env={"ELSI_ASSETS": str(tmp_path / "nowhere")})
    assert f"ELSI_ASSETS names {tmp_path / 'nowhere'}, which is not a folder" in said
    (tmp_path / "file").touch()
    said = failed(1, "calibrate", model, "-o", tmp_path / "file" / "fp", "--prompts", prompts)
    assert said.startswith(f"{tmp_path / 'file'}: ")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert failed(1, "calibrate", model, "-o", tmp_path / "fp") == f"{tmp_path}: Permission denied"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (AssetError("two\nlines\x1b[31m"), 1, "two lines?[31m"),
        (ElsiError("one"), 2, "one"),
        (PermissionError(13, "Permission denied", "a place"), 1, "a place: Permission denied"),
        (MemoryError("no room"), 1, "out of memory (no room): take a shorter preset"),
        (KeyError("surprise"), 1, "unexpected KeyError: 'surprise' (a bug: run again with ELSI_DEBUG=1"),
        (BrokenPipeError(32, "Broken pipe"), 141, None),
    ],
)
def test_exit_codes(error, code, message, saved, monkeypatch):
    def fail(path):
        raise error

    monkeypatch.setattr(Fingerprint, "load", fail)
    monkeypatch.setattr(os, "dup2", lambda *args: None)  # the test's own standard output stays open
    if message is None:
        result = elsi("show", saved)
        assert (result.exit_code, result.output) == (code, "")
    else:
        assert failed(code, "show", saved).startswith(message)


# select


def test_json_says_what_the_library_says(saved):
    fp = Fingerprint.load(saved)
    found = json.loads(done("select", saved, "--json").stdout, parse_constant=pytest.fail)
    chosen, stable = selection.elsi(fp, 3), selection.stability(fp, "elsi", 3)
    place = selection.standing(fp, chosen.layers)
    assert list(found) == [
        "target", "num_layers", "method", "m", "layers", "entropy", "parameters", "sets", "rank", "regret", "servable",
        "redundancy", "redundancy_debiased", "stability", "baselines", "ids", "config", "notes", "fingerprint", "elsi_lib",
    ]  # fmt: skip
    assert (found["target"], found["num_layers"], found["method"], found["m"]) == ("synthetic", 12, "elsi", 3)
    assert tuple(found["layers"]) == chosen.layers and found["entropy"] == chosen.entropy
    assert found["parameters"] == chosen.parameters
    assert (found["sets"], found["rank"], found["regret"]) == (math.comb(12, 3), place.rank, place.regret)
    assert found["redundancy"] == pytest.approx(place.redundancy, abs=1e-12)
    assert found["redundancy_debiased"] == pytest.approx(selection.standing(fp, chosen.layers, debiased=True).redundancy, abs=1e-12)
    assert found["stability"] == {
        "share": stable.share,
        "jaccard": stable.jaccard,
        "replicates": stable.replicates,
        "layer_share": list(stable.layer_share),
        "interval": pytest.approx(wilson(stable.share, stable.replicates), abs=1e-9),
    }
    assert found["servable"] is None
    baselines = found["baselines"]
    assert list(baselines) == ["eagle2", "eagle3", "eagle3-code", "optimum"]
    for rule in ("eagle2", "eagle3", "eagle3-code"):
        layers = selection.layer_rule(rule, 12)
        assert baselines[rule] == {"layers": list(layers), "entropy": fp.entropy(layers)}
    best = selection.exhaustive(fp, 3)
    assert baselines["optimum"]["layers"] == list(best.layers)
    assert baselines["optimum"]["entropy"] == pytest.approx(best.entropy, abs=1e-12)
    assert found["fingerprint"]["sha256"] == fp.sha256 and found["fingerprint"]["path"] == str(saved)
    assert found["fingerprint"]["status"] == "given" and found["fingerprint"]["source"] == "a file"


def wilson(share, n, z=1.959963984540054):
    """The 95 % interval of a share of n trials (Wilson 1927): {(p^ - p)^2 <= z^2 p (1 - p) / n} solved for p."""
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return [middle - half, middle + half]


@pytest.mark.parametrize("same", [0, 1, 17, 38, 40])
def test_interval_of_the_stability(same, monkeypatch):
    held = selection.Stability(same / 40, (0.5,) * 8, 0.9, 40, ())
    monkeypatch.setattr(choice, "stability", lambda *args, **options: held)
    found = describe_choice(fingerprint(bootstrap=1), "elsi", 2)
    low, high = found["stability"]["interval"]
    assert [low, high] == pytest.approx(wilson(same / 40, 40), abs=1e-9) and 0 <= low <= same / 40 <= high <= 1
    assert "standard_error" not in found["stability"]


def test_a_perfect_share_is_printed_with_its_interval(saved, monkeypatch):
    held = selection.Stability(1.0, (0.25,) * 12, 1.0, 40, ())
    monkeypatch.setattr(choice, "stability", lambda *args, **options: held)
    said = " ".join(done("select", saved).stdout.split())
    assert "100% (91% to 100%) of 40 bootstrap replicates choose this set" in said  # 1 / (1 + 1.96^2 / 40) = 0.912


@pytest.mark.parametrize("layers", [("eagle3", 3), ("last", 3), ("eagle2", 1), ("uniform", 5)])
def test_ids_of_every_engine(layers, saved):
    method, m = layers
    found = json.loads(done("select", saved, "--method", method, "-m", m, "--json").stdout)
    ids = engine_ids(selection.layer_rule(method, 12, m), 12)
    assert found["ids"].keys() == CONVENTIONS.keys()
    for name, given in ids.items():
        if isinstance(given, str):
            assert found["ids"][name] is None and found["notes"][name] == given
        else:
            assert found["ids"][name] == list(given) and name not in found["notes"]
    text = done("select", saved, "--method", method, "-m", m).stdout
    key = "eagle_aux_hidden_state_layer_ids"
    assert f'"{key}": {json.dumps(list(ids["vllm"]))}' in text
    if isinstance(ids["sglang"], str):
        assert found["config"]["sglang"] is None and '"eagle_config"' not in text
    else:
        assert found["config"]["sglang"] == {"eagle_config": {key: found["ids"]["sglang"]}}
        assert json.loads(f"{{{text.split('SGLang', 1)[1].splitlines()[0]}}}") == found["config"]["sglang"]


def test_options_reach_the_library(saved):
    fp = Fingerprint.load(saved)
    args = ("--method", "elsi-c", "-m", 2, "--k-beam", 4, "--k-pool", 3, "--after-midpoint", "seeds", "--alpha", 2, "--center")
    found = json.loads(done("select", saved, *args, "--normalize", "trace", "--json").stdout)
    chosen = selection.elsi_c(fp, 2, k_beam=4, k_pool=3, after_midpoint="seeds", alpha=2.0, center=True, normalize="trace")
    assert found["parameters"] == chosen.parameters and tuple(found["layers"]) == chosen.layers

    found = json.loads(done("select", saved, "--k-beam", "all", "--k-expand", "all", "--json").stdout)
    assert tuple(found["layers"]) == selection.exhaustive(fp, 3).layers and found["rank"] == 1 and found["regret"] == 0

    args = ("--method", "exhaustive", "--unfiltered", "--drop-first", "--alpha", "inf")
    found = json.loads(done("select", saved, *args, "--json").stdout)
    chosen = selection.exhaustive(fp.variant(filtered=False, sink=False), 3, alpha=math.inf)
    assert tuple(found["layers"]) == chosen.layers and found["parameters"]["alpha"] == "inf"
    assert found["stability"] is None and "default variant" in found["notes"]["stability"]
    assert found["fingerprint"]["filtered"] is found["fingerprint"]["first_position_kept"] is False

    lowest = json.loads(done("select", saved, "--method", "lowest", "--json").stdout)
    assert lowest["rank"] == lowest["sets"]


def test_engine_limits_the_search_to_what_it_can_serve(saved):
    last = Fingerprint.load(saved).num_layers - 1
    for method in ("elsi", "elsi-c", "exhaustive"):
        found = json.loads(done("select", saved, "--method", method, "--engine", "sglang", "--json").stdout)
        assert last not in found["layers"] and found["ids"]["sglang"] == found["layers"]
        assert found["parameters"]["among"] == list(range(last))
    free = json.loads(done("select", saved, "--method", "exhaustive", "--engine", "vllm", "--json").stdout)
    assert free["rank"] == 1  # vLLM serves every layer
    assert free["servable"] == {"rank": 1, "sets": free["sets"], "regret": 0}


@pytest.mark.parametrize("method", ["elsi", "elsi-c", "exhaustive", "lowest"])
def test_rank_among_what_the_engine_can_serve(method, saved):
    fp = Fingerprint.load(saved)
    found = json.loads(done("select", saved, "--method", method, "--engine", "sglang", "--alpha", 2, "--json").stdout)
    entropies = [fp.entropy(layers, alpha=2.0) for layers in itertools.combinations(range(11), 3)]
    servable = found["servable"]
    assert servable["sets"] == math.comb(11, 3) < found["sets"] == math.comb(12, 3)
    assert servable["rank"] == 1 + sum(value > found["entropy"] + 1e-12 for value in entropies) <= found["rank"]
    assert servable["regret"] == pytest.approx(max(entropies) - found["entropy"], abs=1e-12)
    assert servable["regret"] <= found["regret"] + 1e-12
    if method == "exhaustive":
        assert servable["rank"] == 1 and servable["regret"] == 0
    text = done("select", saved, "--method", method, "--engine", "sglang", "--alpha", 2).stdout
    assert f"rank {servable['rank']:,} of 165 sets that sglang can serve" in text
    assert max(map(len, text.replace(str(saved), "FP").splitlines())) <= 80
    assert "can serve" not in done("select", saved, "--method", method).stdout.partition("compared")[0]


def test_a_set_that_engines_cannot_capture_gets_a_hint():
    fp = fingerprint(layers=4, bootstrap=0)
    hint = "most engines cannot capture the last block: --engine sglang searches among the layers it can serve"

    def said(method, m, engine=None, **options):
        found = describe_choice(fp, method, m, **options)
        found["fingerprint"] |= {"path": "FP", "status": "given"}
        with contextlib.redirect_stdout(io.StringIO()) as text:
            cli.out.choice(found, engine)
        return 3 in found["layers"], " ".join(text.getvalue().split()).count(hint)

    assert {said(method, m) for method in ("exhaustive", "lowest", "elsi") for m in (1, 2, 3)} == {(True, 1), (False, 0)}
    assert said("last", 2) == (True, 0)  # a rule searches nothing
    assert said("elsi", 4) == (True, 0)  # no other set of this size
    assert {said(method, 2, "vllm", among=range(4))[1] for method in ("exhaustive", "lowest")} == {0}


def test_sizes_with_too_many_sets_say_so_on_a_line_of_their_own(monkeypatch, saved):
    monkeypatch.setattr(choice, "EXHAUSTIVE_LIMIT", 200)  # between the 165 sets of 11 layers and the 220 of 12
    found = json.loads(done("select", saved, "--engine", "sglang", "--json").stdout)
    assert found["rank"] is None and found["servable"]["sets"] == 165 and found["servable"]["rank"] >= 1
    why = "220 sets of 3 of 12 layers are too many to compare with"
    lines = done("select", saved).stdout.splitlines()
    assert f"optimum: {why}" in lines and sum(why in line for line in lines) == 2  # and once as the rank
    assert not any(line.startswith("best of") for line in lines)

    monkeypatch.setattr(choice, "EXHAUSTIVE_LIMIT", 100)
    found = json.loads(done("select", saved, "--engine", "sglang", "--json").stdout)
    assert found["servable"] == {"rank": None, "sets": 165, "regret": None}
    why = "165 sets of 3 of 11 layers are too many to compare with"
    assert found["notes"]["servable"] == why
    assert re.search(f"^servable +{why}$", done("select", saved, "--engine", "sglang").stdout, re.M)


def test_what_cannot_be_had_is_null_and_said(saved):
    found = json.loads(done("select", saved, "-m", 1, "--json").stdout)
    assert found["redundancy"] is None and found["layers"][0] >= 6
    shallow = fingerprint(layers=3, bootstrap=0)
    found = describe_choice(shallow, "elsi", 2)
    assert found["baselines"]["eagle3"] == {"layers": None, "entropy": None} and "collide" in found["notes"]["eagle3"]
    assert found["stability"] is None and found["notes"]["stability"] == "calibrated without bootstrap"
    deep = describe_choice(fingerprint(layers=40, hidden=8, prompts=2, bootstrap=0), "elsi", 6)
    assert deep["rank"] is deep["regret"] is deep["baselines"]["optimum"]["layers"] is None
    assert deep["notes"]["rank"] == "3,838,380 sets of 6 of 40 layers are too many to compare with"
    assert deep["redundancy"] is not None
    json.dumps([found, deep], allow_nan=False)


@pytest.mark.parametrize("args", [(), ("-m", "1", "--drop-first"), ("--method", "last"), ("--method", "eagle3", "--unfiltered")])
def test_select_reads_well(args, saved):
    found = json.loads(done("select", saved, *args, "--json").stdout)
    text = done("select", saved, *args, env={"NO_COLOR": "1"}).stdout
    assert text.isascii() and "\x1b" not in text and "nan" not in text
    body = text.replace(str(saved), "FP")
    assert max(map(len, body.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())
    assert re.search(rf"^layers +{', '.join(map(str, found['layers']))}$", text, re.M)
    assert f"{found['entropy']:.4f} nats" in text and f"{found['rank']:,} of {found['sets']:,} sets" in text
    assert re.search(rf"^EAGLE-2 +11 +{found['baselines']['eagle2']['entropy']:.4f} ", text, re.M)


def test_select_calibrates_a_target_once(model, prompts, tmp_path):
    env = {"ELSI_RESULTS": str(tmp_path / "results")}
    args = ("select", model, "--prompts", prompts, *SMALL, "-m", 2, "--json")
    first = done(*args, env=env)
    assert "calibrating on 8 conversations" in first.stderr
    again = done(*args, env=env)
    assert "calibrating" not in again.stderr and again.stderr.startswith("using ")
    assert again.stdout == first.stdout
    found = json.loads(first.stdout)
    assert found["target"] == "tiny" and found["fingerprint"]["status"] == "measured"
    path = Path(found["fingerprint"]["path"])
    assert path.is_relative_to(tmp_path / "results")
    by_folder = json.loads(done("select", path.parent, "-m", 2, "--json").stdout)
    assert by_folder["layers"] == found["layers"] and by_folder["fingerprint"]["sha256"] == found["fingerprint"]["sha256"]


def test_stale_fingerprint_says_so(saved, monkeypatch):
    monkeypatch.setattr(settings, "code_version", lambda: {"elsi_lib": "0.0.0", "calibration": "another", "method": "another"})
    result = done("select", saved, "--json")
    assert json.loads(result.stdout)["fingerprint"]["status"] == "stale"
    assert "another version of the method's code" in result.stderr
    assert "stale" in done("show", saved).stdout


# calibrate, merge, show


def test_calibrate_and_show(measured, prompts):
    path, result = measured
    fp = Fingerprint.load(path)
    assert fp.num_layers == 4 and fp.block == 4 and fp.passport["prompts"]["used"] == 8
    peak = int(fp.entropy().argmax())
    assert "8 of mine.json used, 8 asked for" in result.stdout and f"layer {peak}, {fp.entropy([peak]):.4f} nats" in result.stdout
    assert result.stdout.endswith(f"saved     {path}\n") and "16 conversations" in result.stdout
    assert f"{fp.passport['prompts']['tokens']:,}; of them" in result.stdout
    assert "2 duplicates in the file, 14 sampled as reserve" in " ".join(result.stdout.split())

    shown = done("show", path).stdout
    code = fp.passport["code"]
    assert f"calibration {code['calibration']} (the installed one)" in " ".join(shown.split()) and code["method"] not in shown
    assert fp.sha256 in shown and fp.passport["target"]["revision"] in shown and "rho 0.3" in shown
    entropies = [fp.variant(f, s).entropy() for s in (True, False) for f in (True, False)]
    for j in range(4):
        numbers = " +".join(f"{float(e[j]):.4f}" for e in entropies)
        assert re.search(rf"^ +{j} +{numbers}( +#+)?$", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80


def test_calibration_that_is_current_is_skipped(measured, model, prompts, tmp_path, monkeypatch):
    path = shutil.copy(measured[0], tmp_path / "fp.safetensors")
    args = ("calibrate", model, "-o", path, "--prompts", prompts, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "run_calibration", lambda *a, **k: pytest.fail("calibrated again"))
        assert done(*args).stdout == f"{path} holds this calibration already, by the code as it stands (--force makes it again)\n"
    before = Fingerprint.load(path)
    changed = done(*args, "--seed", 1)
    assert "holds another calibration (seed differ" in changed.stderr and "saved" in changed.stdout
    assert Fingerprint.load(path).passport["parameters"]["seed"] == 1
    assert "saved" in done(*args, "--force").stdout
    assert torch.equal(Fingerprint.load(path).grams, before.grams)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "code_version", lambda: {"elsi_lib": "0.0.0", "calibration": "another", "method": "another"})
        assert "another version of the method's code" in done(*args).stderr
    Path(path).write_bytes(Path(path).read_bytes()[:-1] + b"\xff")
    assert "calibrating again" in done(*args).stderr


def test_another_targets_fingerprint_is_overwritten_only_by_force(saved, model, prompts, tmp_path):
    path = Path(shutil.copy(saved, tmp_path / "mine.safetensors"))
    before = path.read_bytes()
    args = ("calibrate", model, "-o", path, "--prompts", prompts, *SMALL)
    message = f"-o {path} holds a fingerprint of synthetic: name another file, or overwrite it with --force"
    assert failed(2, *args) == message and path.read_bytes() == before
    assert done(*args, "--force").stdout.endswith(f"saved     {path}\n")
    assert Fingerprint.load(path).target == "tiny"


def test_differences(measured, model, prompts, tmp_path):
    fp = Fingerprint.load(measured[0])
    same = Settings(target=str(model), prompts=str(prompts), samples=8, block=4, preset="quick")
    assert differences(fp, same) == () and differences(fp, same, dtype=fp.passport["target"]["dtype"]) == ()
    assert differences(fp, same, reading="segment") == ("reading",)
    assert differences(fp, same, dtype="float16") == ("dtype",)
    assert differences(fp, same.for_target("Somebody/tiny")) == ("target",)
    assert differences(fp, same.for_target("smollm2-135m")) == ("target",)
    other = tiny_folder(tmp_path / "tiny", seed=1, max_position_embeddings=512)  # the same name, other weights
    assert differences(fp, same.for_target(str(other))) == ("target",)
    wanted = Settings(target=str(model), prompts=str(prompts), samples=9, rho=0.5, block=4, seed=2, preset="cpu")
    assert set(differences(fp, wanted)) == {"samples", "rho", "seed", "bootstrap", "spectra", "max_tokens"}
    file = tmp_path / "sharegpt"
    file.write_text("{}")
    elsewhere = fingerprint(name="x", source_sha256="0" * 64, source="sharegpt")
    assert "prompts" in differences(elsewhere, Settings(target="x", prompts=str(file)))


def test_parts_merged_equal_the_whole(measured, model, prompts, tmp_path):
    parts = [tmp_path / f"part{i}" for i in range(2)]
    for i, part in enumerate(parts):
        said = done("calibrate", model, "-o", part, "--prompts", prompts, *SMALL, "--part", f"{i}/2").stdout
        assert said.startswith(f"part {i}/2: 4 prompts used, 0 dropped, saved {part}")
    assert len(Calibration.load(parts[0]).prompts) == 4
    assert "hold 4 of the calibration's 8 prompts" in failed(2, "merge", parts[0], "-o", tmp_path / "fp")
    assert "both parts hold prompt 0" in failed(2, "merge", parts[0], parts[0], "-o", tmp_path / "fp")
    said = done("merge", *parts, "-o", tmp_path / "fp").stdout
    assert "8 of mine.json used" in said and "not measured (merged from parts)" in said
    whole, merged = Fingerprint.load(measured[0]), Fingerprint.load(tmp_path / "fp")
    assert merged.passport | {"seconds": None} == whole.passport | {"seconds": None}
    assert merged.tensors.keys() == whole.tensors.keys()
    torch.testing.assert_close(merged.grams, whole.grams, rtol=1e-12, atol=0)
    torch.testing.assert_close(merged.bootstrap, whole.bootstrap, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged.prompt_entropy(), whole.prompt_entropy(), rtol=0, atol=0)
    assert "holds this calibration already" in done("calibrate", model, "-o", tmp_path / "fp", "--prompts", prompts, *SMALL).stdout


# As a process of its own


def test_help_needs_no_heavy_import():
    heavy = ("torch", "transformers", "huggingface_hub", "pandas", "scipy")
    code = f"import sys, elsi_lib.cli; print(*(name for name in {heavy} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_as_a_process(saved):
    command = [sys.executable, "-m", "elsi_lib.cli"]
    bad = subprocess.run([*command, "select", saved, "-m", "99"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr == "elsi: m = 99 outside 1..12: there are 12 layers to choose from\n"
    read, write = os.pipe()
    os.close(read)  # as in `elsi show FP | head -0`
    piped = subprocess.run([*command, "show", saved], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (piped.returncode, piped.stderr) == (141, "")
