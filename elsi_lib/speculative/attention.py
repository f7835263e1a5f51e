"""Attention of EAGLE-3's training-time test: each row sees the keys of step 0 up to itself, and its own keys of later steps.

Several texts lie packed one after the other, unpadded. Only the rows that carry loss have queries; every row has keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """One text of a packed batch.

    Attributes:
        keys: its rows among all rows.
        queries: its rows among those with queries.
        mask: (queries, keys) added to the scores: 0 where a query sees a key, minus infinity elsewhere.
    """

    keys: slice
    queries: slice
    mask: Tensor


def spans(lengths: Sequence[int], active: Sequence[Tensor], dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Span]:
    """The spans of texts with ``lengths`` rows, whose rows ``active`` have queries; a text without any has none."""
    found, key, query = [], 0, 0
    for length, rows in zip(lengths, active, strict=True):
        if not len(rows):  # torch's kernel does not take an empty query
            key += length
            continue
        seen = torch.arange(length, device=device) <= rows.to(device)[:, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        found.append(Span(slice(key, key + length), slice(query, query + len(rows)), mask))
        key, query = key + length, query + len(rows)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]], texts: Sequence[Span]) -> Tensor:
    """softmax over the keys of step 0 in the row's text up to the row, and the row's own keys of later steps.

    Args:
        q: (1, heads, A, head_dim) queries, rotated.
        k, v: (1, key-value heads, R, head_dim) keys and values of step 0, of all rows.
        own: per later step, keys and values (1, key-value heads, A, head_dim) of the rows with queries.
        texts: of :func:`spans`.

    Returns:
        (1, heads, A, head_dim). On a CPU the scores are never stored: torch's fused kernel runs per text, and its partial result is
        merged with the row's own keys as ring attention merges blocks. Elsewhere the plain formula is used.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    flat = [x.repeat_interleave(groups, 1) if groups > 1 else x for pair in own for x in pair]
    if q.device.type == "cpu":
        return _Fused.apply(texts, q, k, v, *flat)
    return attend_plain(q, k, v, list(zip(flat[::2], flat[1::2], strict=True)), texts)


def attend_plain(q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]], texts: Sequence[Span]) -> Tensor:
    """The formula as it stands, with as many key as query heads: the reference, and the path for other devices."""
    scale, out = q.shape[-1] ** -0.5, []
    for text in texts:
        query, keys, values = q[:, :, text.queries], k[:, :, text.keys], v[:, :, text.keys]
        scores = [query @ keys.transpose(-1, -2) * scale + text.mask]
        scores += [(query * key[:, :, text.queries]).sum(-1, keepdim=True) * scale for key, _ in own]
        weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weights[..., : keys.shape[2]] @ values
        for i, (_, value) in enumerate(own):
            mixed = mixed + weights[..., keys.shape[2] + i, None] * value[:, :, text.queries]
        out.append(mixed)
    return torch.cat(out, 2)


class _Fused(torch.autograd.Function):
    """Fused attention over the keys of step 0 joined with a few keys of each row's own.

    The backward kernel recomputes its weights as exp(score - logsumexp) and subtracts <grad, out>: given the logsumexp and the output
    of the whole row it returns the gradients of its part, exactly.
    """

    @staticmethod
    def forward(ctx, texts, q, k, v, *own):
        scale = q.shape[-1] ** -0.5
        out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for text in texts:
            part, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, text.queries], k[:, :, text.keys], v[:, :, text.keys], 0.0, False, attn_mask=text.mask
            )
            out[:, :, text.queries], log_sum[:, :, text.queries] = part, total
        if own:
            scores = torch.stack([(q * key).sum(-1, dtype=torch.float32) * scale for key in own[::2]])
            total = torch.logsumexp(torch.cat([log_sum[None], scores]), 0)
            out = out * (log_sum - total).exp()[..., None].to(q.dtype)
            for score, value in zip(scores, own[1::2], strict=True):
                out += (score - total).exp()[..., None].to(q.dtype) * value
            log_sum = total
        ctx.texts = texts
        ctx.save_for_backward(q, k, v, out, log_sum, *own)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sum, *own = ctx.saved_tensors
        scale, grad = q.shape[-1] ** -0.5, grad.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for text in ctx.texts:
            rows, keys = text.queries, text.keys
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x[:, :, rows].contiguous() for x in (grad, q)),
                *(x[:, :, keys].contiguous() for x in (k, v)),
                *(x[:, :, rows].contiguous() for x in (out, log_sum)),
                0.0,
                False,
                attn_mask=text.mask,
            )
        spread, gradients = (grad * out).sum(-1, dtype=torch.float32), []
        for key, value in zip(own[::2], own[1::2], strict=True):
            weight = ((q * key).sum(-1, dtype=torch.float32) * scale - log_sum).exp()
            along = weight * ((grad * value).sum(-1, dtype=torch.float32) - spread) * scale
            dq += along[..., None].to(q.dtype) * key
            gradients += [along[..., None].to(q.dtype) * q, weight[..., None].to(q.dtype) * grad]
        return None, dq, dk, dv, *gradients
