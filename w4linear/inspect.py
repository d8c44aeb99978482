"""What a checkpoint folder holds, and what would be refused and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from w4linear.checkpoint import Checkpoint, CheckpointError, LayerSpec


@dataclass(frozen=True)
class InspectReport:
    """`layers` are dicts of name, n, k, group, symmetric, act_order, bits_per_weight; `refused` says what and why.

    `packed_bytes` are those of the packed layers, `dense_bytes` of all other tensors; `bits_per_weight` is over all
    packed layers, with scales and zero points, without biases (None where there is no layer).
    """

    path: str
    format: str | None
    layers: list[dict[str, Any]] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    packed_bytes: int = 0
    dense_bytes: int = 0
    bits_per_weight: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect(path: str | Path) -> InspectReport:
    """Reads headers and small tensors only; faults are reported in `refused`, not raised."""
    try:
        checkpoint = Checkpoint.open(path, strict=False)
    except CheckpointError as error:
        return InspectReport(str(path), None, refused=[str(error)])
    layers = [_layer(checkpoint, name, spec) for name, spec in checkpoint.layers.items()]
    found = checkpoint.format.layers(checkpoint.files.file_of).values()  # those refused are not dense either
    dense = sorted(checkpoint.files.file_of.keys() - {key for keys in found for key in keys.values()})
    weights = sum(layer["n"] * layer["k"] for layer in layers)
    stored = sum(_stored(checkpoint, spec) for spec in checkpoint.layers.values())
    return InspectReport(
        str(path),
        checkpoint.format.name,
        layers,
        dense,
        checkpoint.problems,
        sum(checkpoint.files.meta(key).nbytes for spec in checkpoint.layers.values() for key in spec.keys.values()),
        sum(checkpoint.files.meta(key).nbytes for key in dense),
        round(8 * stored / weights, 3) if weights else None,
    )


def _layer(checkpoint: Checkpoint, name: str, spec: LayerSpec) -> dict[str, Any]:
    size, index = spec.sizes, checkpoint.format.index
    act_order = bool({"perm", "group_map"} & spec.keys.keys())
    if index in spec.keys:
        g_idx = checkpoint.read_tensor(spec.keys[index])
        act_order = bool((g_idx != torch.arange(size.k) // size.group).any())
    return {
        "name": name,
        "n": size.n,
        "k": size.k,
        "group": size.group,
        "symmetric": spec.config.symmetric,
        "act_order": act_order,
        "bits_per_weight": round(8 * _stored(checkpoint, spec) / (size.n * size.k), 3),
    }


def _stored(checkpoint: Checkpoint, spec: LayerSpec) -> int:
    """Bytes of the layer's tensors but its bias."""
    return sum(checkpoint.files.meta(key).nbytes for suffix, key in spec.keys.items() if suffix != "bias")
