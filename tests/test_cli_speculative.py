"""The commands that deal with drafts: what they print, their errors and exit codes."""

import json
import re
import subprocess
import sys

import pytest
import torch
from tiny import tiny_target
from typer.testing import CliRunner

from elsi_lib import cli, cli_speculative
from elsi_lib.speculative.checkpoint import save_draft
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.export import DTYPES, LOADERS
from elsi_lib.speculative.vocabulary import DraftVocabulary


def elsi(*args):
    return CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="elsi", env={"COLUMNS": "80", "NO_COLOR": "1"})


def done(*args):
    result = elsi(*args)
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result.stdout


def failed(code, *args):
    """The message of a command that must fail with this exit code, on exactly one line of standard error."""
    result = elsi(*args)
    assert result.exit_code == code and result.stdout == "", result.output
    assert re.fullmatch(r"elsi: [^\n]+\n", result.stderr), result.stderr
    return result.stderr.removeprefix("elsi: ").rstrip()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Drafts of a target of 8 layers, by name."""
    place, target = tmp_path_factory.mktemp("drafts"), tiny_target("llama", layers=8)
    vocabulary = DraftVocabulary(torch.arange(20), 64)
    sets = {"middle": (1, 3, 5), "last": (0, 3, 7), "one": (4,)}
    return {name: save_draft(Draft.for_target(target, layers, vocabulary), place / name) for name, layers in sets.items()}


def test_choices_are_those_of_the_library():
    assert tuple(cli_speculative.Loader) == tuple(LOADERS)
    assert tuple(cli_speculative.Weights) == DTYPES


def test_help():
    assert re.search(r"^  export +Write a trained draft for serving engines\.$", done("--help"), re.M)
    page = done("export", "--help")
    assert page.isascii() and max(map(len, page.splitlines())) <= 80
    assert all(name in page for name in (*LOADERS, *DTYPES))


def test_help_needs_no_heavy_import():
    heavy = ("torch", "transformers", "pandas", "scipy")
    code = f"import sys, elsi_lib.cli; print(*(name for name in {heavy} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_export_says_who_can_take_the_draft(drafts, tmp_path):
    said = done("export", drafts["middle"], "-o", tmp_path / "out", "--engine", "vllm", "--engine", "sglang")
    assert re.search(r"^target +tiny-llama$", said, re.M) and re.search(r"^layers +1, 3, 5$", said, re.M)
    assert re.search(r"^SGLang +1, 3, 5$", said, re.M) and re.search(r"^vLLM +2, 4, 6$", said, re.M)
    assert re.search(r"^EAGLE +none, cannot take this draft: its code captures ids 2, 4, 5", said, re.M)
    body = said.replace(str(tmp_path), "TMP")
    assert body.isascii() and max(map(len, body.splitlines())) <= 80 and body.endswith("its README.md says how to serve it\n")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    done("export", drafts["middle"], "-o", tmp_path / "out", "--dtype", "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_export_leaves_out_the_keys_of_engines_that_cannot(drafts, tmp_path):
    said = " ".join(done("export", drafts["last"], "-o", tmp_path / "out").split())
    assert "SGLang none, cannot name layer 7 of 8: its Llama and Qwen loops" in said and "vLLM 1, 4, 8 " in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"] == {"use_aux_hidden_state": True} and config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 8]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["export", "{draft}"], "Missing option '-o' / '--output'"),
        (["export", "-o", "{tmp}/out"], "Missing argument 'DRAFT'"),
        (["export", "{draft}", "-o", "{tmp}/out", "--engine", "dflash"], "'dflash' is not one of 'sglang', 'vllm'"),
        (["export", "{draft}", "-o", "{tmp}/out", "--dtype", "int8"], "'int8' is not one of 'bfloat16'"),
        (["export", "{tmp}/none", "-o", "{tmp}/out"], "no draft at {tmp}/none: config.json is missing"),
        (["export", "{draft}", "-o", "{draft}"], "-o {draft} holds something else than an export"),
        (["export", "{draft}", "-o", "{tmp}/text"], "-o {tmp}/text is a file"),
        (["export", "{draft}", "-o", "{tmp}/out", "--engine", "specforge"], "specforge takes exactly 3 layers, not the 1 of (4,)"),
        (["export", "{draft}", "-o", "{tmp}/out", "--engine", "vllm", "--engine", "sglang"], "sglang cannot take this draft"),
    ],
)
def test_bad_input(args, message, drafts, tmp_path):
    (tmp_path / "text").write_text("")
    places = {"draft": drafts["one"], "tmp": tmp_path}
    assert message.format(**places) in failed(2, *(a.format(**places) for a in args))
    assert not (tmp_path / "out").exists()


def test_trouble_of_the_environment(drafts, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in failed(1, "export", drafts["one"], "-o", tmp_path / "file" / "out")
