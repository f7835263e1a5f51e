"""The book's sources hold together, and the site renders without a warning, which dead links and unknown names are."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from elsi_lib.errors import ElsiError

ROOT = Path(__file__).resolve().parents[1]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
ENTRIES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
ALL_NOTEBOOKS = sorted(f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb"))
# One that was never run waits outside of the book until there is a result.
NOTEBOOKS = [name for name in ALL_NOTEBOOKS if re.search(r'"execution_count": \d', (ROOT / f"{name}.ipynb").read_text())]
PAGES = sorted(f"book/{path.stem}" for path in (ROOT / "book").glob("*.md"))


@pytest.fixture
def workflow(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "workflow")


def test_every_page_and_notebook_is_in_the_contents_once():
    assert sorted(ENTRIES) == sorted([*PAGES, *NOTEBOOKS])


def test_every_module_is_in_the_reference():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "elsi_lib").rglob("*.py")
        if path.name != "__init__.py"
    }
    listed = re.findall(r"automodule:: (\S+)", (ROOT / "book" / "api.md").read_text())
    assert sorted(listed) == sorted(modules)


def test_the_readme_says_what_the_committed_results_say(workflow):
    from build_book import with_answer

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_answer(readme) == readme and "nats" in readme.partition("<!-- answer -->")[2].partition("<!-- /answer -->")[0]
    with pytest.raises(ElsiError, match="<!-- answer --> is expected once"):
        with_answer("# a readme without a place for it\n")


def test_included_parts_are_those_that_are_generated(workflow):
    from generated_pages import generated_pages

    included = {name for page in PAGES for name in re.findall(r"\{include\} generated/(\S+)", (ROOT / f"{page}.md").read_text())}
    parts = generated_pages({})  # as where nothing was ever run
    assert included == set(parts)
    assert all(text.strip() for text in parts.values())
    assert "not run here" in parts["artefacts.md"]


def test_artefacts_name_their_notebooks(workflow):
    from generated_pages import NOTEBOOK_OF

    assert {f"notebooks/{name}" for name in NOTEBOOK_OF.values()} == set(ALL_NOTEBOOKS)


def test_the_book_runs_the_notebooks_in_its_contents(workflow):
    from build_book import notebooks

    assert [f"notebooks/{path.stem}" for path in notebooks()] == [name for name in ALL_NOTEBOOKS if name in ENTRIES]
    listed = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^NOTEBOOKS := (.*)$", listed, re.M).group(1).split() == [f"notebooks/{path.name}" for path in notebooks()]


def test_readme_table_names_every_notebook_and_nothing_else():
    readme = (ROOT / "README.md").read_text()
    assert sorted(set(re.findall(r"\((notebooks/\w+)\.ipynb\)", readme))) == NOTEBOOKS
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target


def test_a_notebook_is_run_again_when_what_it_reads_has_changed(workflow, tmp_path, monkeypatch):
    import build_book

    notebook = ROOT / "notebooks" / "02_pairs.ipynb"
    results = tmp_path / "results"
    monkeypatch.setattr(build_book, "ROOT", tmp_path)
    monkeypatch.setattr(build_book, "COMMITTED", results)
    for folder in ("elsi_lib", "data/paper", "results/one/tau", "results/one/survey"):
        (tmp_path / folder).mkdir(parents=True)
    files = ["requirements.lock", "elsi_lib/entropy.py", "data/paper/reported.csv", "results/one/fingerprint.safetensors"]
    files += ["results/one/tau/steps.parquet", "results/one/survey/samples.csv"]
    for name in [*files, "results/one/tau_entropy.png", "results/one/figure1.csv"]:
        (tmp_path / name).write_text("as it was")
    seen = [build_book._inputs_hash(notebook, build_book._shared_inputs())]
    for name in files:
        (tmp_path / name).write_text("changed")
        seen.append(build_book._inputs_hash(notebook, build_book._shared_inputs()))
    assert len(set(seen)) == len(files) + 1
    (tmp_path / "results/one/tau_entropy.png").write_text("a result of notebooks")
    assert build_book._inputs_hash(notebook, build_book._shared_inputs()) == seen[-1]


def test_only_the_notebooks_that_changed_are_run(workflow, tmp_path, monkeypatch, capsys):
    import build_book
    import nbformat

    def here(_, mp_context):
        return ThreadPoolExecutor(1)

    ran = []
    monkeypatch.setattr(build_book, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(build_book, "ProcessPoolExecutor", here)
    monkeypatch.setattr(build_book, "execute", lambda source, output: (ran.append(source.stem), output.write_text("outputs")))
    sources = [tmp_path / "one.ipynb", tmp_path / "two.ipynb"]
    for source in sources:
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")]), source)
    (tmp_path / "done").mkdir()
    build_book.execute_changed(sources, tmp_path / "done")
    assert sorted(ran) == ["one", "two"]
    monkeypatch.setattr(build_book, "ProcessPoolExecutor", None)  # nothing to run: no process is started
    build_book.execute_changed(sources, tmp_path / "done")
    assert "one.ipynb: nothing changed" in capsys.readouterr().out
    monkeypatch.setattr(build_book, "ProcessPoolExecutor", here)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 2")]), sources[1])
    build_book.execute_changed(sources, tmp_path / "done")
    assert ran[2:] == ["two"]
    (tmp_path / "done" / "one.ipynb").unlink()
    build_book.execute_changed(sources, tmp_path / "done")
    assert ran[3:] == ["one"]


def test_sync_writes_only_what_changed(workflow, tmp_path):
    from build_book import sync

    sync(tmp_path, {"a.md": b"one", "deep/b.md": b"two"})
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a.md",)}
    os.utime(tmp_path / "a.md", ns=(1, 1))
    sync(tmp_path, {"a.md": b"one", "c.md": b"three"})
    assert times and (tmp_path / "a.md").stat().st_mtime_ns == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.md", "c.md"]


def test_site_renders_without_a_warning(rendered):
    run, site = rendered
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert f"The site is at {site / 'index.html'}" in run.stdout
    for entry in ENTRIES:
        page = (site / f"{entry}.html").read_text(encoding="utf-8")
        assert "<h1>" in page
        # Equations and everything else render without a network.
        assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="(?:https?:)?//(?!arxiv)[^"]*\.(?:js|css)', page), entry
