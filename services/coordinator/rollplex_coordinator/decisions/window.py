"""Which share of a GPU's multiprocessors prefix work gets: pure.

While a rollout decodes, prefix work keeps to its share, so that the short kernels of decoding find multiprocessors free
at once; after it, and on a device that the workers use in turns, it has all of them. A unit that is under way when the
rollout ends just finishes.
"""

from __future__ import annotations

from msgspec import Struct

SHARING_AT_ONCE = "mps"


class Window(Struct, frozen=True, kw_only=True):
    """The shares of one run. 1: no limit."""

    prefix_share: float = 1.0
    decode_share: float = 1.0

    def share(self, *, beside: bool) -> float:
        """Of a unit of prefix work.

        Args:
            beside: it starts beside a rollout that is going on.
        """
        return self.prefix_share if beside else 1.0

    @property
    def limited(self) -> bool:
        """Whether anybody keeps to a part of the device at any time."""
        return min(self.prefix_share, self.decode_share) < 1.0


def window_of(sharing: str | None, *, prefix_share: float, decode_share: float) -> Window:
    """The shares that hold.

    Args:
        sharing: how the workers share the device now, whatever was asked for; None: they compute on the host.
        prefix_share, decode_share: as configured.
    """
    if sharing != SHARING_AT_ONCE:
        return Window()
    return Window(prefix_share=prefix_share, decode_share=decode_share)
