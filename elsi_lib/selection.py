"""Choosing the layer set: ELSI, ELSI-C, exhaustive search and fixed rules (paper, section 4.3 and 4.4).

Every method takes a :class:`~elsi_lib.fingerprint.Fingerprint` (or its (N, B, B) Gram matrices) and returns a :class:`Selection`.
Three keyword arguments select a reading of the paper, with the meaning they have in :mod:`elsi_lib.entropy`:
``alpha`` (1.0), ``center`` (False) and ``normalize`` ("none").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from elsi_lib.cka import cka_matrix, conditional_cka_matrix, transition_scores
from elsi_lib.entropy import gram_entropy, prepare_grams, set_entropy
from elsi_lib.errors import ElsiError

if TYPE_CHECKING:
    from elsi_lib.fingerprint import Fingerprint

Scored = tuple[tuple[int, ...], float]  # a layer set and its entropy in nats

RULES = ("eagle2", "eagle3", "eagle3-code", "uniform", "last")
METHODS = ("elsi", "elsi-c", "exhaustive", "lowest", *RULES)
EXHAUSTIVE_LIMIT = 1_000_000  # about a minute on one core at B = 32
TIE = 1e-12  # nats; sets whose entropies are nearer than this share a rank: rounding


@dataclass(frozen=True)
class Selection:
    """A chosen layer set, with how it was reached.

    Attributes:
        layers: sorted 0-based block numbers.
        entropy: S_alpha of the concatenated representatives, nats.
        method: name of the method.
        frontier: for each set size from 1 to m the surviving sets, best first (the beam of ELSI; the best sets of an exhaustive
            search at size m only; empty for rules).
        parameters: the settings that were in force.
    """

    layers: tuple[int, ...]
    entropy: float
    method: str
    frontier: tuple[tuple[Scored, ...], ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


def check_layers(layers: Iterable[int], num_layers: int, of: str = "the target") -> tuple[int, ...]:
    """The layer set sorted, or an error that names it: empty, negative, too large, repeated, or not whole numbers."""
    given = tuple(layers)
    if not given:
        raise ElsiError(f"an empty layer set for {of}: name at least one layer of 0..{num_layers - 1}")
    if any(not is_whole(j) for j in given):
        raise ElsiError(f"layer set {given}: layers are whole numbers, 0..{num_layers - 1}")
    if any(not 0 <= j < num_layers for j in given):
        raise ElsiError(f"layer set {given} outside 0..{num_layers - 1} of {of}")
    if len(set(given)) != len(given):
        raise ElsiError(f"layer set {given} names a layer twice: give distinct layers of 0..{num_layers - 1}")
    return tuple(sorted(int(j) for j in given))


def elsi(
    fp: Fingerprint | Tensor,
    m: int,
    *,
    k_beam: int | None = 10,
    k_expand: int | None = 10,
    after_midpoint: str = "singletons",
    among: Sequence[int] | None = None,
    **reading: Any,
) -> Selection:
    """ELSI: beam search for the layer set of highest matrix entropy (paper, Algorithm 1).

    Args:
        fp: fingerprint or (N, B, B) Gram matrices.
        m: size of the set.
        k_beam: sets that survive at each size (paper: 10); None keeps all.
        k_expand: layers by which each set is extended, best first (not stated in the paper); None tries all. With both None the
            result is the best of all sets that the rule below allows.
        after_midpoint: where the rule "the high-entropy singleton lies after the midpoint" (layer >= N // 2) applies:
            ``"singletons"`` for m = 1 (default), ``"seeds"`` for the beam's seeds at every m, ``"never"``.
        among: layers that may be chosen, e.g. :func:`~elsi_lib.layers.servable_layers` of an engine; None for all.
        reading: ``alpha``, ``center``, ``normalize``.

    Raises:
        ElsiError: m outside 1..N, a beam below 1, an unknown rule or reading.
    """

    def propose(layers: tuple[int, ...], grams: Tensor, alpha: float) -> list[int]:
        candidates = [j for j in allowed if j not in layers]
        if k_expand is None or len(candidates) <= k_expand:
            return candidates
        scores = gram_entropy(grams[list(layers)].sum(0) + grams[candidates], alpha)
        return [candidates[i] for i in torch.sort(scores, descending=True, stable=True).indices[:k_expand]]

    allowed = _allowed(fp, among)
    settings = {"k_expand": _at_least_one("k_expand", k_expand)}
    return _beam("elsi", fp, m, k_beam, after_midpoint, allowed, propose, settings, reading)


def elsi_c(
    fp: Fingerprint | Tensor,
    m: int,
    *,
    k_beam: int | None = 10,
    k_pool: int | None = 10,
    after_midpoint: str = "singletons",
    among: Sequence[int] | None = None,
    debiased: bool = False,
    **reading: Any,
) -> Selection:
    """ELSI-C: the beam extended across conditional CKA transitions (paper, Algorithm 2).

    Candidates r that extend a set L are the ``k_pool`` layers of highest delta_L(r) = ||M_L(r, :) - M_L(r-1, :)||^2, with M_L from
    :func:`~elsi_lib.cka.conditional_cka_matrix`; layer 0 has no layer before it and is reached only as a seed. Pruning is by entropy.

    Args:
        k_pool: size of the pool (not stated in the paper); None takes every layer but 0.
        debiased: estimator of the CKA.
        fp, m, k_beam, after_midpoint, among, reading: as for :func:`elsi`.
    """

    def propose(layers: tuple[int, ...], grams: Tensor, alpha: float) -> list[int]:
        delta = transition_scores(conditional_cka_matrix(grams, layers, debiased))
        order = (torch.sort(delta, descending=True, stable=True).indices + 1).tolist()
        return [r for r in order if r in allowed and r not in layers][:k_pool]

    allowed = _allowed(fp, among)
    settings = {"k_pool": _at_least_one("k_pool", k_pool), "debiased": debiased}
    return _beam("elsi-c", fp, m, k_beam, after_midpoint, allowed, propose, settings, reading)


def exhaustive(
    fp: Fingerprint | Tensor,
    m: int,
    *,
    lowest: bool = False,
    keep: int = 10,
    among: Sequence[int] | None = None,
    **reading: Any,
) -> Selection:
    """The true optimum over all sets of m layers; with ``lowest`` the minimum, as a negative control (the
    paper's is a set of low entropy, it does not say the lowest).

    Args:
        keep: how many of the best sets the frontier lists.
        fp, m, among, reading: as for :func:`elsi`.

    Raises:
        ElsiError: more than :data:`EXHAUSTIVE_LIMIT` sets.
    """
    _at_least_one("keep", keep)
    sets, entropies = all_set_entropies(fp, m, among, **reading)
    order = torch.sort(entropies, descending=not lowest, stable=True).indices[:keep].tolist()
    best = tuple((tuple(sets[i].tolist()), float(entropies[i])) for i in order)
    name = "lowest" if lowest else "exhaustive"
    return Selection(*best[0], name, (best,), {"m": m, "among": among and list(among), **_reading(reading)})


def layer_sets(layers: Iterable[int], m: int) -> Tensor:
    """Every set of m of the layers, in the order of :func:`itertools.combinations`: (C, m) int64.

    ``torch.combinations`` picks them out of a grid of n^m cells, which for a dozen of 24 layers does not fit in any memory.
    """
    flat = itertools.chain.from_iterable(itertools.combinations(layers, m))
    return torch.from_numpy(np.fromiter(flat, np.int64)).reshape(-1, m)


def all_set_entropies(
    fp: Fingerprint | Tensor, m: int, among: Sequence[int] | None = None, **reading: Any
) -> tuple[Tensor, Tensor]:
    """Entropy of every set of m layers, or of m layers among those given.

    Returns:
        (C, m) int64 sets in lexicographic order and (C,) float64 entropies in nats, C = binomial(N, m).
    """
    grams, alpha = _prepared(fp, reading)
    allowed = _allowed(fp, among)
    n = len(allowed)
    _check_size(m, n)
    count = math.comb(n, m)
    if count > EXHAUSTIVE_LIMIT:
        raise ElsiError(f"{count:,} sets of {m} of {n} layers: too many to try one by one; use the method elsi with a wide beam")
    sets = layer_sets(allowed, m)
    parts = []
    for chunk in sets.split(2048):
        K = grams[chunk[:, 0]].clone()
        for column in range(1, m):
            K += grams[chunk[:, column]]
        parts.append(gram_entropy(K, alpha))
    return sets, torch.cat(parts)


def layer_rule(name: str, num_layers: int, m: int | None = None) -> tuple[int, ...]:
    """Layer set of a fixed rule, in this project's numbering (output of 0-based block j).

    - ``eagle2``: (N-1,), the last layer.
    - ``eagle3``: (2, N//2, N-3), as the paper prints it.
    - ``eagle3-code``: (1, N//2-1, N-4), what EAGLE's code reads: it captures the *input* of blocks 2, N//2 and N-3.
    - ``uniform``: the middles of m equal stretches of depth.
    - ``last``: the last m layers.

    Args:
        m: size of the set; 3 unless given, fixed for the EAGLE rules.

    Raises:
        ElsiError: unknown rule, another m than the rule's, or a target too shallow for it (its ids would collide).
    """
    n = num_layers
    fixed = {"eagle2": (n - 1,), "eagle3": (2, n // 2, n - 3), "eagle3-code": (1, n // 2 - 1, n - 4)}
    if name not in RULES:
        raise ElsiError(f"layer rule {name!r} unknown: one of {', '.join(RULES)}")
    if name in fixed:
        layers = fixed[name]
        if m not in (None, len(layers)):
            raise ElsiError(f"rule {name} always takes {len(layers)} layers, not m = {m}")
        if list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ElsiError(f"rule {name} gives {layers} on a target of {n} layers: they collide; choose layers yourself")
        return layers
    m = 3 if m is None else m
    _check_size(m, n)
    if name == "last":
        return tuple(range(n - m, n))
    return tuple((2 * i + 1) * n // (2 * m) for i in range(m))


def select(fp: Fingerprint | Tensor, method: str, m: int | None = None, **options: Any) -> Selection:
    """Any method of :data:`METHODS` by name; m defaults to 3, or to what an EAGLE rule fixes."""
    if method in RULES:
        reading = _reading(options)
        layers = layer_rule(method, len(_grams(fp)), m)
        grams, alpha = _prepared(fp, reading)
        return Selection(layers, set_entropy(grams, layers, alpha), method, (), {"m": len(layers), **reading})
    m = 3 if m is None else m
    if method == "elsi":
        return elsi(fp, m, **options)
    if method == "elsi-c":
        return elsi_c(fp, m, **options)
    if method in ("exhaustive", "lowest"):
        return exhaustive(fp, m, lowest=method == "lowest", **options)
    raise ElsiError(f"method {method!r} unknown: one of {', '.join(METHODS)}")


@dataclass(frozen=True)
class Standing:
    """Where a layer set stands among all sets of its size.

    Attributes:
        layers: the set.
        entropy: its S_alpha, nats.
        rank: 1 for the optimum.
        sets: how many sets there are.
        optimum: the set of highest entropy.
        regret: nats below the optimum, >= 0.
        redundancy: mean CKA over the set's pairs; NaN where there is none, see :func:`redundancy`.
    """

    layers: tuple[int, ...]
    entropy: float
    rank: int
    sets: int
    optimum: tuple[int, ...]
    regret: float
    redundancy: float


def standing(fp: Fingerprint | Tensor, layers: Sequence[int], *, debiased: bool = False, **reading: Any) -> Standing:
    """Compare a layer set with every other set of its size; see :class:`Standing`."""
    grams, alpha = _prepared(fp, reading)
    layers = check_layers(layers, len(grams))
    sets, entropies = all_set_entropies(fp, len(layers), **reading)
    own = entropies[(sets == torch.tensor(layers)).all(-1)][0]
    best = int(entropies.argmax())
    return Standing(
        layers=layers,
        entropy=float(own),
        rank=int((entropies > own + TIE).sum()) + 1,
        sets=len(sets),
        optimum=tuple(sets[best].tolist()),
        regret=float(entropies[best] - own),
        redundancy=redundancy_or_nan(fp, layers, debiased),
    )


def redundancy(fp: Fingerprint | Tensor, layers: Sequence[int], debiased: bool = False) -> float:
    """Mean CKA over the pairs of a layer set, 0 to 1 (debiased also below 0).

    Raises:
        ElsiError: one layer has no pairs; too few rows for CKA, or a layer of the set whose rows are all equal.
    """
    grams = _grams(fp)
    layers = check_layers(layers, len(grams))
    if len(layers) == 1:
        raise ElsiError("one layer has no pairs")
    M = cka_matrix(grams, debiased, among=layers)
    row, column = torch.triu_indices(len(layers), len(layers), 1)
    return float(M[row, column].mean())


def redundancy_or_nan(fp: Fingerprint | Tensor, layers: Sequence[int], debiased: bool = False) -> float:
    """:func:`redundancy`, or NaN where the set has none."""
    try:
        return redundancy(fp, layers, debiased)
    except ElsiError:
        return math.nan


@dataclass(frozen=True)
class Stability:
    """How a choice holds when the prompts are drawn again (Poisson bootstrap).

    Attributes:
        share: share of the replicates in which the method chooses the same set.
        layer_share: (N,) share of the replicates in which each layer is chosen.
        jaccard: mean Jaccard similarity of the replicates' sets to the chosen one, 0 to 1.
        replicates: number of replicates; ``share`` has a standard error of sqrt(share (1 - share) / replicates).
        sets: the set of each replicate.
    """

    share: float
    layer_share: tuple[float, ...]
    jaccard: float
    replicates: int
    sets: tuple[tuple[int, ...], ...]


def jaccard(one: Iterable[int], other: Iterable[int]) -> float:
    """Jaccard similarity of two layer sets, shared layers over layers in either: 1 for equal sets, 0 for disjoint ones.

    Raises:
        ElsiError: both are empty.
    """
    one, other = set(one), set(other)
    if not one | other:
        raise ElsiError("two empty layer sets have no Jaccard similarity")
    return len(one & other) / len(one | other)


def stability(fp: Fingerprint, method: str, m: int, **options: Any) -> Stability:
    """Repeat a selection on every bootstrap replicate of the fingerprint.

    Raises:
        ElsiError: the fingerprint carries no bootstrap for its variant in force.
    """
    replicates = fp.bootstrap
    if replicates is None:
        raise ElsiError("this fingerprint carries no bootstrap for the variant in force: calibrate with bootstrap > 0")
    chosen = set(select(fp, method, m, **options).layers)
    sets = [select(grams, method, m, **options).layers for grams in replicates]
    n, r = fp.num_layers, len(sets)
    return Stability(
        share=sum(set(s) == chosen for s in sets) / r,
        layer_share=tuple(sum(j in s for s in sets) / r for j in range(n)),
        jaccard=sum(jaccard(chosen, s) for s in sets) / r,
        replicates=r,
        sets=tuple(sets),
    )


def _beam(method, fp, m, k_beam, after_midpoint, allowed, propose, settings, reading) -> Selection:
    """Steps S1 to S5 of both algorithms; ``propose`` names the layers by which a set is extended."""
    reading = _reading(reading)
    grams, alpha = _prepared(fp, reading)
    n = len(grams)
    _check_size(m, len(allowed))
    _at_least_one("k_beam", k_beam)
    if after_midpoint not in ("singletons", "seeds", "never"):
        raise ElsiError(f"after_midpoint = {after_midpoint!r}: one of singletons, seeds, never")
    late = after_midpoint == "seeds" or (after_midpoint == "singletons" and m == 1)
    seeds = [(j,) for j in allowed if not late or j >= n // 2]
    if not seeds:
        raise ElsiError(f"none of the layers {allowed} lies after the midpoint of {n}: allow later ones, or after_midpoint='never'")
    frontier = [_prune(grams, alpha, seeds, k_beam)]
    while len(frontier) < m:
        extended = {tuple(sorted((*layers, r))) for layers, _ in frontier[-1] for r in propose(layers, grams, alpha)}
        if not extended:
            raise ElsiError(f"no set of {len(frontier) + 1} of {n} layers can be reached: raise k_pool or lower m = {m}")
        frontier.append(_prune(grams, alpha, sorted(extended), k_beam))
    among = None if len(allowed) == n else list(allowed)
    parameters = {"m": m, "k_beam": k_beam, **settings, "after_midpoint": after_midpoint, "among": among, **reading}
    return Selection(*frontier[-1][0], method, tuple(frontier), parameters)


def _prune(grams: Tensor, alpha: float, sets: list[tuple[int, ...]], k_beam: int | None) -> tuple[Scored, ...]:
    """The ``k_beam`` sets of highest entropy, best first; among equals the lexicographically first."""
    index = torch.tensor(sets)
    entropies = torch.cat([gram_entropy(grams[chunk].sum(1), alpha) for chunk in index.split(2048)])
    order = torch.sort(entropies, descending=True, stable=True).indices[:k_beam].tolist()
    return tuple((sets[i], float(entropies[i])) for i in order)


def _grams(fp: Fingerprint | Tensor) -> Tensor:
    grams = fp if isinstance(fp, Tensor) else fp.grams
    if grams.ndim != 3 or grams.shape[-1] != grams.shape[-2]:
        raise ElsiError(f"Gram matrices of shape {tuple(grams.shape)}: (N, B, B) is expected")
    return grams


def _allowed(fp: Fingerprint | Tensor, among: Sequence[int] | None) -> tuple[int, ...]:
    """The layers that may be chosen, increasing."""
    n = len(_grams(fp))
    return tuple(range(n)) if among is None else check_layers(among, n)


def _reading(given: dict[str, Any]) -> dict[str, Any]:
    known = {"alpha": 1.0, "center": False, "normalize": "none"}
    unknown = set(given) - set(known)
    if unknown:
        raise ElsiError(f"unknown option {', '.join(sorted(unknown))}: a reading has {', '.join(known)}")
    return known | given


def _prepared(fp: Fingerprint | Tensor, reading: dict[str, Any]) -> tuple[Tensor, float]:
    reading = _reading(reading)
    return prepare_grams(_grams(fp), reading["center"], reading["normalize"]), reading["alpha"]


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number: Python's or numpy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_size(m: int, num_layers: int) -> None:
    if not is_whole(m) or not 1 <= m <= num_layers:
        raise ElsiError(f"m = {m} outside 1..{num_layers}: there are {num_layers} layers to choose from")


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and not (is_whole(value) and value >= 1):
        raise ElsiError(f"{name} = {value}: at least 1, or None for no limit")
    return value
