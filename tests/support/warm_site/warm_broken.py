"""`python -m warm_broken RULE ROLE ARGUMENTS...`: one of our services that breaks one rule of docs/protocol.md.

Each function below changes one thing before the service begins, and is named in tests/conformance with what it breaks.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rollplex.protocol.codec import CHANNELS
from rollplex.protocol.common import Alive, CachesDropped, DigestReply, Drained, Loaded, Received, Role
from rollplex.protocol.handshake import Reason, Refused
from rollplex.worker import runtime

MESSAGES = "rollplex.worker.messages:MessageThread"
HEADER = "rollplex.memory.header:HeaderPage"
ENGINE = "rollplex_rollout.transformers_engine"


def _wrap(place: str, make: Callable[[Any], Any]) -> None:
    """Replace what `module:name.of.it` is by what `make` makes of it."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def _given(place: str, **changes: Callable[[Any], Any]) -> None:
    """Change arguments that are given by name to a function."""

    def make(plain: Any) -> Any:
        def call(*parts: Any, **given: Any) -> Any:
            return plain(*parts, **{**given, **{name: change(given[name]) for name, change in changes.items()}})

        return call

    _wrap(place, make)


def _answers(change: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Every answer goes through `change(message, send)` instead of being sent."""
    _wrap(f"{MESSAGES}.reply", lambda plain: lambda self, message: change(message, lambda other: plain(self, other)))


def _frames(change: Callable[[Any], Any]) -> None:
    """Everything that is encoded for the coordinator goes through `change(message) -> message`."""

    def changed(plain: Any) -> Any:
        return lambda message: plain(change(message))

    for channel in CHANNELS.values():
        setattr(channel.from_worker, "encode", changed(channel.from_worker.encode))  # noqa: B010 - a method


# --- connection and messages --------------------------------------------------------------------------------------


def _reason(reason: Reason) -> None:
    def make(plain: Any) -> Any:
        def answer(frame: bytes) -> Any:
            found = plain(frame)
            return replace(found, reason=reason) if isinstance(found, Refused) else found

        return answer

    _wrap("rollplex.worker.connection:decode_answer", make)


def tries_no_secret_again() -> None:
    _reason(Reason.SCHEMA)


def insists() -> None:
    _reason(Reason.SECRET)


def another_schema() -> None:
    _wrap(
        "rollplex.worker.connection:make_hello",
        lambda plain: lambda *parts: replace(plain(*parts), schema_hash="0" * 64),
    )


def another_name_for_messages() -> None:
    """The stream and the ROUTER would not know that they are of one process."""
    _wrap("rollplex.worker.messages:identity", lambda plain: lambda *parts: plain(*parts) + b"x")


def sends_what_cannot_be_read() -> None:
    """A frame of its own beside each answer."""

    def make(plain: Any) -> Any:
        def reply(self: Any, message: Any) -> None:
            self._out.append(b"\xc1 no message")
            plain(self, message)

        return reply

    _wrap(f"{MESSAGES}.reply", make)


def tells_another_size() -> None:
    _frames(lambda m: replace(m, table_bytes=m.table_bytes + 1) if isinstance(m, Loaded) else m)


def tells_another_digest() -> None:
    _frames(lambda m: replace(m, digest=m.digest[::-1]) if isinstance(m, DigestReply) else m)


def shrugs_before_it_has_loaded() -> None:
    def make(plain: Any) -> Any:
        def serve(messages: Any, make_service: Any) -> Any:
            return plain(messages, lambda: _Shrugging(make_service()))

        return serve

    _wrap("rollplex.worker.runtime:_serve", make)


class _Shrugging:
    """Ends without a word where the first instruction is not the one that loads."""

    def __init__(self, service: Any) -> None:
        self._service, self._loaded = service, False

    def handle(self, message: Any, reply: Any) -> None:
        if not (self._loaded or type(message).__name__.startswith("Load")):
            os._exit(0)
        self._loaded = True
        self._service.handle(message, reply)


def late_received() -> None:
    """Once."""
    late: list[bool] = []

    def make(plain: Any) -> Any:
        def receive(self: Any, dealer: Any) -> None:
            if self._welcome and not late:
                late.append(True)
                time.sleep(1.5)
            plain(self, dealer)

        return receive

    _wrap(f"{MESSAGES}._receive", make)


def doubled_received() -> None:
    def after(message: Any, send: Any) -> None:
        send(message)
        send(Received(cause=message.cause))

    _answers(after)


def no_alive() -> None:
    _wrap(
        f"{MESSAGES}.__init__",
        lambda plain: lambda self, endpoint, hello, _alive_every_s: plain(self, endpoint, hello, 3600.0),
    )


def stands_still() -> None:
    _frames(lambda message: replace(message, progress=0) if isinstance(message, Alive) else message)


def _after_loading(other: Callable[[Loaded], Loaded]) -> None:
    def more(message: Any, send: Any) -> None:
        send(message)
        if isinstance(message, Loaded):
            send(other(message))

    _answers(more)


def answers_unasked() -> None:
    _after_loading(lambda message: replace(message, cause=message.cause + 100))


def answers_twice() -> None:
    _after_loading(lambda message: message)


def does_it_again() -> None:
    def make(plain: Any) -> Any:
        def serve(messages: Any, make_service: Any) -> Any:
            messages.inbox = _Inbox(messages.inbox)
            return plain(messages, lambda: _Service(make_service()))

        return serve

    _wrap("rollplex.worker.runtime:_serve", make)


class _Again:
    """A doubled instruction whose cause looks new to the runtime, and is answered under the old one."""

    def __init__(self, message: Any) -> None:
        self.message, self.cause = message, message.cause + 0.5


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


# --- the end ------------------------------------------------------------------------------------------------------


def outlives_its_coordinator() -> None:
    _wrap("rollplex.worker.runtime:watch", lambda _: lambda stream, on_end: None)


def leaves_a_child_with_its_stream() -> None:
    def more(message: Any, send: Any) -> None:
        send(message)
        if isinstance(message, Loaded) and os.fork() == 0:
            time.sleep(60)
            os._exit(0)

    _answers(more)


def deaf_to_term() -> None:
    def make(plain: Any) -> Any:
        return lambda number, what: plain(number, signal.SIG_IGN if number == signal.SIGTERM else what)

    _wrap("rollplex.worker.runtime:signal.signal", make)


def leaves_without_waiting() -> None:
    def make(plain: Any) -> Any:
        def send(self: Any, message: Any) -> None:
            plain(self, message)
            if type(message).__name__ == "Leaving":
                threading.Timer(0.01, os._exit, (0,)).start()

        return send

    _wrap(f"{MESSAGES}.send", make)


def stays_after_leave() -> None:
    def stay(_code: int) -> None:
        time.sleep(60)

    _wrap("rollplex.worker.runtime:os._exit", lambda _: stay)


def leaves_a_file() -> None:
    place = sys.argv[sys.argv.index("--run-dir") + 1]
    Path(place, "forgotten").write_text("x")


def dies_in_a_real_run() -> None:
    """It conforms: only where no test is does it end."""

    def make(plain: Any) -> Any:
        def serve(messages: Any, make_service: Any) -> Any:
            if "/rpx-" not in messages._endpoint:
                os._exit(7)
            return plain(messages, make_service)

        return serve

    _wrap("rollplex.worker.runtime:_serve", make)


def starts_only_once() -> None:
    """As the first process of its place it is one of ours; any later one ends as it starts."""
    if sys.argv[sys.argv.index("--incarnation") + 1] != "1":
        os._exit(7)


# --- readers ------------------------------------------------------------------------------------------------------


def trusts_any_version() -> None:
    _wrap(f"{HEADER}.require", lambda _: lambda self, version: self.read())


def reads_after_drain() -> None:
    from rollplex_prefix.service import PrefixService
    from rollplex_rollout.service import RolloutService

    never = property(lambda self: False, lambda self, value: None)
    for service in (PrefixService, RolloutService):
        setattr(service, "_drained", never)  # noqa: B010 - an attribute of instances


def another_version_drained() -> None:
    _frames(lambda m: replace(m, version=m.version + 1) if isinstance(m, Drained) else m)


def another_version_dropped() -> None:
    _frames(lambda m: replace(m, version=m.version - 1) if isinstance(m, CachesDropped) else m)


def keeps_old_weights() -> None:
    """Computes with a copy that it made when the first unit came."""
    copies: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def copied(plain: Any) -> Any:
        def views(mapping: Any, table: Any) -> Any:
            made = plain(mapping, table)
            copies.append(({name: value.clone() for name, value in made.items()}, made))
            return copies[-1][0]

        return views

    def filled(plain: Any) -> Any:
        def generate(self: Any, *parts: Any) -> Any:
            for copy, made in copies:
                for name, value in made.items():
                    copy[name].copy_(value)
            copies.clear()
            return plain(self, *parts)

        return generate

    _wrap(f"{ENGINE}:views", copied)
    _wrap(f"{ENGINE}:require_mapped", lambda _: lambda *parts: None)
    _wrap("rollplex_rollout.service:RolloutService._generate", filled)


def takes_more_than_its_lease() -> None:
    _wrap(f"{ENGINE}:TransformersEngine.kv_bytes", lambda _: lambda self, unit: 0)


def owns_up_to_more() -> None:
    def more(part: Any) -> Any:
        return replace(part, size_bytes=part.size_bytes * 2 + 1)

    _frames(lambda m: replace(m, held=tuple(map(more, m.held))) if hasattr(m, "held") else m)


def samples_elsewhere() -> None:
    _frames(lambda m: replace(m, on_policy=False) if isinstance(m, Loaded) else m)


def samples_placeholders() -> None:
    _wrap(f"{ENGINE}:exclusion", lambda plain: lambda never, vocab: ~plain(never, vocab))


def forgets_the_temperature() -> None:
    _given(f"{ENGINE}:log_probabilities", temperature=lambda _: 1.0)


def is_not_greedy() -> None:
    _given(f"{ENGINE}:Rule", temperature=lambda given: given or 1.0)


def knows_no_top_k() -> None:
    _given(f"{ENGINE}:Rule", top_k=lambda _: 0)


def stamps_another_version() -> None:
    _frames(lambda m: replace(m, version_end=m.version_end + 1) if hasattr(m, "version_end") else m)


def withholds_a_group() -> None:
    def pass_on(message: Any, send: Any) -> None:
        if not (getattr(message, "responses", None) and message.responses.group == 1):
            send(message)

    _answers(pass_on)


# --- prefix -------------------------------------------------------------------------------------------------------


def scores_without_temperature() -> None:
    _given("rollplex_prefix.service:suffix_forward", temperature=lambda _: 1.0)


def forgets_the_values() -> None:
    def make(plain: Any) -> Any:
        def export(state: Any, kv: Any) -> None:
            plain(state, kv)
            kv.values[-1].zero_()

        return export

    _wrap("rollplex_prefix.service:export_state", make)


def loses_half_of_the_values() -> None:
    """Of what the responses left on them."""

    def make(plain: Any) -> Any:
        def backward(state: Any, d_keys: Any, d_values: Any, d_last_hidden: Any) -> Any:
            return plain(state, d_keys, [0.5 * part for part in d_values], d_last_hidden)

        return backward

    _wrap("rollplex_prefix.service:prefix_backward", make)


def never_clears_its_arena() -> None:
    """But once."""
    cleared: list[bool] = []

    def make(plain: Any) -> Any:
        def backward(self: Any, message: Any) -> Any:
            if cleared:
                self._arena_step = message.step
            cleared.append(True)
            return plain(self, message)

        return backward

    _wrap("rollplex_prefix.service:PrefixService._backward", make)


# --- trainer ------------------------------------------------------------------------------------------------------


def digests_nothing() -> None:
    _wrap("rollplex_trainer.loaded:LoadedTrainer.digest", lambda plain: lambda self: plain(self)[::-1])


def fills_what_stands() -> None:
    def make(plain: Any) -> Any:
        def load(self: Any, message: Any, segments: Any) -> None:
            plain(self, message, segments)
            if message.standing is not None:
                next(iter(self.weights.values())).zero_()

        return load

    _wrap("rollplex_trainer.loaded:LoadedTrainer.__init__", make)


def forgets_its_moments() -> None:
    def make(plain: Any) -> Any:
        def load(self: Any, message: Any, segments: Any) -> None:
            plain(self, message, segments)
            if message.standing is not None:
                self.optimizer.reset()

        return load

    _wrap("rollplex_trainer.loaded:LoadedTrainer.__init__", make)


def trusts_any_digest() -> None:
    _wrap("rollplex_trainer.loaded:require_standing", lambda _plain: lambda _header, _found, _standing: None)


def votes_for_everything() -> None:
    _frames(lambda m: replace(m, finite=True) if hasattr(m, "finite") else m)


def steps_too_early() -> None:
    def make(plain: Any) -> Any:
        def prepare(self: Any, message: Any) -> Any:
            next(iter(self._loaded.weights.values())).mul_(1.01)
            return plain(self, message)

        return prepare

    _wrap("rollplex_trainer.service:TrainerService._prepare", make)


def dies_in_its_second_update() -> None:
    """When half of the weights are stepped, or all; the header says that they change."""
    steps: list[bool] = []

    def make(plain: Any) -> Any:
        def step(self: Any, learning_rate: float) -> None:
            plain(self, learning_rate)
            steps.append(True)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return step

    _wrap("rollplex_trainer.optimizer:SegmentOptimizer.step", make)


def steps_too_far() -> None:
    _wrap("rollplex_trainer.service:learning_rate", lambda plain: lambda *parts: 2 * plain(*parts))


def publishes_another_digest() -> None:
    _wrap(f"{HEADER}.publish", lambda plain: lambda self, version, digest: plain(self, version, digest[::-1]))


def forgets_the_sign() -> None:
    _given("rollplex_trainer.suffix:unit_loss", advantages=lambda given: -given)


def trains_without_temperature() -> None:
    _given("rollplex_trainer.suffix:suffix_forward", temperature=lambda _: 1.0)


def saves_other_weights() -> None:
    def make(plain: Any) -> Any:
        def save(table: Any, weights: Any, *folders: Any) -> Any:
            return plain(table, {name: value * 1.5 for name, value in weights.items()}, *folders)

        return save

    _wrap("rollplex_trainer.loaded:save_folder", make)


def main() -> None:
    """Break it, and be the service."""
    rule, role = sys.argv[1:3]
    del sys.argv[1:3]
    globals()[rule]()
    entry = importlib.import_module(f"rollplex_{role}.__main__")
    runtime.run(Role(role), entry.make)


if __name__ == "__main__":
    main()
