"""convert: what it writes reads back exactly, whatever the source's format, shape, dtype and layout on disk."""

from __future__ import annotations

import filecmp
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import DOWN_PROJ, FORMATS, Q_PROJ, checkpoint, edit_json, flat, layer, quantization, toy, write
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from w4linear import convert as convert_module
from w4linear.checkpoint import Checkpoint, CheckpointError
from w4linear.convert import convert, verify

SHARED = Path(os.environ.get("W4LINEAR_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "checkpoints"


def assert_holds(dst, layers, dtype=torch.float16):
    """The converted folder ``dst`` holds exactly ``layers``, scales and bias rounded to ``dtype`` once."""
    packed = Checkpoint.open(dst)
    assert packed.format.name == "w4linear"
    assert packed.layers.keys() == layers.keys()
    for name, want in layers.items():
        got = packed.read_layer(name)
        assert torch.equal(got.q, want.q), name
        assert torch.equal(got.z, want.z), name
        assert torch.equal(got.s, want.s.to(dtype)), name
        assert got.group == want.group, name
        assert torch.equal(got.group_of_column(), want.group_of_column()), name
        assert (got.bias is None) == (want.bias is None), name
        if want.bias is not None:
            assert torch.equal(got.bias, want.bias.to(dtype)), name


def files(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_format_round_trips(tmp_path, fmt, symmetric, shards):
    layers = toy(symmetric=symmetric)
    src = checkpoint(tmp_path / "src", fmt, layers, symmetric=symmetric, shards=shards)
    report = convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)
    assert verify(src, tmp_path / "dst") == report.layers == 2
    assert report.kept == 2
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "w4linear"
    assert config["dtype"] == "float16"
    tensors = {k: t for file in (tmp_path / "dst").glob("*.safetensors") for k, t in load_file(file).items()}
    assert torch.equal(tensors["model.embed_tokens.weight"], flat(layers, fmt)["model.embed_tokens.weight"])
    assert any(key.endswith(".V") for key in tensors) != symmetric
