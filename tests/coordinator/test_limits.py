"""How many files a coordinator may hold open."""

from __future__ import annotations

import resource

import pytest

from rollplex.errors import ConfigError
from rollplex_coordinator.limits import LEAST_FILES, WANTED_FILES, raise_file_limit

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (64, UNLIMITED, WANTED_FILES),
        (64, 10_000, WANTED_FILES),
        (64, 300, 300),
        (1024, 1024, 1024),
        (LEAST_FILES, LEAST_FILES, LEAST_FILES),
        (5000, 10_000, 5000),
        (UNLIMITED, UNLIMITED, UNLIMITED),
    ],
)
def test_it_is_raised_as_far_as_is_wanted_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int
) -> None:
    held = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: held.append(pair))
    raise_file_limit()
    assert held[-1] == (after, hard)


def test_too_few_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: None)
    with pytest.raises(ConfigError, match=r"got at most 100; needed 256\. Raise .*ulimit -n 1024"):
        raise_file_limit()
