"""The rows of tables 2 and 3: which layer sets get a draft, and which rows share one."""

from __future__ import annotations

import random
from dataclasses import dataclass

from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.selection import select

BASELINE = "EAGLE-3"
RANDOM_SETS = 2
# Row, method, m: the paper's rows, and EAGLE-3's rule as its code runs it.
_CHOSEN = (
    ("EAGLE-2", "eagle2", None),
    (BASELINE, "eagle3", None),
    ("EAGLE-3 (code)", "eagle3-code", None),
    ("ELSI m=1", "elsi", 1),
    ("ELSI m=2", "elsi", 2),
    ("ELSI m=3", "elsi", 3),
    ("ELSI-C m=2", "elsi-c", 2),
    ("ELSI-C m=3", "elsi-c", 3),
    ("lowest", "lowest", 3),
)


@dataclass(frozen=True)
class Row:
    """One row: its name, the layers its draft reads, and what else sets that draft apart."""

    method: str
    layers: tuple[int, ...]
    seed: int = 0  # of the draft's first weights
    norm_before_fc: str = "none"

    @property
    def draft(self) -> str:
        """Name of the draft that serves the row: rows of equal sets share one."""
        more = [f"seed{self.seed}"] * (self.seed != 0) + [self.norm_before_fc] * (self.norm_before_fc != "none")
        return ".".join(["-".join(map(str, self.layers)), *more])


def table_rows(fp: Fingerprint, seed: int = 0) -> list[Row]:
    """The rows of table 2 or 3 for one target, and three that tell how to read them.

    Beside the paper's methods: EAGLE-3 as its code runs; random triples, drawn with ``seed``, that no other row has; EAGLE-3's
    draft trained again from other first weights, whose distance to the first is the noise of training; and a norm before ``fc`` for
    EAGLE-3's set and ELSI's.

    Raises:
        ElsiError: a target too shallow for the rules.
    """
    rows = [Row(name, tuple(select(fp, method, m).layers)) for name, method, m in _CHOSEN]
    taken, draw = {row.layers for row in rows}, random.Random(seed)
    if fp.num_layers < 6:
        raise ElsiError(f"{fp.target} has {fp.num_layers} layers: too few to compare sets of three")
    for number in range(1, RANDOM_SETS + 1):
        while (layers := tuple(sorted(draw.sample(range(fp.num_layers), 3)))) in taken:
            pass
        taken.add(layers)
        rows.append(Row(f"random {number}", layers))
    by_name = {row.method: row.layers for row in rows}
    rows.append(Row(f"{BASELINE} (seed 1)", by_name[BASELINE], seed=1))
    rows += [Row(f"{name} norm", by_name[name], norm_before_fc="each") for name in (BASELINE, "ELSI m=3")]
    return rows
