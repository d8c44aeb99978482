"""A checkpoint folder -> the packed layout: shards, index, config.json, tokenizer files; memory bounded by a layer."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w4linear.checkpoint import DTYPES, INDEXES, Checkpoint, CheckpointError, TensorFiles, read_json
from w4linear.linear import BUFFERS, W4Linear
from w4linear.names import matches
from w4linear.packing import LAYOUT_VERSION
from w4linear.quantize import quantize

_SHARD_BYTES = 1 << 30
_COPY_BYTES = 1 << 22
_STORED_AS = {dtype: name for name, dtype in DTYPES.items()}
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
_REPLACED = ("config.json", "quantize_config.json", "quant_config.json", *INDEXES)
# Names of 2-D weights that are no linears.
_NOT_LINEAR = re.compile(r"embed|wte$|wpe$|norm|position|(^|\.)(mlp\.gate|shared_expert_gate|router)$")
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion wrote: ``layers`` packed, ``kept`` other tensors, in ``shards`` of ``bytes_out`` together."""

    src: str
    dst: str
    format: str
    layers: int
    kept: int
    dtype: str
    shards: int
    bytes_out: int

    def __str__(self) -> str:
        return (
            f"{self.dst}: {self.layers} layers packed from {self.format}, {self.kept} tensors kept, {self.dtype}, "
            f"{self.bytes_out / 1e6:.1f} MB in {self.shards} shard{'s' if self.shards != 1 else ''}"
        )


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    overwrite: bool = False,
    progress: bool = False,
) -> ConvertReport:
    """Converts a 4-bit checkpoint folder; writes beside ``dst`` and renames at the end.

    Raises:
        CheckpointError: before anything is written where ``src`` is faulty or ``dst`` exists without ``overwrite``.
    """
    checkpoint = Checkpoint.open(src)
    if checkpoint.format.name == "w4linear":
        raise CheckpointError(f"{src}: already converted; load it as it is")
    _check_destination(Path(src), Path(dst), overwrite)
    checkpoint.check_values()
    compute, cast = _compute_dtype(checkpoint.config, _largest_scale(checkpoint), dtype)
    others = checkpoint.other_tensors()
    content = _Content(
        list(checkpoint.layers),
        lambda prefix: W4Linear.from_canonical(checkpoint.read_layer(prefix), compute),
        others,
        checkpoint.read_tensor,
    )
    modules, shards, size = _write(
        Path(src), Path(dst), content, checkpoint.config, checkpoint.quant_config, compute, cast, progress
    )
    kept = len(others)
    return ConvertReport(str(src), str(dst), checkpoint.format.name, modules, kept, _NAMES[compute], shards, size)


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("lm_head",),
    dtype: str | torch.dtype = "auto",
    overwrite: bool = False,
    progress: bool = False,
) -> ConvertReport:
    """Quantizes the linears of a 16-bit or float32 checkpoint, round to nearest with a searched clip, and packs them.

    Args:
        src, dst, dtype, overwrite, progress: as in `convert`.
        group_size, symmetric: as in `W4Linear`.
        include: patterns of layer names (see `names.matches`); None takes 2-D weights but embeddings, norms, routers.
        exclude: patterns of layers to leave in 16 bit.

    Raises:
        CheckpointError: as `convert`; also for a source that is quantized already or holds no linear.
    """
    folder = Path(src)
    if not folder.is_dir():
        raise CheckpointError(f"{src}: not a folder")
    config = read_json(folder / "config.json")
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise CheckpointError(f"{src}: quantized already ({method}); use convert")
    files = TensorFiles(folder)
    layers = []
    for key in files.file_of:
        name, dot, suffix = key.rpartition(".")
        tensor = files.meta(key)
        if suffix in ("qweight", "weight_packed"):
            raise CheckpointError(f"{src}: {key} is quantized already, but config.json does not say how")
        if not dot or suffix != "weight" or tensor.ndim != 2 or not tensor.is_floating_point():
            continue
        wanted = any(matches(name, p) for p in include) if include else not _NOT_LINEAR.search(name)
        if wanted and not any(matches(name, p) for p in exclude):
            layers.append(name)
    if not layers:
        raise CheckpointError(f"{src}: holds no linear that include and exclude let through")
    _check_destination(folder, Path(dst), overwrite)
    compute, cast = _compute_dtype(config, 0.0, dtype)

    def produce(name: str) -> W4Linear:
        bias = files.read(f"{name}.bias") if f"{name}.bias" in files.file_of else None
        try:
            return W4Linear.from_canonical(quantize(files.read(f"{name}.weight"), group_size, symmetric, bias), compute)
        except ValueError as error:
            raise CheckpointError(f"{folder / files.file_of[f'{name}.weight']}: {name}: {error}") from error

    taken = {f"{name}.{suffix}" for name in layers for suffix in ("weight", "bias")}
    others = sorted(files.file_of.keys() - taken)
    content = _Content(layers, produce, others, files.read)
    modules, shards, size = _write(folder, Path(dst), content, config, None, compute, cast, progress)
    return ConvertReport(str(src), str(dst), "16-bit", modules, len(others), _NAMES[compute], shards, size)


def verify(src: str | Path, dst: str | Path) -> int:
    """Checks that ``dst`` holds what ``src`` does: q, z, g_idx of every layer exactly, scales and bias rounded to the
    compute dtype, and every other tensor, up to its dtype.

    Returns:
        How many layers there are.

    Raises:
        CheckpointError: naming the first layer or tensor that differs.
    """
    source, packed = Checkpoint.open(src), Checkpoint.open(dst)
    if source.layers.keys() != packed.layers.keys():
        raise CheckpointError(
            f"{dst}: layers differ from {src}: {sorted(source.layers.keys() ^ packed.layers.keys())[:5]}"
        )
    for prefix in source.layers:
        a, b = source.read_layer(prefix), packed.read_layer(prefix)
        same = torch.equal(a.q, b.q) and torch.equal(a.z, b.z) and torch.equal(a.group_of_column(), b.group_of_column())
        if not same or not torch.equal(a.s.to(b.s.dtype), b.s):
            raise CheckpointError(f"{dst}: {prefix} does not unpack to the source's layer; convert again")
        if (a.bias is None) != (b.bias is None) or (
            a.bias is not None and b.bias is not None and not torch.equal(a.bias.to(b.bias.dtype), b.bias)
        ):
            raise CheckpointError(f"{dst}: {prefix}.bias is not the source's; convert again")
    others = set(packed.other_tensors())
    for name in source.other_tensors():
        if name not in others:
            raise CheckpointError(f"{dst}: {name} is missing; convert again")
        kept, found = source.read_tensor(name), packed.read_tensor(name)
        if not torch.equal(kept.to(found.dtype), found):
            raise CheckpointError(f"{dst}: {name} is not the source's; convert again")
    return len(source.layers)


@dataclass(frozen=True)
class _Content:
    """What goes into a converted folder: layers that are made one at a time, and tensors that are copied."""

    layers: list[str]
    layer: Callable[[str], W4Linear]
    others: list[str]
    other: Callable[[str], Tensor]


def _check_destination(src: Path, dst: Path, overwrite: bool) -> None:
    here, there = src.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"{dst}: source and destination overlap ({src}); name another folder")
    if dst.is_symlink():
        raise CheckpointError(f"{dst}: is a link, not written through; name the folder itself")
    if dst.exists() and not overwrite:
        raise CheckpointError(f"{dst}: exists; pass overwrite=True (--overwrite) or name another folder")
    if dst.exists() and not (dst.is_dir() and ((dst / "config.json").is_file() or not any(dst.iterdir()))):
        raise CheckpointError(f"{dst}: is no checkpoint folder, not overwritten; name another folder")


def _largest_scale(checkpoint: Checkpoint) -> float:
    scales = checkpoint.format.scales
    return max(float(checkpoint.read_tensor(spec.keys[scales]).abs().max()) for spec in checkpoint.layers.values())


def _compute_dtype(config: Mapping[str, Any], largest: float, dtype: str | torch.dtype) -> tuple[torch.dtype, bool]:
    """-> (compute dtype, whether the model is declared float32)."""
    by_name = {name: d for d, name in _NAMES.items()}
    text = config.get("text_config") or {}
    declared = next((c[k] for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)), "float16")
    wanted = declared if dtype == "auto" else dtype
    result = wanted if isinstance(wanted, torch.dtype) else by_name.get(str(wanted).removeprefix("torch."))
    if result is None or (result == torch.float32 and dtype != "auto"):
        raise CheckpointError(f"dtype={dtype!r} (config: {declared!r}), expected 'auto', 'float16' or 'bfloat16'")
    overflows = largest > torch.finfo(torch.float16).max
    if result == torch.float32:
        result = torch.bfloat16 if overflows else torch.float16
        warnings.warn(f"a float32 model: its packed layers compute in {_NAMES[result]}", stacklevel=3)
    elif result == torch.float16 and overflows:
        raise CheckpointError(f"a scale of {largest} overflows float16; convert with dtype='bfloat16'")
    return result, str(declared).endswith("float32")


def _write(
    src: Path,
    dst: Path,
    content: _Content,
    source_config: Mapping[str, Any],
    source_quantization: Any,
    compute: torch.dtype,
    cast: bool,
    progress: bool,
) -> tuple[int, int, int]:
    """Writes beside ``dst`` and renames at the end -> (layers, shards, bytes)."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{dst.name}.partial-", dir=dst.parent))
    try:
        modules: dict[str, Any] = {}
        where, size = _write_shards(partial, _tensors(content, compute, cast, modules, progress))
        for file in sorted(src.iterdir()):
            skip = file.suffix in _NOT_COPIED or file.name in _REPLACED or file.name.startswith(".")
            skip |= file.name.endswith((".safetensors.index.json", ".bin.index.json"))
            if file.is_file() and not skip:
                shutil.copyfile(file, partial / file.name)
        _write_json(partial / INDEXES[0], {"metadata": {"total_size": size}, "weight_map": where})
        config = {k: v for k, v in source_config.items() if k not in ("torch_dtype", "quantization_config")}
        for key, sub in config.items():
            if isinstance(sub, dict):
                config[key] = {k: v for k, v in sub.items() if k != "quantization_config"}
        config["dtype"] = _NAMES[compute]
        config["quantization_config"] = {
            "quant_method": "w4linear",
            "layout_version": LAYOUT_VERSION,
            "source": source_quantization,
            "modules": modules,
        }
        _write_json(partial / "config.json", config)
        partial.chmod(0o755)
        if dst.exists():
            old = partial.with_name(partial.name + "-old")
            os.rename(dst, old)
            try:
                os.rename(partial, dst)
            except OSError:
                os.rename(old, dst)
                raise
            shutil.rmtree(old)
        else:
            os.rename(partial, dst)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return len(modules), len(set(where.values())), size


def _tensors(
    content: _Content, compute: torch.dtype, cast: bool, modules: dict[str, Any], progress: bool
) -> Iterator[tuple[str, Tensor]]:
    names: Iterable[str] = sorted(content.layers)
    if progress:
        from rich.progress import track

        names = track(list(names), description="packing")
    for name in content.others:
        tensor = content.other(name)
        yield name, tensor.to(compute) if cast and tensor.dtype == torch.float32 else tensor
    for prefix in names:
        layer = content.layer(prefix)
        modules[prefix] = layer.settings()
        for buffer in BUFFERS:
            if (tensor := getattr(layer, buffer)) is not None:
                yield f"{prefix}.{buffer}", tensor


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> tuple[dict[str, str], int]:
    """-> ({tensor: file}, bytes)."""
    shards: list[_Shard] = []
    total = 0
    try:
        for name, tensor in tensors:
            if not shards or shards[-1].size >= _SHARD_BYTES:
                if shards:
                    shards[-1].close()
                shards.append(_Shard(folder / f"{len(shards) + 1}.tmp"))
            shards[-1].add(name, tensor)
            total += tensor.nbytes
        if shards:
            shards[-1].close()
    finally:
        for shard in shards:
            shard.data.close()
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"w4linear-{i:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"{i}.tmp", folder / file)
        (folder / file).chmod(0o644)
        where.update(dict.fromkeys(shard.entries, file))
    return dict(sorted(where.items())), total


class _Shard:
    """A safetensors file that takes tensors one at a time; `close` puts the header and the order that it needs."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.entries: dict[str, tuple[torch.dtype, list[int], int, int]] = {}  # dtype, shape, start and bytes in data
        self.data = path.with_suffix(".data").open("w+b")

    def add(self, name: str, tensor: Tensor) -> None:
        self.data.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.entries[name] = (tensor.dtype, list(tensor.shape), self.size, tensor.nbytes)
        self.size += tensor.nbytes

    def close(self) -> None:
        """Wide dtypes go first, so that every tensor is aligned."""
        order = sorted(self.entries, key=lambda name: (-self.entries[name][0].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            dtype, shape, _, size = self.entries[name]
            header[name] = {"dtype": _STORED_AS[dtype], "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self.path.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                _, _, start, size = self.entries[name]
                self.data.seek(start)
                for chunk in range(0, size, _COPY_BYTES):
                    out.write(self.data.read(min(_COPY_BYTES, size - chunk)))
        self.data.close()
        self.path.with_suffix(".data").unlink()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
