"""What `w4linear.convert` writes: quant_method "w4linear", each layer the state dict of a `W4Linear`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from w4linear.canonical import CanonicalW4
from w4linear.formats.base import (
    CheckpointError,
    Format,
    LayerConfig,
    Note,
    QuantConfig,
    Sizes,
    TensorError,
    expect,
    setting,
)
from w4linear.linear import BUFFERS, LAYOUT_FIELDS, W4Linear
from w4linear.packing import COMPUTE_DTYPES, GRAIN_N, LAYOUT_VERSION


class PackedW4(Format):
    """This package's own layout."""

    name = "w4linear"
    required = ("B", "U", "layout")
    optional = tuple(name for name in BUFFERS if name not in ("B", "U", "layout"))
    scales = "U"
    small = ("layout", "perm", "group_map")

    def matches(self, quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
        method = quant_config.get("quant_method")
        return None if method == self.name else f"quant_method is {method!r}, expected {self.name!r}"

    def layer_config(self, quant_config: QuantConfig, name: str, note: Note) -> LayerConfig:
        if (version := quant_config.get("layout_version")) != LAYOUT_VERSION:
            raise CheckpointError(
                f"layout_version is {version}, this package reads {LAYOUT_VERSION}; convert the original "
                "checkpoint again"
            )
        module = (setting(quant_config, "modules", dict) or {}).get(name)
        if module is None:
            raise CheckpointError(f"{name}: not listed in the config's quantization_config.modules; convert again")
        group, symmetric = (module.get(k) if isinstance(module, dict) else None for k in ("group_size", "symmetric"))
        if not isinstance(group, int) or not isinstance(symmetric, bool):
            raise CheckpointError(
                f"{name}: quantization_config.modules says {module!r}, expected group_size and symmetric; convert again"
            )
        return LayerConfig(name, group, symmetric)

    def listed(self, quant_config: QuantConfig) -> Iterable[str]:
        return setting(quant_config, "modules", dict) or ()

    def sizes(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        values = dict(zip(LAYOUT_FIELDS, tensors["layout"].flatten().tolist(), strict=False))
        if values.get("version") != LAYOUT_VERSION or len(values) != len(LAYOUT_FIELDS):
            raise TensorError(
                "layout", f"has version {values.get('version')}, this package reads {LAYOUT_VERSION}; convert again"
            )
        if tensors["U"].dtype not in COMPUTE_DTYPES:
            raise TensorError("U", f"is {tensors['U'].dtype}, expected torch.float16 or torch.bfloat16")
        size = Sizes(values["out_features"], values["in_features"], values["group_size"], values["groups"])
        if min(size.n, size.k, size.group, size.groups) < 1:
            raise TensorError("layout", f"says {values}, expected sizes of at least 1; convert again")
        if bool(values["symmetric"]) != config.symmetric or size.group != config.group_size:
            raise TensorError(
                "layout", f"says {values}, the config's modules another group_size or symmetric; convert again"
            )
        dtypes = {"B": torch.int32, "V": torch.uint8, "perm": torch.int32, "group_map": torch.int32}
        for suffix, dtype in dtypes.items():
            if suffix in tensors and tensors[suffix].dtype != dtype:
                raise TensorError(suffix, f"is {tensors[suffix].dtype}, expected {dtype}; convert again")
        for suffix, low, high in (("perm", -1, size.k - 1), ("group_map", 0, size.groups - 1)):
            index = tensors.get(suffix)
            if index is not None and not (index.numel() and low <= int(index.min()) <= int(index.max()) <= high):
                raise TensorError(suffix, f"has values outside {low}..{high}, or none; convert again")
        if (perm := tensors.get("perm")) is not None:
            times = torch.bincount(perm[perm >= 0], minlength=size.k)
            if bool((times != 1).any()):
                raise TensorError(
                    "perm", f"names a column {int(times.max())} or 0 times, expected each of {size.k} once"
                )
        n16 = -(-size.n // GRAIN_N)
        expect(tensors, "B", (n16, *tensors["B"].shape[1:2], 32, 4), "(ceil(n / 16), k64, 32, 4)")
        expect(tensors, "U", (n16, *tensors["U"].shape[1:2], 16), "(ceil(n / 16), groups, 16)")
        expect(tensors, "bias", (size.n,), "(n,)")
        return size

    def read(
        self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None
    ) -> CanonicalW4:
        return self.layer(tensors, config, note).to_canonical()

    def layer(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None) -> W4Linear:
        """The module that the tensors are the state dict of; they are copied as they are."""
        size = self.sizes(tensors, config, note)
        self.check_values(tensors, size.groups)
        layer = W4Linear(
            size.k,
            size.n,
            bias="bias" in tensors,
            group_size=size.group,
            symmetric=config.symmetric,
            dtype=tensors["U"].dtype,
            device="meta",
        )
        try:
            layer.load_state_dict(dict(tensors), assign=True)
        except RuntimeError as error:
            raise TensorError("B", f"and the other tensors do not load: {error}") from error
        return layer
