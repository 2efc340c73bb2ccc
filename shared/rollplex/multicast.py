"""NVLink's multicast, which nothing of Rollplex uses.

Owns the variables that keep it off. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NO_MULTICAST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
)
"""For every process that works together with others on several GPUs: one that ends in the middle of a multicast can
leave the GPUs of a host unusable."""
