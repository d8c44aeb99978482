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
    versions: tuple[int, ...]  # of B, U and V when it was made
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
    if (chosen == "bf16" or (chosen == "auto" and x.dtype == torch.bfloat16)) and _fits_int4(group, U.shape[1]):
        y = _int4(a.to(torch.bfloat16), B, U, V, group)[:, :n].to(x.dtype)
    else:
        weight = packing.dequantize_packed(B, U, V, n, group, x.dtype)
        # With a bias the sum stays in float32 until it is added; rounding before would err by an ulp of y - bias.
        wide = x.dtype if bias is None else torch.promote_types(x.dtype, torch.float32)
        y = a.to(wide) @ weight.to(wide).t()
    if bias is not None:
        wide = torch.promote_types(y.dtype, torch.float32)
        y = (y.to(wide) + bias.to(wide)).to(x.dtype)
    return y.contiguous().view(*x.shape[:-1], n)


def _fits_int4(group: int, groups: int) -> bool:
    global _told_group
    if group in INT4_GROUPS:
        return True
    if not _told_group:
        _told_group = True
        sizes = ", ".join(map(str, INT4_GROUPS))
        warnings.warn(
            f"w4linear on CPU: torch's int4 GEMM takes groups {sizes}; layers with group {group} dequantize at each call",
            stacklevel=2,
        )
    return False


def _int4(a: Tensor, B: Tensor, U: Tensor, V: Tensor | None, group: int) -> Tensor:
    """a (m, packed k) bfloat16 -> (m, 16 n16)."""
    whole = -(-a.shape[1] // group) * group  # torch wants k % group == 0
    pack = _int4_pack(B, U, V, group, whole)
    if whole != a.shape[1]:
        a = torch.nn.functional.pad(a, (0, whole - a.shape[1]))
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(a.contiguous(), pack.codes, group, pack.scale_and_zero)
    return y


def _int4_pack(B: Tensor, U: Tensor, V: Tensor | None, group: int, whole: int) -> _Int4Pack:
    versions = tuple(-1 if t is None or t.is_inference() else t._version for t in (B, U, V))
    versions += (U.data_ptr(), 0 if V is None else V.data_ptr())
    found: _Int4Pack | None = _packs.get(B)
    if found is not None and found.versions == versions:
        return found
    rows = B.shape[0] * packing.GRAIN_N
    q = packing._unpack_codes(B)  # (rows, packed k)
    q = torch.nn.functional.pad(q, (0, whole - q.shape[1])).int()
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    groups = whole // group
    s = torch.nn.functional.pad(packing.unpack_scales(U, rows).float(), (0, groups - U.shape[1]))
    z = packing.unpack_zeros(V, U, rows).float()
    z = torch.nn.functional.pad(z, (0, groups - U.shape[1]))
    pair = torch.stack((s, (8 - z) * s), dim=-1)  # value = (q - 8) s + zero
    pack = _Int4Pack(versions, codes, pair.permute(1, 0, 2).to(torch.bfloat16).contiguous())
    _packs[B] = pack
    return pack
