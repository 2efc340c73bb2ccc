"""What a run of the digits demo leaves, made by hand: completions.jsonl as a coordinator writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollplex.demo.rewards import digit_reward, right


@dataclass(frozen=True)
class Played:
    """Where a run's files would be, and its held-out data."""

    run_dir: Path
    data: Path

    @property
    def truths(self) -> list[str]:
        return [json.loads(line)["answer"] for line in self.data.read_text().splitlines()]

    def responses(self, *, wrong: Sequence[int] = ()) -> list[str]:
        """A response to every row: the right digit, but in rows `wrong` another one."""
        return [str((int(truth) + 1) % 10) if row in wrong else truth for row, truth in enumerate(self.truths)]

    def complete(self, responses: Sequence[str], *, step: int = 400, source: str = "held_out") -> None:
        """Append one sample for each of the first rows; the last row comes first, as groups end in any order."""
        truths = self.truths
        with (self.run_dir / "completions.jsonl").open("a", encoding="utf-8") as file:
            for row, text in reversed(list(enumerate(responses))):
                reward, is_right = digit_reward([text], [truths[row]])[0], right([text], [truths[row]])[0]
                place = {"source": source, "step": step, "version": step, "row": row, "group": row % 16, "sample": 0}
                scored = {"reward": reward, "rewards": {"digit_reward": reward, "right": is_right}}
                file.write(json.dumps({**place, "completion": text, **scored}) + "\n")
