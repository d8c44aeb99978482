"""The CUDA kernels: equality first (one-hot activations give the decoded weight bit for bit), then float64 bounds.

Tests of the kernels take all compiled instances from the library, so a new one is covered the day it is added.
"""

from __future__ import annotations

import random

import pytest
import torch

from w4linear import CanonicalW4, W4Linear, backends, ops
from w4linear.backends import cuda

CUDA = backends()["cuda"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA.available, reason=CUDA.detail)]

INSTANCES = list(enumerate(cuda.instances()))
DTYPES = (torch.float16, torch.bfloat16)
instance_grid = pytest.mark.parametrize("instance", [i for i, _ in INSTANCES], ids=[name for _, name in INSTANCES])
dtype_grid = pytest.mark.parametrize("dtype", DTYPES, ids=("f16", "bf16"))
symmetry_grid = pytest.mark.parametrize("symmetric", (True, False), ids=("sym", "asym"))


def make(
    n: int,
    k: int,
    group: int,
    symmetric: bool = False,
    *,
    g_idx: torch.Tensor | None = None,
    bias: bool = False,
    seed: int = 0,
) -> CanonicalW4:
    gen = torch.Generator("cuda").manual_seed(seed)
    groups = -(-k // group)
    shape = (n, groups)
    return CanonicalW4(
        q=torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda", generator=gen),
        s=(torch.rand(shape, device="cuda", generator=gen) * 0.02 + 0.005).half(),
        z=None if symmetric else torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda", generator=gen),
        group=group,
        g_idx=g_idx,
        bias=torch.randn(n, device="cuda", generator=gen) if bias else None,
        symmetric=symmetric,
    )


def run(layer: W4Linear, x: torch.Tensor, instance: int, splits: int = 1) -> torch.Tensor:
    operands = (x, layer.B, layer.U, layer.V, layer.bias, layer.perm)
    sizes = (layer.out_features, layer.in_features, layer.kernel_group)
    return ops.gemm_with_plan(*operands, *sizes, instance, splits)


def k_tiles(instance: int, k: int) -> int:
    tile_k = int(cuda.instances()[instance].split("_k")[1].split("_")[0])
    return -(-k // tile_k)


def assert_close(y: torch.Tensor, x: torch.Tensor, layer: W4Linear) -> None:
    """|y - ref| <= half an ulp of the output + one float32 rounding per k16 step of the sum, worst element shown.

    The reference is float64 over the weights rounded to 16 bit, which the kernel multiplies exactly.
    """
    w = layer.dequantize().double()
    for rows in torch.arange(x.shape[0], device="cuda").split(4096):
        a = x[rows].double()
        ref = a @ w.t()
        size = a.abs() @ w.abs().t()
        if layer.bias is not None:
            ref, size = ref + layer.bias.double(), size + layer.bias.double().abs()
        half_ulp = torch.finfo(y.dtype).eps / 2
        steps = layer.in_features / 16 + 32
        bound = half_ulp * ref.abs() + steps * 2.0**-23 * size + torch.finfo(y.dtype).smallest_normal
        share = (y[rows].double() - ref).abs() / bound
        worst = int(share.nan_to_num(torch.inf).argmax())
        at = divmod(worst, y.shape[1])
        assert bool((share <= 1).all()), f"y{at} = {y[rows][at]}, expected {ref[at]}, {share[at]:.1f} times the bound"


def expected_one_hot(w: CanonicalW4, dtype: torch.dtype) -> torch.Tensor:
    g = w.group_of_column()
    s = w.s.to(dtype).float()
    return ((w.q.float() - w.z.float()[:, g]) * s[:, g]).to(dtype)


@instance_grid
@dtype_grid
@symmetry_grid
@pytest.mark.parametrize("group", (16, 64, 128, 256, 1088))
def test_one_hot_gives_the_decoded_weight(instance: int, dtype: torch.dtype, symmetric: bool, group: int) -> None:
    n, k = 200, 1088  # neither is a multiple of a tile; the last groups of 128 and 256 are partial
    w = make(n, k, group, symmetric)
    layer = W4Linear.from_canonical(w, dtype)
    y = run(layer, torch.eye(k, dtype=dtype, device="cuda"), instance)
    assert torch.equal(y.t(), expected_one_hot(w, dtype))


@instance_grid
@dtype_grid
def test_extreme_codes_decode_exactly(instance: int, dtype: torch.dtype) -> None:
    q = torch.arange(256, device="cuda").repeat(4, 1).to(torch.uint8)
    w = CanonicalW4(
        q=(q % 16), s=torch.tensor([[6e-5], [4000.0], [1.0], [0.0]], device="cuda"),
        z=torch.tensor([[0], [15], [7], [3]], dtype=torch.uint8, device="cuda"), group=256,
    )  # fmt: skip
    layer = W4Linear.from_canonical(w, dtype)
    y = run(layer, torch.eye(256, dtype=dtype, device="cuda"), instance)
    assert torch.equal(y.t(), expected_one_hot(w, dtype))


@instance_grid
@pytest.mark.parametrize("k", (64, 100, 512, 1000, 4096), ids="k{}".format)
@pytest.mark.parametrize("m", (1, 7, 33, 130, 300), ids="m{}".format)
def test_k_tiles_fewer_than_stages_and_edges(instance: int, k: int, m: int) -> None:
    layer = W4Linear.from_canonical(make(88, k, 64 if k % 64 == 0 else k, bias=True), torch.float16)
    x = torch.randn(m, k, device="cuda").half()
    assert_close(run(layer, x, instance), x, layer)


@instance_grid
@dtype_grid
def test_splits_are_right_and_repeatable(instance: int, dtype: torch.dtype) -> None:
    layer = W4Linear.from_canonical(make(176, 2880, 32, bias=True), dtype)
    x = torch.randn(70, 2880, device="cuda").to(dtype)
    for splits in sorted({1, 2, 3, min(16, k_tiles(instance, 2880))}):
        if splits > k_tiles(instance, 2880):
            continue
        y = run(layer, x, instance, splits)
        assert_close(y, x, layer)
        for _ in range(5):
            assert torch.equal(run(layer, x, instance, splits), y)


def test_too_many_splits_is_an_error() -> None:
    layer = W4Linear.from_canonical(make(16, 64, 64))
    with pytest.raises(RuntimeError, match="2 splits, expected 1 to 1"):
        run(layer, torch.randn(1, 64, device="cuda").half(), 0, 2)


def test_200_random_cases() -> None:
    rng = random.Random(7)
    for case in range(200):
        n = rng.choice((1, 3, 8, 16, 17, 60, 96, 200, 320, 1000, 2880, rng.randint(1, 5000)))
        k = rng.choice((1, 5, 16, 63, 64, 65, 100, 176, 576, 1000, 2880, 4096, rng.randint(1, 5000)))
        m = rng.choice((1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 257, rng.randint(1, 700)))
        group = rng.choice((16, 32, 64, 128, 256, 96, 48, k))
        symmetric, bias, order = rng.random() < 0.5, rng.random() < 0.5, rng.choice((None, None, "shuffled", "blocks"))
        dtype = rng.choice(DTYPES)
        groups = -(-k // group)
        g_idx = None
        if order and groups > 1:
            g_idx = (torch.arange(k, device="cuda") // group).int()
            g_idx = g_idx[torch.randperm(k, device="cuda")] if order == "shuffled" else groups - 1 - g_idx
        w = make(n, k, group, symmetric, g_idx=g_idx, bias=bias, seed=case)
        layer = W4Linear.from_canonical(w, dtype)
        x = torch.randn(m, k, device="cuda").to(dtype)
        what = f"case {case}: {n=} {k=} {m=} {group=} {symmetric=} {bias=} {order=} {dtype=}"
        try:
            assert_close(layer(x), x, layer)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


@pytest.mark.parametrize("group", (64, 128))
@pytest.mark.parametrize("m", (1, 17, 256))
def test_last_tile_partial_at_k_14784(group: int, m: int) -> None:
    layer = W4Linear.from_canonical(make(256, 14784, group))
    x = torch.randn(m, 14784, device="cuda").half()
    assert_close(layer(x), x, layer)


def test_k_7392_leaves_a_group_half_in_the_padding() -> None:
    layer = W4Linear.from_canonical(make(128, 7392, 32))
    x = torch.randn(33, 7392, device="cuda").half()
    assert_close(layer(x), x, layer)


@pytest.mark.parametrize("m", (15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 329))
def test_no_row_is_left_unwritten(m: int) -> None:
    layer = W4Linear.from_canonical(make(512, 4096, 128))
    x = torch.randn(m, 4096, device="cuda").half()
    want = layer(x)
    assert_close(want, x, layer)
    for _ in range(20):
        poison = torch.full((m * 512 * 16,), torch.nan, device="cuda", dtype=torch.float16)
        del poison
        assert torch.equal(layer(x), want)


def test_misaligned_and_strided_rows() -> None:
    layer = W4Linear.from_canonical(make(64, 256, 64))
    wide = torch.randn(9, 300, device="cuda").half()
    for x in (wide[:, 1:257], wide[:, :256], wide[:, 8:264], torch.randn(256, 9, device="cuda").half().t()):
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_inf_in_x_does_not_reach_padding() -> None:
    g_idx = torch.repeat_interleave(torch.arange(4), torch.tensor([50, 78, 64, 64])).int()
    g_idx = g_idx[torch.randperm(256, generator=torch.Generator().manual_seed(3))].cuda()
    w = make(16, 256, 64, g_idx=g_idx)
    layer = W4Linear.from_canonical(w)
    x = torch.zeros(3, 256, device="cuda").half()
    x[1, 0] = torch.inf
    y = layer(x)
    assert bool((y[0] == 0).all()) and bool((y[2] == 0).all())
    assert not bool(torch.isfinite(y[1]).any() & (w.dequant()[:, 0] != 0).all())


def test_graph_capture_replays_on_new_inputs() -> None:
    layer = W4Linear.from_canonical(make(512, 2048, 128, bias=True))
    x = torch.randn(4, 2048, device="cuda").half()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(4, 2048, device="cuda").half())
        graph.replay()
        assert torch.equal(y, layer(x))


def test_side_stream_orders_with_its_own_work() -> None:
    layer = W4Linear.from_canonical(make(4096, 4096, 128))
    x = torch.randn(16, 4096, device="cuda").half()
    want = layer(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(2_000_000)
        late.copy_(x)
        got = layer(late)
    stream.synchronize()
    assert torch.equal(got, want)


def test_second_device_keeps_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    layer = W4Linear.from_canonical(make(64, 256, 64)).to("cuda:1")
    x = torch.randn(3, 256, device="cuda:1").half()
    y = layer(x)
    assert y.device == x.device and torch.cuda.current_device() == 0
    assert torch.equal(y.cpu(), layer.to("cuda:0")(x.to("cuda:0")).cpu())


def test_nothing_synchronises() -> None:
    layer = W4Linear.from_canonical(make(512, 1024, 128, bias=True))
    x = torch.randn(4, 1024, device="cuda").half()
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_inputs_leave_the_context_usable() -> None:
    layer = W4Linear.from_canonical(make(64, 256, 64))
    good = torch.randn(3, 256, device="cuda").half()
    for bad in (good[:, :255], good.cpu(), good.int(), torch.tensor(1.0, device="cuda").half()):
        with pytest.raises(RuntimeError):
            layer(bad)
    torch.cuda.synchronize()
    assert_close(layer(good), good, layer)


def test_compile_fullgraph_with_dynamic_m() -> None:
    layer = W4Linear.from_canonical(make(256, 512, 128, bias=True))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 7, 64, 65):
        x = torch.randn(m, 512, device="cuda").half()
        assert torch.equal(compiled(x), layer(x))


def test_opcheck() -> None:
    layer = W4Linear.from_canonical(make(48, 256, 64, bias=True))
    x = torch.randn(3, 256, device="cuda").half()
    operands = (x, layer.B, layer.U, layer.V, layer.bias, layer.perm, 48, 256, 64)
    torch.library.opcheck(ops.gemm, operands)


@pytest.mark.slow
def test_offsets_beyond_2_to_31() -> None:
    # m * n, m * k with act-order, n * k, and more than 65,535 tiles of m.
    small = W4Linear.from_canonical(make(64, 64, 64))
    x = torch.randn(1_048_592, 64, device="cuda").half()
    assert_close(small(x)[-32:], x[-32:], small)
    del x
    wide = W4Linear.from_canonical(make(28672, 128, 128))
    x = torch.randn(80_000, 128, device="cuda").half()
    y = wide(x)
    for rows in (slice(0, 64), slice(74_000, 74_100), slice(-64, None)):
        assert_close(y[rows], x[rows], wide)
    del x, y
    order = (torch.arange(4096, device="cuda") // 128)[torch.randperm(4096, device="cuda")].int()
    ordered = W4Linear.from_canonical(make(256, 4096, 128, g_idx=order))
    x = torch.randn(600_000, 4096, device="cuda", dtype=torch.float16)
    y = ordered(x)
    for rows in (slice(0, 16), slice(300_000, 300_016), slice(-16, None)):
        assert_close(y[rows], x[rows], ordered)
    del x, y
    tall = W4Linear.from_canonical(make(152_064, 14_336, 128))
    x = torch.randn(3, 14_336, device="cuda").half()
    y = tall(x)
    w = tall.to_canonical()
    last = CanonicalW4(w.q[-64:], w.s[-64:], w.z[-64:], w.group)
    assert_close(y[:, -64:], x, W4Linear.from_canonical(last))
