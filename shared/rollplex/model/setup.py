"""How a worker process sets torch up before its first tensor.

Owns the process-wide settings that decide bits and speed. Knows nothing of models.
"""

from __future__ import annotations

import os

import torch

from rollplex.errors import EngineError
from rollplex.model.device import torch_device
from rollplex.protocol.common import Memory, ModelSpec

CUBLAS_WORKSPACE = ":4096:8"
"""With workspaces of its own per stream cuBLAS takes the same kernels each time; torch refuses determinism without."""


def prepare_torch(spec: ModelSpec) -> torch.device:
    """Threads, precision and determinism as the run wants them, the same in every worker.

    One intra-op thread per process by default: two pools of spinning OpenMP threads on two cores run ten times slower.

    Returns:
        Where this process computes.

    Raises:
        EngineError: torch sees no GPU where one is wanted.
    """
    torch.set_num_threads(spec.threads)
    if spec.device is Memory.CUDA:
        _prepare_cuda(deterministic=spec.deterministic)
    torch.use_deterministic_algorithms(spec.deterministic)
    return torch_device(spec.device)


def _prepare_cuda(*, deterministic: bool) -> None:
    # Read by torch and cuBLAS when they first touch the GPU, which nothing has done yet.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    if not torch.cuda.is_available():
        raise EngineError(
            "torch sees no GPU",
            got=f"torch {torch.__version__}, CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
            needed="one GPU, as device.kind is cuda",
            do="Install a CUDA build of torch, look at nvidia-smi, or set device.kind: host.",
        )
    # float32 is float32: TF32 would round what the tests and the fp32 master weights rely on.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # Parts of one bfloat16 product are summed in float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # Under determinism torch would fill every empty tensor with NaN: a kernel for each, and it changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
