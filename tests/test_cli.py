"""The command line: exit codes, one-line errors, and what info says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "w4linear.cli", *args], capture_output=True, text=True, check=False)


def test_info_says_what_is_available_and_why_not() -> None:
    done = run("info")
    assert done.returncode == 0
    assert "cpu   available" in done.stdout and "cuda" in done.stdout and "torch" in done.stdout


@pytest.mark.parametrize("args", [("convert",), ("convert", "a", "b", "--dtype", "int8"), ("no",), ("info", "--no")])
def test_wrong_usage_is_exit_2_without_a_traceback(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_missing_source_is_one_line_and_exit_1_and_makes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("w4linear.convert")
    done = run("convert", str(tmp_path / "none"), str(tmp_path / "out"))
    assert done.returncode == 1 and "none" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()
