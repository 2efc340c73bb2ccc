"""The demo's folder as the input service and the reward service read it."""

from __future__ import annotations

import queue
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollplex.checkpoint.fingerprint import file_fingerprint
from rollplex.config import Config, load
from rollplex.config.wire import data_sources, reward_functions, train_sampling
from rollplex.data.child import InputService
from rollplex.demo import rewards as demo_rewards
from rollplex.demo.recipe import write_demo
from rollplex.presets import SPECIAL_TOKENS
from rollplex.protocol.common import Responses
from rollplex.protocol.inputs import DataChecked, FromInput, InputsSized, OpenData, PrepareInputs
from rollplex.protocol.reward import FromReward, GroupRewarded, OpenRewards, RewardGroup, RewardsOpened
from rollplex.rewards.child import RewardService


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load(write_demo(tmp_path_factory.mktemp("demo"), quick=True).config)


@pytest.fixture(scope="module")
def inputs(config: Config) -> tuple[InputService, DataChecked]:
    """The service with the demo's data open, and what it found. Nothing is written, so it needs no segments."""
    no_segments: Any = None
    service, answers = InputService(no_segments), list[FromInput]()
    message = OpenData(
        cause=1,
        model_path=str(config.model.path),
        sources=data_sources(config),
        never_sample=config.rollout.never_sample,
        stop_tokens=config.rollout.stop_tokens,
    )
    service.handle(message, answers.append)
    assert isinstance(answers[0], DataChecked)
    return service, answers[0]


@pytest.fixture
def rewards(config: Config) -> Iterator[RewardService]:
    service, answers = RewardService(), list[FromReward]()
    message = OpenRewards(
        cause=1,
        model_path=str(config.model.path),
        sources=data_sources(config),
        functions=reward_functions(config),
        time_limit_s=config.rewards.time_limit_s,
        memory_limit_bytes=config.rewards.memory_limit,
    )
    service.handle(message, answers.append)
    source = file_fingerprint(Path(demo_rewards.__file__))
    (opened,) = answers
    assert isinstance(opened, RewardsOpened)
    assert opened.names == ("digit_reward", "right")
    assert all("is taken as TRL's" in note for note in opened.notes)
    assert opened.fingerprints == (source, source)
    yield service
    service.close()


def test_all_rows_are_good_and_only_text_and_the_end_of_the_turn_are_sampled(
    inputs: tuple[InputService, DataChecked], config: Config
) -> None:
    _, checked = inputs
    assert [(source.name, source.num_rows, source.good_rows) for source in checked.sources] == [
        ("train", 564, None),
        ("held_out", 156, None),
        ("held_out_grey", 156, None),
    ]
    tokenizer = Tokenizer.from_file(str(config.model.path / "tokenizer.json"))
    assert checked.stop_ids == (tokenizer.token_to_id("<|im_end|>"),)
    barred = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS} - set(checked.stop_ids)
    assert set(checked.never_sampled) == barred
    assert train_sampling(config, stop_ids=checked.stop_ids).stop_ids == checked.stop_ids


def test_a_picture_is_four_tokens_of_a_short_prompt(inputs: tuple[InputService, DataChecked]) -> None:
    service, _ = inputs
    for source in ("train", "held_out", "held_out_grey"):
        answers: list[FromInput] = []
        service.handle(PrepareInputs(cause=2, step=0, source=source, rows=(0, 5)), answers.append)
        assert isinstance(answers[0], InputsSized)
        for prompt in answers[0].prompts:
            (picture,) = prompt.media
            assert (picture.frames, picture.height, picture.width) == (1, 4, 4)
            assert prompt.tokens < 40


def test_rewards_and_accuracy_come_from_the_decoded_tokens(config: Config, rewards: RewardService) -> None:
    tokenizer = Tokenizer.from_file(str(config.model.path / "tokenizer.json"))
    digit = next(iter(config.eval[0].data.read_text().splitlines()))[-3]
    wrong = "5"
    samples = [tokenizer.encode(text).ids for text in (f"{digit}<|im_end|>", f"{wrong}x", "x<|im_end|>")]
    responses = Responses(
        group=0,
        lengths=tuple(map(len, samples)),
        tokens=b"".join(struct.pack(f"<{len(ids)}i", *ids) for ids in samples),
    )
    answers: queue.SimpleQueue[FromReward] = queue.SimpleQueue()
    stopped = (True, False, True)
    group = RewardGroup(cause=2, step=0, source="held_out", row=0, responses=responses, stopped=stopped)
    rewards.handle(group, answers.put)
    scored = answers.get(timeout=60)
    assert isinstance(scored, GroupRewarded)
    assert struct.unpack("<3d", scored.rewards) == (1.0, 0.2, 0.0)
    assert [struct.unpack("<3d", blob) for blob in scored.by_function] == [(1.0, 0.2, 0.0), (1.0, 0.0, 0.0)]
