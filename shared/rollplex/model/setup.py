"""How a worker process sets torch up before its first tensor.

Owns the process-wide settings that decide bits and speed. Knows nothing of models.
"""

from __future__ import annotations

import torch

from rollplex.protocol.common import ModelSpec


def prepare_torch(spec: ModelSpec) -> None:
    """Threads and determinism as the run wants them, the same in every worker.

    One intra-op thread per process by default: two pools of spinning OpenMP threads on two cores run ten times slower.
    """
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(spec.deterministic)
