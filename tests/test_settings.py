"""Parameters that notebooks accept, the folders their results go to, and which fingerprint is a run's own."""

import hashlib
import math
import os
import re
import types
from dataclasses import replace

import pytest
from synthetic import fingerprint
from synthetic_study import write_study

from elsi_lib import settings as module
from elsi_lib.errors import ElsiError
from elsi_lib.settings import (
    PRESETS,
    SMALLER,
    Settings,
    find_fingerprint,
    is_current,
    project_root,
    prompts_slug,
    public_name,
    target_slug,
)
from elsi_lib.study import find_study
from elsi_lib.survey import find_survey


def notebook(**parameters):
    """The globals that a notebook has after its parameters cell."""
    own = {"__name__": "__main__", "_ih": [], "In": [], "Out": {}, "exit": lambda: None, "get_ipython": lambda: None, "open": open}
    return own | {"Settings": Settings, "os": os, "find_fingerprint": find_fingerprint} | parameters


def test_defaults_are_the_papers_and_the_embedded_target():
    given = Settings()
    assert (given.target, given.prompts, given.rho, given.block) == ("smollm2-135m-instruct", "sharegpt", 0.30, 32)
    assert PRESETS["cpu"]["samples"] == PRESETS["paper"]["samples"] == given.size("samples") == 200
    assert set(PRESETS) == {"quick", "cpu", "paper"}
    assert all(preset.keys() == PRESETS["cpu"].keys() for preset in PRESETS.values())


def test_a_target_may_have_less_of_a_preset():
    for target, own in SMALLER.items():
        for preset, numbers in own.items():
            assert 0 < len(numbers) < len(PRESETS[preset])
            assert all(0 < number < PRESETS[preset][name] for name, number in numbers.items())
            given = Settings(target=target, preset=preset)
            assert {name: given.size(name) for name in PRESETS[preset]} == PRESETS[preset] | numbers
            assert Settings(preset=preset).size(next(iter(numbers))) == PRESETS[preset][next(iter(numbers))]


def test_a_notebooks_parameters():
    assert Settings.from_notebook(notebook()) == Settings()
    given = Settings.from_notebook(notebook(target="some/model", samples=5, rho=1, preset="quick"))
    assert given == Settings(target="some/model", samples=5, rho=1, preset="quick")


@pytest.mark.parametrize(("name", "value"), [("sample", 5), ("Rho", 0.3), ("layers", [1, 2]), ("device", "cpu")])
def test_an_unknown_parameter_is_an_error_that_lists_the_known(name, value):
    with pytest.raises(ElsiError, match=rf"unknown parameter {name}: this notebook takes .*beside, block.*samples, seed, target"):
        Settings.from_notebook(notebook(**{name: value}))


def test_the_settings_cell_can_be_run_again_in_a_notebook_that_went_on():
    later = {"settings": Settings(samples=5), "status": "measured", "data": [1.0], "fp": fingerprint()}
    assert Settings.from_notebook(notebook(samples=7, **later)) == Settings(samples=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("samples", "5"), ("samples", 5.0), ("rho", "0.3"), ("rho", True)],
        *[("block", None), ("seed", False), ("target", 7), ("preset", ["cpu"])],
    ],
)
def test_wrong_types_are_named(name, value):
    with pytest.raises(ElsiError, match=f"parameter {name} = .* is expected"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("preset", "large", "preset 'large' unknown: one of quick, cpu, paper"),
        ("samples", -1, "samples = -1"),
        ("rho", 0.0, r"rho = 0.0 outside \(0, 1\]"),
        ("rho", 1.5, "rho = 1.5 outside"),
        ("rho", math.nan, "rho = nan outside"),
        ("block", 0, "block = 0"),
        ("seed", -1, "seed = -1: a whole number from 0"),
    ],
)
def test_values_out_of_range_are_named(name, value, message):
    with pytest.raises(ElsiError, match=message):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({}, "smollm2-135m-instruct"),
        ({"target": "smollm2-135m"}, "smollm2-135m-instruct"),  # an alias is the same target
        ({"target": "SmolLM2-135M"}, "smollm2-135m-instruct"),  # in any case
        ({"beside": "", "evaluation": "own"}, "smollm2-135m-instruct"),  # neither changes a fingerprint
        ({"samples": 200}, "smollm2-135m-instruct"),  # the preset's own number
        ({"target": "Qwen/Qwen2.5-7B_Instruct"}, "qwen--qwen2.5-7b_instruct"),
        ({"rho": 1}, "smollm2-135m-instruct@rho-1.0"),  # as 1.0
        ({"target": "/some/folder/My Model.gguf"}, "my-model"),
        ({"preset": "quick"}, "smollm2-135m-instruct@quick"),
        ({"rho": 0.5, "block": 16}, "smollm2-135m-instruct@rho-0.5_block-16"),
        ({"samples": 50, "seed": 3}, "smollm2-135m-instruct@seed-3_samples-50"),
        ({"preset": "quick", "samples": 16}, "smollm2-135m-instruct@quick"),
        ({"prompts": "my/Chats.jsonl"}, "smollm2-135m-instruct@prompts-chats.jsonl"),
    ],
)
def test_each_run_has_its_folder(changes, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path))
    assert Settings(**changes).run_name == folder
    assert Settings(**changes).output == tmp_path / folder


def test_runs_that_differ_do_not_share_a_folder():
    changes = [("rho", 0.5), ("block", 16), ("seed", 1), ("preset", "quick"), ("preset", "paper"), ("samples", 5), ("prompts", "x")]
    names = [Settings().run_name, *(Settings(**{name: value}).run_name for name, value in changes)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({}, "smollm2-135m-instruct"),
        ({"beside": "Qwen2.5-Coder-0.5B"}, "smollm2-135m-instruct"),
        ({"beside": ""}, "smollm2-135m-instruct@beside-none"),
        ({"beside": "Qwen/Qwen3-0.6B", "evaluation": "own"}, "smollm2-135m-instruct@beside-qwen--qwen3-0.6b_evaluation-own"),
        ({"preset": "quick", "evaluation": "own"}, "smollm2-135m-instruct@quick_evaluation-own"),
    ],
)
def test_figures_of_other_inputs_have_their_folder(changes, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path))
    assert Settings(**changes).shown_name == folder and Settings(**changes).shown == tmp_path / folder


def test_local_models_and_prompt_files_of_one_name_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "cache"))
    places = [tmp_path / "one", tmp_path / "other"]
    for place, text in zip(places, ("a", "b"), strict=True):
        (place / "My Model").mkdir(parents=True)
        (place / "chats.jsonl").write_text(text)
    models = [target_slug(str(place / "My Model")) for place in places]
    assert models[0] != models[1] and all(re.fullmatch(r"my-model-[0-9a-f]{8}", name) for name in models)
    monkeypatch.chdir(places[0])
    assert target_slug("My Model") == target_slug("./My Model/") == models[0]  # one place, whatever the spelling
    prompts = [prompts_slug(str(place / "chats.jsonl")) for place in places]
    digests = [hashlib.sha256(text).hexdigest()[:8] for text in (b"a", b"b")]
    assert prompts == [f"chats.jsonl-{digest}" for digest in digests]
    (places[0] / "chats.jsonl").write_text("bb")
    assert prompts_slug(str(places[0] / "chats.jsonl")) not in prompts
    runs = [Settings(target=str(p / "My Model"), prompts=str(p / "chats.jsonl")).run_name for p in places]
    assert len(set(runs)) == 2 and not any("/" in run for run in runs)


def test_hub_ids_of_one_name_stay_apart_and_a_folder_of_a_known_name_is_not_that_target(tmp_path, monkeypatch):
    assert target_slug("meta/Model") == "meta--model" != target_slug("someone/Model")
    monkeypatch.chdir(tmp_path)
    known = "smollm2-135m-instruct"
    assert target_slug(known) == public_name(known) == public_name("SmolLM2-135M") == known
    (tmp_path / known).mkdir()
    assert re.fullmatch(rf"{known}-[0-9a-f]{{8}}", target_slug(known)) and public_name(known) == target_slug(known)
    assert public_name("meta/Model") == "meta/Model"


@pytest.mark.parametrize("target", ["smollm2-135m", "Qwen/Qwen3-0.6B", "/some/folder/My Model.gguf", "a_b", ".", "here"])
def test_a_slug_is_its_own_slug(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    slug = target_slug(target)
    assert slug and target_slug(slug) == slug and re.fullmatch(r"[a-z0-9._-]+", slug)
    assert target_slug(public_name(target)) == slug


def test_the_committed_studies_and_surveys_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path))
    for target in ("smollm2-135m-instruct", "Qwen2.5-Coder-0.5B"):
        settings = Settings(target=target)
        assert find_study(settings).folder == project_root() / "data" / "results" / settings.run_name / "tau"
        assert find_survey(settings).folder == project_root() / "data" / "results" / settings.run_name / "survey"
    assert find_study(Settings(preset="quick")) is None and find_survey(Settings(preset="quick")) is None


@pytest.mark.parametrize(
    "other",
    [
        *({"target": "another"}, {"rho": 0.5}, {"block": 16}, {"seed": 1}),
        *({"samples": 7}, {"prompts": "x.jsonl"}, {"evaluation": "own"}),
    ],
)
def test_a_study_of_other_settings_is_passed_over(other, tmp_path, monkeypatch):
    """Wherever it lies: a folder may be copied or renamed."""
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path))
    own, changed = Settings(target="some-model"), Settings(**{"target": "some-model"} | other)
    folder = tmp_path / own.run_name / "tau"
    write_study(folder, target=changed.target, sizes=(1, 1), steps=5, run=changed)
    assert find_study(own) is None
    write_study(folder, target=own.target, sizes=(1, 1), steps=5, run=replace(own, beside="", samples=200))
    assert find_study(own).folder == folder


def test_for_target_changes_nothing_else():
    given = Settings(rho=0.5, preset="quick")
    assert given.for_target("x").target == "x" and given.for_target("x").for_target(given.target) == given


# Finding a run's fingerprint.

SMALL = Settings(target="synthetic", rho=0.30, block=8, samples=6, preset="quick")


def small(**changes):
    sizes = {"bootstrap": SMALL.size("bootstrap"), "spectra": SMALL.size("spectra"), "max_tokens": SMALL.size("max_tokens")}
    return fingerprint(**{"prompts": 6, "block": 8, **sizes, **changes})


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The results folder of this build, and a project with committed results."""
    project = tmp_path / "project"
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path / "build"))
    monkeypatch.setattr(module, "project_root", lambda: project)
    return tmp_path / "build", project / "data" / "results"


def test_no_fingerprint(folders):
    assert find_fingerprint(SMALL) is None


def test_this_builds_own_comes_before_the_committed(folders):
    build, committed = (folder / SMALL.run_name / "fingerprint.safetensors" for folder in folders)
    small(seed=0).save(committed)
    assert find_fingerprint(SMALL)[0] == committed
    small(seed=0, hidden=12).save(build)
    path, found = find_fingerprint(SMALL)
    assert path == build and found.sha256 == small(seed=0, hidden=12).sha256


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"bootstrap": 5}, {"block": 4}, {"prompts": 7}, {"source": "chats.jsonl"}, {"max_tokens": 64}]
)
def test_another_calibration_is_passed_over(folders, other):
    build, committed = (folder / SMALL.run_name / "fingerprint.safetensors" for folder in folders)
    small(**other).save(build)
    assert find_fingerprint(SMALL) is None
    small().save(committed)
    assert find_fingerprint(SMALL)[0] == committed


def test_results_go_to_the_project_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("ELSI_RESULTS", raising=False)
    monkeypatch.setattr(module, "project_root", lambda: tmp_path)
    assert module.results_root() == tmp_path / "data" / "results"
    monkeypatch.setattr(module, "project_root", lambda: None)
    assert str(module.results_root()) == "results"


def test_a_fingerprint_is_current_while_the_methods_code_is():
    fp = small()
    assert is_current(fp)
    fp.passport["code"] = {**fp.passport["code"], "calibration": "0" * 16}
    assert not is_current(fp)


def test_modules_are_no_parameters():
    assert Settings.from_notebook({"t": types, "f": len, "C": Settings}) == Settings()
