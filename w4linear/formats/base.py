"""What every checkpoint format shares: the `Format` interface, its errors, and the unpacking of 4-bit words.

Words are little-endian int32; nibble j is bits 4j..4j+3. Unpacking works on uint8 views, so a sign bit never spreads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from w4linear.canonical import SCALE_DTYPES, CanonicalW4
from w4linear.packing import KERNEL_GROUPS

QuantConfig = Mapping[str, Any]
Note = Callable[[str], None]
T = TypeVar("T")

# Codes that are unpacked at a time: bounds the temporaries.
_BLOCK_CODES = 1 << 23


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names file, tensor, what was got, what was wanted, the way out."""


class TensorError(CheckpointError):
    """A `CheckpointError` about one tensor of a layer, named by its suffix; `Checkpoint` adds layer and file."""

    def __init__(self, suffix: str, message: str) -> None:
        super().__init__(f"{suffix} {message}")
        self.suffix, self.message = suffix, message


@dataclass(frozen=True)
class LayerConfig:
    """What the checkpoint's config declares about one layer.

    Attributes:
        name: the layer's prefix in the checkpoint.
        group_size: as declared: -1 for one group, None where the config does not say.
        symmetric: whether every zero point is declared to be 8.
        variant: the format's dialect ("gemm" or "gemv", "v1" or "v2").
        writer: the program that wrote the file, where the config names it.
    """

    name: str
    group_size: int | None = None
    symmetric: bool = False
    variant: str = ""
    writer: str | None = None


@dataclass(frozen=True)
class Sizes:
    """A layer's true sizes: n out features, k in features, columns per group, number of groups."""

    n: int
    k: int
    group: int
    groups: int


class Format(ABC):
    """One checkpoint format.

    Attributes:
        name: what it is called.
        required, optional: suffixes of a layer's tensors, ``prefix.suffix`` in the file. A prefix that has any
            required or ``marking`` suffix is a layer.
        scales, index: suffixes of the scales and of the group index, whose values are checked first.
        small: suffixes whose values (not only shapes) `sizes` needs.
    """

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]]
    marking: ClassVar[tuple[str, ...]] = ()
    scales: ClassVar[str]
    index: ClassVar[str | None] = None
    small: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def matches(self, quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
        """Why the checkpoint is not of this format, or None where it is."""

    @abstractmethod
    def layer_config(self, quant_config: QuantConfig, name: str, note: Note) -> LayerConfig:
        """What the config says about layer ``name``; raises CheckpointError for other widths than 4 bits."""

    @abstractmethod
    def sizes(self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note) -> Sizes:
        """Checks shapes and dtypes (meta tensors do, but for ``small``); raises TensorError."""

    @abstractmethod
    def read(
        self, tensors: Mapping[str, Tensor], config: LayerConfig, note: Note = lambda message: None
    ) -> CanonicalW4:
        """The layer, from its tensors by suffix; raises TensorError."""

    def layers(self, keys: Iterable[str]) -> dict[str, dict[str, str]]:
        """{prefix: {suffix: key}} of every prefix that has one of the format's own suffixes, in sorted order."""
        by_prefix: dict[str, dict[str, str]] = {}
        marks = {*self.required, *self.marking}
        for key in sorted(keys):
            prefix, dot, suffix = key.rpartition(".")
            if not dot and key in marks:
                raise CheckpointError(f"tensor {key} has no layer's name before it; export the whole model, with names")
            if dot:
                by_prefix.setdefault(prefix, {})[suffix] = key
        return {prefix: found for prefix, found in by_prefix.items() if marks & found.keys()}

    def listed(self, quant_config: QuantConfig) -> Iterable[str]:
        """The layers that the config lists as packed, where the format has such a list."""
        return ()

    def needed(self, config: LayerConfig) -> tuple[str, ...]:
        """The suffixes that a layer of this config must have."""
        return self.required

    def check_values(self, tensors: Mapping[str, Tensor], groups: int) -> None:
        """Checks scales, group index and bias; the other tensors may be missing. Raises TensorError."""
        for suffix in (self.scales, "bias"):
            values = tensors.get(suffix)
            if values is not None and not bool(torch.isfinite(values).all()):
                at = tuple(int(i) for i in (~torch.isfinite(values)).nonzero()[0])
                raise TensorError(
                    suffix, f"holds {float(values[at])} at {list(at)}, expected finite values; the file is damaged"
                )
        index = tensors.get(self.index) if self.index else None
        if index is not None and not 0 <= int(index.min()) <= int(index.max()) < groups:
            raise TensorError(
                str(self.index),
                f"has values {int(index.min())}..{int(index.max())}, expected 0..{groups - 1} as there are scales",
            )


def expect(tensors: Mapping[str, Tensor], suffix: str, shape: tuple[int, ...], formula: str, why: str = "") -> None:
    """Raises TensorError unless tensor ``suffix`` (where present) has ``shape``, which ``formula`` spells out."""
    got = tensors.get(suffix)
    if got is not None and tuple(got.shape) != shape:
        raise TensorError(suffix, f"is {tuple(got.shape)}, expected {formula} = {shape}{why and '; ' + why}")


def expect_common(tensors: Mapping[str, Tensor], words: Iterable[str], scales: str) -> None:
    """Checks what all formats agree on: 2-D int32 words, 2-D scales and bias in a floating dtype."""
    for suffix in words:
        word = tensors.get(suffix)
        if word is not None and (word.dtype != torch.int32 or word.ndim != 2):
            raise TensorError(
                suffix,
                f"is {tuple(word.shape)} {word.dtype}, expected 2-D torch.int32 words of eight 4-bit codes; "
                "other packings (AWQ gemv_fast's int16, stacked experts) are not supported",
            )
    if tensors[scales].dtype not in SCALE_DTYPES or tensors[scales].ndim != 2 or not tensors[scales].numel():
        raise TensorError(
            scales,
            f"is {tuple(tensors[scales].shape)} {tensors[scales].dtype}, expected 2-D float16, bfloat16 or float32",
        )
    if "bias" in tensors and tensors["bias"].dtype not in SCALE_DTYPES:
        raise TensorError("bias", f"is {tensors['bias'].dtype}, expected float16, bfloat16 or float32")


def group_of(k: int, groups: int, declared: int | None, scales: str, note: Note) -> int:
    """The group size that fits ``groups`` groups over k: the declared one, else the only usual one, with a note."""
    if declared is not None and declared > 0 and -(-k // declared) == groups:
        return min(declared, k)
    if groups == 1 and (declared is None or declared <= 0):
        return k
    fits = [size for size in KERNEL_GROUPS if -(-k // size) == groups]
    fits = [k] if groups == 1 else fits
    if len(fits) != 1:
        raise TensorError(
            scales,
            f"has {groups} groups over k = {k}, expected {-(-k // declared) if declared and declared > 0 else 1} "
            f"for the config's group_size {declared}; correct group_size in the config",
        )
    if declared is not None:
        note(f"the config says group_size {declared}, the tensors say {fits[0]}; read by the tensors")
    return fits[0]


def unpack_words(words: Tensor, count: int | None = None) -> Tensor:
    """words (rows, w) int32 -> (rows, count or 8 w) uint8, nibble j of word i at column 8 i + j."""
    if not words.is_contiguous() or words.stride(-1) != 1:  # a single column counts as contiguous at any stride
        words = words.clone(memory_format=torch.contiguous_format)
    byte = words.view(torch.uint8)  # (rows, 4 w)
    return torch.stack((byte & 15, byte >> 4), dim=-1).flatten(1)[:, :count]


def unpack_rows(words: Tensor, count: int) -> Tensor:
    """As `unpack_words`, with bounded temporaries: (rows, w) -> (rows, count)."""
    out = torch.empty((words.shape[0], count), dtype=torch.uint8)
    for rows in block_slices(words.shape[0], count):
        out[rows] = unpack_words(words[rows], count)
    return out


def unpack_columns(words: Tensor, count: int) -> Tensor:
    """words (w, n) packed along their first mode -> (n, count) uint8."""
    out = torch.empty((words.shape[1], count), dtype=torch.uint8)
    for rows in block_slices(words.shape[1], count):
        out[rows] = unpack_words(words[:, rows].T, count)
    return out


def block_slices(rows: int, codes_per_row: int) -> Iterable[slice]:
    """Slices that cover ``rows``, each of about `_BLOCK_CODES` codes."""
    step = max(1, _BLOCK_CODES // max(1, codes_per_row))
    return (slice(row, min(row + step, rows)) for row in range(0, rows, step))


def is_symmetric(z: Tensor, config: LayerConfig, note: Note) -> bool:
    """Whether the layer is symmetric: it is declared so, and no zero point contradicts that."""
    if config.symmetric and not bool((z == 8).all()):
        note(
            f"{config.name}: the config declares symmetric, but zero points from {int(z.min())} to {int(z.max())} are "
            "stored; read as asymmetric"
        )
        return False
    return config.symmetric


def setting(settings: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """``settings[key]``, None where it is absent or null; raises CheckpointError unless it is a ``kind``."""
    value = settings.get(key)
    if value is not None and not isinstance(value, kind):
        raise CheckpointError(f"the quantization config's {key} is {value!r}, expected {kind.__name__}; correct it")
    return value


def strings(settings: Mapping[str, Any], key: str) -> list[str]:
    """``settings[key]``, a list of strings, empty where it is absent or null; raises CheckpointError for others."""
    values = setting(settings, key, list) or []
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"the quantization config's {key} is {values!r}, expected a list of strings; correct it")
    return values


def name_matches(pattern: str, name: str) -> bool:
    """Whether the regular expression of a config matches the beginning of ``name``; raises CheckpointError."""
    try:
        return re.match(pattern, name) is not None
    except (re.error, TypeError) as error:
        raise CheckpointError(f"the quantization config's pattern {pattern!r} is malformed ({error})") from error


def declared_bits(quant_config: QuantConfig, name: str, bits: Any) -> None:
    """Raises CheckpointError, naming layer and width, unless ``bits`` is 4 or not given."""
    if bits is not None and bits != 4:
        raise CheckpointError(
            f"{name}: {bits} bits in the {quant_config.get('quant_method', 'quantization')} config, only 4 is "
            "supported; quantize the layer with 4 bits or keep it in 16"
        )
