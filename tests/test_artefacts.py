import json
import re

import pandas as pd
import pytest
from synthetic import fingerprint

from elsi_lib.errors import ElsiError
from elsi_lib.provenance import code_version, question_version
from elsi_lib.report import artefacts, figures, measures
from elsi_lib.report.artefacts import beside_fingerprint, load_artefact, run_line, save_figure, save_table, status
from elsi_lib.settings import Settings

SETTINGS = Settings(target="tiny-a", beside="tiny-b", samples=6, block=8, preset="quick")


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def calibrated(target="tiny-a", seed=0):
    """A fingerprint whose passport states the calibration of SETTINGS, in its place."""
    fp = fingerprint(block=8, bootstrap=8, spectra=8, name=target, seed=0)
    if seed:  # other states, the same calibration
        fp = fingerprint(layers=7, block=8, bootstrap=8, spectra=8, name=target, seed=0)
    fp.save(SETTINGS.for_target(target).output / "fingerprint.safetensors")
    return fp


def saved(fp, beside=None, two=False, **options):
    data = measures.wave([fp, beside])
    about = {"caption": "A wave.", "alt": "Two lines.", "results": {"peak": 1.5}} | options
    return save_figure(figures.figure2(data), "figure2", data, SETTINGS, [fp, beside] if two else [fp], **about)


def test_a_figure_leaves_four_files_and_its_numbers_come_back_exactly(results):
    fp = calibrated()
    artefact = saved(fp)
    assert sorted(p.name for p in SETTINGS.shown.iterdir()) == [
        "figure2.csv", "figure2.json", "figure2.png", "figure2.svg",
    ]  # fmt: skip
    back = pd.read_csv(artefact.path("csv"))
    kept = back[back["first_position"] == "kept"]
    assert kept["entropy"].tolist() == fp.entropy().tolist()  # every bit
    assert repr(artefact) == "figure2.csv, figure2.json, figure2.png, figure2.svg"
    png, size = artefact._repr_png_()
    assert png == artefact.path("png").read_bytes() and size == {"width": 672}  # 7 inches of 96 pixels, at double density
    assert artefact._repr_markdown_() is None


def test_passport_says_where_the_result_comes_from(results):
    fp = calibrated()
    passport = json.loads(saved(fp, seconds=1.234).path("json").read_text())
    assert passport["caption"] == "A wave." and passport["alt"] == "Two lines." and passport["results"] == {"peak": 1.5}
    assert passport["seconds"] == 1.23
    assert passport["parameters"] == {
        "target": "tiny-a", "beside": "tiny-b", "prompts": "sharegpt", "samples": 6, "rho": 0.3, "block": 8, "seed": 0,
        "preset": "quick", "evaluation": "spec-bench",
    }  # fmt: skip
    (entry,) = passport["inputs"]
    assert entry["fingerprint"] == fp.sha256 and entry["target"] == "tiny-a" and entry["revision"] == "0" * 40
    assert entry["prompts"] == fp.passport["prompts"]["sha256"] and entry["prompts_used"] == 6
    assert passport["code"] == code_version() and passport["environment"]["packages"]["torch"]
    assert set(passport["files"]) == {"figure2.svg", "figure2.png", "figure2.csv"}


def test_a_result_of_a_question_is_stale_when_its_code_changes(results, monkeypatch):
    fp = calibrated()
    path = saved(fp, question="sink").path("json")
    passport = json.loads(path.read_text())
    assert passport["question"] == "sink" and passport["code"]["question"] == question_version("sink")["question"]
    assert question_version("sink") != question_version("readings")
    assert status(path) == "measured"
    monkeypatch.setattr(artefacts, "question_version", lambda name: {"question": "another"})
    assert status(path) == "stale"
    monkeypatch.undo()
    monkeypatch.setenv("ELSI_RESULTS", str(results))
    path.write_text(json.dumps(passport | {"question": "gone"}))
    assert status(path) == "stale"
    with pytest.raises(ElsiError, match="question 'gone': no module of that name"):
        saved(fp, question="gone")


def test_no_path_and_no_date_in_any_file(results, tmp_path):
    target = tmp_path / "models" / "Tiny A"
    settings = Settings(target=str(target), beside=str(target), prompts=str(tmp_path / "chats.jsonl"), preset="quick")
    fp = fingerprint()
    data = measures.wave([fp])
    artefact = save_figure(figures.figure2(data), "figure2", data, settings, [fp], caption="A", alt="B")
    for suffix in ("svg", "csv", "json"):
        text = artefact.path(suffix).read_text()
        assert str(tmp_path) not in text and "/tmp" not in text
        assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert json.loads(artefact.path("json").read_text())["parameters"]["target"] == "tiny-a"


def test_the_same_result_has_the_same_bytes(results):
    fp = calibrated()
    first = {p.name: p.read_bytes() for p in (saved(fp), SETTINGS.shown)[1].iterdir()}
    for path in SETTINGS.shown.glob("figure2.*"):
        path.unlink()
    saved(fp)
    second = {p.name: p.read_bytes() for p in SETTINGS.shown.iterdir()}
    seconds = re.compile(rb'"seconds": [^,\n]*')
    assert {name: seconds.sub(b"", content) for name, content in first.items()} == {
        name: seconds.sub(b"", content) for name, content in second.items()
    }


def test_making_it_again_keeps_the_passport_of_the_first_time(results):
    fp = calibrated()
    before = saved(fp, seconds=1.0).path("json").read_bytes()
    assert saved(fp, seconds=2.0).path("json").read_bytes() == before
    assert saved(fp, seconds=2.0, caption="Another.").path("json").read_bytes() != before


def test_status_of_a_result(results, monkeypatch):
    path = SETTINGS.shown / "figure2.json"
    assert status(path) == "not run here"
    with pytest.raises(ElsiError, match="no figure2 in results of tiny-a"):
        load_artefact("figure2", SETTINGS)
    fp = calibrated()
    assert saved(fp).status == status(path) == load_artefact("figure2", SETTINGS).status == "measured"
    monkeypatch.setattr(artefacts, "environment", lambda: {"hardware": "another machine"})
    assert status(path) == "cached"
    monkeypatch.setenv("ELSI_RESULTS", str(results.parent / "elsewhere"))
    assert status(path) == "cached"
    monkeypatch.undo()
    monkeypatch.setenv("ELSI_RESULTS", str(results))
    monkeypatch.setattr(artefacts, "code_version", lambda: {"method": "changed"})
    assert status(path) == "stale"


def test_a_new_fingerprint_makes_a_result_stale(results):
    path = saved(calibrated()).path("json")
    fp = calibrated(seed=1)
    assert status(path) == "stale"
    saved(fp)
    assert status(path) == "measured"
    (SETTINGS.output / "fingerprint.safetensors").unlink()
    assert status(path) == "stale"


def test_an_edited_file_makes_a_result_stale(results):
    artefact = saved(calibrated())
    artefact.path("csv").write_text(artefact.path("csv").read_text() + "tiny-a,kept,99,1.0,,,0,\n")
    assert artefact.status == "stale"


def test_a_result_without_the_second_target_is_stale_once_that_has_a_fingerprint(results):
    fp = calibrated()
    alone = saved(fp, two=True)
    one = save_table(pd.DataFrame({"a": [1]}), "single", SETTINGS, [fp], caption="One target only.")
    assert alone.passport["inputs"][1] is None
    assert alone.status == "measured" and beside_fingerprint(SETTINGS) is None
    assert "not shown" in run_line(SETTINGS, fp, "cached", None)
    assert run_line(SETTINGS, fp, "cached") == f"tiny-a: 6 prompts, 8 layers, fingerprint {fp.sha256[:8]}, cached"
    beside = calibrated("tiny-b")
    assert alone.status == "stale" and one.status == "measured"
    assert beside_fingerprint(SETTINGS).sha256 == beside.sha256
    assert saved(fp, beside, two=True).status == "measured"
    assert run_line(SETTINGS, fp, "measured", beside).splitlines()[1].startswith("beside tiny-b: 6 prompts, 8 layers")


def test_no_second_target_where_it_is_the_first_or_none_is_named(results):
    calibrated()
    assert beside_fingerprint(Settings(target="tiny-a", beside="tiny-a", samples=6, block=8, preset="quick")) is None
    assert beside_fingerprint(Settings(target="tiny-a", beside="", samples=6, block=8, preset="quick")) is None


def test_a_table_leaves_csv_markdown_and_passport(results):
    df = pd.DataFrame({"layers": ["2 15 27"], "entropy": [0.1 + 0.2], "nothing": [float("nan")]})
    artefact = save_table(df, "table1", SETTINGS, [calibrated()], caption="Sets.", results={"none": float("nan")})
    assert pd.read_csv(artefact.path("csv"))["entropy"][0] == 0.1 + 0.2
    assert artefact._repr_markdown_().startswith("| layers") and artefact._repr_png_() is None
    assert artefact.passport["results"] == {"none": None}  # NaN is not JSON
    json.loads(artefact.path("json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "options, match",
    [({"caption": " "}, "no caption"), ({"alt": ""}, "no alternative text")],
)
def test_a_result_without_words_is_refused(results, options, match):
    with pytest.raises(ElsiError, match=match):
        saved(fingerprint(), **options)
    assert not SETTINGS.shown.exists()


def test_names_and_inputs_are_checked(results):
    df = pd.DataFrame({"a": [1]})
    with pytest.raises(ElsiError, match="plain file name"):
        save_table(df, "../table1", SETTINGS, [fingerprint()], caption="A")
    with pytest.raises(ElsiError, match="names no fingerprint"):
        save_table(df, "table1", SETTINGS, [None], caption="A")


def test_a_disk_that_cannot_be_written_is_said_in_one_line(results):
    results.parent.mkdir(exist_ok=True)
    results.write_text("a file where a folder should be")
    with pytest.raises(ElsiError, match="cannot be written .* set ELSI_RESULTS"):
        save_table(pd.DataFrame({"a": [1]}), "table1", SETTINGS, [fingerprint()], caption="A")


def test_a_run_that_is_cut_leaves_no_passport_for_half_a_result(results, monkeypatch):
    fp = calibrated()
    path = saved(fp).path("json")
    write = artefacts._write

    def cut(path, content):
        if path.suffix == ".csv":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(artefacts, "_write", cut)
    with pytest.raises(ElsiError, match="No space left on device"):
        saved(fp, caption="Another.")
    assert status(path) == "not run here" and not list(SETTINGS.shown.glob("*.part"))
