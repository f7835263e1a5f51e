"""What a passport says of code and machine: enough to tell runs apart, nothing that names a machine."""

import ast
import importlib
import json
import platform
import socket
from importlib import metadata
from pathlib import Path

import pytest

from elsi_lib import provenance
from elsi_lib.provenance import METHOD_MODULES, REPORT_MODULES, SPECULATIVE_MODULES, code_version, environment


def test_versions_are_those_installed():
    found = environment()
    assert found["python"] == platform.python_version()
    for name, version in found["packages"].items():
        assert version == metadata.version(name)
    assert found["hardware"]["cores"] > 0
    assert code_version()["elsi_lib"] == metadata.version("elsi-lib")


def test_no_host_name_and_no_path():
    text = json.dumps([environment(), code_version()])
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text and str(Path(__file__).parents[1]) not in text


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The method's modules in a folder of their own, to be edited; returns the hash after an edit."""
    source = Path(provenance.__file__).parent
    for folder in ("report", "speculative"):
        (tmp_path / folder).mkdir()
    for name in (*METHOD_MODULES, *REPORT_MODULES, *SPECULATIVE_MODULES):
        file = f"{name.replace('.', '/')}.py"
        (tmp_path / file).write_text((source / file).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))

    def edited(name, old, new, part="method"):
        path = tmp_path / f"{name}.py"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        provenance.code_version.cache_clear()
        return provenance.code_version()[part]

    yield edited
    provenance.code_version.cache_clear()


def test_prose_does_not_change_the_hash_and_code_does(copy):
    before = code_version()["method"]
    assert len(before) == 16
    provenance.code_version.cache_clear()
    assert copy("entropy", '"""Matrix entropy', '"""On matrix entropy') == before  # a docstring
    assert copy("entropy", "import math\n", "import math  # of course\n\n") == before  # a comment, a blank line
    whole = code_version()
    provenance.code_version.cache_clear()
    third = copy("report/measures", "def third_of(", "def a_third_of(", part="report")
    assert third != whole["report"] and provenance.code_version()["method"] == before
    after = copy("entropy", "if alpha > 2:", "if alpha > 3:")
    assert after != before
    assert copy("entropy", "if alpha > 3:", "if alpha > 2:") == before


def test_earlier_code_of_the_same_numbers_stands_for_that_of_today():
    """A line whose code is no longer there would keep results current that this code does not make."""
    groups = (provenance.CALIBRATION_MODULES, provenance.SURVEY_MODULES, provenance.SUMS_MODULES)
    assert set(provenance.SAME_NUMBERS) <= {provenance.raw_hash(modules) for modules in groups}
    for raw, earlier in provenance.SAME_NUMBERS.items():
        assert len(raw) == len(earlier) == 16 and earlier not in provenance.SAME_NUMBERS
    found = code_version() | provenance.survey_version()
    for part, modules in zip(("calibration", "survey", "sums"), groups, strict=True):
        raw = provenance.raw_hash(modules)
        assert found[part] == provenance.SAME_NUMBERS.get(raw, raw)


def test_the_dump_tells_trees_apart():
    calls, values = ["f(x)", "f(y)", "f(x, y)", "f(x=y)", "f[x]"], ["1", "1.0", "'1'", "True", "None", "x", "x, y", "lambda: 0"]
    sources = [*calls, *(f"a = {value}" for value in values)]
    dumps = [provenance._dump(ast.parse(source)) for source in sources]
    assert len(set(dumps)) == len(sources)
    assert provenance._dump(ast.parse("f( x )  # comment")) == dumps[0]


def test_the_dump_does_not_show_fields_that_only_some_python_versions_have():
    """3.12 added type_params to functions and classes; empty, it must leave no trace."""
    text = provenance._dump(ast.parse("def f(a): return a\nclass C: pass"))
    assert "type_params" not in text and "type_comment" not in text and "[]" not in text


def test_every_module_that_can_change_a_number_is_hashed():
    """Whatever a hashed module imports from this library is hashed too, but for what only reports or stores."""
    apart = {"errors", "provenance", "progress", "assets", "catalogue", "files"}
    for name in METHOD_MODULES:
        tree = ast.parse(Path(importlib.import_module(f"elsi_lib.{name}").__file__).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elsi_lib."):
                assert node.module.split(".")[1] in {*METHOD_MODULES, *apart}, f"{name} imports {node.module}"
            elif isinstance(node, ast.ImportFrom) and node.module == "elsi_lib":
                assert {alias.name for alias in node.names} <= {*METHOD_MODULES, *apart}, name
