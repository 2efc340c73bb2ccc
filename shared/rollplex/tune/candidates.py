"""Which shares of a GPU's multiprocessors are tried. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from rollplex.errors import ConfigError

PREFIX_SHARES: Final = (0.7, 0.6, 0.5)
"""Probes had their best between these. More are tried by naming them: each one is a node that starts."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One way to run prefix work beside the rollout."""

    sharing: str = "mps"
    """mps: at the same time; turns: by the driver's time slices."""
    prefix_share: float = 1.0
    decode_share: float = 1.0

    @property
    def name(self) -> str:
        """Short and fit for a folder: paths of sockets are limited."""
        if self.sharing == "turns":
            return "turns"
        return f"p{self.prefix_share * 1000:.0f}d{self.decode_share * 1000:.0f}"

    @property
    def text(self) -> str:
        """As tables and commands have it."""
        return self.sharing if self.sharing == "turns" else f"{self.prefix_share:g}:{self.decode_share:g}"

    @property
    def change(self) -> float:
        """How far from the whole device for everybody. Time slices need no setting at all."""
        return 0.0 if self.sharing == "turns" else 2.0 - self.prefix_share - self.decode_share

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that make it, for the configuration."""
        return (
            f"device.sharing={self.sharing}",
            f"device.prefix_share={self.prefix_share}",
            f"device.decode_share={self.decode_share}",
        )


WHOLE: Final = Candidate()
"""Everybody has the whole device."""
TURNS: Final = Candidate(sharing="turns")


def grid(*, limits_decoding: bool) -> tuple[Candidate, ...]:
    """What is tried if nothing else is asked for.

    Args:
        limits_decoding: the rollout engine can keep to a share.
    """
    alone = [Candidate(prefix_share=share) for share in PREFIX_SHARES]
    disjoint = [Candidate(prefix_share=share, decode_share=round(1.0 - share, 3)) for share in PREFIX_SHARES]
    return (WHOLE, TURNS, *alone, *(disjoint if limits_decoding else ()))


def parse_candidates(text: str) -> tuple[Candidate, ...]:
    """A comma-separated list of turns and of prefix:decode shares, such as 1:1,0.64:0.36,0.7:1.

    Raises:
        ConfigError: a word that is neither, or a share out of range.
    """
    found = [_candidate(word.strip()) for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError("There is nothing to try", got=repr(text), needed="some shares", where="--candidates")
    return tuple(dict.fromkeys((WHOLE, *found)))


def _candidate(word: str) -> Candidate:
    if word == "turns":
        return TURNS
    prefix, colon, decode = word.partition(":")
    try:
        shares = float(prefix), float(decode)
    except ValueError:
        shares = (0.0, 0.0)
    if not colon or not all(0.0 < share <= 1.0 for share in shares):
        raise ConfigError(
            "The shares cannot be read",
            got=repr(word),
            needed="turns, or two numbers above 0 and at most 1, such as 0.64:0.36 (prefix work : decoding)",
            where="--candidates",
        )
    return Candidate(prefix_share=shares[0], decode_share=shares[1])
