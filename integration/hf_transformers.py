"""Hugging Face models with W4Linear layers: `load_model`. The only module that imports transformers.

The model is built on the meta device and every tensor of the file is put into its place by its full name, one layer
at a time. Whatever is left over on either side is an error with its name, so no layer can come up random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from w4linear import packing
from w4linear.checkpoint import Checkpoint, CheckpointError, resolve
from w4linear.linear import BUFFERS, W4Linear
from w4linear.patcher import own_saving


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    **kwargs: Any,
) -> Any:
    """Loads an AWQ, GPTQ, compressed-tensors or converted checkpoint as a transformers model with W4Linear layers.

    Args:
        path_or_id: a folder, or a hub id.
        dtype: of the model: "auto" (the config's), torch.float16, torch.bfloat16 or torch.float32 or their names.
            Layers of a float32 model keep 16-bit scales; they compute exactly on the CPU and in 16 bit on CUDA.
        device_map: None or "cpu"; "cuda", a torch.device or an index; "auto" (the GPU where there is one and the model
            fits, else spread by accelerate); or accelerate's dict of module names.
        **kwargs: ``trust_remote_code``, ``attn_implementation``, or values of the config to override.

    Returns:
        The model, in eval mode. Its ``save_pretrained`` writes a converted checkpoint.

    Raises:
        CheckpointError: for tensors that are missing, left over, or of another shape than the model's, naming them.
        ValueError: for a dtype, device_map or architecture that is not supported.
    """
    import transformers

    folder = resolve(path_or_id)
    remote = kwargs.pop("trust_remote_code", False)
    attention = {"attn_implementation": kwargs.pop("attn_implementation")} if "attn_implementation" in kwargs else {}
    config, unused = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=remote, return_unused_kwargs=True, **kwargs
    )
    if unused:
        raise TypeError(f"load_model got {', '.join(sorted(unused))}: no argument and no value of the config")
    checkpoint = Checkpoint.open(folder)
    compute = _dtype(dtype, config)
    device, spread = _devices(device_map)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if any(prefix.rpartition(".")[2] == "lm_head" for prefix in checkpoint.layers):
        config.tie_word_embeddings = False  # the file's own head is quantized; the embedding is another tensor
    cls = _model_class(config, remote)
    with _parameters_on_meta():
        model = cls._from_config(config, dtype=compute, **attention)
    loaded = _put_layers(model, checkpoint, compute, device)
    _put_tensors(model, checkpoint, compute, device, loaded)
    model.tie_weights()
    missing = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if missing:
        raise CheckpointError(f"{folder}: no tensor for {_some(missing)}; the model would be random there")
    if (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    own_saving(model)
    return _spread(model, spread) if spread is not None else model.to(device)


def _put_layers(model: nn.Module, checkpoint: Any, compute: torch.dtype, device: torch.device) -> set[str]:
    """Replaces the linear of each quantized layer; -> the names of the tensors that were used up."""
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = [name for name in checkpoint.layers if type(modules.get(name)) is not nn.Linear]
    if wrong:
        raise CheckpointError(
            f"quantized layers that are no nn.Linear of {type(model).__name__}: {_some(wrong)}; the checkpoint is "
            "for another class, or this architecture keeps them in a form that is not supported (fused experts, Conv1D)"
        )
    used: set[str] = set()
    for name in checkpoint.layers:
        linear = modules[name]
        if checkpoint.format.name == "w4linear":
            layer = _packed_layer(checkpoint, name, linear, compute).to(device)
        else:
            w = checkpoint.read_layer(name)
            if w.shape != (linear.out_features, linear.in_features):
                want = (linear.out_features, linear.in_features)
                raise CheckpointError(f"{name} is {w.shape} (out, in) in the file, {want} in the model's config")
            w = _on_device(w, device)
            layer = W4Linear.from_canonical(w, _layer_dtype(compute, w.s.dtype))
        if linear.bias is not None and layer.bias is None:
            raise CheckpointError(f"no tensor for {name}.bias; the model would be random there")
        layer.eval()
        for other, module in modules.items():
            if module is linear:  # one module under several names stays one
                parent, _, child = other.rpartition(".")
                setattr(model.get_submodule(parent), child, layer)
        used.update(f"{name}.{buffer}" for buffer in BUFFERS)
    return used


def _packed_layer(checkpoint: Any, name: str, linear: nn.Linear, compute: torch.dtype) -> W4Linear:
    layer: W4Linear = checkpoint.read_packed(name)
    got, want = (layer.out_features, layer.in_features), (linear.out_features, linear.in_features)
    if got != want:
        raise CheckpointError(f"{name} is {got} (out, in) in the file, {want} in the model's config")
    return layer.to(compute) if compute in packing.COMPUTE_DTYPES else layer


def _put_tensors(model: nn.Module, checkpoint: Any, compute: torch.dtype, device: torch.device, used: set[str]) -> None:
    """Fills parameters and persistent buffers by full name."""
    state = model.state_dict(keep_vars=True)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    keep = strict + (tuple(getattr(model, "_keep_in_fp32_modules", None) or ()) if compute == torch.float16 else ())
    names = [n for n in checkpoint.other_tensors() if n not in used]
    unexpected = [n for n in names if n not in state and not any(re.search(p, n) for p in ignored)]
    if unexpected:
        raise CheckpointError(
            f"tensors that {type(model).__name__} has no place for: {_some(unexpected)}; "
            "names must be the model's full names"
        )
    filled: dict[int, tuple[str, Tensor]] = {}
    for name in names:
        if name not in state:
            continue
        target = state[name]
        tensor = checkpoint.read_tensor(name)
        if tensor.shape != target.shape:
            got, want = tuple(tensor.shape), tuple(target.shape)
            raise CheckpointError(f"{name} is {got} in the file, {want} in the model's config")
        if target.is_floating_point():
            fp32 = any(part in name.split(".") for part in keep)
            tensor = tensor.to(torch.float32 if fp32 else target.dtype)
        tensor = tensor.to(device)
        if id(target) in filled:
            first, same = filled[id(target)]
            if not torch.equal(same, tensor):
                raise CheckpointError(
                    f"{first} and {name} are tied in the model, but differ in the file; pass "
                    "tie_word_embeddings=False, or set it in config.json"
                )
            continue
        filled[id(target)] = (name, tensor)
        if isinstance(target, nn.Parameter):
            new = nn.Parameter(tensor, requires_grad=target.requires_grad)
        else:
            new = tensor
        for other, old in state.items():
            if old is target:
                parent, _, leaf = other.rpartition(".")
                setattr(model.get_submodule(parent), leaf, new)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters hold no memory; buffers, such as rotary frequencies, are computed as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _model_class(config: Any, remote: bool) -> Any:
    import transformers

    for name in config.architectures or ():
        auto = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if remote and auto:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(auto, config._name_or_path)
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ValueError(
        f"transformers {transformers.__version__} has no model class for architectures={config.architectures}; "
        "update transformers, or pass trust_remote_code=True where the checkpoint brings its code"
    )


def _dtype(dtype: str | torch.dtype, config: Any) -> torch.dtype:
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={dtype}, expected 'auto', torch.float16, torch.bfloat16 or torch.float32")
    return dtype


def _layer_dtype(compute: torch.dtype, scales: torch.dtype) -> torch.dtype:
    """A float32 model's layers keep the file's own 16-bit scales, exactly."""
    if compute in packing.COMPUTE_DTYPES:
        return compute
    return scales if scales in packing.COMPUTE_DTYPES else torch.float16


def _on_device(w: Any, device: torch.device) -> Any:
    moved = {n: t.to(device) for n in ("q", "s", "z", "g_idx", "bias") if (t := getattr(w, n)) is not None}
    return dataclasses.replace(w, **moved) if device.type != "cpu" else w


def _devices(device_map: Any) -> tuple[torch.device, Any]:
    """-> (where tensors go while loading, accelerate's map where the model is then spread, else None)."""
    cpu = torch.device("cpu")
    if device_map is None:
        return cpu, None
    if isinstance(device_map, dict):
        places = {str(place) for place in device_map.values()}
        if "disk" in places:
            raise ValueError("device_map with 'disk' is not supported: layers are not offloaded; use cpu or cuda")
        if len(places) > 1:
            return cpu, device_map
        device_map = next(iter(device_map.values()))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        if not torch.cuda.is_available():
            return cpu, None
        return (cpu, device_map) if torch.cuda.device_count() > 1 else (torch.device("cuda", 0), None)
    device = torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device_map={device_map!r}: layers run on cpu and cuda only")
    return device, None


def _spread(model: Any, device_map: Any) -> Any:
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if isinstance(device_map, str):
        split = list(getattr(model, "_no_split_modules", None) or ())
        memory = None
        if device_map != "sequential":
            memory = get_balanced_memory(model, no_split_module_classes=split, low_zero=device_map == "balanced_low_0")
        device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=split)
        if "disk" in device_map.values():
            raise ValueError("the model does not fit in GPU and CPU memory; offloading to disk is not supported")
    return dispatch_model(model, device_map)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
