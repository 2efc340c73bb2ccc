"""What `rollplex bench refresh` and its processes, one a device, say to each other: one answer to each task."""

from __future__ import annotations

from msgspec import Struct

from rollplex.bench.placement import Placement


# bench -> process of a device, with the descriptors of all devices' segments in order; answered by Measured.
class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One placement to measure."""

    model: str
    """Folder with its config.json."""
    dtype: str
    placement: Placement
    device: int
    """The receiver's."""
    sizes: tuple[int, ...]
    """Of the segments, bytes."""
    memory: str
    """host or cuda."""
    meet: str
    """File through which the processes find each other, at their first task."""
    collective_s: float
    repeats: int
    warmup: int


# process of a device -> bench, when every process has done the task.
class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process did, in seconds, one number a repeat; empty: it had no part in it.

    All processes begin a repeat together, and each ends with its own work complete.
    """

    copies_s: tuple[float, ...] = ()
    """The pieces, each by a copy into its place."""
    one_piece_s: tuple[float, ...] = ()
    """As many bytes of a peer's segment, in one copy."""
    collective_s: tuple[float, ...] = ()
    """The pieces in one row, by collectives alone."""
    packed_s: tuple[float, ...] = ()
    """With packing before and unpacking after."""
    digest_s: tuple[float, ...] = ()
    """Of the segments that this process writes, as each update ends with."""
    copied: dict[int, str] = {}
    """Digest of each segment that this process wrote by copies, by device."""
    gathered: str = ""
    """The same of its own device's segment, after collectives."""
    collective_backend: str = ""
