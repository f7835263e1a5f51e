"""Let docstrings that are written for a terminal pass through reStructuredText unharmed.

``||M[l+1] - M[l]||`` is a norm, not a substitution, and `a name` in single backquotes is code.
"""

import re

_CODE = re.compile(r"(``.+?``|:[a-z:]+:`[^`]+`)")
_SINGLE = re.compile(r"(?<![`:\w])`([^`]+)`(?![`_])")


def _plain(line: str) -> str:
    parts = _CODE.split(line)
    parts[::2] = [_SINGLE.sub(r"``\1``", part.replace("|", r"\|")) for part in parts[::2]]
    return "".join(parts)


def process(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = [line if line.lstrip().startswith(">>>") else _plain(line) for line in lines]


def setup(app) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
