"""Services and memory around a schedule, as they could answer: each in its own time, in an order drawn at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollplex.protocol.prefix import Which
from rollplex_coordinator.decisions.instructions import (
    Ask,
    Backward,
    Complete,
    Enter,
    Forward,
    Generate,
    Instruction,
    Mode,
    Release,
    Reward,
    Score,
    Train,
)
from rollplex_coordinator.decisions.plan import StepPlan, plan_step
from rollplex_coordinator.decisions.schedule import Schedule


@dataclass
class World:
    """Services and memory that answer in a random order. `room`: how many prefix units fit at once, of each replica."""

    schedule: Schedule
    plan: StepPlan
    rng: random.Random
    room: int
    log: list[Instruction] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    pending: list[tuple[str, object]] = field(default_factory=list)
    asking: list[tuple[Which, int]] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)
    """Prefix units whose memory is granted, by replica."""
    tells: bool = False
    """The rollout says when a unit is prefilled."""

    def take(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self.log.append(instruction)
            match instruction:
                case Generate(unit=unit) if self.tells:
                    self.pending += [("prefilled", unit), *(("finished", g) for g in self.plan.decode[unit])]
                    self.pending.append(("generated", unit))
                case Ask(which=which, unit=unit):
                    self.asking.append((which, unit))
                case Release(unit=unit):
                    self.held[self.plan.replica_of(unit)] -= 1
                case Enter() | Complete():
                    pass
                case Generate(unit=unit):
                    self.pending += [("finished", g) for g in self.plan.decode[unit]]
                    self.pending.append(("generated", unit))
                case _:
                    self.pending.append(("do", instruction))

    def step(self) -> None:
        while fitting := self._fitting():
            ask = self.rng.choice(fitting)
            self.asking.remove(ask)
            self.held[self.plan.replica_of(ask[1])] += 1
            self.take(self.schedule.granted(*ask))
        choices = [p for p in self.pending if p[0] != "generated" or not self._sampling(p[1])]
        assert choices, f"nothing can happen any more: {self.log[-5:]}"
        event = self.rng.choice(choices)
        self.pending.remove(event)
        self.events.append(f"{event[0]} {event[1]}")
        self.answer(event)

    def _fitting(self) -> list[tuple[Which, int]]:
        """Of each replica the first that asks, if there is room on its devices."""
        first = {self.plan.replica_of(ask[1]): ask for ask in reversed(self.asking)}
        return [ask for replica, ask in sorted(first.items()) if self.held[replica] < self.room]

    def _sampling(self, unit: object) -> bool:
        """Whether anything of a decode unit is still to come."""
        assert isinstance(unit, int)
        return ("prefilled", unit) in self.pending or any(
            ("finished", g) in self.pending for g in self.plan.decode[unit]
        )

    def answer(self, event: tuple[str, object]) -> None:
        match event:
            case ("prefilled", int(unit)):
                self.take(self.schedule.prefilled(unit))
            case ("finished", int(group)):
                self.take(self.schedule.group_finished(group))
            case ("generated", int(unit)):
                self.take(self.schedule.generated(unit))
            case (_, Reward(group=group)):
                self.take(self.schedule.group_rewarded(group))
            case (_, Forward(which=which, unit=unit)):
                self.take(self.schedule.forward_done(which, unit))
            case (_, Score(unit=unit)):
                self.take(self.schedule.scored(unit))
            case (_, Train(unit=unit)):
                self.take(self.schedule.trained(unit))
            case (_, Backward(unit=unit)):
                self.take(self.schedule.backward_done(unit))
            case _:
                raise AssertionError(event)

    def run(self) -> World:
        self.take(self.schedule.start())
        while not self.schedule.complete:
            self.step()
        return self


def play(
    mode: Mode,
    *,
    seed: int = 0,
    room: int = 99,
    reference: bool = True,
    batch: bool = False,
    after_prefill: bool = False,
    tells: bool = False,
    **sizes: int,
) -> World:
    """A whole step. `sizes`: groups, decode, prefix, suffix, engines, replicas."""
    plan = plan_step(
        sizes.get("groups", 6),
        decode_prompts=sizes.get("decode", 3),
        prefix_prompts=sizes.get("prefix", 2),
        suffix_prompts=sizes.get("suffix", 1),
        engines=sizes.get("engines", 1),
        replicas=sizes.get("replicas", 1),
    )
    schedule = Schedule(plan, mode, reference=reference, batch_rewards=batch, after_prefill=after_prefill)
    return World(schedule=schedule, plan=plan, rng=random.Random(seed), room=room, tells=tells).run()
