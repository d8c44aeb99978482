"""patch_model: what is swapped, what is left and why, and that nothing is half done."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from w4linear import UnsupportedLayerError, W4Linear
from w4linear.names import matches
from w4linear.patcher import patch_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.again = self.body[0]
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.body(self.embed(ids))))


def reasons(report) -> dict[str, str]:
    return {left.name: left.reason for left in report.left}


def test_layer_equals_from_linear() -> None:
    linear = nn.Linear(96, 40)
    model = nn.Sequential(copy.deepcopy(linear)).eval()
    report = patch_model(model, group_size=32)
    assert [s.name for s in report.swapped] == ["0"] and isinstance(model[0], W4Linear) and not model[0].training
    assert torch.equal(model[0].dequantize(), W4Linear.from_linear(linear, 32).dequantize())
    assert "1 layers swapped" in str(report)


def test_shared_module_stays_one_module() -> None:
    model = Tied()
    report = patch_model(model, group_size=64)
    assert model.again is model.body[0] and isinstance(model.again, W4Linear)
    assert "body.0, again" in [s.name for s in report.swapped]


def test_tied_head_is_left_and_still_tied() -> None:
    model = Tied()
    report = patch_model(model, exclude=())
    assert reasons(report)["head"] == "weight is tied to embed"
    assert model.head.weight is model.embed.weight
    assert reasons(report)["embed"] == "not a linear layer"


def test_bad_group_names_the_layer_and_swaps_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(100, 16))
    with pytest.raises(UnsupportedLayerError, match=r"^1: group=24"):
        patch_model(model, group_size=24)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named_before_anything_is_swapped(value: float) -> None:
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(64, 16))
    model[1].weight.data[3, 5] = value
    with pytest.raises(ValueError, match=r"^1\.weight holds NaN or inf"):
        patch_model(model)
    assert type(model[0]) is nn.Linear


def test_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 16))
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        patch_model(model)


def test_root_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="from_linear"):
        patch_model(nn.Linear(64, 16))


def test_subclass_hook_conv1d_and_foreign_layers_are_left_with_reason() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 64))

    class Sub(nn.Linear):
        pass

    foreign = nn.Module()
    foreign.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))
    foreign.register_buffer("scales", torch.zeros(1, 64))
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *a: None)
    model = nn.ModuleDict({"conv": Conv1D(), "sub": Sub(64, 64), "foreign": foreign, "hooked": hooked})
    found = reasons(patch_model(model))
    assert "(in, out)" in found["conv"] and "subclass" in found["sub"]
    assert "load_model" in found["foreign"] and "hooks" in found["hooked"]


def test_attention_module_that_reads_its_weights_still_works() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        before = layer(x)
        patch_model(layer, group_size=32)
        after = layer(x)
    assert isinstance(layer.linear1, W4Linear)
    assert (after - before).norm() < 0.2 * before.norm()


def test_include_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="'q_porj' means no module"):
        patch_model(nn.Sequential(nn.Linear(64, 64)), include=["q_porj"])


def test_one_string_is_not_read_as_letters() -> None:
    with pytest.raises(ValueError, match="expected a list"):
        patch_model(nn.Sequential(nn.Linear(64, 64)), exclude="0")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("k_proj", True),
        ("proj", False),
        ("model.layers.0.", True),
        ("model.layers.0", True),
        ("layers.0", False),
        ("layers.0.*", True),
        ("model.layers.00", False),
        (r"re:.*layers\.0\..*", True),
        (r"re:layers", False),
    ],
)
def test_names_match_at_dots_only(pattern: str, meant: bool) -> None:
    assert matches("model.layers.0.self_attn.k_proj", pattern) is meant


def test_exclude_and_include_decide_by_name() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(64, 64), "k_proj": nn.Linear(64, 64), "v_proj": nn.Linear(64, 64)})
    found = reasons(patch_model(model, include=["q_proj", "k_proj"], exclude=["k_proj"]))
    assert isinstance(model["q_proj"], W4Linear)
    assert found == {"k_proj": "excluded by 'k_proj'", "v_proj": "not in include"}


def test_patched_model_copies_and_pickles_independently() -> None:
    model = Tied()
    patch_model(model)
    ids = torch.arange(8)
    want = model(ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids), want)
        twin.body[0].B.zero_()
        assert torch.equal(model(ids), want)


def test_patching_twice_swaps_nothing_more() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    patch_model(model)
    layer = model[0]
    assert patch_model(model).swapped == () and model[0] is layer


@pytest.mark.parametrize("bad", [nn.Linear(0, 4), nn.Linear(16, 16, dtype=torch.complex64)])
def test_a_layer_that_cannot_be_packed_leaves_the_model_whole(bad: nn.Linear) -> None:
    model = nn.Sequential(nn.Linear(128, 16), bad)
    with pytest.raises(ValueError, match=r"^1\.weight is"):
        patch_model(model, group_size=16)
    assert type(model[0]) is nn.Linear
