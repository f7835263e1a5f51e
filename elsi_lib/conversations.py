r"""Conversations out of ShareGPT, UltraChat, Spec-Bench or a user's own file.

Files are streamed: memory holds one conversation at a time, whatever the size of the file. What real files get wrong
(roles and artefacts as in ShareGPT_V3_unfiltered_cleaned_split) has one outcome each,
counted in :class:`Counts`:

====================================================  =============================================================
oddity                                                outcome
====================================================  =============================================================
role human, user / gpt, chatgpt, bing, bard, ...      read as user / assistant
any other role                                        conversation skipped
no turns at all                                       conversation skipped
assistant turns before the first user turn            these turns dropped (repaired); skipped if nothing remains
two turns of one role in a row                        merged with a blank line (repaired); not in Spec-Bench
value null, missing or not a string                   conversation skipped
turn of white space only                              turn dropped (repaired)
id null or missing                                    the first 16 digits of the content key (repaired)
"Copy code" lines and labels ("pythonCopy code")      removed, the label kept (repaired); ShareGPT rows only
``\_`` and ``\*`` outside code and display math       unescaped (repaired); ShareGPT rows only
answer wrapped in a chat page's HTML                  turned into Markdown (repaired); ShareGPT rows only. Fenced code,
                                                      ``a < b``, ``List<int>`` and HTML somebody asked for stay
BOM, invalid UTF-8, lone surrogates, NUL              removed or replaced by U+FFFD (repaired)
JSON, JSONL, plain text                               told apart by content; UTF-16 and binary files are refused
line of a JSONL file that is not JSON                 line skipped
row of another shape than the format named            row skipped
file ends in mid-conversation                         what came before is kept, "file broke off"
JSON broken in the middle                             what came before is kept, "file unreadable from here on";
                                                      a file broken before its first conversation is refused
duplicates                                            read as they come; a sample takes them once, whatever their ids
nothing usable in the file                            refused: ElsiError with the counts
====================================================  =============================================================
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ijson

from elsi_lib.errors import ElsiError
from elsi_lib.repair import Stream, lines, repair_text, repaired_bytes

ROLES = {"user": "user", "human": "user", "system": "system", "assistant": "assistant", "gpt": "assistant",
         "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant"}  # fmt: skip
FORMATS = ("auto", "sharegpt", "ultrachat", "messages", "spec-bench", "prompts", "text")
_SECTIONS = {
    "read": ("rows", "starts with assistant", "conversations"),
    "repaired": (
        "BOM removed", "invalid UTF-8 replaced", "lone surrogate replaced", "NUL removed", "id missing",
        "leading assistant turns dropped", "turns of one role merged", "blank turns dropped", "Copy code removed",
        "escapes undone", "HTML stripped", "system turn merged", "file broke off", "file unreadable from here on",
    ),
    "skipped": (
        "empty", "unknown role", "value not text", "no user turn", "row of another shape", "line not JSON",
    ),
    "sample": (
        "duplicates", "sampled", "template refused", "too short", "reserve exhausted", "truncated", "asked", "used",
    ),
}  # fmt: skip
_SECTION = {label: section for section, labels in _SECTIONS.items() for label in labels}


class Counts(Counter):
    """What was read, repaired, skipped and used, by reason: ``counts["empty"]``; a label never met counts 0.

    Repairs inside conversations count conversations; BOM, UTF-8, surrogate and NUL repairs count occurrences.
    """

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Section (read, repaired, skipped, sample) -> label -> number; labels at zero are left out, order is fixed."""
        return {
            section: found
            for section, labels in _SECTIONS.items()
            if (found := {label: self[label] for label in labels if self[label]})
        }

    def __str__(self) -> str:
        rows = [(s, label, n) for s, found in self.as_dict().items() for label, n in found.items()]
        return "\n".join(f"{section:<9} {label:<32} {n:>9,}" for section, label, n in rows) or "nothing read"

    def in_line(self, *sections: str) -> str:
        """The same on one line, for error messages: ``12 empty, 3 line not JSON``."""
        found = [f"{n:,} {label}" for s, d in self.as_dict().items() if s in sections for label, n in d.items()]
        return ", ".join(found) or "nothing in it"


@dataclass(frozen=True)
class Conversation:
    """Turns as ``{"role": system|user|assistant, "content": str}``, repaired; `category` is Spec-Bench's, else ""."""

    id: str
    messages: tuple[dict[str, str], ...]
    category: str = ""

    @cached_property
    def key(self) -> str:
        """sha256 (hex) of the messages: names the content, whatever file, place, id or JSON spelling it came with."""
        return _key(self.messages)


def _key(messages) -> str:
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _layout(path: Path, format: str) -> str:
    """ "array", "objects" (values one after the other), "lines" (JSONL) or "text", from the first MiB of the file."""
    with path.open("rb") as file:
        raw = file.read(1 << 20)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ElsiError(f"{path} is UTF-16: save it as UTF-8")
    text = raw.decode("utf-8-sig", "replace").replace("\0", "").lstrip()
    if not text:
        raise ElsiError(f"{path} is empty: no conversation in it")
    # A damaged text has a few of these; an archive, an image or a Parquet file has them everywhere.
    if raw[:4] == b"PAR1" or raw[:2] == b"\x1f\x8b" or raw.count(b"\0") + text.count("\ufffd") > len(raw) // 10 + 8:
        raise ElsiError(f"{path} is not a text file: give JSON, JSONL or plain text in UTF-8")
    if format == "text":
        return "text"
    if re.match(r'\[\s*(?:["{\]]|\Z)', text):
        return "array"
    first, _, rest = text.partition("\n")
    if text[0] in '{"':
        try:
            json.loads(first, strict=False)
            return "lines"
        except (ValueError, RecursionError):
            # A damaged or very long first line of JSONL, an object printed over several lines, or quoted prose.
            if re.match(r'\s*[{"]', rest) and text[0] == "{" and not first.rstrip().endswith(("{", "[", ",", ":")):
                return "lines"
            if text[0] == "{" and re.match(r'\{\s*(?:"|\Z)', text):
                return "objects"
    if format == "auto" and path.suffix.lower() in ("", ".txt", ".text", ".md"):
        return "text"
    known = ", ".join(FORMATS[1:])
    if format != "auto":
        raise ElsiError(f"{path} is not JSON or JSONL, which format {format!r} needs; formats: {known}")
    raise ElsiError(f"cannot tell the format of {path}, it starts with {text[:40]!r}: name it, one of {known}")


def _rows(path: Path, format: str, counts: Counter, tick) -> Iterator[Any]:
    """The parsed rows; breaks of the file are counted, not raised."""
    layout = _layout(path, format)
    chunks = repaired_bytes(path, counts, escapes=layout != "text", tick=tick)
    if layout in ("array", "objects"):
        prefix, several = ("item", False) if layout == "array" else ("", True)
        try:
            yield from ijson.items(Stream(chunks), prefix, multiple_values=several)
        except ijson.JSONError as err:
            # The one kind of break that an interrupted download leaves; anything else is damage inside the file.
            ended = "premature EOF" in str(err) or "ncomplete" in str(err) and "lexical" not in str(err)
            counts["file broke off" if ended else "file unreadable from here on"] += 1
        return
    for line, ended in lines(chunks):
        if not line.strip():
            continue
        if layout == "text":
            yield line
            continue
        try:
            yield json.loads(line, strict=False)
        except (ValueError, RecursionError):
            counts["rows"] += ended
            counts["line not JSON" if ended else "file broke off"] += 1


def _turns(row: Any, format: str) -> tuple[str, list] | None:
    """(format, raw turns as (role, value)) of a row, or None where it has not the shape that `format` asks for."""

    def pick(name: str, *aliases: str) -> bool:
        return format in ("auto", name, *aliases)

    if isinstance(row, str):
        return ("prompts", [("user", row)]) if pick("prompts", "text") else None
    if not isinstance(row, dict):
        return None
    for field, name, aliases in (("conversations", "sharegpt", ()), ("messages", "messages", ("ultrachat",))):
        if field in row and pick(name, *aliases):
            turns = row[field]
            if not isinstance(turns, list | None):
                return None
            return name, [
                (t.get("from", t.get("role")), t.get("value", t.get("content"))) if isinstance(t, dict) else ("", t)
                for t in turns or []
            ]
    if isinstance(row.get("data"), list) and pick("ultrachat"):
        return "ultrachat", [(("user", "assistant")[i % 2], value) for i, value in enumerate(row["data"])]
    if isinstance(row.get("turns"), list) and pick("spec-bench"):
        return "spec-bench", [("user", value) for value in row["turns"]]
    if pick("prompts"):
        for field in ("prompt", "text"):
            if field in row:
                return "prompts", [("user", row[field])]
    return None


def merged(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Neighbours of one role joined by a blank line."""
    out: list[dict[str, str]] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"]:
            out[-1] = {"role": message["role"], "content": out[-1]["content"] + "\n\n" + message["content"]}
        else:
            out.append(dict(message))
    return out


def _conversation(row: Any, format: str, counts: Counter) -> Conversation | None:
    """The repaired conversation of a row, or None; either way counted. See the table at the top of the module."""
    counts["rows"] += 1
    found = _turns(row, format)
    if found is None:
        counts["row of another shape"] += 1
        return None
    name, turns = found
    if not turns:
        counts["empty"] += 1
        return None
    roles = [ROLES.get(role.strip().lower()) if isinstance(role, str) else None for role, _ in turns]
    counts["starts with assistant"] += roles[0] == "assistant"
    if not all(isinstance(value, str) for _, value in turns):
        counts["value not text"] += 1
        return None
    if not all(roles):
        counts["unknown role"] += 1
        return None
    done: set[str] = set()
    texts = [repair_text(value, name == "sharegpt", done) for _, value in turns]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True) if text]
    if len(messages) < len(turns):
        done.add("blank turns dropped")
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        counts["no user turn"] += 1
        return None
    kept = [m for i, m in enumerate(messages) if i > first or m["role"] != "assistant"]
    if len(kept) < len(messages):
        done.add("leading assistant turns dropped")
    if name != "spec-bench":  # there a second turn waits for the answer to the first
        messages = merged(kept)
        if len(messages) < len(kept):
            done.add("turns of one role merged")
    else:
        messages = kept
    meta = row if isinstance(row, dict) else {}
    id = meta.get("id", meta.get("question_id", meta.get("prompt_id")))
    if id in (None, "") and name in ("sharegpt", "ultrachat", "spec-bench"):  # others rarely have one
        done.add("id missing")
    counts.update(done)
    counts["conversations"] += 1
    category = meta.get("category")
    return Conversation(
        id=_key(messages)[:16] if id in (None, "") else str(id),
        messages=tuple(messages),
        category=category if isinstance(category, str) else "",
    )


def check_file(path: str | Path, format: str) -> Path:
    path = Path(path)
    if format not in FORMATS:
        raise ElsiError(f"unknown format {format!r} for {path}: one of {', '.join(FORMATS)}")
    if path.is_dir():
        raise ElsiError(f"{path} is a folder: name one file in it")
    if not path.is_file():
        raise ElsiError(f"no file {path}")
    return path


def read_conversations(
    path: str | Path, format: str = "auto", counts: Counts | None = None, *, tick: Callable[[int], Any] | None = None
) -> Iterator[Conversation]:
    """Stream the usable conversations of a file, in file order, duplicates included.

    `format` is "auto" or one of: "sharegpt" (``conversations`` of from/value), "ultrachat" (``messages`` of
    role/content, or ``data``, a list of strings), "messages" (role/content), "spec-bench" (question_id, category,
    turns: each turn a user message), "prompts" (rows that are a string, ``{"prompt": ...}`` or ``{"text": ...}``),
    "text" (one prompt per non-empty line, taken literally). "auto" decides by content, row by row.
    `counts` is filled while reading; `tick(bytes)` is called after each piece read from the disk.

    Raises ElsiError: unknown format, no such file, a folder, a file that is neither JSON, JSONL nor text, a format that
    cannot be told; and, at the end of the file, if not one conversation was usable.
    """
    path = check_file(path, format)
    counts = Counts() if counts is None else counts

    def conversations() -> Iterator[Conversation]:
        before = counts["conversations"]
        for row in _rows(path, format, counts, tick):
            if conversation := _conversation(row, format, counts):
                yield conversation
        if counts["conversations"] == before:
            kind = "" if format == "auto" else f" of format {format!r}"
            why = Counts({k: n for k, n in counts.items() if _SECTION[k] == "skipped" or k.startswith("file ")})
            raise ElsiError(f"{path}: no usable conversation{kind} in {counts['rows']:,} rows ({why.in_line('skipped', 'repaired')})")

    return conversations()
