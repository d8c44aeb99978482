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


@pytest.mark.parametrize("place", ["checkpoint_format", "format", "quantize_config.json", "absent"])
@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2"])
def test_gptq_version_wherever_it_is_stated(tmp_path, place, fmt):
    layers = toy()
    tensors, quant = flat(layers, fmt), quantization(fmt, checkpoint_format=None)
    if place == "absent":
        fmt = "gptq"
        tensors = flat(layers, fmt)
    elif place != "quantize_config.json":
        quant[place] = fmt
    src = write(tmp_path / "src", tensors, quant)
    if place == "quantize_config.json":
        write_json(src / place, {"bits": 4, "checkpoint_format": fmt})
    for name, got in open_quietly(src)[1].items():
        assert_same(got, layers[name])


def test_symmetric_v1_with_v2_zeros_is_read_as_8_and_asymmetric_as_9(tmp_path):
    want = layer(16, 64, 64, symmetric=True)
    tensors = flat({Q_PROJ: want}, "gptq_v2")
    src = write(tmp_path / "a", tensors, quantization("gptq", 64, True))
    with pytest.warns(UserWarning, match="gptq_v2"):
        assert_same(Checkpoint.open(src).read_layer(Q_PROJ), want)
    src = write(tmp_path / "b", tensors, quantization("gptq", 64, False))
    got = open_quietly(src)[1][Q_PROJ]
    assert not got.symmetric
    assert bool((got.z == 9).all())


def test_gptqmodel_zeros_carry_over_the_word():
    tensors = tensors_of(layer(8, 64, 64), "gptq")
    tensors["qzeros"].fill_(0x7777776F)
    assert read("gptq", tensors, writer="gptqmodel:7").z[:, 0].tolist() == [0] + [8] * 7
    said = []
    assert read("gptq", tensors, writer=None, note=said.append).z[:, 0].tolist() == [0, 7] + [8] * 6
    assert "meta.quantizer" in said[0]


def test_gptq_without_g_idx(tmp_path):
    want = layer(64, 256, 64)
    tensors = flat({Q_PROJ: want}, "gptq")
    del tensors[f"{Q_PROJ}.g_idx"]
    assert_same(open_quietly(write(tmp_path / "src", tensors, quantization("gptq", 64)))[1][Q_PROJ], want)


def test_symmetric_that_the_zeros_contradict(tmp_path):
    want = layer(64, 256, 64)
    src = write(tmp_path / "src", flat({Q_PROJ: want}, "gptq"), quantization("gptq", 64, True))
    with pytest.warns(UserWarning, match="read as asymmetric"):
        assert_same(Checkpoint.open(src).read_layer(Q_PROJ), want)


def test_gptq_dynamic(tmp_path):
    name = "model.layers.1.self_attn.q_proj"
    layers = {Q_PROJ: layer(64, 256, 64), name: layer(64, 256, 32)}
    rules = {r"+:.*layers\.1\..*": {"group_size": 32}, r"-:.*down_proj": {}}
    tensors = flat(layers, "gptq")
    tensors[f"{DOWN_PROJ}.weight"] = torch.ones(64, 256).half()
    src = write(tmp_path / "src", tensors, quantization("gptq", 64, dynamic=rules))
    found, got = open_quietly(src)
    for key, want in layers.items():
        assert_same(got[key], want)
    assert f"{DOWN_PROJ}.weight" in found.other_tensors()
    assert [found.layers[key].sizes.group for key in (Q_PROJ, name)] == [64, 32]


@pytest.mark.parametrize("rule", [{"-:.*q_proj": {}}, {"-:.*q_proj": {}, "+:.*": {"bits": 8}}])
def test_gptq_dynamic_names_a_packed_layer_dense(tmp_path, rule):
    layers = {Q_PROJ: layer(64, 256, 64)}
    src = checkpoint(tmp_path / "src", "gptq", layers, group=64, dynamic=rule)
    with pytest.warns(UserWarning, match="packed; read by the tensors"):
        assert_same(Checkpoint.open(src).read_layer(Q_PROJ), layers[Q_PROJ])


@pytest.mark.parametrize("skip", [["k_proj"], ["model.layers.1."], [], None])
def test_awq_modules_to_not_convert(tmp_path, skip):
    layers = toy()
    tensors = flat(layers, "awq")
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(16, 64).half()
    quant = quantization("awq") | {"modules_to_not_convert": skip}
    found, got = open_quietly(write(tmp_path / "src", tensors, quant))
    assert got.keys() == layers.keys()
    assert "model.layers.0.self_attn.k_proj.weight" in found.other_tensors()


def test_awq_modules_to_not_convert_names_a_packed_layer(tmp_path):
    src = checkpoint(tmp_path / "src", "awq", modules_to_not_convert=["q_proj"])
    with pytest.warns(UserWarning, match="'q_proj', but the layer is packed"):
        assert_same(Checkpoint.open(src).read_layer(Q_PROJ), toy()[Q_PROJ])


@pytest.mark.parametrize("fmt", ["awq", "gemv"])
def test_awq_without_zero_points(tmp_path, fmt):
    layers = toy(symmetric=True)
    tensors = flat(layers, fmt)
    for folder in ("present", "absent"):
        for name, got in open_quietly(write(tmp_path / folder, tensors, quantization(fmt, 32, True)))[1].items():
            assert_same(got, layers[name])
        for name in layers:
            tensors.pop(f"{name}.qzeros", None)
    src = write(tmp_path / "not declared", tensors, quantization(fmt, 32, False))
    with pytest.raises(CheckpointError, match="qzeros is missing"):
        Checkpoint.open(src)


@pytest.mark.parametrize(
    ("k", "group", "width"), [(128, 64, 16), (128, 32, 32), (4096, 128, 32), (128, 128, 8), (64, -1, 8)]
)
def test_awq_gemv_padding(k, group, width):
    """AutoAWQ pads the groups to whole words, twice that for group 64, four times for group 32."""
    want = layer(24, k, group)
    tensors = tensors_of(want, "gemv")
    pad = width - want.groups
    tensors["scales"] = torch.nn.functional.pad(want.s, (0, pad))
    tensors["qzeros"] = torch.nn.functional.pad(tensors["qzeros"], (0, width // 8 - tensors["qzeros"].shape[1]))
    assert_same(read("gemv", tensors, group), want)


def test_awq_gemv_group_size_must_be_right():
    with pytest.raises(CheckpointError, match="scales"):
        read("gemv", tensors_of(layer(24, 1024, 64), "gemv"), 32)


@pytest.mark.parametrize("version", ["GEMM", "gemm", None])
def test_awq_version_in_any_case(tmp_path, version):
    src = checkpoint(tmp_path / "src", "awq", version=version)
    for name, got in open_quietly(src)[1].items():
        assert_same(got, toy()[name])


@pytest.mark.parametrize(
    ("n", "k", "group"), [(20, 256, 64), (64, 256, 128), (64, 256, -1), (64, 176, 64), (64, 100, 32)]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors(tmp_path, n, k, group, symmetric):
    layers = {Q_PROJ: layer(n, k, group, symmetric=symmetric)}
    src = checkpoint(tmp_path / "src", "ct", layers, group=group, symmetric=symmetric)
    assert_same(open_quietly(src)[1][Q_PROJ], layers[Q_PROJ])


def test_compressed_tensors_zero_points_as_int8():
    want = layer(20, 256, 64)
    tensors = tensors_of(want, "ct")
    tensors["weight_zero_point"] = (want.z.to(torch.int8) - 8).contiguous()
    assert_same(read("ct", tensors), want)
    tensors["weight_zero_point"][0, 0] = 8
    with pytest.raises(CheckpointError, match=r"weight_zero_point has values -8..8"):
        read("ct", tensors)


def test_compressed_tensors_asymmetric_without_zero_points(tmp_path):
    want = layer(64, 256, 64, symmetric=True)
    src = checkpoint(tmp_path / "src", "ct", {Q_PROJ: want}, group=64)
    config = src / "config.json"
    edit_json(config, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(symmetric=False))
    with pytest.warns(UserWarning, match="read as z = 8"):
        got = Checkpoint.open(src).read_layer(Q_PROJ)
    assert torch.equal(got.dequant(), want.dequant())


@pytest.mark.parametrize("target", ["Linear", Q_PROJ, "re:.*self_attn.*"])
def test_compressed_tensors_groups_and_ignore(tmp_path, target):
    layers = {Q_PROJ: layer(64, 256, 64), DOWN_PROJ: layer(64, 256, 32)}
    tensors = flat(layers, "ct")
    tensors["model.layers.0.mlp.gate.weight"] = torch.ones(4, 64).half()
    tensors["model.visual.proj.weight"] = torch.ones(64, 64).half()

    def scheme(targets, group):
        weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
        return {"targets": targets, "weights": weights}

    groups = {"a": scheme([target], 64), "b": scheme([DOWN_PROJ], 32)}
    ignore = ["lm_head", "re:.*visual.*", "model.layers.0.mlp.gate"]
    src = write(tmp_path / "src", tensors, quantization("ct", config_groups=groups, ignore=ignore))
    found, got = open_quietly(src)
    for name, want in layers.items():
        assert_same(got[name], want)
    assert {"model.layers.0.mlp.gate.weight", "model.visual.proj.weight"} <= set(found.other_tensors())


def test_compressed_tensors_ignores_a_packed_layer(tmp_path):
    src = checkpoint(tmp_path / "src", "ct", ignore=["re:.*q_proj"])
    with pytest.warns(UserWarning, match="ignore list"):
        assert_same(Checkpoint.open(src).read_layer(Q_PROJ), toy()[Q_PROJ])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda group: group.update(input_activations={"num_bits": 8}), "input_activations"),
        (lambda group: group["weights"].update(type="float"), "float"),
        (lambda group: group["weights"].update(strategy="block"), "block"),
        (lambda group: group.update(targets=["re:.*visual.*"]), None),
    ],
)
def test_compressed_tensors_schemes(tmp_path, change, says):
    src = checkpoint(tmp_path / "src", "ct")
    edit_json(src / "config.json", lambda c: change(c["quantization_config"]["config_groups"]["group_0"]))
    if says is None:
        with pytest.warns(UserWarning, match="no target"):
            Checkpoint.open(src)
    else:
        with pytest.raises(CheckpointError, match=says):
            Checkpoint.open(src)


@pytest.mark.parametrize("fmt", ["gptq", "ct"])
def test_inspect(tmp_path, fmt):
    order = (torch.arange(256) // 64)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    layers = {Q_PROJ: layer(64, 256, 64, g_idx=order, bias=True), DOWN_PROJ: layer(16, 128, 64)}
    src = checkpoint(tmp_path / "src", fmt, layers, group=64)
    convert(src, tmp_path / "dst")
    for folder, name in ((src, "gptq" if fmt == "gptq" else "compressed-tensors"), (tmp_path / "dst", "w4linear")):
        report = inspect(folder)
        assert (report.format, report.refused) == (name, [])
        assert [(r["name"], r["n"], r["k"], r["group"], r["act_order"]) for r in report.layers] == [
            (DOWN_PROJ, 16, 128, 64, False),
            (Q_PROJ, 64, 256, 64, True),
        ]
        assert report.dense == ["model.embed_tokens.weight", "model.norm.weight"]
        assert report.dense_bytes == 2 * (32 * 64 + 64)
        assert report.bits_per_weight is not None and 4 < report.bits_per_weight < 7
        assert report.packed_bytes >= report.bits_per_weight * (64 * 256 + 16 * 128) / 8


def test_inspect_names_what_would_be_refused(tmp_path):
    tensors = flat(toy(), "gptq")
    del tensors[f"{DOWN_PROJ}.scales"]
    report = inspect(write(tmp_path / "src", tensors, quantization("gptq")))
    assert [r["name"] for r in report.layers] == [Q_PROJ]
    assert report.dense == ["model.embed_tokens.weight", "model.norm.weight"]
    assert f"{DOWN_PROJ}.scales is missing" in report.refused[0]
    assert inspect(tmp_path / "ghost").refused[0].endswith("not a folder")


def test_awq_tensors_under_gptq_and_the_reverse():
    want = layer(128, 128, 64)
    with pytest.raises(CheckpointError, match=r"\(128, 16\), expected GPTQ's"):
        read("gptq", tensors_of(want, "awq"))
    with pytest.raises(CheckpointError, match=r"\(16, 128\), expected AWQ gemm's"):
        read("awq", tensors_of(want, "gptq"))


def test_detection_needs_exactly_one_format():
    for config, name in (
        ({"quant_method": "gptq"}, "gptq"),
        ({"bits": 4, "desc_act": False}, "gptq"),
        ({"bits": 4, "zero_point": True}, "awq"),
        ({"quant_method": "awq", "version": "gemv"}, "awq"),
    ):
        assert detect(config, ["a.qweight"]).name == name
    with pytest.raises(CheckpointError, match="gptq: fits"):
        detect({"sym": True, "zero_point": True}, ["a.qweight"])
    with pytest.raises(CheckpointError, match="no tensor is named"):
        detect({"quant_method": "gptq"}, ["a.weight"])
