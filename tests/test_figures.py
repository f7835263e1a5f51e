import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text
from synthetic import fingerprint

from elsi_lib.report import figures, findings, measures
from elsi_lib.report.artefacts import _render
from elsi_lib.report.captions import CAPTIONS

ROOT = Path(__file__).resolve().parents[1]
# A usual target, a shallow one, and one whose fingerprint carries neither bootstrap nor token spectra.
TARGETS = {
    "usual": fingerprint(layers=9),
    "four layers": fingerprint(layers=4, prompts=4, name="shallow"),
    "bare": fingerprint(layers=6, bootstrap=0, spectra=0),
}
REPORTED = {"early": -48.4, "middle": -45.8, "late": -35.6}


def draw(name, fp, beside=None):
    """Figure and finding of one artefact."""
    if name == "figure1":
        data = measures.prompt_entropies(fp)
        return figures.figure1(data), findings.prompts(data)
    if name == "figure2":
        data = measures.wave([fp, beside])
        return figures.figure2(data), findings.wave(data)
    if name == "figure3":
        data = measures.pair_entropies(fp)
        return figures.figure3(data), findings.pairs(data, fp.num_layers)
    if name == "figure4":
        data = measures.variance_between_prompts(fp, resamples=50)
        return figures.figure4(data, REPORTED), findings.variance(data)
    if name == "figure7":
        data = measures.frontier(fp)
        return figures.figure7(data, fp.num_layers), findings.beam(data)
    options = {"debiased": (False, True)} if name == "figure5" else {"filtered": (True, False)}
    maps = measures.cka_maps([fp, beside], **options)
    return getattr(figures, name)(maps), findings.cka(maps, name)


FIGURES = [f"figure{number}" for number in range(1, 8)]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_figure_can_be_drawn_and_told_for_every_target(name, target):
    figure, finding = draw(name, TARGETS[target])
    assert figure.get_size_inches()[0] == 7
    png = _render(figure, "png")
    assert png.startswith(b"\x89PNG") and len(png) < 300_000 and len(_render(figure, "svg")) < 300_000
    assert finding.text and finding.alt and "nan" not in finding.text.lower()
    assert all(isinstance(value, float) and math.isfinite(value) for value in finding.values.values())
    assert all(key.startswith(name) for key in finding.values)


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_readable_and_inside_the_figure(name):
    figure, _ = draw(name, TARGETS["usual"], TARGETS["four layers"])
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text().strip()):
        assert text.get_fontsize() >= 9, text.get_text()
        box = text.get_window_extent()
        clipped = text.get_text().lstrip("−-+").replace(".", "").isdigit()  # ticks outside the limits
        assert clipped or (box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1), text.get_text()


@pytest.mark.parametrize("name", ["figure2", "figure5", "figure6"])
def test_two_targets_are_both_drawn_and_told(name):
    panels = []
    for beside in (None, TARGETS["four layers"]):
        figure, finding = draw(name, TARGETS["usual"], beside)
        assert any("_beside_" in key for key in finding.values) is (beside is not None)
        assert ("shallow" in finding.text) is (beside is not None)
        panels.append(sum(ax.axison and bool(ax.get_title(loc="left")) for ax in figure.axes))
    assert panels[1] == 2 * panels[0]


def test_figure_2_shows_the_sink_and_the_bands():
    data = measures.wave([TARGETS["usual"]])
    ax = figures.figure2(data).axes[0]
    solid, dashed = ax.get_lines()
    assert solid.get_linestyle() == "-" and dashed.get_linestyle() == "--"
    np.testing.assert_array_equal(solid.get_ydata(), TARGETS["usual"].entropy().numpy())
    np.testing.assert_array_equal(dashed.get_ydata(), TARGETS["usual"].variant(sink=False).entropy().numpy())
    assert len(ax.collections) == 1  # the default variant alone carries a bootstrap
    assert not figures.figure2(measures.wave([TARGETS["bare"]])).axes[0].collections


def test_boundaries_are_drawn_between_the_layers():
    maps = measures.cka_maps([TARGETS["usual"]])
    ax = figures.figure5(maps).axes[0]
    lines = [line.get_xdata()[0] for line in ax.get_lines() if line.get_color() == figures.YELLOW and line.get_xdata()[0] != 0]
    assert lines == [b + 0.5 for b in maps[0]["boundaries"]] and lines
    assert "0–" in ax.get_title(loc="left")


def test_reported_values_are_labelled_as_reported():
    data = measures.variance_between_prompts(TARGETS["usual"], resamples=20)
    labels = [text.get_text() for text in figures.figure4(data, REPORTED).legends[0].get_texts()]
    assert "reported, Qwen3-4B" in labels
    assert "reported, Qwen3-4B" not in [text.get_text() for text in figures.figure4(data).legends[0].get_texts()]


def test_drawing_leaves_nothing_behind():
    before = dict(plt.rcParams)
    draw("figure2", TARGETS["usual"])
    assert not plt.get_fignums() and dict(plt.rcParams) == before


def test_every_artefact_has_a_caption_that_holds_no_result():
    of_tau = {f"{table}{part}" for table in ("table2", "table3") for part in ("", "_differences", "_categories", "_speed")}
    of_tau |= {f"tau_{part}" for part in ("differences", "entropy", "training", "categories")}
    committed = {file.stem for file in (ROOT / "data" / "results").glob("*/open_*.json")}
    assert set(CAPTIONS) == {*FIGURES, "table1", *of_tau, *committed}
    assert "reported" in CAPTIONS["figure2"].lower() and "28" in CAPTIONS["figure2"] and "27" in CAPTIONS["figure2"]
