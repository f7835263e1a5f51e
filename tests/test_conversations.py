"""Every oddity of real conversation files has one outcome: repaired, skipped and counted, or refused."""

import hashlib
import json
import tracemalloc

import pytest

from elsi_lib.conversations import Conversation, Counts, read_conversations
from elsi_lib.errors import ElsiError

GOOD = {"id": "good", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def share(*turns, id="x"):
    return {"id": id, "conversations": [{"from": role, "value": value} for role, value in turns]}


def write(tmp_path, rows, name="file.json", jsonl=False):
    path = tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in rows) if jsonl else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    return path


def read(path, format="auto"):
    counts = Counts()
    return list(read_conversations(path, format, counts)), counts


def turns(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


def one(tmp_path, row, **kwargs):
    """The conversation that `row` became, or None, and the counts without those of a sound neighbour."""
    found, counts = read(write(tmp_path, [row, GOOD], **kwargs))
    assert found[-1].id == "good"
    counts.subtract({"rows": 1, "conversations": 1})
    return (found[0] if len(found) == 2 else None), {k: n for k, n in counts.items() if n and k != "rows"}


@pytest.mark.parametrize("role", ["human", "user", "Human "])
@pytest.mark.parametrize("answer", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_known_roles(tmp_path, role, answer):
    found, counts = one(tmp_path, share((role, "q"), (answer, "a")))
    assert turns(found) == [("user", "q"), ("assistant", "a")]
    assert counts == {"conversations": 1}


def test_system_role(tmp_path):
    found, _ = one(tmp_path, share(("system", "s"), ("human", "q")))
    assert turns(found) == [("system", "s"), ("user", "q")]


REPAIRED = [
    ([("gpt", "a0"), ("human", "q"), ("gpt", "a")], [("user", "q"), ("assistant", "a")], "leading assistant turns dropped"),
    ([("system", "s"), ("gpt", "a0"), ("human", "q")], [("system", "s"), ("user", "q")], "leading assistant turns dropped"),
    ([("human", "q"), ("gpt", "a"), ("bing", "b")], [("user", "q"), ("assistant", "a\n\nb")], "turns of one role merged"),
    ([("human", "q"), ("user", "r")], [("user", "q\n\nr")], "turns of one role merged"),
    ([("human", "q"), ("gpt", " \n")], [("user", "q")], "blank turns dropped"),
    ([("human", "a\u0000b")], [("user", "ab")], "NUL removed"),
    ([("human", "q"), ("gpt", "x\\_y")], [("user", "q"), ("assistant", "x_y")], "escapes undone"),
    ([("human", "q"), ("gpt", "<p>x</p>")], [("user", "q"), ("assistant", "x")], "HTML stripped"),
    ([("human", "q"), ("gpt", "sh\nCopy code\nls")], [("user", "q"), ("assistant", "sh\nls")], "Copy code removed"),
    ([("human", "q \ud83d")], [("user", "q \ufffd")], "lone surrogate replaced"),
]


@pytest.mark.parametrize("jsonl", [False, True])
@pytest.mark.parametrize(("raw", "expected", "label"), REPAIRED, ids=[r[2] for r in REPAIRED])
def test_repaired(tmp_path, raw, expected, label, jsonl):
    found, counts = one(tmp_path, share(*raw), jsonl=jsonl)
    assert turns(found) == expected
    assert counts.pop("starts with assistant", 0) == (raw[0][0] == "gpt")
    assert counts == {"conversations": 1, label: 1}


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (share(), "empty"),
        ({"id": "x", "conversations": None}, "empty"),
        (share(("human", "q"), ("tool", "t")), "unknown role"),
        (share(("human", "q"), (None, "t")), "unknown role"),
        (share(("human", None)), "value not text"),
        (share(("human", "q"), ("gpt", 7)), "value not text"),
        (share(("human", "q"), ("gpt", ["a"])), "value not text"),
        ({"id": "x", "conversations": [{"from": "human"}]}, "value not text"),
        ({"id": "x", "conversations": [17]}, "value not text"),
        (share(("system", "s")), "no user turn"),
        (share(("human", "")), "no user turn"),
        ({"id": "x", "conversations": "text"}, "row of another shape"),
        ({"id": "x", "other": 1}, "row of another shape"),
        (None, "row of another shape"),
        ([1, 2], "row of another shape"),
    ],
)
@pytest.mark.parametrize("jsonl", [False, True])
def test_skipped_and_counted(tmp_path, row, label, jsonl):
    # A JSONL file is known by its first line, so the odd row stands second there.
    rows = [GOOD, row]
    found, counts = read(write(tmp_path, rows, jsonl=jsonl))
    assert [c.id for c in found] == ["good"]
    assert counts[label] == 1
    assert counts.as_dict()["skipped"] == {label: 1}
    assert counts["rows"] == 2


def test_only_assistant_turns_are_skipped_and_still_counted_as_starting_so(tmp_path):
    found, counts = one(tmp_path, share(("gpt", "a")))
    assert found is None
    assert counts == {"starts with assistant": 1, "no user turn": 1}


@pytest.mark.parametrize("row", [{"conversations": [{"from": "human", "value": "q"}]}, share(("human", "q"), id=None)])
def test_missing_id_becomes_the_content_key(tmp_path, row):
    found, counts = one(tmp_path, row)
    assert found.id == found.key[:16]
    assert counts == {"conversations": 1, "id missing": 1}


def test_key_is_the_sha256_of_the_messages():
    conversation = Conversation("any", ({"role": "user", "content": "é"},))
    assert conversation.key == hashlib.sha256('[["user","é"]]'.encode()).hexdigest()
    assert Conversation("other", ({"role": "user", "content": "\ud800"},)).key  # no crash outside files


def test_duplicates_are_read_as_they_come(tmp_path):
    found, _ = read(write(tmp_path, [GOOD, GOOD]))
    assert found[0].key == found[1].key


def test_bom_invalid_utf8_and_nul(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"id": "1", "conversations": [{"from": "human", "value": "caf\xe9 \0x"}]}]')
    found, counts = read(path)
    assert turns(found[0]) == [("user", "caf\ufffd x")]
    assert counts.as_dict()["repaired"] == {"BOM removed": 1, "invalid UTF-8 replaced": 1, "NUL removed": 1}


def test_every_broken_end_keeps_what_came_before(tmp_path):
    whole = json.dumps([GOOD, GOOD, GOOD]).encode()
    for cut in range(len(json.dumps([GOOD])), len(whole)):
        path = tmp_path / "cut.json"
        path.write_bytes(whole[:cut])
        found, counts = read(path)
        assert 1 <= len(found) <= 3
        assert counts["file broke off"] == 1
        assert counts["file unreadable from here on"] == 0


def test_broken_end_of_jsonl(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:-9])
    found, counts = read(path)
    assert len(found) == counts["rows"] == 1
    assert counts["file broke off"] == 1


def test_json_broken_in_the_middle(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([GOOD])[:-1] + ", {oops}, " + json.dumps(GOOD) + "]")
    found, counts = read(path)
    assert len(found) == 1
    assert counts["file unreadable from here on"] == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bad_jsonl_line(tmp_path, place):
    lines = [json.dumps(GOOD), json.dumps(GOOD)]
    lines.insert(place, json.dumps(GOOD)[:-7])
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(lines) + "\n")
    found, counts = read(path)
    assert len(found) == 2
    assert counts["line not JSON"] == 1
    assert counts["rows"] == 3


def test_a_first_line_nested_too_deeply_is_one_bad_line(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000 + '\n{"prompt": "one"}\n')
    found, counts = read(path)
    assert [c.messages[0]["content"] for c in found] == ["one"] and counts["line not JSON"] == 1


@pytest.mark.parametrize("indent", [None, 1])
def test_a_single_object_is_read(tmp_path, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD, indent=indent))
    assert [c.id for c in read(path)[0]] == ["good"]


def test_indented_array_and_crlf(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([GOOD, GOOD], indent=2).replace("\n", "\r\n").encode())
    assert len(read(path)[0]) == 2


def test_ultrachat_in_both_shapes(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"prompt": "q", "prompt_id": "p1", "messages": messages}, {"id": "0", "data": ["q", "a"]}]
    for format in ("auto", "ultrachat"):
        found, counts = read(write(tmp_path, rows, jsonl=True), format)
        assert [c.id for c in found] == ["p1", "0"]
        assert found[0].key == found[1].key
        assert turns(found[0]) == [("user", "q"), ("assistant", "a")]
        assert counts["conversations"] == 2
    assert len(read(write(tmp_path, rows, jsonl=True), "messages")[0]) == 1


def test_ultrachat_data_has_to_be_strings(tmp_path):
    found, counts = read(write(tmp_path, [{"id": "0", "data": ["q", None]}, {"id": "1", "data": ["q"]}]))
    assert [c.id for c in found] == ["1"]
    assert counts["value not text"] == 1


def test_spec_bench_keeps_its_turns_apart(tmp_path):
    rows = [{"question_id": 81, "category": "writing", "turns": ["one", "two"]}]
    found, counts = read(write(tmp_path, rows, jsonl=True), "spec-bench")
    assert found == [Conversation("81", ({"role": "user", "content": "one"}, {"role": "user", "content": "two"}), "writing")]
    assert counts.as_dict() == {"read": {"rows": 1, "conversations": 1}}


@pytest.mark.parametrize("jsonl", [False, True])
def test_a_users_own_prompts(tmp_path, jsonl):
    rows = ["one", {"prompt": "two", "category": "c"}, {"text": "three\\_"}, {"prompt": 4}]
    found, counts = read(write(tmp_path, rows, jsonl=jsonl))
    assert [turns(c) for c in found] == [[("user", "one")], [("user", "two")], [("user", "three\\_")]]
    assert found[1].category == "c"
    assert counts.as_dict() == {"read": {"rows": 4, "conversations": 3}, "skipped": {"value not text": 1}}


def test_text_lines(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("\ufefffirst\r\n\n  \nsecond <b>\\_\n[3] third".encode())
    found, counts = read(path)
    assert [c.messages[0]["content"] for c in found] == ["first", "second <b>\\_", "[3] third"]
    assert counts["BOM removed"] == 1
    assert counts["file broke off"] == 0


@pytest.mark.parametrize("text", ["[INST] hi\nthere", "{name} is here\nthere", '"Quoted," he said.\nthere'])
def test_text_that_starts_like_json(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    assert [c.messages[0]["content"] for c in read(path)[0]] == text.split("\n")


def test_text_by_name_takes_json_lines_literally(tmp_path):
    path = write(tmp_path, [GOOD], jsonl=True)
    assert read(path, "text")[0][0].messages[0]["content"] == json.dumps(GOOD)


@pytest.mark.parametrize(
    ("name", "raw", "format", "message"),
    [
        ("a.json", b"", "auto", "is empty"),
        ("a.json", b"\xef\xbb\xbf \n", "text", "is empty"),
        ("a.json", b"[]", "auto", "no usable conversation in 0 rows"),
        ("a.json", b'[{"id": "1", "conversations": []}]', "auto", r"in 1 rows \(1 empty\)"),
        ("a.json", b'[{"id": "1", "conve', "auto", "1 file broke off"),
        ("a.json", b'[{"text": "x"}]', "sharegpt", r"of format 'sharegpt' in 1 rows \(1 row of another shape\)"),
        ("a.csv", b"a,b\n1,2", "auto", "cannot tell the format of .*a.csv.*name it, one of sharegpt, ultrachat"),
        ("a.jsonl", b"not json", "auto", "cannot tell the format"),
        ("a.txt", b"not json", "sharegpt", "is not JSON or JSONL, which format 'sharegpt' needs"),
        ("a.json", '["é"]'.encode("utf-16"), "auto", "is UTF-16: save it as UTF-8"),
        ("a.txt", bytes(range(256)) * 8, "text", "is not a text file"),
        ("a.parquet", b"PAR1 mostly readable", "auto", "is not a text file"),
        ("a.txt", b"x", "parquet", "unknown format 'parquet' .* one of auto, sharegpt"),
    ],
)
def test_refused(tmp_path, name, raw, format, message):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(ElsiError, match=message) as err:
        read(path, format)
    assert "\n" not in str(err.value)


def test_missing_file_and_folder_are_refused_at_the_call(tmp_path):
    with pytest.raises(ElsiError, match="no file"):
        read_conversations(tmp_path / "none.json")
    with pytest.raises(ElsiError, match="is a folder"):
        read_conversations(tmp_path)


@pytest.mark.parametrize("jsonl", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path, jsonl):
    def peak(rows):
        path = write(tmp_path, [share(("human", f"{i} " + "long " * 400)) for i in range(rows)], jsonl=jsonl)
        tracemalloc.start()
        assert sum(1 for _ in read_conversations(path)) == rows
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(6000) < 1.2 * peak(1500)  # 12 MB against 3 MB


def test_counts_are_kept_and_printed():
    counts = Counts({"rows": 1200, "empty": 3, "file broke off": 1, "used": 2})
    assert counts.as_dict() == {
        "read": {"rows": 1200}, "repaired": {"file broke off": 1}, "skipped": {"empty": 3}, "sample": {"used": 2},
    }  # fmt: skip
    assert [line.split() for line in str(counts).splitlines()] == [
        ["read", "rows", "1,200"], ["repaired", "file", "broke", "off", "1"], ["skipped", "empty", "3"],
        ["sample", "used", "2"],
    ]  # fmt: skip
    assert json.loads(json.dumps(counts.as_dict())) == counts.as_dict()
    assert counts["never met"] == 0
    assert str(Counts()) == "nothing read"


@pytest.mark.real
def test_the_packaged_sharegpt():
    from elsi_lib import assets

    found, counts = 0, Counts()
    for _ in read_conversations(assets.fetch("sharegpt"), "sharegpt", counts):
        found += 1
    # Independent source: a bare count with ijson over the file, before any rule of this reader.
    assert (counts["rows"], counts["empty"], counts["starts with assistant"]) == (17_671, 126, 6_358)
    assert counts["file broke off"] == 1
    assert found == counts["conversations"] == 17_671 - sum(counts.as_dict()["skipped"].values())


@pytest.mark.real
def test_the_real_spec_bench():
    from elsi_lib import assets

    path = assets.available("spec-bench")
    if path is None:
        pytest.skip("no local copy of Spec-Bench (ELSI_ASSETS)")
    found, counts = read(path)
    assert len(found) == 480
    assert sum(len(c.messages) for c in found) == 560
    assert len({c.category for c in found}) == 13
    assert [c.id for c in found] == [str(i) for i in range(81, 561)]
    assert "skipped" not in counts.as_dict()
