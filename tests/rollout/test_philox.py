"""Counter-based numbers: the published vectors, what the key depends on, and the ends of the interval."""

from __future__ import annotations

import numpy as np
import pytest

from rollplex.errors import EngineError
from rollplex_rollout.philox import BLOCK_POSITIONS, Draws, draw_key, philox4x32, unit_interval

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def uniforms(position: int = 0, *, prompts: list[int] | None = None, samples: list[int] | None = None) -> list[float]:
    draws = Draws(seed=7, purpose="train", step=3, prompts=prompts or [5], samples=samples or [0])
    return [float(value) for value in draws.at(position)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_random123_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    first, second, third, fourth = (np.asarray([word], dtype=np.uint64) for word in counter)
    result = philox4x32((first, second, third, fourth), key)
    assert tuple(int(word[0]) for word in result) == expected


def test_many_counters_at_once_equal_one_at_a_time() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, size=(4, 50), dtype=np.uint64)
    whole = philox4x32((words[0], words[1], words[2], words[3]), (1, 2))
    for row in range(50):
        one = philox4x32((words[0, [row]], words[1, [row]], words[2, [row]], words[3, [row]]), (1, 2))
        assert [int(word[0]) for word in one] == [int(word[row]) for word in whole]


def test_a_draw_is_the_documented_function_of_its_key() -> None:
    prompt = 2**40 + 9
    first, second, _, _ = philox4x32(
        (
            np.asarray([9], dtype=np.uint64),
            np.asarray([2**8], dtype=np.uint64),
            np.asarray([6], dtype=np.uint64),
            np.asarray([70], dtype=np.uint64),
        ),
        draw_key(seed=7, purpose="train", step=3),
    )
    expected = ((int(first[0]) << 32 | int(second[0])) >> 11) / 2**53
    assert uniforms(70, prompts=[prompt], samples=[6]) == [expected]


def test_every_part_of_the_key_changes_the_number() -> None:
    base = uniforms()
    others = [
        [float(Draws(prompts=[5], samples=[0], seed=8, purpose="train", step=3).at(0)[0])],
        [float(Draws(prompts=[5], samples=[0], seed=7, purpose="eval:test", step=3).at(0)[0])],
        [float(Draws(prompts=[5], samples=[0], seed=7, purpose="train", step=4).at(0)[0])],
        uniforms(prompts=[6]),
        uniforms(prompts=[5 + 2**32]),
        uniforms(samples=[1]),
        uniforms(1),
        uniforms(BLOCK_POSITIONS),
    ]
    assert len({tuple(values) for values in [base, *others]}) == 1 + len(others)


def test_the_number_of_a_key_never_moves() -> None:
    """Worked out apart from this code, in plain integers; a change here changes every run that anybody recorded."""
    assert uniforms() == [0.9295750105768086]


def test_a_row_draws_the_same_whatever_else_is_in_the_batch_and_in_any_order_of_positions() -> None:
    alone = Draws(seed=1, purpose="train", step=0, prompts=[4], samples=[2])
    batch = Draws(seed=1, purpose="train", step=0, prompts=[9, 4, 0], samples=[0, 2, 1])
    for position in (40, 3, 100, 3, 31, 32):
        assert alone.at(position)[0] == batch.at(position)[1]


def test_numbers_lie_in_the_half_open_interval_at_both_ends() -> None:
    ones, none = np.asarray([2**32 - 1], dtype=np.uint64), np.asarray([0], dtype=np.uint64)
    assert float(unit_interval(none, none)[0]) == 0.0
    assert float(unit_interval(ones, ones)[0]) == 1.0 - 2.0**-53


def test_numbers_are_uniform() -> None:
    draws = Draws(seed=11, purpose="train", step=0, prompts=list(range(400)), samples=[0] * 400)
    values = np.concatenate([draws.at(position) for position in range(100)])
    counts = np.histogram(values, bins=64, range=(0.0, 1.0))[0]
    expected = values.size / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 30.0 < chi_square < 110.0  # 63 degrees of freedom: 99.98 % of fair draws


@pytest.mark.parametrize(
    ("prompts", "samples", "position"),
    [([-1], [0], 0), ([2**63], [0], 0), ([0], [2**32], 0), ([0], [0], 2**32), ([0], [0], -1)],
)
def test_a_part_of_the_key_that_does_not_fit_is_refused(prompts: list[int], samples: list[int], position: int) -> None:
    with pytest.raises(EngineError):
        Draws(seed=0, purpose="train", step=0, prompts=prompts, samples=samples).at(position)


def test_rows_and_samples_must_pair_up() -> None:
    with pytest.raises(EngineError, match="2 and 1"):
        Draws(seed=0, purpose="train", step=0, prompts=[1, 2], samples=[0])
