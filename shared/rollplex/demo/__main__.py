"""`python -m rollplex.demo FOLDER [--quick]` writes the digits demo's folder (config.yaml, data, model); runs nothing.

For runs that somebody else starts, such as Compose. Knows only how to write it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rollplex.demo.recipe import write_demo
from rollplex.errors import RollplexError

EXIT_FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; 0, or 2 with a line on the standard error."""
    parser = argparse.ArgumentParser(prog="python -m rollplex.demo", description="Write the digits demo; run nothing.")
    parser.add_argument("folder", type=Path, help="made if it is not there; files of the same names are replaced")
    parser.add_argument("--quick", action="store_true", help="four digits and 400 iterations instead of ten and 1800")
    args = parser.parse_args(argv)
    try:
        written = write_demo(args.folder, quick=args.quick)
    except (RollplexError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    sys.stdout.write(f"{written.config}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
