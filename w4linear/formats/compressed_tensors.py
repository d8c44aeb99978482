"""compressed-tensors ``pack-quantized``, 4 bits, groups or channels.

weight_packed (n, k/8)             nibble j of word i is column 8 i + j; stored with offset 8, which makes it q
weight_scale (n, groups)           weight_shape (2,) holds n, k
weight_zero_point (n/8, groups)    packed along n with the same offset, or int8 (n, groups) without; absent means 8
weight_g_idx (k)                   group of each column, with activation order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    declared_bits,
    expect,
    expect_common,
    group_of,
    is_symmetric,
    name_matches,
    setting,
    strings,
    unpack_columns,
    unpack_rows,
)


class CompressedTensors(Format):
    """llm-compressor's int4 weights."""

    name = "compressed-tensors"
    required = ("weight_packed", "weight_scale")
    optional = ("weight_zero_point", "weight_g_idx", "weight_shape", "bias")
    marking = ("weight_zero_point", "weight_g_idx", "weight_shape")
    scales = "weight_scale"
    index = "weight_g_idx"
    small = ("weight_shape",)

    def matches(self, quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
        method = quant_config.get("quant_method")
        if method != self.name:
            return f"quant_method is {method!r}, expected {self.name!r}"
        if not any(key.endswith(".weight_packed") for key in keys):
            return "no tensor is named *.weight_packed"
        return None

    def layer_config(self, quant_config: QuantConfig, name: str, note: Note) -> LayerConfig:
        if any(_names(target, name) for target in strings(quant_config, "ignore")):
            note("the config's ignore list names the layer, but it is packed; read by the tensors")
        scheme = _scheme(quant_config, name, note)
        weights = setting(scheme, "weights", dict) or {}
        if scheme.get("input_activations"):
            raise CheckpointError(
                f"{name}: activations are quantized too (input_activations); only 16-bit ones are supported"
            )
        if weights.get("type", "int") != "int":
            raise CheckpointError(f"{name}: weights of type {weights['type']!r}, only 'int' of 4 bits is supported")
        declared_bits(quant_config, name, weights.get("num_bits"))
        strategy, group_size = weights.get("strategy"), setting(weights, "group_size", int)
        if strategy not in (None, "group", "channel"):
            raise CheckpointError(f"{name}: strategy {strategy!r}, expected 'group' or 'channel'")
        return LayerConfig(name, -1 if strategy == "channel" else group_size, weights.get("symmetric") is True)

    def sizes(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        zero_point = tensors.get("weight_zero_point")
        words = ("weight_packed",) if _is_int8(zero_point) else ("weight_packed", "weight_zero_point")
        expect_common(tensors, words, "weight_scale")
        n, columns = tensors["weight_packed"].shape
        k = columns * 8
        if (shape := tensors.get("weight_shape")) is not None:
            if tuple(shape.shape) != (2,) or shape.dtype not in (torch.int32, torch.int64) or int(shape.min()) < 1:
                raise TensorError(
                    "weight_shape", f"is {shape.tolist()} {shape.dtype}, expected two sizes (n, k), torch.int64"
                )
            rows, k = (int(size) for size in shape)
            if (n, columns) != (rows, -(-k // 8)):
                raise TensorError(
                    "weight_packed",
                    f"is {(n, columns)}, expected (n, ceil(k / 8)) = {(rows, -(-k // 8))} for weight_shape {(rows, k)}",
                )
        groups = tensors["weight_scale"].shape[1]
        expect(tensors, "weight_scale", (n, groups), "(n, groups)")
        group = group_of(k, groups, config.group_size, "weight_scale", note)
        if _is_int8(zero_point):
            expect(tensors, "weight_zero_point", (n, groups), "(n, groups)")
        expect(
            tensors, "weight_zero_point", (n if _is_int8(zero_point) else -(-n // 8), groups), "(ceil(n / 8), groups)"
        )
        if (index := tensors.get("weight_g_idx")) is not None and index.dtype not in (torch.int32, torch.int64):
            raise TensorError("weight_g_idx", f"is {index.dtype}, expected torch.int32")
        expect(tensors, "weight_g_idx", (k,), "(k,)")
        expect(tensors, "bias", (n,), "(n,)")
        return Sizes(n, k, group, groups)

    def read(
        self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None
    ) -> CanonicalW4:
        size = self.sizes(tensors, config, note)
        self.check_values(tensors, size.groups)
        q = unpack_rows(tensors["weight_packed"], size.k)
        stored, g_idx = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
        if stored is None:
            if not config.symmetric:
                note("the config declares asymmetric, but no weight_zero_point is stored; read as z = 8")
            z = torch.full((size.n, size.groups), 8, dtype=torch.uint8)
        elif _is_int8(stored):
            if not -8 <= int(stored.min()) <= int(stored.max()) <= 7:
                raise TensorError(
                    "weight_zero_point", f"has values {int(stored.min())}..{int(stored.max())}, expected -8..7"
                )
            z = (stored + 8).to(torch.uint8)
        else:
            z = unpack_columns(stored, size.n).T.contiguous()
        return CanonicalW4(
            q,
            tensors["weight_scale"].contiguous(),
            z,
            size.group,
            None if g_idx is None else g_idx.int(),
            tensors.get("bias"),
            is_symmetric(z, config, note),
        )


def _is_int8(zero_point: Tensor | None) -> bool:
    return zero_point is not None and zero_point.dtype == torch.int8


def _names(target: str, name: str) -> bool:
    return name_matches(target[3:], name) if target.startswith("re:") else target == name


def _scheme(quant_config: QuantConfig, name: str, note: Note) -> Mapping[str, Any]:
    """The config group of layer ``name``: by its name, else by the class Linear, else the only one there is."""
    named = setting(quant_config, "config_groups", dict) or {}
    schemes = [setting(named, key, dict) or {} for key in named]
    for matches in (lambda target: _names(target, name), lambda target: target == "Linear"):
        for scheme in schemes:
            if any(matches(target) for target in strings(scheme, "targets")):
                return dict(scheme)
    if len(schemes) == 1:
        note(
            f"no target of the config's one group matches the layer (targets {schemes[0].get('targets')}); "
            "read with that group"
        )
        return dict(schemes[0])
    raise CheckpointError(
        f"{name}: none of the config's {len(schemes)} config_groups has it as a target; correct their targets"
    )
