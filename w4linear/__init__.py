"""w4linear: 4-bit weights, 16-bit activations, a drop-in linear layer for PyTorch."""

from w4linear.backends import BackendStatus, backends
from w4linear.canonical import CanonicalW4
from w4linear.linear import W4Linear
from w4linear.packing import UnsupportedLayerError

__version__ = "0.1.0"
__all__ = ["BackendStatus", "CanonicalW4", "UnsupportedLayerError", "W4Linear", "backends", "__version__"]
