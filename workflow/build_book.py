"""The book: run the notebooks, gather the sources, render the site.

    python workflow/build_book.py book        results of this machine, in _build/results; only what changed is run again
    python workflow/build_book.py site        the committed results; computes nothing
    python workflow/build_book.py reproduce   makes the committed results again, in data/results and notebooks

Everything rendered is gathered in ``_build/src`` first: pages as they stand, notebooks with their outputs, and what
``generated_pages.py`` writes from the results. Files that did not change keep their times, so Sphinx reads only the others.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build"
SOURCES = BUILD / "src"
RESULTS = BUILD / "results"
COMMITTED = ROOT / "data" / "results"
STAGED = ("_config.yml", "_toc.yml", "elsi_lib/presets.toml")
FOLDERS = {"book": "book", "book/_static": "_static", "data/paper": "data/paper"}
# What a page can show; fingerprints are read where they lie.
SHOWN = {".csv", ".json", ".md", ".png", ".svg"}
AT_A_TIME = 4  # notebooks; each takes about a gigabyte of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("book", "site", "reproduce"))
    parser.add_argument("--out", type=Path, default=ROOT, help="folder whose _build/html receives the site (default: the project)")
    arguments = parser.parse_args()
    results = RESULTS if arguments.what == "book" else COMMITTED
    os.environ["ELSI_RESULTS"] = str(results)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel python3 of this environment, not one of the user's

    from elsi_lib.settings import Settings

    run = Settings()
    if arguments.what == "reproduce":
        from elsi_lib.survey import obtain_survey

        for target in (run.target, run.beside):
            calibrate(target, results / run.for_target(target).run_name)
            obtain_survey(run.for_target(target))
        for notebook in notebooks():
            execute(notebook, notebook)
        (ROOT / "README.md").write_text(with_answer((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
        return
    if arguments.what == "book":
        calibrate(run.target, results / run.run_name)
        execute_changed(notebooks(), BUILD / "notebooks")
    stage(BUILD / "notebooks" if arguments.what == "book" else ROOT / "notebooks", arguments.out / "_build" / "src")
    render(arguments.out)


def notebooks() -> list[Path]:
    """The book's notebooks. One that _toc.yml does not list yet has no result here, and making it may take hours."""
    import yaml

    parts = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    listed = [chapter["file"] for part in parts for chapter in part["chapters"]]
    return [ROOT / f"{name}.ipynb" for name in sorted(listed) if name.startswith("notebooks/")]


def calibrate(target: str, folder: Path) -> None:
    """The fingerprint of a target, unless it is there and current."""
    elsi = Path(sys.executable).with_name("elsi")
    command = [elsi, "calibrate", target, "-o", folder / "fingerprint.safetensors"]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"build_book: {target} could not be calibrated, see above")


def execute(source: Path, output: Path) -> None:
    """Run a notebook through papermill; ``output`` is written only when all of it ran."""
    import nbformat
    from papermill import PapermillExecutionError, execute_notebook

    started = time.perf_counter()
    part = output.with_name(f".{output.stem}.running.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        # The kernel's own log would say only that it talks over TCP; what fails in a cell is raised here.
        quiet = ["--IPKernelApp.log_level=50"]
        execute_notebook(source, part, kernel_name="python3", progress_bar=False, cwd=source.parent, extra_arguments=quiet)
        book = nbformat.read(part, as_version=4)
        # Times and paths of this run belong into the results' passports, not into a committed notebook.
        book.metadata.pop("papermill", None)
        for cell in book.cells:
            for key in ("papermill", "execution"):
                cell.metadata.pop(key, None)
        nbformat.write(book, part)
        part.replace(output)
    except PapermillExecutionError as error:
        sys.exit(f"build_book: {source.name} failed in cell {error.exec_count}: {error.ename}: {error.evalue}")
    finally:
        part.unlink(missing_ok=True)
    print(f"{source.name}: run in {time.perf_counter() - started:.0f} s", flush=True)


def execute_changed(sources: list[Path], folder: Path) -> None:
    """Run the notebooks whose cells, library or inputs differ from their last run, several at a time, each with its share of the
    cores; none reads what another writes."""
    shared = _shared_inputs()
    stamps = {source: RESULTS / ".stamps" / source.stem for source in sources}  # who removes the results has the notebooks run again
    inputs = {source: _inputs_hash(source, shared) for source in sources}
    changed = []
    for source, stamp in stamps.items():
        if (folder / source.name).is_file() and stamp.is_file() and stamp.read_text() == inputs[source]:
            print(f"{source.name}: nothing changed", flush=True)
        else:
            changed.append(source)
    if not changed:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, len(changed), AT_A_TIME)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(execute, source, folder / source.name): source for source in changed}
        try:
            for one in as_completed(running):
                one.result()
                stamp = stamps[running[one]]
                stamp.parent.mkdir(parents=True, exist_ok=True)
                stamp.write_text(inputs[running[one]])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _shared_inputs() -> str:
    """Hash of what every notebook's outputs follow from: library, lock, reported values, committed and new measurements."""
    digest = hashlib.sha256()
    library = (path for path in (ROOT / "elsi_lib").rglob("*") if path.suffix in (".py", ".toml"))
    fingerprints = (path for folder in (COMMITTED, RESULTS) for path in folder.rglob("fingerprint.safetensors"))
    runs = (path for root in (COMMITTED, RESULTS) for kind in ("tau*", "survey") for path in root.glob(f"*/{kind}/*"))
    made = (path for path in runs if path.is_file())
    for path in sorted([*library, *fingerprints, *made, *(ROOT / "data" / "paper").iterdir(), ROOT / "requirements.lock"]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _inputs_hash(notebook: Path, shared: str) -> str:
    """Hash of a notebook's cells and of what all notebooks follow from."""
    import nbformat

    digest = hashlib.sha256(shared.encode())
    for cell in nbformat.read(notebook, as_version=4).cells:
        digest.update(f"{cell.cell_type}\0{cell.source}\0".encode())
    return digest.hexdigest()


def stage(executed: Path, sources: Path = SOURCES) -> None:
    """Make ``sources`` hold exactly what the site is rendered from."""
    from explorer_data import explorer_data
    from generated_pages import generated_pages

    wanted: dict[str, bytes] = {}
    for name in STAGED:
        wanted[name] = (ROOT / name).read_bytes()
    for folder, to in FOLDERS.items():
        for path, name in _files(ROOT / folder):
            if folder != "book" or not name.startswith("_static/"):
                wanted[f"{to}/{name}"] = path.read_bytes()
    for path in sorted(executed.glob("[!.]*.ipynb")):
        wanted[f"notebooks/{path.name}"] = path.read_bytes()
    origin: dict[str, Path] = {}
    roots = tuple(dict.fromkeys((COMMITTED, Path(os.environ["ELSI_RESULTS"]))))  # later ones lie over earlier ones
    for results in roots:
        for path, name in _files(results):
            if path.suffix in SHOWN:
                origin[name] = path
                wanted[f"data/results/{name}"] = path.read_bytes()
    for name, text in generated_pages(origin).items():
        wanted[f"book/generated/{name}"] = text.encode()
    for name, content in explorer_data(roots).items():
        wanted[f"_static/explorer/data/{name}"] = content
    sync(sources, wanted)


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files below a folder and their names relative to it, hidden ones and caches left out."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path, "/".join(parts)


def with_answer(readme: str) -> str:
    """The README with what the committed results say between its two markers.

    Raises:
        ElsiError: a marker is missing: the text would have no place.
    """
    from generated_pages import answer

    from elsi_lib.errors import ElsiError

    if missing := [mark for mark in ("<!-- answer -->\n", "<!-- /answer -->\n") if readme.count(mark) != 1]:
        raise ElsiError(f"README.md: the line {missing[0].strip()} is expected once; between the two stands what the results say")
    before, begin, rest = readme.partition("<!-- answer -->\n")
    _, end, after = rest.partition("<!-- /answer -->\n")
    text = answer({name: path for path, name in _files(COMMITTED)})
    return f"{before}{begin}{text}\n{end}{after}"


def sync(folder: Path, wanted: dict[str, bytes]) -> None:
    """Write what is new or differs and remove what is not wanted; the rest keeps its time."""
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted and "__pycache__" not in path.parts:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def render(out: Path) -> None:
    """Render ``_build/src`` to ``_build/html``; a warning, a dead link among them, is an error."""
    book = Path(sys.executable).with_name("jupyter-book")
    if shutil.which(book) is None:
        sys.exit(f"build_book: jupyter-book is not in the environment of {sys.executable}: run this through make")
    command = [book, "build", out / "_build" / "src", "--path-output", out, "-W", "-n", "--keep-going", "-q"]
    if subprocess.run(command, check=False).returncode:
        sys.exit("build_book: the site has warnings, see above")
    print(f"The site is at {out / '_build' / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
