"""What chance does to entropies of one kind of text: every prompt left out in turn (jackknife).

A bootstrap does not answer this for few prompts. A redraw holds some prompts twice and others not at all, averages less of their noise
away, and reads like a sample of half the size: with 32 prompts all redraws of an entropy may lie above the entropy itself. Without one
prompt of n, the average is as quiet as with all to within 1 / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from elsi_lib.entropy import gram_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import read_tensors, write_tensors
from elsi_lib.selection import elsi
from elsi_lib.tally import FORMAT, Group

M = 3  # layers of the sets judged
_PARTS = ("profile", "chosen", "sets", "entropy")


@dataclass(frozen=True)
class LeaveOneOut:
    """One kind of text without each of its n prompts, or groups of them; index 0 is the first position kept, 1 dropped.

    Attributes:
        profile: (2, n, N) float32, S_1 of each layer in nats.
        chosen: (2, n, m) int16, ELSI's set.
        sets: (2, C, m) int16, sets that were judged.
        entropy: (2, n, C) float32, S_1 of these sets in nats.
    """

    profile: Tensor
    chosen: Tensor
    sets: Tensor
    entropy: Tensor


def left_out(groups: Sequence[Group]) -> Tensor | None:
    """Gram matrices of the representatives without each prompt, or group of prompts.

    Returns:
        (2, n, N, B, B) float64, first position kept and dropped; None for fewer than two groups with a block.
    """
    used = [group for group in groups if group.blocks.min() > 0]
    if len(used) < 2:
        return None
    total, blocks = sum(group.total.double() for group in used), sum(group.blocks.double() for group in used)
    found = []
    for group in used:
        mean = (total - group.total) / (blocks - group.blocks)[:, None, None, None]
        found.append(mean @ mean.mT)
    return torch.stack(found, 1)


def judged(grams: Tensor, sets: Sequence[Sequence[tuple[int, ...]]]) -> LeaveOneOut:
    """ELSI's choice without each prompt, and the entropy of given sets there.

    Args:
        grams: (2, n, N, B, B), from :func:`left_out`.
        sets: of the first position kept and dropped, equally many of :data:`M` layers each.
    """
    wanted = torch.tensor(sets)
    entropy = [gram_entropy(side[:, one].sum(2)) for side, one in zip(grams, wanted, strict=True)]
    chosen = [[elsi(one, M).layers for one in side] for side in grams]
    short = torch.int16
    return LeaveOneOut(
        gram_entropy(grams).float(), torch.tensor(chosen, dtype=short), wanted.to(short), torch.stack(entropy).float()
    )  # fmt: skip


def interval(estimate: np.ndarray | float, without: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Student's interval about an estimate with the jackknife's standard error (Tukey 1958).

    Args:
        estimate: from all prompts.
        without: (n, ...) the same without each of them; n at least 2.

    Returns:
        Lower and upper end. For a mean they are those of a t-test.
    """
    n = len(without)
    error = np.sqrt((n - 1) * np.var(np.asarray(without, dtype=np.float64), axis=0))
    half = t.ppf((1 + level) / 2, n - 1) * error
    return estimate - half, estimate + half


def write_left_out(path: Path, found: dict[str, LeaveOneOut]) -> None:
    """Results of several kinds of text in one file."""
    tensors = {f"{name}.{part}": getattr(one, part).contiguous() for name, one in found.items() for part in _PARTS}
    write_tensors(path, tensors, {"format": FORMAT})


def read_left_out(path: Path) -> dict[str, LeaveOneOut]:
    """What :func:`write_left_out` wrote.

    Raises:
        ElsiError: the file cannot be read, or lacks a part.
    """
    tensors, _ = read_tensors(path, FORMAT, "entropies of a survey without each prompt")
    names = dict.fromkeys(key.rpartition(".")[0] for key in tensors)
    try:
        return {name: LeaveOneOut(*(tensors[f"{name}.{part}"] for part in _PARTS)) for name in names}
    except KeyError as error:
        raise ElsiError(f"{path} lacks {error}: it is damaged; delete the survey and run the notebook of the question") from error
