"""The numbers behind the figures: from fingerprints to data frames, with intervals over prompts."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from elsi_lib.cka import compartments, find_boundaries, permutation_null, transition_scores
from elsi_lib.entropy import gram_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import SPECTRA, Fingerprint
from elsi_lib.selection import TIE, all_set_entropies, elsi, exhaustive, redundancy_or_nan, stability

THIRDS = ("early", "middle", "late")
FIRST = {True: "kept", False: "dropped"}  # what becomes of each prompt's first position
QUIET = "quiet rows"
TOKENS, BLOCKS = "token states", "block averages"  # two readings of "the entropy of a prompt"


def third_of(layer: int, num_layers: int) -> str:
    """Third of the depth in which a layer lies: early, middle or late."""
    return THIRDS[3 * layer // num_layers]


@contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of eigenvalue problems of 32 x 32: several threads take longer than one, and their sums differ in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(function: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
    """Compute in one thread, and keep the seconds it took in ``attrs["seconds"]`` of its data frame, for the passport."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        started = time.perf_counter()
        with one_thread():
            data = function(*args, **kwargs)
        data.attrs["seconds"] = time.perf_counter() - started
        return data

    return run


@timed
def prompt_entropies(fp: Fingerprint) -> pd.DataFrame:
    """S_1 of single prompts, layer by layer, without the token filter (figure 1).

    Returns:
        One row per reading, first position kept or dropped, and prompt; columns ``layer_0`` .. in nats. ``token states`` are the
        raw states of a window at the prompt's start, ``block averages`` the prompt's own representative of B rows.
    """
    parts = []
    for sink in (True, False):
        view = fp.variant(filtered=False, sink=sink)
        readings = {BLOCKS: view.prompt_entropy()}
        if "token_spectra" in fp.tensors:
            readings = {TOKENS: view.token_entropy_spectra("all"), **readings}
        for reading, values in readings.items():
            part = pd.DataFrame(values.numpy().astype(np.float32), columns=[f"layer_{j}" for j in range(fp.num_layers)])
            for place, (column, value) in enumerate(
                [("target", fp.target), ("reading", reading), ("first_position", FIRST[sink]), ("prompt", range(len(part)))]
            ):
                part.insert(place, column, value)
            parts.append(part)
    return pd.concat(parts, ignore_index=True)


def layer_columns(data: pd.DataFrame) -> np.ndarray:
    """(rows, N) nats: the layer columns of :func:`prompt_entropies`."""
    return data.filter(like="layer_").to_numpy(dtype=np.float64)


@timed
def wave(fps: Sequence[Fingerprint | None]) -> pd.DataFrame:
    """S_1 of each layer's representative along depth, filter on (figure 2).

    Args:
        fps: one or more targets; None is passed over.

    Returns:
        Columns target, first_position (kept, dropped, or ``quiet rows``), layer, entropy (nats), low, high, replicate_mean,
        replicates, norm_ratio, rows. ``low`` and ``high``
        are entropy -/+ 1.96 standard deviations over the bootstrap replicates of prompts, cut at 0: percentiles would need more
        replicates. S_1 of an average has a bias from the number of prompts; ``replicate_mean`` minus entropy estimates it. NaN where
        the variant has no replicates.
        ``norm_ratio`` is the norm of the first position's state over the median norm of the others; NaN where not recorded.
        ``quiet rows`` leaves out the rows of the representative into which states of outlying norm were averaged, see
        :func:`quiet_rows`; ``rows`` counts those used.
    """
    parts = []
    for fp, sink in itertools.product(filter(None, fps), (True, False)):
        view = fp.variant(sink=sink)
        entropy = view.entropy().numpy()
        spread = mean = np.full_like(entropy, np.nan)
        replicates = view.bootstrap
        if replicates is not None and len(replicates) > 1:
            drawn = gram_entropy(replicates).numpy()
            spread, mean = 1.96 * drawn.std(0, ddof=1), drawn.mean(0)
        ratio = (fp.norms[0] / fp.norms[1]).numpy() if "norms" in fp.tensors else np.nan
        parts.append(
            pd.DataFrame(
                {
                    "target": fp.target,
                    "first_position": FIRST[sink],
                    "layer": range(fp.num_layers),
                    "entropy": entropy,
                    "low": np.maximum(entropy - spread, 0.0),
                    "high": entropy + spread,
                    "replicate_mean": mean,
                    "replicates": 0 if replicates is None else len(replicates),
                    "norm_ratio": ratio,
                    "rows": fp.block,
                }
            )
        )
        quiet = quiet_rows(view.grams)
        if sink and len(quiet) > 1:
            entropy = gram_entropy(view.grams[:, quiet][:, :, quiet]).numpy()
            parts.append(
                parts[-1].assign(
                    **{"first_position": QUIET, "entropy": entropy, "rows": len(quiet), "replicates": 0},
                    **dict.fromkeys(("low", "high", "replicate_mean"), np.nan),
                )
            )
    return pd.concat(parts, ignore_index=True)


def quiet_rows(grams: Tensor, limit: float = 1.25) -> list[int]:
    """Rows of the representatives that no state of outlying norm entered: attention sinks, wherever in a prompt they sit.

    An average over a thousand blocks dilutes one outlier, so the limit is low, and rows averaged over few blocks may all exceed it.

    Args:
        grams: (N, B, B).
        limit: a row is left out if at any layer it is longer than this times that layer's shortest row.
    """
    norms = grams.diagonal(dim1=-2, dim2=-1).sqrt()
    ratio = (norms / norms.amin(-1, keepdim=True)).amax(0)
    return (ratio <= limit).nonzero().flatten().tolist()


@timed
def pair_entropies(fp: Fingerprint, seeds: int = 10) -> pd.DataFrame:
    """S_1 of the seeds, the layers of highest entropy, each paired with every other layer (figure 3).

    Returns:
        Columns seed, seed_place (0 for the highest entropy), layer, entropy (nats), gain (nats above the seed alone), place (rank
        of the pair among all pairs of the target, 1 for the best).
    """
    single = fp.entropy()
    order = torch.sort(single, descending=True, stable=True).indices[:seeds].tolist()
    pairs, entropies = all_set_entropies(fp, 2)
    values = {tuple(pair): float(s) for pair, s in zip(pairs.tolist(), entropies, strict=True)}
    ranks = {pair: place for place, pair in enumerate(sorted(values, key=values.get, reverse=True), start=1)}
    rows = []
    for place, seed in enumerate(order):
        for layer in (j for j in range(fp.num_layers) if j != seed):
            pair = (min(seed, layer), max(seed, layer))
            rows.append((seed, place, layer, values[pair], values[pair] - float(single[seed]), ranks[pair]))
    return pd.DataFrame(rows, columns=["seed", "seed_place", "layer", "entropy", "gain", "place"])


@timed
def variance_between_prompts(fp: Fingerprint, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """What the token filter does to the entropies of single prompts: their mean, and their variance between prompts (figure 4).

    The change of variance in a third of the depth is the mean over its layers of the variance between prompts, positions chosen
    against all positions, minus one. Prompts are paired: an interval draws prompts with replacement and recomputes both
    variances from the same draw (percentiles 2.5 and 97.5).

    Args:
        resamples: draws of prompts for the intervals.
        seed: of those draws.

    Returns:
        Columns reading, first_position, positions (all, kept by the filter, random: equally many), quantity, depth, value, low,
        high, prompts, target. Quantity ``mean`` (nats) and ``variance`` (nats squared) are per layer; ``change`` (percent, against all
        positions) and ``change against random`` (percent) per third. Random positions keep the first one, and with it
        an attention sink, in another share of the prompts than the filter does: compare with the first position dropped.

    Raises:
        ElsiError: fewer than 3 prompts.
    """
    rows = []
    for reading, sink, entropies in _readings(fp):
        count, n = entropies["all"].shape
        if count < 3:
            raise ElsiError(f"{count} prompts with {reading}: a variance between prompts needs at least 3")
        thirds = np.array([third_of(j, n) for j in range(n)])
        draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        spread = {}
        for positions, values in entropies.items():
            about = (reading, FIRST[sink], positions)
            for j, (mean, variance) in enumerate(zip(values.mean(0), values.var(0, ddof=1), strict=True)):
                rows.append((*about, "mean", j, mean, np.nan, np.nan, count))
                rows.append((*about, "variance", j, variance, np.nan, np.nan, count))
            spread[positions] = (values.var(0, ddof=1), _resampled_variance(values, draws))
        comparisons = [(p, "all", "change") for p in entropies if p != "all"]
        if "random" in entropies:
            comparisons.append(("kept", "random", "change against random"))
        for (positions, against, quantity), third in itertools.product(comparisons, THIRDS):
            of = thirds == third
            if not of.any():
                continue
            with np.errstate(invalid="ignore", divide="ignore"):  # a draw of one prompt alone has no variance
                own, drawn = (
                    100 * (spread[positions][i][..., of].mean(-1) / spread[against][i][..., of].mean(-1) - 1) for i in (0, 1)
                )
            interval = np.nanpercentile(drawn, [2.5, 97.5])
            rows.append((reading, FIRST[sink], positions, quantity, third, own, *interval, count))
    columns = ["reading", "first_position", "positions", "quantity", "depth", "value", "low", "high", "prompts"]
    return pd.DataFrame(rows, columns=columns).assign(target=fp.target)


def _readings(fp: Fingerprint):
    """Per reading and first position kept or dropped: {positions: (P, N) nats}."""
    for sink in (True, False):
        if "token_spectra" in fp.tensors:
            view = fp.variant(sink=sink)
            yield TOKENS, sink, {positions: view.token_entropy_spectra(positions).numpy() for positions in SPECTRA}
    for sink in (True, False):
        chosen = {"all": fp.variant(False, sink), "kept": fp.variant(True, sink)}
        yield BLOCKS, sink, {positions: view.prompt_entropy().numpy() for positions, view in chosen.items()}


def _resampled_variance(values: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """(R, N) sample variances of the rows (P, N) drawn with multiplicities (R, P)."""
    centred = values - values.mean(0)
    count = values.shape[0]
    mean, square = draws @ centred / count, draws @ centred**2 / count
    return (square - mean**2) * count / (count - 1)


@one_thread()
def cka_maps(
    fps: Sequence[Fingerprint | None],
    *,
    filtered: Sequence[bool] = (True,),
    debiased: Sequence[bool] = (False,),
    prominence: float = 0.1,
) -> list[dict]:
    """Linear CKA between all layers with its compartments, one entry per target and reading (figures 5 and 6).

    Args:
        fps: one or more targets; None is passed over.
        filtered: token filter on or off.
        debiased: estimator of the CKA.
        prominence: of the boundary detector, the same for all, see :func:`~elsi_lib.cka.find_boundaries`.

    Returns:
        Dictionaries with target, filtered, debiased, matrix (N, N), delta (N - 1,), boundaries, compartments, seconds, and null: the
        mean CKA between layers after the rows of one are shuffled, what the estimator gives where nothing corresponds.
    """
    maps = []
    for use, fp, estimator in itertools.product(filtered, filter(None, fps), debiased):
        started = time.perf_counter()
        view = fp.variant(filtered=use)
        M = view.cka(estimator)
        delta = transition_scores(M)
        boundaries = find_boundaries(delta, prominence)
        apart = ~torch.eye(fp.num_layers, dtype=torch.bool)
        maps.append(
            {
                "target": fp.target,
                "filtered": use,
                "debiased": estimator,
                "matrix": M.numpy(),
                "delta": delta.numpy(),
                "boundaries": boundaries,
                "compartments": compartments(boundaries, fp.num_layers),
                "null": float(permutation_null(view.grams, 20, debiased=estimator)[:, apart].mean()),
            }
        )
        maps[-1]["seconds"] = time.perf_counter() - started
    return maps


def cka_frame(maps: Sequence[dict]) -> pd.DataFrame:
    """The maps as rows: target, filtered, debiased, layer, other (layer < other), cka."""
    parts = []
    for entry in maps:
        row, column = np.triu_indices(len(entry["matrix"]), 1)
        about = {name: entry[name] for name in ("target", "filtered", "debiased")}
        parts.append(pd.DataFrame({**about, "layer": row, "other": column, "cka": entry["matrix"][row, column]}))
    data = pd.concat(parts, ignore_index=True)
    data.attrs["seconds"] = sum(entry["seconds"] for entry in maps)
    return data


def cka_results(maps: Sequence[dict]) -> list[dict]:
    """Boundaries, compartments and null of each map, for a passport."""
    names = ("target", "filtered", "debiased", "boundaries", "compartments", "null", "delta")
    return [{name: entry[name] for name in names} for entry in maps]


@timed
def frontier(fp: Fingerprint, m: int = 3, keep: int = 10, **options) -> pd.DataFrame:
    """The beam of ELSI at every size up to m, with the exhaustive optimum of each size (figure 7).

    Args:
        keep: sets shown per size.
        options: of :func:`~elsi_lib.selection.elsi`.

    Returns:
        Columns size, place (1 for the best), layers (tuple), entropy (nats), regret (nats below the exhaustive optimum of that
        size, >= 0), source (``beam``, and one row ``exhaustive`` per size), rank among the ``sets`` of that size, share (of the
        bootstrap replicates in which ELSI at this size chooses the set; NaN without replicates), redundancy (mean CKA over the
        set's pairs; NaN for one layer).
    """
    beam = elsi(fp, m, **options).frontier
    rows = []
    for size, sets in enumerate(beam, start=1):
        chosen = [] if fp.bootstrap is None else stability(fp, "elsi", size, **options).sets
        best = exhaustive(fp, size)
        entropies = all_set_entropies(fp, size)[1]
        shown = [(1, best.layers, best.entropy, "exhaustive")]
        shown += [(place, *scored, "beam") for place, scored in enumerate(sets[:keep], start=1)]
        for place, layers, entropy, source in shown:
            rank = int((entropies > entropy + TIE).sum()) + 1
            share = chosen.count(layers) / len(chosen) if chosen else np.nan
            row = (size, place, layers, entropy, max(best.entropy - entropy, 0.0), source)
            rows.append((*row, rank, len(entropies), share, redundancy_or_nan(fp, layers)))
    columns = ["size", "place", "layers", "entropy", "regret", "source", "rank", "sets", "share", "redundancy"]
    return pd.DataFrame(rows, columns=columns)
