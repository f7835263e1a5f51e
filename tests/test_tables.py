import itertools
import math

import numpy as np
import pandas as pd
import pytest
from synthetic import fingerprint

from elsi_lib.errors import ElsiError
from elsi_lib.report import findings, tables
from elsi_lib.selection import stability

# Every value under "Reported values" of what is known of the paper, typed again by hand: (target, quantity) -> value, value_to.
REPORTED = {
    ("Qwen3-4B", "shape of the wave"): ("high, low, high", ""),
    ("Qwen3-4B", "layer of the peak"): ("28", ""),
    ("Qwen3-4B", "compartments"): ("0-6 7-28 29-35", ""),
    ("Qwen3-4B", "CKA between layers"): ("several transitions, two large middle compartments", ""),
    ("Llama-3.1-8B", "shape of the wave"): ("high first layer, drop, late peak", ""),
    ("Llama-3.1-8B", "layer of the peak"): ("27", ""),
    ("Llama-3.1-8B", "CKA between layers"): ("near 1 everywhere but at the first and last layers", ""),
    ("Qwen3-4B", "EAGLE3 layers"): ("2 18 33", ""),
    ("Qwen3-4B", "EAGLE3 S_1"): ("0.441", ""),
    ("Llama-3.1-8B", "EAGLE3 S_1"): ("0.687", ""),
    ("Qwen3-4B", "ELSI m=3 layers"): ("5 23 35", ""),
    ("Qwen3-4B", "ELSI m=3 S_1"): ("0.627", ""),
    ("Llama-3.1-8B", "ELSI m=3 S_1"): ("0.910", ""),
    ("Qwen3-4B", "ELSI m=1 layers"): ("28", ""),
    ("Qwen3-4B", "negative control layers"): ("0 1 35", ""),
    ("Qwen3-4B", "variance between prompts, filter on vs off, early"): ("-48.4", ""),
    ("Qwen3-4B", "variance between prompts, filter on vs off, middle"): ("-45.8", ""),
    ("Qwen3-4B", "variance between prompts, filter on vs off, late"): ("-35.6", ""),
    ("Qwen3-4B", "tau EAGLE2, 30 nodes, T=0"): ("4.00", ""),
    ("Qwen3-4B", "tau EAGLE3, 30 nodes, T=0"): ("4.20", ""),
    ("Qwen3-4B", "tau ELSI m=1, 30 nodes, T=0"): ("4.24", ""),
    ("Qwen3-4B", "tau ELSI m=3, 30 nodes, T=0"): ("4.29", ""),
    ("Qwen3-4B", "tau negative control, 30 nodes, T=0"): ("4.04", ""),
    ("Qwen3-4B", "tau EAGLE3, 60 nodes, T=0"): ("4.48", ""),
    ("Qwen3-4B", "tau ELSI m=3, 60 nodes, T=0"): ("4.57", ""),
    ("Llama-3.1-8B", "tau EAGLE2, 60 nodes, T=0"): ("4.66", ""),
    ("Llama-3.1-8B", "tau EAGLE3, 60 nodes, T=0"): ("4.89", ""),
    ("Llama-3.1-8B", "tau ELSI m=1, 60 nodes, T=0"): ("4.84", ""),
    ("Qwen3-4B", "average gain in tau, ELSI m=3 over EAGLE3", "%"): ("1.6", "2.2"),
    ("Qwen3-4B", "average gain in tau, ELSI m=3 over EAGLE3", "tokens"): ("0.085", ""),
    ("Qwen3-4B", "average gain in tau, ELSI m=3 over EAGLE2"): ("6.1", "7.3"),
    ("Qwen3-4B", "average gain in tau, ELSI m=1 over EAGLE3"): ("0.01", "0.04"),
    ("Llama-3.1-8B", "average gain in tau, ELSI m=1 over EAGLE2"): ("2.8", "4.9"),
    ("Llama-3.1-8B", "tau of ELSI m=1 as a share of EAGLE3's"): ("99", ""),
    ("Llama-3.1-8B", "average gain in tau, ELSI m=3 over EAGLE3"): ("-1.0", ""),
    ("Llama-3.1-8B", "spread of the average tau of ELSI m=1, 2, 3"): ("0.017", ""),
    ("Qwen3-4B", "gain in tau by task, ELSI m=3 over EAGLE3, translation"): ("2.6", "5.6"),
    ("Qwen3-4B", "gain in tau by task, ELSI m=3 over EAGLE3, summarization"): ("2.1", "4.2"),
    ("Qwen3-4B", "gain in tau by task, ELSI m=3 over EAGLE3, STEM"): ("2.4", "3.9"),
    ("Llama-3.1-8B", "gain in tau by task, T=1, roleplay"): ("4.7", "5.9"),
    ("Llama-3.1-8B", "gain in tau by task, T=1, coding"): ("3.0", "3.3"),
    ("Llama-3.1-8B", "gain in tau by task, T=1, writing"): ("losses", ""),
}
FP = fingerprint(layers=9, prompts=7)
TABLE = tables.table1(FP)


def test_reported_values_are_exactly_what_is_known():
    values = tables.reported()
    rows = {}
    for row in values.itertuples():
        key = (row.target, row.quantity)
        rows[key if key in REPORTED else (*key, row.unit)] = (row.value, row.value_to)
    assert rows == REPORTED and len(values) == len(REPORTED)


def test_every_reported_value_names_its_source():
    values = tables.reported()
    assert values["source"].str.contains("arXiv 2610.12939").all()
    assert list(values.columns) == ["target", "artefact", "quantity", "value", "value_to", "unit", "note", "source"]
    assert set(values["target"]) == set(tables.REPORTED_TARGETS)
    conflict = values[values["quantity"].str.contains("negative control, 30")]
    assert "called the worst" in conflict["note"].iloc[0]  # the disagreement of the sources stands beside the value


def test_what_is_not_known_is_not_made_up():
    assert tables.reported_value("Qwen3-4B", "EAGLE3 S_1") == "0.441"
    with pytest.raises(ElsiError, match="ELSI m=2 S_1 for Qwen3-4B is not known"):
        tables.reported_value("Qwen3-4B", "ELSI m=2 S_1")
    assert tables.reported_variance_changes() == {"early": -48.4, "middle": -45.8, "late": -35.6}
    rows = tables.reported_rows()
    assert set(rows["origin"]) == {"reported"} and list(rows.columns) == list(tables.COLUMNS)
    known = {(r.target, r.method): (r.layers, r.entropy) for r in rows.itertuples()}
    assert known["Qwen3-4B", "ELSI m=3"] == ("5 23 35", 0.627)
    assert known["Llama-3.1-8B", "ELSI m=3"] == ("", 0.910)
    assert math.isnan(known["Qwen3-4B", "ELSI m=1"][1]) and math.isnan(known["Qwen3-4B", "negative control"][1])
    assert rows[["rank", "regret", "stability", "redundancy"]].isna().all(axis=None)


def test_the_rows_of_table_1():
    layers = TABLE.set_index("method")["layers"]
    assert layers["EAGLE2"] == "8" and layers["EAGLE3 as printed"] == "2 4 6" and layers["EAGLE3 as its code runs"] == "1 3 5"
    assert layers["last 3"] == "6 7 8" and layers["uniform"] == "1 4 7"
    assert list(TABLE["method"]) == [label for label, _, _ in tables.ROWS]


def test_the_columns_of_table_1_by_hand():
    def entropy(layers):
        p = np.linalg.eigvalsh(FP.grams[list(layers)].sum(0).numpy()).clip(0)
        p = p[p > 0] / p.sum()
        return -(p * np.log(p)).sum()

    M = FP.cka().numpy()
    for row in TABLE.itertuples():
        layers = tuple(map(int, row.layers.split()))
        every = [entropy(s) for s in itertools.combinations(range(9), len(layers))]
        own = entropy(layers)
        assert row.entropy == pytest.approx(own, abs=1e-12) and row.sets == len(every) and row.m == len(layers)
        assert row.rank == 1 + sum(value > own + 1e-12 for value in every)
        assert row.regret == pytest.approx(max(every) - own, abs=1e-12)
        pairs = [M[pair] for pair in itertools.combinations(layers, 2)]
        assert row.redundancy == pytest.approx(np.mean(pairs)) if pairs else math.isnan(row.redundancy)


def test_only_searches_have_a_stability():
    searched = TABLE[TABLE["method"].str.contains("ELSI|exhaustive|lowest")]
    assert searched["stability"].between(0, 1).all() and (searched["jaccard"] >= searched["stability"]).all()
    assert (searched["replicates"] == len(FP.bootstrap)).all()
    for row in searched.itertuples():
        method = {"exhaustive": "exhaustive", "lowest": "lowest", "ELSI": "elsi", "ELSI-C": "elsi-c"}[row.method.split()[0]]
        held = stability(FP, method, row.m)
        assert (row.stability, row.jaccard) == pytest.approx((held.share, held.jaccard))
    assert TABLE.drop(searched.index)["stability"].isna().all()
    assert tables.table1(fingerprint(bootstrap=0))["stability"].isna().all()


def test_a_shallow_target_leaves_out_the_rules_that_collide():
    table = tables.table1(fingerprint(layers=4))
    assert "EAGLE3 as printed" not in set(table["method"]) and "ELSI m=3" in set(table["method"])
    assert findings.selections(table).values["table1_elsi3"] > 0
    one = tables.table1(fingerprint(layers=2))
    assert "ELSI m=3" not in set(one["method"]) and "fewer than three layers" in findings.selections(one).text


def test_markdown_keeps_measured_and_reported_apart():
    text = tables.table1_markdown(pd.concat([TABLE, tables.reported_rows()]))
    measured, reported = text.split("**The paper's own targets**, reported, not measured here")
    assert "0.627" not in measured and "{5, 23, 35}" not in measured
    assert "| Qwen3-4B | ELSI m=3 | {5, 23, 35} | 0.627 |" in reported
    assert "| Qwen3-4B | ELSI m=1 | {28} | not known |" in reported
    first = TABLE.iloc[0]
    assert f"| EAGLE2 | {{8}} | {first['entropy']:.4f} | {first['rank']} of 9 |" in measured


def test_the_finding_quotes_the_table():
    text = findings.selections(pd.concat([TABLE, tables.reported_rows()])).text
    row = TABLE.set_index("method").loc["ELSI m=3"]
    assert f"{{{row['layers'].replace(' ', ', ')}}} with {row['entropy']:.4f} nats" in text
    assert text.count("ELSI m=3 chooses") == 1  # the reported rows are no finding of ours
