"""Every claim of the paper that can be checked here, with a verdict that follows from the numbers by the rules stated on the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
from page_parts import NOT_HERE, Origin, notebook_link, read_csv, read_passport, study_passport

from elsi_lib.report.tables import reported
from elsi_lib.report.tau_measures import REPORTED_TASKS, REPORTED_TASKS_T1, rank_correlation
from elsi_lib.report.tau_tables import settings_of
from elsi_lib.report.words import markdown_table, p_value

AGREES, DISAGREES, PARTLY, OPEN, NOT_RUN = "agrees", "disagrees", "partly", "not decided", "not run here"
THIRDS = ("early", "middle", "late")
LEVEL = 0.05
NEAR_ONE = 0.95  # CKA
LARGE = 1 / 6  # share of the layers that a large compartment holds
SAME_SHAPE, OTHER_SHAPE = 0.9, 0.5  # rank correlation along depth
ALIKE = 0.017  # tokens; within which the paper has the average tau of ELSI m = 1, 2, 3 (Llama-3.1-8B)


@dataclass(frozen=True)
class Row:
    """A claim, what the paper reports, and what one target here says to it."""

    claim: str
    reported: str
    target: str
    here: str
    verdict: str


def agreements(origin: Origin) -> str:
    """The table, and how often each verdict is given."""
    found = rows(origin)
    counts = {verdict: sum(row.verdict == verdict for row in found) for verdict in (AGREES, PARTLY, DISAGREES, OPEN, NOT_RUN)}
    total = ", ".join(f"{verdict} {count}" for verdict, count in counts.items() if count)
    # Every row says whose it is: the reader may sort them.
    cells = [(_linked(row.claim), row.reported, row.target, row.here, f"**{row.verdict}**") for row in found]
    heads = ("claim", "reported", "target here", "measured here", "verdict")
    return f"Of {len(found)} rows: {total}.\n\n{markdown_table(heads, cells)}"


def tau_answer(origin: Origin) -> str:
    """Whether entropy buys tau, in a sentence or two for each target whose drafts were trained."""
    lines = []
    for name in ("table2", "table3"):
        taus, differences = read_csv(f"{name}.csv", origin), read_csv(f"{name}_differences.csv", origin)
        if taus is None or differences is None:
            continue
        measured = taus[(taus["origin"] == "measured") & taus["layers"].notna()]
        settings = settings_of(measured)
        temperature = min(t for _, t in settings)
        nodes = max(n for n, t in settings if t == temperature)
        rho, p, sets = _correlation(measured, nodes, temperature)
        of = _difference(differences, "ELSI m=3", "overall").query("nodes == @nodes and temperature == @temperature").iloc[0]
        words = {AGREES: "ELSI's draft is ahead", DISAGREES: "ELSI's draft is behind"}
        bought = words.get(decided(of["verdict"]), "it is not decided")
        lines.append(
            f"On **{measured['target'].iloc[0]}** {bought}: tau of the draft on ELSI's set of three is {_percent(of)} from that on "
            f"EAGLE-3's (trees of {nodes} nodes, T = {temperature:g}, 95 % interval over {int(of['questions'])} questions), and over "
            f"{sets} layer sets entropy and tau have a rank correlation of {rho:+.2f} ({p_value(p)})."
        )
    return " ".join(lines) or NOT_HERE


# Verdicts


def overall(parts: Iterable[str]) -> str:
    """Of a claim from those on its parts: the same where all are alike; ``partly`` where some agree and others do not; else
    ``disagrees`` where one does and the rest is not decided."""
    kinds = set(parts)
    if not kinds:
        return NOT_RUN
    if len(kinds) == 1:
        return kinds.pop()
    return PARTLY if kinds & {AGREES, PARTLY} else DISAGREES


def by_interval(low: float, high: float, above: bool = True) -> str:
    """Of the claim that something is above zero, or below it, from its 95 % interval."""
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high:
        return OPEN
    return AGREES if (low > 0) == above else DISAGREES


def decided(word: str, above: bool = True) -> str:
    """Of the claim that a tau is above another, or below it, from the verdict of table 2's differences."""
    if word not in ("above", "below"):
        return OPEN
    return AGREES if (word == "above") == above else DISAGREES


def compartment_verdict(compartments: Iterable[tuple[int, int]], layers: int) -> str:
    """Of several transitions (two or more) with two large compartments, as the parts of one claim."""
    sizes = [last - first + 1 for first, last in compartments]
    return overall([AGREES if ok else DISAGREES for ok in (len(sizes) > 2, sum(size >= LARGE * layers for size in sizes) > 1)])


# Claims


def rows(origin: Origin) -> list[Row]:
    """All claims in the order of the paper's figures and tables."""
    found = []
    for claim in (_prompts, _wave, _filter, _shape, _compartments, _near_one, _entropies):
        found += claim(origin)
    return found + _taus(origin)


def _prompts(origin: Origin) -> list[Row]:
    claim = "figure 1: between prompts entropy varies most at the first and last layers"
    about = read_passport("figure1", origin)
    if about is None:
        return [_missing(claim, "yes, sizes not known")]
    parts, words = [], []
    for reading, name in (("token", "token states"), ("block", "block averages")):
        early, middle, late = (about["results"][f"figure1_{reading}_sd_{third}"] for third in THIRDS)
        parts += [AGREES if end > middle else DISAGREES for end in (early, late)]
        words.append(f"{name}: standard deviation {early:.3f} early, {middle:.3f} middle, {late:.3f} late")
    return [Row(claim, "yes, sizes not known", about["inputs"][0]["target"], "; ".join(words), overall(parts))]


def _wave(origin: Origin) -> list[Row]:
    claim = "figure 2: high, low, high along depth, with a late peak"
    said = f"{_said('shape of the wave')}; layer of the peak: {_said('layer of the peak')}"
    data, about = read_csv("figure2.csv", origin), read_passport("figure2", origin)
    if data is None:
        return [_missing(claim, said)]
    found = []
    for number, (target, of) in enumerate(data[data["first_position"] == "kept"].groupby("target", sort=False)):
        of = of.sort_values("layer").reset_index(drop=True).assign(
            low=lambda d: d["low"].fillna(d["entropy"]), high=lambda d: d["high"].fillna(d["entropy"])
        )  # fmt: skip
        first, bottom, peak = of.iloc[0], of.loc[of["entropy"].idxmin()], of.loc[of["entropy"].idxmax()]
        late = peak["layer"] > (len(of) - 1) / 2 and peak["low"] > bottom["high"]
        parts = [DISAGREES if first["layer"] == bottom["layer"] else AGREES if first["low"] > bottom["high"] else OPEN]
        parts.append(AGREES if late else DISAGREES)
        here = ", ".join(f"{r['entropy']:.3f} [{r['low']:.3f}, {r['high']:.3f}] at {int(r['layer'])}" for r in (first, bottom, peak))
        here = f"nats at layer: {here}, the last being {len(of) - 1}"
        share = about and about["results"].get(f"figure2{'_beside' if number else ''}_rise_share_quiet")
        if share is not None:
            here += f"; {100 * share:.0f} % of the late rise is left without rows that an attention sink entered"
        found.append(Row(claim, said, target, here, overall(parts)))
    return found


def _filter(origin: Origin) -> list[Row]:
    data, found = read_csv("figure4.csv", origin), []
    for third in THIRDS:
        claim = f"figure 4: the token filter lowers the variance between prompts, {third} third"
        said = _said(f"variance between prompts, filter on vs off, {third}")
        if data is None:
            found.append(_missing(claim, said))
            continue
        of = data[(data["quantity"] == "change") & (data["positions"] == "kept") & (data["first_position"] == "kept")]
        for target, rows_ in of[of["depth"] == third].groupby("target", sort=False):
            parts = [by_interval(row.low, row.high, above=False) for row in rows_.itertuples()]
            here = "; ".join(f"{row.reading} {_change(row)}" for row in rows_.itertuples())
            found.append(Row(claim, said, target, here, overall(parts)))
    return found


def _shape(origin: Origin) -> list[Row]:
    claim, said = "figure 4: with the filter the shape of the wave stays", "yes, measure not known"
    data = read_csv("figure4.csv", origin)
    if data is None:
        return [_missing(claim, said)]
    found = []
    means = data[(data["quantity"] == "mean") & (data["first_position"] == "kept")]
    for target, of in means.groupby("target", sort=False):
        parts, words = [], []
        for reading, rows_ in of.groupby("reading", sort=False):
            both = rows_.pivot(index="depth", columns="positions", values="value")
            rho = both["all"].corr(both["kept"], method="spearman")
            parts.append(AGREES if rho >= SAME_SHAPE else DISAGREES if rho < OTHER_SHAPE else OPEN)
            words.append(f"{reading} {rho:+.2f}")
        found.append(Row(claim, said, target, f"rank correlation along depth, filter on and off: {'; '.join(words)}", overall(parts)))
    return found


def _compartments(origin: Origin) -> list[Row]:
    claim = "figure 5: several transitions, large middle compartments"
    said = f"{_said('CKA between layers', 'Qwen3-4B')}: {_runs_said()}"
    about = read_passport("figure5", origin)
    if about is None:
        return [_missing(claim, said)]
    found = []
    for target in dict.fromkeys(entry["target"] for entry in about["results"]):
        entries = [entry for entry in about["results"] if entry["target"] == target]
        layers = max(last for entry in entries for _, last in entry["compartments"]) + 1
        words = [f"{'debiased' if e['debiased'] else 'plain'} CKA: {_runs(e['compartments'])}" for e in entries]
        verdict = overall([compartment_verdict(entry["compartments"], layers) for entry in entries])
        found.append(Row(claim, said, target, "; ".join(words), verdict))
    return found


def _near_one(origin: Origin) -> list[Row]:
    claim = "figure 5: CKA is near 1 everywhere but at the first and last layers"
    said, data = _said("CKA between layers", "Llama-3.1-8B"), read_csv("figure5.csv", origin)
    if data is None:
        return [_missing(claim, said)]
    found = []
    for target, of in data[data["layer"] != data["other"]].groupby("target", sort=False):
        last = max(of["layer"].max(), of["other"].max())
        inner = of[~of["layer"].isin([0, last]) & ~of["other"].isin([0, last])]
        shares = {bool(name): float((rows_["cka"] >= NEAR_ONE).mean()) for name, rows_ in inner.groupby("debiased")}
        parts = [AGREES if share == 1 else PARTLY if share >= 0.5 else DISAGREES for share in shares.values()]
        words = [f"{'debiased' if name else 'plain'} {100 * share:.0f} %" for name, share in shares.items()]
        here = f"pairs of inner layers with CKA of {NEAR_ONE} or more: {'; '.join(words)}"
        found.append(Row(claim, said, target, here, overall(parts)))
    return found


def _entropies(origin: Origin) -> list[Row]:
    claim = "table 1: the set of ELSI m=3 has a higher $S_1$ than EAGLE-3's"
    values, words = reported(), []
    for target in dict.fromkeys(values["target"]):
        of = values[values["target"] == target].set_index("quantity")["value"]
        if {"ELSI m=3 S_1", "EAGLE3 S_1"} <= set(of.index):
            words.append(f"{target}: {of['ELSI m=3 S_1']} against {of['EAGLE3 S_1']}")
    said, data = "; ".join(words), read_csv("table1.csv", origin)
    if data is None:
        return [_missing(claim, said)]
    readings, found = read_csv("open_readings.csv", origin), []
    for target, of in data[data["origin"] == "measured"].groupby("target", sort=False):
        entropy = of.set_index("method")["entropy"]
        if not {"ELSI m=3", "EAGLE3 as printed"} <= set(entropy.index):
            continue
        ours, theirs = entropy["ELSI m=3"], entropy["EAGLE3 as printed"]
        verdict, here = AGREES if ours > theirs else DISAGREES, f"{ours:.3f} against {theirs:.3f} nats"
        if readings is not None and len(drawn := readings[(readings["target"] == target) & (readings["reading"] == "default")]):
            low, high = drawn.iloc[0][["ratio_low", "ratio_high"]]
            if not math.isnan(low):
                verdict, here = by_interval(low - 1, high - 1), f"{here}, {ours / theirs:.2f} times [{low:.2f}, {high:.2f}]"
        found.append(Row(claim, said, target, here, verdict))
    return found or [_missing(claim, said)]


# tau


def _taus(origin: Origin) -> list[Row]:
    """The claims on tau for each table and temperature that was run; one row for each that was not."""
    found, first = [], True
    for name, label in (("table2", "table 2"), ("table3", "table 3")):
        measured = read_csv(f"{name}.csv", origin)
        measured = None if measured is None else measured[(measured["origin"] == "measured") & measured["layers"].notna()]
        for temperature in (0.0, 1.0):
            here = measured is not None and (measured["temperature"] == temperature).any()
            if here or first:
                found += _tau_claims(name, label, measured if here else None, temperature, origin)
            else:
                found.append(_missing(f"{label}: the claims on tau at T = {temperature:g}", _said_beside(name, temperature)))
            first = False
    return found


def _tau_claims(name: str, label: str, measured: pd.DataFrame | None, temperature: float, origin: Origin) -> list[Row]:
    gain, paper = "average gain in tau, {}", ("Qwen3-4B", "Llama-3.1-8B")
    of = None
    differences = read_csv(f"{name}_differences.csv", origin)
    if measured is not None and differences is not None:
        of = differences[differences["temperature"] == temperature]
    target = "" if measured is None else str(measured["target"].iloc[0])
    found: list[Row] = []

    def add(claim: str, said: str, parts: Iterable[str] | None, here: str = "") -> None:
        text, when = f"{label}: {claim}", f"T = {temperature:g}"
        found.append(_missing(text, said) if parts is None else Row(text, said, target, f"{when}, {here}", overall(parts)))

    def against(method: str, claim: str, said: str, group: str = "overall", above: bool = True) -> None:
        rows_ = None if of is None else _difference(of, method, group)
        if rows_ is None or rows_.empty:
            return add(claim, said, None)
        return add(claim, said, [decided(row["verdict"], above) for _, row in rows_.iterrows()], _by_nodes(rows_))

    def against_eagle2(method: str, claim: str, said: str) -> None:
        rows_ = None if of is None else _paired(name, method, "EAGLE-2", temperature, of, origin)
        if rows_ is None or rows_.empty:
            return add(claim, said, None)
        return add(claim, said, [decided(row["verdict"]) for _, row in rows_.iterrows()], _by_nodes(rows_))

    against("ELSI m=3", "ELSI m=3 has a higher tau than EAGLE-3", _said(gain.format("ELSI m=3 over EAGLE3"), paper[0]))
    against("ELSI m=3", "ELSI m=3 has a lower tau than EAGLE-3", _said(gain.format("ELSI m=3 over EAGLE3"), paper[1]), above=False)
    against("ELSI m=1", "ELSI m=1 has a higher tau than EAGLE-3", _said(gain.format("ELSI m=1 over EAGLE3"), paper[0]))
    said = _said("tau of ELSI m=1 as a share of EAGLE3's", paper[1])
    rows_ = None if of is None else _difference(of, "ELSI m=1", "overall")
    if rows_ is None or rows_.empty:
        add("ELSI m=1 comes near EAGLE-3", said, None)
    else:
        about = float(_value("tau of ELSI m=1 as a share of EAGLE3's", paper[1]))
        ends = [(row.nodes, 100 + row.percent, 100 + row.percent_low, 100 + row.percent_high) for row in rows_.itertuples()]
        words = [f"{nodes} nodes {share:.1f} % [{low:.1f}, {high:.1f}]" for nodes, share, low, high in ends]
        parts = [near(low, high, about) for _, _, low, high in ends]
        add("ELSI m=1 comes near EAGLE-3", said, parts, "; ".join(words))
    said = "; ".join(_said_pair("EAGLE3", "EAGLE2", nodes) for nodes in (30, 60) if _said_pair("EAGLE3", "EAGLE2", nodes))
    rows_ = None if of is None else _difference(of, "EAGLE-2", "overall")
    if rows_ is None or rows_.empty:
        add("EAGLE-3 has a higher tau than EAGLE-2", said, None)
    else:
        parts = [decided(row["verdict"], above=False) for _, row in rows_.iterrows()]
        add("EAGLE-3 has a higher tau than EAGLE-2", said, parts, f"EAGLE-2 against EAGLE-3: {_by_nodes(rows_)}")
    against_eagle2("ELSI m=3", "ELSI m=3 has a higher tau than EAGLE-2", _said(gain.format("ELSI m=3 over EAGLE2"), paper[0]))
    against_eagle2("ELSI m=1", "ELSI m=1 has a higher tau than EAGLE-2", _said(gain.format("ELSI m=1 over EAGLE2"), paper[1]))
    said = f"called the worst; {_said_pair('negative control', 'EAGLE2', 30)}"
    add("the set of low entropy has the lowest tau", said, *_last(name, measured, of, temperature, origin))
    for task, group in REPORTED_TASKS.items():
        said = _said(f"gain in tau by task, ELSI m=3 over EAGLE3, {task}", paper[0])
        against("ELSI m=3", f"ELSI m=3 gains on EAGLE-3 in {task}", said, group)
    if temperature == 1:
        for task in REPORTED_TASKS_T1:
            claim = f"ELSI m=3 {'loses to' if task == 'writing' else 'gains on'} EAGLE-3 in {task}"
            against("ELSI m=3", claim, _said(f"gain in tau by task, T=1, {task}", paper[1]), task, above=task != "writing")
    said = f"{_said('spread of the average tau of ELSI m=1, 2, 3', paper[1])} of averages over settings"
    add(f"tau of ELSI m=1, 2 and 3 lies within {ALIKE:g} tokens", said, *_spread(name, temperature, of, origin))
    parts, words = None, []
    if measured is not None:
        parts = []
        for nodes, at in settings_of(measured):
            if at == temperature:
                rho, p, sets = _correlation(measured, nodes, at)
                parts.append(OPEN if not p < LEVEL else AGREES if rho > 0 else DISAGREES)
                words.append(f"{nodes} nodes {rho:+.2f} ({p_value(p)})")
        words = [f"rank correlation over {sets} sets: {'; '.join(words)}"]
    add("sets of higher entropy have a higher tau", "shown as a correlation, size not known", parts, *words)
    return found


def near(low: float, high: float, value: float) -> str:
    """Of a whole number reported as ``about``, from the interval here, whose ends are rounded as it was."""
    if math.isnan(low) or math.isnan(high):
        return OPEN
    return AGREES if round(low) <= value <= round(high) else DISAGREES


def within(low: float, high: float, limit: float) -> str:
    """Of the claim that a difference is at most ``limit``, from its 95 % interval."""
    if -limit <= low and high <= limit:
        return AGREES
    return DISAGREES if low > limit or high < -limit else OPEN


def _spread(name: str, temperature: float, of: pd.DataFrame | None, origin: Origin) -> tuple[list[str] | None, str]:
    """Whether no two of ELSI's drafts of one, two and three layers lie apart, at each tree size, and the widest pair in words."""
    pairs = [] if of is None else list(itertools.combinations([f"ELSI m={m}" for m in (3, 2, 1)], 2))
    found = [None if rows_ is None else rows_.assign(base=pair[1]) for pair in pairs
             for rows_ in [_paired(name, *pair, temperature, of, origin)]]  # fmt: skip
    if not found or any(rows_ is None or rows_.empty for rows_ in found):
        return None, ""
    every = pd.concat(found, ignore_index=True)
    noise = _difference(of, "ELSI m=3", "overall")["noise"].max()
    parts, words = [], []
    for nodes, rows_ in every.groupby("nodes"):
        verdicts = [within(row.low, row.high, ALIKE) for row in rows_.itertuples()]
        luck = rows_["difference"].abs() <= noise  # two trainings of one set are as far apart
        verdicts = [OPEN if verdict == DISAGREES and lucky else verdict for verdict, lucky in zip(verdicts, luck, strict=True)]
        parts.append(next((verdict for verdict in (DISAGREES, OPEN) if verdict in verdicts), AGREES))  # one pair apart is enough
        wide = rows_.loc[rows_["difference"].abs().idxmax()]
        text = f"{wide['difference']:+.3f} [{wide['low']:+.3f}, {wide['high']:+.3f}] tokens"
        words.append(f"{nodes} nodes {wide['method'].removeprefix('ELSI ')} to {wide['base'].removeprefix('ELSI ')} {text}")
    return parts, "farthest apart: " + "; ".join(words)


def _last(name, measured, of, temperature, origin) -> tuple[list[str] | None, str]:
    """Whether the control has the lowest tau at each tree size, and is decidedly below the next."""
    if measured is None or of is None or "lowest" not in set(measured["method"]):
        return None, ""
    parts, words = [], []
    for nodes, at in settings_of(measured):
        if at != temperature:
            continue
        alike = _alike(measured[(measured["nodes"] == nodes) & (measured["temperature"] == at)])
        taus = alike.set_index("method")["tau"].sort_values()
        other = next(method for method in taus.index if method != "lowest")
        rows_ = _paired(name, "lowest", other, temperature, of, origin)
        rows_ = None if rows_ is None else rows_[rows_["nodes"] == nodes]
        if rows_ is None or rows_.empty:
            parts.append(OPEN if taus.index[0] == "lowest" else DISAGREES)
            words.append(f"{nodes} nodes {taus['lowest']:.3f} tokens, the lowest of the others {taus[other]:.3f}, {other}")
        else:
            parts += [decided(word, above=False) for word in rows_["verdict"]]
            words.append(f"{_by_nodes(rows_)} against the lowest of the others, {other}")
    return parts, "; ".join(words)


def _difference(data: pd.DataFrame, method: str, group: str) -> pd.DataFrame:
    """Differences of one method to EAGLE-3 in one group, pooled, by nodes."""
    of = data[(data["method"] == method) & (data["baseline"] == "EAGLE-3") & (data["group"] == group) & (data["average"] == "pooled")]
    return of.sort_values(["temperature", "nodes"])


def _paired(name: str, method: str, base: str, temperature: float, of: pd.DataFrame, origin: Origin) -> pd.DataFrame | None:
    """A method against another that table 2 compares both with EAGLE-3 only; None where the study itself is not there."""
    from elsi_lib.errors import ElsiError
    from elsi_lib.report.study import read_study
    from elsi_lib.report.tau import compare
    from elsi_lib.report.tau_tables import RESAMPLES

    path = study_passport(name, origin)
    if path is None:
        return None
    try:
        totals = read_study(path.parent).totals
        both = totals[totals["method"].isin([method, base]) & (totals["temperature"] == temperature)]
        found = compare(both, base, resamples=RESAMPLES)
    except ElsiError:
        return None
    found = found[(found["group"] == "overall") & (found["average"] == "pooled")].sort_values("nodes")
    noise = _difference(of, "ELSI m=3", "overall")["noise"].max()
    beyond = (found["low"] > 0) | (found["high"] < 0)
    clear = beyond & (found["p_holm"] < LEVEL) & ~(found["difference"].abs() <= noise)
    signs = ["above" if value > 0 else "below" for value in found["difference"]]
    words = [sign if ok else "not decided" for ok, sign in zip(clear, signs, strict=True)]
    return found.assign(verdict=words)


def _correlation(measured: pd.DataFrame, nodes: int, temperature: float) -> tuple[float, float, int]:
    """Spearman's rho of S_1 and tau over distinct layer sets that were trained alike, its p and their number."""
    of = _alike(measured[(measured["nodes"] == nodes) & (measured["temperature"] == temperature)])
    rho, p = rank_correlation(of["entropy"].to_numpy(), of["tau"].to_numpy())
    return rho, p, len(of)


def _alike(of: pd.DataFrame) -> pd.DataFrame:
    """Each layer set once, second trainings and drafts with a norm before fc left out."""
    return of[~of["draft"].astype(str).str.contains(".", regex=False)].drop_duplicates("draft")


# Words


def _linked(claim: str) -> str:
    """The claim with its figure or table linked to the notebook that makes it."""
    from generated_pages import NOTEBOOK_OF

    artefact, _, text = claim.partition(": ")
    return f"{notebook_link(artefact, NOTEBOOK_OF[artefact.replace(' ', '')])}: {text}"


def _missing(claim: str, said: str) -> Row:
    return Row(claim, said, "", "", NOT_RUN)


def _said(quantity: str, *targets: str) -> str:
    """A reported value of each target, or of those named, as text."""
    values = reported()
    parts: dict[str, list[str]] = {}
    for row in values[values["quantity"] == quantity].itertuples():
        if not targets or row.target in targets:
            sign = "+" if row.artefact in ("table2", "table3") and "gain" in quantity and row.value[0].isdigit() else ""
            value = f"{sign}{row.value} to {row.value_to}" if row.value_to else f"{sign}{row.value}"
            unit = f" {row.unit}" if row.unit in ("%", "tokens") else ""
            about = "about " if row.note == '"about"' or "near" in row.note else ""
            note = f" ({row.note})" if row.note and not about else ""
            parts.setdefault(row.target, []).append(f"{about}{value}{unit}{note}")
    return "; ".join(f"{target}: {', '.join(of)}" for target, of in parts.items()) or "not known"


def _value(quantity: str, target: str) -> str:
    values = reported()
    return str(values[(values["quantity"] == quantity) & (values["target"] == target)]["value"].iloc[0])


def _said_pair(one: str, other: str, nodes: int) -> str:
    """Reported tau of two methods at T = 0 where both are known."""
    values, parts = reported(), []
    for target in dict.fromkeys(values["target"]):
        of = values[values["target"] == target].set_index("quantity")["value"]
        names = [f"tau {method}, {nodes} nodes, T=0" for method in (one, other)]
        if set(names) <= set(of.index):
            parts.append(f"{target}, {nodes} nodes: {of[names[0]]} against {of[names[1]]} of {other}")
    return "; ".join(parts)


def _said_beside(name: str, temperature: float) -> str:
    """What is reported of a table at T = 1 alone; at T = 0 it stands in the rows above."""
    if temperature == 0:
        return "as above"
    values = reported()
    of = values[(values["artefact"] == name) & values["quantity"].str.contains("T=1", regex=False)]
    quantities = {quantity.rpartition(", ")[2]: _said(quantity) for quantity in of["quantity"]}
    return "; ".join(f"{task}: {said}" for task, said in quantities.items()) or "not known but for averages"


def _runs_said() -> str:
    return _value("compartments", "Qwen3-4B").replace(" ", ", ")


def _runs(compartments: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in compartments)


def _change(row) -> str:
    value, low, high = (f"{x:+,.0f}" if abs(x) >= 1000 else f"{x:+.1f}" for x in (row.value, row.low, row.high))
    return f"{value} % [{low}, {high}]"


def _percent(row) -> str:
    return f"{row['percent']:+.1f} % [{row['percent_low']:+.1f}, {row['percent_high']:+.1f}]"


def _by_nodes(rows_: pd.DataFrame) -> str:
    return "; ".join(f"{int(row['nodes'])} nodes {_percent(row)}" for _, row in rows_.iterrows())
