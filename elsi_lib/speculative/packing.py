"""Weights in the order in which a CPU's bfloat16 products read them, for as long as many small passes are made.

The product reorders a weight at every call, which with few rows costs as much as the product. Reordered beforehand, the result is
the same to the last bit; the copies take as much memory as the weights of the linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from elsi_lib.targets import Target


@contextmanager
def packed(target: Target) -> Iterator[None]:
    """Linear layers of the target multiply with packed copies of their weights inside; they are as before afterwards.

    Does nothing where there is nothing to gain: other dtypes, other devices, a torch or a processor without these products.
    """
    layers = [m for m in target.model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    changed = []
    try:
        for layer in layers if target.dtype == torch.bfloat16 and target.device.type == "cpu" and packs_bfloat16() else ():
            if layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
                layer.forward = _product(layer)
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


@cache
def packs_bfloat16() -> bool:
    """Whether this torch packs bfloat16 weights on this processor: oneDNN refuses without AVX-512 (or AVX-NE-CONVERT)."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16), None)
    except RuntimeError:
        return False
    return True


def _product(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    with torch.inference_mode():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None)

    def forward(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")

    return forward
