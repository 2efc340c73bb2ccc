"""`python -m rollplex.presets NAME FOLDER [SEED]` writes a preset's model folder."""

from __future__ import annotations

import sys
from pathlib import Path

from rollplex.errors import RollplexError
from rollplex.presets import PRESETS, write_preset


def main(arguments: list[str]) -> int:
    """Write the folder; 0, or 2 with a line on the standard error."""
    if len(arguments) not in (2, 3) or (len(arguments) == 3 and not arguments[2].isdigit()):
        sys.stderr.write(f"usage: python -m rollplex.presets {{{','.join(PRESETS)}}} FOLDER [SEED]\n")
        return 2
    try:
        write_preset(arguments[0], Path(arguments[1]), seed=int(arguments[2]) if len(arguments) == 3 else 0)
    except (RollplexError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
