"""Formats that are recognised and refused by name, with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from w4linear.formats.base import QuantConfig, setting

_INSTEAD = (
    "use an AWQ (gemm or gemv), GPTQ or compressed-tensors pack-quantized checkpoint with 4 bits, or the 16-bit one"
)
_METHODS = {
    "awq": None,
    "gptq": None,
    "compressed-tensors": None,
    "w4linear": None,
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes (nf4, fp4 or int8)",
    "marlin": "marlin-packed GPTQ",
}
_KEYS = (
    (r"\.(q_weight|q_invperm|q_scale_max)$", "exl2"),
    (r"\.trellis$", "exl3"),
    (r"\.quant_state\.bitsandbytes__|\.SCB$", "bitsandbytes (nf4, fp4 or int8)"),
    (r"\.W_q$", "hqq"),
    (r"\.weight_scale_inv$", "fp8"),
    (r"\.B$", "marlin-packed GPTQ"),
    (r"(experts\.\w+|gate_up_proj)_(packed|qweight|scales?|qzeros|blocks)$", "fused, packed experts"),
    (r"(embed_tokens|wte|wpe|word_embeddings|embed_in)\.(qweight|weight_packed)$", "a quantized embedding"),
)


def refused(quant_config: QuantConfig, keys: Iterable[str]) -> str | None:
    """The name of a recognised format that is not supported, with the way out; None for any other checkpoint."""
    name = _by_config(quant_config)
    if name is None and quant_config.get("quant_method") != "w4linear":
        for key in keys:
            for pattern, what in _KEYS:
                if re.search(pattern, key):
                    return f"{what} (tensor {key}) is not supported; {_INSTEAD}"
    return None if name is None else f"{name} is not supported; {_INSTEAD}"


def _by_config(config: QuantConfig) -> str | None:
    method = setting(config, "quant_method", str)
    if method is not None and method not in _METHODS:
        return str(method)
    if method is not None and _METHODS[method]:
        return _METHODS[method]
    bits: Any = config.get("bits")
    if bits not in (None, 4):
        return f"{bits}-bit {method or 'quantization'}"
    dialect = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "").lower()
    if config.get("is_marlin_format") or dialect == "marlin":
        return "marlin-packed GPTQ"
    if method == "awq" and dialect not in ("", "gemm", "gemv"):
        return f"AWQ {dialect}"
    if (setting(config, "transform_config", dict) or {}).get("config_groups"):
        return "compressed-tensors with transforms (transform_config)"
    if (setting(config, "sparsity_config", dict) or {}).get("format") not in (None, "dense"):
        return "compressed-tensors with sparse weights (sparsity_config)"
    if method == "compressed-tensors" and config.get("format") not in (None, "pack-quantized"):
        return f"compressed-tensors {config['format']}"
    return None
