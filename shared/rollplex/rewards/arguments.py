"""Which arguments a reward function has. Knows nothing of what they mean.

Pure; imports nothing heavy, because it runs in the process of the user's functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence

from rollplex.errors import RewardError
from rollplex.similar import closest

MAX_SHOWN_CHARS = 400


class Arguments:
    """The arguments of a function, without those that the configuration's options already fix.

    A function may say which arguments are for options alone, so that no column of their name is given for them:
    `function.reward_options = ("threshold",)`. They need defaults, and there are no other options.

    Args:
        function: the user's.
        options: names of arguments that are given with every call.

    Raises:
        RewardError: a function that does not show its arguments, or one that does not take an option.
    """

    def __init__(self, function: Callable[..., object], options: Collection[str] = ()) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise RewardError("This function does not show its arguments", got=str(error)) from error
        parameters = list(signature.parameters.values())
        bare = signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in parameters], return_annotation=signature.empty
        )
        shown = str(bare)[1:-1]
        self.shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[: MAX_SHOWN_CHARS - 1]}…"
        """As they stand in the code, without types."""
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        own = tuple(getattr(function, "reward_options", ()))
        self._check_options(options, own or [p.name for p in keywords], closed=bool(own) or not self.takes_all)
        self._kept = {*options, *own}
        self.names = tuple(p.name for p in keywords if p.name not in self._kept)
        """Those that can be given by name."""
        self.required = tuple(p.name for p in keywords if p.default is p.empty and p.name not in options)
        self.fixed = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty)
        """Those that must be given, and by position."""

    def takes(self, name: str) -> bool:
        """Whether this name may be given."""
        return name in self.names or (self.takes_all and name not in self._kept)

    def refuse_fixed(self) -> None:
        """Raise RewardError unless the function can be called by keywords alone."""
        if self.fixed:
            raise RewardError(
                "This function takes arguments by position only",
                got=", ".join(self.fixed),
                needed="arguments that can be given by name",
            )

    def refuse_required(self, given: Collection[str], whose: str) -> None:
        """Raise RewardError if it must have an argument that is not among those given.

        Args:
            whose: whose form gives these.
        """
        others = [name for name in self.required if name not in given]
        if others:
            raise RewardError(
                f"The function asks for what {whose} form does not give",
                got=f"arguments {others}",
                needed=f"some of {sorted(given)}",
                do="Give the others defaults, or their values in rewards.functions.options.",
            )

    def pick(self, available: Mapping[str, object]) -> dict[str, object]:
        """The keywords of one call.

        Raises:
            RewardError: the function needs what is not there.
        """
        missing = [name for name in self.required if name not in available]
        if missing:
            raise RewardError(
                "The function asks for what the row lacks",
                got=f"arguments {missing}",
                needed=f"some of {sorted(available)}",
            )
        if self.takes_all:
            return {name: value for name, value in available.items() if self.takes(name)}
        return {name: available[name] for name in self.names if name in available}

    def _check_options(self, options: Collection[str], names: Sequence[str], *, closed: bool) -> None:
        for option in options:
            if closed and option not in names:
                raise RewardError(
                    f"The function has no argument {option!r}, which its options name",
                    got=f"({self.shown})",
                    do=f"Did you mean {close}?" if (close := closest(option, names)) else "",
                )
