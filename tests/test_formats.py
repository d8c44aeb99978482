"""Readers of the checkpoint formats against the formula (q - z) * s."""

from __future__ import annotations

import warnings

import pytest
import torch
from checkpoints import (
    DOWN_PROJ,
    FORMATS,
    Q_PROJ,
    checkpoint,
    edit_json,
    flat,
    layer,
    quantization,
    tensors_of,
    toy,
    write,
    write_json,
)

from w4linear.checkpoint import Checkpoint, CheckpointError
from w4linear.convert import convert
from w4linear.formats import FORMATS as READERS
from w4linear.formats import LayerConfig, detect
from w4linear.inspect import inspect


def read(fmt, tensors, group=64, symmetric=False, writer="auto_gptq", note=lambda message: None):
    name, variant = {
        "awq": ("awq", "gemm"),
        "gemv": ("awq", "gemv"),
        "gptq": ("gptq", "v1"),
        "gptq_v2": ("gptq", "v2"),
        "ct": ("compressed-tensors", ""),
    }[fmt]
    return READERS[name].read(tensors, LayerConfig("l", group, symmetric, variant, writer), note)


def open_quietly(folder):
    """Opens a folder whose reading must warn of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Checkpoint.open(folder)
        return found, {name: found.read_layer(name) for name in found.layers}


def assert_same(got, want):
    assert torch.equal(got.q, want.q)
    assert torch.equal(got.z, want.z)
    assert torch.equal(got.s, want.s)
    assert torch.equal(got.group_of_column(), want.group_of_column())
    assert got.symmetric == want.symmetric
    index = want.group_of_column()
    assert torch.equal(got.dequant(), (want.q.float() - want.z.float()[:, index]) * want.s.float()[:, index])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(64, 256, 64), (60, 176, 64), (8, 128, -1), (72, 576, 128), (1, 128, 32), (3, 8, 16), (16, 2048, 256)],
)
def test_every_format_reads_exactly(fmt, n, k, group):
    want = layer(n, k, group)
    assert_same(read(fmt, tensors_of(want, fmt), group), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_words_with_the_sign_bit_set(fmt):
    want = layer(64, 256, 64)
    want.q[:, 7::8], want.q[:, 0::8] = 15, 0
    want.q[7::8], want.q[0::8] = 15, 0
    want.z[7::8], want.z[0::8] = 15, 0
    assert_same(read(fmt, tensors_of(want, fmt)), want)
    want.q.fill_(15)
    assert_same(read(fmt, tensors_of(want, fmt)), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_sixteen_zero_points(fmt, tmp_path):
    want = layer(64, 256, 64)
    want.z[:] = (torch.arange(256) % 16).view(64, 4)
    src = checkpoint(tmp_path / "src", fmt, {Q_PROJ: want}, group=64)
    assert_same(open_quietly(src)[1][Q_PROJ], want)
    convert(src, tmp_path / "dst")
    assert torch.equal(Checkpoint.open(tmp_path / "dst").read_layer(Q_PROJ).z, want.z)
