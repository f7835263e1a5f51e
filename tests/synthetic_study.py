"""A study with known truth, for tests that need no model: steps are drawn from laws whose mean is the tau asked for."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from elsi_lib.loading import find
from elsi_lib.provenance import code_version, environment
from elsi_lib.report.study import EXTRAS, LOOKUP, METHODS, write_steps
from elsi_lib.report.tau import CATEGORIES, MT_BENCH
from elsi_lib.settings import Settings

# Per method: the layers, S_1 in nats, and tau at 60 nodes, T = 0. ELSI-C m=2 has the set, and so the draft, of ELSI m=2.
TRUTH = {
    "EAGLE-2": ("29", 0.255, 1.90), "EAGLE-3": ("2 15 27", 0.526, 2.10), "EAGLE-3 (code)": ("1 14 26", 0.436, 2.08),
    "ELSI m=1": ("27", 0.570, 2.00), "ELSI m=2": ("11 28", 0.640, 2.05), "ELSI m=3": ("10 11 28", 0.642, 2.40),
    "ELSI-C m=2": ("11 28", 0.640, 2.05), "ELSI-C m=3": ("11 28 29", 0.628, 2.11), "lowest": ("0 9 10", 0.029, 1.80),
    "random 1": ("3 5 22", 0.400, 2.03), "random 2": ("6 7 19", 0.300, 2.06), "prompt lookup": ("", np.nan, 1.40),
    "EAGLE-3 (seed 1)": ("2 15 27", 0.526, 2.12), "EAGLE-3 norm": ("2 15 27", 0.526, 2.20),
    "ELSI m=3 norm": ("10 11 28", 0.642, 2.35),
}  # fmt: skip
SETTINGS = [(30, 0.0), (60, 0.0), (30, 1.0), (60, 1.0)]


def tau_of(method, nodes=60, temperature=0.0, truth=TRUTH):
    """The true tau: fewer nodes and sampling take something off."""
    return truth[method][2] - 0.06 * (nodes == 30) - 0.15 * (temperature > 0)


def answer(rng, tau, steps, depth=6):
    """Tokens of ``steps`` target steps, binomial on 1 .. depth + 1, with the mean ``tau``, the sum rounded to a whole token."""
    tokens = 1 + rng.binomial(depth, (tau - 1) / depth, steps)
    while (gap := round(tau * steps) - int(tokens.sum())) != 0:
        places = np.flatnonzero(tokens <= depth) if gap > 0 else np.flatnonzero(tokens > 1)
        tokens[rng.choice(places)] += np.sign(gap)
    return tokens.astype(np.int8)


def draft_of(method, truth=TRUTH):
    layers = truth[method][0].replace(" ", "-")
    return "" if method == LOOKUP else layers + {"EAGLE-3 (seed 1)": ".seed1"}.get(method, ".each" if method.endswith("norm") else "")


def steps_frame(methods=(*METHODS, *EXTRAS), settings=SETTINGS, sizes=(4, 2), steps=100, truth=TRUTH, exact=True, seed=0):
    """Answers of every method: ``sizes`` questions in each single-turn and each two-turn category.

    With ``exact``, and 100 steps, the tau of each answer is the true one of its method, whatever the seed; else every question
    has its own.
    """
    rng, rows, number = np.random.default_rng(seed), [], 80
    for category in CATEGORIES:
        for _ in range(sizes[category in MT_BENCH]):
            number += 1
            own = 0 if exact else rng.normal(0, 0.25)
            for turn in range(1 + (category in MT_BENCH)):
                for method in methods:
                    for nodes, temperature in settings:
                        tau = max(tau_of(method, nodes, temperature, truth) + own, 1.05)
                        where = {"question_id": str(number), "category": category, "turn": turn, "method": method}
                        where |= {"nodes": nodes, "temperature": temperature, "seed": 0}
                        rows.append({**where, "tokens": answer(rng, tau, steps)})
    return pd.DataFrame(rows)


def rows_frame(methods=(*METHODS, *EXTRAS), truth=TRUTH):
    rows = []
    for method in methods:
        layers, entropy, tau = truth[method]
        lookup = method == LOOKUP
        numbers = {"parameters": np.nan if lookup else 9_800_000, "loss": np.nan if lookup else 5.5 - tau}
        about = {"method": method, "layers": layers, "entropy": entropy, **numbers, "draft": draft_of(method, truth)}
        rows.append({**about, "norm_before_fc": "each" if method.endswith("norm") else "none"})
    return pd.DataFrame(rows)


def training_frame(rows, steps=120, heads=4, seed=0):
    rng, found = np.random.default_rng(seed), []
    final = dict(zip(rows["draft"], rows["loss"], strict=True))
    for step in range(steps):
        for draft, loss in final.items():
            if draft:
                value = loss + 6 * np.exp(-step / 20) + rng.normal(0, 0.05)
                shares = {f"accept_{k}": 0.5 * (1 - np.exp(-step / 30)) * 0.9**k for k in range(heads)}
                found.append({"step": step, "tokens": 2000 * (step + 1), "draft": draft, "loss": value, **shares, "norm": 0.5})
    return pd.DataFrame(found)


def live_frame(questions=8, seconds_per_step=0.02, truth=TRUTH):
    """The prompt's pass gives an answer's first token. Then the target alone makes one token a step; each token of its takes
    ``seconds_per_step``, a step with a draft 1.25 times that."""
    rows = []
    for number in range(questions):
        where = {"question_id": str(81 + 7 * number), "category": CATEGORIES[number % 5], "temperature": 0.0}
        tokens = 121 + 12 * number
        rows.append({**where, "method": "plain", "nodes": 0, "tokens": tokens, "steps": tokens - 1,
                     "seconds": tokens * seconds_per_step, "peak_mb": 900})  # fmt: skip
        for method in ("EAGLE-3", "ELSI m=3", "prompt lookup"):
            steps = round((tokens - 1) / truth[method][2])
            rows.append({**where, "method": method, "nodes": 60, "tokens": tokens, "steps": steps,
                         "seconds": 1.25 * steps * seconds_per_step, "peak_mb": 1000 + number})  # fmt: skip
    return pd.DataFrame(rows)


def write_study(
    folder, *, prompts="Spec-Bench", methods=(*METHODS, *EXTRAS), target="synthetic", live=True, run=None, **options
):
    """A whole study in ``folder``, of the settings ``run``, or of the default ones with that target; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = options.get("truth", TRUTH)
    write_steps(steps_frame(methods, **options), folder / "steps.parquet")
    rows = rows_frame(methods, truth)
    rows.to_csv(folder / "rows.csv", index=False)
    training_frame(rows).to_csv(folder / "training.csv", index=False)
    if live:
        live_frame(truth=truth).to_csv(folder / "live.csv", index=False)
    passport = {"target": {"name": target}, "evaluation": {"prompts": prompts}, "code": code_version()}
    passport["environment"] = environment()
    run = run or Settings(target=target)
    passport["settings"] = asdict(run) | {"prompts": run.calibration()["source"]}
    passport["target"]["source"] = run.target
    if Path(run.target).is_dir():
        passport["target"]["revision"] = find(run.target, None, False, False).revision
    (folder / "passport.json").write_text(json.dumps(passport))
    return folder
