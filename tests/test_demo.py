"""The demo on a tiny random model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("w4linear.checkpoint")
pytest.importorskip("w4linear.integration.hf_transformers")


def test_demo_compares_before_and_after(tmp_path: Path) -> None:
    from w4linear.demo import run

    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=320
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    rows = run(str(tmp_path / "m"), tokens=3, device="cpu")
    assert rows["after"]["megabytes"] < rows["before"]["megabytes"]
    assert math.isclose(rows["after"]["perplexity"], rows["before"]["perplexity"], rel_tol=0.1)
