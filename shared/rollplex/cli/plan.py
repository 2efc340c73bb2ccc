"""Carries out `rollplex plan`: a child of the coordinator's package computes, and what it found is shown."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollplex.cli.child import run_child
from rollplex.config import load
from rollplex.config.environment import child_environment
from rollplex.config.wire import data_sources
from rollplex.errors import ConfigError, DataError
from rollplex.planning.plan import Plan
from rollplex.planning.text import text_of
from rollplex.programs import own

GRACE_S = 5.0


def show_plan(
    file: Path,
    overrides: Sequence[str],
    options: Sequence[str],
    *,
    prompt_tokens: int | None,
    image_tokens: int,
    as_json: bool,
    plot: Path | None,
    say: Callable[[str], object],
) -> int:
    """Compute a plan and show it; the exit code: 0, also of a plan in which nothing fits.

    Args:
        options: of `python -m rollplex_coordinator.planning`, beside those that follow.
        prompt_tokens: of the longest prompt; None: the dataset is looked through, and says it and its image tokens.

    Raises:
        ConfigError: a plot that cannot be written; no prompt length is given, and the dataset cannot say it.
    """
    if plot is not None:
        from rollplex.bench.plot import check_plot  # noqa: PLC0415 - only plots need it

        check_plot(plot)
    if prompt_tokens is None:
        prompt_tokens, image_tokens = _lengths(file, overrides)
    lengths = ["--prompt-tokens", str(prompt_tokens), "--image-tokens", str(image_tokens)]
    with tempfile.TemporaryDirectory(prefix="rollplex-") as folder:
        out = Path(folder) / "plan.json"
        command = own("rollplex_coordinator.planning", str(file), "--out", str(out))
        command += [part for override in overrides for part in ("--set", override)]
        code = run_child([*command, *lengths, *options], grace_s=GRACE_S, environment=child_environment(threads=1))
        if code:
            return code
        encoded = out.read_bytes()
    plan = msgspec.json.decode(encoded, type=Plan)
    if plot is not None:
        from rollplex.planning.plot import write_plan_plot  # noqa: PLC0415 - only plots need it

        write_plan_plot(plan, plot)
    say(msgspec.json.format(encoded).decode() if as_json else text_of(plan).rstrip("\n"))
    return 0


def _lengths(file: Path, overrides: Sequence[str]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the most media, from the data."""
    from rollplex.data.report import examine  # noqa: PLC0415 - loads a tokenizer

    config = load(file, overrides)
    try:
        report = examine(data_sources(config)[0], config.model.path, decode=False)
    except DataError as error:
        raise ConfigError(error.what, got=error.got, needed=error.needed, do=error.do, where=error.where) from error
    if report.prompt_tokens is None:
        raise ConfigError("No row of the data can be used", do="See `rollplex data check`.", where="data.path")
    media = report.media_tokens
    return report.prompt_tokens.most, 0 if media is None else media.most
