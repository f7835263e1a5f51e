"""Matrix entropy of states, and of layer sets through sums of Gram matrices (paper, section 3.1).

For X of shape T x D: K = X X^T, p_i = lambda_i(K) / tr K = sigma_i(X)^2 / ||X||_F^2, and
S_alpha = log(sum_i p_i^alpha) / (1 - alpha), the Renyi entropy of the spectrum; alpha = 1 is Shannon's. In nats, in float64.

Concatenating layers along the feature axis adds their Gram matrices, [X Y] [X Y]^T = X X^T + Y Y^T, so the entropy of any layer
set follows from N matrices of B x B: no states, no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from elsi_lib.errors import ElsiError

NORMALIZE = ("none", "trace")
_ROUNDING = 1e-14  # relative; what float64 leaves of an exact zero after sums over some thousand terms


def matrix_entropy(X: Tensor, alpha: float = 1.0, center: bool = False) -> float:
    """Matrix-based Renyi entropy of the rows of X (paper, section 3.1).

    Args:
        X: (T, D) states or anything :func:`torch.as_tensor` takes.
        alpha: order, > 0; 1 is Shannon, 2 the collision entropy, ``math.inf`` the min-entropy.
        center: subtract the mean row first (the paper does not say; off).

    Returns:
        S_alpha in nats, between 0 (rank one) and log min(T, D) (equal singular values).

    Raises:
        ElsiError: X is not a matrix, holds NaN or infinity, or is zero; alpha <= 0.
    """
    X = torch.as_tensor(X).to(torch.float64)
    if X.ndim != 2 or 0 in X.shape:
        raise ElsiError(f"states of shape {tuple(X.shape)}: a non-empty matrix (T, D) is expected")
    if center:
        centred = X - X.mean(0, keepdim=True)
        if centred.abs().max() <= _ROUNDING * X.abs().max():
            raise ElsiError("all states are equal, so nothing is left when they are centred: their entropy is undefined")
        X = centred
    K = X @ X.mT if X.shape[0] <= X.shape[1] else X.mT @ X  # same non-zero spectrum, smaller side
    return float(gram_entropy(K, alpha))


def gram_entropy(K: Tensor, alpha: float = 1.0) -> Tensor:
    """S_alpha of each Gram matrix of a batch.

    Args:
        K: (..., B, B) symmetric positive semi-definite.
        alpha: order, > 0, ``math.inf`` included.

    Returns:
        (...) float64, nats. Eigenvalues below 1e-14 of the largest count as zero: no float64 Gram matrix resolves them. That
        matters to orders well below 1 only, where a full spectrum with such a tail would read too low.

    Raises:
        ElsiError: alpha <= 0, NaN or infinity in K, or a zero matrix.
    """
    if not alpha > 0:
        raise ElsiError(f"alpha = {alpha}: the order of the entropy is above 0 (1 is Shannon, inf the min-entropy)")
    K = K.to(torch.float64)
    if not torch.isfinite(K).all():
        raise ElsiError("NaN or infinity in the states: their entropy is undefined; check the target's dtype")
    spectrum = torch.linalg.eigvalsh(K)
    largest = spectrum[..., -1:]
    if (largest <= 0).any():
        raise ElsiError("all states are zero: their entropy is undefined")
    # Rounding turns zero eigenvalues into some 1e-16 of the largest, of either sign; orders below 1 would count them.
    spectrum = spectrum.where(spectrum > _ROUNDING * largest, 0.0)
    p = spectrum / spectrum.sum(-1, keepdim=True)
    if alpha == 1:
        return torch.special.entr(p).sum(-1)
    if alpha == math.inf:
        return -p.amax(-1).log()
    if alpha > 2:  # scaled by the largest share, so that p^alpha cannot underflow to nothing
        top = p.amax(-1, keepdim=True)
        return (alpha * top.squeeze(-1).log() + ((p / top) ** alpha).sum(-1).log()) / (1 - alpha)
    # sum p^alpha = 1 + sum p (p^(alpha - 1) - 1): keeps its digits when alpha is next to 1.
    excess = torch.where(p > 0, p * torch.expm1((alpha - 1) * p.log()), 0.0).sum(-1)
    return torch.log1p(excess) / (1 - alpha)


def set_entropy(grams: Tensor, layers: Sequence[int], alpha: float = 1.0) -> float:
    """S_alpha, in nats, of the representatives of ``layers`` concatenated along the feature axis.

    Args:
        grams: (N, B, B), K_j of each layer.
        layers: 0-based block numbers; the order does not matter. Taken as they are; :func:`~elsi_lib.selection.check_layers`
            is for input from outside.
    """
    return float(gram_entropy(grams[list(layers)].sum(0), alpha))


def prepare_grams(grams: Tensor, center: bool = False, normalize: str = "none") -> Tensor:
    """Gram matrices under another reading of the paper, from the same fingerprint.

    Args:
        grams: (N, B, B).
        center: subtract the mean row of each representative: K -> H K H, H = I - 11^T / B.
        normalize: ``"trace"`` gives every layer trace 1, so that layers of large norm do not drown the others; ``"none"``
            weights a layer by its squared norm, as plain concatenation does.

    Returns:
        (N, B, B) float64.

    Raises:
        ElsiError: unknown ``normalize``; a layer of zero trace under ``"trace"``; with ``center`` one whose rows are all equal.
    """
    if normalize not in NORMALIZE:
        raise ElsiError(f"normalize = {normalize!r}: one of {', '.join(NORMALIZE)}")
    K = grams.to(torch.float64)
    if center:
        before = _trace(K)
        K = K - K.mean(-1, keepdim=True)
        K = K - K.mean(-2, keepdim=True)
        if (equal := _trace(K) <= _ROUNDING * before).any():
            raise ElsiError(f"layer {int(equal.nonzero()[0])}: all rows are equal, so nothing is left when they are centred")
    if normalize == "trace":
        trace = _trace(K)
        if (trace <= 0).any():
            raise ElsiError(f"layer {int((trace <= 0).nonzero()[0])} has zero trace and cannot be normalised")
        K = K / trace[..., None, None]
    return K


def _trace(K: Tensor) -> Tensor:
    return K.diagonal(dim1=-2, dim2=-1).sum(-1)
