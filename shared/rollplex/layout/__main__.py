"""`python -m rollplex.layout FOLDER DTYPE`: a model folder's parameter table as JSON, for services in any language.

Owns its form. Entries are in the order of their offsets; `pieces` say which rows (and columns; null: all) of a stored
parameter are which of the model's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from rollplex.errors import RollplexError
from rollplex.layout.parameters import ParameterTable, parameter_table
from rollplex.layout.shape import read_shape


def as_json(table: ParameterTable) -> bytes:
    """hash, dtype, header_bytes, total_bytes, entries."""
    names = {"hash": table.hash, **msgspec.to_builtins(table)}
    return msgspec.json.format(msgspec.json.encode(names)) + b"\n"


def main() -> int:
    """0, or 1 for a folder that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m rollplex.layout")
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--freeze-vision", action="store_true", help="as ModelSpec.freeze_vision says")
    args = parser.parse_args()
    try:
        table = parameter_table(read_shape(args.folder), dtype=args.dtype, freeze_vision=args.freeze_vision)
    except RollplexError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.buffer.write(as_json(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
