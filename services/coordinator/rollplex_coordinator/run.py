"""The life of a run: claim, start, check, load, iterate, end.

    claim run dir ─► journal, API, children ─► data check ─► memory plan ─► load ─► work ─► last evaluations ─► end
                                                                            │ ▲
                                                          iteration, evaluation, checkpoint, idle

Owns the order of these and the exit code: 0 done, or stopped by SIGTERM, SIGHUP or HTTP; 130 stopped by SIGINT; 1 an
error; 2 a configuration that cannot run.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rollplex.checkpoint.folder import CHECKPOINTS, folders
from rollplex.checkpoint.state import RunState
from rollplex.config.config import Config
from rollplex.config.job import EvalSection
from rollplex.config.loading import dump, load
from rollplex.errors import JournalError, RollplexError
from rollplex.journal.events import Event, RunEnded, StopRequested, StopWhen
from rollplex.journal.phases import Phase
from rollplex.layout.folder import check_folder
from rollplex.protocol.claim import Claim, claim
from rollplex.protocol.common import Role
from rollplex.whole_file import write_whole
from rollplex_coordinator.api import Api
from rollplex_coordinator.control import HTTP, CoreControl
from rollplex_coordinator.decisions.fleet import WORKERS
from rollplex_coordinator.decisions.work import Work
from rollplex_coordinator.degrees import check_degrees
from rollplex_coordinator.dry_run import dry_run
from rollplex_coordinator.limits import raise_file_limit
from rollplex_coordinator.options import Options
from rollplex_coordinator.processes.node import CHILDREN, Node
from rollplex_coordinator.processes.stop import Signals, StopRun
from rollplex_coordinator.progress import Progress, make_progress
from rollplex_coordinator.ready import get_ready
from rollplex_coordinator.records.attempts import set_aside
from rollplex_coordinator.records.pulse import Pulse
from rollplex_coordinator.records.trackers.opening import check_trackers, open_trackers
from rollplex_coordinator.restarting import Restarting
from rollplex_coordinator.resuming import Resumption, evaluated, resume, undo, wanted_before
from rollplex_coordinator.saying import TERMINAL, log_to_terminal, say
from rollplex_coordinator.startup import process_start_s, run_started
from rollplex_coordinator.steps.checkpointing import Checkpoints
from rollplex_coordinator.steps.context import Context
from rollplex_coordinator.steps.evaluate import Evaluation
from rollplex_coordinator.steps.feed import training_rows
from rollplex_coordinator.steps.iteration import Iteration
from rollplex_coordinator.swapping import Swapping
from rollplex_coordinator.telling import EXIT_ERROR, exit_code
from rollplex_coordinator.verify.check import checked, verify

MAX_RUN_NAME = 40
ResultT = TypeVar("ResultT")

log = logging.getLogger("rollplex.coordinator")


def run(options: Options, signals: Signals) -> int:
    """Run one coordinator to its end and return the process's exit code."""
    entered_s = time.monotonic()
    log_to_terminal()
    try:
        raise_file_limit()
        config = load(options.config, options.overrides)
        config = config if options.verify is None else checked(config)
        check_folder(config.model.path)
        check_degrees(config, options)
        check_trackers(config)
        run_id = f"{config.run.name[:MAX_RUN_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        with claim(options.run_dir, run_id) as claimed:
            run_dir = claimed.run_dir.path
            resumption = None
            if options.resume is not None and not (options.resume.if_any and not folders(run_dir / CHECKPOINTS)):
                resumption = resume(run_dir, options.resume, config, lambda state: _wanted(config, options, state), say)
            elif (kept := set_aside(run_dir)) is not None:
                say(f"rollplex: what an earlier run left is in {kept}")
            ready = False
            TERMINAL.keep_in(run_dir / "logs")
            try:
                run_ = _Run(claimed, run_id, config, options, signals, resumption=resumption, entered_s=entered_s)
                code = run_.main()
                ready = run_.ready
            finally:
                if resumption is not None and resumption.attempt is not None and not ready:
                    undo(run_dir, resumption.attempt)
            return code
    except RollplexError as error:
        say(f"error: {error}")
        return exit_code(error)
    except OSError as error:
        say(f"error: the run directory cannot be used: {error}")
        return EXIT_ERROR


def _wanted(config: Config, options: Options, state: RunState | None) -> int | None:
    """Iterations that the run is to have at its end; None: no more than it has, until somebody asks.

    Args:
        state: of a run that goes on.
    """
    done = 0 if state is None else state.step
    if options.verify is not None or (options.serve and (options.iterations is None or options.iterations <= done)):
        return None
    if options.iterations is not None:
        return options.iterations
    return config.run.iterations if state is None else wanted_before(state, config)


def _evaluated_by(context: Context, section: EvalSection) -> dict[str, float]:
    return Evaluation(context, section).run()


class _Run:
    def __init__(
        self,
        claimed: Claim,
        run_id: str,
        config: Config,
        options: Options,
        signals: Signals,
        *,
        resumption: Resumption | None,
        entered_s: float,
    ) -> None:
        self._entered_s = entered_s
        self._config = config
        self._options = options
        self._signals = signals
        self._resumption = resumption
        self._first = 0 if resumption is None else resumption.state.step
        self.ready = False
        """Everything is loaded, and a run that goes on was found to be the same."""
        wanted = _wanted(config, options, None if resumption is None else resumption.state)
        # A verification asks for no rewards.
        self._roles = tuple(role for role in (*CHILDREN, *WORKERS) if role != Role.REWARD or options.verify is None)
        self._api = Api(config.http, claimed.run_dir.path)
        self._node = Node(claimed, run_id, config, options, signals)
        self._work = Work(self._first if wanted is None else wanted, serve=options.serve, done=self._first)
        self._control = CoreControl(self._node, self._work)
        self._progress = Progress() if options.dry_run else make_progress(sys.stderr, self._control.look)
        self._swapping = Swapping(self._node, self._work, self._control)
        self._control.swaps, self._control.begin_swap = self._swapping.swaps, self._swapping.ask
        self._restarting = Restarting(self._node, self._control)
        self._control.restarts = self._restarting.restarts
        self._pulse = Pulse(claimed.run_dir.path)
        self._node.link.after_turn = self._after_turn
        self._checkpoints: Checkpoints | None = None
        self._evaluated = evaluated(claimed.run_dir.path) if resumption is not None else set[tuple[str, int]]()
        if resumption is None:
            self._write_config()

    def main(self) -> int:
        """Everything between the claim and its release."""
        node = self._node
        reason, code = "done", 0
        try:
            self._live()
            if self._options.verify is None:  # which has said what it found
                say("rollplex: it can run" if self._options.dry_run else f"rollplex: done, {self._so_far()}")
        except StopRun as stop:
            reason, code = str(stop), stop.exit_code
            if stop.source != HTTP:
                self._note(StopRequested(when=StopWhen.NOW, exit=True, source=stop.source))
            say(f"rollplex: {reason} after {self._so_far()}")
        except RollplexError as error:
            reason, code = str(error)[:4_000], exit_code(error)
            event, text = self._restarting.told(error, logs_stay=not self._options.dry_run)
            self._note(event)
            say(text)
        except Exception as error:
            reason, code = f"internal error: {error}"[:4_000], EXIT_ERROR
            log.exception("internal error in phase %s", node.record.phase.name)
        self._end(reason, code)
        return code

    def _end(self, reason: str, code: int) -> None:
        """Whatever happened: tell the journal, the API's callers and the workers, in this order."""
        node = self._node
        self._signals.escalate = self._kill_all
        self._end_swapping()
        self._note(RunEnded(run=node.run_id, exit_code=code, reason=reason))
        node.link.hub.unwatch_all()
        node.mailbox.close()
        try:
            self._api.stop()
        except RollplexError as error:
            log.warning("%s", error)
        try:
            node.end("the run ended" if code == 0 else "the run was stopped or failed; the coordinator says why")
        except JournalError as error:
            log.error("%s", error)

    def _end_swapping(self) -> None:
        """A replacement that is under way; a journal that fails must not keep the end from happening."""
        try:
            self._swapping.close()
        except JournalError as error:
            log.error("%s", error)

    def _so_far(self) -> str:
        """What there is to go on from."""
        newest = self._checkpoints.folder if self._checkpoints is not None else None
        return f"{self._work.done} iterations; newest checkpoint: {newest or 'none'}"

    def _note(self, event: Event) -> None:
        """Journal an event of the end; a journal that fails must not keep the end from happening."""
        try:
            self._node.record.append(event)
            self._node.record.journal.flush()
        except JournalError as error:
            log.error("%s", error)

    def _after_turn(self) -> None:
        self._node.record.tick()
        self._control.turn()
        self._progress.turn()
        self._pulse.turn(lambda: self._control.look()[2])

    # --- the run --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._go_on()
        finally:
            self._progress.stop()

    def _go_on(self) -> None:
        node, config = self._node, self._config
        if self._options.dry_run:
            dry_run(node, self._work.wanted)
            return
        resumed = self._resumption is not None
        if self._options.verify is None:
            node.record.trackers = open_trackers(config, node.run_dir, node.run_id, os.environ)
        node.record.append(run_started(node.run_id, config, self._work.wanted, resumed=resumed))
        node.record.stage("import", process_start_s(), self._entered_s)
        node.record.enter(Phase.LOAD)
        node.prepare_device()
        for role in self._roles:
            node.start(role)
        api_s = time.monotonic()
        url = self._api.start(self._control, node.run_id)
        say(f"rollplex: run {node.run_id} in {node.run_dir}, API at {url} (token in {node.run_dir / 'token'})")
        node.record.stage("control API", api_s)
        first = self._work.done if self._options.verify is None and self._work.iterate else None
        context = get_ready(node, self._control, self._options, self._roles, self._resumption, first=first)
        self.ready = True
        self._write_config()
        if self._options.verify is not None:
            verify(context, node.holder, self._options.verify, self._options.config)
            return
        checkpoints = self._checkpoints = Checkpoints(context, wanted=lambda: self._work.wanted)
        if self._resumption is not None:
            state = self._resumption.state
            checkpoints.adopt(folders(self._resumption.folder.parent), state.step, state.version)
        while not self._work.last:
            self._swapping.at_border(context)
            if self._work.iterate:
                self._swapping.begun()
                self._iterate(context, checkpoints)
            else:
                say("rollplex: waiting for `rollplex start N` (POST /iterations)")
                self._again(context, lambda: self._swapping.stay(context, self._wait))
            if self._work.checkpoint_wanted:
                self._work.checkpoint_wanted = False
                self._again(context, checkpoints.save)
        if self._work.done:
            self._evaluate(context, step=self._work.done, last=True)
            if config.checkpoint.at_end:
                self._again(context, checkpoints.save)

    def _wait(self) -> None:
        self._node.link.pump(lambda: self._awaited)

    def _again(self, context: Context, what: Callable[[], ResultT]) -> ResultT:
        return self._restarting.attempt(context, what)

    @property
    def _awaited(self) -> bool:
        """Something that a run without work waits for is there."""
        work = self._work
        return work.iterate or work.checkpoint_wanted or work.last or self._swapping.due

    def _write_config(self) -> None:
        """config.yaml, whole or not at all; of a run that goes on only once it was accepted."""
        write_whole(self._node.run_dir / "config.yaml", dump(self._config).encode())

    def _iterate(self, context: Context, checkpoints: Checkpoints) -> None:
        done = self._work.done
        if done == self._first:
            self._evaluate(context, step=done, last=False)
        context.record.step = done
        self._work.running = True
        ahead = self._rows(context, done + 1) if done + 1 < self._work.wanted else None
        row = self._again(context, Iteration(context, step=done, rows=self._rows(context, done), ahead=ahead).run)
        self._work.done, self._work.running = done + 1, False
        self._progress.iteration(done + 1, self._work.wanted, row)
        last = self._work.last
        if not last:
            self._evaluate(context, step=done + 1, last=False)
        if self._config.checkpoint.due(done + 1, last=last):
            self._again(context, checkpoints.save)
        context.record.step = None

    def _rows(self, context: Context, step: int) -> tuple[int, ...]:
        return training_rows(self._config, context.data, step)

    def _evaluate(self, context: Context, *, step: int, last: bool) -> None:
        for section in self._config.eval:
            if section.due(step, last=last) and (section.name, step) not in self._evaluated:
                self._evaluated.add((section.name, step))
                context.record.step = step
                metrics = self._again(context, partial(_evaluated_by, context, section))
                self._progress.evaluation(section.name, step, metrics)
                context.record.step = None

    # --- the end --------------------------------------------------------------------------------------------------

    def _kill_all(self) -> None:
        """A second signal while the run is ending: nobody is waited for any more."""
        for child in self._node.supervisor.children:
            if child.process.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
