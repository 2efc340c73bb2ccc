"""What a bench measures: modes, and one row for each time that a mode was run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from rollplex.errors import ConfigError
from rollplex.similar import closest

Prefix: TypeAlias = Literal["shared", "replicated"]
SCHEDULES: Final = ("serial", "overlap", "stream")
PREFIXES: Final = ("shared", "replicated")

PHASES: Final = ("rollout", "score", "train", "update", "other")
"""Of one iteration, in the order of the phases; other: what none of them has, such as waiting for the inputs."""


class Mode(Struct, frozen=True, kw_only=True):
    """One way to run an iteration."""

    schedule: str
    prefix: str

    @property
    def name(self) -> str:
        """As files and tables have it."""
        return f"{self.schedule} {self.prefix}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that make it, for the configuration."""
        shared = "true" if self.prefix == "shared" else "false"
        return (f"run.schedule={self.schedule}", f"run.share_prefix={shared}")


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node that ran one mode once.

    Times are seconds. `median_s` has a median over the measured iterations of each of

        iteration · rollout score train update other          the whole, and the phases that it went through
        prefix_forward prefix_hidden prefix_backward          units of prefixes, actor and reference together; hidden:
                                                              of the forwards, what lies between first and last token
        score_units suffix_units                              units of responses
        generate prefill decode                               units of rollout; prefill and decode if the run says
    """

    repeat: int
    schedule: str
    prefix: str
    started: str
    """UTC."""
    wall_s: float
    """Of the node, from its start to its end."""
    iteration_s: tuple[float, ...]
    """Every measured iteration, in order."""
    median_s: dict[str, float]
    hidden_share: float
    """Of the time of prefix forwards the part inside the rollout, median over iterations."""
    prompt_tokens: float
    """Mean per prompt; P."""
    response_tokens: float
    """Mean per response; R."""
    digest: str
    """Of the weights after the last update."""
    others_cpus: float = 0.0
    """How many processors other programs kept busy meanwhile, on average."""

    @property
    def mode(self) -> Mode:
        return Mode(schedule=self.schedule, prefix=self.prefix)


def choose_modes(schedules: str, prefixes: str) -> tuple[Mode, ...]:
    """All pairs of two comma-separated lists.

    Raises:
        ConfigError: an unknown word, or none.
    """
    first = _words(schedules, SCHEDULES, "--modes")
    second = _words(prefixes, PREFIXES, "--prefixes")
    return tuple(Mode(schedule=schedule, prefix=prefix) for schedule in first for prefix in second)


def order(modes: Sequence[Mode], repeat: int) -> list[Mode]:
    """The modes in the order of a repeat: backwards in every second one, and then from another one on, so that neither
    a machine that gets slower nor one that gets faster favours a mode."""
    shift = (repeat // 2) * max(1, len(modes) // 2) % max(1, len(modes))
    turned = [*modes[shift:], *modes[:shift]]
    return turned[::-1] if repeat % 2 else turned


def _words(text: str, known: Sequence[str], where: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words or ("",):
        if word not in known:
            close = closest(word, known)
            raise ConfigError(
                "The bench does not know this word" if word else "The bench needs something to run",
                got=repr(word),
                needed=f"some of {', '.join(known)}, with commas",
                do=f"Did you mean {close}?" if close else "",
                where=where,
            )
    return words
