"""`W4Linear`: the module that holds a packed layer and calls the op."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from w4linear import ops, packing
from w4linear.canonical import CanonicalW4
from w4linear.packing import GRAIN_K, GRAIN_N, LAYOUT_VERSION, Packed, PackedShape

_OPTIONAL = ("V", "bias", "perm", "group_map")
BUFFERS = ("B", "U", "V", "bias", "perm", "group_map", "layout")
# Fields of the `layout` buffer, in order.
LAYOUT_FIELDS = ("version", "in_features", "out_features", "group_size", "groups", "symmetric")
_said_float32 = False


class W4Linear(nn.Module):
    """y = x W^T + bias with a packed 4-bit W and 16-bit activations; a drop-in for nn.Linear in inference.

    The weights are buffers, not parameters: they are not trained, but gradients for x are right, so adapters on top
    (LoRA) train. Compute runs in x's dtype where that is float16 or bfloat16. A float32 or float64 x is computed
    exactly on the CPU, and in the layer's 16-bit dtype on CUDA, which is said once; the result has x's dtype.

    Args:
        in_features: k. out_features: n; any size.
        bias: whether the layer has one.
        group_size: consecutive k that share one scale; 16, 32, 64, 128, 256, another multiple of 16, or in_features.
        symmetric: every zero point is 8 and none is stored.
        dtype: torch.float16 or torch.bfloat16, of the scales and the bias.
        device: where the buffers live.

    A layer made this way has no weights yet: forward raises until `load_state_dict` fills it. See `from_canonical` and
    `from_linear` for layers with weights.

    Raises:
        UnsupportedLayerError: for a group size that cannot be packed.
        ValueError: for sizes below 1 or another dtype.

    Example:
        >>> layer = W4Linear.from_linear(torch.nn.Linear(256, 128), group_size=64)
        >>> layer(torch.randn(2, 3, 256)).shape
        torch.Size([2, 3, 128])
    """

    B: Tensor
    U: Tensor
    V: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    group_map: Tensor | None
    layout: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group_size: int = 128,
        symmetric: bool = False,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"in_features={in_features}, out_features={out_features}, expected at least 1 each")
        if group_size < 1:
            raise ValueError(
                f"group_size={group_size}, expected a positive size; per-channel is in_features={in_features}"
            )
        if dtype not in packing.COMPUTE_DTYPES:
            raise ValueError(f"dtype={dtype}, expected torch.float16 or torch.bfloat16")
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.symmetric = group_size, symmetric
        self.groups = -(-in_features // group_size)
        size = PackedShape.of(out_features, in_features, group_size)
        u8, i32 = torch.uint8, torch.int32
        zeros = torch.zeros
        self.register_buffer("B", zeros(size.n16, size.k64, 32, 4, dtype=i32, device=device))
        self.register_buffer("U", zeros(size.n16, size.groups, 16, dtype=dtype, device=device))
        self.register_buffer("V", None if symmetric else zeros(size.n16, size.groups, 8, dtype=u8, device=device))
        self.register_buffer("bias", zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("perm", None)
        self.register_buffer("group_map", None)
        self.register_buffer("layout", torch.tensor(self._layout_values(), dtype=i32, device=device))
        self._filled = False

    @classmethod
    def from_canonical(cls, w: CanonicalW4, dtype: torch.dtype = torch.float16) -> W4Linear:
        """Packs ``w`` for compute dtype ``dtype`` on ``w``'s device.

        Raises:
            UnsupportedLayerError, ValueError: as `packing.pack`.
        """
        return cls.from_packed(packing.pack(w, dtype))

    @classmethod
    def from_packed(cls, p: Packed) -> W4Linear:
        """The module around already packed tensors, which it shares."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = p.k, p.n
        layer.group_size, layer.groups, layer.symmetric = p.group, p.groups, p.V is None
        for name in BUFFERS[:-1]:
            layer.register_buffer(name, getattr(p, name))
        layer.register_buffer("layout", torch.tensor(layer._layout_values(), dtype=torch.int32, device=p.B.device))
        layer._filled = True
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, group_size: int = 128, symmetric: bool = False) -> W4Linear:
        """Quantizes an nn.Linear: round to nearest, each group's range clipped where that lowers its squared error.

        The compute dtype is the linear's where that is 16 bit, else float16 (bfloat16 where scales, weights or bias
        would leave its range).

        Raises:
            ValueError: where the weight holds NaN or inf. UnsupportedLayerError: as `packing.pack`.
        """
        from w4linear.quantize import quantize

        if group_size < 1:
            raise ValueError(f"group_size={group_size}, expected a positive size; per-channel is {linear.in_features}")
        weight = linear.weight.detach()
        w = quantize(weight, group_size, symmetric, None if linear.bias is None else linear.bias.detach())
        dtype = weight.dtype
        if dtype not in packing.COMPUTE_DTYPES:
            half = torch.finfo(torch.float16)
            largest = max(float(t.abs().max()) for t in (weight, w.bias) if t is not None)
            # Rounding and the clip may move a weight by a step, so it stays a factor of 2 off the end of the range.
            wide = largest > half.max / 2 or 0 < float(w.s.max()) < half.smallest_normal
            dtype = torch.bfloat16 if wide else torch.float16
        return cls.from_canonical(w, dtype)

    @property
    def packed(self) -> Packed:
        """The packed tensors with what is needed to read them."""
        return Packed(
            self.B,
            self.U,
            self.V,
            self.bias,
            self.perm,
            self.group_map,
            self.out_features,
            self.in_features,
            self.group_size,
            self.groups,
        )

    def to_canonical(self) -> CanonicalW4:
        """The inverse of `from_canonical`: q, z and g_idx exactly, s and bias in the compute dtype."""
        self._require_weights()
        return packing.unpack(self.packed)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """(out_features, in_features) weights in ``dtype`` (default: the compute dtype), rounded once."""
        self._require_weights()
        return _dequantize(
            self.B,
            self.U,
            self.V,
            self.perm,
            self.out_features,
            self.in_features,
            self.kernel_group,
            dtype or self.U.dtype,
        )

    def settings(self) -> dict[str, int | bool]:
        """The constructor's arguments that make a layer of this form, as a converted checkpoint's config lists them."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
        }

    @property
    def kernel_group(self) -> int:
        """The packed group size: the checkpoint's, or the largest of 16 to 256 that divides it."""
        return packing.kernel_group(self.group_size, self.in_features)

    @property
    def weight(self) -> PackedWeight:
        """Shape, dtype and device of the weight; reading it as data raises and points to `dequantize`."""
        return PackedWeight((self.out_features, self.in_features), self.U.dtype, self.U.device)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features), in x's dtype (autocast's, where that is on).

        Raises:
            RuntimeError: for a wrong last dimension, dtype or device, or a layer without weights.
        """
        if not self._filled:
            self._require_weights()
        U, bias = self.U, self.bias
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(kind))
        dtype = x.dtype
        if dtype is not U.dtype and kind != "cpu" and x.is_floating_point():
            if dtype in packing.COMPUTE_DTYPES:
                U, bias = U.to(dtype), None if bias is None else bias.to(dtype)
            else:
                _say_float32(dtype, U.dtype)
                x = x.to(U.dtype)
        if not x.is_contiguous() and not (x.dim() == 2 and x.stride(1) == 1):
            x = x.contiguous()
        args = (x, self.B, U, self.V, bias, self.perm, self.out_features, self.in_features, self.kernel_group)
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _GemmWithGrad.apply(*args)
        else:
            y = ops.gemm(*args)
        return y if y.dtype is dtype else y.to(dtype)

    def extra_repr(self) -> str:
        bits = 8 * sum(t.nbytes for t in (self.B, self.U, self.V) if t is not None)
        bits_per_weight = bits / (self.in_features * self.out_features)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}, symmetric={self.symmetric}, act_order={self.perm is not None}, "
            f"dtype={self.U.dtype}, {bits_per_weight:.2f} bits per weight"
        )

    def mark_filled(self) -> None:
        """Says that the buffers hold weights, after a loader wrote them without `load_state_dict`.

        Raises:
            ValueError: where the `layout` buffer does not fit this version or this layer.
        """
        if why := self._layout_mismatch(self.layout):
            raise ValueError(f"W4Linear: {why}")
        self._filled = True

    def _layout_values(self) -> list[int]:
        sizes = [self.in_features, self.out_features, self.group_size, self.groups]
        return [LAYOUT_VERSION, *sizes, int(self.symmetric)]

    def _layout_mismatch(self, layout: Tensor) -> str | None:
        values = dict(zip(LAYOUT_FIELDS, layout.tolist(), strict=False))
        if values.get("version") != LAYOUT_VERSION or layout.numel() != len(LAYOUT_FIELDS):
            version = values.get("version")
            return f"layout version {version}, this package reads {LAYOUT_VERSION}; convert the checkpoint again"
        for name in ("in_features", "out_features"):
            if values[name] != getattr(self, name):
                return f"{name}={values[name]} in the file, {getattr(self, name)} in the model"
        return None

    def _require_weights(self) -> None:
        if not self._filled:
            raise RuntimeError(
                "W4Linear has no weights yet; use load_state_dict, or make it with from_canonical or from_linear"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> W4Linear:
        # .float() and .double() leave 16-bit scales alone: a wider type would gain nothing.
        before, was_meta = self.U.dtype, self.B.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.B.is_meta:
            self._filled = False  # to_empty: memory without values
        if self.U.dtype not in packing.COMPUTE_DTYPES:
            self.U = self.U.to(before)
            self.bias = None if self.bias is None else self.bias.to(before)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layout = state_dict.get(prefix + "layout")
        have = {name: state_dict.get(prefix + name) for name in BUFFERS}
        if layout is not None:
            if why := self._layout_mismatch(layout):
                error_msgs.append(f"{prefix.rstrip('.')}: {why}")
                return
            values = dict(zip(LAYOUT_FIELDS, layout.tolist(), strict=True))
            self.group_size, self.groups = values["group_size"], values["groups"]
            self.symmetric = bool(values["symmetric"])
            if have["B"] is not None and have["U"] is not None:
                if why := _shape_mismatch(have, self):
                    error_msgs.append(f"{prefix.rstrip('.')}: {why}")
                    return
                self._fit_buffers(have)
                self._filled = True
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _fit_buffers(self, have: dict[str, Tensor | None]) -> None:
        """Act-order changes packed sizes, and optional operands come and go: shape the buffers like the file."""
        for name in BUFFERS[:-1]:
            new, old = have[name], getattr(self, name)
            if new is None:
                if name in _OPTIONAL and name != "bias":
                    setattr(self, name, None)
            elif old is None or old.shape != new.shape:
                if name == "bias" and old is None:
                    continue  # an unexpected key, as in nn.Linear
                dtype = self.U.dtype if name in ("U", "bias") else new.dtype
                setattr(self, name, torch.empty(new.shape, dtype=dtype, device=self.B.device))


class PackedWeight:
    """What `W4Linear.weight` shows: shape, dtype and device, no data."""

    requires_grad = False
    is_meta = False

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.ndim = 2

    def dim(self) -> int:
        return 2

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"W4Linear.weight holds packed 4-bit codes and has no {name!r}; use layer.dequantize()")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", func)
        raise TypeError(f"{name}: W4Linear.weight holds packed 4-bit codes; use layer.dequantize() for a tensor")


class _GemmWithGrad(torch.autograd.Function):
    """The op with a gradient for x: dL/dx = dL/dy W, with W dequantized for the backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        _x, B, U, V, _bias, perm, n, k, group = args
        ctx.save_for_backward(B, U, V, perm)
        ctx.sizes = (n, k, group)
        y: Tensor = ops.gemm(*args)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        B, U, V, perm = ctx.saved_tensors
        n, k, group = ctx.sizes
        return (grad @ _dequantize(B, U, V, perm, n, k, group, grad.dtype), *[None] * 8)


def _dequantize(
    B: Tensor, U: Tensor, V: Tensor | None, perm: Tensor | None, n: int, k: int, group: int, dtype: torch.dtype
) -> Tensor:
    w = packing.dequantize_packed(B, U, V, n, group, dtype)  # (n, packed k)
    if perm is None:
        return w[:, :k].contiguous()
    out = torch.empty((n, k), dtype=dtype, device=w.device)
    used = perm >= 0
    out[:, perm[used].long()] = w[:, used]
    return out


def _shape_mismatch(have: dict[str, Tensor | None], layer: W4Linear) -> str | None:
    """Why the tensors of a state dict cannot be one layer of this size, or None."""
    B, U, perm, group_map = have["B"], have["U"], have["perm"], have["group_map"]
    assert B is not None and U is not None
    n16 = -(-layer.out_features // GRAIN_N)
    k64 = -(-layer.in_features // GRAIN_K) if perm is None else perm.numel() // GRAIN_K
    size = layer.kernel_group
    groups = -(-layer.in_features // size) if group_map is None else group_map.numel()
    wanted: dict[str, tuple[int, ...]] = {"B": (n16, k64, 32, 4), "U": (n16, groups, 16)}
    if not layer.symmetric:
        wanted["V"] = (n16, groups, 8)
    elif have["V"] is not None:
        return "V is present in a symmetric layer"
    if have["bias"] is not None:
        wanted["bias"] = (layer.out_features,)
    integers = {"B": torch.int32, "V": torch.uint8, "perm": torch.int32, "group_map": torch.int32}
    for name, dtype in integers.items():
        found = have[name]
        if found is not None and found.dtype != dtype:
            return f"{name} is {found.dtype}, expected {dtype}"
    for name, shape in wanted.items():
        tensor = have[name]
        if tensor is None or tuple(tensor.shape) != shape:
            return f"{name} is {None if tensor is None else tuple(tensor.shape)}, expected {shape}"
    return None


def _say_float32(got: torch.dtype, used: torch.dtype) -> None:
    global _said_float32
    if not _said_float32:
        _said_float32 = True
        warnings.warn(f"w4linear: {got} activations are computed in {used} on this device", stacklevel=3)
