"""The command line: ``w4linear convert | quantize | inspect | verify | info | demo``.

Exit code 0 is success, 1 an error with one line on stderr (a traceback with --debug), 2 wrong usage.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import w4linear
from w4linear.backends import backends, cuda

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="4-bit linear layers."
)
out = Console()
_debug = False

Source = Annotated[str, typer.Argument(help="a checkpoint folder, or a hub id")]
Target = Annotated[Path, typer.Argument(help="the folder to make")]
Dtype = Annotated[str, typer.Option(help="of scales and activations: auto, float16 or bfloat16")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing folder")]
Group = Annotated[int, typer.Option(min=1, help="consecutive in features that share one scale")]
Symmetric = Annotated[bool, typer.Option("--symmetric", help="every zero point is 8")]


@app.callback()
def _global(debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False) -> None:
    global _debug
    _debug = debug


@app.command()
def convert(src: Source, dst: Target, dtype: Dtype = "auto", overwrite: Overwrite = False) -> None:
    """An AWQ, GPTQ or compressed-tensors checkpoint -> a packed one."""
    from w4linear.convert import convert as run

    report = run(src, dst, dtype=_dtype(dtype), overwrite=overwrite, progress=True)
    out.print(str(report), highlight=False, markup=False)


@app.command()
def quantize(
    src: Source,
    dst: Target,
    group_size: Group = 128,
    symmetric: Symmetric = False,
    include: Annotated[list[str] | None, typer.Option(help="only layers of this name or pattern; repeatable")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="layers to leave [default: lm_head]; repeatable")] = None,
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
) -> None:
    """A 16-bit checkpoint -> a packed one, round to nearest with a searched clip."""
    from w4linear.convert import quantize_checkpoint

    report = quantize_checkpoint(
        src,
        dst,
        group_size=group_size,
        symmetric=symmetric,
        include=include or None,
        exclude=tuple(exclude) if exclude else ("lm_head",),
        dtype=_dtype(dtype),
        overwrite=overwrite,
        progress=True,
    )
    out.print(str(report), highlight=False, markup=False)


@app.command()
def inspect(path: Source, as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False) -> None:
    """Format, layers, bits per weight, and what would be refused and why."""
    from w4linear.inspect import inspect as run

    report = run(path)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        raise typer.Exit(1 if report.format is None else 0)
    table = Table(
        "layer", "n", "k", "group", "zeros", "order", "bits", title=f"{path}: {report.format or 'not readable'}"
    )
    for row in report.layers:
        zeros, order = "symmetric" if row["symmetric"] else "asymmetric", "act" if row["act_order"] else ""
        table.add_row(
            row["name"], *map(str, (row["n"], row["k"], row["group"])), zeros, order, str(row["bits_per_weight"])
        )
    if report.layers:
        out.print(table)
    weights = sum(row["n"] * row["k"] for row in report.layers)
    if weights:
        mean = sum(row["n"] * row["k"] * row["bits_per_weight"] for row in report.layers) / weights
        print(
            f"{len(report.layers)} layers, {weights / 1e6:.1f} M weights at {mean:.2f} bits; {len(report.dense)} others"
        )
    for reason in report.refused:
        print(f"refused: {reason}")
    if report.format is None:
        raise typer.Exit(1)


@app.command()
def verify(src: Source, dst: Target) -> None:
    """Checks that a packed checkpoint holds the weights of its source."""
    from w4linear.convert import verify as run

    layers = run(src, dst)
    out.print(f"{dst}: all {layers} layers equal to {src}", highlight=False, markup=False)


@app.command()
def info(
    plan: Annotated[
        tuple[int, int, int, int] | None, typer.Option(metavar="M N K GROUP", help="explain a GEMM's kernel choice")
    ] = None,
) -> None:
    """Backends, GPU and versions, and why a backend is missing."""
    print(f"w4linear {w4linear.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"CUDA library built with CUDA {cuda.built_with()}; torch's CUDA {torch.version.cuda or 'none'}")
    for name, status in backends().items():
        print(f"{name:5} {'available' if status.available else 'missing'}: {status.detail}")
    if plan is not None:
        print(cuda.explain(*plan))


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="a checkpoint folder or hub id [default: SmolLM2-135M]")] = None,
    group_size: Group = 64,
    tokens: Annotated[int, typer.Option(min=1, help="how many to generate")] = 48,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [default: cuda where usable]")] = None,
) -> None:
    """Quantizes a small real model, loads it, generates, and compares it with the original."""
    from w4linear.demo import run

    run(model, group_size=group_size, tokens=tokens, device=device, console=out)


def main() -> None:
    """The entry point: runs a command, and turns errors into one line and exit code 1."""
    try:
        app()
    except (ValueError, RuntimeError, OSError, ImportError, TypeError, KeyError) as error:
        if _debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def _dtype(name: str) -> str | torch.dtype:
    if name not in ("auto", "float16", "bfloat16"):
        raise typer.BadParameter(f"{name!r}, expected auto, float16 or bfloat16", param_hint="--dtype")
    return name if name == "auto" else getattr(torch, name)


if __name__ == "__main__":
    main()
