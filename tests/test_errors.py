"""Every error says what happened, what it got, what it needed and what to do, and survives a copy."""

from __future__ import annotations

import copy

import pytest

from rollplex import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RollplexError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_shows_its_parts_and_can_be_copied(kind: type[errors.RollplexError]) -> None:
    error = kind("It broke", got="3", needed="4", do="Give 4.", where="row 7")
    assert str(error) == "row 7: It broke; got 3; needed 4. Give 4."
    twin = copy.copy(error)
    assert (type(twin), str(twin)) == (kind, str(error))
    assert str(kind("It broke")) == "It broke"


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    for kind in KINDS:
        assert kind.__name__ in errors.__doc__
