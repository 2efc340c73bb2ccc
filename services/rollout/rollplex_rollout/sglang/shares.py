"""Decoding on a share of the GPU's multiprocessors, for SGLang 0.5.17.

Owns: a second set of SGLang's decode graphs, captured on a stream that keeps to the first multiprocessors, and the
choice between the two sets before each step. Everything else of SGLang keeps the whole device: prefill needs it, and
the short kernels around a graph find the multiprocessors free that prefix work does not keep to.

    captured   DecodeCudaGraphRunner.capture ▸ for each batch size FullCudaGraphBackend.capture_one: as ever, then again
    replayed   FullCudaGraphBackend.replay: the second graph while prefix work runs beside, else the first

A graph keeps the multiprocessors of the stream that it was captured on, wherever it is launched. Both sets read the
same buffers and write the same logits; only one runs at a time. A batch larger than the largest graph is computed
without one, on the whole device. The memory of the second set is private memory of the engine, as the first's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from rollplex.errors import EngineError
from rollplex.multiprocessors import Multiprocessors, Side, Watch
from rollplex.multiprocessors.green import GreenDriver

_RUNNER: Final = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_BACKEND: Final = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
CAPTURE: Final = f"{_RUNNER}.capture"
CAPTURE_ONE: Final = f"{_BACKEND}.capture_one"
REPLAY: Final = f"{_BACKEND}.replay"

log = logging.getLogger("rollplex.rollout.sglang")


class LimitedDecoding:
    """Hooks around SGLang's capture and replay of decode graphs.

    Args:
        stream: keeps to the share.
        beside: whether prefix work runs beside the rollout now.
    """

    def __init__(self, stream: torch.cuda.Stream, beside: Callable[[], bool]) -> None:
        self._stream = stream
        self._beside = beside
        self._decode = False
        self._limited: WeakKeyDictionary[Any, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()

    def capture(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the capture of all decode graphs: those of prefill, if there are any, are left as they are."""
        self._decode = True
        try:
            return original(*args, **kwargs)
        finally:
            self._decode = False

    def capture_one(
        self, original: Callable[..., Any], backend: Any, shape_key: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Around the capture of one graph: once as SGLang does, once on the share's stream."""
        original(backend, shape_key, *args, **kwargs)
        if not self._decode:
            return
        whole, stream = self._taken(backend, shape_key), backend._capture_stream  # noqa: SLF001 - SGLang has no way in
        self._stream.wait_stream(stream)
        backend._capture_stream = self._stream  # noqa: SLF001
        try:
            with torch.cuda.stream(self._stream):
                original(backend, shape_key, *args, **kwargs)
        finally:
            backend._capture_stream = stream  # noqa: SLF001
        stream.wait_stream(self._stream)
        self._limited.setdefault(backend, {})[shape_key] = self._taken(backend, shape_key)
        backend._graphs[shape_key], backend._outputs[shape_key] = whole  # noqa: SLF001

    def replay(self, original: Callable[..., Any], backend: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a step that has a graph."""
        limited = self._limited.get(backend, {}).get(shape_key)
        if limited is None or not self._beside():
            return original(backend, shape_key, *args, **kwargs)
        graph, output = limited
        graph.replay()
        return output

    @staticmethod
    def _taken(backend: Any, shape_key: Any) -> tuple[Any, Any]:
        return backend._graphs[shape_key], backend._outputs[shape_key]  # noqa: SLF001


def limit_decoding(share: float, run_dir: str) -> None:
    """Make SGLang decode on the first multiprocessors while prefix work runs beside it. With share 1 nothing is done.

    Must be called before graphs are captured.

    Args:
        share: of the multiprocessors.
        run_dir: of the run, where the coordinator says whether prefix work runs; "": nowhere.

    Raises:
        EngineError: SGLang is not built as 0.5.17 is.
        MultiprocessorError, ConfigError: the GPU cannot be shared so.
    """
    if share == 1.0:
        return
    shares = Multiprocessors(GreenDriver)
    stream = torch.cuda.ExternalStream(shares.stream(share, Side.FIRST))  # type: ignore[no-untyped-call]
    install(LimitedDecoding(stream, watch(run_dir)))
    log.info("decodes on %d multiprocessors beside prefix work", shares.part(share, Side.FIRST).count)


def install(limited: LimitedDecoding) -> None:
    """Put the hooks around SGLang's methods.

    Raises:
        EngineError: one of them is not there. SGLang itself would only log that.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - SGLang's process only

    hooks = {CAPTURE: limited.capture, CAPTURE_ONE: limited.capture_one, REPLAY: limited.replay}
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = sorted(hooks.keys() - HookRegistry._patched)  # noqa: SLF001 - it has no other way to say so
    if missing:
        raise EngineError(
            "SGLang's decoding cannot be kept to a share of the GPU",
            got=f"no {', '.join(missing)}",
            needed="SGLang 0.5.17",
            do="Set device.decode_share to 1.",
        )


def watch(run_dir: str) -> Callable[[], bool]:
    """Whether prefix work runs beside the rollout, as the coordinator says; always, where none says so."""
    try:
        return Watch(Path(run_dir)) if run_dir else _always
    except (OSError, ValueError) as error:
        log.warning(
            "the coordinator does not say when prefix work runs (%s): decoding keeps to its share always", error
        )
        return _always


def _always() -> bool:
    return True
