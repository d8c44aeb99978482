"""The one definition of what a stored nibble means.

Checkpoint readers (``w4linear.formats``) produce a `CanonicalW4`, `w4linear.packing` consumes it, and every kernel
test compares against `CanonicalW4.dequant`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class CanonicalW4:
    """One linear layer's 4-bit weight, free of any checkpoint's or kernel's layout.

    Attributes:
        q: (n, k) uint8 codes in 0..15, columns in the checkpoint's own order.
        s: (n, groups) scales, float16, bfloat16 or float32; groups = ceil(k / group), or more with ``g_idx``.
        z: (n, groups) uint8 zero points in 0..15. None is read as 8 everywhere and needs ``symmetric=True``.
        group: consecutive k values that share one (s, z). Per-channel is group == k, never -1.
        g_idx: (k,) int32 group of each column, or None for column // group. One that says the same as None is
            stored as None.
        bias: (n,) or None.
        symmetric: whether the format declared every zero point to be 8; the packed layer then stores none.

    Raises:
        ValueError: naming the tensor, what was got and what was wanted.

    Example:
        >>> w = CanonicalW4(
        ...     q=torch.tensor([[9, 7, 0, 15]], dtype=torch.uint8),
        ...     s=torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        ...     z=torch.tensor([[8, 8]], dtype=torch.uint8),
        ...     group=2,
        ... )
        >>> w.dequant().tolist()
        [[0.5, -0.5, -16.0, 14.0]]
    """

    q: Tensor
    s: Tensor
    z: Tensor = field(default=None)  # type: ignore[assignment]  # filled in __post_init__ where symmetric
    group: int = 0
    g_idx: Tensor | None = None
    bias: Tensor | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.q.ndim != 2 or self.q.dtype != torch.uint8:
            raise ValueError(f"q is {tuple(self.q.shape)} {self.q.dtype}, expected (n, k) torch.uint8")
        n, k = self.q.shape
        if n == 0 or k == 0:
            raise ValueError(f"q is {(n, k)}; n and k must be at least 1")
        if self.group <= 0:
            raise ValueError(f"group={self.group}, expected a positive size; per-channel is group == k = {k}")
        if self.s.dtype not in SCALE_DTYPES:
            raise ValueError(f"s is {self.s.dtype}, expected one of {', '.join(map(str, SCALE_DTYPES))}")
        groups = -(-k // self.group)
        if self.s.ndim != 2 or self.s.shape[0] != n or (self.s.shape[1] != groups and self.g_idx is None):
            raise ValueError(f"s is {tuple(self.s.shape)}, expected (n, ceil(k / group)) = {(n, groups)}")
        groups = self.s.shape[1]
        if self.z is None:
            if not self.symmetric:
                raise ValueError("z is None, expected (n, groups) uint8; only symmetric=True may leave it out")
            object.__setattr__(self, "z", torch.full((n, groups), 8, dtype=torch.uint8, device=self.q.device))
        if self.z.shape != self.s.shape or self.z.dtype != torch.uint8:
            raise ValueError(f"z is {tuple(self.z.shape)} {self.z.dtype}, expected {(n, groups)} torch.uint8")
        if self.bias is not None and self.bias.shape != (n,):
            raise ValueError(f"bias is {tuple(self.bias.shape)}, expected (n,) = {(n,)}")
        if self.g_idx is not None:
            if self.g_idx.shape != (k,) or self.g_idx.dtype != torch.int32:
                raise ValueError(f"g_idx is {tuple(self.g_idx.shape)} {self.g_idx.dtype}, expected {(k,)} torch.int32")
            if not self.g_idx.is_meta:
                low, high = int(self.g_idx.min()), int(self.g_idx.max())
                if low < 0 or high >= groups:
                    raise ValueError(f"g_idx has values {low}..{high}, expected 0..{groups - 1}")
                trivial = torch.arange(k, dtype=torch.int32, device=self.g_idx.device) // self.group
                if groups == -(-k // self.group) and torch.equal(trivial, self.g_idx):
                    object.__setattr__(self, "g_idx", None)
        if self.q.is_meta:
            return
        if int(self.q.max()) > 15 or int(self.z.max()) > 15:
            raise ValueError(f"codes reach q={int(self.q.max())}, z={int(self.z.max())}, expected 0..15")
        if self.symmetric and not bool((self.z == 8).all()):
            raise ValueError("symmetric=True, but z holds other values than 8; pass symmetric=False")

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): out and in features."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def groups(self) -> int:
        """How many (s, z) pairs each row has."""
        return self.s.shape[1]

    def group_of_column(self) -> Tensor:
        """(k,) int64: the group of each column, from ``g_idx`` or column // group."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.q.shape[1], device=self.q.device) // self.group

    def dequant(self) -> Tensor:
        """(n, k) float32: (q - z) * s, exact, since a 5-bit integer times an 11-bit scale fits 24 bits.

        With float32 scales the product rounds once, as the formula says.
        """
        g = self.group_of_column()
        return (self.q.float() - self.z.float()[:, g]) * self.s.float()[:, g]  # (n, k)
