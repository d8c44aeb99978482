"""Swaps the linear layers of a model in memory for `W4Linear`, and saves such a model.

`patch_model` works on any nn.Module and knows nothing of transformers; a model that has ``save_pretrained`` gets one
that writes the package's own files, which nothing else mistakes for a plain checkpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from w4linear import packing
from w4linear.backends import cuda
from w4linear.linear import W4Linear
from w4linear.names import matches


@dataclass(frozen=True)
class Swapped:
    """One layer that became a W4Linear.

    Attributes:
        name: full module name; names of the same object, where it is shared, are joined by ", ".
        was: the class it had.
        bytes_before, bytes_after: size of its tensors.
    """

    name: str
    was: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Left:
    """One module with weights that stayed as it was, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class PatchReport:
    """What `patch_model` did; prints as a few lines.

    Attributes:
        swapped: layers that are W4Linear now.
        left: modules with matrices that are not, each with the reason.
    """

    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        before, after = (sum(getattr(s, f"bytes_{when}") for s in self.swapped) for when in ("before", "after"))
        lines = [f"w4linear: {len(self.swapped)} layers swapped, {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB"]
        reasons: dict[str, list[str]] = {}
        for left in self.left:
            reasons.setdefault(f"{left.kind}, {left.reason}", []).append(left.name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(f"  left: {', '.join(names[:4])}{more} ({reason})")
        return "\n".join(lines)


def patch_model(
    model: nn.Module,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("lm_head",),
) -> PatchReport:
    """Replaces linear layers of ``model`` by W4Linear, in place.

    nn.Linear layers are quantized (round to nearest with a searched clip). Device, training mode and sharing stay: one
    layer that is reached by two names becomes one W4Linear. Left alone, with the reason in the report: layers that
    share their weight with another module (a tied head), subclasses of nn.Linear, Conv1D, layers with hooks, and layers
    that another library quantized (their checkpoint loads through `load_model`).

    Every check runs before the first layer is swapped.

    Args:
        model: any module that holds linear layers.
        group_size: consecutive in features that share one scale, for the nn.Linear layers.
        symmetric: every zero point is 8, for the nn.Linear layers.
        include: only layers that one of these patterns means (see `names.matches`); None is all.
        exclude: patterns of layers to leave.

    Returns:
        What was swapped, and what was left and why.

    Raises:
        UnsupportedLayerError: for a group size that cannot be packed, naming the layer.
        ValueError: for a layer on the meta device or with NaN or inf, an ``include`` pattern that means no layer, a
            GPU that the kernels do not support, or a model that is itself a linear layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 16))
        >>> report = patch_model(model, group_size=64, exclude=["2"])
        >>> type(model[0]).__name__, report.left[0].name, report.left[0].reason
        ('W4Linear', '2', "excluded by '2'")
    """
    for option, given in (("include", include), ("exclude", exclude)):
        if isinstance(given, str):
            raise ValueError(f"{option}={given!r} is one string, expected a list of names or patterns: [{given!r}]")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    owners: dict[int, list[nn.Module]] = {}
    for module in names:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    _require_patterns_used(include, names.values())
    plan: list[nn.Linear] = []
    left: list[Left] = []
    for module, called in names.items():
        if not _holds_matrix(module) or isinstance(module, W4Linear):
            continue
        reason = _why_left(module, called, owners, names, include, exclude)
        if reason is not None:
            left.append(Left(called[0], type(module).__name__, reason))
            continue
        assert isinstance(module, nn.Linear)  # what _why_left lets through
        if "" in called:
            raise ValueError(
                "model is itself an nn.Linear and cannot be replaced in place; use W4Linear.from_linear(model)"
            )
        _check_linear(module, called[0], group_size)
        plan.append(module)
    swapped = []
    for linear in plan:
        layer = W4Linear.from_linear(linear, group_size, symmetric).train(linear.training)
        called = names[linear]
        swapped.append(Swapped(", ".join(called), type(linear).__name__, _bytes(linear), _bytes(layer)))
        for name in called:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    if swapped:
        own_saving(model)
    return PatchReport(tuple(swapped), tuple(left))


def own_saving(model: nn.Module) -> None:
    """Gives a model that has ``save_pretrained`` one that calls `save_model`, and says in its config what it holds."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _SavePretrained(model)  # type: ignore[assignment]
        model.config.quantization_config = quantization_config(model)  # type: ignore[union-attr]


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """The ``quantization_config`` of a config.json for this model's W4Linear layers."""
    modules = {name: layer.settings() for name, layer in model.named_modules() if isinstance(layer, W4Linear)}
    return {"quant_method": "w4linear", "layout_version": packing.LAYOUT_VERSION, "source": {}, "modules": modules}


def save_model(
    model: nn.Module, dst: str | Path, *, overwrite: bool = False, max_shard_bytes: int = 4_000_000_000
) -> Path:
    """Writes a patched Hugging Face model as a converted checkpoint, which `load_model` reads.

    The folder is made beside ``dst`` and renamed at the end. Its file names are not those that plain transformers looks
    for, so that opening it without this package fails and never gives random layers.

    Args:
        model: a transformers model with W4Linear layers.
        dst: the folder to make.
        overwrite: whether an existing folder is replaced.
        max_shard_bytes: where a new shard begins.

    Raises:
        FileExistsError: where ``dst`` holds files and ``overwrite`` is False.
        ValueError: for a tensor on the meta device, naming it.
    """
    dst = Path(dst)
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())) and not overwrite:
        raise FileExistsError(f"{dst} exists and is not empty; pass overwrite=True to replace it")
    shards: list[dict[str, Tensor]] = [{}]
    size, written = 0, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device (offloaded): load the model whole, then save it")
        if id(tensor) in written:  # tied; the first name carries it
            continue
        written.add(id(tensor))
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        size += tensor.nbytes
        shards[-1][name] = tensor.detach()
    config: Any = model.config
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    try:
        work.chmod(0o755)
        weight_map = {}
        for i, shard in enumerate(shards, 1):
            file = f"w4linear-{i:05d}-of-{len(shards):05d}.safetensors"
            save_file({name: t.cpu().contiguous() for name, t in shard.items()}, work / file, {"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        total = sum(t.nbytes for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (work / "w4linear.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        settings = {**config.to_dict(), "architectures": [type(model).__name__]}
        settings["quantization_config"] = quantization_config(model)
        # The parameters' own type: a model that was cast after it was built still has the old one in its config.
        kept = next((t.dtype for t in model.parameters() if t.is_floating_point()), None)
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(kept or torch.float16).removeprefix("torch.")
        (work / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n")
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(work)  # type: ignore[union-attr, operator]
        if dst.exists():
            shutil.rmtree(dst)
        work.rename(dst)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return dst


class _SavePretrained:
    """``save_pretrained`` of a model with W4Linear layers. An object, so that the model still pickles."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str | Path, **options: Any) -> None:
        if options.get("state_dict") is not None:
            raise ValueError(
                "save_pretrained(state_dict=...) is not supported for W4Linear layers; load it into the model first"
            )
        # As transformers does, other files of an existing folder (a tokenizer, say) stay.
        dst = Path(save_directory).resolve()
        dst.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".w4linear-", dir=dst) as work:
            made = save_model(self.model, Path(work) / "packed")
            for old in (*dst.glob("*.safetensors"), *dst.glob("*.safetensors.index.json")):
                old.unlink()
            for file in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
                file.replace(dst / file.name)


def _why_left(
    module: nn.Module,
    called: list[str],
    owners: dict[int, list[nn.Module]],
    names: dict[nn.Module, list[str]],
    include: Sequence[str] | None,
    exclude: Sequence[str],
) -> str | None:
    """Why a module with a matrix stays, or None for an nn.Linear to swap."""
    held = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if {"qweight", "scales"} <= held or {"weight_packed", "weight_scale"} <= held:
        return "quantized by another library; load its checkpoint with load_model"
    if type(module).__name__ == "Conv1D":
        return "keeps its weight as (in, out); not supported"
    if type(module) is not nn.Linear:
        return "a subclass of nn.Linear" if isinstance(module, nn.Linear) else "not a linear layer"
    for pattern in exclude:
        if any(matches(name, pattern) for name in called):
            return f"excluded by {pattern!r}"
    if include is not None and not any(matches(name, pattern) for name in called for pattern in include):
        return "not in include"
    for name, parameter in module.named_parameters(recurse=False):
        others = [names[owner][0] for owner in owners[id(parameter)] if owner is not module]
        if others:
            return f"{name} is tied to {others[0]}"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks) or "forward" in vars(module):
        return "has hooks or a replaced forward"
    return None


def _check_linear(linear: nn.Linear, name: str, group_size: int) -> None:
    weight = linear.weight
    if weight.is_meta:
        raise ValueError(
            f"{name}.weight is on the meta device and holds nothing to quantize; load it first, or use load_model"
        )
    if group_size < 1:
        raise ValueError(f"{name}: group_size={group_size}, expected a positive size")
    try:
        packing.kernel_group(min(group_size, linear.in_features), linear.in_features)
    except packing.UnsupportedLayerError as error:
        raise packing.UnsupportedLayerError(f"{name}: {error}") from None
    if weight.numel() == 0 or weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"{name}.weight is {tuple(weight.shape)} {weight.dtype}, expected 16-bit or wider floats; exclude it"
        )
    for part in (weight, linear.bias):
        if part is not None and not bool(torch.isfinite(part).all()):
            which = "weight" if part is weight else "bias"
            raise ValueError(f"{name}.{which} holds NaN or inf; repair the model before it is quantized")
    if weight.device.type == "cuda" and (why := cuda.unsupported_device(weight.device)):
        raise ValueError(f"{name} is on {weight.device}: {why}")


def _require_patterns_used(include: Sequence[str] | None, called: Iterable[list[str]]) -> None:
    every = [name for names in called for name in names]
    for pattern in include or ():
        if not any(matches(name, pattern) for name in every):
            raise ValueError(f"include pattern {pattern!r} means no module of the model; names look like {every[-1]!r}")


def _holds_matrix(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(t.ndim >= 2 for t in tensors if isinstance(t, nn.Parameter) or t.dtype == torch.int32)


def _bytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
