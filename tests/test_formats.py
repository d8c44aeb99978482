"""Readers of the checkpoint formats against the formula (q - z) * s."""

import pytest
import torch

from w4linear.formats import FORMATS, CheckpointError, LayerConfig, detect


def words(x, dim, order=range(8)):
    x = torch.nn.functional.pad(x.movedim(dim, -1).long(), (0, -x.shape[dim] % 8)).unflatten(-1, (-1, 8))
    packed = sum(x[..., c] << (4 * p) for p, c in enumerate(order))
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def gptq(q, z, s, v):
    return {"qweight": words(q.T, 0), "qzeros": words((z.T - int(v == "v1")) & 15, 1), "scales": s.T.contiguous()}


def awq(q, z, s):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(q.T, 1, order), "qzeros": words(z.T, 1, order), "scales": s.T.contiguous()}


def ct(q, z, s):
    shape = torch.tensor(q.shape)
    return {"weight_packed": words(q, 1), "weight_scale": s, "weight_zero_point": words(z, 0), "weight_shape": shape}


@pytest.mark.parametrize(
    ("n", "k", "group"), [(64, 256, 64), (60, 176, 64), (8, 128, -1), (72, 576, 128), (1, 128, 32)]
)
def test_every_format_reads_q_z_s_exactly(n, k, group):
    g = torch.Generator().manual_seed(0)
    groups = 1 if group == -1 else -(-k // group)
    q, z = (torch.randint(0, 16, (n, c), generator=g) for c in (k, groups))
    s = torch.rand(n, groups, generator=g).half()
    cases = [("awq", "gemm", awq(q, z, s)), ("compressed-tensors", "", ct(q, z, s))]
    cases += [("gptq", v, gptq(q, z, s, v)) for v in ("v1", "v2")]
    for name, variant, tensors in cases:
        w = FORMATS[name].read(tensors, LayerConfig("l", group, False, variant, "auto_gptq"))
        assert torch.equal(w.q, q.byte()), name
        assert torch.equal(w.z, z.byte()), name
        assert torch.equal(w.s, s), name


def test_symmetric_v1_with_v2_zeros_is_read_as_8_and_asymmetric_as_9():
    q, z, s = torch.zeros(8, 64), torch.full((8, 1), 8), torch.ones(8, 1).half()
    tensors, said = gptq(q, z, s, "v2"), []
    assert int(FORMATS["gptq"].read(tensors, LayerConfig("l", 64, True, "v1"), said.append).z.max()) == 8
    assert "gptq_v2" in said[0]
    assert int(FORMATS["gptq"].read(tensors, LayerConfig("l", 64, False, "v1")).z.min()) == 9


def test_gptqmodel_zeros_carry_over_the_word():
    tensors = gptq(torch.zeros(8, 64), torch.zeros(8, 1).long(), torch.ones(8, 1).half(), "v2")
    tensors["qzeros"].fill_(0x7777776F)
    z = FORMATS["gptq"].read(tensors, LayerConfig("l", 64, False, "v1", "gptqmodel:7")).z[:, 0]
    assert z.tolist() == [0] + [8] * 7


@pytest.mark.parametrize("square", [256, 128])
def test_awq_tensors_under_gptq_and_the_reverse(square):
    q, z, s = torch.zeros(128, square), torch.zeros(128, square // 64).long(), torch.ones(128, square // 64).half()
    with pytest.raises(CheckpointError, match="expected GPTQ's"):
        FORMATS["gptq"].read(awq(q, z, s), LayerConfig("l", 64, False, "v1"))
    with pytest.raises(CheckpointError, match="expected AWQ gemm's"):
        FORMATS["awq"].read(gptq(q, z, s, "v1"), LayerConfig("l", 64, False, "gemm"))


@pytest.mark.parametrize(
    "config", [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 8}, {"quant_method": "hqq"}]
)
def test_refused_by_name(config):
    with pytest.raises(CheckpointError, match="not supported"):
        detect(config, ["a.qweight"])
