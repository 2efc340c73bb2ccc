"""`python -m warm_broken RULE ROLE ARGUMENTS...`: one of our services that breaks one rule of docs/protocol.md.

Each function below changes one thing before the service begins, and is named in tests/conformance as what it breaks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rollplex.memory.header import HeaderPage
from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import Alive, CachesDropped, Drained, Loaded, Received, Role
from rollplex.protocol.handshake import Reason, Refused
from rollplex.worker import connection, runtime
from rollplex.worker.messages import MessageThread

Wrap = Any


def _answers(change: Any) -> None:
    """Every answer goes through `change(message, send)` instead of being sent."""
    plain = MessageThread.reply

    def reply(self: MessageThread, message: Any) -> None:
        change(message, lambda other: plain(self, other))

    MessageThread.reply = reply  # type: ignore[method-assign]


def _frames(change: Any) -> None:
    """Everything that is encoded for the coordinator goes through `change(message) -> message`."""
    for channel in CHANNELS.values():
        plain = channel.from_worker.encode
        channel.from_worker.encode = lambda message, plain=plain: plain(change(message))


# --- connection and messages --------------------------------------------------------------------------------------


def tries_no_secret_again() -> None:
    def answer(frame: bytes) -> Any:
        found = connection_decode(frame)
        return replace(found, reason=Reason.SCHEMA) if isinstance(found, Refused) else found

    connection_decode = connection.decode_answer
    connection.decode_answer = answer


def insists() -> None:
    def answer(frame: bytes) -> Any:
        found = connection_decode(frame)
        return replace(found, reason=Reason.SECRET) if isinstance(found, Refused) else found

    connection_decode = connection.decode_answer
    connection.decode_answer = answer


def another_schema() -> None:
    plain = connection.make_hello
    connection.make_hello = lambda *parts: replace(plain(*parts), schema_hash="0" * 64)


def late_received() -> None:
    plain = MessageThread._receive

    def receive(self: MessageThread, dealer: Any) -> None:
        if self._welcome:
            time.sleep(1.5)
        plain(self, dealer)

    MessageThread._receive = receive  # type: ignore[method-assign]


def doubled_received() -> None:
    def after(message: Any, send: Any) -> None:
        send(message)
        send(Received(cause=message.cause))

    _answers(after)


def no_alive() -> None:
    plain = MessageThread.__init__

    def init(self: MessageThread, endpoint: str, hello: Any, _alive_every_s: float) -> None:
        plain(self, endpoint, hello, 3600.0)

    MessageThread.__init__ = init  # type: ignore[method-assign]


def stands_still() -> None:
    _frames(lambda message: replace(message, progress=0) if isinstance(message, Alive) else message)


def answers_unasked() -> None:
    def more(message: Any, send: Any) -> None:
        send(message)
        if isinstance(message, Loaded):
            send(replace(message, cause=message.cause + 100))

    _answers(more)


def answers_twice() -> None:
    def twice(message: Any, send: Any) -> None:
        send(message)
        if isinstance(message, Loaded):
            send(message)

    _answers(twice)


def does_it_again() -> None:
    plain = runtime._serve

    def serve(messages: Any, make: Any) -> int:
        messages.inbox = _Inbox(messages.inbox)
        return plain(messages, lambda: _Service(make()))

    runtime._serve = serve


class _Inbox:
    """Gives out a doubled instruction as one whose cause has risen."""

    def __init__(self, inbox: Any) -> None:
        self._inbox, self._seen = inbox, 0
        self.put = inbox.put

    def get(self) -> Any:
        message = self._inbox.get()
        cause = getattr(message, "cause", None)
        if cause == self._seen:
            return _Again(message)
        self._seen = cause or self._seen
        return message


class _Service:
    """Carries a doubled instruction out as if it were new."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def handle(self, message: Any, reply: Any) -> None:
        self._service.handle(message.message if isinstance(message, _Again) else message, reply)


class _Again:
    """A doubled instruction whose cause looks new to the runtime, and is answered under the old one."""

    def __init__(self, message: Any) -> None:
        self.message, self.cause = message, message.cause + 0.5


# --- the end ------------------------------------------------------------------------------------------------------


def outlives_its_coordinator() -> None:
    runtime.watch = lambda stream, on_end: None


def deaf_to_term() -> None:
    plain = signal.signal
    runtime.signal.signal = lambda number, what: plain(number, signal.SIG_IGN if number == signal.SIGTERM else what)  # type: ignore[misc]


def leaves_without_waiting() -> None:
    plain = MessageThread.send

    def send(self: MessageThread, message: Any) -> None:
        plain(self, message)
        if type(message).__name__ == "Leaving":
            threading.Timer(0.01, os._exit, (0,)).start()

    MessageThread.send = send  # type: ignore[method-assign]


def stays_after_leave() -> None:
    plain = os._exit
    runtime.os._exit = lambda code: time.sleep(60) or plain(code)  # type: ignore[misc]


def leaves_a_file() -> None:
    place = sys.argv[sys.argv.index("--run-dir") + 1]
    Path(place, "forgotten").write_text("x")


def dies_in_a_real_run() -> None:
    """It conforms: only where no test is does it end."""
    plain = runtime._serve

    def serve(messages: Any, make: Any) -> int:
        if messages._endpoint.find("/rpx-") < 0:
            os._exit(7)
        return plain(messages, make)

    runtime._serve = serve


# --- readers ------------------------------------------------------------------------------------------------------


def trusts_any_version() -> None:
    HeaderPage.require = lambda self, version: self.read()  # type: ignore[method-assign]


def reads_after_drain() -> None:
    from rollplex_prefix.service import PrefixService
    from rollplex_rollout.service import RolloutService

    for service in (PrefixService, RolloutService):
        service._drained = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


def another_version_drained() -> None:
    _frames(lambda m: replace(m, version=m.version + 1) if isinstance(m, Drained) else m)


def another_version_dropped() -> None:
    _frames(lambda m: replace(m, version=m.version - 1) if isinstance(m, CachesDropped) else m)


def keeps_old_weights() -> None:
    """Computes with a copy that it made when the first unit came."""
    from rollplex.memory import tensors
    from rollplex_prefix import loaded
    from rollplex_prefix import service as prefix
    from rollplex_rollout import service as rollout
    from rollplex_rollout import transformers_engine as engine

    plain = tensors.views
    copies: dict[int, Any] = {}

    def views(mapping: Any, table: Any) -> Any:
        made = plain(mapping, table)
        if table.header_bytes:
            copied = {name: value.clone() for name, value in made.items()}
            copies[len(copies)] = (copied, made)
            return copied
        return made

    def fill() -> None:
        for copied, made in copies.values():
            for name, value in made.items():
                copied[name].copy_(value)
        copies.clear()

    engine.views = loaded.views = views
    engine.require_mapped = prefix.require_mapped = lambda *_: None
    for service, method in ((rollout.RolloutService, "_generate"), (prefix.PrefixService, "_forward")):
        _before(service, method, fill)


def _before(service: Any, method: str, do: Any) -> None:
    plain = getattr(service, method)

    def first(self: Any, *parts: Any) -> Any:
        do()
        return plain(self, *parts)

    setattr(service, method, first)


def takes_more_than_its_lease() -> None:
    from rollplex_rollout.transformers_engine import TransformersEngine

    TransformersEngine.kv_bytes = lambda self, unit: 0  # type: ignore[method-assign]


def owns_up_to_more() -> None:
    _frames(lambda m: replace(m, held=tuple(_more(part) for part in m.held)) if hasattr(m, "held") else m)


def _more(part: Any) -> Any:
    return replace(part, size_bytes=part.size_bytes * 2 + 1)


def samples_elsewhere() -> None:
    _frames(lambda m: replace(m, on_policy=False) if isinstance(m, Loaded) else m)


def samples_placeholders() -> None:
    from rollplex_rollout import transformers_engine as engine

    plain = engine.exclusion
    engine.exclusion = lambda never, vocab: ~plain(never, vocab)


def forgets_the_temperature() -> None:
    from rollplex_rollout import transformers_engine as engine

    plain = engine.log_probabilities
    engine.log_probabilities = lambda logits, **given: plain(logits, **{**given, "temperature": 1.0})


def is_not_greedy() -> None:
    from rollplex_rollout import transformers_engine as engine

    plain = engine.Rule
    engine.Rule = lambda **given: plain(**{**given, "temperature": given["temperature"] or 1.0})  # type: ignore[misc,assignment]


def knows_no_top_k() -> None:
    from rollplex_rollout import transformers_engine as engine

    plain = engine.Rule
    engine.Rule = lambda **given: plain(**{**given, "top_k": 0})  # type: ignore[misc,assignment]


def stamps_another_version() -> None:
    _frames(lambda m: replace(m, version_end=m.version_end + 1) if hasattr(m, "version_end") else m)


def withholds_a_group() -> None:
    _answers(lambda m, send: None if getattr(m, "responses", None) and m.responses.group == 1 else send(m))


# --- prefix -------------------------------------------------------------------------------------------------------


def scores_without_temperature() -> None:
    from rollplex_prefix import service as prefix

    plain = prefix.suffix_forward
    prefix.suffix_forward = lambda *parts, **given: plain(*parts, **{**given, "temperature": 1.0})


def forgets_the_values() -> None:
    from rollplex_prefix import service as prefix

    plain = prefix.export_state

    def export(state: Any, kv: Any) -> None:
        plain(state, kv)
        kv.values[-1].zero_()

    prefix.export_state = export


def never_clears_its_arena() -> None:
    from rollplex_prefix.service import PrefixService

    def clear_once(self: Any) -> None:
        for value in self._loaded.gradients.values():
            value.zero_()
        self._arena_step = 2
        _Once.done = True

    class _Once:
        done = False

    plain = PrefixService._backward

    def backward(self: Any, message: Any) -> Any:
        if not _Once.done:
            clear_once(self)
        self._arena_step = message.step
        return plain(self, message)

    PrefixService._backward = backward  # type: ignore[method-assign]


# --- trainer ------------------------------------------------------------------------------------------------------


def digests_nothing() -> None:
    from rollplex_trainer.loaded import LoadedTrainer

    plain = LoadedTrainer.digest
    LoadedTrainer.digest = lambda self: plain(self)[::-1]  # type: ignore[method-assign]


def votes_for_everything() -> None:
    _frames(lambda m: replace(m, finite=True) if hasattr(m, "finite") else m)


def steps_too_early() -> None:
    from rollplex_trainer.service import TrainerService

    def nudge(self: Any, message: Any) -> Any:
        next(iter(self._loaded.weights.values())).mul_(1.01)
        return plain(self, message)

    plain = TrainerService._prepare
    TrainerService._prepare = nudge  # type: ignore[method-assign]


def steps_too_far() -> None:
    from rollplex_trainer import service

    plain = service.learning_rate
    service.learning_rate = lambda *parts: 2 * plain(*parts)


def publishes_another_digest() -> None:
    plain = HeaderPage.publish
    HeaderPage.publish = lambda self, version, digest: plain(self, version, digest[::-1])  # type: ignore[method-assign]


def forgets_the_sign() -> None:
    from rollplex_trainer import suffix

    plain = suffix.unit_loss
    suffix.unit_loss = lambda *parts, **given: plain(*parts, **{**given, "advantages": -given["advantages"]})


def saves_other_weights() -> None:
    from rollplex_trainer import loaded

    plain = loaded.save_folder

    def save(table: Any, weights: Any, *folders: Any) -> int:
        return plain(table, {name: value * 1.5 for name, value in weights.items()}, *folders)

    loaded.save_folder = save


def main() -> None:
    """Break it, and be the service."""
    rule, role = sys.argv[1:3]
    del sys.argv[1:3]
    globals()[rule]()
    module = {"rollout": "rollplex_rollout", "prefix": "rollplex_prefix", "trainer": "rollplex_trainer"}[role]
    entry = __import__(f"{module}.__main__", fromlist=["make"])
    runtime.run(Role(role), entry.make)


if __name__ == "__main__":
    main()
