"""The cases of a rollout service: what it samples, and from which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rollplex.conformance.reading import READER, ask_digest, drain, take_over
from rollplex.conformance.sitting import Own, Sheet, Sitting, Violation
from rollplex.conformance.world import DTYPE, SAMPLES, World
from rollplex.memory.predict import rollout_kv_bytes
from rollplex.protocol.common import DigestReply, DigestRequest, Kind, LeaseRef, Role
from rollplex.protocol.rollout import EngineSpec, GenerateUnit, GroupFinished, LoadRollout, Sampling, UnitGenerated

VERSION = 4
NEW_TOKENS = 24
TEMPERATURE = 0.8
LOGPROBS = 1e-3
"""How far a log-probability may lie from ours, absolute: float32, added up in another order."""
LOGITS = 1e-3
"""How much less likely than the best a token may be for us, and still be its."""

RULES: Final = {
    "on_policy": "it says that its tokens are sampled from the mapped weights",
    "digest": READER["digest"],
    "groups": "each group is announced once, before UnitGenerated, with its samples, their lengths and ends",
    "vocabulary": "every token is an id of the vocabulary, and none is of never_sampled",
    "versions": "GroupFinished says the version that the header showed",
    "logprobs": "log-probabilities are those of the definition, within 1e-3 of transformers'",
    "held": "it holds no more K/V than its lease",
    "greedy": "at temperature 0 the likeliest id is taken, with its log-probability at temperature 1",
    "top_k": "with top_k the ids are among the k likeliest; log-probabilities stay those of all ids",
    "drained": READER["drained"],
    "committed": READER["committed"],
    "fresh": "after Committed it samples from the new weights",
}


class RolloutKit:
    """A rollout's instructions (`rollplex.conformance.cases.Kit`)."""

    role = Role.ROLLOUT
    rules: Mapping[str, str] = RULES
    unit_answer: type = UnitGenerated
    version = VERSION
    own: Sequence[Own] = ()

    def __init__(self, world: World) -> None:
        self._world = world
        self._actor = world.weights(filled=False)
        self._stops = tuple(range(0, world.shape.vocab, 12))

    def load(self, cause: int) -> LoadRollout:
        engine = EngineSpec(kv_tokens=4096, max_running=16, context_tokens=512, prefill_tokens=1024)
        return LoadRollout(cause=cause, model=self._world.spec, actor=self._actor.ref, engine=engine)

    def fill(self) -> None:
        self._world.fill(self._actor)
        self._actor.initialise(VERSION)

    def unit(self, cause: int, *, version: int, lease_bytes: int | None = None, **changes: Any) -> GenerateUnit:
        world = self._world
        needed = rollout_kv_bytes(
            world.shape,
            rows=len(world.slots),
            tokens=max(slot.tokens for slot in world.slots),
            samples=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            dtype=DTYPE,
        )
        values: dict[str, Any] = {
            "seed": 11,
            "purpose": "train",
            "group_size": SAMPLES,
            "max_new_tokens": NEW_TOKENS,
            "temperature": TEMPERATURE,
            "stop_ids": self._stops,
        }
        size = needed if lease_bytes is None else lease_bytes
        return GenerateUnit(
            cause=cause,
            step=2,
            version=version,
            unit=0,
            inputs=world.inputs,
            prompts=world.slots,
            sampling=Sampling(**{**values, **changes}),
            kv=LeaseRef(lease=7, kind=Kind.ROLLOUT_KV, size_bytes=size),
        )

    def run(self, sitting: Sitting, sheet: Sheet) -> None:
        with sheet.case("on_policy", RULES):
            if not sitting.answers()[0].message.on_policy:
                raise Violation("on_policy: false", "true: the gate refuses others")
        with sheet.case("digest", RULES):
            ask_digest(sitting, self._actor)
        with sheet.case("groups", RULES):
            cause, done = self._sampled(sitting, computing=True)
            groups = sitting.of(cause, GroupFinished)
            self._groups(groups, NEW_TOKENS)
        with sheet.case("vocabulary", RULES):
            self._vocabulary(groups)
        with sheet.case("versions", RULES):
            for group in groups:
                if (group.version_start, group.version_end) != (VERSION, VERSION):
                    raise Violation(f"{group.version_start} to {group.version_end}", f"{VERSION} to {VERSION}")
        with sheet.case("logprobs", RULES):
            self._logprobs(groups, TEMPERATURE)
        with sheet.case("held", RULES):
            lease = self.unit(0, version=VERSION).kv
            for held in done.held:
                if held.lease != lease.lease or held.size_bytes > lease.size_bytes:
                    raise Violation(f"{held.size_bytes} bytes under lease {held.lease}", f"at most {lease.size_bytes}")
        with sheet.case("greedy", RULES):
            cause, _ = self._sampled(sitting, temperature=0.0)
            self._logprobs(sitting.of(cause, GroupFinished), 1.0, best=1)
        with sheet.case("top_k", RULES):
            cause, _ = self._sampled(sitting, top_k=3)
            self._logprobs(sitting.of(cause, GroupFinished), TEMPERATURE, best=3)
        with sheet.case("drained", RULES):
            drain(sitting, VERSION)
        with sheet.case("committed", RULES):
            take_over(sitting, self._actor)
        with sheet.case("fresh", RULES):
            cause, _ = self._sampled(sitting, version=VERSION + 1)
            self._logprobs(sitting.of(cause, GroupFinished), TEMPERATURE)

    def _sampled(
        self, sitting: Sitting, *, version: int = VERSION, computing: bool = False, **changes: Any
    ) -> tuple[int, UnitGenerated]:
        """A unit's cause and its answer. computing: another instruction is sent while it runs."""
        cause = sitting.tell(lambda cause: self.unit(cause, version=version, **changes))
        second = sitting.tell(lambda cause: DigestRequest(cause=cause)) if computing else None
        done = sitting.answer(cause, UnitGenerated)
        if second is not None:
            sitting.answer(second, DigestReply)
        return cause, done

    def _groups(self, groups: Sequence[GroupFinished], longest: int) -> None:
        asked = sorted(slot.group for slot in self._world.slots)
        if (found := sorted(group.responses.group for group in groups)) != asked:
            raise Violation(f"groups {found}", f"{asked}")
        for group in groups:
            lengths, total = group.responses.lengths, sum(group.responses.lengths)
            sizes = (len(lengths), len(group.stopped), len(group.responses.tokens), len(group.logprobs.values))
            if sizes != (SAMPLES, SAMPLES, 4 * total, 8 * total) or group.logprobs.group != group.responses.group:
                raise Violation(
                    f"group {group.responses.group}: {sizes[0]} lengths, {sizes[1]} ends, {sizes[2]} bytes of tokens, "
                    f"{sizes[3]} of log-probabilities",
                    f"{SAMPLES}, {SAMPLES}, {4 * total} and {8 * total}",
                )
            for tokens, stopped in zip(_split(group), group.stopped, strict=True):
                ends = np.isin(tokens, self._stops)
                right = 1 <= len(tokens) <= longest and not ends[:-1].any() and bool(ends[-1]) == stopped
                if not right or (not stopped and len(tokens) != longest):
                    raise Violation(
                        f"a response of {len(tokens)} tokens, stop ids at {np.flatnonzero(ends).tolist()}, {stopped=}",
                        f"its end at the first stop id, or after {longest} tokens",
                    )

    def _vocabulary(self, groups: Sequence[GroupFinished]) -> None:
        for group in groups:
            tokens = np.frombuffer(group.responses.tokens, "<i4")
            wrong = (tokens < 0) | (tokens >= self._world.shape.vocab) | np.isin(tokens, self._world.spec.never_sampled)
            if wrong.any():
                raise Violation(f"ids {sorted(set(tokens[wrong].tolist()))}", "ids that may be sampled")

    def _logprobs(self, groups: Sequence[GroupFinished], temperature: float, best: int | None = None) -> None:
        """Compare with ours; best: tokens are among so many likeliest."""
        plain = self._world.model(self._actor, plain=True)
        for group in groups:
            told = np.split(np.frombuffer(group.logprobs.values, "<f8"), np.cumsum(group.responses.lengths)[:-1])
            ours = self._world.distributions(plain, group.responses, temperature)
            for said, tokens, rows in zip(told, _split(group), ours, strict=True):
                drawn = rows[np.arange(len(tokens)), tokens]
                with np.errstate(invalid="ignore"):
                    apart = float(abs(said - drawn).max())
                if not apart <= LOGPROBS:
                    raise Violation(f"{apart:.3g} from ours, in group {group.responses.group}", f"at most {LOGPROBS:g}")
                if best is not None and (drawn < np.sort(rows, axis=1)[:, -best] - LOGITS).any():
                    raise Violation(f"an id that is not among the {best} likeliest", "one that is")


def _split(group: GroupFinished) -> list[Any]:
    return np.split(np.frombuffer(group.responses.tokens, "<i4"), np.cumsum(group.responses.lengths)[:-1])
