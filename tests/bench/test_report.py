"""What a result says, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollplex.bench.facts import Facts
from rollplex.bench.folder import Made
from rollplex.bench.report import report, verdict
from rollplex.bench.result import Result
from rollplex.bench.rows import Row, choose_modes
from rollplex.bench.schedules import Plan, summed_up
from rollplex.bench.summary import gains

MakeRow = Callable[..., Row]
SumUp = Callable[..., Result]
SIX = choose_modes("serial,overlap,stream", "shared,replicated")


@pytest.fixture
def sum_up(made: Made, facts: Facts) -> SumUp:
    def make(rows: list[Row]) -> Result:
        modes = [mode for mode in SIX if any(row.mode == mode for row in rows)]
        plan = Plan(
            config=Path("c.yaml"),
            overrides=(),
            modes=modes,
            repeats=max(row.repeat for row in rows) + 1,
            iterations=4,
            warmup=1,
            out=Path("out"),
            command="rollplex bench schedules c.yaml",
        )
        return summed_up(plan, made, facts, rows)

    return make


def _six(row: MakeRow, repeats: int = 1, **given: object) -> list[Row]:
    return [row(mode.schedule, mode.prefix, repeat, **given) for mode in SIX for repeat in range(repeats)]


def _text(result: Result, *, in_markdown: bool = False) -> str:
    """With every run of white space as one blank: where lines are broken does not matter."""
    return " ".join(" ".join(report(result, in_markdown=in_markdown)).split())


def test_the_head_names_date_machine_versions_commit_workload_and_command(row: MakeRow, sum_up: SumUp) -> None:
    text = _text(sum_up(_six(row, 3)))
    assert "2026-11-29, AMD EPYC, 2 cores, 24 GiB, Debian 12, Linux 6.1" in text
    assert "Python 3.11.7, torch 2.13.0, transformers 5.24.0, commit aaaaaaaaaa." in text
    assert "2 prompts x 8 responses an iteration, P = 600 prompt tokens (576 of them vision), R = 32" in text
    assert "5.0 million parameters, float32, with a reference model; threads per worker: 1" in text
    assert "3 repeats of 6 modes, interleaved; 4 iterations each, the first 1 not counted" in text
    assert "Command: `rollplex bench schedules c.yaml`" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [(1.0, "2.00x"), (2.5, "no gain: 25% slower"), (2.06, "no gain: 3% slower"), (1.98, "1.01x")],
)
def test_a_gain_is_a_number_and_a_loss_is_called_one(row: MakeRow, other: float, words: str) -> None:
    (gain,) = gains([row("serial", "shared"), row("overlap", "shared", iteration=other)])
    assert verdict(gain) == words


def test_a_gain_smaller_than_the_spread_is_called_within_noise_with_the_spread(row: MakeRow) -> None:
    rows = [row("serial", "shared", repeat, iteration=value) for repeat, value in enumerate((1.9, 2.0, 2.1))]
    rows += [row("overlap", "shared", repeat, iteration=1.95) for repeat in range(3)]
    (gain,) = gains(rows)
    assert verdict(gain) == "within noise (1.03x, repeats differ by 10%)"


def test_the_ceiling_of_sharing_stands_beside_the_gain_of_scoring_and_training_alone(
    row: MakeRow, sum_up: SumUp
) -> None:
    rows = [
        row("serial", "replicated", iteration=9.0, score=2.0, train=6.0),
        row("serial", "shared", iteration=3.0, score=0.5, train=1.5),
    ]
    text = _text(sum_up(rows))
    assert "G(P+R)/(P+GR) = 5.91x" in text
    assert "concerns reference scoring and actor training only: the rollout is the same in all modes" in text
    assert "scoring and training alone (serial, SCORE + TRAIN, prefixes included): 4.00x" in text
    assert "sharing alone 3.00x" in text


def test_the_ceiling_of_overlap_says_what_can_hide(row: MakeRow, sum_up: SumUp) -> None:
    text = _text(sum_up([row("serial", "shared"), row("overlap", "shared", rollout=0.8, hidden_share=0.9)]))
    assert (
        "the smaller of prefix forwards (0.600 s) and rollout (0.500 s), 0.500 s of an iteration: at most 1.33x" in text
    )
    assert "costs the rollout: 0.500 s under serial, 0.800 s under overlap (90% of prefix forward time hidden)" in text


def test_schedules_that_gave_the_same_weights_are_said_to(row: MakeRow, sum_up: SumUp) -> None:
    result = sum_up(_six(row, 2))
    assert result.exact
    assert "Exact: serial, overlap and stream ended with the same weights, bit for bit" in _text(result)


def test_weights_that_differ_are_an_error(row: MakeRow, sum_up: SumUp) -> None:
    result = sum_up([row("serial", "shared"), row("overlap", "shared", digest="0123456789abcdef")])
    assert not result.exact
    text = _text(result)
    assert "ERROR: weights differ in the end, shared: serial shared weigh; overlap 0123456789ab" in text
    assert "Exact" not in text


def test_what_makes_figures_worth_less_is_said(row: MakeRow, sum_up: SumUp) -> None:
    quiet = _text(sum_up(_six(row, 2, others_cpus=0.05)))
    assert "WARNING" not in quiet
    busy = _text(sum_up(_six(row, 1, others_cpus=0.7)))
    assert "other programs kept 0.7 of 2 cores busy" in busy
    assert "one repeat, so it is not known how much the figures differ" in busy


def test_a_gain_that_is_more_than_could_be_hidden_is_doubted(row: MakeRow, sum_up: SumUp) -> None:
    serial = row("serial", "shared", iteration=2.0, rollout=0.5, prefix_forward=0.6, score=0.4, train=1.0)
    likely = _text(sum_up([serial, row("overlap", "shared", iteration=1.5)]))
    assert "could be hidden" not in likely
    unlikely = _text(sum_up([serial, row("overlap", "shared", iteration=1.2)]))
    assert "overlap alone, prefixes shared, 1.67x, is more than could be hidden (1.33x)" in unlikely


def test_uncommitted_changes_are_told(row: MakeRow, sum_up: SumUp, made: Made) -> None:
    result = sum_up(_six(row, 2))
    changed = msgspec.structs.replace(made.software, changes="0123")
    result = msgspec.structs.replace(result, made=msgspec.structs.replace(made, software=changed))
    text = _text(result)
    assert "commit aaaaaaaaaa with changes" in text
    assert "changes that are in no commit" in text


def test_every_line_of_the_plain_text_fits_and_tables_are_aligned(row: MakeRow, sum_up: SumUp) -> None:
    lines = report(sum_up(_six(row, 3)))
    tables = [lines[at : at + 7] for at, line in enumerate(lines) if line.startswith("mode ")]
    assert [len({len(line) for line in table}) for table in tables] == [1, 1]
    assert all(len(line) <= 120 for line in lines if "  " not in line)


def test_markdown_has_tables_and_lists(row: MakeRow, sum_up: SumUp) -> None:
    lines = report(sum_up(_six(row, 3)), in_markdown=True)
    (head,) = [at for at, line in enumerate(lines) if line.startswith("| mode | s/iteration |")]
    assert set(lines[head + 1]) <= set("|-: ")
    assert len({line.count("|") for line in lines[head : head + 8]}) == 1
    assert lines[head + 2].startswith("| serial shared | 2.00 | 2.00 to 2.00 | 0.500 |")
    assert lines[0].startswith("- 2026-11-29")


def test_prefill_and_decode_are_columns_if_every_run_says_them(row: MakeRow, sum_up: SumUp) -> None:
    assert "prefill" not in _text(sum_up(_six(row)))
    rows = [
        msgspec.structs.replace(one, median_s={**one.median_s, "prefill": 0.123, "decode": 0.4}) for one in _six(row)
    ]
    text = _text(sum_up(rows))
    assert "prefill decode" in text
    assert "0.123" in text


def test_rates_prefix_work_and_the_peaks_of_a_gpu_are_columns(row: MakeRow, sum_up: SumUp) -> None:
    rows = _six(row, decode_tokens_s=15_600.0, prefix_tokens_s=49_000.0, work_hidden=0.75, prompts=2)
    text = _text(sum_up(rows))
    assert "prompts decode tokens/s prefix tokens/s prefix work hidden" in text
    assert "15,600 49,000 75%" in text
    assert "GiB in" not in text
    peaks = [msgspec.structs.replace(one, peak_bytes={"rollout": 2**36, "train": 2**37}) for one in rows]
    assert "GiB in rollout GiB in train" in _text(sum_up(peaks))


def test_the_window_ratio_stands_with_what_it_is_made_of(row: MakeRow, sum_up: SumUp) -> None:
    rows = [
        row("serial", "shared", generate=4.0, prefix_forward=2.0),
        row("overlap", "shared", generate=5.0, work_hidden=1.0),
    ]
    text = _text(sum_up(rows))
    assert "rollout alone 4.00 s, prefix forwards alone 2.00 s, of which 100% were done beside the rollout" in text
    assert "then took 5.00 s (1.25x): window ratio 1.20." in text


def test_rows_with_fewer_prompts_are_said_to_be_scaled_and_rows_that_are_missing_are_counted(
    row: MakeRow, sum_up: SumUp, facts: Facts
) -> None:
    rows = [row("serial", "shared", prompts=facts.prompts), row("serial", "replicated", prompts=1)]
    result = sum_up(rows)
    text = _text(result)
    assert (
        "serial replicated was measured with 1 prompts an iteration. Its SCORE and TRAIN are multiplied by 2;" in text
    )
    assert result.modes[1].seconds["iteration"].median == pytest.approx(2.0 + 0.4 + 1.0)
    assert "not measured yet" not in text
    text = _text(msgspec.structs.replace(result, missing=4))
    assert "4 rows of this bench are not measured yet" in text


def test_on_a_gpu_weights_are_not_held_to_the_same_bits(row: MakeRow, sum_up: SumUp, made: Made) -> None:
    rows = [row("serial", "shared"), row("overlap", "shared", digest="other weights")]
    result = sum_up(rows)
    assert not result.exact
    config = {**made.config, "device": {"kind": "cuda"}}
    result = msgspec.structs.replace(result, made=msgspec.structs.replace(made, config=config))
    assert result.exact
    text = _text(result)
    assert "ERROR" not in text
    assert "`rollplex bench gradients` compares the schedules" in text


def test_a_result_can_be_read_back(row: MakeRow, sum_up: SumUp) -> None:
    result = sum_up(_six(row, 2))
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
