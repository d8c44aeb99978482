"""The torch op: ``torch.ops.w4linear.gemm``, its schema, its fake kernel, and the backends that implement it.

The schema is stated once, here, so that a package without the CUDA part has the same op. The CUDA library adds its
kernel to it through LibTorch's stable ABI (csrc/bindings.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from w4linear.backends import cpu, cuda

_OPERANDS = "Tensor x, Tensor B, Tensor U, Tensor? V, Tensor? bias, Tensor? perm, int n, int k, int group"
_library = torch.library.Library("w4linear", "DEF")
_library.define(f"gemm({_OPERANDS}) -> Tensor")
_library.define(f"gemm_with_plan({_OPERANDS}, int instance, int splits) -> Tensor")


def check_operands(x: Tensor, B: Tensor, U: Tensor, n: int, k: int) -> None:
    """Raises RuntimeError where nn.Linear would: x's rank, last dimension, dtype or device."""
    if x.dim() == 0 or x.shape[-1] != k:
        raise RuntimeError(f"w4linear.gemm: x is {tuple(x.shape)}, expected (..., k) with k = in_features = {k}")
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"w4linear.gemm: x is {x.dtype}, expected a floating point tensor; cast it first")
    if x.device != B.device or x.device != U.device:
        raise RuntimeError(f"w4linear.gemm: x is on {x.device}, the layer on {B.device}; move one of them")


@torch.library.register_fake("w4linear::gemm", lib=_library)
def _gemm_fake(
    x: Tensor,
    B: Tensor,
    U: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    n: int,
    k: int,
    group: int,
) -> Tensor:
    check_operands(x, B, U, n, k)
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("w4linear::gemm_with_plan", lib=_library)
def _gemm_with_plan_fake(x: Tensor, B: Tensor, U: Tensor, V, bias, perm, n: int, k: int, group: int, instance, splits):  # type: ignore[no-untyped-def]
    return _gemm_fake(x, B, U, V, bias, perm, n, k, group)


@torch.library.impl(_library, "gemm", "CPU")
def _gemm_cpu(
    x: Tensor,
    B: Tensor,
    U: Tensor,
    V: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    n: int,
    k: int,
    group: int,
) -> Tensor:
    check_operands(x, B, U, n, k)
    return cpu.gemm(x, B, U, V, bias, perm, n, k, group)


cuda.register()

gemm = torch.ops.w4linear.gemm.default
gemm_with_plan = torch.ops.w4linear.gemm_with_plan.default
