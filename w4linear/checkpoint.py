"""Opens a checkpoint folder lazily and checks it before anything is read or written; never loads a pickle."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from w4linear.canonical import CanonicalW4
from w4linear.formats import CheckpointError, Format, LayerConfig, Sizes, TensorError, detect
from w4linear.formats.packed import PackedW4
from w4linear.linear import W4Linear
from w4linear.packing import UnsupportedLayerError, kernel_group

_Layer = TypeVar("_Layer")

INDEXES = ("w4linear.safetensors.index.json", "model.safetensors.index.json")
DTYPES = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
__all__ = ["Checkpoint", "CheckpointError", "LayerSpec", "resolve"]


@dataclass(frozen=True)
class LayerSpec:
    """One packed layer: its sizes, what the config declares, and {suffix: key} of its tensors."""

    sizes: Sizes
    config: LayerConfig
    keys: dict[str, str]


class TensorFiles:
    """The safetensors files of a folder: which file holds each tensor, headers checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stated: dict[str, str] = {}
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        index = _find_index(folder, files)
        if index is not None:
            stated = _weight_map(folder / index)
            files = sorted(set(stated.values()))
            for name in files:
                if not (folder / name).is_file():
                    raise CheckpointError(f"{folder / name}: missing shard, named by {index}; download it again")
        elif "model.safetensors" in files:
            files = ["model.safetensors"]
        elif len(files) != 1:
            there = sorted(
                p.name for p in folder.iterdir() if p.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
            )
            raise CheckpointError(
                f"{folder}: expected one *.safetensors or shards with an index, found {there or 'no weights'}; pickles "
                "(.bin, .pt) and GGUF are never loaded: save the model as safetensors"
            )
        self.file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {name: _open(folder / name) for name in files}
        for file, handle in self._open.items():
            for key in handle.keys():  # noqa: SIM118
                if key in self.file_of:
                    raise CheckpointError(f"{folder / file}: duplicate tensor {key}, also in {self.file_of[key]}")
                if stated.get(key, file) != file:
                    raise CheckpointError(f"{folder / file}: holds {key}, which {index} places in {stated[key]}")
                self.file_of[key] = file
        for key in stated:
            if key not in self.file_of:
                raise CheckpointError(f"{folder / stated[key]}: lacks {key}, which {index} places there")

    def read(self, key: str) -> Tensor:
        """The tensor ``key``."""
        tensor: Tensor = self._open[self.file_of[key]].get_tensor(key)
        return tensor

    def meta(self, key: str) -> Tensor:
        """A meta tensor with the shape and dtype of ``key``, from the header."""
        header = self._open[self.file_of[key]].get_slice(key)
        return torch.empty(header.get_shape(), dtype=DTYPES.get(header.get_dtype(), torch.uint8), device="meta")


class Checkpoint:
    """An opened, checked 4-bit checkpoint: `config`, `quant_config`, `format`, `layers`, `problems`."""

    path: Path
    config: dict[str, Any]
    quant_config: dict[str, Any]
    format: Format
    layers: dict[str, LayerSpec]
    problems: list[str]
    files: TensorFiles
    _said: set[str]

    @classmethod
    def open(cls, path: str | Path, *, strict: bool = True) -> Checkpoint:
        """Opens a folder. Raises CheckpointError; with ``strict=False`` layers' faults only go to `problems`."""
        self = cls()
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{path}: not a folder")
        self._said = set()
        self.config = read_json(self.path / "config.json")
        self.quant_config = find_quant_config(self.path, self.config)
        self.files = TensorFiles(self.path)
        try:
            self.format = detect(self.quant_config, list(self.files.file_of))
        except CheckpointError as error:
            hint = (
                "" if self.quant_config else "; found no quantization_config in config.json, nor quantize_config.json"
            )
            raise CheckpointError(f"{path}: {error}{hint}") from error
        self.layers, self.problems = {}, []
        found = self.format.layers(self.files.file_of)
        for prefix, keys in found.items():
            try:
                self.layers[prefix] = self._layer(prefix, keys)
            except TensorError as error:
                self.problems.append(self._where(prefix, error))
            except (CheckpointError, UnsupportedLayerError) as error:
                text = str(error)
                self.problems.append(text if text.startswith(prefix) else f"{prefix}: {text}")
        for name in self.format.listed(self.quant_config):
            if name not in found:
                self.problems.append(f"{self.path}: {name} is listed in the config, but has no tensors; convert again")
        if strict and self.problems:
            more = f" (and {len(self.problems) - 5} more)" if len(self.problems) > 5 else ""
            raise CheckpointError("\n".join(self.problems[:5]) + more)
        return self

    def _layer(self, prefix: str, keys: dict[str, str]) -> LayerSpec:
        fmt = self.format
        config = fmt.layer_config(self.quant_config, prefix, lambda message: self._note(prefix, message))
        for suffix in fmt.needed(config):
            if suffix not in keys:
                raise TensorError(suffix, f"is missing; the layer has {sorted(keys)}")
        tensors = {s: self.files.read(k) if s in fmt.small else self.files.meta(k) for s, k in keys.items()}
        sizes = fmt.sizes(tensors, config, lambda message: self._note(prefix, message))
        if unknown := sorted(keys.keys() - {*fmt.required, *fmt.optional}):
            raise TensorError(
                unknown[0],
                f"is unknown in a layer of {fmt.name}, expected {', '.join(fmt.required + fmt.optional)}; "
                "correct quant_method, or remove the tensor",
            )
        kernel_group(sizes.group, sizes.k)
        return LayerSpec(sizes, config, keys)

    def read_layer(self, prefix: str) -> CanonicalW4:
        """The layer ``prefix``; raises CheckpointError naming tensor and file."""
        return self._read(prefix, self.format.read)

    def read_packed(self, prefix: str) -> W4Linear:
        """The layer ``prefix`` of a converted checkpoint, as stored: nothing is packed again."""
        if not isinstance(self.format, PackedW4):
            raise CheckpointError(f"{self.path}: {self.format.name} layers are not packed; use read_layer")
        return self._read(prefix, self.format.layer)

    def _read(self, prefix: str, reader: Callable[..., _Layer]) -> _Layer:
        spec = self.layers[prefix]
        tensors = {suffix: self.files.read(key) for suffix, key in spec.keys.items()}
        try:
            return reader(tensors, spec.config, lambda message: self._note(prefix, message))
        except TensorError as error:
            raise CheckpointError(self._where(prefix, error)) from error

    def check_values(self) -> None:
        """Reads the small tensors only: scales, group index and bias must be finite and in range."""
        for prefix, spec in self.layers.items():
            few = (self.format.scales, self.format.index, "bias")
            tensors = {s: self.files.read(k) for s, k in spec.keys.items() if s in few}
            try:
                self.format.check_values(tensors, spec.sizes.groups)
            except TensorError as error:
                raise CheckpointError(self._where(prefix, error)) from error

    def other_tensors(self) -> list[str]:
        """Names of the tensors that belong to no packed layer."""
        taken = {key for spec in self.layers.values() for key in spec.keys.values()}
        return sorted(self.files.file_of.keys() - taken)

    def read_tensor(self, name: str) -> Tensor:
        """The tensor ``name`` as stored."""
        return self.files.read(name)

    def _where(self, prefix: str, error: TensorError) -> str:
        key = f"{prefix}.{error.suffix}"
        return f"{self.path / self.files.file_of.get(key, '')}: {key} {error.message}"

    def _note(self, prefix: str, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"{self.path.name}: {prefix}: {message} (said once)", stacklevel=4)


def find_quant_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The quantization settings from config.json, quantize_config.json and quant_config.json, one spelling."""
    nested = [sub for sub in config.values() if isinstance(sub, dict)]
    found = [
        sub["quantization_config"] for sub in (config, *nested) if isinstance(sub.get("quantization_config"), dict)
    ]
    found += [read_json(p) for p in (folder / "quantize_config.json", folder / "quant_config.json") if p.is_file()]
    merged: dict[str, Any] = {}
    for source in found:
        for key, value in source.items():
            key = {"w_bit": "bits", "q_group_size": "group_size", "method": "quant_method"}.get(key, key)
            if merged.setdefault(key, value) == value:
                continue
            if key in ("bits", "sym", "zero_point", "checkpoint_format", "quant_method"):
                raise CheckpointError(
                    f"{folder}: config files contradict on {key}: {merged[key]!r} and {value!r}; correct one"
                )
            if key == "group_size":
                warnings.warn(
                    f"{folder}: config files say group_size {merged[key]} and {value}; tensors decide", stacklevel=3
                )
    return merged


def resolve(path_or_id: str | Path) -> Path:
    """A local folder: the given one, else the downloaded snapshot of a hub id like "org/name"."""
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path_or_id)) and not str(path_or_id).startswith("."):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(path_or_id), ignore_patterns=["*.bin", "*.pt", "*.pth"]))
    raise CheckpointError(f"{path_or_id}: no such folder, and not a hub id of the form org/name")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def _find_index(folder: Path, files: list[str]) -> str | None:
    """The index to follow: ours, else the one of Hugging Face unless there is one whole file, else the only other."""
    found = sorted(p.name for p in folder.glob("*.safetensors.index.json"))
    if INDEXES[0] in found:
        return INDEXES[0]
    if "model.safetensors" in files:
        return None
    if INDEXES[1] in found or not found:
        return INDEXES[1] if found else None
    if len(found) > 1:
        raise CheckpointError(f"{folder}: holds the indexes {found}, expected one; delete those of other models")
    return found[0]


def _weight_map(path: Path) -> dict[str, str]:
    """{tensor: file} of an index; every file is inside the index's folder."""
    value = read_json(path).get("weight_map")
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) and name for name in value.values()):
        raise CheckpointError(f"{path}: weight_map is {str(value)[:80]}, expected {{tensor: file}}; download it again")
    for name in sorted(set(value.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path}: names {name!r}, a path outside the folder; refused")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: truncated or corrupt ({error}); download it again (git lfs pull for a pointer)"
        ) from error
