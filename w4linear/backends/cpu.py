"""The CPU backend: torch's own int4 GEMM in bfloat16, dequantize + linear everywhere else.

``aten::_weight_int4pack_mm_for_cpu`` is fast in bfloat16 only (its float16 and float32 paths are 10 to 20 times slower
than a dense linear) and takes groups of 32, 64, 128 and 256. W4LINEAR_CPU chooses:

    auto   (default) the int4 op for bfloat16, exact for the rest
    exact  always dequantize + linear
    bf16   the int4 op also for float16 and float32, through bfloat16 (relative error about 3e-3)
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from w4linear import packing
from w4linear.backends import BackendStatus

INT4_GROUPS = (32, 64, 128, 256)
MODES = ("auto", "exact", "bf16")


@dataclass(frozen=True)
class _Int4Pack:
    versions: tuple[int, ...]  # of B, U, V and bias when it was made
    codes: Tensor  # what _convert_weight_to_int4pack_for_cpu gives
    scale_and_zero: Tensor  # (packed groups, padded n, 2) bfloat16


# One entry a layer, keyed by its B, so that a layer that goes away takes its copy along.
_packs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_told_group = False


def mode() -> str:
    """W4LINEAR_CPU, checked.

    Raises:
        RuntimeError: for a value that is none of auto, exact, bf16.
    """
    value = os.environ.get("W4LINEAR_CPU", "auto")
    if value not in MODES:
        raise RuntimeError(f"W4LINEAR_CPU={value!r}, expected one of {', '.join(MODES)}")
    return value


def status() -> BackendStatus:
    """The CPU backend always runs; says through what."""
    return BackendStatus(
        True, f"torch {torch.__version__} int4 GEMM in bfloat16, else dequantize (W4LINEAR_CPU={mode()})"
    )


def gemm(
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
    """x (..., k) of any floating dtype -> (..., n) in x's dtype."""
    a = x.reshape(-1, k)
    packed_k = B.shape[1] * packing.GRAIN_K
    if perm is not None:
        a = torch.where(perm >= 0, a[:, perm.clamp(min=0).long()], 0)  # (m, packed k)
    elif packed_k != k:
        a = torch.nn.functional.pad(a, (0, packed_k - k))
    chosen = mode()
    if (chosen == "bf16" or (chosen == "auto" and x.dtype == torch.bfloat16)) and _fits_int4(group):
        y = _int4(a.to(torch.bfloat16), B, U, V, bias, group)[:, :n]
    else:
        weight = packing.dequantize_packed(B, U, V, n, group, x.dtype)
        if bias is None:
            y = a @ weight.t()
        else:  # in float32 until the bias is added: rounding before would err by an ulp of y - bias
            wide = torch.promote_types(x.dtype, torch.float32)
            y = torch.addmm(bias.to(wide), a.to(wide), weight.to(wide).t())
    return y.to(x.dtype).contiguous().view(*x.shape[:-1], n)


def _fits_int4(group: int) -> bool:
    global _told_group
    if group in INT4_GROUPS:
        return True
    if not _told_group:
        _told_group = True
        sizes = ", ".join(map(str, INT4_GROUPS))
        warnings.warn(
            f"w4linear on CPU: torch's int4 GEMM takes groups {sizes}; layers of group {group} dequantize at each call",
            stacklevel=2,
        )
    return False


def _int4(a: Tensor, B: Tensor, U: Tensor, V: Tensor | None, bias: Tensor | None, group: int) -> Tensor:
    """a (m, packed k) bfloat16 -> (m, 16 n16) bfloat16, rounded once.

    The op returns bfloat16, so a bias added to its result would be rounded on top of a rounded sum. It travels as two
    more groups instead, whose zero terms are its high and its low part, for an x of 1 in the first column of each.
    """
    pack = _int4_pack(B, U, V, bias, group)
    columns = pack.scale_and_zero.shape[0] * group
    if columns != a.shape[1]:
        a = torch.nn.functional.pad(a, (0, columns - a.shape[1]))
        if bias is not None:
            a[:, [columns - 2 * group, columns - group]] = 1
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(a.contiguous(), pack.codes, group, pack.scale_and_zero)
    return y


def _int4_pack(B: Tensor, U: Tensor, V: Tensor | None, bias: Tensor | None, group: int) -> _Int4Pack:
    operands = (B, U, V, bias)
    versions = tuple(-1 if t is None or t.is_inference() else t._version for t in operands)
    versions += tuple(0 if t is None else t.data_ptr() for t in operands)
    found: _Int4Pack | None = _packs.get(B)
    if found is not None and found.versions == versions:
        return found
    rows = B.shape[0] * packing.GRAIN_N
    q = packing._unpack_codes(B)  # (rows, packed k)
    groups = -(-q.shape[1] // group)  # torch wants k % group == 0
    total = groups + (0 if bias is None else 2)
    q = torch.nn.functional.pad(q, (0, total * group - q.shape[1]), value=8).int()
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    s = torch.zeros((total, rows))  # value = (q - 8) s + zero
    zero = torch.zeros((total, rows))
    s[: U.shape[1]] = packing.unpack_scales(U, rows).float().t()
    zero[: U.shape[1]] = (8 - packing.unpack_zeros(V, U, rows).float().t()) * s[: U.shape[1]]
    if bias is not None:
        high = bias.to(torch.bfloat16).float()
        zero[groups, : bias.shape[0]] = high
        zero[groups + 1, : bias.shape[0]] = bias.float() - high
    pack = _Int4Pack(versions, codes, torch.stack((s, zero), dim=-1).to(torch.bfloat16).contiguous())
    _packs[B] = pack
    return pack
