"""Repairs of text files: bytes into valid UTF-8, and the artefacts of the chat page that ShareGPT was copied from.

What is repaired, and what is left alone, is in the table of :mod:`elsi_lib.conversations`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_CHUNK = 1 << 18  # bytes
_LONE = re.compile(rb"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2})")


def repaired_bytes(path: Path, counts: Counter, escapes: bool, tick: Callable[[int], Any] | None = None):
    """Chunks of the file as valid UTF-8 without BOM and NUL; with `escapes`, without lone surrogates in JSON strings."""

    def lone(match: re.Match) -> bytes:
        if len(match[2]) == 12:
            return match[0]
        counts["lone surrogate replaced"] += 1
        return match[1] + rb"\ufffd"

    kept, first = b"", True
    with path.open("rb") as file:
        while True:
            new = file.read(_CHUNK)
            if tick:
                tick(len(new))
            kept += new
            # Cut after an ASCII byte that is part of no escape, so neither a character nor an escape is split.
            cut = max(kept.rfind(b) for b in (b" ", b",", b"\n")) + 1 if new else len(kept)
            chunk, kept = kept[:cut], kept[cut:]
            if first and chunk:
                first = False
                if chunk.startswith(b"\xef\xbb\xbf"):
                    chunk = chunk[3:]
                    counts["BOM removed"] += 1
            if b"\0" in chunk:
                counts["NUL removed"] += chunk.count(b"\0")
                chunk = chunk.replace(b"\0", b"")
            try:
                chunk.decode()
            except UnicodeDecodeError:
                text = chunk.decode("utf-8", "replace")
                counts["invalid UTF-8 replaced"] += text.count("\ufffd") - chunk.count(b"\xef\xbf\xbd")
                chunk = text.encode()
            if escapes and (b"\\ud" in chunk or b"\\uD" in chunk):
                chunk = _LONE.sub(lone, chunk)
            if chunk:
                yield chunk
            if not new:
                return


class Stream:
    """The chunks as a file object for ijson: `read` gives whole chunks, which ijson accepts."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks = chunks

    def read(self, size: int = -1) -> bytes:
        return next(self.chunks, b"") if size else b""


def lines(chunks: Iterator[bytes]) -> Iterator[tuple[str, bool]]:
    """Lines without their end, and whether the line was ended at all (a last line may have been cut off)."""
    parts: list[bytes] = []
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield (b"".join(parts) + line).decode(), True
            parts = []
        parts.append(rest)
    if any(parts):
        yield b"".join(parts).decode(), False


_KEEP = r"```.*?(?:```|\Z)|`[^`\n]+`|\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)"
_ESCAPE = re.compile(rf"({_KEEP})|(?<![\\:])\\([_*])", re.S)
_FENCE = re.compile(r"```.*?(?:```|\Z)", re.S)
_COPY = re.compile(r"^([A-Za-z+#-]{1,15})?Copy code(?:[ \t]*(?:\n|\Z)|(?<=\SCopy code)(?=\S))", re.M)
_WRAPPED = re.compile(
    r'\s*(?:<(?:p|ol|ul|h[1-6]|blockquote|pre)>|<div class="[^"]*(?:markdown|prose|whitespace-pre)[^"]*">)'
    r".*</(?:p|ol|ul|h[1-6]|blockquote|pre|div)>\s*\Z",
    re.S,
)


class _Prose(HTMLParser):
    """HTML of a chat page -> Markdown. Tags it does not know are kept as text, so `List<int>` survives."""

    SILENT = {"div", "span", "tbody", "thead", "table", "button", "svg", "path", "polyline", "rect"}
    BREAKS = {"p": "\n\n", "ul": "\n\n", "ol": "\n\n", "blockquote": "\n\n", "tr": "\n", "br": "\n", "hr": "\n\n"}
    MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*", "a": "", "td": " ", "th": " "}
    # A page's own attributes; `id`, `style`, `onclick` and the like mean HTML that somebody asked for.
    PLAIN = {"class", "href", "target", "rel", "start", "xmlns", "viewbox", "fill", "stroke", "d", "points"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.lists: list[int | None] = []
        self.pre, self.language, self.asked_for = -1, "", False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "pre":
            self.pre, self.language = len(self.out), ""
        elif tag == "code" and self.pre >= 0:
            del self.out[self.pre :]  # the header of the code block: language and copy button
            found = re.search(r"language-([\w+#-]+)", dict(attrs).get("class") or "")
            self.language = found[1] if found else ""
        elif tag == "code":
            self.out.append("`")
        elif re.fullmatch("h[1-6]", tag):
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag == "li":
            number = self.lists[-1] if self.lists else None
            if number is not None:
                self.lists[-1] = number + 1
            self.out.append("\n- " if number is None else f"\n{number}. ")
        elif tag in self.BREAKS or tag in self.MARKS or tag in self.SILENT:
            self.out.append(self.BREAKS.get(tag) or self.MARKS.get(tag, ""))
            if tag in ("ul", "ol"):
                self.lists.append(1 if tag == "ol" else None)
        else:
            self.out.append(self.get_starttag_text())
        self.asked_for |= any(name not in self.PLAIN for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" and self.pre >= 0:
            code = "".join(self.out[self.pre :]).strip("\n")
            self.out[self.pre :] = [f"\n\n```{self.language}\n{code}\n```\n\n"]
            self.pre = -1
        elif tag == "code":
            self.out.append("" if self.pre >= 0 else "`")
        elif re.fullmatch("h[1-6]|p|ul|ol|blockquote", tag):
            self.out.append("\n\n")
            if tag in ("ul", "ol") and self.lists:
                self.lists.pop()
        elif tag in self.MARKS:
            self.out.append(self.MARKS[tag])
        elif tag not in self.SILENT and tag not in self.BREAKS and tag not in ("li", "pre"):
            self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        # Line ends between tags are layout, not text, except inside code.
        self.out.append(data if self.pre >= 0 or data.strip() or "\n" not in data else "")


def strip_html(text: str) -> str:
    """Markdown of a text that is wrapped in a chat page's markup as a whole; any other text as it is."""
    if "<" not in text or not _WRAPPED.match(text):
        return text
    fences = _FENCE.findall(text)
    numbers = iter(range(len(fences)))
    parser = _Prose()
    parser.feed(_FENCE.sub(lambda _: f"\ue000{next(numbers)}\ue001", text))  # private use: no parser touches them
    parser.close()
    if parser.asked_for:
        return text
    out = re.sub(rf"({_FENCE.pattern})|[ \t]*\n(?:[ \t]*\n)+", lambda m: m[1] or "\n\n", "".join(parser.out), flags=re.S)
    return re.sub("\ue000(\\d+)\ue001", lambda m: fences[int(m[1])] if int(m[1]) < len(fences) else m[0], out).strip()


def repair_text(text: str, artefacts: bool, done: set[str]) -> str:
    """One turn's text, repaired; the names of the repairs are added to `done`."""
    steps: list[tuple[str, Callable[[str], str]]] = []
    if "\0" in text:
        steps.append(("NUL removed", lambda t: t.replace("\0", "")))
    if artefacts:
        if "<" in text:
            steps.append(("HTML stripped", strip_html))
        if "Copy code" in text:
            steps.append(("Copy code removed", lambda t: _COPY.sub(lambda m: m[1] + "\n" if m[1] else "", t)))
        if "\\_" in text or "\\*" in text:
            steps.append(("escapes undone", lambda t: _ESCAPE.sub(lambda m: m[1] or m[2], t)))
    for name, step in steps:
        if (changed := step(text)) != text:
            done.add(name)
            text = changed
    return text.replace("\r\n", "\n").strip()
