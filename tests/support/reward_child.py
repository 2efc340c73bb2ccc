"""The reward child through its messages, without a coordinator."""

from __future__ import annotations

import json
import queue
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollplex.data.tokenizer import TextTokenizer
from rollplex.protocol.common import Responses
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import (
    Form,
    GroupRewarded,
    OpenRewards,
    RewardFailed,
    RewardFunction,
    RewardGroup,
    RewardsOpened,
    ToReward,
)
from rollplex.rewards.child import RewardService

TEXTS = ("seven", "8", "")


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["seven"], trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


class Child:
    """A reward service with what it answered and printed."""

    def __init__(self, model_folder: Path, source: DataSource) -> None:
        self.printed = bytearray()
        self.service = RewardService(self.printed.extend)
        self._tokenizer = TextTokenizer(model_folder)
        self._folder = model_folder
        self._source = source

    def ask(self, message: ToReward) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.service.handle(message, answers.put)
        answer = answers.get(timeout=60)
        assert answers.empty()
        return answer

    def open(
        self,
        *functions: tuple[str, float] | RewardFunction,
        limit_s: float = 20.0,
        memory: int = 0,
        workers: int = 1,
    ) -> RewardsOpened:
        message = OpenRewards(
            cause=1,
            model_path=str(self._folder),
            sources=(self._source,),
            functions=tuple(
                item if isinstance(item, RewardFunction) else RewardFunction(spec=item[0], weight=item[1])
                for item in functions
            ),
            time_limit_s=limit_s,
            memory_limit_bytes=memory,
            workers=workers,
        )
        answer = self.ask(message)
        assert isinstance(answer, RewardsOpened)
        return answer

    def group(self, row: int = 0, texts: Sequence[str] = TEXTS, group: int = 5) -> RewardGroup:
        ids = [[*self._tokenizer.encode(text), self._tokenizer.id_of("<|im_end|>")] for text in texts]
        tokens = b"".join(struct.pack(f"<{len(sample)}i", *sample) for sample in ids)
        responses = Responses(group=group, lengths=tuple(len(sample) for sample in ids), tokens=tokens)
        stopped = tuple(index != 1 for index in range(len(ids)))
        return RewardGroup(cause=2, step=3, source="train", row=row, responses=responses, stopped=stopped)

    def rewarded(self, row: int = 0, texts: Sequence[str] = TEXTS) -> GroupRewarded:
        answer = self.ask(self.group(row, texts))
        assert isinstance(answer, GroupRewarded), answer
        return answer

    def failed(self, row: int = 0) -> RewardFailed:
        answer = self.ask(self.group(row))
        assert isinstance(answer, RewardFailed), answer
        return answer


def numbers(blob: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(blob) // 8}d", blob))


def signed(path: Path, name: str, signature: Form = Form.AUTO, **options: object) -> RewardFunction:
    return RewardFunction(spec=f"{path}:{name}", weight=1.0, signature=signature, options=json.dumps(options))


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(text: str, parent: int | None = None) -> list[int]:
    """Living processes, perhaps only children of one, with this on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, of = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if parent in {None, int(of)} and state != "Z" and text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
