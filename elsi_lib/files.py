"""Writing files so that a cut leaves the old one or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.chmod(0o666 & ~_UMASK)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
