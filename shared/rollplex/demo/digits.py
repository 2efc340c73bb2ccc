"""The digits demo's data: scikit-learn's 1,797 scans of handwritten digits, as image files and JSONL rows.

Knows nothing of models or configurations. Needs scikit-learn (the extra `demo`), which brings the scans along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rollplex.errors import DataError

QUESTION: Final = "which digit is this"
SIDE: Final = 56
"""Pixels; the smallest picture that Qwen2.5-VL does not enlarge: four vision tokens."""
GREY: Final = 128
"""Of the control's pictures. Not 0: black pictures gave a gradient norm of 1e7."""
NUM_SCANS: Final = 1797
NUM_HELD_OUT: Final = 397
TRAIN, HELD_OUT, HELD_OUT_GREY = "train.jsonl", "held_out.jsonl", "held_out_grey.jsonl"
_GREY_IMAGE = "images/grey.png"


@dataclass(frozen=True, kw_only=True)
class Written:
    """How many rows the files have."""

    num_train: int
    num_held_out: int


def write_digits(folder: Path, *, digits: Sequence[int] = range(10), seed: int = 0) -> Written:
    """Write images/*.png, train.jsonl, held_out.jsonl, and held_out_grey.jsonl (the same rows with grey pictures).

    The split does not depend on `digits`: of all scans, in an order drawn from `seed`, the last 397 are held out.

    Args:
        folder: made if it is not there; files of the same names are replaced.
        digits: only scans of these.
        seed: of the order.

    Raises:
        DataError: scikit-learn is not installed, or no digit was asked for.
        OSError: the folder cannot be written.
    """
    if not digits or not set(digits) <= set(range(10)):
        raise DataError("The digits to write are not digits", got=repr(list(digits)), needed="some of 0 to 9")
    scans, labels = _scans()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(NUM_SCANS)
    picked = [int(scan) for scan in order if int(labels[scan]) in digits]
    held_out = {int(scan) for scan in order[NUM_SCANS - NUM_HELD_OUT :]}
    for scan in picked:
        _picture(scans[scan]).save(folder / _image(scan))
    Image.new("RGB", (SIDE, SIDE), (GREY, GREY, GREY)).save(folder / _GREY_IMAGE)
    train = [_row(_image(scan), int(labels[scan])) for scan in picked if scan not in held_out]
    test = [_row(_image(scan), int(labels[scan])) for scan in picked if scan in held_out]
    grey = [row | {"images": [_GREY_IMAGE]} for row in test]
    for name, rows in ((TRAIN, train), (HELD_OUT, test), (HELD_OUT_GREY, grey)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Written(num_train=len(train), num_held_out=len(test))


def _scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Scans [1797, 8, 8] with values 0 to 16, and their digits [1797]."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise DataError(
            "The digits come with scikit-learn, which is not installed", do="pip install 'rollplex[demo]'."
        ) from None
    bunch: Any = load_digits()
    scans, labels = np.asarray(bunch.images, dtype=np.float64), np.asarray(bunch.target, dtype=np.int64)
    if scans.shape != (NUM_SCANS, 8, 8):
        raise DataError(
            "scikit-learn's digits are not the known ones", got=str(scans.shape), needed=str((NUM_SCANS, 8, 8))
        )
    return scans, labels


def _picture(scan: NDArray[np.float64]) -> Image.Image:
    """A scan [8, 8] of 0 to 16 as an RGB picture of 56 x 56, bicubic."""
    grey = Image.fromarray(np.round(scan * (255.0 / 16.0)).astype(np.uint8))
    return grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")


def _image(scan: int) -> str:
    return f"images/{scan + 1:04d}.png"


def _row(image: str, digit: int) -> dict[str, object]:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return {"prompt": [{"role": "user", "content": content}], "images": [image], "answer": str(digit)}
