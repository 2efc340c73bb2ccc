"""Read by every Python process of a node that runs SGLang without a GPU: its configuration may ask for that."""

from __future__ import annotations

import sys

if "rollplex_coordinator" in sys.orig_argv:
    from rollplex.config import checks

    checks.SGLANG_DEVICES = frozenset({"cuda", "host"})
