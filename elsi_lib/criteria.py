"""Criteria that score a layer set beside the paper's: information, complementarity, diversity and coverage.

Pure functions of the layers' Gram matrices K_l (N, B, B), or of a similarity M between layers (N, N) such as CKA, and of layer sets
(C, m), one per row. Each returns (C,) float64, higher is better. K_L is the sum of K_l over a set L, rho_l = K_l / tr K_l, and S the
entropy of a spectrum in nats, see :mod:`elsi_lib.entropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elsi_lib.entropy import gram_entropy, prepare_grams
from elsi_lib.errors import ElsiError

WEIGHTS = ("trace", "equal")
_CHUNK = 2048  # sets at a time: bounds the memory
_ROUNDING = 1e-14  # relative; eigenvalues below are zeros that float64 could not resolve, as in elsi_lib.entropy


def set_entropies(grams: Tensor, sets: Tensor | Sequence[Sequence[int]], alpha: float = 1.0, normalize: str = "none") -> Tensor:
    """S_alpha(K_L) of each set: the paper's criterion (section 3.1); with ``normalize="trace"`` every layer has trace 1 first."""
    grams, sets = _checked(grams, sets)
    return _each(prepare_grams(grams, normalize=normalize), sets, lambda K, _: gram_entropy(K, alpha))


def holevo_chi(grams: Tensor, sets: Tensor | Sequence[Sequence[int]], weights: str = "trace") -> Tensor:
    """Holevo's chi = S(sum_l w_l rho_l) - sum_l w_l S(rho_l): what a set's layers tell apart, the quantum Jensen-Shannon divergence.

    Between 0 (all rho_l equal; any single layer) and the entropy of the weights (orthogonal rho_l), log m with equal ones.
    Source: Holevo 1973; Briet and Harremoes 2009.

    Args:
        weights: ``"trace"``, w_l = tr K_l / tr K_L, so that the first term is S_1 of the concatenation; ``"equal"``, w_l = 1 / m.
    """
    if weights not in WEIGHTS:
        raise ElsiError(f"weights = {weights!r}: one of {', '.join(WEIGHTS)}")
    grams, sets = _checked(grams, sets)
    single = gram_entropy(grams)
    grams = prepare_grams(grams, normalize="trace" if weights == "equal" else "none")
    share = _traces(grams)[sets]
    if sets.shape[1] == 1:  # zero, without what rounding leaves
        return torch.zeros(len(sets), dtype=torch.float64)
    share = share / share.sum(-1, keepdim=True)
    return (_each(grams, sets, lambda K, _: gram_entropy(K)) - (share * single[sets]).sum(-1)).clamp_min(0.0)


def effective_rank(grams: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Effective rank of the concatenation: exp of the entropy of sigma_i / sum sigma_i, between 1 and B (Roy and Vetterli 2007).

    The singular values sigma_i, not their squares as in S_1, so that small directions count for more.
    """
    grams, sets = _checked(grams, sets)

    def score(K: Tensor, _: Tensor) -> Tensor:
        sigma = _spectrum(K).sqrt()
        return torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1).exp()

    return _each(grams, sets, score)


def log_det_information(grams: Tensor, sets: Tensor | Sequence[Sequence[int]], scale: float | None = None) -> Tensor:
    """log det(I + c K_L) in nats: the information of Gaussian states seen through noise, monotone and submodular in L.

    Source: Kulesza and Taskar 2012; Krause, Singh and Guestrin 2008.

    Args:
        scale: c > 0. None takes B / mean_l tr K_l, so that the mean eigenvalue of an average layer is one, as large as the noise.
    """
    grams, sets = _checked(grams, sets)
    c = grams.shape[-1] / float(_traces(grams).mean()) if scale is None else scale
    if not c > 0:
        raise ElsiError(f"scale = {scale}: above 0, or None for B over the mean trace of a layer")
    return _each(grams, sets, lambda K, _: torch.log1p(c * _spectrum(K)).sum(-1))


def log_det_similarity(similarity: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """log det M_L of the set's part of a similarity matrix, a determinantal point process (Kulesza and Taskar 2012).

    0 for dissimilar layers (M_L = I) down to -inf for equal ones; -inf too where the determinant is not positive, which a plain
    CKA cannot give but rounding and the debiased estimate can.
    """
    M, sets = _checked_similarity(similarity, sets)
    sign, value = torch.linalg.slogdet(M[sets[:, :, None], sets[:, None, :]])
    return value.where(sign > 0, -torch.inf)


def facility_location(similarity: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """- sum_i min_{l in L} (1 - M_il): how near every layer of the target is to one of the set (Mirchandani and Francis 1990).

    0 if each layer has its like in the set; monotone and submodular in L up to a constant.
    """
    M, sets = _checked_similarity(similarity, sets)
    return (M[sets].amax(-2) - 1).sum(-1)


def dispersion(similarity: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """min over pairs of the set of 1 - M_ij: max-min dispersion (Kuby 1987). NaN for single layers, which have no pair."""
    M, sets = _checked_similarity(similarity, sets)
    if sets.shape[1] < 2:
        return torch.full((len(sets),), torch.nan, dtype=torch.float64)
    row, column = torch.triu_indices(sets.shape[1], sets.shape[1], 1)
    return (1 - M[sets[:, row], sets[:, column]]).amin(-1)


def summed(values: Tensor | Sequence[float], sets: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Sum over the set of one value per layer, such as ShortGPT's block influence 1 - E cos(x_l, x_{l+1}) (Men et al. 2024)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if values.ndim != 1:
        raise ElsiError(f"values of shape {tuple(values.shape)}: one per layer, (N,), is expected")
    return values[_checked_sets(sets, len(values))].sum(-1)


def von_neumann(grams: Tensor, sets: Tensor | Sequence[Sequence[int]], normalize: str = "trace") -> Tensor:
    """F(L) = - tr K_L log K_L, not divided by the trace: submodular in L (Friedland and Gaubert 2013, as -x log x has an
    operator-antitone derivative), with F(empty) = 0. Monotone only while no eigenvalue exceeds 1 / e.

    With ``normalize="trace"``, m = tr K_L and S_1(L) = F(L) / m + log m: at one size both have the same best set.
    """
    grams, sets = _checked(grams, sets)
    return _each(prepare_grams(grams, normalize=normalize), sets, lambda K, _: torch.special.entr(_spectrum(K)).sum(-1))


def _each(grams: Tensor, sets: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    parts = []
    for chunk in sets.split(_CHUNK):
        K = grams[chunk[:, 0]].clone()
        for column in range(1, sets.shape[1]):
            K += grams[chunk[:, column]]
        parts.append(score(K, chunk))
    return torch.cat(parts)


def _spectrum(K: Tensor) -> Tensor:
    spectrum = torch.linalg.eigvalsh(K)
    return spectrum.where(spectrum > _ROUNDING * spectrum[..., -1:], 0.0)


def _traces(grams: Tensor) -> Tensor:
    return grams.diagonal(dim1=-2, dim2=-1).sum(-1)


def _checked(grams: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    grams = torch.as_tensor(grams).to(torch.float64)
    if grams.ndim != 3 or grams.shape[-1] != grams.shape[-2]:
        raise ElsiError(f"Gram matrices of shape {tuple(grams.shape)}: (N, B, B) is expected")
    if not torch.isfinite(grams).all():
        raise ElsiError("NaN or infinity in the Gram matrices: no criterion is defined; check the target's dtype")
    if (zero := _traces(grams) <= 0).any():
        raise ElsiError(f"layer {int(zero.nonzero()[0])} has zero trace: leave it out")
    return grams, _checked_sets(sets, len(grams))


def _checked_similarity(similarity: Tensor, sets: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    M = torch.as_tensor(similarity, dtype=torch.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ElsiError(f"a square layer-by-layer similarity is expected, got shape {tuple(M.shape)}")
    if not torch.isfinite(M).all():
        raise ElsiError("NaN or infinity in the similarity: no criterion is defined on it; check the Gram matrices it came from")
    return M, _checked_sets(sets, len(M))


def _checked_sets(sets: Tensor | Sequence[Sequence[int]], num_layers: int) -> Tensor:
    sets = torch.as_tensor(sets)
    if sets.ndim != 2 or 0 in sets.shape or sets.is_floating_point():
        raise ElsiError(f"layer sets of shape {tuple(sets.shape)}: a non-empty whole-number matrix (C, m), one set a row, is expected")
    sets = sets.to(torch.int64)
    if (outside := ((sets < 0) | (sets >= num_layers)).any(-1)).any():
        raise ElsiError(f"layer set {tuple(sets[outside][0].tolist())} outside 0..{num_layers - 1}")
    ordered = sets.sort(-1).values
    if (twice := (ordered[:, 1:] == ordered[:, :-1]).any(-1)).any():
        raise ElsiError(f"layer set {tuple(sets[twice][0].tolist())} names a layer twice: give distinct layers of 0..{num_layers - 1}")
    return sets
