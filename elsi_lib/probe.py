"""What a linear reader could get out of a layer set: a ridge probe to the target's logits.

The probe of a set L is kernel ridge regression with the kernel K_L = sum of the layers' token Gram matrices, which is ridge
regression on the concatenated states: as for the entropy, sets cost sums of matrices, so that all of them can be tried. Layers are
scaled to equal mean squared norm, since an affine input map of a draft can do the same.

Two readings of what is predicted: the logits at the same position t, and those at t + 1 from the states at t and the embedding of
token t + 1, which is what an EAGLE draft is given and has to propose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from elsi_lib.errors import ElsiError
from elsi_lib.targets import Target

OUTPUTS = 64  # random directions into which the logits are projected
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the kernel's mean diagonal
_TRIALS = 12  # sets on which the ridge is chosen


class ProbeStates:
    """States and logits at sampled positions of many prompts, for :func:`probe_sets`.

    Args:
        target: where they come from.
        per_prompt: positions taken of each prompt; the first is never taken, nor the last, which has no successor.
        seed: of the positions and of the projection of the logits.
    """

    def __init__(self, target: Target, per_prompt: int, seed: int = 0) -> None:
        self.target, self.per_prompt = target, per_prompt
        self.generator = torch.Generator().manual_seed(seed)
        self.projection = torch.randn(target.vocab_size, OUTPUTS, generator=self.generator) / OUTPUTS**0.5
        self.states: list[Tensor] = []  # (N, n, d) of each prompt
        self.following: list[Tensor] = []  # (n, d) embeddings of the next tokens
        self.same: list[Tensor] = []  # (n, OUTPUTS)
        self.next: list[Tensor] = []

    @torch.inference_mode()
    def add(self, ids: Sequence[int], states: Sequence[Tensor], logits: Tensor) -> None:
        """Take positions of one prompt: its ids, states N of (T, d), logits (T, V)."""
        usable = len(ids) - 2
        if usable < 1:
            return
        chosen = torch.randperm(usable, generator=self.generator)[: self.per_prompt].sort().values + 1
        self.states.append(torch.stack([state[chosen].float().cpu() for state in states]))
        after = torch.as_tensor(ids)[chosen + 1].to(self.target.device)
        self.following.append(self.target.model.get_input_embeddings()(after).float().cpu())
        self.same.append(self._projected(logits[chosen]))
        self.next.append(self._projected(logits[chosen + 1]))

    def _projected(self, logits: Tensor) -> Tensor:
        logits = logits.float().cpu()
        return (logits - logits.mean(-1, keepdim=True)) @ self.projection  # a constant added to all logits changes nothing


def probe_sets(taken: ProbeStates, sets: Iterable[Sequence[int]], *, test_share: float = 0.25) -> pd.DataFrame:
    """Held-out R^2 of the ridge probe of every set.

    Args:
        taken: what a pass over prompts gave; the last ``test_share`` of the prompts are held out.
        sets: layer sets.

    Returns:
        Columns layers ("a b c"), r2_same, r2_next: share of the variance of the projected logits that is predicted on held-out
        prompts. ``attrs["ridge"]`` has the two chosen penalties, in units of the kernel's mean diagonal; they are chosen for the
        mean over some sets, on a quarter of the training positions.

    Raises:
        ElsiError: fewer than 8 prompts.
    """
    if len(taken.states) < 8:
        raise ElsiError(f"a probe on {len(taken.states)} prompts: at least 8, a quarter of them held out")
    first_test = len(taken.states) - max(2, round(len(taken.states) * test_share))
    train = sum(part.shape[1] for part in taken.states[:first_test])
    X = torch.cat(taken.states, 1)
    kernels = torch.stack([_kernel(layer, train) for layer in X])
    own = _kernel(torch.cat(taken.following), train)
    targets = {"r2_same": (torch.cat(taken.same), None), "r2_next": (torch.cat(taken.next), own)}
    sets = [tuple(layers) for layers in sets]
    trial = sets[:: max(1, len(sets) // _TRIALS)]
    frame, ridge = pd.DataFrame({"layers": [" ".join(map(str, layers)) for layers in sets]}), {}
    for name, (Y, also) in targets.items():
        inner = train - train // 4
        scores = {c: sum(_r2(kernels, layers, also, Y, inner, train, c) for layers in trial) for c in RIDGES}
        ridge[name] = max(scores, key=scores.__getitem__)
        frame[name] = [_r2(kernels, layers, also, Y, train, len(Y), ridge[name]) for layers in sets]
    frame.attrs["ridge"] = ridge
    return frame


def all_sets(num_layers: int, sizes: Iterable[int] = (1, 2, 3)) -> list[tuple[int, ...]]:
    """Every layer set of the given sizes."""
    return [layers for m in sizes for layers in itertools.combinations(range(num_layers), m)]


def _kernel(X: Tensor, train: int) -> Tensor:
    """(n, n) Gram matrix of rows centred by the training rows, with mean diagonal 1 over them."""
    X = X - X[:train].mean(0)
    K = X @ X.mT
    return K / K.diagonal()[:train].mean()


def _r2(kernels: Tensor, layers: Sequence[int], also: Tensor | None, Y: Tensor, train: int, end: int, ridge: float) -> float:
    """R^2 on rows train..end of the ridge regression fitted on rows 0..train."""
    K = kernels[layers[0], :end, :train].clone()
    for j in layers[1:]:
        K += kernels[j, :end, :train]
    K /= len(layers)
    if also is not None:
        K += also[:end, :train]
    mean = Y[:train].mean(0)
    fitted = K[:train]
    fitted.diagonal().add_(ridge * fitted.diagonal().mean())
    dual = torch.cholesky_solve(Y[:train] - mean, torch.linalg.cholesky(fitted))
    rest = Y[train:end] - mean - K[train:] @ dual
    return float(1 - rest.square().sum() / (Y[train:end] - mean).square().sum())
