"""Names that the rollout process and the scheduler process both use, without what they import."""

from __future__ import annotations

from typing import Final

BEGIN: Final = "rollplex_begin"
REST: Final = "rollplex_rest"
TOGETHER: Final = "rollplex_together"
PICTURED: Final = "p"
"""Ends the part of a request's id that names its unit, if its prompt has pictures. The first request of a prompt tells
of them; the others come without, and the scheduler process gives them the first one's."""
PLACE: Final = "rollplex_place"
"""Of a picture on its way through SGLang: where its pixels lie in the inputs segment (`pixels.Place`)."""


def prompt_of(rid: str) -> str:
    """The part of a request's id that its prompt's requests have in common."""
    return rid.rpartition("-")[0]


def has_pictures(rid: str) -> bool:
    """Whether the prompt of a request has pictures."""
    return rid.rsplit("-", 2)[0].endswith(PICTURED)


BUSY: Final = "requests are still running"
"""How a call that needs an idle scheduler is refused; the last step's results may still be on their way."""
