"""The header page of the actor weights: which weights these are, and whether they may be read.

Owns: its layout, and the order of stores. Does not know: who decides that an update happens (gate), what follows the
page. All numbers are in native byte order; every process that maps the segment is on one host.

    0    magic, 16 bytes
    16   word: version << 8 | state                       the one 8-byte store that publishes
    32   hash of the parameter table, 32 bytes
    64   run id, UTF-8, padded with zeros, 64 bytes
    128  digest of the parameters at `version`, 32 bytes  (`digest`)

Stores, by the one writer; a reader that sees a state and version sees all that was stored before them:

    initialise      hash, run id, digest, magic ▸ word (version, STABLE)      parameters are filled before
    begin_update    word (version, UPDATING)                                  parameters may change after
    publish         digest ▸ word (version + 1, STABLE)                       parameters are changed before
    poison          word (version, POISONED)

Order between processes: x86-64 keeps stores in order and loads in order. Elsewhere only a message from the writer to
the reader (the gate always sends one) orders the digest and the parameters with the word, and in the memory of a GPU
too; word and state are one store everywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from rollplex.errors import SegmentError, StaleWeightsError
from rollplex.layout.parameters import HEADER_BYTES
from rollplex.memory.segment import Mapping

MAGIC: Final = b"rollplex weights"
MAX_RUN_ID_BYTES: Final = 64
MAX_VERSION: Final = 2**53
_MAGIC_AT: Final = 0
_WORD_AT: Final = 16
_TABLE_AT: Final = 32
_RUN_AT: Final = 64
_DIGEST_AT: Final = 128
_HASH_BYTES: Final = 32
_TRIES: Final = 100
_REST_S: Final = 1.0
"""A writer changes it twice an update. Whoever reads it in so many changes, over so long, meets something else."""


class State(IntEnum):
    """Whether the parameters may be read."""

    EMPTY = 0
    """Never initialised: a new segment is zero, or its first writer has cleared it (`Mapping.clear`)."""
    STABLE = 1
    """They are those of the version, and stay so until the next update begins."""
    UPDATING = 2
    """They are changing, or whoever changed them died."""
    POISONED = 3
    """They are worthless. Only `initialise`, after they were restored, ends this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the page said at one moment."""

    state: State
    version: int
    run_id: str
    table_hash: str
    digest: str
    """Hex; of the parameters when the state is STABLE, else of the last time it was."""


class HeaderPage:
    """The page of one mapped segment, as one run with one parameter table reads and writes it."""

    def __init__(self, mapping: Mapping, *, run_id: str, table_hash: str) -> None:
        """Neither reads nor writes.

        Args:
            mapping: of the actor-weights segment.
            run_id: 1 to 64 bytes.
            table_hash: `ParameterTable.hash`.

        Raises:
            SegmentError: a segment without room for a page, or an id or hash of another form.
        """
        if mapping.size_bytes < HEADER_BYTES:
            raise SegmentError(
                "A segment has no room for a header", got=f"{mapping.size_bytes} bytes", needed=f"{HEADER_BYTES}"
            )
        if not 1 <= len(run_id.encode()) <= MAX_RUN_ID_BYTES or "\0" in run_id:
            raise SegmentError("A run id has another form", got=repr(run_id), needed=f"1 to {MAX_RUN_ID_BYTES} bytes")
        self._mapping = mapping
        self._run_id = run_id
        self._table_hash = _hash_bytes(table_hash).hex()

    def read(self) -> Header:
        """The page, whatever its state.

        Raises:
            SegmentError: not initialised, or no weights segment at all.
            StaleWeightsError: of another run or another parameter table; says both values.
        """
        end_s = time.monotonic() + _REST_S
        changes = 0
        while changes < _TRIES or time.monotonic() < end_s:
            word = self._mapping.load_word(_WORD_AT)
            header = self._decode(word)
            if self._mapping.load_word(_WORD_AT) == word:
                return header
            changes += 1
        raise SegmentError(
            "A header does not come to rest",
            got=f"{changes} changes while it was read, over {_REST_S:g} s",
            needed="none during one reading",
        )

    def require(self, version: int) -> Header:
        """The page, if the parameters may be read and are those of `version`.

        Raises:
            StaleWeightsError: another version or state; says both.
            SegmentError: as `read`.
        """
        header = self.read()
        if (header.state, header.version) != (State.STABLE, version):
            raise StaleWeightsError(
                "The weights may not be read",
                got=f"version {header.version}, {header.state.name}",
                needed=f"version {version}, {State.STABLE.name}",
                do="" if header.state is not State.POISONED else "Restore them from the last checkpoint.",
            )
        return header

    def initialise(self, version: int, digest: str) -> None:
        """Make a segment readable whose parameters have been filled (new) or restored (poisoned).

        Raises:
            SegmentError: the parameters are readable or changing already.
            StaleWeightsError: the segment has been initialised for another run or table.
        """
        word = self._mapping.load_word(_WORD_AT)
        state = _state(word)
        if state is State.POISONED:
            self._decode(word)
        elif state is not State.EMPTY:
            raise _wrong_state("initialised", state, word >> 8, "EMPTY or POISONED")
        self._mapping.write(_TABLE_AT, bytes.fromhex(self._table_hash))
        self._mapping.write(_RUN_AT, self._run_id.encode().ljust(MAX_RUN_ID_BYTES, b"\0"))
        self._mapping.write(_DIGEST_AT, _hash_bytes(digest))
        self._mapping.write(_MAGIC_AT, MAGIC)
        self._store(version, State.STABLE)

    def begin_update(self, version: int) -> None:
        """From here on the parameters of `version` may change.

        Raises:
            StaleWeightsError: they are not those of `version`, or not stable.
        """
        self.require(version)
        self._store(version, State.UPDATING)

    def publish(self, version: int, digest: str) -> None:
        """The parameters are changed and are those of `version` now.

        Raises:
            SegmentError: no update is going on, or it leads to another version.
        """
        header = self.read()
        if (header.state, header.version + 1) != (State.UPDATING, version):
            needed = f"version {version - 1}, {State.UPDATING.name}"
            raise _wrong_state(f"published as version {version}", header.state, header.version, needed)
        self._mapping.write(_DIGEST_AT, _hash_bytes(digest))
        self._store(version, State.STABLE)

    def poison(self) -> None:
        """The parameters are worthless, whatever they were.

        Raises:
            SegmentError: not initialised (nobody reads such a segment).
            StaleWeightsError: the segment is another run's or table's.
        """
        self._store(self.read().version, State.POISONED)

    def _store(self, version: int, state: State) -> None:
        if not 0 <= version <= MAX_VERSION:
            raise SegmentError("A version has another form", got=str(version), needed=f"0 to {MAX_VERSION}")
        self._mapping.store_word(_WORD_AT, version << 8 | state)

    def _decode(self, word: int) -> Header:
        magic = self._mapping.read(_MAGIC_AT, len(MAGIC))
        state = _state(word)
        if state is State.EMPTY or magic != MAGIC:
            raise SegmentError(
                "A segment does not hold weights (yet)",
                got=f"{magic!r}, {state.name}",
                needed=f"{MAGIC!r}, initialised by the trainer",
            )
        run_id = self._mapping.read(_RUN_AT, MAX_RUN_ID_BYTES).rstrip(b"\0").decode(errors="replace")
        table_hash = self._mapping.read(_TABLE_AT, _HASH_BYTES).hex()
        for what, got, needed in (
            ("The weights are another run's", run_id, self._run_id),
            ("The weights have another parameter table", table_hash, self._table_hash),
        ):
            if got != needed:
                raise StaleWeightsError(what, got=got, needed=needed)
        return Header(
            state=state,
            version=word >> 8,
            run_id=run_id,
            table_hash=table_hash,
            digest=self._mapping.read(_DIGEST_AT, _HASH_BYTES).hex(),
        )


def _state(word: int) -> State:
    try:
        return State(word & 0xFF)
    except ValueError as error:
        raise SegmentError("A header is damaged", got=f"state {word & 0xFF}", needed="a state") from error


def _hash_bytes(text: str) -> bytes:
    try:
        content = bytes.fromhex(text)
    except ValueError:
        content = b""
    if len(content) != _HASH_BYTES:
        raise SegmentError("A hash has another form", got=repr(text), needed=f"{2 * _HASH_BYTES} hexadecimal digits")
    return content


def _wrong_state(done: str, state: State, version: int, needed: str) -> SegmentError:
    return SegmentError(f"Weights cannot be {done} now", got=f"version {version}, {state.name}", needed=needed)
