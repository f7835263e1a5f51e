"""Progress bars where somebody watches, and silence in logs and notebooks' outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def watched() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def track(what: str, total: int) -> Callable[[Iterable], Iterable]:
    """A wrapper of an iterable of ``total`` items that shows a bar with count, time and time left while it is consumed."""

    def wrap(items: Iterable) -> Iterable:
        if not watched():
            yield from items
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
            yield from progress.track(items, total=total, description=what)

    return wrap
