"""Block averaging: from the kept states of many prompts to one representative per layer (paper, section 4.2).

Only sums are kept, so memory does not depend on the number of prompts, and two processes' halves add up to the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elsi_lib.errors import ElsiError

READINGS = ("position", "segment")


def block_sum(states: Tensor, block: int, reading: str = "position") -> tuple[Tensor, int]:
    """Sum of the non-overlapping blocks of one prompt's kept states.

    The paper cuts the kept states into blocks of B tokens and averages them to a representative of shape B x d. Two readings:

    - ``"position"``: row b is the mean of the b-th state of every block (the shape B x d speaks for it; the default).
      The n mod B states behind the last whole block are left out.
    - ``"segment"``: the mean is taken *within*: the states are cut into B segments of n // B neighbours each and row b is
      the mean of segment b. A prompt counts as one block.

    Args:
        states: (..., n, d), in the order of the prompt.
        block: B, rows of the representative.
        reading: one of :data:`READINGS`.

    Returns:
        (..., B, d) float32 sum over the blocks (of at most n / B terms each), and the number of blocks, n // B or 1.

    Raises:
        ElsiError: n < B, B < 1, or an unknown reading.
    """
    if reading not in READINGS:
        raise ElsiError(f"reading {reading!r} unknown: one of {', '.join(READINGS)}")
    if block < 1:
        raise ElsiError(f"block = {block}: a block has at least one token; the paper uses 32")
    n = states.shape[-2]
    whole = n // block
    if whole == 0:
        raise ElsiError(f"block = {block} is larger than the {n} positions kept of this prompt: lower block or raise rho")
    kept = states[..., : whole * block, :].float()
    if reading == "position":
        return kept.unflatten(-2, (whole, block)).sum(-3), whole
    return kept.unflatten(-2, (block, whole)).mean(-2), 1


class BlockAverage:
    """Online mean over blocks and prompts, for every layer at once.

    Attributes:
        total: (N, B, d) float64, sum over all blocks seen.
        blocks: number of blocks seen.
    """

    def __init__(self, num_layers: int, block: int, hidden_size: int, device: torch.device | str = "cpu"):
        self.total = torch.zeros(num_layers, block, hidden_size, dtype=torch.float64, device=device)
        self.blocks = 0

    def add(self, sums: Tensor, blocks: int) -> None:
        """Add one prompt's (N, B, d) sum over ``blocks`` blocks, as :func:`block_sum` returns them."""
        self.total += sums
        self.blocks += blocks

    def merge(self, other: BlockAverage) -> None:
        """Add what another process has seen."""
        self.add(other.total, other.blocks)

    def grams(self) -> Tensor:
        """Gram matrices (N, B, B) float64, K_j = Z_j Z_j^T, of the representatives Z_j = total_j / blocks."""
        if self.blocks == 0:
            raise ElsiError("no block was seen, so there is no representative: give prompts that keep at least B positions")
        mean = self.total / self.blocks
        return (mean @ mean.mT).cpu()
