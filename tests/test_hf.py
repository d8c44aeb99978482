"""load_model and saving: exact logits, and never a random layer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
checkpoint = pytest.importorskip("w4linear.checkpoint")
hf = pytest.importorskip("w4linear.integration.hf_transformers")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from w4linear import W4Linear  # noqa: E402
from w4linear.convert import convert  # noqa: E402
from w4linear.patcher import patch_model, save_model  # noqa: E402

SHARED = Path(os.environ.get("W4LINEAR_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "checkpoints"
IDS = torch.arange(3, 67)[None]


def toy(tied: bool = False, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        tie_word_embeddings=tied,
        **options,
    )
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS.to(model.device)).logits[0].float().cpu()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    model = toy()
    patch_model(model, group_size=64)
    return save_model(model, tmp_path / "packed")


def rewrite(folder: Path, change) -> None:
    file = folder / "w4linear-00001-of-00001.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = folder / "w4linear.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(tensors, file.name)
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["awq_gemm_g64", "gptq_sym_g64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("converted", [False, True])
def test_logits_of_a_checkpoint_another_tool_wrote(
    name: str, dtype: torch.dtype, converted: bool, device: torch.device, tmp_path: Path
) -> None:
    # On CUDA a float32 model computes in its scales' dtype, which is bfloat16 in one of the two.
    coarse = dtype == torch.bfloat16 or (dtype == torch.float32 and device.type == "cuda")
    bound = 1e-2 if coarse else 2e-3
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not here; set W4LINEAR_SHARED")
    folder = SHARED / name
    if converted:
        folder = Path(convert(folder, tmp_path / "out", dtype="float16").dst)
    model = hf.load_model(folder, dtype=dtype, device_map=device)
    with safe_open(SHARED / name / "expected.safetensors", "pt") as file:
        want = file.get_tensor("logits_fp32")
    assert not model.training and isinstance(model.model.layers[0].mlp.up_proj, W4Linear)
    assert float((logits(model) - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_save_and_load_give_the_same_bits(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = toy(tied, dtype)  # not .to(dtype), which would round the rotary frequencies
    patch_model(model, group_size=64)
    model.save_pretrained(tmp_path / "out")
    again = hf.load_model(tmp_path / "out", dtype=dtype)
    assert torch.equal(logits(model), logits(again))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


def test_plain_transformers_refuses_the_folder(packed: Path) -> None:
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(packed)


@pytest.mark.parametrize(
    "tensor", ["model.layers.1.mlp.up_proj.B", "model.layers.0.self_attn.q_proj.U", "model.norm.weight"]
)
def test_missing_tensor_is_named(tensor: str, packed: Path) -> None:
    rewrite(packed, lambda tensors: tensors.pop(tensor))
    with pytest.raises((ValueError, KeyError), match=tensor.replace(".", r"\.")):
        hf.load_model(packed)


def test_left_over_tensor_is_named(packed: Path) -> None:
    rewrite(packed, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"model\.extra\.weight"):
        hf.load_model(packed)


def test_quantized_layer_the_model_lacks_is_named(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.1"):
        hf.load_model(packed)


def test_unknown_argument_is_an_error(packed: Path) -> None:
    with pytest.raises(TypeError, match="dtpye"):
        hf.load_model(packed, dtpye="auto")


def test_embedding_methods_and_tie_work_after_patching() -> None:
    model = toy(tied=True)
    patch_model(model, group_size=64)
    before = logits(model)
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model.train().eval()), before)
    model.resize_token_embeddings(328)
    assert torch.equal(logits(model)[:, :320], before)
    assert model.dtype.is_floating_point and model.model.layers[0].mlp.up_proj.weight.dtype.is_floating_point


def test_existing_folder_is_kept_without_overwrite(packed: Path) -> None:
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_model(toy(), packed)


def test_t5_reads_wo_weight_dtype() -> None:
    config = transformers.T5Config(d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=1, vocab_size=64)
    model = transformers.T5ForConditionalGeneration(config).eval()
    patch_model(model, group_size=32)
    ids = torch.arange(3, 9)[None]
    assert isinstance(model.encoder.block[0].layer[1].DenseReluDense.wo, W4Linear)
    assert model.generate(ids, max_new_tokens=3, decoder_start_token_id=0).shape[0] == 1


def test_cast_after_building_survives_saving(tmp_path: Path) -> None:
    model = toy().to(torch.bfloat16)
    patch_model(model, group_size=64)
    model.save_pretrained(tmp_path / "out")
    assert hf.load_model(tmp_path / "out").dtype == torch.bfloat16
