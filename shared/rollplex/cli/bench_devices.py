"""`rollplex bench refresh` and `placements`: from arguments to the bench, and to what is printed and the exit code."""

from __future__ import annotations

from pathlib import Path

from rollplex.bench import refresh
from rollplex.bench.placement import parse_placements
from rollplex.bench.recipe import parse_device
from rollplex.bench.tables import markdown as in_markdown
from rollplex.bench.tables import plain
from rollplex.cli.output import say
from rollplex.cli.start import fresh, timestamp

EXIT_FAILED = 1


def bench_refresh(
    *,
    preset: str,
    placements: str,
    device: str,
    gpu: int,
    repeats: int,
    warmup: int,
    out: Path | None,
    runs_dir: Path,
    markdown: bool,
    command: str,
) -> int:
    """Measure and print the table; 0, or 1 if copies and collectives left different bytes.

    Raises:
        RollplexError: as `measure_refresh`.
    """
    out = (out or fresh(runs_dir, f"refresh-{timestamp()}")).absolute()
    wanted = refresh.Wanted(
        preset=preset,
        placements=parse_placements(placements),
        repeats=repeats,
        warmup=warmup,
        device=parse_device(device),
        out=out,
        gpu=gpu,
        command=command,
    )
    say(f"folder {out}")
    found = refresh.measure_refresh(wanted, say=say)
    table = refresh.table_of(found)
    say("")
    for line in in_markdown(table) if markdown else plain(table):
        say(line)
    say("")
    for line in refresh.notes(found):
        say(f"- {line}" if markdown else line)
    say(f"kept in {out / 'refresh.json'}")
    return 0 if found.same else EXIT_FAILED
