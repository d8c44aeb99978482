"""CanonicalW4 <-> the packed layout that every backend reads (docs/layouts.md; csrc/sm80/layout.cuh in CUDA).

    B  (n16, k64, 32, 4) int32   n16 = ceil(n / 16), k64 = ceil(packed k / 64); lane, k step of 16
    U  (n16, packed groups, 16)  scales in the compute dtype
    V  (n16, packed groups, 8)   uint8 zero points, two a byte; absent when symmetric

One 32-bit word of B is what one lane feeds to one mma.sync m16n8k16 as the 16-row operand. With lane = 4 g + t,
nibble (hi + 2 h + 4 e) of the word for k step s is row 16 n16 + 8 hi + g, column 64 k64 + 16 s + 8 h + 2 t + e.
U and V put rows g and g + 8 side by side, so that a lane reads both with one load: U[.., 2 g + hi], and V's byte g
holds row g in its low and row g + 8 in its high nibble. test_packing.py::test_layout_matches_formula pins this.

Packing is a permutation and shifts, in uint8 throughout, so `unpack` inverts it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from w4linear.canonical import CanonicalW4

LAYOUT_VERSION = 1
KERNEL_GROUPS = (256, 128, 64, 32, 16)
COMPUTE_DTYPES = (torch.float16, torch.bfloat16)
GRAIN_N, GRAIN_K = 16, 64
# Rows are packed in blocks of about this many codes, which bounds the extra memory (uint8 temporaries).
_BLOCK_CODES = {"cpu": 1 << 23, "other": 1 << 26}


class UnsupportedLayerError(ValueError):
    """A layer that no backend can hold; the message names the value and the way out."""


def kernel_group(group: int, k: int) -> int:
    """The group size that the packed layer uses for a checkpoint's ``group``.

    Returns k itself for one group over all k, else the largest of 16, 32, 64, 128, 256 that divides ``group``.

    Raises:
        UnsupportedLayerError: for a group that is not a multiple of 16 and narrower than k.

    Example:
        >>> kernel_group(128, 4096), kernel_group(96, 4096), kernel_group(512, 512)
        (128, 32, 512)
    """
    if group >= k:
        return k
    for size in KERNEL_GROUPS:
        if group % size == 0:
            return size
    raise UnsupportedLayerError(
        f"group={group} with k={k} is not supported: expected a multiple of 16 (16, 32, 64, 128, 256 as they are, "
        "others in smaller groups) or one group for all k; requantize the layer so, or leave it in 16 bit"
    )


@dataclass(frozen=True)
class Packed:
    """A packed layer, as `W4Linear` holds it.

    Attributes:
        B, U, V: the operands, shapes in the module docstring.
        bias: (n,) in the compute dtype, or None.
        perm: (packed k,) int32 source column of each packed position, -1 for padding; None without act-order.
        group_map: (packed groups,) int32 checkpoint group of each packed group; None for j * kernel_group // group.
        n, k: out and in features.
        group: the checkpoint's group size. groups: the checkpoint's group count.
    """

    B: Tensor
    U: Tensor
    V: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    group_map: Tensor | None
    n: int
    k: int
    group: int
    groups: int

    @property
    def kernel_group(self) -> int:
        return kernel_group(self.group, self.k)


@dataclass(frozen=True)
class PackedShape:
    """Sizes of the packed tensors of a layer without act-order."""

    n16: int
    k64: int
    groups: int

    @staticmethod
    def of(n: int, k: int, group: int) -> PackedShape:
        """Sizes for (n, k) with checkpoint group ``group``; raises UnsupportedLayerError as `kernel_group` does."""
        return PackedShape(-(-n // GRAIN_N), -(-k // GRAIN_K), -(-k // kernel_group(group, k)))


def pack(w: CanonicalW4, dtype: torch.dtype = torch.float16) -> Packed:
    """Packs a layer for compute dtype ``dtype`` on the device of ``w.q``.

    Args:
        w: the layer.
        dtype: torch.float16 or torch.bfloat16. Scales and bias are rounded to it once.

    Raises:
        UnsupportedLayerError: for a group size that cannot be packed.
        ValueError: for another dtype, or a scale or bias that is not finite in ``dtype``.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype={dtype}, expected torch.float16 or torch.bfloat16")
    n, k = w.shape
    size = kernel_group(w.group, k)
    s = w.s.to(dtype)
    if not bool(torch.isfinite(s).all()):
        at = [int(i) for i in (~torch.isfinite(s)).nonzero()[0]]
        raise ValueError(
            f"scale s{at} = {float(w.s[at[0], at[1]])} is not finite in {dtype}; "
            "use dtype=torch.bfloat16 for scales beyond float16's range, or repair the checkpoint"
        )
    perm, group_map = _sort_columns(w, size)
    if group_map is None:
        columns = torch.arange(-(-k // size), device=w.q.device)
        source = columns * size // w.group
    else:
        source = group_map.long()
    n16 = -(-n // GRAIN_N)
    packed_k = perm.numel() if perm is not None else -(-k // GRAIN_K) * GRAIN_K
    B = torch.empty((n16, packed_k // GRAIN_K, 32, 4), dtype=torch.int32, device=w.q.device)
    U = _pad_rows(s[:, source], n16 * GRAIN_N)  # (16 n16, packed groups)
    U = U.view(n16, 2, 8, -1).permute(0, 3, 2, 1).reshape(n16, -1, 16).contiguous()  # (n16, groups, 16)
    z = w.z[:, source]  # (n, packed groups)
    V = None
    if not w.symmetric:
        v = _pad_rows(z, n16 * GRAIN_N).view(n16, 2, 8, -1).permute(0, 3, 2, 1)  # (n16, groups, 8, 2)
        V = (v[..., 0] | (v[..., 1] << 4)).contiguous()  # (n16, groups, 8)
    padding = _padding_columns(perm, k, packed_k, w.q.device)  # packed positions with no column
    padding_group = torch.div(padding, size, rounding_mode="floor").clamp(max=z.shape[1] - 1)
    block = max(1, _BLOCK_CODES["cpu" if w.q.device.type == "cpu" else "other"] // (packed_k * GRAIN_N)) * GRAIN_N
    for row in range(0, n16 * GRAIN_N, block):
        rows = slice(row, min(row + block, n16 * GRAIN_N))
        q = w.q[rows]
        if perm is not None:
            q = q[:, perm.clamp(min=0).long()]
        elif packed_k != k:
            q = torch.nn.functional.pad(q, (0, packed_k - k))
        if padding.numel():
            q[:, padding] = z[rows][:, padding_group]  # w = 0
        q = _pad_rows(q, rows.stop - rows.start, value=8 if w.symmetric else 0)
        B[row // GRAIN_N : rows.stop // GRAIN_N] = _pack_codes(q)
    bias = None if w.bias is None else w.bias.to(dtype).contiguous()
    if bias is not None and not bool(torch.isfinite(bias).all()):
        row = int((~torch.isfinite(bias)).nonzero()[0])
        raise ValueError(f"bias[{row}] is not finite in {dtype}; use dtype=torch.bfloat16, or repair the checkpoint")
    return Packed(B, U, V, bias, perm, group_map, n, k, w.group, w.groups)


def unpack(p: Packed) -> CanonicalW4:
    """The exact inverse of `pack`: q, z, g_idx and group as they were, s and bias in the compute dtype."""
    n, k, size = p.n, p.k, p.kernel_group
    device = p.B.device
    q = torch.empty((n, k), dtype=torch.uint8, device=device)
    n16, k64 = p.B.shape[:2]
    block = max(1, _BLOCK_CODES["cpu" if device.type == "cpu" else "other"] // (k64 * GRAIN_K * GRAIN_N))
    position = None
    if p.perm is not None:  # packed position of each column
        used = (p.perm >= 0).nonzero()[:, 0]
        position = torch.empty(k, dtype=torch.int64, device=device)
        position[p.perm[used].long()] = used
    for tile in range(0, n16, block):
        codes = _unpack_codes(p.B[tile : tile + block])  # (rows, packed k)
        codes = codes[: n - tile * GRAIN_N]
        rows = slice(tile * GRAIN_N, tile * GRAIN_N + codes.shape[0])
        q[rows] = codes[:, :k] if position is None else codes[:, position]
    s_packed, z_packed = unpack_scales(p.U, n), unpack_zeros(p.V, p.U, n)
    g_idx = None
    if p.group_map is None:
        first = torch.arange(p.groups, device=device) * p.group // size
    else:
        packed_groups = torch.arange(p.group_map.numel(), device=device)
        first = torch.zeros(p.groups, dtype=torch.int64, device=device)
        first[p.group_map.long()] = packed_groups
        columns = torch.arange(k, device=device) if position is None else position
        g_idx = p.group_map[columns // size].contiguous()
    s, z = s_packed[:, first].contiguous(), z_packed[:, first].contiguous()
    return CanonicalW4(q, s, z, p.group, g_idx, p.bias, symmetric=p.V is None)


def unpack_scales(U: Tensor, n: int) -> Tensor:
    """U (n16, groups, 16) -> (n, groups) in U's dtype."""
    n16, groups, _ = U.shape
    return U.view(n16, groups, 8, 2).permute(0, 3, 2, 1).reshape(n16 * GRAIN_N, groups)[:n]


def unpack_zeros(V: Tensor | None, U: Tensor, n: int) -> Tensor:
    """V (n16, groups, 8) -> (n, groups) uint8; 8 everywhere where V is None (U gives the sizes)."""
    n16, groups, _ = U.shape
    if V is None:
        return torch.full((n, groups), 8, dtype=torch.uint8, device=U.device)
    z = torch.stack((V & 15, V >> 4), dim=-1)  # (n16, groups, 8, 2)
    return z.permute(0, 3, 2, 1).reshape(n16 * GRAIN_N, groups)[:n]


def dequantize_packed(B: Tensor, U: Tensor, V: Tensor | None, n: int, group: int, dtype: torch.dtype) -> Tensor:
    """(n, packed k) weights in packed column order, rounded to ``dtype`` once. ``group`` is the packed group size."""
    out = torch.empty((n, B.shape[1] * GRAIN_K), dtype=dtype, device=B.device)
    groups = U.shape[1]
    column_group = (torch.arange(out.shape[1], device=B.device) // group).clamp(max=groups - 1)
    block = max(1, _BLOCK_CODES["cpu" if B.device.type == "cpu" else "other"] // (out.shape[1] * GRAIN_N))
    for tile in range(0, B.shape[0], block):
        rows = slice(tile * GRAIN_N, min((tile + block) * GRAIN_N, n))
        tiles = slice(tile, tile + block)
        count = rows.stop - rows.start
        q = _unpack_codes(B[tiles])[:count].float()  # (rows, packed k)
        s = unpack_scales(U[tiles], count).float()
        z = unpack_zeros(None if V is None else V[tiles], U[tiles], count).float()
        out[rows] = ((q - z[:, column_group]) * s[:, column_group]).to(dtype)
    return out


def _pad_rows(t: Tensor, rows: int, value: int = 0) -> Tensor:
    return t if t.shape[0] == rows else torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[0]), value=value)


def _padding_columns(perm: Tensor | None, k: int, packed_k: int, device: torch.device) -> Tensor:
    if perm is None:
        return torch.arange(k, packed_k, device=device)
    return (perm < 0).nonzero()[:, 0]


def _sort_columns(w: CanonicalW4, size: int) -> tuple[Tensor | None, Tensor | None]:
    """-> (perm, group_map): how columns and groups move so that each run of ``size`` columns has one group."""
    if w.g_idx is None or w.groups == 1:
        return None, None
    k, device = w.q.shape[1], w.q.device
    g_idx = w.g_idx.to(device).long()
    # Whole groups in another order: every aligned run of `size` columns already names one group.
    runs = torch.nn.functional.pad(g_idx, (0, -k % size), value=-1).view(-1, size)
    runs = torch.where(runs < 0, runs[:, :1], runs)
    counts = torch.bincount(g_idx, minlength=w.groups)
    if bool((runs == runs[:, :1]).all()) and int(counts.min()) > 0:
        return None, runs[:, 0].int().contiguous()
    # Columns sorted by group (stable, so equal layers pack equally), each group cut into chunks of `size`. A group that
    # no column names still gets one chunk of padding, since unpack must give its scale back.
    order = torch.argsort(g_idx, stable=True)
    chunks = torch.div(counts + size - 1, size, rounding_mode="floor").clamp(min=1)  # (groups,)
    start = torch.cumsum(chunks, 0) - chunks  # first chunk of each group
    rank = torch.arange(k, device=device) - (torch.cumsum(counts, 0) - counts)[g_idx[order]]
    total = int(chunks.sum())
    perm = torch.full((-(-total * size // GRAIN_K) * GRAIN_K,), -1, dtype=torch.int32, device=device)
    perm[start[g_idx[order]] * size + rank] = order.int()
    return perm, torch.repeat_interleave(torch.arange(w.groups, device=device), chunks).int()


def _pack_codes(q: Tensor) -> Tensor:
    """q (16 a, 64 b) uint8 -> (a, b, 32, 4) int32."""
    n16, k64 = q.shape[0] // GRAIN_N, q.shape[1] // GRAIN_K
    rows = q.view(n16, 2, 8, k64 * GRAIN_K)
    byte = rows[:, 0] | (rows[:, 1] << 4)  # (n16, g, k): rows g, g + 8
    byte = byte.view(n16, 8, k64, 4, 2, 4, 2).permute(0, 2, 1, 5, 3, 6, 4)  # n16 k64 g t s e h
    return byte.reshape(n16, k64, 32, 4, 4).view(torch.int32).view(n16, k64, 32, 4)


def _unpack_codes(B: Tensor) -> Tensor:
    """(a, b, 32, 4) int32 -> q (16 a, 64 b) uint8."""
    n16, k64 = B.shape[:2]
    byte = B.contiguous().view(torch.uint8).view(n16, k64, 8, 4, 4, 2, 2)  # n16 k64 g t s e h
    byte = byte.permute(0, 2, 1, 4, 6, 3, 5).reshape(n16, 8, k64 * GRAIN_K)  # (n16, g, k)
    return torch.stack((byte & 15, byte >> 4), dim=1).view(n16 * GRAIN_N, k64 * GRAIN_K)
