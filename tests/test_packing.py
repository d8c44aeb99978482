"""The packed layout: its formula nibble by nibble, and its exact inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w4linear import CanonicalW4, UnsupportedLayerError, packing


def assert_same(a: CanonicalW4, b: CanonicalW4) -> None:
    assert torch.equal(a.q, b.q) and torch.equal(a.z, b.z) and torch.equal(a.s, b.s)
    assert a.group == b.group and a.symmetric == b.symmetric
    assert (a.g_idx is None) == (b.g_idx is None) and (a.g_idx is None or torch.equal(a.g_idx, b.g_idx))


def test_layout_matches_formula(make):
    n, k, group = 20, 150, 32
    w = make(n, k, group)
    p = packing.pack(w)
    for row in range(n):
        i, hi, g = row // 16, row % 16 // 8, row % 8
        for column in range(k):
            j, s, h, t, e = column // 64, column % 64 // 16, column % 16 // 8, column % 8 // 2, column % 2
            word = int(p.B[i, j, 4 * g + t, s]) & 0xFFFFFFFF
            assert word >> 4 * (hi + 2 * h + 4 * e) & 15 == int(w.q[row, column]), (row, column)
        for c in range(w.groups):
            assert p.U[i, c, 2 * g + hi] == w.s[row, c]
            assert int(p.V[i, c, g]) >> 4 * hi & 15 == int(w.z[row, c])


def test_padding_decodes_to_zero(make):
    p = packing.pack(make(20, 150, 32))
    w = packing.dequantize_packed(p.B, p.U, p.V, 32, 32, torch.float32)
    assert not w[20:].any() and not w[:, 150:].any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    group=st.sampled_from([16, 32, 48, 64, 96, 128, 256, 512]),
    kind=st.sampled_from(["none", "permuted", "random"]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_unpack_inverts_pack(make, n, k, group, kind, symmetric, seed):
    gen = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    g_idx = None
    if kind == "permuted":
        g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=gen)]
    elif kind == "random":
        g_idx = torch.randint(0, groups, (k,), generator=gen)
    w = make(n, k, group, symmetric=symmetric, g_idx=g_idx, seed=seed)
    assert_same(packing.unpack(packing.pack(w)), w)


def test_unequal_groups_are_cut_into_chunks(make):
    gen = torch.Generator().manual_seed(3)
    g_idx = torch.repeat_interleave(torch.arange(4), torch.tensor([50, 78, 64, 64]))[torch.randperm(256, generator=gen)]
    w = make(64, 256, 64, g_idx=g_idx)
    p = packing.pack(w)
    assert p.group_map.tolist() == [0, 1, 1, 2, 3]
    assert_same(packing.unpack(p), w)


def test_whole_groups_in_another_order_need_no_gather(make):
    w = make(16, 256, 64, g_idx=torch.tensor([2, 0, 3, 1]).repeat_interleave(64))
    p = packing.pack(w)
    assert p.perm is None and p.group_map.tolist() == [2, 0, 3, 1]
    assert_same(packing.unpack(p), w)


@pytest.mark.parametrize("group", (8, 24, 100))
def test_other_groups_are_refused_by_name(make, group):
    with pytest.raises(UnsupportedLayerError, match=f"group={group}"):
        packing.pack(make(16, 256, group))


def test_scale_that_overflows_is_refused():
    w = CanonicalW4(torch.zeros(1, 64, dtype=torch.uint8), torch.tensor([[1e6]]), None, 64, symmetric=True)
    with pytest.raises(ValueError, match="not finite"):
        packing.pack(w)
    packing.pack(w, torch.bfloat16)


def test_golden_word():
    """Lane 0 of k step 0 holds rows 0 and 8 of columns 0, 8, 1 and 9, worked out by hand from docs/layouts.md."""
    row, column = torch.arange(16)[:, None], torch.arange(64)
    w = CanonicalW4(((row + column) % 16).to(torch.uint8), torch.ones(16, 1).half(), None, 64, symmetric=True)
    p = packing.pack(w)
    assert int(p.B[0, 0, 0, 0]) == 0x19910880
    assert p.V is None and p.U.shape == (1, 1, 16) and p.B.shape == (1, 1, 32, 4)


@pytest.mark.gpu
def test_packing_needs_at_most_four_times_the_packed_layer():
    if not torch.cuda.is_available():
        pytest.skip("counts bytes of the CUDA allocator")
    n, k = 4096, 14336
    w = CanonicalW4(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"),
        torch.rand(n, k // 128, device="cuda").half(),
        torch.randint(0, 16, (n, k // 128), dtype=torch.uint8, device="cuda"),
        128,
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    p = packing.pack(w)
    assert torch.cuda.max_memory_allocated() - before <= 4 * (p.B.nbytes + p.U.nbytes + p.V.nbytes)
