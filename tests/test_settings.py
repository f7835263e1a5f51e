"""Parameters that notebooks accept, the folders their results go to, and which fingerprint is a run's own."""

import math
import os
import types

import pytest
from synthetic import fingerprint

from elsi_lib import settings as module
from elsi_lib.errors import ElsiError
from elsi_lib.settings import PRESETS, SMALLER, Settings, find_fingerprint, is_current


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
        ({"beside": ""}, "smollm2-135m-instruct"),  # a second target changes no result of the first
        ({"samples": 200}, "smollm2-135m-instruct"),  # the preset's own number
        ({"target": "Qwen/Qwen2.5-7B_Instruct"}, "qwen2.5-7b-instruct"),
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
