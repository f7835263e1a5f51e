"""Which token positions of a prompt carry information: predictive entropy and the rho filter (paper, section 4.1)."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from elsi_lib.errors import ElsiError

_CHUNK = 262_144  # logits handled at a time, 1 MB in float32: stays in the cache, and large enough to share among threads


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of the target's next-token distribution at each position.

    H_t = -sum_v p_t(v) log p_t(v), p_t = softmax(logits_t); paper, section 4.1.

    Args:
        logits: (..., V), any floating type; -inf marks an impossible token.

    Returns:
        (...) float32, nats, between 0 and log V.

    Raises:
        ElsiError: a position whose logits hold NaN or +inf, or are all -inf.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _CHUNK // rows.shape[-1])
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    buffers = torch.empty(2, min(step, rows.shape[0]), rows.shape[-1], dtype=torch.float32, device=logits.device)
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        x, weight = buffers[:, : len(chunk)]
        x.copy_(chunk)
        x -= x.amax(-1, keepdim=True)
        total = torch.exp(x, out=weight).sum(-1)
        # An impossible token contributes 0, not 0 * -inf.
        mean = weight.mul_(x.clamp_min_(-1e4)).sum(-1) / total
        out[start : start + step] = total.log() - mean
    if not torch.isfinite(out).all():
        bad = int((~torch.isfinite(out)).nonzero()[0, 0])
        raise ElsiError(f"logits at position {bad} are not a distribution (NaN, +inf or all -inf): check the target's dtype")
    return out.clamp_min_(0.0).reshape(logits.shape[:-1])


def top_entropy_positions(entropy: Tensor, rho: float) -> Tensor:
    """Positions of the rho share of a prompt with the highest entropy, in their order in the prompt (paper, 4.1).

    Args:
        entropy: (T,) nats, from :func:`token_entropy`.
        rho: share to keep, 0 < rho <= 1; the paper uses 0.30.

    Returns:
        (n,) int64, increasing, n = ceil(rho T); among equal entropies the earlier position is kept.

    Raises:
        ElsiError: rho outside (0, 1], or entropy not a non-empty vector.
    """
    if not 0 < rho <= 1:
        raise ElsiError(f"rho = {rho} outside (0, 1]: the share of positions to keep; the paper uses 0.30")
    if entropy.ndim != 1 or entropy.numel() == 0:
        raise ElsiError(f"entropies of shape {tuple(entropy.shape)}: one prompt's non-empty vector (T,) is expected")
    order = torch.sort(entropy, descending=True, stable=True).indices
    return order[: kept_count(entropy.numel(), rho)].sort().values


def kept_count(length: int, rho: float) -> int:
    """Number of positions that the filter keeps of a prompt of ``length`` tokens: ceil(rho length)."""
    return math.ceil(Fraction(str(float(rho))) * length)  # rho as written: 0.3 of 10 is 3, though 0.1 + 0.2 is above 0.3
