"""Every notebook runs with other parameters than the default ones, on a tiny target, and takes no parameter it does not know."""

import ast
import json
import random
import re
import shutil
import subprocess
import sys

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError
from synthetic_study import TRUTH, write_study
from tiny import CHARACTERS, tiny_folder

from elsi_lib.assets import cache_dir
from elsi_lib.report.captions import CAPTIONS
from elsi_lib.settings import Settings, project_root, target_slug

NOTEBOOKS = sorted((project_root() / "notebooks").glob("*.ipynb"))
MAKES = {
    "01_wave": ["figure1", "figure2"],
    "02_pairs": ["figure3"],
    "03_filter": ["figure4"],
    "04_compartments": ["figure5", "figure6"],
    "05_selection": ["figure7", "table1"],
    **{
        f"{number}_{table}": [
            *(f"{table}{part}" for part in ("", "_differences", "_categories", "_speed")),
            *(f"tau_{part}" for part in ("differences", "entropy", "training", "categories")),
        ]
        for number, table in (("06", "table2"), ("07", "table3"))
    },
    "08_sink": ["open_sink", "open_sink_choices", "open_sink_spectrum"],
    "09_readings": ["open_readings", "open_readings_sets", "open_readings_distances"],
    "10_stability": ["open_stability", "open_parameters"],
    "11_transfer": ["open_profiles", "open_transfer", "open_transfer_sets"],
    "12_criteria": ["open_criteria", "open_criteria_sets", "open_criteria_agreement", "open_criteria_tau"],
    "13_submodularity": ["open_submodularity", "open_submodularity_searches", "open_submodularity_guarantees"],
}
# Tables, besides those called so.
TABLES = ["open_sink_choices", "open_readings_sets", "open_readings_distances", "open_transfer_sets", "open_criteria_sets"]
TABLES += ["open_submodularity_searches", "open_submodularity_guarantees"]
# The study's layer sets on a target of eight layers.
SHALLOW = {"29": "7", "2 15 27": "2 4 5", "1 14 26": "1 3 4", "27": "6", "11 28": "3 6", "10 11 28": "2 3 6", "11 28 29": "3 6 7"}
SHALLOW |= {"0 9 10": "0 2 3", "3 5 22": "1 2 5", "6 7 19": "0 4 7"}
PAPER = {"06_table2": "Qwen3-4B", "07_table3": "Llama-3.1-8B"}  # notebooks of a study, and whose place their target takes
AGAIN = {"12_criteria": {"fig-open_criteria_tau_second": "open_criteria_tau"}}  # of the second target, in its own folder
TARGETS = {"07_table3": "qwen2.5-coder-0.5b-instruct"}  # where it is not the default one


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """Two tiny targets of different depth, a file of prompts, and settings that differ from every default."""
    folder = tmp_path_factory.mktemp("run")
    writer = random.Random(0)
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for _ in range(12):
            text = "".join(writer.choice(CHARACTERS) for _ in range(150)).strip()
            messages = [{"role": "user", "content": text[:70]}, {"role": "assistant", "content": text[70:]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    targets = [tiny_folder(folder / name, layers=n, max_position_embeddings=256) for name, n in (("tiny-a", 8), ("tiny-b", 6))]
    yield {
        "target": str(targets[0]), "beside": str(targets[1]), "prompts": str(prompts), "samples": 8, "rho": 0.5, "block": 8, "seed": 3,
        "preset": "quick",
    }  # fmt: skip
    for target in targets:  # sums of surveys, by which a survey would go on
        for left in cache_dir().glob(f"surveys/{target_slug(str(target))}*"):
            shutil.rmtree(left)


def figures_of(path):
    """Names of the figures of a notebook, and their labels in the book."""
    names = [name for name in MAKES[path.stem] if not name.startswith("table") and name not in TABLES]
    return {name: f"fig-{path.stem[3:]}-{name[4:]}" if path.stem in PAPER else f"fig-{name}" for name in names}


def run(path, folder, parameters, results, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(results))
    out = folder / path.name
    papermill.execute_notebook(path, out, parameters, kernel_name="python3", progress_bar=False, cwd=folder)
    return nbformat.read(out, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def study(parameters, results):
    """A study of the first target with known truth, where the notebooks look for one."""
    truth = {method: (SHALLOW.get(layers, layers), *numbers) for method, (layers, *numbers) in TRUTH.items()}
    settings = Settings(**parameters)
    folder = results / settings.run_name / "tau"
    return write_study(folder, target="tiny-a", sizes=(2, 2), steps=20, truth=truth, run=settings)


def test_there_are_these_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(MAKES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_with_other_parameters(path, parameters, results, study, tmp_path, monkeypatch):
    notebook = run(path, tmp_path, parameters, results, monkeypatch)
    settings = Settings(**parameters)
    for name in MAKES[path.stem]:
        passport = json.loads((results / settings.shown_name / f"{name}.json").read_text())
        assert passport["parameters"]["rho"] == 0.5 and passport["parameters"]["samples"] == 8
        assert passport["inputs"][0]["target"] == "tiny-a" and passport["inputs"][0]["prompts_used"] == 8
        assert passport["caption"] == CAPTIONS[name] and passport["seconds"] is not None
        for file in passport["files"]:
            assert (results / settings.shown_name / file).stat().st_size > 0
        assert str(tmp_path.parent.parent) not in json.dumps(passport)
    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    assert not [output.text for output in streams if output.name == "stderr"]  # no bars, no warnings
    begins = "tiny-a: Spec-Bench, 26 questions, 42 turns" if path.stem in PAPER else "tiny-a: 8 prompts, 8 layers"
    assert begins in streams[0].text
    if path.stem in ("01_wave", "03_filter", "04_compartments", "05_selection"):
        assert "not shown" in streams[0].text and 'target = "' in streams[0].text  # no fingerprint of the second target yet
    shown = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(shown) == len(figures_of(path))
    if path.stem in PAPER:
        assert passport["study"]["folder"] == "tau" and passport["code"]["tau"]
        texts = [output.data["text/markdown"] for output in outputs(notebook) if "text/markdown" in output.get("data", {})]
        assert len(texts) == 10 and "ELSI m=3 is above EAGLE-3 in all 4 settings" in texts[3]
        assert f"**{PAPER[path.stem]}**, the paper's own target: *reported*, not measured here" in texts[0]


def test_the_target_beside_is_shown_once_it_has_a_fingerprint(parameters, results, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(results))
    from elsi_lib.pipeline import obtain_fingerprint

    obtain_fingerprint(Settings(**parameters).for_target(parameters["beside"]))
    notebook = run(NOTEBOOKS[0], tmp_path, parameters, results, monkeypatch)
    assert "beside tiny-b: 8 prompts, 6 layers" in outputs(notebook)[0].text
    passport = json.loads((results / Settings(**parameters).shown_name / "figure2.json").read_text())
    assert [entry["target"] for entry in passport["inputs"]] == ["tiny-a", "tiny-b"]


def test_an_unknown_parameter_is_an_error_that_names_it(parameters, results, tmp_path, monkeypatch):
    with pytest.raises(PapermillExecutionError, match="unknown parameter blocks, fp: this notebook takes beside, block,"):
        run(NOTEBOOKS[1], tmp_path, {**parameters, "blocks": 8, "fp": "x"}, results, monkeypatch)


def nbval(path):
    """Exit code and output of pytest --nbval on one notebook, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "--nbval-current-env",
        "-q",
        "-p",
        "no:cacheprovider",
        "--color=no",
        path.name,
    ]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_nbval_passes_on_the_same_numbers_and_fails_on_a_changed_one(parameters, results, tmp_path, monkeypatch):
    notebook = run(NOTEBOOKS[1], tmp_path, parameters, results, monkeypatch)
    path = tmp_path / NOTEBOOKS[1].name
    code, text = nbval(path)
    assert code == 0, text
    (told,) = [output for output in outputs(notebook) if "best pair" in output.get("data", {}).get("text/markdown", "")]
    number = re.search(r"\d\.\d{4} nats", told.data["text/markdown"])
    last = number.end() - len(" nats") - 1
    digit = str((int(told.data["text/markdown"][last]) + 1) % 10)
    told.data["text/markdown"] = told.data["text/markdown"][:last] + digit + told.data["text/markdown"][last + 1 :]
    nbformat.write(notebook, path)
    code, text = nbval(path)
    assert code == 1 and "1 failed" in text and "mismatch 'text/markdown'" in text


def in_the_book():
    """Notebooks in the book's contents; another one has no committed result."""
    listed = (project_root() / "_toc.yml").read_text(encoding="utf-8")
    return [path for path in NOTEBOOKS if f"notebooks/{path.stem}\n" in listed]


@pytest.mark.parametrize("path", in_the_book(), ids=lambda path: path.stem)
def test_committed_outputs_are_there_to_be_compared(path):
    """nbval compares nothing where a cell was never run; only the line on where the fingerprint comes from may differ."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    ignored = [cell for cell in code if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    assert len(ignored) == 1 and re.search(r"print\((run|study)_line\(", ignored[0].source)
    compared = [
        output["data"]["text/markdown"] for cell in code for output in cell.outputs if "text/markdown" in output.get("data", {})
    ]
    assert len(compared) >= len(MAKES[path.stem]) and all(re.search(r"\d\.\d|\d %|[+-]\d", text) for text in compared)
    written = [output for cell in code for output in cell.outputs]
    assert not [output for output in written if output.get("name") == "stderr" or output.output_type == "error"]
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    """Parameters are Settings' fields and defaults; cells are short; a figure has its passport's caption and an alt text."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) <= 15 and all(len(cell.source.splitlines()) <= 15 for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert code[0].metadata.tags == ["parameters"]
    defaults = {node.target.id: ast.literal_eval(node.value) for node in ast.parse(code[0].source).body}
    types = {node.target.id: node.annotation.id for node in ast.parse(code[0].source).body}
    fields = Settings.__dataclass_fields__
    taken = [name for name in fields if name != "evaluation" or path.stem in PAPER]
    wanted = {name: fields[name].default for name in taken}
    assert defaults == wanted | ({"target": TARGETS[path.stem]} if path.stem in TARGETS else {})
    assert types == {name: fields[name].type for name in taken}
    assert "Settings.from_notebook(globals())" in code[1].source
    figures = {cell.metadata.mystnb.figure.name: cell.metadata.mystnb for cell in code if "figure" in cell.metadata.get("mystnb", {})}
    labels = {label: name for name, label in figures_of(path).items()} | AGAIN.get(path.stem, {})
    assert figures.keys() == labels.keys()
    for label, name in labels.items():
        assert figures[label].figure.caption == CAPTIONS[name]
        assert figures[label].image.alt.strip()
    assert path.stat().st_size < 800_000
