"""What a checkpoint folder holds, and what would be refused and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from w4linear.checkpoint import Checkpoint, CheckpointError


@dataclass(frozen=True)
class InspectReport:
    """`layers` are dicts of name, n, k, group, symmetric, act_order, bits_per_weight; `refused` says what and why."""

    path: str
    format: str | None
    layers: list[dict[str, Any]] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def inspect(path: str | Path) -> InspectReport:
    """Reads headers and small tensors only; faults are reported in `refused`, not raised."""
    try:
        checkpoint = Checkpoint.open(path, strict=False)
    except CheckpointError as error:
        return InspectReport(str(path), None, refused=[str(error)])
    layers = []
    for name, spec in checkpoint.layers.items():
        size, index = spec.sizes, checkpoint.format.index
        act_order = "perm" in spec.keys
        if index in spec.keys:
            g_idx = checkpoint.read_tensor(spec.keys[index])
            act_order = bool((g_idx != g_idx.new_tensor(range(size.k)) // size.group).any())
        stored = sum(checkpoint.files.meta(key).nbytes for suffix, key in spec.keys.items() if suffix != "bias")
        layers.append(
            {
                "name": name,
                "n": size.n,
                "k": size.k,
                "group": size.group,
                "symmetric": spec.config.symmetric,
                "act_order": act_order,
                "bits_per_weight": round(8 * stored / (size.n * size.k), 3),
            }
        )
    return InspectReport(str(path), checkpoint.format.name, layers, checkpoint.other_tensors(), checkpoint.problems)
