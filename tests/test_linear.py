"""The module: shapes, dtypes, input forms, and its life (save, load, copy, cast, train)."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch

from w4linear import W4Linear

SHAPES = [(n, 128, 64) for n in (1, 8, 16, 24, 48, 60, 72, 96, 200)] + [
    (320, 64, 32),
    (128, 7392, 32),
    (40, 576, 128),
    (64, 176, 176),
    (2880, 2880, 32),
]


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_odd_shapes(make, assert_right, device, n, k, group, dtype):
    w = make(n, k, group, device=device)
    x = torch.randn(33, k, device=device).to(dtype)
    y = W4Linear.from_canonical(w)(x)
    assert y.dtype == dtype
    assert_right(y, x, w.dequant())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_bias(make, assert_right, device, dtype):
    for n, k, group, seed in [(72, 128, 64, s) for s in range(10)] + [(320, 64, 32, s) for s in range(10)]:
        w = make(n, k, group, bias=True, device=device, seed=seed)
        layer = W4Linear.from_canonical(w, torch.float16 if dtype == torch.float32 else dtype)
        x = torch.randn(33, k, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        assert torch.equal(layer(torch.zeros_like(x[:1]))[0], w.bias.to(dtype))
        # Scales as the layer holds them: what is asked here is that the bias costs no second rounding.
        held = layer.to_canonical()
        assert_right(layer(x), x, held.dequant(), held.bias)


@pytest.mark.parametrize("counts", ([64, 64, 64, 64], [50, 78, 64, 64]))
def test_act_order(make, assert_right, device, counts):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    w = make(64, 256, 64, g_idx=torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[order], device=device)
    x = torch.randn(33, 256, device=device).half()
    layer = W4Linear.from_canonical(w)
    assert_right(layer(x), x, w.dequant())
    other = W4Linear(256, 64, group_size=64, device=device)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_leading_dimensions_survive(make, device):
    layer = W4Linear.from_canonical(make(32, 128, 64, device=device))
    for shape in [(128,), (0, 128), (1, 0, 128), (3, 128), (2, 3, 2, 128)]:
        assert layer(torch.randn(shape, device=device).half()).shape == (*shape[:-1], 32)
    x = torch.randn(128, 9, device=device).half().t()
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("bad", (torch.zeros(129), torch.zeros(3, 127), torch.tensor(1.0), torch.zeros(2, 128).long()))
def test_wrong_input_raises(make, device, bad):
    with pytest.raises(RuntimeError):
        W4Linear.from_canonical(make(32, 128, 64, device=device))(bad.to(device))


def test_copies_are_equal_and_independent(make, device):
    layer = W4Linear.from_canonical(make(32, 128, 64, bias=True, device=device))
    x = torch.randn(3, 128, device=device).half()
    y = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), y)
        other.B.zero_()
        assert torch.equal(layer(x), y)


def test_casts_leave_codes_alone(make, assert_right, device):
    w = make(32, 128, 64, device=device)
    layer = W4Linear.from_canonical(w)
    codes = layer.B.clone()
    for cast in ("half", "bfloat16", "float", "double"):
        getattr(layer, cast)()
        assert torch.equal(layer.B, codes) and layer.U.dtype in (torch.float16, torch.bfloat16)
        x = torch.randn(5, 128, device=device).bfloat16()
        assert_right(layer(x), x, w.dequant())


def test_autocast(make, assert_right, device):
    w = make(32, 128, 64, device=device)
    x = torch.randn(5, 128, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = W4Linear.from_canonical(w)(x)
    assert y.dtype == torch.bfloat16
    assert_right(y, x.bfloat16(), w.dequant())


def test_gradient_for_x(make, assert_right, device):
    w = make(32, 128, 64, device=device)
    x = torch.randn(5, 128, device=device).half().requires_grad_()
    grad = torch.randn(5, 32, device=device).half()
    W4Linear.from_canonical(w)(x).backward(grad)
    assert_right(x.grad, grad, w.dequant().t())


def test_unfilled_layer_and_wrong_layout_raise(make, device):
    layer = W4Linear(128, 32, group_size=64, device=device)
    with pytest.raises(RuntimeError, match="no weights"):
        layer(torch.zeros(1, 128, device=device).half())
    state = W4Linear.from_canonical(make(32, 128, 64)).state_dict()
    state["layout"] = state["layout"].clone()
    state["layout"][0] = 99
    with pytest.raises(RuntimeError, match="layout version 99"):
        layer.load_state_dict(state)


def test_meta_then_assign(make):
    source = W4Linear.from_canonical(make(32, 128, 64))
    layer = W4Linear(128, 32, group_size=64, device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 128).half()
    assert torch.equal(layer(x), source(x))


def test_weight_is_not_data(make):
    layer = W4Linear.from_canonical(make(32, 128, 64))
    assert layer.weight.shape == (32, 128) and layer.weight.dtype == torch.float16
    with pytest.raises(TypeError, match="dequantize"):
        torch.matmul(layer.weight, torch.zeros(128))
    assert "group_size=64" in repr(layer)


def test_same_rows_in_any_form_give_the_same_bits(make, device):
    layer = W4Linear.from_canonical(make(72, 256, 64, device=device))
    for m in range(1, 10):
        x = torch.randn(m, 256, device=device).half()
        want = layer(x)
        assert torch.equal(layer(x[None])[0], want)
        assert torch.equal(layer(x[:, None])[:, 0], want)
    assert torch.equal(layer(x[:1]), layer(x[0])[None])


def test_large_outputs_are_finite_in_bfloat16_and_overflow_as_dense_in_float16(make, device):
    w = make(64, 256, 64, device=device)
    x = torch.full((5, 256), 20_000.0, device=device)
    dense = torch.nn.functional.linear(x.half(), w.dequant().half())
    assert bool(torch.isinf(dense).any())
    assert torch.equal(torch.isinf(W4Linear.from_canonical(w)(x.half())), torch.isinf(dense))
    y = W4Linear.from_canonical(w, torch.bfloat16)(x.bfloat16())
    assert bool(torch.isfinite(y).all()) and float(y.abs().max()) > 65_504


def test_tiny_scales_survive_both_dtypes(make, device):
    w = make(16, 64, 64, device=device)
    w = dataclasses.replace(w, s=torch.full_like(w.s, 1e-7))
    for dtype in (torch.float16, torch.bfloat16):
        layer = W4Linear.from_canonical(w, dtype)
        assert torch.equal(layer.to_canonical().s, w.s.to(dtype))
        y = layer(torch.eye(64, dtype=dtype, device=device)).t()
        assert torch.equal(y, ((w.q.float() - w.z.float()) * w.s.to(dtype).float()).to(dtype))


def test_tensors_of_another_layout_do_not_load(make):
    layer = W4Linear.from_canonical(make(16, 64, 64))
    gptq = {"qweight": torch.zeros(8, 16).int(), "qzeros": torch.zeros(1, 2).int(), "scales": torch.ones(1, 16).half()}
    with pytest.raises(RuntimeError, match=r"qweight"):
        layer.load_state_dict(gptq)


def test_copy_made_inside_inference_mode_works_outside(make, device):
    layer = W4Linear.from_canonical(make(16, 64, 64, device=device))
    x = torch.randn(3, 64, device=device).half()
    with torch.inference_mode():
        layer(x)
        twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("size", (1e-30, 1e-6, 1.0, 1e6, 1e25))
def test_weights_of_any_size_quantize(size):
    linear = torch.nn.Linear(128, 16, bias=False)
    weight = linear.weight.data * size
    linear.weight.data = weight.clone()
    layer = W4Linear.from_linear(linear, group_size=64)
    error = (layer.dequantize(torch.float32) - weight).double().norm() / weight.double().norm()
    assert float(error) < 0.1


def test_bias_beyond_float16_chooses_bfloat16_or_is_refused(make):
    linear = torch.nn.Linear(128, 16)
    linear.bias.data[3] = 1e5
    layer = W4Linear.from_linear(linear, group_size=64)
    assert layer.bias.dtype == torch.bfloat16 and bool(torch.isfinite(layer.bias).all())
    w = dataclasses.replace(make(16, 64, 64), bias=linear.bias.detach())
    with pytest.raises(ValueError, match=r"bias\[3\] is not finite in torch\.float16"):
        W4Linear.from_canonical(w)


def test_state_dict_of_another_dtype_is_refused():
    source = W4Linear.from_linear(torch.nn.Linear(128, 64), group_size=64)
    target = W4Linear(128, 64, bias=True, group_size=64)
    with pytest.raises(RuntimeError, match=r"B is torch\.float16, expected torch\.int32"):
        target.load_state_dict({k: v.half() if k != "layout" else v for k, v in source.state_dict().items()})


def test_meta_forward_and_memory_without_values():
    layer = W4Linear.from_linear(torch.nn.Linear(128, 64), group_size=64).to("meta")
    assert layer(torch.empty(2, 128, device="meta", dtype=torch.float16)).shape == (2, 64)
    with pytest.raises(RuntimeError, match="no weights yet"):
        layer.to_empty(device="cpu")(torch.randn(2, 128))
