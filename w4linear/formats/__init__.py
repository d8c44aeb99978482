"""Checkpoint formats: one file each, one interface (`Format`), and the registry `FORMATS`."""

from __future__ import annotations

from collections.abc import Collection

from w4linear.formats.awq import Awq
from w4linear.formats.base import CheckpointError, Format, LayerConfig, QuantConfig, Sizes, TensorError
from w4linear.formats.compressed_tensors import CompressedTensors
from w4linear.formats.gptq import Gptq
from w4linear.formats.packed import PackedW4
from w4linear.formats.refused import refused

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (Awq(), Gptq(), CompressedTensors(), PackedW4())}

__all__ = ["FORMATS", "CheckpointError", "Format", "LayerConfig", "QuantConfig", "Sizes", "TensorError", "detect"]


def detect(quant_config: QuantConfig, keys: Collection[str]) -> Format:
    """The one format that config and tensor names fit.

    Raises:
        CheckpointError: saying why each format was refused.
    """
    if why := refused(quant_config, keys):
        raise CheckpointError(why)
    reasons = {name: fmt.matches(quant_config, keys) for name, fmt in FORMATS.items()}
    found = [name for name, reason in reasons.items() if reason is None]
    if len(found) != 1:
        said = "; ".join(f"{name}: {reason or 'fits'}" for name, reason in reasons.items())
        raise CheckpointError(f"expected exactly one checkpoint format to fit, got {found or 'none'} ({said})")
    return FORMATS[found[0]]
