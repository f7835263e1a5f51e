"""Writing files so that a cut leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elsi_lib.errors import ElsiError

_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` when the block ends, and is removed if it fails.

    Folders are made as needed. The file gets the permissions of any new file, whatever the writer gave it (safetensors writes
    files that only their owner may read).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.part")  # of this writer alone: two threads of a process may write
    try:
        yield part
        part.chmod(0o666 & ~_UMASK)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class Lines:
    """Results by dialogue, a line of JSON each, appended as they come; the first line says what they belong to."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.done = path, {}
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [self._parsed(line, number) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
        if whole and whole[0] != key:
            raise ElsiError(f"{path} holds results of another run: delete it to make them again")
        self.done = {line["id"]: line["rows"] for line in whole[1:]}
        if len(whole) < len(lines) or not whole:  # a half-written last line, or a new file
            with replaced(path) as part:
                part.write_bytes(b"".join(lines[: len(whole)]) if whole else _line(key))

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one too
            found = None
        if not isinstance(found, dict) or number > 1 and not {"id", "rows"} <= found.keys():
            raise ElsiError(f"{self.path}, line {number}: damaged; delete the file to make its results again")
        return found

    def add(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self.path.open("ab") as file:
            file.write(_line({"id": name, "rows": rows}))
        self.done[name] = rows


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
