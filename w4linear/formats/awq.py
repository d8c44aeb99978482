"""AWQ, ``gemm`` and ``gemv``.

    gemm   qweight (k, n/8), qzeros (groups, n/8), scales (groups, n)  nibble p of word i is column 8 i + ORDER[p]
    gemv   qweight (n, k/8), qzeros (n, zw/8), scales (n, zw)          nibble j of word i is column 8 i + j

In gemv zw >= groups: the rows of scales and qzeros are padded.
Zero points are as stored. With ``zero_point: false`` qzeros may be absent, which means 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from w4linear.canonical import CanonicalW4
from w4linear.formats.base import (
    Format,
    LayerConfig,
    Note,
    QuantConfig,
    Sizes,
    TensorError,
    block_slices,
    declared_bits,
    expect,
    expect_common,
    group_of,
    is_symmetric,
    setting,
    strings,
    unpack_rows,
    unpack_words,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_POSITION = torch.tensor([ORDER.index(column) for column in range(8)])


class Awq(Format):
    """AutoAWQ's and gptqmodel's AWQ."""

    name = "awq"
    required = ("qweight", "qzeros", "scales")
    optional = ("bias",)
    scales = "scales"

    def matches(self, quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
        method = quant_config.get("quant_method")
        if method is None and not ("zero_point" in quant_config or variant(quant_config) in ("gemm", "gemv")):
            return "the config has neither quant_method nor AWQ's zero_point"
        if method is not None and method != "awq":
            return f"quant_method is {method!r}, expected 'awq'"
        if not any(key.endswith(".qweight") for key in keys):
            return "no tensor is named *.qweight"
        return None

    def layer_config(self, quant_config: QuantConfig, name: str, note: Note) -> LayerConfig:
        declared_bits(quant_config, name, quant_config.get("bits"))
        for part in strings(quant_config, "modules_to_not_convert"):
            if part in name:
                note(
                    f"the config's modules_to_not_convert names {part!r}, but the layer is packed; read by the tensors"
                )
        symmetric = quant_config.get("zero_point") is False or quant_config.get("sym") is True
        return LayerConfig(name, setting(quant_config, "group_size", int), symmetric, variant(quant_config) or "gemm")

    def needed(self, config: LayerConfig) -> tuple[str, ...]:
        return ("qweight", "scales") if config.symmetric else self.required

    def sizes(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        expect_common(tensors, ("qweight", "qzeros"), "scales")
        rows, words = tensors["qweight"].shape
        if config.variant == "gemv":
            return self._sizes_gemv(tensors, config, note)
        groups, n = tensors["scales"].shape
        if words != -(-n // 8) and words * 32 % n == 0 and words * 32 // n in (2, 3, 8):
            raise TensorError(
                "qweight",
                f"is {(rows, words)} with scales {(groups, n)}: {words * 32 // n} bits, only 4 is supported; "
                "quantize the layer with 4 bits or keep it in 16",
            )
        expect(
            tensors,
            "qweight",
            (rows, -(-n // 8)),
            "AWQ gemm's (k, ceil(n / 8))",
            f"scales is {(groups, n)}; if GPTQ's (k / 8, n) or another layout was meant, correct quant_method",
        )
        group = group_of(rows, groups, config.group_size, "scales", note)
        expect(tensors, "qzeros", (groups, -(-n // 8)), "(groups, ceil(n / 8))")
        expect(tensors, "bias", (n,), "(n,)")
        return Sizes(n, rows, group, groups)

    def _sizes_gemv(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        n, words = tensors["qweight"].shape
        k = words * 8
        group = config.group_size
        if group is None:
            raise TensorError(
                "scales", "is padded in AWQ gemv, so the config must give group_size, and does not; add it"
            )
        if group <= 0:
            group = k
        groups = -(-k // group)
        width = tensors["scales"].shape[1]
        if width < groups or width % 8:
            raise TensorError(
                "scales",
                f"is {tuple(tensors['scales'].shape)}, expected AWQ gemv's (n, zw) with zw a multiple of 8 and at "
                f"least {groups} groups, for qweight {(n, words)} and group_size {config.group_size}",
            )
        expect(tensors, "scales", (n, width), "AWQ gemv's (n, zw)", f"qweight is {(n, words)} = (n, k / 8)")
        expect(tensors, "qzeros", (n, width // 8), "(n, zw / 8)")
        expect(tensors, "bias", (n,), "(n,)")
        return Sizes(n, k, min(group, k), groups)

    def read(
        self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None
    ) -> CanonicalW4:
        size = self.sizes(tensors, config, note)
        self.check_values(tensors, size.groups)
        qweight, qzeros, scales = tensors["qweight"], tensors.get("qzeros"), tensors["scales"]
        z = torch.full((size.n, size.groups), 8, dtype=torch.uint8)
        if config.variant == "gemv":
            q = unpack_rows(qweight, size.k)
            s = scales[:, : size.groups]
            if bool(scales[:, size.groups :].any()):
                raise TensorError(
                    "scales",
                    f"holds values beyond the {size.groups} groups of the config's group_size {config.group_size}; "
                    "correct group_size",
                )
            if qzeros is not None:
                z = unpack_words(qzeros, size.groups)
        else:
            q = torch.empty((size.n, size.k), dtype=torch.uint8)
            for rows in block_slices(size.k, size.n):
                q[:, rows] = _interleaved(qweight[rows], size.n).T
            s = scales.T
            if qzeros is not None:
                z = _interleaved(qzeros, size.n).T
        z = z.contiguous()
        symmetric = is_symmetric(z, config, note)
        return CanonicalW4(q, s.contiguous(), z, size.group, None, tensors.get("bias"), symmetric)


def variant(quant_config: QuantConfig) -> str | None:
    """The dialect that the config names ("gemm", "gemv", ...), or None."""
    for field in ("version", "checkpoint_format", "format"):
        if isinstance(value := quant_config.get(field), str):
            return value.lower()
    return None


def _interleaved(words: Tensor, n: int) -> Tensor:
    """gemm words (rows, n/8) -> (rows, n) uint8 in column order."""
    columns: Tensor = unpack_words(words).unflatten(1, (-1, 8))[..., _POSITION]
    return columns.flatten(1)[:, :n]
