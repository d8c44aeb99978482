"""GPTQ, v1 ("gptq") and v2 ("gptq_v2").

    qweight (k/8, n)   nibble j of word i is row k = 8 i + j
    qzeros (groups, n/8), scales (groups, n)   nibble j of word i is column n = 8 i + j
    g_idx (k)          group of each k; trusted over every flag

v2 stores z, v1 stores z - 1: gptqmodel subtracts it from the whole word, with borrow, others from each nibble. The two
differ only where a stored nibble is 15.
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
    unpack_columns,
    unpack_words,
)

_ONES = 0x11111111
_VARIANTS = {None: "v1", "gptq": "v1", "gptq_v2": "v2"}


class Gptq(Format):
    """AutoGPTQ's and gptqmodel's GPTQ."""

    name = "gptq"
    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx", "bias")
    marking = ("g_idx",)
    scales = "scales"
    index = "g_idx"

    def matches(self, quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
        method = quant_config.get("quant_method")
        if method is None and not {"desc_act", "sym"} & quant_config.keys():
            return "the config has neither quant_method nor GPTQ's desc_act or sym"
        if method is not None and method != "gptq":
            return f"quant_method is {method!r}, expected 'gptq'"
        if not any(key.endswith(".qweight") for key in keys):
            return "no tensor is named *.qweight"
        return None

    def layer_config(self, quant_config: QuantConfig, name: str, note: Note) -> LayerConfig:
        own = {**quant_config, **_dynamic(quant_config, name, note)}
        declared_bits(quant_config, name, own.get("bits"))
        label, older = (setting(quant_config, key, str) for key in ("checkpoint_format", "format"))
        if label is not None and older is not None and label != older:
            raise CheckpointError(f"{name}: checkpoint_format is {label!r}, but format {older!r}; correct one")
        label = label or older
        if label not in _VARIANTS:
            raise CheckpointError(
                f"{name}: checkpoint_format is {label!r}, expected 'gptq' or 'gptq_v2'; export it as one of these"
            )
        return LayerConfig(
            name, setting(own, "group_size", int), own.get("sym") is True, _VARIANTS[label], _writer(quant_config)
        )

    def sizes(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        expect_common(tensors, ("qweight", "qzeros"), "scales")
        groups, n = tensors["scales"].shape
        words, columns = tensors["qweight"].shape
        if columns != n:
            raise TensorError(
                "qweight",
                f"is {(words, columns)}, expected GPTQ's (ceil(k / 8), n) = (ceil(k / 8), {n}) for scales "
                f"{(groups, n)}; AWQ's is (k, n / 8): correct quant_method if that was meant",
            )
        k, index = words * 8, tensors.get("g_idx")
        if index is not None:
            if index.dtype not in (torch.int32, torch.int64) or index.ndim != 1:
                raise TensorError("g_idx", f"is {tuple(index.shape)} {index.dtype}, expected (k,) torch.int32")
            k = index.shape[0]
            if words != -(-k // 8) and k and words * 32 % k == 0 and words * 32 // k in (2, 3, 8):
                raise TensorError(
                    "qweight",
                    f"is {(words, n)} with g_idx {(k,)}: {words * 32 // k} bits, only 4 is supported; "
                    "quantize the layer with 4 bits or keep it in 16",
                )
            expect(tensors, "qweight", (-(-k // 8), n), "(ceil(k / 8), n)", f"g_idx is {(k,)}")
        expect(
            tensors,
            "qzeros",
            (groups, -(-n // 8)),
            "(groups, ceil(n / 8))",
            "other widths than 4 bits are not supported",
        )
        group = group_of(k, groups, config.group_size, "scales", note)
        expect(tensors, "bias", (n,), "(n,)")
        return Sizes(n, k, group, groups)

    def read(
        self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None
    ) -> CanonicalW4:
        size = self.sizes(tensors, config, note)
        self.check_values(tensors, size.groups)
        q = unpack_columns(tensors["qweight"], size.k)
        z = _zeros(tensors["qzeros"], size.n, config, note)
        g_idx = tensors.get("g_idx")
        return CanonicalW4(
            q,
            tensors["scales"].T.contiguous(),
            z,
            size.group,
            None if g_idx is None else g_idx.int(),
            tensors.get("bias"),
            is_symmetric(z, config, note),
        )


def _zeros(words: Tensor, n: int, config: LayerConfig, note: Note) -> Tensor:
    """qzeros (groups, n/8) -> z (n, groups) uint8."""
    stored = unpack_words(words, n)  # (groups, n)
    if config.variant == "v2":
        z = stored
    elif config.symmetric and bool((stored == 8).all()):
        note(
            "checkpoint_format says v1 ('gptq', which stores z - 1), but the symmetric layer's qzeros hold 8 "
            "everywhere, as 'gptq_v2' does; read as z = 8"
        )
        z = stored
    elif config.writer is not None and "gptqmodel" in config.writer.lower():
        z = unpack_words((words.long() + _ONES).to(torch.int32), n)  # carries, as it borrowed
    else:
        if config.writer is None and bool((stored == 15).any()):
            note(
                f"{config.name}.qzeros holds 15 in a v1 file of an unknown writer; read as z = 0, nibble by nibble. "
                "If gptqmodel wrote it, say so in the config's meta.quantizer"
            )
        z = (stored + 1) & 15
    return z.T.contiguous()


def _dynamic(quant_config: QuantConfig, name: str, note: Note) -> Mapping[str, Any]:
    """The first rule of the config's ``dynamic`` that matches ``name``: what it overrides."""
    rules = setting(quant_config, "dynamic", dict) or {}
    for pattern in rules:
        if pattern.startswith("-:"):
            if name_matches(pattern[2:], name):
                note(
                    f"the config's dynamic rule {pattern!r} keeps the layer dense, but it is packed; "
                    "read by the tensors"
                )
                return {}
        elif name_matches(pattern.removeprefix("+:"), name):
            return setting(rules, pattern, dict) or {}
    return {}


def _writer(quant_config: QuantConfig) -> str | None:
    meta = quant_config.get("meta") or {}
    writer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return None if not writer else " ".join(map(str, writer)) if isinstance(writer, (list, tuple)) else str(writer)
