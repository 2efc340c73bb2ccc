"""The workload writer: token counts are exactly those asked for, and the data check accepts the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollplex.bench.facts import read_facts
from rollplex.bench.layouts import mixed_layouts, mostly_vision, video_layout
from rollplex.bench.lengths import Lengths, parse_lengths
from rollplex.bench.pictures import Album, picture_size, pictures, save
from rollplex.bench.placement import parse_placements
from rollplex.bench.rewards import spread
from rollplex.bench.workload import Wanted, Workload, question, write_workload
from rollplex.cli.app import run
from rollplex.config import load
from rollplex.config.wire import data_sources
from rollplex.data.processor import PixelRules, read_rules
from rollplex.data.source import Source, open_source
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError, DataError
from rollplex.layout.shape import read_shape

SPREAD = Lengths(shortest=3, longest=9)


@pytest.fixture(scope="module")
def rules(workload: Workload) -> PixelRules:
    model = workload.config.parent / "model"
    return read_rules(model, read_shape(model)).image


def _source(workload: Workload) -> Source:
    config = load(workload.config)
    return open_source(data_sources(config)[0], config.model.path, TextTokenizer(config.model.path))


def test_the_data_check_accepts_the_rows_and_counts_the_prompt_tokens_reported(workload: Workload) -> None:
    checked = _source(workload).check()
    assert checked.num_rows == 8
    assert checked.max_prompt_tokens == workload.prompt_tokens
    assert checked.max_media_tokens == 6


def test_every_prompt_has_exactly_the_vision_and_text_tokens_asked_for(workload: Workload) -> None:
    source = _source(workload)
    image = read_shape(workload.config.parent / "model").image_id
    for number in range(8):
        prepared = source.prepare(number)
        assert int((prepared.prompt.ids == image).sum()) == 6
        assert len(prepared.prompt.ids) == workload.prompt_tokens
        (patches,) = prepared.media
        assert patches.grid.tokens(2) == 6
    row = json.loads((workload.config.parent / "rows.jsonl").read_text().splitlines()[0])
    text = row["prompt"][0]["content"][1]["text"]
    assert len(TextTokenizer(workload.config.parent / "model").encode(text)) == 11


def test_pictures_are_real_different_and_taken_by_the_model_without_scaling(
    workload: Workload, rules: PixelRules
) -> None:
    folder = workload.config.parent / "images"
    pixels = [np.asarray(Image.open(file)) for file in sorted(folder.iterdir())]
    assert {one.shape for one in pixels} == {(56, 84, 3)}
    assert len({one.tobytes() for one in pixels}) == 8
    assert all(one.std() > 10 for one in pixels)


def test_the_configuration_runs_and_forces_the_lengths(workload: Workload) -> None:
    config = load(workload.config)
    assert config.rollout.forced_lengths == SPREAD.of(6)
    assert config.rollout.max_new_tokens == 9
    assert config.rollout.group_size == 3
    assert config.data.prompts_per_iteration == 2
    assert config.needs_reference
    assert config.checkpoint.every == 0
    assert config.eval == ()


def test_facts_of_the_workload_are_those_that_were_asked_for(workload: Workload) -> None:
    facts, data, model = read_facts(load(workload.config), first=1, end=3)
    assert (facts.prompts, facts.group_size, facts.reference) == (2, 3, True)
    assert (facts.prompt_tokens, facts.vision_tokens) == (workload.prompt_tokens, 6.0)
    assert facts.parameters == 372_544
    assert data
    assert model


def test_a_fingerprint_changes_with_the_data_and_with_the_model(tmp_path: Path) -> None:
    prints = []
    for text_tokens, preset in ((11, "tiny"), (12, "tiny"), (11, "tiny-gpu")):
        written = write_workload(
            tmp_path,
            Wanted(vision_tokens=4, text_tokens=text_tokens, lengths=SPREAD, group_size=3, prompts=2, preset=preset),
        )
        prints.append(read_facts(load(written.config), first=0, end=1)[1:])
    assert prints[0][0] != prints[1][0]
    assert prints[0][1] == prints[1][1] != prints[2][1]


def test_the_same_arguments_give_the_same_bytes(workload: Workload, tmp_path: Path) -> None:
    write_workload(tmp_path, _wanted(vision_tokens=6))
    folder = workload.config.parent
    names = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    assert len(names) > 10
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize(
    ("tokens", "size"), [(576, (672, 672)), (64, (224, 224)), (4, (56, 56)), (6, (84, 56)), (7, (196, 28))]
)
def test_a_picture_is_as_square_as_its_tokens_allow(tokens: int, size: tuple[int, int], rules: PixelRules) -> None:
    assert picture_size(tokens, rules) == size


@pytest.mark.parametrize("tokens", [0, 3, 577, 20_000])
def test_vision_tokens_that_no_picture_gives_are_refused(tokens: int, rules: PixelRules) -> None:
    with pytest.raises(ConfigError, match="--vision-tokens"):
        picture_size(tokens, rules)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'rollplex\[bench\]'"):
        next(pictures(1, 56, 56))


def test_crops_go_on_being_different() -> None:
    seen = {picture.tobytes() for picture in pictures(300, 28, 56)}
    assert len(seen) == 300


def test_large_pictures_are_jpegs_because_they_decode_faster(tmp_path: Path) -> None:
    album = Album()
    assert save(album.picture(0, 1024, 1024), tmp_path, "a") == "a.png"
    assert save(album.picture(0, 1028, 1024), tmp_path, "b") == "b.jpg"
    assert (tmp_path / "b.jpg").read_bytes().startswith(b"\xff\xd8")


def test_rows_of_mixed_pictures_have_one_length_several_sizes_and_sometimes_several_pictures(tmp_path: Path) -> None:
    written = write_workload(tmp_path, _wanted(prompt_tokens=200, mixed=True, prompts=5, steps=2))
    source = _source(written)
    checked = source.check()
    assert checked.num_rows == 10
    tokens, grids = zip(*[_media(source, number) for number in range(5)], strict=True)
    assert tokens == (200,) * 5
    assert [len(one) for one in grids] == [1, 1, 1, 2, 4]
    square, wide, tall = (one[0] for one in grids[:3])
    assert abs(square[0] - square[1]) <= 2
    assert wide[1] > 1.8 * wide[0]
    assert tall[0] > 2.5 * tall[1]
    assert grids[3][0] != grids[3][1]
    vision = [sum(height * width // 4 for height, width in one) for one in grids]
    assert min(vision) > 0.75 * 160
    assert max(vision) <= 160
    assert read_facts(load(written.config), first=0, end=2)[0].vision_tokens == pytest.approx(written.vision_tokens)
    assert written.vision_tokens == pytest.approx(sum(vision) / 5)


def test_a_row_with_a_video_has_all_its_frames_in_one_medium(tmp_path: Path) -> None:
    written = write_workload(tmp_path, _wanted(prompt_tokens=120, video_frames=6, prompts=1, steps=2))
    source = _source(written)
    source.check()
    tokens, (grid,) = _media(source, 1)
    assert tokens == written.prompt_tokens == 120
    prepared = source.prepare(1)
    assert prepared.media[0].grid.frames == 3
    assert 3 * grid[0] * grid[1] // 4 == written.vision_tokens > 60
    assert len(list((tmp_path / "images").iterdir())) == 12
    video = read_shape(tmp_path / "model").video_id
    assert int((prepared.prompt.ids == video).sum()) == written.vision_tokens


@pytest.mark.parametrize("prompt_tokens", [512, 4096, 8192])
def test_prompts_of_a_given_length_are_of_vision_tokens_mostly(prompt_tokens: int) -> None:
    vision = mostly_vision(prompt_tokens)
    assert 0.9 * prompt_tokens < vision <= prompt_tokens - 40
    layouts = (*mixed_layouts(vision), video_layout(vision, 16, 2))
    for layout in layouts:
        per_group = [width * height for width, height in layout.sizes]
        total = sum(per_group) // (2 if layout.video else 1)
        assert 0.9 * vision < total <= vision


def test_mixed_pictures_without_a_length_and_media_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens with --mixed"):
        write_workload(tmp_path, _wanted(vision_tokens=64, mixed=True))
    with pytest.raises(ConfigError, match="no room for a question"):
        write_workload(tmp_path, _wanted(vision_tokens=64, prompt_tokens=70))
    with pytest.raises(ConfigError, match="pictures or a video"):
        write_workload(tmp_path, _wanted(prompt_tokens=200, mixed=True, video_frames=4))


def test_a_workload_for_a_gpu_asks_for_sglang_and_bfloat16(tmp_path: Path) -> None:
    config = load(write_workload(tmp_path, _wanted(vision_tokens=6, device="cuda")).config)
    assert (config.device.kind, config.model.dtype, config.rollout.engine) == ("cuda", "bfloat16", "sglang")
    assert config.memory.prefix_activations == "recompute_layers"


def test_a_workload_for_several_devices_says_who_does_what(tmp_path: Path) -> None:
    (placement,) = parse_placements("1x1+1x1")
    found = load(write_workload(tmp_path, _wanted(vision_tokens=6, placement=placement)).config).parallel
    assert (found.devices, found.training, found.rollout) == (2, 1, 1)
    assert (found.placement, found.rollout_devices) == ("disaggregated", 1)


def test_a_long_tail_has_its_mean_and_its_longest_and_half_of_it_is_short() -> None:
    lengths = parse_lengths("tail:512:2048")
    found = lengths.of(512)
    assert sum(found) / 512 == pytest.approx(512, rel=0.002)
    assert max(found) == 2048
    assert min(found) >= 1
    assert sorted(found)[256] < 0.75 * 512
    assert list(found) != sorted(found)
    assert found == lengths.of(512)
    assert lengths.text == "tail:512:2048"


@pytest.mark.parametrize("count", [1, 2, 16, 17, 100, 300])
def test_a_question_has_exactly_the_tokens_asked_for(count: int, workload: Workload) -> None:
    tokenizer = TextTokenizer(workload.config.parent / "model")
    assert len(tokenizer.encode(question(count, tokenizer))) == count


def test_a_spread_of_lengths_reaches_both_ends_evenly_in_no_order() -> None:
    lengths = parse_lengths("16:48").of(16)
    assert (min(lengths), max(lengths), len(lengths)) == (16, 48, 16)
    assert sum(lengths) / 16 == pytest.approx(32.0, abs=0.5)
    steps = np.diff(sorted(lengths))
    assert steps.max() - steps.min() <= 1
    assert list(lengths) != sorted(lengths)
    assert lengths == parse_lengths("16:48").of(16)
    assert parse_lengths("32").of(16) == (32,)


@pytest.mark.parametrize("text", ["", "0", "48:16", "1:", "a", "3:4:5", "-1", "1.5", "tail:9:9", "tail:1:5", "tail:5"])
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--response"):
        parse_lengths(text)


def test_prompts_that_the_model_cannot_take_are_refused_before_pictures_are_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than the model takes"):
        write_workload(tmp_path, _wanted(vision_tokens=4000, lengths=Lengths(shortest=90, longest=90)))
    assert not (tmp_path / "images").exists()


def test_rewards_are_a_function_of_the_text_and_differ_between_texts() -> None:
    texts = [f"answer {number}" for number in range(64)]
    rewards = spread(texts)
    assert rewards == spread([[{"role": "assistant", "content": text}] for text in texts])
    assert min(rewards) == 0.0
    assert max(rewards) == 1.0
    assert len(set(rewards)) == 8
    assert spread(["\ud800"]) == spread(["?"])  # a lone surrogate is replaced, not an error


def test_the_command_says_the_tokens_and_the_ceiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--vision-tokens",
        "4",
        "--text-tokens",
        "5",
        "--response",
        "8",
        "--group-size",
        "2",
        "--preset",
        "tiny",
    ]
    assert run(["bench", "workload", str(tmp_path / "w"), *arguments]) == 0
    first, config = capsys.readouterr().out.splitlines()
    prompt = len(_source(_written(Path(config))).prepare(0).prompt.ids)
    assert f"P = {prompt} prompt tokens, 4 of them vision; R = 8;" in first
    assert first.endswith(f"{2 * (prompt + 8) / (prompt + 16):.2f}x")


def test_the_command_refuses_an_unknown_preset_with_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "workload", str(tmp_path), "--preset", "huge"]) == 2
    assert "There is no such preset" in capsys.readouterr().err


def _media(source: Source, number: int) -> tuple[int, list[tuple[int, int]]]:
    """Tokens of a row's prompt, and height and width in patches of each medium."""
    prepared = source.prepare(number)
    return len(prepared.prompt.ids), [(patches.grid.height, patches.grid.width) for patches in prepared.media]


def _wanted(**given: Any) -> Wanted:
    values = {"text_tokens": 11, "lengths": SPREAD, "group_size": 3, "prompts": 2, "preset": "tiny"}
    return Wanted(**{**values, **given})


def _written(config: Path) -> Workload:
    return Workload(config=config, prompt_tokens=0, vision_tokens=0, group_size=2, lengths=SPREAD, prompts=2)
