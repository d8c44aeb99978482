"""A checkpoint folder -> the packed layout: shards, index, config.json, tokenizer files; memory bounded by a shard."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from w4linear.checkpoint import INDEXES, Checkpoint, CheckpointError
from w4linear.linear import BUFFERS, W4Linear
from w4linear.packing import LAYOUT_VERSION

_SHARD_BYTES = 1 << 30
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` wrote."""

    src: str
    dst: str
    format: str
    layers: int
    kept: int
    dtype: str
    shards: int
    bytes_out: int


def convert(
    src: str | Path, dst: str | Path, *, dtype: str | torch.dtype = "auto", overwrite: bool = False, progress: bool = False
) -> ConvertReport:
    """Converts a 4-bit checkpoint folder; writes beside ``dst`` and renames at the end.

    Raises:
        CheckpointError: before anything is written where ``src`` is faulty or ``dst`` exists without ``overwrite``.
    """
    src, dst = Path(src), Path(dst)
    checkpoint = Checkpoint.open(src)
    if checkpoint.format.name == "w4linear":
        raise CheckpointError(f"{src}: already converted; load it as it is")
    here, there = src.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"{dst}: source and destination overlap ({src}); name another folder")
    if dst.exists() and not overwrite:
        raise CheckpointError(f"{dst}: exists; pass overwrite=True (--overwrite) or name another folder")
    if dst.exists() and not (dst.is_dir() and ((dst / "config.json").is_file() or not any(dst.iterdir()))):
        raise CheckpointError(f"{dst}: is no checkpoint folder, not overwritten; name another folder")
    checkpoint.check_values()
    compute, was_float32 = _compute_dtype(checkpoint, dtype)
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
    try:
        modules: dict[str, Any] = {}
        where, size = _write_shards(partial, _tensors(checkpoint, compute, was_float32, modules, progress))
        for file in sorted(src.iterdir()):
            if file.is_file() and file.suffix not in _NOT_COPIED and not file.name.startswith("."):
                if file.name not in ("config.json", "quantize_config.json", "quant_config.json", *INDEXES):
                    shutil.copyfile(file, partial / file.name)
        _write_json(partial / INDEXES[0], {"metadata": {"total_size": size}, "weight_map": where})
        config = {k: v for k, v in checkpoint.config.items() if k not in ("torch_dtype", "quantization_config")}
        for sub in config.values():
            if isinstance(sub, dict):
                sub.pop("quantization_config", None)
        config["dtype"] = _NAMES[compute]
        config["quantization_config"] = {
            "quant_method": "w4linear",
            "layout_version": LAYOUT_VERSION,
            "source": checkpoint.quant_config,
            "modules": modules,
        }
        _write_json(partial / "config.json", config)
        partial.chmod(0o755)
        if dst.exists():
            old = partial.with_name(partial.name + "-old")
            os.rename(dst, old)
            os.rename(partial, dst)
            shutil.rmtree(old)
        else:
            os.rename(partial, dst)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    kept = len(checkpoint.other_tensors())
    return ConvertReport(
        str(src), str(dst), checkpoint.format.name, len(modules), kept, _NAMES[compute], len(set(where.values())), size
    )


def verify(src: str | Path, dst: str | Path) -> int:
    """Checks that every layer of ``dst`` unpacks to the source's q, z, g_idx exactly; returns how many there are."""
    source, packed = Checkpoint.open(src), Checkpoint.open(dst)
    if source.layers.keys() != packed.layers.keys():
        raise CheckpointError(f"{dst}: layers differ from {src}: {sorted(source.layers.keys() ^ packed.layers.keys())[:5]}")
    for prefix in source.layers:
        a, b = source.read_layer(prefix), packed.read_layer(prefix)
        same = torch.equal(a.q, b.q) and torch.equal(a.z, b.z) and torch.equal(a.group_of_column(), b.group_of_column())
        if not same or not torch.equal(a.s.to(b.s.dtype), b.s):
            raise CheckpointError(f"{dst}: {prefix} does not unpack to the source's layer; convert again")
    return len(source.layers)


def _compute_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype) -> tuple[torch.dtype, bool]:
    """-> (compute dtype, whether the model is declared float32)."""
    by_name = {name: d for d, name in _NAMES.items()}
    text = checkpoint.config.get("text_config") or {}
    declared = next((c[k] for c in (checkpoint.config, text) for k in ("dtype", "torch_dtype") if c.get(k)), "float16")
    wanted = declared if dtype == "auto" else dtype
    result = wanted if isinstance(wanted, torch.dtype) else by_name.get(str(wanted).removeprefix("torch."))
    if result is None or (result == torch.float32 and dtype != "auto"):
        raise CheckpointError(f"dtype={dtype!r} (config: {declared!r}), expected 'auto', 'float16' or 'bfloat16'")
    scales = checkpoint.format.scales
    top = max(float(checkpoint.read_tensor(spec.keys[scales]).abs().max()) for spec in checkpoint.layers.values())
    overflows = top > torch.finfo(torch.float16).max
    if result == torch.float32:
        result = torch.bfloat16 if overflows else torch.float16
        warnings.warn(f"{checkpoint.path.name}: a float32 model, computed in {_NAMES[result]}", stacklevel=3)
    elif result == torch.float16 and overflows:
        raise CheckpointError(f"{checkpoint.path}: a scale of {top} overflows float16; convert with dtype='bfloat16'")
    return result, str(declared).endswith("float32")


def _tensors(
    checkpoint: Checkpoint, compute: torch.dtype, cast: bool, modules: dict[str, Any], progress: bool
) -> Iterator[tuple[str, Tensor]]:
    names: Any = sorted(checkpoint.layers)
    if progress:
        from rich.progress import track

        names = track(names, description="packing")
    for name in checkpoint.other_tensors():
        tensor = checkpoint.read_tensor(name)
        yield name, tensor.to(compute) if cast and tensor.dtype == torch.float32 else tensor
    for prefix in names:
        layer = W4Linear.from_canonical(checkpoint.read_layer(prefix), compute)
        modules[prefix] = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "group_size": layer.group_size,
            "symmetric": layer.symmetric,
        }
        for buffer in BUFFERS:
            if (tensor := getattr(layer, buffer)) is not None:
                yield f"{prefix}.{buffer}", tensor


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> tuple[dict[str, str], int]:
    """-> ({tensor: file}, bytes)."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        shards.append(sorted(pending))
        save_file({k: v.contiguous() for k, v in pending.items()}, folder / f"{len(shards)}.tmp", {"format": "pt"})
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= _SHARD_BYTES:
            flush()
            held = 0
    if pending:
        flush()
    where = {}
    for i, names in enumerate(shards, 1):
        file = f"w4linear-{i:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"{i}.tmp", folder / file)
        where.update(dict.fromkeys(names, file))
    return dict(sorted(where.items())), total


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
