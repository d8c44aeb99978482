"""Faulty checkpoints: each is refused with an error that names file and tensor, before anything is written."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from checkpoints import DOWN_PROJ, FORMATS, Q_PROJ, checkpoint, edit_json, flat, quantization, toy, write, write_json
from safetensors.torch import save_file

from w4linear.checkpoint import Checkpoint, CheckpointError
from w4linear.convert import convert

SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def refused(src, *parts):
    """The message of the CheckpointError that converting ``src`` raises: it holds all ``parts``, nothing is written."""
    dst = src.parent / "out"
    before = {p.name for p in src.parent.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        convert(src, dst)
    assert {p.name for p in src.parent.iterdir()} == before
    message = str(caught.value)
    for part in parts:
        assert str(part) in message, f"{part!r} is not in: {message}"
    return message


@pytest.mark.parametrize("cut", ["1 byte", "half", "4 bytes", "0", "flipped", "header", "LFS pointer"])
def test_truncated_or_corrupt_file(tmp_path, cut):
    src = checkpoint(tmp_path / "src", "gptq")
    file = src / "model.safetensors"
    data = bytearray(file.read_bytes())
    if cut == "flipped":
        data[9] ^= 0x80
    elif cut == "header":
        data[3] ^= 0x7F
    elif cut == "LFS pointer":
        data = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5047240\n"
    else:
        data = data[: {"1 byte": len(data) - 1, "half": len(data) // 2, "4 bytes": 4, "0": 0}[cut]]
    file.write_bytes(data)
    refused(src, file, "truncated or corrupt")


def test_missing_shard(tmp_path):
    src = checkpoint(tmp_path / "src", "awq", shards=3)
    (src / SECOND).unlink()
    refused(src, src / SECOND, "missing shard")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.safetensors", "a/../../secret.safetensors"])
def test_index_names_a_path_outside_the_folder(tmp_path, name):
    src = checkpoint(tmp_path / "src", "awq", shards=3)
    save_file({"x": torch.zeros(1)}, tmp_path / "secret.safetensors")
    edit_json(src / INDEX, lambda index: index["weight_map"].update(x=name))
    refused(src, INDEX, name, "outside the folder")


def test_index_swaps_two_entries(tmp_path):
    src = checkpoint(tmp_path / "src", "awq", shards=3)

    def swap(index):
        where = index["weight_map"]
        a, b = f"{Q_PROJ}.qweight", next(k for k, v in where.items() if v != where[f"{Q_PROJ}.qweight"])
        where[a], where[b] = where[b], where[a]

    edit_json(src / INDEX, swap)
    refused(src, INDEX, "places")


def test_index_names_a_tensor_that_no_shard_has(tmp_path):
    src = checkpoint(tmp_path / "src", "awq", shards=3)
    edit_json(src / INDEX, lambda index: index["weight_map"].update({"model.ghost.weight": SECOND}))
    refused(src, SECOND, "lacks model.ghost.weight", INDEX)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(weight_map=["a"]),
        lambda index: index.update(weight_map={"a": 1}),
        lambda index: index.update(weight_map={"a": ["b"]}),
        lambda index: index.update(weight_map={}),
        lambda index: index.update(weight_map={"a": ""}),
        lambda index: index.pop("weight_map"),
    ],
)
def test_malformed_index(tmp_path, change):
    src = checkpoint(tmp_path / "src", "awq", shards=3)
    edit_json(src / INDEX, change)
    refused(src, INDEX, "weight_map")


def test_duplicate_tensor_in_two_shards(tmp_path):
    src = checkpoint(tmp_path / "src", "awq", shards=3)
    where = json.loads((src / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(where.values())) if name != where["model.norm.weight"])
    held = {k: t for k, t in flat(toy(), "awq").items() if where[k] == other}
    save_file({**held, "model.norm.weight": torch.ones(64)}, src / other)
    refused(src, "model.norm.weight", other)
