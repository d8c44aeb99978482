"""convert: what it writes reads back exactly, whatever the source's format, shape, dtype and layout on disk."""

from __future__ import annotations

import filecmp
import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import DOWN_PROJ, FORMATS, Q_PROJ, checkpoint, flat, layer, quantization, tensors_of, toy, write
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from w4linear.checkpoint import Checkpoint, CheckpointError
from w4linear.convert import convert, verify

convert_module = importlib.import_module("w4linear.convert")
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


UNEQUAL = torch.repeat_interleave(torch.arange(4), torch.tensor([50, 78, 64, 64]))[
    torch.randperm(256, generator=torch.Generator().manual_seed(3))
]
PERMUTED = (torch.arange(256) // 64)[torch.randperm(256, generator=torch.Generator().manual_seed(3))]
REORDERED = torch.tensor([2, 0, 3, 1]).repeat_interleave(64)


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2", "ct"])
@pytest.mark.parametrize("g_idx", [UNEQUAL, PERMUTED, REORDERED], ids=["unequal", "permuted", "reordered"])
def test_act_order(tmp_path, fmt, g_idx):
    layers = {Q_PROJ: layer(64, 256, 64, g_idx=g_idx)}
    src = checkpoint(tmp_path / "src", fmt, layers, group=64)
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        (64, 576, 128),
        (64, 176, 64),
        (64, 256, -1),
        (60, 128, 32),
        (1, 128, 32),
        (200, 64, 16),
        (8, 512, 256),
        (24, 72, 64),
    ],
)
def test_shapes(tmp_path, fmt, n, k, group):
    layers = {Q_PROJ: layer(n, k, group, bias=True)}
    src = checkpoint(tmp_path / "src", fmt, layers, group=group)
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


@pytest.mark.parametrize("fmt", ["gptq", "ct"])
def test_act_order_with_a_partial_last_group(tmp_path, fmt):
    order = torch.randperm(576, generator=torch.Generator().manual_seed(1))
    layers = {Q_PROJ: layer(32, 576, 128, g_idx=(torch.arange(576) // 128)[order], symmetric=True)}
    src = checkpoint(tmp_path / "src", fmt, layers, group=128, symmetric=True)
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", ["float16", "bfloat16", "float32"])
def test_dtypes_of_scales_and_model(tmp_path, fmt, scales, model):
    layers = {Q_PROJ: layer(32, 64, 32, dtype=scales, bias=True)}
    src = checkpoint(tmp_path / "src", fmt, layers, dtype=model)
    compute = torch.bfloat16 if model == "bfloat16" else torch.float16
    if model == "float32":
        with pytest.warns(UserWarning, match="float32 model"):
            report = convert(src, tmp_path / "dst")
    else:
        report = convert(src, tmp_path / "dst")
    assert report.dtype == str(compute).removeprefix("torch.")
    assert_holds(tmp_path / "dst", layers, compute)
    assert verify(src, tmp_path / "dst") == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", torch.bfloat16])
def test_dtype_that_the_caller_asks_for(tmp_path, dtype):
    layers = toy()
    convert(checkpoint(tmp_path / "src", "awq", layers), tmp_path / "dst", dtype=dtype)
    assert_holds(tmp_path / "dst", layers, torch.float16 if dtype == "float16" else torch.bfloat16)


def test_scale_beyond_float16(tmp_path):
    layers = {Q_PROJ: layer(32, 64, 32, dtype=torch.float32)}
    layers[Q_PROJ].s[0, 0] = 1e5
    src = checkpoint(tmp_path / "src", "gptq", layers)
    with pytest.raises(CheckpointError, match=r"100000.*bfloat16"):
        convert(src, tmp_path / "dst")
    assert files(tmp_path) == ["src"]
    convert(src, tmp_path / "dst", dtype="bfloat16")
    assert_holds(tmp_path / "dst", layers, torch.bfloat16)


def test_zero_scale_gives_zero_weights(tmp_path):
    layers = {Q_PROJ: layer(32, 64, 32)}
    layers[Q_PROJ].s[3] = 0
    convert(checkpoint(tmp_path / "src", "awq", layers), tmp_path / "dst")
    assert bool((Checkpoint.open(tmp_path / "dst").read_layer(Q_PROJ).dequant()[3] == 0).all())


def test_converted_twice_is_byte_identical(tmp_path):
    src = checkpoint(tmp_path / "src", "gptq", {Q_PROJ: layer(64, 256, 64, g_idx=UNEQUAL)}, group=64)
    for dst in ("a", "b"):
        convert(src, tmp_path / dst)
    same, different, missing = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", files(tmp_path / "a"), shallow=False)
    assert (different, missing) == ([], [])
    assert same == files(tmp_path / "b")


def test_overwrite_replaces_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 1000)
    convert(checkpoint(tmp_path / "a", "awq"), tmp_path / "dst")
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 1
    (tmp_path / "dst" / "old.txt").write_text("old")
    monkeypatch.undo()
    layers = {DOWN_PROJ: layer(24, 64, 32, seed=9)}
    src = checkpoint(tmp_path / "b", "gptq", layers)
    with pytest.raises(CheckpointError, match="overwrite"):
        convert(src, tmp_path / "dst")
    convert(src, tmp_path / "dst", overwrite=True)
    assert_holds(tmp_path / "dst", layers)
    wanted = ["config.json", "tokenizer.json", "w4linear-00001-of-00001.safetensors", "w4linear.safetensors.index.json"]
    assert files(tmp_path / "dst") == wanted
    assert files(tmp_path) == ["a", "b", "dst"]


def test_small_shards_are_indexed(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 1000)
    layers = toy()
    report = convert(checkpoint(tmp_path / "src", "ct", layers), tmp_path / "dst")
    index = json.loads((tmp_path / "dst" / "w4linear.safetensors.index.json").read_text())
    shards = sorted(p.name for p in (tmp_path / "dst").glob("*.safetensors"))
    assert report.shards == len(shards) > 1
    assert sorted(set(index["weight_map"].values())) == shards
    stored = {k: t for shard in shards for k, t in load_file(tmp_path / "dst" / shard).items()}
    assert index["metadata"]["total_size"] == report.bytes_out == sum(t.nbytes for t in stored.values())
    assert stored.keys() == index["weight_map"].keys()
    assert_holds(tmp_path / "dst", layers)


def test_hub_cache_of_links_to_blobs(tmp_path):
    layers = toy()
    plain = checkpoint(tmp_path / "plain", "gptq", layers, shards=3)
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "rev").mkdir(parents=True)
    for i, file in enumerate(sorted(plain.iterdir())):
        file.rename(repo / "blobs" / f"{i:040x}")
        (repo / "snapshots" / "rev" / file.name).symlink_to(f"../../blobs/{i:040x}")
    (tmp_path / "model").symlink_to(repo / "snapshots" / "rev")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (repo / "blobs").iterdir()}
    convert(tmp_path / "model", tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (repo / "blobs").iterdir()} == before
    assert all(p.is_file() and not p.is_symlink() for p in (tmp_path / "dst").iterdir())
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == '{"tokens": []}\n'


def test_other_files_are_copied_and_old_settings_are_not(tmp_path):
    src = checkpoint(tmp_path / "src", "gptq")
    kept = {
        "generation_config.json": b"{}",
        "chat_template.jinja": b"{{ x }}\r\n",
        "tokenizer.model": b"\0\xff",
        "README.md": b"",
    }
    for name, data in kept.items():
        (src / name).write_bytes(data)
    for name in ("quantize_config.json", "old.safetensors.index.json", "pytorch_model.bin.index.json"):
        (src / name).write_text("{}")
    convert(src, tmp_path / "dst")
    assert {name: (tmp_path / "dst" / name).read_bytes() for name in kept} == kept
    written = [
        "config.json",
        "tokenizer.json",
        "w4linear-00001-of-00001.safetensors",
        "w4linear.safetensors.index.json",
    ]
    assert files(tmp_path / "dst") == sorted([*kept, *written])


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_convert_leaves_nothing(tmp_path, monkeypatch, exists, error):
    src = checkpoint(tmp_path / "src", "gptq")
    if exists:
        convert(src, tmp_path / "dst")
    before = {p.name: p.read_bytes() for p in tmp_path.glob("dst/*")}
    there = files(tmp_path)
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 1000)
    monkeypatch.setattr(convert_module, "_write_json", lambda path, value: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        convert(src, tmp_path / "dst", overwrite=exists)
    assert files(tmp_path) == there
    assert {p.name: p.read_bytes() for p in tmp_path.glob("dst/*")} == before


def test_interrupted_in_the_middle_of_the_layers(tmp_path, monkeypatch):
    src = checkpoint(tmp_path / "src", "gptq")
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 1000)
    read = Checkpoint.read_layer

    def stop(self, prefix):
        if prefix == Q_PROJ:
            raise KeyboardInterrupt
        return read(self, prefix)

    monkeypatch.setattr(Checkpoint, "read_layer", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "dst")
    assert files(tmp_path) == ["src"]


def test_verify_finds_a_changed_code(tmp_path):
    src = checkpoint(tmp_path / "src", "gptq")
    convert(src, tmp_path / "dst")
    file = tmp_path / "dst" / "w4linear-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.B"][0, 0, 0, 0] ^= 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=Q_PROJ):
        verify(src, tmp_path / "dst")


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "quant_config.json", "text_config"])
def test_settings_in_any_of_the_usual_places(tmp_path, file):
    layers = toy()
    src = checkpoint(tmp_path / "src", "awq", layers)
    config = json.loads((src / "config.json").read_text())
    quant = config.pop("quantization_config")
    if file == "quant_config.json":  # AWQ's own spelling
        quant = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    if file == "config.json":
        config["quantization_config"] = quant
    elif file == "text_config":
        config["text_config"] = {"quantization_config": quant}
    else:
        (src / file).write_text(json.dumps(quant))
    (src / "config.json").write_text(json.dumps(config))
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)
    written = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert "quantization_config" not in written.get("text_config", {})


@pytest.mark.parametrize("name", ["gptq_model-4bit-128g.safetensors", "weights.safetensors"])
def test_one_file_of_another_name(tmp_path, name):
    layers = toy()
    src = checkpoint(tmp_path / "src", "gptq", layers)
    (src / "model.safetensors").rename(src / name)
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


def test_index_of_another_name(tmp_path):
    layers = toy()
    src = checkpoint(tmp_path / "src", "gptq", layers, shards=3)
    (src / "model.safetensors.index.json").rename(src / "gptq_model.safetensors.index.json")
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


def test_group_size_that_the_tensors_contradict(tmp_path):
    layers = {DOWN_PROJ: layer(64, 512, 64)}
    src = checkpoint(tmp_path / "src", "gptq", layers, group=128)
    with pytest.warns(UserWarning, match="group_size 128, the tensors say 64"):
        convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


@pytest.mark.parametrize("name", ["awq_gemm_g64", "gptq_sym_g64"])
def test_checkpoints_that_another_tool_wrote(tmp_path, name):
    src = SHARED / name
    if not src.is_dir():
        pytest.skip(f"{src} is not here; set W4LINEAR_SHARED")
    source = Checkpoint.open(src)
    report = convert(src, tmp_path / "dst")
    assert verify(src, tmp_path / "dst") == report.layers == len(source.layers)
    packed = Checkpoint.open(tmp_path / "dst")
    with safe_open(src / "expected.safetensors", "pt") as expected:
        names = [key for key in expected.keys() if key.endswith(".dequant_fp32")]  # noqa: SIM118
        assert names
        for key in names:
            layer_name, want = key.removesuffix(".dequant_fp32"), expected.get_tensor(key)
            assert torch.equal(source.read_layer(layer_name).dequant(), want), key
            stored = source.read_layer(layer_name).s.dtype
            if stored == packed.read_layer(layer_name).s.dtype:
                assert torch.equal(packed.read_layer(layer_name).dequant(), want), key


def test_config_files_that_contradict_on_the_group_size(tmp_path):
    layers = {DOWN_PROJ: layer(64, 512, 64)}
    src = checkpoint(tmp_path / "src", "gptq", layers, group=128)
    (src / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    with pytest.warns(UserWarning, match="group_size 128 and 64"):
        convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


def test_empty_transform_and_sparsity_settings(tmp_path):
    layers = toy()
    src = checkpoint(tmp_path / "src", "ct", layers, transform_config={}, sparsity_config={"format": "dense"})
    convert(src, tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


def test_a_layer_per_expert(tmp_path):
    layers = {f"model.layers.0.mlp.experts.{e}.gate_proj": layer(32, 64, 32, seed=e) for e in range(4)}
    convert(checkpoint(tmp_path / "src", "gptq", layers), tmp_path / "dst")
    assert_holds(tmp_path / "dst", layers)


def test_other_tensors_of_any_dtype_and_shape_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "_COPY_BYTES", 7)
    others = {
        "a.mask": torch.tensor([True, False, True]),
        "b.codes": torch.arange(5, dtype=torch.uint8),
        "c.scalar": torch.tensor(2.5, dtype=torch.float64),
        "d.empty": torch.zeros(0, 3),
        "e.fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "f.ids": torch.arange(3),
        "g.half": torch.randn(3, 5).half(),
        "h.scale": torch.randn(7).bfloat16(),
    }
    src = write(tmp_path / "src", {**flat(toy(), "gptq"), **others}, quantization("gptq"))
    convert(src, tmp_path / "dst")
    tensors = load_file(tmp_path / "dst" / "w4linear-00001-of-00001.safetensors")
    for name, want in others.items():
        assert tensors[name].dtype == want.dtype, name
        assert tensors[name].shape == want.shape, name
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


def test_memory_is_bounded_by_a_layer(tmp_path):
    if not Path("/proc/self/status").is_file():
        pytest.skip("counts anonymous memory as Linux shows it")
    w = layer(1024, 2048, 128)
    parts = {f"model.layers.{i}.q_proj.{k}": t.clone() for i in range(40) for k, t in tensors_of(w, "gptq").items()}
    src = write(tmp_path / "src", parts, quantization("gptq", 128))
    del parts
    largest, write_out = [], convert_module._Shard.add

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

    def measure(self, name, tensor):
        largest.append(anonymous())
        write_out(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module._Shard, "add", measure)
        report = convert(src, tmp_path / "dst")
    assert report.bytes_out > 40e6
    assert max(largest) - largest[len(largest) // 5] < 24  # MB; holding the shard would take over 32
