"""Shared by all tests: devices, small layers, and what RIGHT means."""

from __future__ import annotations

import pytest
import torch

import w4linear

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-5}


def pytest_report_header() -> list[str]:
    return [f"w4linear: {w4linear.__file__}", *(f"{name}: {s.detail}" for name, s in w4linear.backends().items())]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    status = w4linear.backends()[request.param]
    if not status.available:
        pytest.skip(status.detail)
    return torch.device(request.param)


def _make(n, k, group, *, symmetric=False, g_idx=None, groups=None, bias=False, seed=0, device="cpu"):
    gen = torch.Generator().manual_seed(seed)
    groups = groups or -(-k // group)
    return w4linear.CanonicalW4(
        q=torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=gen).to(device),
        s=(torch.rand(n, groups, generator=gen) * 0.02 + 0.005).half().to(device),
        z=None if symmetric else torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=gen).to(device),
        group=group,
        g_idx=None if g_idx is None else g_idx.int().to(device),
        bias=torch.randn(n, generator=gen).half().to(device) if bias else None,
        symmetric=symmetric,
    )


def _assert_right(y, x, w, bias=None):
    """|y - ref| <= t |ref| + t (|x| |W|^T) / sqrt(k) elementwise against float64; prints the worst element."""
    t = TOLERANCE[y.dtype] if x.device.type == "cpu" or y.dtype != torch.float32 else TOLERANCE[torch.float16]
    x, w = x.double().cpu(), w.double().cpu()
    ref = x @ w.t() + (0 if bias is None else bias.double().cpu())
    limit = t * ref.abs() + t * (x.abs() @ w.abs().t()) / w.shape[1] ** 0.5 + 1e-30
    share = ((y.detach().double().cpu() - ref).abs() / limit).nan_to_num(torch.inf)
    assert y.shape == ref.shape, f"{tuple(y.shape)}, expected {tuple(ref.shape)}"
    if share.numel() and float(share.max()) > 1:
        i = int(share.argmax())
        raise AssertionError(
            f"element {i}: got {float(y.flatten()[i])}, expected {float(ref.flatten()[i])}, "
            f"{float(share.max()):.1f} times the limit"
        )


@pytest.fixture
def make():
    return _make


@pytest.fixture
def assert_right():
    return _assert_right
