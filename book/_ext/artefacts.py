"""Beside every figure and table of a notebook: its files, and for a reader who does not see it, its passport's words.

An output is an artefact when its text names the files (``figure2.csv, figure2.json, figure2.png, figure2.svg``). Which run's it is
follows from its content: the passport holds the hash of the picture or of the table's Markdown. The files lie in the site as they
do in the project, below data/results.
"""

import base64
import functools
import hashlib
import json
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)

RESULTS = Path("data", "results")
LISTED = re.compile(r"\w+\.(?:csv|json|md|png|svg)(?:, \w+\.(?:csv|json|md|png|svg))+")
# In this order; the Markdown of a table is the table that the page shows.
LINKS = {
    "csv": ("csv", "the numbers"),
    "svg": ("svg", "the figure as vectors"),
    "png": ("png", "the figure as pixels"),
    "json": ("passport (json)", "parameters, inputs, code, machine"),
}


def add_links(app, doctree: nodes.document) -> None:
    """Links after each artefact of a notebook, and after each figure that a page shows from data/results."""
    docname = app.env.docname
    runs = _runs(app, docname)
    for bundle in list(doctree.findall(_is_bundle)):
        text = next((child.astext().strip() for child in bundle.children if child.get("mime_type") == "text/plain"), "")
        if not LISTED.fullmatch(text):
            continue
        name = Path(next(file for file in text.split(", ") if file.endswith(".json"))).stem
        if not runs.get(name):
            logger.warning(f"{docname}: {name} is not what lies in data/results: run the notebook again", location=bundle)
            continue
        run = runs[name].pop(0)
        alt = json.loads((Path(app.srcdir) / run / f"{name}.json").read_text(encoding="utf-8")).get("alt")
        for image in bundle.findall(nodes.image):
            image["alt"] = " ".join(alt.split())
        shown = bundle.parent if isinstance(bundle.parent, nodes.figure) else bundle
        _after(shown, _links(app, docname, run, name, text.split(", ")))
    for figure in list(doctree.findall(nodes.figure)):
        uri = next((Path(image["uri"]) for image in figure.findall(nodes.image) if image.get("uri")), Path())
        if uri.is_relative_to(RESULTS):
            names = [f"{uri.stem}.{suffix}" for suffix in LINKS]
            _after(figure, _links(app, docname, uri.parent, uri.stem, names))


def _is_bundle(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and node.get("nb_element") == "mime_bundle"


def _after(node: nodes.Node, new: nodes.Node) -> None:
    node.parent.insert(node.parent.index(node) + 1, new)


def _links(app, docname: str, folder: Path, name: str, files: list[str]) -> nodes.paragraph:
    up = "../" * docname.count("/")
    line = nodes.paragraph(classes=["artefact-files"])
    for suffix, (label, meaning) in LINKS.items():
        file = f"{name}.{suffix}"
        if file not in files:
            continue
        if not (Path(app.srcdir) / folder / file).is_file():
            logger.warning(f"{docname}: {folder / file} is not there", location=docname)
        if line.children:
            line += nodes.Text(" · ")
        title = f"{file}: {meaning}"
        line += nodes.reference(
            "", label, refuri=f"{up}{folder.as_posix()}/{file}", internal=True, reftitle=title, classes=["artefact-file"]
        )
    return line


def _runs(app, docname: str) -> dict[str, list[Path]]:
    """Artefact -> folders of its files below the sources, one for each output of a notebook that shows it, in their order."""
    notebook = Path(app.env.doc2path(docname))
    if notebook.suffix != ".ipynb":
        return {}
    folders = _by_content(Path(app.srcdir))
    found: dict[str, list[Path]] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            shown = b""
            if "image/png" in data:
                shown = base64.b64decode("".join(data["image/png"]))
            elif "text/markdown" in data:
                shown = "".join(data["text/markdown"]).encode()
            listed = "".join(data.get("text/plain", ""))
            for name, folder in folders.get(hashlib.sha256(shown).hexdigest(), []):
                if f"{name}.json" in listed.split(", "):
                    found.setdefault(name, []).append(folder)
                    break
    return found


@functools.cache  # once for a build: the sources do not change under it
def _by_content(sources: Path) -> dict[str, list[tuple[str, Path]]]:
    """Hash of a file -> the artefacts that have it, as name and folder below the sources."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for passport in sorted((sources / RESULTS).glob("*/*.json")):
        about = json.loads(passport.read_text(encoding="utf-8"))
        for sha in about.get("files", {}).values() if isinstance(about, dict) else ():
            found.setdefault(sha, []).append((passport.stem, passport.parent.relative_to(sources)))
    return found


def copy_results(app, exception: Exception | None) -> None:
    """The files where the links point to."""
    if exception is None and app.builder.format == "html":
        shutil.rmtree(Path(app.outdir) / RESULTS, ignore_errors=True)
        shutil.copytree(Path(app.srcdir) / RESULTS, Path(app.outdir) / RESULTS)


def setup(app) -> dict[str, bool]:
    app.connect("doctree-read", add_links, priority=600)  # after Sphinx has found the pictures
    app.connect("build-finished", copy_results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
