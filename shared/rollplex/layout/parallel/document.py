"""The tables of docs/layouts.md, made from the plans of the published models.

    python -m rollplex.layout.parallel.document docs/layouts.md      rewrite the part between the markers

Owns how tallies become text. Knows nothing of layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

from rollplex.errors import ConfigError
from rollplex.layout.parallel.degrees import RolloutLayout, TrainingLayout
from rollplex.layout.parallel.tally import Tally, tally_model
from rollplex.layout.published import QWEN2_5_VL
from rollplex.layout.shape import ModelShape

BEGIN: Final = "<!-- begin of the generated tables: python -m rollplex.layout.parallel.document docs/layouts.md -->"
END: Final = "<!-- end of the generated tables -->"
DEGREES: Final = (1, 2, 4, 8)
DTYPE: Final = "bfloat16"
_HEADINGS: Final = (
    "training TP",
    "rollout TP",
    "two copies",
    "stored",
    "aliased",
    "refreshed",
    "rebuilt",
    "aliased share",
    "rebuilt, one tensor",
    "refreshed, whole tower",
)


def tables() -> str:
    """The whole generated part, without the markers."""
    return "\n".join(line for size, shape in QWEN2_5_VL.items() for line in _model(size, shape)).strip()


def updated(document: str) -> str:
    """The document with its generated part made anew.

    Raises:
        ValueError: it has no markers.
    """
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _model(size: str, shape: ModelShape) -> Iterator[str]:
    yield f"### Qwen2.5-VL-{size}\n"
    yield "| " + " | ".join(_HEADINGS) + " |"
    yield "|" + "---:|" * len(_HEADINGS)
    for training, rollout in product(DEGREES, DEGREES):
        yield _row(shape, training, rollout)
    yield ""


def _row(shape: ModelShape, training: int, rollout: int) -> str:
    try:
        cells = _cells(shape, training, rollout)
    except ConfigError as error:
        cells = [f"refused: {error.where}, {error.got}"] + [""] * (len(_HEADINGS) - 3)
    return "| " + " | ".join([str(training), str(rollout), *cells]) + " |"


def _cells(shape: ModelShape, training: int, rollout: int) -> list[str]:
    trained = TrainingLayout(degree=training)

    def count(**options: bool) -> Tally:
        return tally_model(shape, trained, RolloutLayout(degree=rollout, **options), dtype=DTYPE)

    plain = count()
    numbers = (plain.training + plain.rollout, plain.stored, plain.aliased, plain.refreshed, plain.rebuilt)
    return [
        *map(_gib, numbers),
        f"{100 * plain.aliased / plain.rollout:.1f} %",
        _gib(count(one_tensor=True).rebuilt),
        _gib(count(vision_sharded=False).refreshed),
    ]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f}" if size_bytes else "0"


def main(arguments: list[str]) -> int:
    """Command line; see the module's docstring."""
    match arguments:
        case [path]:
            document = Path(path)
            document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
            return 0
        case _:
            sys.stderr.write("usage: python -m rollplex.layout.parallel.document docs/layouts.md\n")
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
