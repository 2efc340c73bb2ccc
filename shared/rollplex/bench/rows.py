"""What a bench measures: modes, and one row for each time that a mode was run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from rollplex.errors import ConfigError
from rollplex.similar import closest

Prefix: TypeAlias = Literal["shared", "replicated"]
SCHEDULES: Final = ("serial", "overlap", "stream")
PRACTISED: Final = "practised"
"""Serial and replicated, as systems do it that have one engine for the rollout and another one for training: with a
second copy of the weights, into which each update is copied (SGLang only)."""
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
    def text(self) -> str:
        """As a command has it."""
        return PRACTISED if self.schedule == PRACTISED else f"{self.schedule}:{self.prefix}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that make it, for the configuration."""
        shared = "true" if self.prefix == "shared" else "false"
        if self.schedule == PRACTISED:
            return ("run.schedule=serial", "run.share_prefix=false", "rollout.sglang.own_weights=true")
        return (f"run.schedule={self.schedule}", f"run.share_prefix={shared}")

    @property
    def together(self) -> str:
        """Modes with the same text can take turns in one node; empty: this one has a node to itself."""
        return "" if self.schedule == PRACTISED else self.prefix


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node that ran one mode once.

    Times are seconds. `median_s` has a median over the measured iterations of each of

        iteration · rollout score train update other          the whole, and the phases that it went through
        prefix_forward prefix_hidden prefix_backward          units of prefixes, actor and reference together; hidden:
                                                              of the forwards, what lies between first and last token
        window                                                units of rollout and prefix forwards, from the first
                                                              begin to the last end
        score_units suffix_units                              units of responses
        generate prefill decode                               units of rollout; prefill and decode if the run says
        publish idle/0:1                                      of several devices: copies after the update; the time in
                                                              which a device (node:number) had nothing to do
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
    """Of the weights after the last update; empty if other modes had a part in them."""
    others_cpus: float = 0.0
    """How many processors other programs kept busy meanwhile, on average."""
    prompts: int = 0
    """Of one iteration; 0: a row of an older bench, which had those of the facts."""
    decode_tokens_s: float = 0.0
    """Response tokens a second, all responses together, from the first token (or the prefill's begin) to the last;
    median over iterations."""
    prefix_tokens_s: float = 0.0
    """Prompt tokens a second through prefix forwards, copies counted; median over iterations."""
    work_hidden: float = 0.0
    """Of the units of prefix forwards the part inside the rollout, each unit counting alike: units may be slower
    there, so that `hidden_share` is another number; median over iterations."""
    peak_bytes: dict[str, int] = {}
    """On a GPU: the most memory that the run used, by phase, over the measured iterations."""

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


def choose_rows(text: str) -> tuple[Mode, ...]:
    """A comma-separated list such as `serial:shared,overlap:shared,practised`.

    Raises:
        ConfigError: a row of another form, or none.
    """
    known = {mode.text: mode for mode in (*choose_modes(",".join(SCHEDULES), ",".join(PREFIXES)), practised())}
    return tuple(known[word] for word in _words(text, tuple(known), "--rows"))


def practised() -> Mode:
    """Serial as practised elsewhere."""
    return Mode(schedule=PRACTISED, prefix="replicated")


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
