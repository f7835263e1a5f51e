"""Bytes and texts: what is repaired, and what has to survive."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elsi_lib import repair


def repaired(tmp_path, raw, escapes=True):
    path = tmp_path / "file"
    path.write_bytes(raw)
    counts = Counter()
    return b"".join(repair.repaired_bytes(path, counts, escapes)), counts


@pytest.mark.parametrize(
    ("raw", "expected", "label", "number"),
    [
        (b"\xef\xbb\xbfab", b"ab", "BOM removed", 1),
        (b"a\0b\0", b"ab", "NUL removed", 2),
        (b"a \xff\xfe b", "a \ufffd\ufffd b".encode(), "invalid UTF-8 replaced", 2),
        (b"caf\xe9 ol\xe9", "caf\ufffd ol\ufffd".encode(), "invalid UTF-8 replaced", 2),
        (rb'"\ud83d x"', rb'"\ufffd x"', "lone surrogate replaced", 1),
        (rb'"\uDE00"', rb'"\ufffd"', "lone surrogate replaced", 1),
        (rb'"\ud83d\u0041"', rb'"\ufffd\u0041"', "lone surrogate replaced", 1),
    ],
)
def test_bytes_are_repaired_and_counted(tmp_path, raw, expected, label, number):
    out, counts = repaired(tmp_path, raw)
    assert out == expected
    assert counts == {label: number}


@pytest.mark.parametrize("raw", [rb'"\ud83d\ude00"', rb'"\\ud83d"', rb'"\\\\ud83d"', "\ufffd ä 漢".encode(), b""])
def test_sound_bytes_stay(tmp_path, raw):
    assert repaired(tmp_path, raw) == (raw, Counter())


def test_escaped_backslash_before_a_lone_surrogate(tmp_path):
    assert repaired(tmp_path, rb'"\\\ud83d"')[0] == rb'"\\\ufffd"'


def test_plain_text_keeps_what_looks_like_an_escape(tmp_path):
    assert repaired(tmp_path, rb"say \ud83d", escapes=False) == (rb"say \ud83d", Counter())


@given(text=st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"])), size=st.integers(1, 9))
def test_chunks_split_no_character_and_no_line(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("chunks") / "file"
    path.write_bytes(text.encode())
    counts = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "_CHUNK", size)
        assert b"".join(repair.repaired_bytes(path, counts, True)).decode() == text
        lines = list(repair.lines(repair.repaired_bytes(path, counts, True)))
    assert counts == {}
    assert "\n".join(line for line, _ in lines) == text.removesuffix("\n")
    assert all(ended for _, ended in lines[:-1])
    if lines:
        assert lines[-1][1] == text.endswith("\n")


@pytest.mark.parametrize("chunk", range(1, 20))
def test_an_escape_is_found_wherever_the_chunk_ends(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(repair, "_CHUNK", chunk)
    out, counts = repaired(tmp_path, rb'["a, \ud83d\ude00 \ud83d, \\ud83d"]')
    assert out == rb'["a, \ud83d\ude00 \ufffd, \\ud83d"]'
    assert counts == {"lone surrogate replaced": 1}


PRE = (
    '<pre><div class="bg-black"><div class="flex"><span>python</span><button>Copy code</button></div>'
    '<div><code class="!whitespace-pre hljs language-python"><span class="hljs-keyword">if</span> a &lt; b:\n'
    "\n\n    x = List&lt;int&gt;\n</code></div></div></pre>"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<div class="markdown prose w-full"><p>One</p><p>Two</p></div>', "One\n\nTwo"),
        ("<p>a &amp; <strong>b</strong> and <code>c_d</code></p>", "a & **b** and `c_d`"),
        ("<p>x</p>\n<ul>\n<li>one</li>\n<li>two</li>\n</ul>", "x\n\n- one\n- two"),
        ("<ol><li>one</li><li>two</li></ol>", "1. one\n2. two"),
        ("<h2>Head</h2><p>Body</p>", "## Head\n\nBody"),
        ("<p>use a < b and List<int> here</p>", "use a < b and List<int> here"),
        (f'<div class="prose"><p>So:</p>{PRE}</div>', "So:\n\n```python\nif a < b:\n\n\n    x = List<int>\n```"),
        (
            '<div class="prose"><p>So:</p>\n```\nMap<K, V> m; // <p>a</p>\n```\n<p>done</p></div>',
            "So:\n\n```\nMap<K, V> m; // <p>a</p>\n```\n\ndone",
        ),
    ],
)
def test_a_chat_page_becomes_markdown(text, expected):
    assert repair.strip_html(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a < b and c > d",
        "List<int> and Map<String, List<int>>",
        "```html\n<p>code</p>\n```",
        "Use <p>this</p> tag",
        '<div class="modal fade" id="ok"><p>asked for</p></div>',
        '<p style="color: red">asked for</p>',
        '<p>asked for <input name="q"></p>',
        "<https://example.org/a>",
        '<div class="prose">never closed',
        "<QuestsScreen>:\nid: quest",
    ],
)
def test_other_angle_brackets_survive(text):
    done = set()
    assert repair.repair_text(text, True, done) == text
    assert done == set()


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("python\nCopy code\nx = 1", "python\nx = 1", "Copy code removed"),
        ("Do:\n\npythonCopy code\nx = 1", "Do:\n\npython\nx = 1", "Copy code removed"),
        ("sqlCopy codeFROM nginx", "sql\nFROM nginx", "Copy code removed"),
        ("```\nc++Copy code\nint x;\n```", "```\nc++\nint x;\n```", "Copy code removed"),
        ("play\\_again \\*now\\*", "play_again *now*", "escapes undone"),
        ("\\_\\_init\\_\\_", "__init__", "escapes undone"),
        ("a\0b", "ab", "NUL removed"),
    ],
)
def test_artefacts_are_undone(text, expected, name):
    done = set()
    assert repair.repair_text(text, True, done) == expected
    assert done == {name}


@pytest.mark.parametrize(
    "text",
    [
        "Copy code from here to there",
        "Press Copy code",
        "```\nplay\\_again\n```",
        "inline `a\\_b` code",
        "$$a\\_b$$ and \\[c\\_d\\] and \\(e\\_f\\)",
        "C:\\_temp",
        "two \\\\_ backslashes",
        "\\[x\\] \\{y\\}",
    ],
)
def test_text_that_only_looks_like_an_artefact_stays(text):
    done = set()
    assert repair.repair_text(text, True, done) == text
    assert done == set()


def test_a_users_own_text_keeps_its_markup():
    text = "<p>my\\_own</p>\nCopy code\nx"
    assert repair.repair_text(text, False, set()) == text


@given(st.text(st.sampled_from("<>/pdivolcode `\\_*\n$ &lt;ab\"'=\ue000\ue0010")))
def test_repair_never_fails_and_settles(text):
    once = repair.repair_text(f"<p>{text}</p>", True, set())
    assert isinstance(once, str)
    assert repair.repair_text(text, False, set()) == text.strip()
