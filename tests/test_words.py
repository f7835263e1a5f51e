"""Tables, sets and alternative texts as they are written."""

import re

from elsi_lib.report.words import braces, markdown_table, p_value, plain, spaced


def test_a_set_is_written_in_braces():
    assert braces("2 15 27") == braces([2, 15, 27]) == "{2, 15, 27}"
    assert braces("") == "{}"
    assert braces(spaced((2, 15, 27))) == "{2, 15, 27}" and spaced([]) == ""


def test_a_table_has_as_many_cells_in_every_line():
    text = markdown_table(("method", "layers", "tau"), [("ELSI", braces("1 2"), 1.7), ("none", "", "")], right=(2,))
    lines = text.splitlines()
    assert lines[1] == "|---|---|--:|" and len(lines) == 4
    assert {len(re.findall(r"\|", line)) for line in lines} == {4}


def test_an_alternative_text_has_no_markup():
    text = "**SmolLM2**: *wave*, $S_1$ at $K_\\mathrm{beam}$ and $\\rho$\n- see [table 2](#table2-differences)\n\n- −0.5 nats"
    assert plain(text) == "SmolLM2: wave, S_1 at K_beam and rho see table 2 −0.5 nats"


def test_a_p_value_is_never_written_as_zero():
    assert [p_value(p) for p in (0.5, 0.0104, 0.0096, 0.0049, 0.001, 0.0004, 0.0)] == [
        *("p = 0.50", "p = 0.01", "p = 0.010", "p = 0.005", "p = 0.001", "p < 0.001", "p < 0.001")
    ]
