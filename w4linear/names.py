"""Which module names a pattern of ``include`` or ``exclude`` means."""

from __future__ import annotations

import fnmatch
import re


def matches(name: str, pattern: str) -> bool:
    """Whether a module name is meant by a pattern of ``include`` or ``exclude``.

    A plain pattern is a full name, its ending, or the name of a module above it, cut at dots. One with ``*``, ``?`` or
    ``[`` is a shell pattern for a full name or its ending. One that starts with ``re:`` is a regular expression that
    matches the whole name.

    Example:
        >>> matches("model.layers.1.mlp.up_proj", "up_proj"), matches("model.layers.1.mlp.up_proj", "p_proj")
        (True, False)
        >>> matches("model.layers.1.mlp.up_proj", "layers.*.mlp.*"), matches("model.layers.11.mlp", "model.layers.1")
        (True, False)
        >>> matches("model.layers.1.mlp.up_proj", r"re:.*\\.1\\..*")
        True
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    parts = name.split(".")
    endings = [".".join(parts[i:]) for i in range(len(parts))]
    if any(c in pattern for c in "*?["):
        return any(fnmatch.fnmatchcase(ending, pattern) for ending in endings)
    pattern = pattern.rstrip(".")
    return pattern in endings or name.startswith(pattern + ".")
