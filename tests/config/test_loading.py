"""Loading, overriding, refusing, dumping."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollplex.config import Config, dump, from_mapping, load
from rollplex.config.refusals import _ALIASES
from rollplex.config.yaml_text import dumps
from rollplex.errors import ConfigError


def _refused(file: Path, values: dict[str, Any], *overrides: str) -> ConfigError:
    file.write_text(dumps(values))
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value


def test_a_small_file_loads_and_everything_else_has_a_default(config_file: Path) -> None:
    config = load(config_file)
    assert config.run.schedule == "overlap"
    assert config.rollout.group_size == 8
    assert config.needs_reference


def test_relative_paths_are_meant_from_the_folder_of_the_file(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(config_file.relative_to(tmp_path))
    folder = config_file.parent
    assert config.model.path == folder / "model"
    assert config.data.path == folder / "rows.jsonl"
    assert config.data.image_folder == folder
    assert config.eval[0].image_folder == folder / "other"
    assert config.rewards.functions[0].function == f"{folder}/score.py:score"


def test_an_image_folder_can_be_another_than_that_of_the_rows(config_file: Path) -> None:
    config = load(config_file, ["data.image_dir=other"])
    assert config.data.image_folder == config_file.parent / "other"


def test_the_dump_has_every_key_and_loads_as_an_equal_configuration(config_file: Path, tmp_path: Path) -> None:
    config = load(config_file, ["memory.budget=8GiB", "rollout.stop_tokens=['1e-3', 'no']", "optimizer.lr=1e-5"])
    elsewhere = tmp_path / "elsewhere" / "resolved.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(dump(config))
    assert load(elsewhere) == config
    for section in Config.model_fields:
        assert f"{section}:" in elsewhere.read_text()


def test_a_configuration_cannot_be_changed(config_file: Path) -> None:
    config = load(config_file)
    with pytest.raises(ValidationError):
        config.run.seed = 2


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        (("rollout", "group_siez"), "Did you mean rollout.group_size?"),
        (("rollouts",), "Did you mean rollout?"),
        (("group_size",), "Did you mean rollout.group_size?"),
        (("algorithm", "lr"), "Did you mean optimizer.lr?"),
        (("algorithm", "weightdecay"), "Did you mean optimizer.weight_decay?"),
        (("http", "zzz"), "Known here: host, port, allow_remote."),
        (("data", "path_"), "Did you mean data.path?"),
        (("run", "every"), "Did you mean checkpoint.every or eval.every?"),
        (("num_generations",), "Did you mean rollout.group_size?"),
        (("algorithm", "learning_rate"), "Did you mean optimizer.lr?"),
        (("rollout", "max_completion_length"), "Did you mean rollout.max_new_tokens?"),
        (("optimizer", "max_steps"), "Did you mean run.iterations?"),
        (("algorithm", "epsilon"), "Did you mean algorithm.clip_low?"),
        (("algorithm", "epsilon_high"), "Did you mean algorithm.clip_high?"),
        (("optimizer", "epsilon"), "Did you mean optimizer.eps?"),
        (("run", "per_device_train_batch_size"), "Did you mean data.prompts_per_iteration?"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(
    config_file: Path, values: dict[str, Any], path: tuple[str, ...], suggestion: str
) -> None:
    section = values if len(path) == 1 else values.setdefault(path[0], {})
    section[path[-1]] = 1
    error = _refused(config_file, values)
    assert error.what == f"Unknown key {'.'.join(path)}"
    assert error.do == suggestion
    assert error.where.startswith(f"{config_file}:")
    assert error.where.endswith(f": {'.'.join(path)}")


def test_an_unknown_key_in_a_list_names_its_place(config_file: Path, values: dict[str, Any]) -> None:
    values["eval"][0]["limt"] = 3
    error = _refused(config_file, values)
    assert error.what == "Unknown key eval.0.limt"
    assert error.do == "Did you mean eval.0.limit?"


@pytest.mark.parametrize(
    ("section", "key", "value", "needed"),
    [
        ("rollout", "group_size", "8", "a valid integer"),
        ("rollout", "group_size", 8.0, "a valid integer"),
        ("rollout", "group_size", True, "a valid integer"),
        ("rollout", "group_size", 1, "greater than or equal to 2"),
        ("rollout", "temperature", 0, "greater than 0"),
        ("rollout", "top_p", 1.5, "less than or equal to 1"),
        ("run", "deterministic", "yes", "a valid boolean"),
        ("run", "name", "a/b", "64 letters, digits, dots"),
        ("run", "name", "../x", "64 letters, digits, dots"),
        ("run", "name", "x" * 65, "64 letters, digits, dots"),
        ("run", "name", "x\n", "64 letters, digits, dots"),
        ("run", "name", 7, "a valid string"),
        ("run", "seed", -1, "greater than or equal to 0"),
        ("algorithm", "beta", float("inf"), "a finite number"),
        ("algorithm", "beta", float("nan"), "a finite number"),
        ("optimizer", "betas", [0.9], "required"),
        ("optimizer", "betas", [0.9, 1.0], "less than 1"),
        ("memory", "budget", "8 gigs", 'a number of bytes, or a text such as "8GiB"'),
        ("memory", "budget", -1, "greater than or equal to 0"),
        ("memory", "budget", "0.3B", "a whole number of bytes"),
        ("deadlines", "unit_s", 0, "greater than 0"),
        ("http", "port", 70_000, "less than or equal to 65535"),
        ("model", "path", "", "a path; the text is empty"),
        ("services", "rollout", [], "at least 1 item"),
        ("services", "rollout", "python x.py", "a list"),
    ],
)
def test_a_wrong_value_is_refused_and_never_converted(
    config_file: Path, values: dict[str, Any], section: str, key: str, value: object, needed: str
) -> None:
    values.setdefault(section, {})[key] = value
    error = _refused(config_file, values)
    assert f"{section}.{key}" in error.where
    assert needed.lower() in f"{error.needed} {error.what}".lower() or needed == "required"
    assert str(config_file) in error.where


def test_a_misspelt_choice_gets_the_choices_and_a_suggestion(config_file: Path, values: dict[str, Any]) -> None:
    values["run"] = {"schedule": "overlapp"}
    error = _refused(config_file, values)
    assert error.got == '"overlapp"'
    assert error.needed == "'serial', 'overlap' or 'stream'"
    assert error.do == "Did you mean overlap?"
    values["run"] = {}
    values["algorithm"] = {"loss": "gropo"}
    assert _refused(config_file, values).do == "Did you mean grpo?"
    values["algorithm"] = {"loss": "gpro"}
    assert _refused(config_file, values).do == "Did you mean grpo?"


def test_every_name_of_trl_leads_to_a_key_that_there_is() -> None:
    sections = Config.model_fields
    for key in _ALIASES.values():
        section, name = key.split(".")
        assert name in sections[section].annotation.model_fields  # type: ignore[union-attr]


@pytest.mark.parametrize("function", ["score.py", "right", "score.py:", "score.py:right\n", "a b:right"])
def test_what_names_no_reward_function_is_refused_once_and_in_words(
    config_file: Path, values: dict[str, Any], function: str
) -> None:
    values["rewards"]["functions"] = [{"function": function}]
    error = _refused(config_file, values)
    assert error.needed == "file.py:function or package.module:function, e.g. my_rewards.py:right"
    assert "also" not in str(error)
    assert error.where.endswith("rewards.functions.0.function")


def test_a_list_without_items_is_still_refused(config_file: Path, values: dict[str, Any]) -> None:
    values["rewards"]["functions"] = []
    assert "at least 1 item" in _refused(config_file, values).needed


def test_a_missing_key_says_what_it_is_for(config_file: Path, values: dict[str, Any]) -> None:
    del values["data"]["path"]
    error = _refused(config_file, values)
    assert error.what == "The key data.path is missing"
    assert error.needed == "A .jsonl, .json or .parquet file, or a folder that datasets' save_to_disk wrote"
    assert error.do == "Set data.path."


def test_all_mistakes_are_told_at_once(config_file: Path, values: dict[str, Any]) -> None:
    values["run"] = {"seed": "x", "nmae": "y"}
    values["rollout"] = {"group_size": 0}
    text = str(_refused(config_file, values))
    assert "Unknown key run.nmae" in text
    assert "run.seed" in text
    assert "rollout.group_size" in text


def test_the_line_of_a_mistake_is_named(config_file: Path) -> None:
    config_file.write_text("model:\n  path: model\ndata:\n  path: rows.jsonl\n  shuffle: maybe\n")
    with pytest.raises(ConfigError) as caught:
        load(config_file)
    also = str(caught.value)
    assert f"{config_file}:5: data.shuffle" in also


@pytest.mark.parametrize("text", ["", "- 1\n", "text\n", "3\n", "# only a comment\n"])
def test_a_file_that_is_no_mapping_of_sections_is_refused(config_file: Path, text: str) -> None:
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=r"mapping|missing"):
        load(config_file)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["device", "pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_read(tmp_path: Path, what: str) -> None:
    path = Path("/dev/zero") if what == "device" else tmp_path / "x"
    if what == "pipe":
        os.mkfifo(path)
    if what == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=f"{path}: The configuration is not a file"):
        load(path)


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xffname")
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=r"the configuration: A path is not UTF-8 text; got '.*bad\\udcffname/c.yaml'"
    ):
        load(folder / "c.yaml")


@pytest.mark.parametrize("key", ["algorithm.beta", "algorithm.clip_high", "rewards.time_limit_s"])
def test_a_number_that_no_message_carries_is_refused(config_file: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key} has a value that cannot be used; got 1e.308; needed a number between"
    ):
        load(config_file, [f"{key}=1e308"])


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model/config.json", "model.path"),
        ("rows.jsonl", "data.path"),
        ("other/rows.jsonl", "eval.0.data"),
        ("score.py", "rewards.functions.0.function"),
    ],
)
def test_a_file_that_is_not_there_is_refused_before_anything_starts(config_file: Path, name: str, where: str) -> None:
    (config_file.parent / name).unlink()
    with pytest.raises(ConfigError) as caught:
        load(config_file)
    assert caught.value.where.endswith(where)
    assert load(config_file, check_files=False).run.name == "run"


def test_a_hub_id_as_model_path_is_told_how_to_become_a_folder(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, ["model.path=Qwen/Qwen2.5-VL-3B-Instruct"])
    assert caught.value.do == (
        "Hub ids are not downloaded: `hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir Qwen2.5-VL-3B-Instruct`, "
        "then give that folder."
    )


@pytest.mark.parametrize("path", ["/nowhere/model", "./models/tiny", "../a/b", "models", "a/b/c", "other/model"])
def test_what_is_no_hub_id_is_not_taken_for_one(config_file: Path, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, [f"model.path={path}"])
    assert caught.value.what.startswith("The model folder is not there")
    assert caught.value.do == ""


def test_an_image_folder_that_is_not_there_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file, ["data.image_dir=none"])
    assert caught.value.where == "--set data.image_dir=none"


def test_a_lone_surrogate_is_refused(config_file: Path, values: dict[str, Any]) -> None:
    config_file.write_text('run: {name: "\\ud800"}\n')
    with pytest.raises(ConfigError):
        load(config_file)
    values["rollout"] = {"stop_tokens": ["\ud800"]}
    with pytest.raises(ConfigError):
        from_mapping(values)


def test_a_format_prompt_without_a_place_for_the_question_is_a_file_beside_the_configuration(config_file: Path) -> None:
    for text in ("", "{{ content }} ?"):
        assert load(config_file, [f"data.format_prompt={json.dumps(text)}"]).data.format_prompt == text
    prompt = load(config_file, ["data.format_prompt=math.jinja"]).data.format_prompt
    assert prompt == str(config_file.parent / "math.jinja")


def test_a_dataset_may_be_a_folder_and_its_images_are_then_in_it(config_file: Path) -> None:
    folder = config_file.parent / "saved"
    with pytest.raises(ConfigError, match="The dataset is not there; .* or .parquet file, or a folder"):
        load(config_file, ["data.path=saved"])
    folder.mkdir()
    assert load(config_file, ["data.path=saved"]).data.image_folder == folder


def test_recorded_responses_must_be_there_before_anything_is_started(config_file: Path) -> None:
    words = ["rollout.engine=replay", "rollout.replay=before/completions.jsonl", "eval=[]"]
    with pytest.raises(ConfigError, match="recorded responses are not there") as caught:
        load(config_file, words)
    assert caught.value.where == "--set rollout.replay=before/completions.jsonl"
    assert caught.value.got == str(config_file.parent / "before" / "completions.jsonl"), "relative to the file"
    (config_file.parent / "before").mkdir()
    (config_file.parent / "before" / "completions.jsonl").touch()
    assert load(config_file, words).rollout.replay == config_file.parent / "before" / "completions.jsonl"


def test_a_chat_template_must_be_there(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="The file of the chat template is not there; got .*own.jinja") as caught:
        load(config_file, ["data.chat_template=own.jinja"])
    assert caught.value.where == "--set data.chat_template=own.jinja"
    (config_file.parent / "own.jinja").touch()
    assert load(config_file, ["data.chat_template=own.jinja"]).data.chat_template == config_file.parent / "own.jinja"
