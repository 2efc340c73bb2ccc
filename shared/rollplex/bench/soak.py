"""Does memory grow? Many rows of large images, several epochs through a real node, resident memory of every process.

Owns the dataset and the run; what the samples say is `resident`'s.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from rollplex.bench.resident import Growth, Sample, Watch, growth
from rollplex.cli.child import run_child
from rollplex.cli.start import coordinator_command, fresh, prepare
from rollplex.config.environment import child_environment
from rollplex.config.yaml_text import dumps
from rollplex.errors import RollplexError
from rollplex.presets import SPECIAL_TOKENS, TINY, write_preset
from rollplex.presets.tokenizer import END_OF_TURN
from rollplex.whole_file import write_whole

MAX_PIXELS: Final = 56 * 56
"""Of a picture as the model gets it: four vision tokens, so that data, not arithmetic, takes the time."""
LIMIT: Final = 0.02
"""Growth from the first epoch's end to the last's that counts as none."""


class Soak(Struct, frozen=True, kw_only=True):
    """What was run and seen."""

    rows: int
    image_bytes: int
    epochs: int
    prompts: int
    seconds: float
    samples: tuple[Sample, ...]
    growth: tuple[Growth, ...]

    @property
    def grown(self) -> tuple[Growth, ...]:
        """Processes that grew by more than `LIMIT`."""
        return tuple(one for one in self.growth if one.relative > LIMIT)


def write_rows(folder: Path, *, rows: int, image_bytes: int, prompts: int, epochs: int) -> Path:
    """A model, `rows` rows with a picture of noise each (PNG cannot shrink noise), and the configuration.

    Args:
        image_bytes: size of a file, about.
        prompts: of one iteration.

    Returns:
        The configuration.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_preset(TINY.name, folder / "model")
    side = max(56, round((image_bytes / 3) ** 0.5))
    lines = []
    for number in range(rows):
        name = f"images/{number:05}.png"
        if not (folder / name).is_file():
            noise = np.random.Generator(np.random.Philox(key=number)).integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / name, compress_level=0)
        content = [{"type": "image"}, {"type": "text", "text": "what is this"}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "images": [name]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    values = {
        "run": {"name": "memory", "iterations": rows * epochs // prompts},
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl", "prompts_per_iteration": prompts, "max_pixels": MAX_PIXELS},
        "rollout": {
            "group_size": 2,
            "max_new_tokens": 2,
            "never_sample": [token for token in SPECIAL_TOKENS if token != END_OF_TURN],
        },
        "rewards": {"functions": [{"function": "rollplex.bench.rewards:spread"}]},
        "checkpoint": {"every": 0},
    }
    config = folder / "config.yaml"
    config.write_text(dumps(values), encoding="utf-8")
    return config


def soak(folder: Path, *, rows: int, image_bytes: int, epochs: int, prompts: int, say: Callable[[str], object]) -> Soak:
    """Write the rows, run them, watch; the samples and what they say are also in FOLDER/memory.json.

    Raises:
        RollplexError: the run did not end well.
        OSError: the folder cannot be written.
    """
    folder = folder.absolute()
    say(f"writing {rows} pictures of {image_bytes / 1e6:.1f} MB into {folder}")
    config = write_rows(folder, rows=rows, image_bytes=image_bytes, prompts=prompts, epochs=epochs)
    prepared = prepare(config, [], fresh(folder, "run"), folder)
    metrics, log_file = prepared.run_dir / "metrics.jsonl", folder / "coordinator.log"
    say(f"{rows * epochs // prompts} iterations; the coordinator's output is in {log_file}")
    start_s = time.monotonic()
    with log_file.open("wb") as log, Watch(lambda: _lines(metrics), pid=os.getpid()) as watch:
        code = run_child(
            coordinator_command(prepared, die_with_parent=True),
            grace_s=2.0 * prepared.config.deadlines.leave_s + 5.0,
            environment=child_environment(threads=prepared.config.run.threads),
            output=log.fileno(),
        )
    if code != 0:
        raise RollplexError("The run did not end well", got=f"exit code {code}", where=str(log_file))
    found = Soak(
        rows=rows,
        image_bytes=image_bytes,
        epochs=epochs,
        prompts=prompts,
        seconds=time.monotonic() - start_s,
        samples=tuple(watch.samples),
        growth=growth(watch.samples, rows / prompts, epochs),
    )
    write_whole(folder / "memory.json", msgspec.json.encode(found), durable=True)
    return found


def lines(found: Soak) -> list[str]:
    """The result as a table."""
    heads = "".join(f"{f'epoch {n + 1}':>10}" for n in range(found.epochs))
    what = f"{found.rows} rows of {found.image_bytes / 1e6:.1f} MB, {found.seconds:.0f} s"
    text = [f"resident memory in MiB at the end of each epoch ({what})", f"{'':17}{heads}{'growth':>10}"]
    for one in found.growth:
        cells = "".join(f"{size / 2**20:10.1f}" for size in one.epochs)
        text.append(f"{one.process:17}{cells}{one.relative:10.1%}")
    worst = max(found.growth, key=lambda one: one.relative)
    verdict = "grows" if found.grown else "does not grow"
    return [*text, f"memory {verdict}: at most {worst.relative:.1%} ({worst.process}), bound {LIMIT:.0%}"]


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
