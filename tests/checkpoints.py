"""Writes tiny checkpoints in the public layouts, named like a Llama: some packed layers, an embedding, a norm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from w4linear import CanonicalW4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FORMATS = ("awq", "gemv", "gptq", "gptq_v2", "ct")
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.0.mlp.down_proj"


def words(x, dim, order=range(8)):
    """Codes -> int32 words of eight along ``dim``; nibble p of a word is element order[p]; padded with zeros."""
    x = x.movedim(dim, -1).long()
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    packed = sum(x[..., c] << (4 * p) for p, c in enumerate(order))
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32).movedim(-1, dim).contiguous()


def layer(n, k, group, *, symmetric=False, g_idx=None, groups=None, bias=False, dtype=torch.float16, seed=0):
    """A random layer; ``group`` -1 is one group, ``groups`` counts them where ``g_idx`` needs more."""
    gen = torch.Generator().manual_seed(seed)
    group = k if group == -1 else group
    groups = groups or -(-k // group)
    return CanonicalW4(
        q=torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=gen),
        s=(torch.rand(n, groups, generator=gen) * 0.02 + 0.005).to(dtype),
        z=None if symmetric else torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=gen),
        group=group,
        g_idx=None if g_idx is None else g_idx.int(),
        bias=torch.randn(n, generator=gen).half() if bias else None,
        symmetric=symmetric,
    )


def toy(group=32, **options):
    """{name: layer} of a model with two packed layers, one of them with a bias."""
    return {Q_PROJ: layer(48, 64, group, bias=True, **options), DOWN_PROJ: layer(64, 128, group, seed=1, **options)}


def tensors_of(w, fmt):
    """{suffix: tensor} of one layer in format ``fmt``, g_idx only where the layer has one."""
    n, k = w.shape
    if fmt == "awq":
        found = {"qweight": words(w.q.T, 1, AWQ_ORDER), "qzeros": words(w.z.T, 1, AWQ_ORDER), "scales": w.s.T}
    elif fmt == "gemv":
        pad = (0, -w.groups % 8)
        scales = torch.nn.functional.pad(w.s, pad)
        found = {"qweight": words(w.q, 1), "qzeros": words(w.z, 1), "scales": scales}
    elif fmt in ("gptq", "gptq_v2"):
        stored = (w.z.long() - int(fmt == "gptq")) & 15
        found = {"qweight": words(w.q.T, 0), "qzeros": words(stored.T, 1), "scales": w.s.T}
        found["g_idx"] = w.group_of_column().int()
    else:
        found = {"weight_packed": words(w.q, 1), "weight_scale": w.s, "weight_shape": torch.tensor([n, k])}
        if not w.symmetric:
            found["weight_zero_point"] = words(w.z, 0)
        if w.g_idx is not None:
            found["weight_g_idx"] = w.g_idx
    if w.bias is not None:
        found["bias"] = w.bias
    return {suffix: tensor.contiguous() for suffix, tensor in found.items()}


def quantization(fmt, group=32, symmetric=False, **changes) -> dict[str, Any]:
    """The quantization_config of format ``fmt``; ``changes`` replace its fields, None removes one."""
    if fmt in ("awq", "gemv"):
        config = {"quant_method": "awq", "version": "gemm" if fmt == "awq" else "gemv", "bits": 4, "group_size": group}
        config["zero_point"] = not symmetric
    elif fmt in ("gptq", "gptq_v2"):
        config = {"quant_method": "gptq", "checkpoint_format": fmt, "bits": 4, "group_size": group, "sym": symmetric}
        config["meta"] = {"quantizer": ["auto_gptq:0.7"]}
    else:
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        if group == -1:
            weights |= {"strategy": "channel", "group_size": None}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {key: value for key, value in (config | changes).items() if value is not None}


def flat(layers, fmt):
    """{key: tensor} of a whole model: the packed layers, an embedding and a norm."""
    found = {f"{name}.{suffix}": t for name, w in layers.items() for suffix, t in tensors_of(w, fmt).items()}
    gen = torch.Generator().manual_seed(5)
    found["model.embed_tokens.weight"] = torch.randn(32, 64, generator=gen).half()
    found["model.norm.weight"] = torch.ones(64, dtype=torch.float16)
    return found


def write(folder, tensors, quant, *, dtype="float16", shards=1) -> Path:
    """Writes ``tensors`` and a config.json; more than one shard also writes the index."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype}
    if quant is not None:
        config["quantization_config"] = quant
    write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text('{"tokens": []}\n')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {key: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, key in enumerate(sorted(tensors))}
    for name in set(where.values()):
        save_file({k: t for k, t in tensors.items() if where[k] == name}, folder / name, {"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return folder


def checkpoint(folder, fmt, layers=None, *, group=32, symmetric=False, dtype="float16", shards=1, **changes) -> Path:
    """A whole checkpoint of ``layers`` (default `toy`) in ``fmt``; ``changes`` go to its quantization_config."""
    layers = toy(group, symmetric=symmetric) if layers is None else layers
    quant = quantization(fmt, group, symmetric, **changes)
    return write(folder, flat(layers, fmt), quant, dtype=dtype, shards=shards)


def edit_json(path, change):
    """Rewrites a JSON file by ``change(value)``."""
    value = json.loads(Path(path).read_text())
    change(value)
    write_json(path, value)


def write_json(path, value):
    Path(path).write_text(json.dumps(value, indent=2))
