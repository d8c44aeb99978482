"""What can run a packed layer here, and why not where it cannot: `backends`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendStatus:
    """One backend's state.

    Attributes:
        available: whether a layer on this device type runs.
        detail: what it uses, or why it is missing and the way out.
    """

    available: bool
    detail: str


def backends() -> dict[str, BackendStatus]:
    """{"cuda": status, "cpu": status} for this process.

    Example:
        >>> backends()["cpu"].available
        True
    """
    from w4linear.backends import cpu, cuda

    return {"cuda": cuda.status(), "cpu": cpu.status()}
