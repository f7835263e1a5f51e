"""A layer set with everything one wants to know before training a draft on it, as one JSON-ready dictionary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.layers import engine_ids
from elsi_lib.provenance import code_version
from elsi_lib.selection import (
    EXHAUSTIVE_LIMIT,
    RULES,
    TIE,
    Standing,
    all_set_entropies,
    layer_rule,
    redundancy,
    select,
    stability,
    standing,
)

BASELINES = ("eagle2", "eagle3", "eagle3-code")
# Set entropies that the stability of an exhaustive search may cost: about two minutes on one core at B = 32.
STABILITY_LIMIT = 3_000_000
KEY = "eagle_aux_hidden_state_layer_ids"


def describe_choice(fp: Fingerprint, method: str, m: int | None = None, **options: Any) -> dict[str, Any]:
    """Choose a layer set and describe it.

    Args:
        fp: a fingerprint, in the variant to use.
        method: one of :data:`~elsi_lib.selection.METHODS`.
        m: size of the set; 3, or what an EAGLE rule fixes, if None.
        options: of the method, such as ``among``, and the reading: ``alpha``, ``center``, ``normalize``.

    Returns:
        A dictionary without NaN or infinity. What cannot be had is None, and ``notes`` has the reason under the same key; an
        infinite ``alpha`` is ``"inf"``. Keys:

        - ``target``, ``num_layers``, ``method``, ``m``, ``layers``, ``entropy`` (nats), ``parameters``
        - ``sets`` (how many sets of this size there are), ``rank`` (1 is the best), ``regret`` (nats below the optimum)
        - ``servable``: the same three, ``rank``, ``sets`` and ``regret``, among the sets of the layers ``among``; None without it
        - ``redundancy``, ``redundancy_debiased``: mean CKA over the pairs of the set
        - ``stability``: ``share`` of the bootstrap replicates that choose this set, mean ``jaccard`` similarity to it,
          ``replicates``, ``layer_share`` (N,), the share of replicates that choose each layer, and ``interval`` (low, high), the
          95 % Wilson interval of ``share`` for this many replicates
        - ``baselines``: eagle2, eagle3 (as the paper prints it), eagle3-code (as EAGLE's code runs it) and optimum, each with
          ``layers`` and ``entropy``
        - ``ids``: for every convention of :data:`~elsi_lib.layers.CONVENTIONS`
        - ``config``: what to write into the draft's config.json for ``sglang`` and ``vllm``
        - ``notes``, ``fingerprint`` (hash, prompts, calibration, variant), ``elsi_lib`` (version)

    Raises:
        ElsiError: as :func:`~elsi_lib.selection.select`.
    """
    chosen = select(fp, method, m, **options)
    reading = {name: options[name] for name in ("alpha", "center", "normalize") if name in options}
    layers, n, size = chosen.layers, fp.num_layers, len(chosen.layers)
    notes: dict[str, Any] = {}

    sets = math.comb(n, size)
    place = rank = regret = None
    optimum: dict[str, Any] = {"layers": None, "entropy": None}
    if sets <= EXHAUSTIVE_LIMIT:
        place = standing(fp, layers, **reading)
        rank, regret = place.rank, place.regret
        optimum = {"layers": list(place.optimum), "entropy": place.entropy + place.regret}
    else:
        notes["rank"] = notes["optimum"] = _too_many(sets, size, n)

    baselines = {}
    for rule in BASELINES:
        try:
            own = layer_rule(rule, n)
            baselines[rule] = {"layers": list(own), "entropy": fp.entropy(own, **reading)}
        except ElsiError as err:
            baselines[rule], notes[rule] = {"layers": None, "entropy": None}, str(err)

    ids = engine_ids(layers, n)
    notes |= {name: why for name, why in ids.items() if isinstance(why, str)}
    ids = {name: None if isinstance(given, str) else list(given) for name, given in ids.items()}
    parameters, prompts = fp.passport["parameters"], fp.passport["prompts"]
    return _plain({
        "target": fp.target,
        "num_layers": n,
        "method": method,
        "m": size,
        "layers": list(layers),
        "entropy": chosen.entropy,
        "parameters": chosen.parameters,
        "sets": sets,
        "rank": rank,
        "regret": regret,
        "servable": _servable(fp, layers, options.get("among"), place, reading, notes),
        "redundancy": _mean_cka(fp, layers, False, notes),
        "redundancy_debiased": _mean_cka(fp, layers, True, notes),
        "stability": _stability(fp, method, size, sets, options, notes),
        "baselines": {**baselines, "optimum": optimum},
        "ids": ids,
        "config": {
            "sglang": ids["sglang"] and {"eagle_config": {KEY: ids["sglang"]}},
            "vllm": ids["vllm"] and {KEY: ids["vllm"]},
        },
        "notes": notes,
        "fingerprint": {
            "sha256": fp.sha256,
            "prompts": prompts.get("used"),
            "source": prompts.get("source"),
            **{name: parameters[name] for name in ("rho", "block", "reading", "seed")},
            "filtered": fp.filtered,
            "first_position_kept": fp.sink,
        },
        "elsi_lib": code_version()["elsi_lib"],
    })


def _too_many(sets: int, size: int, num_layers: int) -> str:
    return f"{sets:,} sets of {size} of {num_layers} layers are too many to compare with"


def _servable(
    fp: Fingerprint,
    layers: tuple[int, ...],
    among: Sequence[int] | None,
    place: Standing | None,
    reading: dict[str, Any],
    notes: dict[str, Any],
) -> dict[str, Any] | None:
    """Rank and regret among the sets of the layers ``among``; ``place`` is the standing among all sets, where it is known."""
    if among is None:
        return None
    allowed = len(set(among))
    sets = math.comb(allowed, len(layers))
    if sets > EXHAUSTIVE_LIMIT:
        notes["servable"] = _too_many(sets, len(layers), allowed)
        return {"rank": None, "sets": sets, "regret": None}
    if place is not None and allowed == fp.num_layers:
        return {"rank": place.rank, "sets": place.sets, "regret": place.regret}
    every, entropies = all_set_entropies(fp, len(layers), among, **reading)
    own = entropies[(every == torch.tensor(layers)).all(-1)][0]
    return {"rank": int((entropies > own + TIE).sum()) + 1, "sets": len(every), "regret": float(entropies.max() - own)}


def _mean_cka(fp: Fingerprint, layers: tuple[int, ...], debiased: bool, notes: dict[str, Any]) -> float | None:
    """:func:`~elsi_lib.selection.redundancy`, or None with a note where the set has none."""
    try:
        return redundancy(fp, layers, debiased)
    except ElsiError as err:
        notes["redundancy_debiased" if debiased else "redundancy"] = str(err)
        return None


def _stability(
    fp: Fingerprint, method: str, m: int, sets: int, options: dict[str, Any], notes: dict[str, Any]
) -> dict[str, Any] | None:
    from scipy.stats import binomtest  # imported here: it takes seconds

    if method in RULES:
        notes["stability"] = "a fixed rule does not depend on the prompts"
        return None
    if fp.bootstrap is None:
        default = fp.filtered and fp.sink
        notes["stability"] = "calibrated without bootstrap" if default else "the bootstrap is of the default variant only"
        return None
    cost = sets * len(fp.bootstrap)
    if method in ("exhaustive", "lowest") and cost > STABILITY_LIMIT:
        notes["stability"] = f"{cost:,} set entropies would take minutes: see the method elsi"
        return None
    found = asdict(stability(fp, method, m, **options))
    found.pop("sets")
    same = round(found["share"] * found["replicates"])
    interval = binomtest(same, found["replicates"]).proportion_ci(method="wilson")
    found["interval"] = [float(interval.low), float(interval.high)]
    return found


def _plain(value: Any) -> Any:
    """Lists for tuples, None for NaN, "inf" for infinity: what JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
