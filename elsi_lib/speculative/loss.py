"""Loss of a draft: cross-entropy against the target's distribution over the draft vocabulary, without storing what is not needed.

For each row the gradient on the logits is softmax(logits) - p. It is known once the logits are, so the forward pass makes it in
place, block by block while a block is in the processor's cache, and the two large matrix products of the backward pass follow at once:
of everything over the vocabulary only that gradient is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_BYTES = 4 << 20  # of logits at a time: they stay in the processor's cache between the element-wise steps


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, index: Tensor, weight: Tensor, stats: bool = False
) -> tuple[Tensor, Tensor]:
    """sum over rows of weight x (-sum_v p_v log softmax(hidden head^T)_v).

    Args:
        hidden: (A, H), after the draft's last norm.
        head: (D, H).
        targets: (n, D) probabilities p, rows sum to 1.
        index: (A,) row of ``targets`` of each row of ``hidden``.
        weight: (A,) float32; 0 leaves a row out.
        stats: compute the loss and the hits. Without it both are 0, and the gradient is right all the same: training needs the loss
            itself only where it is reported.

    Returns:
        ``(loss, hits)``: loss in nats; hits: rows with weight above 0 whose likeliest token is that of p.
    """
    return _SoftCrossEntropy.apply(hidden, head, targets, index, weight, stats)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, targets, index, weight, stats):
        A, D = hidden.shape[0], head.shape[0]
        gradient = hidden.new_empty(A, D)
        loss, hits = hidden.new_zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.long, device=hidden.device)
        step = max(1, _BLOCK_BYTES // (D * hidden.element_size()))
        for start in range(0, A, step):
            rows = slice(start, start + step)
            block, p = gradient[rows], targets[index[rows]]
            torch.mm(hidden[rows], head.t(), out=block)
            if stats:
                z = block.float()
                each = torch.logsumexp(z, -1) - (z * p).sum(-1)
                loss += (each * weight[rows]).where(weight[rows] > 0, 0).sum()
                hits += ((z.argmax(-1) == p.argmax(-1)) & (weight[rows] > 0)).sum()
            torch.softmax(block, -1, out=block)
            block.sub_(p).mul_(weight[rows, None].to(block.dtype))
        ctx.save_for_backward(gradient @ head, gradient.t() @ hidden)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx, grad, _hits):
        hidden, head = ctx.saved_tensors
        return hidden * grad.to(hidden.dtype), head * grad.to(head.dtype), None, None, None, None
