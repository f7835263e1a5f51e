"""How a set, a table and a sentence are written: nothing here computes a number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def braces(layers: str | Iterable[int]) -> str:
    """``{2, 15, 27}`` of ``2 15 27`` or of numbers."""
    return "{" + ", ".join(map(str, layers.split() if isinstance(layers, str) else layers)) + "}"


def spaced(layers: Iterable[int]) -> str:
    """``2 15 27``, as tables on disk hold a set."""
    return " ".join(map(str, layers))


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[Any]], right: Iterable[int] = ()) -> str:
    """A Markdown table; columns ``right`` are aligned to the right."""
    heads, right = list(heads), set(right)
    rule = "|".join("--:" if i in right else "---" for i in range(len(heads)))
    lines = ["| " + " | ".join(heads) + " |", f"|{rule}|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def p_value(p: float) -> str:
    """``p = 0.03``, ``p = 0.004``, ``p < 0.001``: two digits behind the point, three below 0.01."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.{3 if p < 0.01 else 2}f}"


def plain(markdown: str) -> str:
    """Markdown as one line for an alternative text: no emphasis, no list marks, no math signs; of a link its words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"(?m)^- ", "", text)
    text = re.sub(r"\\(?:mathrm\{(\w+)\}|(\w+))", lambda found: found.group(1) or found.group(2), text)
    return " ".join(re.sub(r"[*$]", "", text).split())
