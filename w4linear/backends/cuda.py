"""Finds and registers the CUDA library (csrc/bindings.cpp), and asks it about plans and instances.

The library links neither torch nor libcudart.so: it looks torch's stable C functions up in the running process.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from w4linear.backends import BackendStatus

LIBRARY = Path(__file__).resolve().parent.parent / "_cuda.so"
MINIMUM_CAPABILITY = (8, 0)
BUILD_HINT = (
    "reinstall from source where nvcc is found (pip install . -v shows it); without a CUDA toolkit it comes over pip: "
    "nvidia-cuda-nvcc, -crt, -cccl, -runtime and nvidia-nvvm, all ==13.0.*, and the variables in README 'Building'"
)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """-> (library, "") or (None, why)."""
    if not LIBRARY.exists():
        return None, f"this package was built without its CUDA part ({LIBRARY.name} is missing); {BUILD_HINT}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"{LIBRARY.name} does not load: {error}"
    library.w4_register.restype = ctypes.c_char_p
    library.w4_instance_name.restype = ctypes.c_char_p
    library.w4_instance_name.argtypes = [ctypes.c_int]
    library.w4_explain.restype = ctypes.c_int
    library.w4_explain.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_int] * 4 + [ctypes.c_char_p, ctypes.c_int]
    refusal = library.w4_register()
    if refusal:
        return None, f"{LIBRARY.name} cannot bind to torch {torch.__version__}: {refusal.decode()}"
    return library, ""


def register() -> None:
    """Adds the CUDA kernels to the op, or a stand-in that raises with the reason."""
    library, why = _load()
    if library is not None:
        return

    def unavailable(*args: object) -> torch.Tensor:
        raise RuntimeError(f"w4linear.gemm on CUDA: {why}")

    global _stand_in
    _stand_in = torch.library.Library("w4linear", "IMPL")
    for name in ("gemm", "gemm_with_plan"):
        _stand_in.impl(name, unavailable, "CUDA")


_stand_in: torch.library.Library | None = None


def unsupported_device(device: torch.device) -> str | None:
    """Why a layer cannot run on this CUDA device, or None."""
    _, why = _load()
    if why:
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        have = ".".join(map(str, capability))
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {have}; the kernels need 8.0 or newer"
    return None


def status() -> BackendStatus:
    """Whether the CUDA kernels can run in this process, and on which GPUs."""
    _, why = _load()
    if why:
        return BackendStatus(False, why)
    if not torch.cuda.is_available():
        build = torch.version.cuda or "none, a CPU build"
        return BackendStatus(
            False,
            f"torch {torch.__version__} (CUDA {build}) sees no GPU; this library was built with CUDA {built_with()} "
            "and needs a driver for it (CUDA 13: 580 or newer)",
        )
    gpus = []
    for index in range(torch.cuda.device_count()):
        why = unsupported_device(torch.device("cuda", index)) or ""
        gpus.append(f"{torch.cuda.get_device_name(index)}{f' (not usable: {why})' if why else ''}")
    usable = any("not usable" not in gpu for gpu in gpus)
    return BackendStatus(usable, f"{', '.join(gpus)}; {len(instances())} kernel instances")


def built_with() -> str:
    """CUDA version of the compiler that built the library, as "13.0"; "none" without it."""
    library, _ = _load()
    if library is None:
        return "none"
    version = library.w4_cuda_version()
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def instances() -> tuple[str, ...]:
    """Names of the compiled kernel instances, in the order of csrc/sm80/instances.def; empty without the library."""
    library, _ = _load()
    if library is None:
        return ()
    return tuple(library.w4_instance_name(i).decode() for i in range(library.w4_instance_count()))


def explain(
    m: int,
    n: int,
    k: int,
    group: int,
    *,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
    sm: int = 90,
    sm_count: int = 132,
) -> str:
    """The plan that dispatch would choose for one GEMM and the cost of each candidate, one a line.

    Args:
        m, n, k: tokens, out and in features. group: packed group size.
        sm: compute capability times 10. sm_count: multiprocessors of the card.

    Raises:
        RuntimeError: without the CUDA library, with the reason.
    """
    library, why = _load()
    if library is None:
        raise RuntimeError(f"w4linear: {why}")
    size = 1 << 16
    text = ctypes.create_string_buffer(size)
    library.w4_explain(m, n, k, group, int(dtype == torch.bfloat16), int(symmetric), sm, sm_count, text, size)
    return text.value.decode()
