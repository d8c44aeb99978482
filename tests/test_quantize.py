"""Round to nearest: what is representable survives, and bad weights are refused."""

from __future__ import annotations

import pytest
import torch

from w4linear.quantize import quantize


@pytest.mark.parametrize("symmetric", (True, False))
def test_relative_error_is_that_of_four_bits(symmetric):
    w = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    q = quantize(w, 64, symmetric)
    assert q.groups == 4 and q.symmetric == symmetric
    assert float((q.dequant() - w).norm() / w.norm()) < 0.12


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_not_finite_is_refused(bad):
    w = torch.zeros(4, 64)
    w[1, 2] = bad
    with pytest.raises(ValueError, match="NaN or inf"):
        quantize(w, 64)


def test_zero_weight_stays_zero():
    assert not quantize(torch.zeros(4, 64), 64).dequant().any()
