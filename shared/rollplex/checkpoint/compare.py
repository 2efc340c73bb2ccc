"""Whether a run may go on as it is configured now from where it stood: field by field, with what a difference does.

    effect     meaning                                                          keys
    ---------  ---------------------------------------------------------------  ---------------------------------------
    refuse     the rest of the run would not be the same run: another result    all that are not named below
    warn       the result stays the same (bit for bit), or differs only in      run.schedule, memory, deadlines, http,
               what is reported                                                 checkpoint, eval, services, trackers,
                                                                                names, logs

A key that is not known here is refused: a new knob must be placed by hand. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

HARMLESS = (
    "run.name",
    "run.schedule",
    "run.alternate",
    "run.restarts",
    "run.tensorboard",
    "run.log_completions",
    "run.log_tokens",
    "run.keep_gradients",
    "run.sample_every",
    "run.sample_groups",
    "device.gpu",
    "device.sharing",
    "memory",
    "deadlines",
    "http",
    "checkpoint",
    "eval",
    "services",
    "trackers",
    "rewards.time_limit_s",
    "rewards.memory_limit",
    "rewards.workers",
)
"""Keys, or whole sections, that do not change what is learned."""
_ABSENT = "(nothing)"


class Effect(StrEnum):
    """What a difference does to a resumption."""

    REFUSE = "refuse"
    WARN = "warn"


class Difference(Struct, frozen=True, kw_only=True):
    """One thing that is not as it was."""

    key: str
    """Dotted, as `--set` takes it; or the name of a fingerprint."""
    was: str
    now: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key}: was {self.was}, now {self.now}"


def config_differences(
    was: Mapping[str, object], now: Mapping[str, object], *, accepted: Collection[str] = ()
) -> tuple[Difference, ...]:
    """The keys in which two resolved configurations differ, in order of key.

    `run.iterations` is how far the run goes and, unless the learning rate is constant, the length of its schedule.

    Args:
        was, now: plain values, every default written out.
        accepted: keys (or sections) whose difference the user wants: they warn.
    """
    before, after = dict(_leaves(was)), dict(_leaves(now))
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old == new:
            continue
        harmless = _within(key, HARMLESS) or (key == "run.iterations" and _constant_rate(was) and _constant_rate(now))
        found.append(_difference(key, old, new, harmless=harmless or _within(key, accepted)))
    return tuple(found)


def fingerprint_differences(
    was: Mapping[str, str], now: Mapping[str, str], *, accepted: Collection[str] = ()
) -> tuple[Difference, ...]:
    """The fingerprints in which two runs differ. Those of evaluations only warn: nothing is learned from them.

    Args:
        was, now: names as in `RunState.fingerprints`.
        accepted: names whose difference the user wants: they warn.
    """
    found = []
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key, _ABSENT), now.get(key, _ABSENT)
        if old != new:
            harmless = key.startswith("data.") and key != "data.train"
            found.append(_difference(key, _short(old), _short(new), harmless=harmless or _within(key, accepted)))
    return tuple(found)


def library_differences(was: Mapping[str, str], now: Mapping[str, str]) -> tuple[Difference, ...]:
    """Versions that changed: the run goes on, but its last bits may differ."""
    keys = sorted(was.keys() | now.keys())
    pairs = [(f"version of {key}", was.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys]
    return tuple(_difference(key, old, new, harmless=True) for key, old, new in pairs if old != new)


def _difference(key: str, was: str, now: str, *, harmless: bool) -> Difference:
    return Difference(key=key, was=was, now=now, effect=Effect.WARN if harmless else Effect.REFUSE)


def _leaves(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key with its value as text; lists of mappings by index."""
    for name, item in value.items():
        key = f"{prefix}{name}"
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{key}.")
        elif isinstance(item, list | tuple) and any(isinstance(part, Mapping) for part in item):
            yield from _leaves({str(index): part for index, part in enumerate(item)}, f"{key}.")
        else:
            yield key, repr(list(item) if isinstance(item, tuple) else item)


def _within(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _constant_rate(config: Mapping[str, object]) -> bool:
    optimizer = config.get("optimizer")
    return isinstance(optimizer, Mapping) and optimizer.get("schedule") == "constant"


def _short(digest: str) -> str:
    return digest if len(digest) <= 16 else f"{digest[:12]}…"
