"""The life of a run: claim, start, check, load, iterate, end.

    claim run dir ─► journal, API, children ─► data check ─► memory plan ─► load ─► work ─► last evaluations ─► end
                                                                            │ ▲
                                                          iteration, evaluation, checkpoint, idle

Owns the order of these and the exit code: 0 done, or stopped by SIGTERM or HTTP; 130 stopped by SIGINT; 1 an error; 2
a configuration that cannot run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import time

from rollplex.config.checks import TRAIN
from rollplex.config.config import Config
from rollplex.config.host import budget_bytes, memory_limit_bytes
from rollplex.config.loading import dump, load
from rollplex.config.wire import train_sampling
from rollplex.data.order import rows_of_step
from rollplex.errors import BudgetError, ConfigError, RollplexError
from rollplex.protocol.claim import Claim, claim
from rollplex.protocol.common import Role
from rollplex.worker.runtime import report
from rollplex_coordinator.budget import plan_memory
from rollplex_coordinator.checkpointing import Checkpoints
from rollplex_coordinator.context import Context
from rollplex_coordinator.control import HTTP, CoreControl
from rollplex_coordinator.evaluate import Evaluation
from rollplex_coordinator.events import ErrorRaised, RunEnded, RunStarted, StopRequested, StopWhen
from rollplex_coordinator.feed import Feed
from rollplex_coordinator.gate import Gate
from rollplex_coordinator.http.app import create_app
from rollplex_coordinator.http.server import Server, listen
from rollplex_coordinator.http.token import create_or_read
from rollplex_coordinator.iteration import Iteration
from rollplex_coordinator.ledger import Ledger
from rollplex_coordinator.link import WorkerFailed
from rollplex_coordinator.loading import check_data, load_models, open_rewards
from rollplex_coordinator.memory import Memory
from rollplex_coordinator.node import CHILDREN, DEVICE, WORKERS, Node
from rollplex_coordinator.options import Options
from rollplex_coordinator.phases import Phase
from rollplex_coordinator.progress import Progress
from rollplex_coordinator.sizes import Sizes
from rollplex_coordinator.stop import Signals, StopRun
from rollplex_coordinator.work import Work

EXIT_ERROR = 1
EXIT_CONFIG = 2
MAX_RUN_NAME = 40

log = logging.getLogger("rollplex.coordinator")


def run(options: Options, signals: Signals) -> int:
    """Run one coordinator to its end and return the process's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        config = load(options.config, options.overrides)
        run_id = f"{config.run.name[:MAX_RUN_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        with claim(options.run_dir, run_id) as claimed:
            return _Run(claimed, run_id, config, options, signals).main()
    except RollplexError as error:
        _say(f"error: {error}")
        return _exit_code(error)


class _Run:
    def __init__(self, claimed: Claim, run_id: str, config: Config, options: Options, signals: Signals) -> None:
        self._config = config
        self._options = options
        self._signals = signals
        self._progress = Progress()
        wanted = config.run.iterations if options.iterations is None else options.iterations
        if options.serve and options.iterations is None:
            wanted = 0
        listener = listen(config.http.host, config.http.port, allow_remote=config.http.allow_remote)
        self._node = Node(claimed, run_id, config, options, signals)
        self._work = Work(wanted, serve=options.serve)
        self._control = CoreControl(self._node, self._work)
        self._node.link.after_turn = self._node.record.tick
        run_dir = claimed.run_dir.path
        token = create_or_read(run_dir / "token")
        (run_dir / "config.yaml").write_text(dump(config), encoding="utf-8")
        hosts = () if config.http.is_loopback else (config.http.host, socket.gethostname())
        self._server = Server(create_app(self._control, run_dir / "journal.sqlite", token, hosts), listener)

    def main(self) -> int:
        """Everything between the claim and its release."""
        node = self._node
        reason, code = "done", 0
        try:
            self._live()
        except StopRun as stop:
            reason, code = str(stop), stop.exit_code
            if stop.source != HTTP:
                node.record.append(StopRequested(when=StopWhen.NOW, exit=True, source=stop.source))
            _say(f"rollplex: {reason}")
        except RollplexError as error:
            reason, code = str(error)[:4_000], _exit_code(error)
            self._tell_error(error)
        except Exception as error:
            reason, code = f"internal error: {error}"[:4_000], EXIT_ERROR
            log.exception("internal error in phase %s", node.record.phase.name)
        self._signals.escalate = self._kill_all
        node.record.append(RunEnded(run=node.run_id, exit_code=code, reason=reason))
        node.record.journal.flush()
        node.mailbox.close()
        self._server_stop()
        node.end("the run ended" if code == 0 else "the run was stopped or failed; the coordinator says why")
        return code

    # --- the run --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        node, config = self._node, self._config
        self._server.start()
        run_dir = node.run_dir
        (run_dir / "http.json").write_text(
            f'{{"url": "{self._server.url}", "run": "{node.run_id}"}}\n', encoding="utf-8"
        )
        _say(f"rollplex: run {node.run_id} in {run_dir}, API at {self._server.url} (token in {run_dir / 'token'})")
        node.record.append(
            RunStarted(
                run=node.run_id,
                pid=os.getpid(),
                host=socket.gethostname(),
                boot_id=_boot_id(),
                seed=config.run.seed,
                schedule=config.run.schedule,
                share_prefix=config.run.share_prefix,
                config_digest=hashlib.sha256(dump(config).encode()).hexdigest(),
            )
        )
        node.record.enter(Phase.LOAD)
        for role in (*CHILDREN, *WORKERS):
            node.start(role)
        context = self._load()
        if config.eval and any(e.every for e in config.eval) and self._work.iterate:
            self._evaluate(context, step=0, last=False)
        checkpoints = Checkpoints(context)
        while not self._work.last:
            if self._work.iterate:
                self._iterate(context, checkpoints)
            else:
                node.link.pump(lambda: self._work.iterate or self._work.checkpoint_wanted or self._work.last)
            if self._work.checkpoint_wanted:
                self._work.checkpoint_wanted = False
                checkpoints.save()
        if self._work.done:
            self._evaluate(context, step=self._work.done, last=True)
            if checkpoints.newest_version != node.record.version:
                checkpoints.save()

    def _load(self) -> Context:
        node, config = self._node, self._config
        node.link.await_peers([Role.INPUT], config.deadlines.start_s)
        data = check_data(node)
        sizes = Sizes(config)
        budget = budget_bytes(config, memory_limit_bytes())
        reservations = plan_memory(config, sizes, data, DEVICE, budget)
        ledger = Ledger({DEVICE: budget})
        memory = Memory(ledger, node.holder, node.record, DEVICE)
        for reservation in reservations:
            ledger.reserve(reservation)
        memory.enter(Phase.LOAD)
        self._control.memory = memory
        node.link.await_peers((*WORKERS, *CHILDREN), config.deadlines.start_s)
        load_models(node, memory, sizes, data)
        open_rewards(node)
        gate = Gate()
        for role in (Role.PREFIX, Role.ROLLOUT):
            gate.register_reader(role, on_policy=True)
        context = Context(
            config=config,
            run_dir=node.run_dir,
            link=node.link,
            memory=memory,
            record=node.record,
            feed=Feed(node.link, memory, config.deadlines.unit_s),
            gate=gate,
            sizes=sizes,
            data=data,
            sampling=train_sampling(config, stop_ids=data.stop_ids),
            restart_rewards=self._restart_rewards,
        )
        node.record.enter(Phase.IDLE)
        memory.enter(Phase.IDLE)
        return context

    def _iterate(self, context: Context, checkpoints: Checkpoints) -> None:
        done = self._work.done
        context.record.step = done
        ahead = self._rows(context, done + 1) if done + 1 < self._work.wanted else None
        row = Iteration(context, step=done, rows=self._rows(context, done), ahead=ahead).run()
        self._work.done = done + 1
        self._progress.iteration(done + 1, self._work.wanted, row)
        last = self._work.last
        if not last:
            self._evaluate(context, step=done + 1, last=False)
        if self._config.checkpoint.due(done + 1, last=last):
            checkpoints.save()
        context.record.step = None

    def _rows(self, context: Context, step: int) -> tuple[int, ...]:
        source = next(s for s in context.data.sources if s.name == TRAIN)
        good = source.num_rows if source.good_rows is None else source.good_rows
        data = self._config.data
        return rows_of_step(step, data.prompts_per_iteration, good, seed=self._config.run.seed, shuffle=data.shuffle)

    def _evaluate(self, context: Context, *, step: int, last: bool) -> None:
        for section in self._config.eval:
            if section.due(step, last=last):
                context.record.step = step
                self._progress.evaluation(section.name, step, Evaluation(context, section).run())
                context.record.step = None

    def _restart_rewards(self) -> None:
        """The child ended itself over a function that hung: a new one takes its place."""
        self._node.stop_child(Role.REWARD)
        self._node.start(Role.REWARD)
        self._node.link.await_peers([Role.REWARD], self._config.deadlines.start_s)
        open_rewards(self._node)

    # --- the end --------------------------------------------------------------------------------------------------

    def _tell_error(self, error: RollplexError) -> None:
        node = self._node
        step = node.record.step
        service = str(error.peer) if isinstance(error, WorkerFailed) else error.where
        role = error.peer.role if isinstance(error, WorkerFailed) else None
        place = f"phase {node.record.phase.name}" + ("" if step is None else f", step {step}")
        log_path = node.supervisor.log_text(role) if role is not None else ""
        details = error.report if isinstance(error, WorkerFailed) else report(error)
        node.record.append(
            ErrorRaised(
                error=details, phase=node.record.phase.name, step=step, service=service[:4_000], log_path=log_path
            )
        )
        kind = details.kind
        by = f"{service} reported " if role is not None else ""
        _say(f"error: {by}{kind} in {place}: {error}" + (f"\n  log: {log_path}" if log_path else ""))

    def _server_stop(self) -> None:
        try:
            self._server.stop()
        except RollplexError as error:
            log.warning("%s", error)

    def _kill_all(self) -> None:
        """A second signal while the run is ending: nobody is waited for any more."""
        for role in (*WORKERS, *CHILDREN):
            child = self._node.supervisor.child(role)
            if child is not None and child.process.poll() is None:
                os.kill(child.pid, signal.SIGKILL)


def _exit_code(error: RollplexError) -> int:
    return EXIT_CONFIG if isinstance(error, ConfigError | BudgetError) else EXIT_ERROR


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - one line of the kernel's
        return file.read().strip()
