"""Sizes in bytes."""

from __future__ import annotations

import pytest

from rollplex.config.base import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("10B", 10),
        ("7kb", 7000),
        ("1TiB", 2**40),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8", "8G", "GiB", "-1GiB", "1e3B", "8GiB8", "٣GiB", "0.1B", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_size(text)


def test_numbers_are_left_to_the_field() -> None:
    assert parse_size(5) == 5
    assert parse_size(None) is None
