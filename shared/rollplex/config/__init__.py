"""The YAML configuration. No torch.

load(file, ["a.b=v"]) ──► Config (frozen, checked) ──► wire.* ──► messages of rollplex.protocol
dump(config) ──► the same file with every default written out

The four names are imported when they are first used: `rollplex --help` needs the environment only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollplex.config.config import Config
    from rollplex.config.loading import dump, from_mapping, load

__all__ = ["Config", "dump", "from_mapping", "load"]

_MODULES = {"Config": "config", "dump": "loading", "from_mapping": "loading", "load": "loading"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
