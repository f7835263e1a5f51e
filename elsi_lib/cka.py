"""Linear CKA between layers, its transitions, and CKA conditional on a layer set (paper, sections 3.2 and 4.4).

CKA(K, L) = <HKH, HLH>_F / (||HKH||_F ||HLH||_F), H = I - 11^T / T, for Gram matrices K, L of T rows. With few rows the plain (biased)
estimate saturates: for independent Gaussian states of T x d it is about d / (d + T). The debiased estimate (HSIC of Song et al. 2012,
as used by Nguyen et al. 2021) has mean 0 there and can be negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from elsi_lib.errors import ElsiError


def linear_cka(X: Tensor, Y: Tensor, debiased: bool = False) -> float:
    """Linear CKA of two sets of states over the same T rows.

    Args:
        X: (T, D).
        Y: (T, E).
        debiased: the unbiased HSIC estimator (T >= 4) in place of the plain one.

    Returns:
        0 to 1 (1 up to rotation and scale); debiased, also below 0.

    Raises:
        ElsiError: different row counts, fewer than 2 (4) rows, constant rows, NaN or infinity.
    """
    X, Y = torch.as_tensor(X).to(torch.float64), torch.as_tensor(Y).to(torch.float64)
    if X.ndim != 2 or Y.ndim != 2 or X.shape[0] != Y.shape[0]:
        raise ElsiError(f"CKA of shapes {tuple(X.shape)} and {tuple(Y.shape)}: two matrices with the same rows are expected")
    return float(cka_matrix(torch.stack([X @ X.mT, Y @ Y.mT]), debiased)[0, 1])


def cka_matrix(grams: Tensor, debiased: bool = False, *, among: Sequence[int] | None = None) -> Tensor:
    """CKA between all pairs of layers, or of those among the layers named.

    Args:
        grams: (..., N, T, T) Gram matrices over the same T rows.
        debiased: see :func:`linear_cka`.
        among: n layers, in the order wanted; None for all.

    Returns:
        (..., N, N) or (..., n, n) float64, symmetric, ones on the diagonal.

    Raises:
        ElsiError: too few rows, NaN or infinity, or a layer whose rows are all equal.
    """
    layers = range(grams.shape[-3]) if among is None else list(among)
    K = (grams if among is None else grams[..., layers, :, :]).to(torch.float64)
    rows = K.shape[-1]
    least = 4 if debiased else 2
    if rows < least:
        raise ElsiError(f"{'debiased ' if debiased else ''}CKA needs at least {least} rows, got {rows}: use a larger block")
    if not torch.isfinite(K).all():
        raise ElsiError("NaN or infinity in the Gram matrices: CKA is undefined; check the target's dtype")
    # <A, B> of U-centred matrices is the unbiased HSIC up to the factor 1 / (T (T - 3)), which cancels in the ratio.
    flat = (_u_centred(K) if debiased else _centred(K)).flatten(-2)
    hsic = flat @ flat.mT
    own = hsic.diagonal(dim1=-2, dim2=-1)
    constant = own <= 1e-24 * torch.linalg.matrix_norm(K) ** 2  # what rounding leaves of equal rows, centred
    if constant.any():
        raise ElsiError(f"layer {layers[int(constant.nonzero()[0, -1])]}: all rows are equal, so its CKA is undefined")
    norm = own.sqrt()
    M = hsic / (norm[..., :, None] * norm[..., None, :])
    M.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return M


def _centred(K: Tensor) -> Tensor:
    """H K H."""
    K = K - K.mean(-1, keepdim=True)
    return K - K.mean(-2, keepdim=True)


def _u_centred(K: Tensor) -> Tensor:
    """U-centred matrices (Szekely and Rizzo 2014): zero diagonal, rows that sum to zero."""
    n = K.shape[-1]
    eye = torch.eye(n, dtype=torch.bool, device=K.device)
    K = _centred(K).masked_fill(eye, 0.0)  # centring first changes nothing in exact arithmetic and saves digits
    row = K.sum(-1, keepdim=True)
    U = K - row / (n - 2) - row.mT / (n - 2) + K.sum((-2, -1), keepdim=True) / ((n - 1) * (n - 2))
    return U.masked_fill(eye, 0.0)


def conditional_cka_matrix(grams: Tensor, layers: Sequence[int], debiased: bool = False) -> Tensor:
    """M_L(i, j) = CKA(Z_{L+i}, Z_{L+j}): CKA between the set L joined by layer i and the set L joined by layer j (paper, 4.4).

    L + i is a set: for i in L it is L itself, so nothing is counted twice.

    Args:
        grams: (N, B, B).
        layers: the set L, possibly empty (then this is :func:`cka_matrix`).

    Returns:
        (N, N) float64.
    """
    inside = torch.zeros(grams.shape[0], dtype=torch.bool)
    inside[list(layers)] = True
    joined = grams[inside].sum(0) + grams.masked_fill(inside[:, None, None], 0.0)
    return cka_matrix(joined, debiased)


def transition_scores(M: Tensor) -> Tensor:
    """delta_l = ||M[l+1, :] - M[l, :]||^2, how much the similarity profile changes from layer l to l + 1 (paper, 3.2).

    Args:
        M: (N, N) CKA matrix.

    Returns:
        (N - 1,) float64.
    """
    M = torch.as_tensor(M, dtype=torch.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ElsiError(f"a square layer-by-layer matrix is expected, got shape {tuple(M.shape)}")
    return (M[1:] - M[:-1]).square().sum(-1)


def find_boundaries(delta: Tensor, prominence: float = 0.1) -> tuple[int, ...]:
    """Compartment boundaries: the large peaks of the transition score (paper, 3.2).

    The paper does not state its detector. Here: peaks of ``delta`` (its ends count as falling to zero outside) whose prominence is
    at least ``prominence`` times the largest score.

    Args:
        delta: (N - 1,) from :func:`transition_scores`.
        prominence: share of the largest score, 0 < prominence <= 1.

    Returns:
        Increasing layer numbers l; each boundary lies between layer l and layer l + 1.
    """
    from scipy.signal import find_peaks  # imported here: it takes seconds, and commands need no boundaries

    if not 0 < prominence <= 1:
        raise ElsiError(f"prominence = {prominence} outside (0, 1]: it is a share of the largest transition score")
    score = np.concatenate([[0.0], torch.as_tensor(delta, dtype=torch.float64).numpy(), [0.0]])
    if score.max() <= 0:
        return ()
    peaks, _ = find_peaks(score, prominence=prominence * score.max())
    return tuple(int(peak) - 1 for peak in peaks)


def compartments(boundaries: Sequence[int], num_layers: int) -> tuple[tuple[int, int], ...]:
    """Runs of layers between boundaries, as (first, last) pairs that cover 0 .. N - 1."""
    starts = [0, *(b + 1 for b in boundaries)]
    ends = [*boundaries, num_layers - 1]
    return tuple(zip(starts, ends, strict=True))


def permutation_null(grams: Tensor, repeats: int = 100, seed: int = 0, debiased: bool = False) -> Tensor:
    """CKA between layers after the rows of one of them are shuffled: what similarity means when rows do not correspond.

    Args:
        grams: (N, B, B).
        repeats: number of shuffles.

    Returns:
        (repeats, N, N) float64; entry (r, i, j) has the rows of layer j permuted, the same permutation for all layers.
    """
    generator = torch.Generator().manual_seed(seed)
    n, rows = grams.shape[0], grams.shape[-1]
    out = torch.empty(repeats, n, n, dtype=torch.float64)
    for r in range(repeats):
        shuffle = torch.randperm(rows, generator=generator)
        both = torch.cat([grams, grams[:, shuffle][:, :, shuffle]])
        out[r] = cka_matrix(both, debiased)[:n, n:]
    return out
