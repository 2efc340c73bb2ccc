"""The same model with fewer passes over memory: the fast path of half precision on a GPU.

Norms, rotations and gates are one kernel each; q|k|v and gate|up are one product each over the stored, fused weights,
the vision MLP's in their padded width, which the matrix units take in full tiles. transformers' modules stay the slow
path that this is held to (tests/model/test_fused.py).
"""

from rollplex.model.fused.modules import fuse

__all__ = ["fuse"]
