"""SaveCheckpoint through the service: a folder that from_pretrained opens, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration

from rollplex.checkpoint.folder import latest, verify
from rollplex.errors import CheckpointError, StaleWeightsError
from rollplex.latest import link_latest
from rollplex.memory.tensors import hf_views
from rollplex.protocol.trainer import ApplyUpdate, PrepareUpdate, SaveCheckpoint
from support.tiny import NEVER_SAMPLED, Prompt
from support.trainer import ALGORITHM, Sampled, World

MakeWorld = Callable[..., World]


def update(world: World, groups: list[Sampled], version: int) -> None:
    ref, state = world.prefix()
    world.send(world.train_message(ref, groups, version=version))
    world.clear_prefix_arena()
    world.prefix_backward(ref, state)
    assert world.send(PrepareUpdate(cause=1, step=version, version=version)).finite
    world.send(ApplyUpdate(cause=2, step=version, version=version))


def save(world: World, parent: Path, version: int) -> Any:
    return world.send(
        SaveCheckpoint(
            cause=3, step=version, version=version, folder=str(parent / f"step_{version}"), state_json='{"row": 17}'
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_opens_with_from_pretrained_and_holds_the_optimizers_state(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path, dtype: str
) -> None:
    world = make_world(dtype)
    update(world, groups, 0)
    reply = save(world, tmp_path, 1)
    folder = tmp_path / "step_1"
    assert (reply.step, reply.version, reply.folder) == (1, 1, str(folder))
    manifest = verify(folder)
    assert latest(tmp_path) == folder
    assert reply.size_bytes == sum(entry.size_bytes for entry in manifest.files.values())
    assert manifest.identity.digest == world.header.require(1).digest
    assert manifest.libraries["torch"] == torch.__version__

    assert link_latest(tmp_path, folder) == ""  # as the coordinator does it
    link = tmp_path / "latest"
    opened = Qwen2_5_VLForConditionalGeneration.from_pretrained(link, dtype="auto").state_dict()
    assert verify(folder) == manifest
    for name, value in hf_views(world.weights, world.table).items():
        assert opened[name].dtype == value.dtype
        assert torch.equal(opened[name], value), name
    assert torch.equal(opened["lm_head.weight"], opened["model.language_model.embed_tokens.weight"])

    ready: Any = world.service._ready
    state = ready._state
    with safe_open(folder / "training" / "optimizer.safetensors", framework="pt") as file:
        assert file.metadata() == {"optimizer": "adamw"}
        names = {f"{kind}.{name}" for kind, tensors in state.states.items() for name in tensors}
        assert set(file.keys()) == {"step", *names}
        assert int(file.get_tensor("step")) == 1
        for kind, tensors in state.states.items():
            for name, value in tensors.items():
                assert torch.equal(file.get_tensor(f"{kind}.{name}"), value)
    assert json.loads((folder / "training" / "state.json").read_text()) == {"row": 17}


def stock_logprobs(model: Any, prompt: Prompt, response: list[int]) -> Tensor:
    """Of a response, from transformers' own logits of the whole sequence, over the ids that may be sampled."""
    tokens = torch.tensor(response)
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(
            input_ids=torch.cat([prompt.ids, tokens])[None],
            mm_token_type_ids=torch.cat([prompt.kinds, torch.zeros_like(tokens)])[None],
            use_cache=False,
            **prompt.media,
        ).logits[0, len(prompt.ids) - 1 : -1]
    logits[:, list(NEVER_SAMPLED)] = -torch.inf
    logp = torch.log_softmax(logits.double() / ALGORITHM.temperature, -1)
    return logp.gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("older", [False, True], ids=["Qwen2.5-VL", "Qwen2-VL"])
def test_transformers_opens_a_trained_checkpoint_and_gives_the_trainers_log_probabilities(
    make_world: MakeWorld, older_folder: Path, groups: list[Sampled], tmp_path: Path, older: bool
) -> None:
    world = make_world(folder=older_folder if older else None)
    before = world.header.require(0).digest
    update(world, groups, 0)
    save(world, tmp_path, 1)
    assert world.header.require(1).digest != before
    ref, _ = world.prefix()
    message = msgspec.structs.replace(world.train_message(ref, groups, version=1), return_logprobs=True)
    answer = world.send(message)
    kind: Any = Qwen2VLForConditionalGeneration if older else Qwen2_5_VLForConditionalGeneration
    trained = kind.from_pretrained(tmp_path / "step_1").train(False)
    untrained = kind.from_pretrained(world.folder).train(False)
    assert [prompt.pixels is not None for prompt in world.prompts] == [True, False, True]
    for prompt, group, said in zip(world.prompts, groups, answer.logprobs, strict=True):
        ours = np.frombuffer(said.values, dtype="<f8")
        theirs, old = (
            torch.cat([stock_logprobs(model, prompt, tokens) for tokens in group.tokens]).numpy()
            for model in (trained, untrained)
        )
        assert np.abs(ours - theirs).max() < 1e-5
        assert np.abs(ours - old).max() > 1e-3, "the update cannot be told"


def test_a_run_can_start_from_a_checkpoint_and_save_again(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    save(world, tmp_path / "first", 0)
    second = type(world)(tmp_path / "first" / "step_0", world.prompts, type(world.segments)(), "float32")
    assert second.header.require(0).digest == world.header.require(0).digest
    update(second, groups, 0)
    save(second, tmp_path / "second", 1)
    assert set(verify(tmp_path / "second" / "step_1").files) == set(verify(tmp_path / "first" / "step_0").files)


def test_another_version_than_the_mapped_one_is_not_saved(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    with pytest.raises(StaleWeightsError):
        save(world, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


class Crash(BaseException):
    """Not an Exception: nothing may catch it."""


def ends_before_sync(number: int, act: Callable[[], object]) -> bool:
    """Whether `act` ends, because it makes fewer than `number` calls of fsync; the call of that number crashes."""
    calls = 0
    real = os.fsync

    def crash(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Crash
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        try:
            act()
        except Crash:
            return False
    return True


def test_a_crash_at_any_sync_leaves_latest_valid_and_openable(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path
) -> None:
    world = make_world()
    save(world, tmp_path, 0)
    update(world, groups, 0)
    before = world.header.require(1).digest
    outcomes: list[str] = []
    while not ends_before_sync(len(outcomes) + 1, lambda: save(world, tmp_path, 1)):
        newest = latest(tmp_path)
        assert newest is not None
        verify(newest)
        outcomes.append(newest.name)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]
        shutil.rmtree(tmp_path / "step_1", ignore_errors=True)
        (tmp_path / "LATEST").write_text("step_0\n")
    assert outcomes[-1] == "step_1"
    assert outcomes[:-1] == ["step_0"] * (len(outcomes) - 1)
    assert len(outcomes) > 10
    assert latest(tmp_path) == tmp_path / "step_1"
    assert verify(tmp_path / "step_1").identity.digest == before == world.header.require(1).digest


def test_a_disk_that_fills_up_is_named_and_the_run_can_go_on(
    make_world: MakeWorld, groups: list[Sampled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    save(world, tmp_path, 0)
    update(world, groups, 0)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(world, tmp_path, 1)
    assert latest(tmp_path) == tmp_path / "step_0"
    update(world, groups, 1)
    save(world, tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "step_2"
