"""Numbers set in a configuration's text: what is changed, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.config import yaml_text
from rollplex.config.editing import set_numbers
from rollplex.errors import ConfigError

NEW = {"prefix_share": 0.64, "decode_share": 0.36}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "m: 1  #\ndevice:\n  #1\n  kind: cuda\n  #2\n  prefix_share: 1  #3\nrun: {}\n",
            "m: 1  #\ndevice:\n  #1\n  kind: cuda\n  #2\n  prefix_share: 0.64  #3\n  decode_share: 0.36\nrun: {}\n",
        ),
        (
            "device:\n    kind: cuda\n\n# the run\nrun:\n    seed: 1\n",
            "device:\n    kind: cuda\n    prefix_share: 0.64\n    decode_share: 0.36\n\n# the run\nrun:\n    seed: 1\n",
        ),
        ("device:\n  gpu: 1", "device:\n  gpu: 1\n  prefix_share: 0.64\n  decode_share: 0.36"),
        (
            "device:\n  other:\n    - 1\nrun: 1\n",
            "device:\n  prefix_share: 0.64\n  decode_share: 0.36\n  other:\n    - 1\nrun: 1\n",
        ),
        ("device: {kind: cuda}", "device: {decode_share: 0.36, prefix_share: 0.64, kind: cuda}"),
        ("device: {}\n", "device: {decode_share: 0.36, prefix_share: 0.64}\n"),
        ("run: {seed: 1}", "run: {seed: 1}\ndevice:\n  prefix_share: 0.64\n  decode_share: 0.36\n"),
        ("device: {prefix_share: 1, decode_share: .5}\n", "device: {prefix_share: 0.64, decode_share: 0.36}\n"),
    ],
)
def test_only_the_numbers_change(before: str, after: str) -> None:
    changed = set_numbers(before, "device", NEW, where="c.yaml")
    assert changed == after


@given(shares=st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0)))
def test_every_share_is_read_back_as_it_was(shares: tuple[float, float]) -> None:
    values = dict(zip(NEW, shares, strict=True))
    text = set_numbers("device:\n  gpu: 1\n", "device", values, where="")
    assert yaml_text.parse(text, where="").value == {"device": {"gpu": 1, **values}}


def test_setting_them_again_changes_nothing() -> None:
    once = set_numbers("device:\n  gpu: 1\n", "device", NEW, where="")
    assert set_numbers(once, "device", NEW, where="") == once


@pytest.mark.parametrize("text", ["device:\nrun: {}\n", "{run: {seed: 1}}\n", "- device\n"])
def test_a_text_that_cannot_be_changed_safely_is_left_to_its_owner(text: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        set_numbers(text, "device", NEW, where="c.yaml")
