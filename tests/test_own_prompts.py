"""The prompts of data/prompts: their shape, that they are read unchanged, and that they are not Spec-Bench."""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from elsi_lib import assets
from elsi_lib.conversations import Counts, read_conversations
from elsi_lib.report.tau import CATEGORIES, MT_BENCH

FOLDER = Path(__file__).parents[1] / "data" / "prompts"
PATH = FOLDER / "own.jsonl"
TEXT = PATH.read_bytes().decode("utf-8")  # strict: raises where it is not UTF-8
ROWS = [json.loads(line) for line in TEXT.splitlines()]


def runs(text, length=8):
    """Every run of so many words, without case and punctuation."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def texts_of(value):
    """All strings in a JSON value."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in texts_of(part)]


def test_every_category_has_six_prompts_with_its_number_of_turns():
    counts = Counter(row["category"] for row in ROWS)
    assert set(counts) == set(CATEGORIES) and min(counts.values()) >= 6
    for row in ROWS:
        assert list(row) == ["question_id", "category", "turns"]
        assert len(row["turns"]) == (2 if row["category"] in MT_BENCH else 1)


def test_numbers_are_their_own():
    assert [row["question_id"] for row in ROWS] == list(range(100_001, 100_001 + len(ROWS)))


def test_no_text_appears_twice():
    texts = [turn for row in ROWS for turn in row["turns"]]
    assert len({" ".join(re.findall(r"\w+", text.casefold())) for text in texts}) == len(texts)
    seen = Counter(run for text in texts for run in runs(text))
    assert max(seen.values()) == 1


def test_text_is_clean():
    assert not TEXT.startswith("\ufeff") and TEXT.endswith("\n") and "\r" not in TEXT
    for row in ROWS:
        for turn in row["turns"]:
            assert turn == turn.strip() == unicodedata.normalize("NFC", turn) and len(turn) >= 30
            assert not [c for c in turn if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") and c != "\n"]


def test_lengths_are_realistic():
    """Summaries and rag carry a passage of 120 to 250 words besides the task, which takes 30 at most."""
    for row in ROWS:
        low, high = (150, 250) if row["category"] in ("summarization", "rag") else (5, 100)
        if "Chinese" not in row["turns"][0]:  # no spaces
            assert low <= len(row["turns"][0].split()) <= high


def test_translations_start_from_several_languages():
    found = {re.search(r"this (\w+) sentence into English: ", r["turns"][0])[1] for r in ROWS if r["category"] == "translation"}
    assert found >= {"German", "French", "Spanish", "Chinese"}


@pytest.mark.parametrize("format", ["spec-bench", "auto"])
def test_they_are_read_as_spec_bench_and_unchanged(format):
    counts = Counts()
    conversations = list(read_conversations(PATH, format, counts))
    assert [c.id for c in conversations] == [str(row["question_id"]) for row in ROWS]
    assert [c.category for c in conversations] == [row["category"] for row in ROWS]
    for conversation, row in zip(conversations, ROWS, strict=True):
        assert [(m["role"], m["content"]) for m in conversation.messages] == [("user", turn) for turn in row["turns"]]
    assert counts.as_dict() == {"read": {"rows": len(ROWS), "conversations": len(ROWS)}}


def test_readme_and_licence():
    readme, licence = ((FOLDER / name).read_text(encoding="utf-8") for name in ("README.md", "LICENSE"))
    assert f"{len(ROWS)} prompts" in readme and "not Spec-Bench" in readme and "CC0 1.0" in readme
    assert licence.startswith("CC0 1.0 Universal") and "CC0-1.0" in licence


@pytest.mark.real
def test_nothing_is_shared_with_the_real_spec_bench():
    path = assets.available("spec-bench")
    if path is None:
        pytest.skip("no local copy of Spec-Bench (ELSI_ASSETS)")
    real = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert not {row["question_id"] for row in real} & {row["question_id"] for row in ROWS}
    assert {row["category"] for row in real} == set(CATEGORIES)
    theirs = {run for row in real for text in texts_of(row) for run in runs(text)}
    assert len(theirs) > 50_000
    shared = {run: row["question_id"] for row in ROWS for turn in row["turns"] for run in runs(turn) if run in theirs}
    assert not shared
