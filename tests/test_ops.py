"""torch.ops.w4linear.gemm: opcheck, torch.compile."""

from __future__ import annotations

import pytest
import torch

from w4linear import W4Linear, ops


@pytest.mark.parametrize("symmetric", (True, False))
def test_opcheck(make, device, symmetric):
    layer = W4Linear.from_canonical(make(32, 128, 64, symmetric=symmetric, bias=True, device=device))
    x = torch.randn(3, 128, device=device).half()
    torch.library.opcheck(ops.gemm, (x, layer.B, layer.U, layer.V, layer.bias, layer.perm, 32, 128, 64))


def test_compile_without_graph_breaks(make, device):
    layer = W4Linear.from_canonical(make(32, 128, 64, device=device))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 7, 64, 65):
        x = torch.randn(m, 128, device=device).half()
        torch.testing.assert_close(compiled(x), layer(x))
