"""The coordinator's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_coordinator.options import Options, ResumeOptions, parse_options

GIVEN = ["--config", "c.yaml", "--run-dir", "runs/1"]


def test_only_configuration_and_run_directory_must_be_given() -> None:
    assert parse_options(GIVEN) == Options(
        config=Path("c.yaml"),
        run_dir=Path("runs/1"),
        iterations=None,
        serve=False,
        external_workers=False,
        die_with_parent=False,
        overrides=(),
    )


def test_every_option_is_read() -> None:
    argv = [*GIVEN, "--iterations", "3", "--serve", "--external-workers", "--die-with-parent", "--dry-run"]
    options = parse_options([*argv, "--set", "run.seed=1", "--set", "model.dtype=bfloat16"])
    assert (options.iterations, options.serve, options.external_workers, options.die_with_parent) == (3, *[True] * 3)
    assert options.overrides == ("run.seed=1", "model.dtype=bfloat16")
    assert options.dry_run


def test_a_resumption_is_from_the_newest_checkpoint_or_from_one() -> None:
    assert parse_options(GIVEN).resume is None
    assert parse_options([*GIVEN, "--resume"]).resume == ResumeOptions()
    argv = [*GIVEN, "--resume", "runs/1/checkpoints/step_3", "--accept", "a.b", "--accept", "c"]
    wanted = ResumeOptions(checkpoint=Path("runs/1/checkpoints/step_3"), accepted=("a.b", "c"))
    assert parse_options(argv).resume == wanted
    wanted = ResumeOptions(accepted=("a.b",), if_any=True)
    assert parse_options([*GIVEN, "--if-checkpoint=resume", "--accept=a.b"]).resume == wanted
    assert parse_options([*GIVEN, "--if-checkpoint=begin"]).resume is None
    assert parse_options([*GIVEN, "--if-checkpoint=resume", "--resume"]).resume == ResumeOptions()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--config, --run-dir"),
        ([*GIVEN, "--iterations", "-1"], "0 to 2147483647; got -1"),
        ([*GIVEN, "--iterations", "2147483648"], "0 to 2147483647; got 2147483648"),
        ([*GIVEN, "--iterations", "many"], "invalid int value: 'many'"),
        ([*GIVEN, "--sevre"], "unrecognized arguments: --sevre"),
        ([*GIVEN, "--accept", "run.seed"], "it needs --resume"),
        ([*GIVEN, "--if-checkpoint=maybe"], "invalid choice: 'maybe'"),
        ([*GIVEN, "--if-checkpoint=resume", "--dry-run"], "goes with neither --verify nor --dry-run"),
        ([*GIVEN, "--resume", "--dry-run"], "goes with neither --verify nor --dry-run"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
