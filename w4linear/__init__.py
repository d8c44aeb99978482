"""w4linear: 4-bit weights, 16-bit activations, a drop-in linear layer for PyTorch."""

from w4linear.backends import BackendStatus, backends
from w4linear.canonical import CanonicalW4
from w4linear.checkpoint import CheckpointError
from w4linear.convert import convert
from w4linear.linear import W4Linear
from w4linear.packing import UnsupportedLayerError
from w4linear.patcher import PatchReport, patch_model

__version__ = "0.1.0"
__all__ = [
    "BackendStatus",
    "CanonicalW4",
    "CheckpointError",
    "PatchReport",
    "UnsupportedLayerError",
    "W4Linear",
    "__version__",
    "backends",
    "convert",
    "patch_model",
]
