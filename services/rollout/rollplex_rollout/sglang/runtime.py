"""SGLang's engine in a thread of its own.

Owns: SGLang's `Engine` object, its event loop, its processes and its folder of sockets. Knows neither units nor groups.
Of an engine of several ranks each process has one scheduler process; those of the other ranks than 0 have nothing else:
requests and calls go to rank 0, whose scheduler process passes them on.

    main thread                          SGLang's thread
    start(): Door.wait ◄─ connection ─── Engine(...) makes the processes, then waits for them
    submit(coroutine) ─────────────────► event loop: TokenizerManager, one task per request
    call(...), with a deadline ────────► event loop
    close() ───────────────────────────► the loop stops; the processes are killed

Why a thread: SGLang installs handlers of SIGTERM and SIGQUIT if it is made in the main thread, and the latter kills the
whole process without a word. Here the handlers are ours: a child that fails sends SIGQUIT, which is noted, and whoever
waits raises an error that says so. The thread must outlive the processes: they ask the kernel to be killed when the
thread that made them ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from rollplex.errors import EngineError
from rollplex.layout.shape import ModelShape
from rollplex_rollout.sglang import leftovers, wire
from rollplex_rollout.sglang.hooks import BUSY
from rollplex_rollout.sglang.remote import Door, RemoteWeights
from rollplex_rollout.sglang.requests import Pictures, Request
from rollplex_rollout.sglang.streams import Chunk

START_DEADLINE_S: Final = 600.0
"""Imports, compilation of kernels on a fresh machine, capture of CUDA graphs."""
LOAD_DEADLINE_S: Final = 300.0
CALL_DEADLINE_S: Final = 60.0
CLOSE_DEADLINE_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.25
RENDEZVOUS_VARIABLE: Final = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""Where the ranks of an engine meet. SGLang's own way is torch's TCP store, which listens on every address of the
machine and asks nobody who he is; a file does for one rank and for several."""

log = logging.getLogger("rollplex.rollout.sglang")
_T = TypeVar("_T")


class SglangRuntime:
    """A running engine. Methods are for the main thread, unless they say otherwise."""

    def __init__(self, folder: Path, meeting: Path | None = None) -> None:
        """meeting: the file by which the ranks of the engine find each other, not there yet; None: there is one rank,
        and the file is in the folder."""
        self.folder = folder
        self._meeting = meeting or folder / "rendezvous"
        self._engine: Any = None
        self._managers: list[Any] = []
        """SGLang's TokenizerManager, of rank 0, as soon as it has sockets: also of an engine that is never whole."""
        self._failure: BaseException | None = None
        self._up = threading.Event()
        self._quits: list[int] = []
        self._children: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._old_quit: Any = None

    def start(self, arguments: dict[str, Any], take: Callable[[RemoteWeights], _T]) -> tuple[RemoteWeights, _T]:
        """Start SGLang; returns when it is ready.

        Args:
            arguments: of ServerArgs.
            take: called with the connection to the scheduler process, which waits for the weights.

        Raises:
            EngineError: it did not start, or one of its processes ended.
            RollplexError: what `take` raises.
            WaitError: not ready by the deadline.
        """
        rendezvous = _rendezvous(self._meeting)
        if threading.current_thread() is threading.main_thread():
            self._old_quit = signal.signal(signal.SIGQUIT, lambda signum, _frame: self._quits.append(signum))
        door = Door(self.folder / "weights.sock")
        os.environ[wire.SOCKET_VARIABLE] = str(door.path)
        os.environ[RENDEZVOUS_VARIABLE] = rendezvous
        _let_preload_find_libraries()
        self._thread = threading.Thread(target=self._run, args=(arguments,), name="sglang", daemon=True)
        self._thread.start()
        try:
            remote = door.wait(START_DEADLINE_S, self.require_alive)
            taken = take(remote)
        finally:
            door.close()
        self._wait(self._up.is_set, START_DEADLINE_S, "SGLang's engine to be ready")
        return remote, taken

    def leave_pixels(self, shape: ModelShape) -> None:
        """Before the first request: SGLang is told where pictures lie, and is not given their pixels."""
        from rollplex_rollout.sglang.pictures import PictureProcessor  # noqa: PLC0415 - imports SGLang

        if self._engine.tokenizer_manager is not None:
            self._engine.tokenizer_manager.mm_processor = PictureProcessor(shape)

    def require_alive(self) -> None:
        """Raise EngineError if SGLang or one of its processes has ended."""
        reason = self.trouble()
        if reason:
            raise EngineError(
                "SGLang has failed",
                got=reason,
                do="Look at the messages of SGLang in the log of the rollout process.",
            ) from self._failure

    def trouble(self) -> str:
        """What has ended; empty while all is well."""
        if self._failure is not None:
            return f"{type(self._failure).__name__}: {self._failure}"
        ended = [pid for pid, fd in self._children.items() if select.select([fd], [], [], 0)[0]]
        if ended:
            return f"its process {ended[0]} has ended"
        return "one of its processes reported a failure (SIGQUIT)" if self._quits else ""

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine in SGLang's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._engine.loop)

    async def stream(self, request: Request, pictures: Pictures | None) -> AsyncIterator[Chunk]:
        """The chunks of one request with these pictures. In SGLang's event loop."""
        chunks = await self._engine.async_generate(
            input_ids=request.input_ids,
            image_data=None if pictures is None else [pictures],
            sampling_params=request.sampling,
            return_logprob=True,
            stream=True,
            rid=request.rid,
        )
        async for chunk in chunks:
            yield chunk

    def abort_all(self) -> None:
        """Ask SGLang to end every request; they may still be running when this returns."""

        async def abort() -> None:
            self._engine.tokenizer_manager.abort_request(abort_all=True)

        self._call(abort(), "SGLang to abort its requests")

    def rpc(self, method: str, **parameters: bool | float | str) -> None:
        """Call a method of the Scheduler between two of its steps; again while it is busy, up to the deadline.

        Raises:
            EngineError: it raised; or one of SGLang's processes ended.
            WaitError: no answer by the deadline.
        """
        end = time.monotonic() + CALL_DEADLINE_S
        while True:
            message = self._rpc(method, parameters)
            if not message:
                return
            if message != BUSY or time.monotonic() >= end:
                raise EngineError("SGLang's scheduler refused a call", got=message, where=method)
            time.sleep(0.005)

    def release_kv(self) -> None:
        """Give the pool's memory back to the device. The scheduler must be idle."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput  # noqa: PLC0415

        manager = self._engine.tokenizer_manager
        work = manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]), None)
        self._call(work, "SGLang to give its pool of keys and values back")

    def resume_kv(self) -> None:
        """Take the pool's memory again; what is in it is worthless."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput  # noqa: PLC0415

        manager = self._engine.tokenizer_manager
        work = manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
        self._call(work, "SGLang to take its pool of keys and values")

    def info(self) -> dict[str, Any]:
        """SGLang's own account of itself: `max_total_num_tokens`, and of rank 0 `memory_usage` in gigabytes."""
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]  # noqa: SLF001 - Engine.get_server_info would run the loop
        if self._engine.tokenizer_manager is None:
            return {**scheduler}
        states = self._call(self._engine.tokenizer_manager.get_internal_state(), "SGLang to describe itself")
        return {**scheduler, "memory_usage": states[0]["memory_usage"]}

    def close(self) -> None:
        """End every process of SGLang and remove its files. Also after a start that failed.

        Raises:
            EngineError: a process is still there after the deadline.
        """
        engine, children = self._engine, self._children
        self._engine, self._children = None, {}
        try:
            if engine is not None:
                _stop_loop(engine.loop)
            if self._thread is not None:
                _kill_processes(engine)
                self._thread.join(CLOSE_DEADLINE_S)
            for context in _contexts(engine, self._managers):
                context.destroy(linger=0)
            self._managers.clear()
            left = [pid for pid, fd in children.items() if not select.select([fd], [], [], CLOSE_DEADLINE_S)[0]]
        except RuntimeError as error:
            raise EngineError("SGLang's processes cannot be ended", got=str(error)) from error
        finally:
            for fd in children.values():
                os.close(fd)
            if self._old_quit is not None:
                signal.signal(signal.SIGQUIT, self._old_quit)
                self._old_quit = None
            leftovers.remove(self.folder)
        if left:
            raise EngineError("SGLang's processes cannot be ended", got=f"pids {left}")

    def _run(self, arguments: dict[str, Any]) -> None:
        try:
            with _temporary(self.folder):
                engine = _make(arguments, self._managers.append, self._watch_children)
        except BaseException as error:  # noqa: BLE001 - outer loop of the thread: the main thread must hear of it
            self._failure = error
            return
        self._engine = engine
        self._up.set()
        engine.loop.run_forever()
        engine.loop.close()

    def _watch_children(self, pids: list[int]) -> None:
        for pid in pids:
            self._children[pid] = os.pidfd_open(pid)

    def _rpc(self, method: str, parameters: dict[str, Any]) -> str:
        """The error of one call; empty if there was none."""
        import zmq  # noqa: PLC0415
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send  # noqa: PLC0415

        sock = self._engine.send_to_rpc
        sock_send(sock, RpcReqInput(method=method, parameters=parameters))
        self._wait(lambda: bool(sock.poll(int(_LOOK_EVERY_S * 1000))), CALL_DEADLINE_S, f"SGLang to run {method}", 0.0)
        answer = sock_recv(sock, flags=zmq.NOBLOCK)
        return "" if answer.success else answer.message or "no reason given"

    def _call(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        future = self.submit(work)
        try:
            self._wait(future.done, CALL_DEADLINE_S, what)
        finally:
            if not future.done():
                future.cancel()
        return future.result()

    def _wait(self, ready: Callable[[], bool], deadline_s: float, what: str, pause_s: float = 0.002) -> None:
        end, look = time.monotonic() + deadline_s, 0.0
        while not ready():
            now = time.monotonic()
            if now >= look:
                self.require_alive()
                look = now + _LOOK_EVERY_S
            if now >= end:
                raise EngineError("SGLang does not answer", got=f"nothing within {deadline_s:.0f} s", needed=what)
            time.sleep(pause_s)


def _make(arguments: dict[str, Any], connected: Callable[[Any], None], started: Callable[[list[int]], None]) -> Any:
    """SGLang's engine.

    Args:
        connected: called with its TokenizerManager when that has its sockets.
        started: called with its processes when all is well.
    """
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager  # noqa: PLC0415
    from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: PLC0415

    from rollplex_rollout.sglang.scheduler import run_scheduler  # noqa: PLC0415

    class KnownManager(TokenizerManager):  # type: ignore[misc]
        def init_ipc_channels(self, port_args: Any) -> None:
            super().init_ipc_channels(port_args)
            connected(self)

    class MappedEngine(Engine):  # type: ignore[misc]
        """Its scheduler processes map the weights (SGLang offers these fields for such use)."""

        run_scheduler_process_func = staticmethod(run_scheduler)
        init_tokenizer_manager_func = staticmethod(partial(init_tokenizer_manager, TokenizerManagerClass=KnownManager))

    loop = asyncio.new_event_loop()  # for whatever SGLang makes before it has its own
    asyncio.set_event_loop(loop)
    engine = MappedEngine(**arguments)
    loop.close()
    started(engine.get_all_child_pids())
    return engine


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what runs in SGLang's event loop, and end it."""

    async def stop() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=1.0) if others else None
        loop.stop()

    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(stop(), loop=loop))


def _contexts(engine: Any, managers: Sequence[Any]) -> list[Any]:
    """SGLang's sockets in this process, by their contexts. It would leave them open, and the collector, which ends a
    context before its sockets, would wait for them."""
    sockets = [sock for manager in managers for sock in (manager.recv_from_detokenizer, manager.send_to_scheduler)]
    if engine is not None and engine.send_to_rpc is not None:
        sockets.append(engine.send_to_rpc)
    return list({id(sock.context): sock.context for sock in sockets}.values())


def _kill_processes(engine: Any) -> None:
    """Kill every process below this one: SGLang has no other way, and this process starts no others.

    Raises:
        RuntimeError: one is still there after a minute.
    """
    if "sglang.srt.utils" not in sys.modules:
        return
    from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

    if engine is None:
        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=CLOSE_DEADLINE_S)
        return
    atexit.unregister(engine.shutdown)
    engine.shutdown()


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """SGLang makes its sockets where temporary files go; nobody else may reach them."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _rendezvous(file: Path) -> str:
    """The address of a file, for torch.distributed.

    Raises:
        EngineError: the path has characters that end the path of an address.
    """
    if set(str(file)) & set("?#;"):
        raise EngineError(
            "SGLang's folder in the run directory has a path that torch cannot be told",
            got=str(file),
            needed="a path without ?, # and ;",
            do="Choose another run directory.",
        )
    return f"file://{file}"


def _let_preload_find_libraries() -> None:
    """SGLang's memory saver is preloaded into the scheduler process, before torch could load the CUDA runtime that it
    needs; where only Python packages bring one, the loader must be told where."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec is not None else []
    folders = [str(found.parent) for root in roots for found in root.glob("*/lib/libcudart.so.*")]
    known = os.environ.get("LD_LIBRARY_PATH", "")
    new = [folder for folder in folders if folder not in known.split(":")]
    os.environ["LD_LIBRARY_PATH"] = ":".join([part for part in (known, *new) if part])


def make_folder(run_dir: Path | None) -> Path:
    """A new folder for the sockets of one engine, mode 0700, in the run directory; those of processes that are gone are
    removed (a worker ends without tidying up)."""
    if run_dir is not None:
        for old in run_dir.glob("sglang-*-*"):
            pid = old.name.split("-")[1]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                leftovers.remove(old)
    return Path(tempfile.mkdtemp(prefix=f"sglang-{os.getpid()}-", dir=run_dir))
