"""What the package says about itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import w4linear

MISSING = """
from pathlib import Path
from w4linear.backends import cuda
cuda.LIBRARY = Path("/nonexistent/_cuda.so"); cuda._load.cache_clear()
print(cuda.status())
"""


def test_version_agrees_with_the_metadata():
    try:
        assert version("w4linear") == w4linear.__version__
    except PackageNotFoundError:
        pytest.skip("runs from the source tree")


def test_missing_library_names_the_way_out():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    assert "available=False" in done.stdout and "nvcc" in done.stdout
