"""What `rollplex bench refresh` found: the file that is kept, and how it is told. Measuring is `refresh`."""

from __future__ import annotations

from msgspec import Struct

from rollplex.bench.machine import Machine, Software
from rollplex.bench.refresh_plan import Kind
from rollplex.bench.tables import Table


class Seconds(Struct, frozen=True, kw_only=True):
    """Of one way, the slowest process of each repeat."""

    median: float
    low: float
    high: float


class PlacementFound(Struct, frozen=True, kw_only=True):
    """One placement."""

    copied_bytes: tuple[int, ...]
    """After an update, by device."""
    remote_bytes: tuple[int, ...]
    """Of them from another device's segment."""
    pieces: int
    """Of the device that gets most."""
    copies: Seconds | None = None
    one_piece: Seconds | None = None
    collective: Seconds | None = None
    packed: Seconds | None = None
    digest: Seconds | None = None
    kinds: tuple[Kind, ...] = ()
    """Of the collectives."""
    collective_bytes: int = 0
    """That arrive at the device which gets most by collectives."""
    backend: str = ""
    same: bool = True
    """Copies and collectives left the same bytes on every device."""

    @property
    def busiest_bytes(self) -> int:
        """Remote bytes of the device that gets most."""
        return max(self.remote_bytes)


class Refreshed(Struct, frozen=True, kw_only=True):
    """The file refresh.json."""

    machine: Machine
    software: Software
    gpus: tuple[str, ...]
    """Name and UUID of each that was used, in order of devices; none on a host."""
    preset: str
    dtype: str
    repeats: int
    warmup: int
    command: str
    placements: dict[str, PlacementFound] = {}

    @property
    def same(self) -> bool:
        return all(found.same for found in self.placements.values())


def told(found: PlacementFound) -> str:
    """One placement in a line."""
    if found.copies is None:
        return "nothing is copied after an update: the rollout reads what training writes"
    return (
        f"{found.busiest_bytes / 1e9:.4g} GB into a device in {found.copies.median * 1e3:.2f} ms, "
        f"{_rate(found.busiest_bytes, found.copies)} GB/s"
    )


def table_of(found: Refreshed) -> Table:
    """One line a placement."""
    head = (
        *("placement", "GB into a device", "pieces", "copies ms", "low to high", "GB/s", "one piece GB/s"),
        *("collective", "ms", "low to high", "GB/s", "with packing ms", "GB/s", "digest ms", "same bytes"),
    )
    return Table(head=head, rows=tuple(_line(name, one) for name, one in found.placements.items()))


def notes(found: Refreshed) -> list[str]:
    """What the table's figures are, and on what."""
    where = ", ".join(found.gpus) if found.gpus else "host memory"
    how = {one.backend for one in found.placements.values() if one.backend}
    repeats = f"{found.repeats} repeats after {found.warmup} that do not count, each repeat's slowest process"
    copies = "Copies: every piece by a strided copy out of, or into, a mapped segment of a peer, as trainers publish. "
    collective = "Collective: the same pieces in one row of private memory; with packing: into the row, and out of it. "
    return [
        f"{found.machine.text}; {found.software.text}.",
        f"{found.preset} in {found.dtype}; one process a device ({where}); collectives: {', '.join(how) or 'none'}.",
        f"Medians of {repeats}; GB/s: bytes from others into the device that gets most, one direction.",
        f"{copies}{collective}One piece: as many bytes in one copy.",
        "Nothing else runs meanwhile. A run's time/publish_s also has the digest.",
    ]


def _line(name: str, one: PlacementFound) -> tuple[str, ...]:
    bytes_in, kinds = f"{max(one.copied_bytes) / 1e9:.4g}", " and ".join(one.kinds)
    if one.copies is None:
        return (name, bytes_in, *("-" for _ in range(13)))
    return (
        name,
        bytes_in,
        str(one.pieces),
        *_times(one.copies),
        _rate(one.busiest_bytes, one.copies),
        _rate(one.busiest_bytes, one.one_piece),
        kinds or "-",
        *_times(one.collective),
        _rate(one.collective_bytes, one.collective),
        _ms(one.packed),
        _rate(one.collective_bytes, one.packed),
        _ms(one.digest),
        "yes" if one.same else "NO",
    )


def _times(seconds: Seconds | None) -> tuple[str, str]:
    between = "-" if seconds is None else f"{seconds.low * 1e3:.2f} to {seconds.high * 1e3:.2f}"
    return _ms(seconds), between


def _ms(seconds: Seconds | None) -> str:
    return "-" if seconds is None else f"{seconds.median * 1e3:.2f}"


def _rate(size_bytes: int, seconds: Seconds | None) -> str:
    return "-" if seconds is None else f"{size_bytes / seconds.median / 1e9:.4g}"
