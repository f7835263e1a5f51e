"""Recorded answers: true to the target, resumed where they broke off, refused where they do not belong."""

import json

import pytest
import torch
from tiny import TEMPLATE, tiny_model, tiny_target, tiny_tokenizer

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.speculative import answers as room
from elsi_lib.speculative.answers import load_answers, record, training_texts
from elsi_lib.speculative.dialogue import Dialogue, following, opening
from elsi_lib.speculative.noise import pick
from elsi_lib.targets import Target

EOS = 2
OPTIONS = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4, "max_turns": 2, "source": "made up"}


def dialogue(name, *texts):
    return Dialogue(name, "kind", tuple(({"role": "user", "content": text},) for text in texts))


DIALOGUES = [dialogue(f"d{i}", "abc" * (i % 4 + 1), "then", "and") for i in range(5)] + [dialogue("one", "x")]


def alone(target, asked, max_new_tokens=12, temperature=1.0, seed=4, max_turns=2, context=128):
    """[(prompt, answer, finish)] of one dialogue without a cache, token by token."""
    text, turns = [], []
    for messages in asked.turns[:max_turns]:
        make = following(target.tokenizer, turns[-1][1], messages) if turns else opening(target.tokenizer, messages)
        text += make
        start, finish = len(text), ""
        while not finish:
            text.append(pick(target.run(text)[1][-1], temperature, seed, asked.id, len(text)))
            finish = "eos" if text[-1] == EOS else "length" if len(text) - start == max_new_tokens else ""
            finish = finish or ("context" if len(text) == context else "")
        turns.append((tuple(make), tuple(text[start:]), finish))
    return turns


def turns_of(answered):
    return [(turn.prompt, turn.answer, turn.finish) for turn in answered.turns]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_second_turns_go_on_from_the_target_s_own_first_answer(tmp_path, temperature, batch):
    target = tiny_target()
    found = record(target, DIALOGUES, tmp_path / "a.jsonl", **(OPTIONS | {"temperature": temperature}), batch=batch)
    assert [d.id for d in found.dialogues] == [d.id for d in DIALOGUES] and found.complete
    for asked, answered in zip(DIALOGUES, found.dialogues, strict=True):
        assert turns_of(answered) == alone(target, asked, temperature=temperature)
        assert answered.ids == tuple(i for turn in answered.turns for part in (turn.prompt, turn.answer) for i in part)
        assert answered.category == "kind"
    finishes = {turn.finish for d in found.dialogues for turn in d.turns}
    assert "length" in finishes and (temperature == 0 or "eos" in finishes)


def test_the_passport_says_what_the_answers_are(tmp_path):
    target = tiny_target()
    passport = record(target, DIALOGUES[:2], tmp_path / "a.jsonl", **OPTIONS).passport
    assert passport["target"]["name"] == "tiny-llama" and len(passport["target"]["embedding_norms"]) == 16
    assert {name: passport[name] for name in OPTIONS} == OPTIONS
    assert passport["eos_ids"] == [2] and passport["ids"] == ["d0", "d1"] and passport["format"] == "elsi-answers-1"
    assert str(tmp_path) not in json.dumps(passport)


def test_a_run_that_is_cut_anywhere_ends_with_the_same_answers(tmp_path):
    target, whole, path = tiny_target(), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    expected = record(target, DIALOGUES, whole, **OPTIONS, batch=2)
    raw = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == 10]
    for cut in (0, 10, ends[0] - 1, ends[0], ends[1] + 1, ends[2] - 2, ends[3], len(raw) - 1, len(raw)):
        path.write_bytes(raw[:cut])
        kept = sum(end <= cut for end in ends)
        found = record(target, DIALOGUES, path, **OPTIONS, batch=3)
        assert found.dialogues == expected.dialogues and found.passport == expected.passport
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == len(ends) and b"".join(lines[:kept]) == raw[: ends[kept - 1] if kept else 0]
        assert load_answers(path).dialogues == expected.dialogues


def test_what_is_done_is_not_answered_again(tmp_path, monkeypatch):
    target, path = tiny_target(), tmp_path / "a.jsonl"
    first = record(target, DIALOGUES, path, **OPTIONS)
    before = path.read_bytes()
    monkeypatch.setattr(target.model, "forward", None)  # any pass would fail
    again = record(target, DIALOGUES, path, **OPTIONS)
    assert again == first and path.read_bytes() == before


def test_a_file_that_broke_off_reads_as_far_as_it_goes(tmp_path):
    target, path = tiny_target(), tmp_path / "a.jsonl"
    whole = record(target, DIALOGUES, path, **OPTIONS, batch=1)
    path.write_bytes(path.read_bytes()[:-5])
    part = load_answers(path, target)
    assert len(part.dialogues) == len(DIALOGUES) - 1 and not part.complete
    assert all(d in whole.dialogues for d in part.dialogues) and part.sha256 != whole.sha256


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: [lines[0].replace('"seed":4', '"seed":5'), *lines[1:]], "line 1 of .* was edited"),
        (lambda lines: [*lines[:2], lines[2].replace('"finish":"', '"finish":"e', 1), *lines[3:]], "line 3 of .* was edited"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 of .* was edited, or one before it taken out"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2 of"),
        (lambda lines: [*lines[:3], "{}", *lines[3:]], "line 4 of .* damaged"),
        (lambda lines: [*lines[:3], "[1]", *lines[3:]], "line 4 of .* damaged"),
        (lambda lines: [*lines[:3], "nonsense", *lines[3:]], "line 4 of .* damaged"),
        (lambda lines: ['{"passport":{"format":"other"},"sha256":""}', *lines[1:]], "not of format 'elsi-answers-1'"),
        (lambda lines: lines[1:], "not of format"),
    ],
)
def test_edited_files_are_refused(tmp_path, edit, words):
    target, path = tiny_target(), tmp_path / "a.jsonl"
    record(target, DIALOGUES, path, **OPTIONS)
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    for read in (lambda: load_answers(path), lambda: record(target, DIALOGUES, path, **OPTIONS)):
        with pytest.raises(ElsiError, match=words):
            read()


def test_files_of_other_things_are_refused(tmp_path):
    target, path = tiny_target(), tmp_path / "a.jsonl"
    record(target, DIALOGUES, path, **OPTIONS)
    with pytest.raises(ElsiError, match="answers of target tiny-llama, not of tiny-qwen2 .architecture"):
        load_answers(path, tiny_target("qwen2"))
    with pytest.raises(ElsiError, match="embedding_norms"):
        load_answers(path, tiny_target(seed=1))
    coarse = Target(tiny_model().bfloat16(), tiny_tokenizer(), name="tiny-llama")
    assert len(load_answers(path, coarse).dialogues) == len(DIALOGUES)  # another dtype may read, but not go on
    with pytest.raises(ElsiError, match="dtype float32 against bfloat16"):
        record(coarse, DIALOGUES, path, **OPTIONS)
    other = tiny_target()
    other.tokenizer.chat_template = TEMPLATE + " "
    for read in (lambda: load_answers(path, other), lambda: record(other, DIALOGUES, path, **OPTIONS)):
        with pytest.raises(ElsiError, match="another chat template"):
            read()
    for name, value in (
        ("seed", 5),
        ("temperature", 0),
        ("max_new_tokens", 13),
        ("max_turns", 1),
        ("source", "elsewhere"),
        ("capacity", 99),
    ):
        with pytest.raises(ElsiError, match=f"recorded with other {name}"):
            record(target, DIALOGUES, path, **(OPTIONS | {name: value}))
    for others in (DIALOGUES[:-1], [*DIALOGUES[:-1], dialogue("one", "y")], DIALOGUES[::-1]):
        with pytest.raises(ElsiError, match="recorded with other dialogues_sha256"):
            record(target, others, path, **OPTIONS)
    with pytest.raises(ElsiError, match="no answers at"):
        load_answers(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ElsiError, match="holds no recorded answers"):
        load_answers(tmp_path / "empty.jsonl")


def test_other_files_are_not_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(ElsiError, match="line 1 of .* is not a line of recorded answers"):
        record(tiny_target(), DIALOGUES, path, **OPTIONS)
    path.write_text("no line feed at all")
    with pytest.raises(ElsiError, match="is not a file of recorded answers"):
        record(tiny_target(), DIALOGUES, path, **OPTIONS)
    assert path.read_text() == "no line feed at all"


def test_a_prompt_too_long_is_named_or_skipped(tmp_path):
    target, long = tiny_target(), dialogue("long", "a" * 150)
    with pytest.raises(ElsiError, match="dialogue long: 154 tokens up to turn 1, at most 116 leave room"):
        record(target, [*DIALOGUES, long], tmp_path / "a.jsonl", **OPTIONS)
    grows = dialogue("grows", "a" * 60, "b" * 60)
    with pytest.raises(ElsiError, match="dialogue grows: .* up to turn 2"):
        record(target, [grows], tmp_path / "b.jsonl", **OPTIONS)
    found = record(target, [long, grows, DIALOGUES[0]], tmp_path / "c.jsonl", **OPTIONS, skip_long=True)
    assert found.skipped == ("long",) and found.complete
    assert turns_of(found.dialogues[0]) == alone(target, grows, max_turns=1)
    assert turns_of(found.dialogues[1]) == alone(target, DIALOGUES[0])
    assert load_answers(tmp_path / "c.jsonl") == found


def test_the_capacity_is_a_bound_on_the_whole_dialogue(tmp_path):
    target, asked = tiny_target(), dialogue("d", "a" * 30, "b")
    expected = alone(target, asked)
    needed = sum(len(part) for prompt, answer, _ in expected for part in (prompt, answer))
    assert expected[1][2] == "length"
    assert turns_of(record(target, [asked], tmp_path / "a.jsonl", **OPTIONS, capacity=needed).dialogues[0]) == expected
    with pytest.raises(ElsiError, match="up to turn 2"):
        record(target, [asked], tmp_path / "b.jsonl", **OPTIONS, capacity=needed - 1)


@pytest.mark.parametrize(
    ("dialogues", "change", "words"),
    [
        ([DIALOGUES[0], DIALOGUES[0]], {}, "dialogue d0 is there twice"),
        ([], {}, "no dialogue"),
        ([dialogue("mute")], {}, "dialogue mute has no turn"),
        (DIALOGUES, {"max_turns": 0}, "max_turns = 0"),
        (DIALOGUES, {"max_new_tokens": 0}, "max_new_tokens = 0"),
        (DIALOGUES, {"temperature": -0.5}, "temperature -0.5"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, dialogues, change, words):
    with pytest.raises(ElsiError, match=words):
        record(tiny_target(), dialogues, tmp_path / "a.jsonl", **(OPTIONS | change))
    assert not (tmp_path / "a.jsonl").exists()


def test_places_that_cannot_be_written_are_the_machine_s_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be written"):
        record(tiny_target(), DIALOGUES[:1], tmp_path / "file" / "a.jsonl", **OPTIONS)


def test_an_empty_answer_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("elsi_lib.speculative.generate.pick_many", lambda logits, *_: [EOS] * len(logits))
    found = record(tiny_target(), DIALOGUES, tmp_path / "a.jsonl", **OPTIONS)
    assert {(turn.answer, turn.finish) for d in found.dialogues for turn in d.turns} == {((EOS,), "eos")}
    assert [len(d.turns) for d in found.dialogues] == [2] * 5 + [1]


def test_training_texts_have_the_loss_on_answers(tmp_path):
    found = record(tiny_target(), DIALOGUES, tmp_path / "a.jsonl", **OPTIONS)
    texts = training_texts(found)
    for answered, (ids, mask) in zip(found.dialogues, texts, strict=True):
        assert ids.dtype == torch.int32 and mask.dtype == torch.bool and ids.shape == mask.shape
        assert tuple(ids.tolist()) == answered.ids
        assert ids[mask].tolist() == [i for turn in answered.turns for i in turn.answer]
        assert ids[~mask].tolist() == [i for turn in answered.turns for i in turn.prompt]


def test_the_file_grows_as_dialogues_are_done(tmp_path, monkeypatch):
    path, sizes = tmp_path / "a.jsonl", []
    write = room._Book.append

    def append(self, done):
        write(self, done)
        sizes.append(len(path.read_bytes().splitlines()))

    monkeypatch.setattr(room._Book, "append", append)
    record(tiny_target(), DIALOGUES, path, **OPTIONS)
    assert sizes == [2, 3, 4, 5, 6, 7]
