"""Round-to-nearest 4-bit quantization with a searched clip, for models that are not quantized yet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from w4linear.canonical import CanonicalW4

# Fractions of a group's range that are tried. Clipping a rare outlier gives all others a finer step.
CLIP_FRACTIONS = tuple(1.0 - 0.05 * i for i in range(10))


def quantize(weight: Tensor, group_size: int = 128, symmetric: bool = False, bias: Tensor | None = None) -> CanonicalW4:
    """Quantizes (n, k) weights to 4 bits, each group with the clip that has the least squared error.

    Args:
        weight: (n, k), any floating dtype.
        group_size: consecutive k that share a scale; the last group may be partial.
        symmetric: zero point 8 everywhere; else the zero point that covers the group's range.
        bias: (n,), carried along.

    Returns:
        The layer with float16 scales (float32 where one would overflow or vanish in float16).

    Raises:
        ValueError: where the weight is not 2-D or holds NaN or inf.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, expected (n, k) floating point")
    w = weight.float()
    if not bool(torch.isfinite(w).all()):
        raise ValueError("weight holds NaN or inf; repair the model before it is quantized")
    n, k = w.shape
    if n == 0 or k == 0 or group_size < 1:
        raise ValueError(f"weight is {(n, k)}, group_size={group_size}, expected at least 1 each")
    # Squares of weights near float32's limits leave its range: such weights are brought near 1 by a power of two.
    exponent = math.frexp(float(w.abs().max()))[1]
    unit = 2.0**exponent if abs(exponent) > 40 else 1.0
    w = w / unit
    group = min(group_size, k)
    groups = -(-k // group)
    padded = torch.nn.functional.pad(w, (0, groups * group - k)).view(n, groups, group)
    inside = (torch.arange(groups * group, device=w.device) < k).view(groups, group)
    low, high = padded.amin(-1), padded.amax(-1)  # (n, groups); 0 is inside
    low, high = low.clamp(max=0), high.clamp(min=0)
    best_error = torch.full_like(low, torch.inf)
    best_s, best_z = torch.zeros_like(low), torch.full_like(low, 8)
    for fraction in CLIP_FRACTIONS:
        if symmetric:
            s = torch.maximum(high / 7, -low / 8) * fraction
            z = torch.full_like(s, 8)
        else:
            s = (high - low) * (fraction / 15)
            z = torch.where(s > 0, (-low * fraction / s.clamp(min=1e-30)).round().clamp(0, 15), 8)
        s = _as_stored(s * unit) / unit
        error = ((_codes(padded, s, z) - z[..., None]) * s[..., None] - padded).square()
        error = (error * inside).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_s, best_z = torch.where(better, s, best_s), torch.where(better, z, best_z)
    q = _codes(padded, best_s, best_z).to(torch.uint8).view(n, -1)[:, :k].contiguous()
    best_s = best_s * unit
    half = best_s.half()
    s = half if torch.equal(half.float(), best_s) else best_s
    return CanonicalW4(q, s, best_z.to(torch.uint8), group, None, bias, symmetric)


def _as_stored(s: Tensor) -> Tensor:
    """Scales as float16 will hold them, or unchanged where float16 cannot."""
    half = s.half().float()
    return torch.where(torch.isfinite(half) & ((half > 0) | (s == 0)), half, s)


def _codes(padded: Tensor, s: Tensor, z: Tensor) -> Tensor:
    step = torch.where(s > 0, s, 1.0)[..., None]
    return (padded / step + z[..., None]).round().clamp(0, 15)
