"""Rendering, tokenizing and expanding prompts, against transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollplex.data.patches import Grid
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Row, parse
from rollplex.data.template import ChatTemplate
from rollplex.data.tokenizer import TextTokenizer
from rollplex.errors import ConfigError, DataError, ModelError
from rollplex.layout.shape import ModelShape

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(model_folder)


def row(**fields: object) -> Row:
    return parse(json.dumps(fields).encode(), 0)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def parts(*items: str) -> list[dict[str, str]]:
    return [{"type": item} if item in {"image", "video"} else {"type": "text", "text": item} for item in items]


CONVERSATIONS: list[list[dict[str, Any]]] = [
    user("what is the colour?"),
    [{"role": "system", "content": "Be brief."}, *user("it's  42\n\n tëxt 你好 🙂")],
    [*user("a"), {"role": "assistant", "content": "b"}, *user("c")],
    user(parts("image", "what is this?")),
    user(parts("first", "image", "then", "image", "and", "video", "?")),
    [{"role": "system", "content": parts("look")}, *user(parts("video"))],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_is_rendered_and_tokenized_as_transformers_does(
    messages: list[dict[str, Any]], maker: PromptMaker, tokenizer: TextTokenizer, theirs: Any
) -> None:
    text = json.dumps(messages)
    media = {"images": ["x"] * text.count('"image"'), "videos": [["x"]] * text.count('"video"')}
    rendered = maker.render(row(prompt=messages, **media))
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(rendered) == theirs(rendered, add_special_tokens=False)["input_ids"]
    assert maker.skeleton(row(prompt=messages, **media)).ids.tolist() == tokenizer.encode(rendered)


def test_ids_with_images_are_those_of_transformers_processor(
    maker: PromptMaker,
    model_folder: Path,
    theirs: Any,
    shape: ModelShape,
    picture: Callable[[int, int, int], Image.Image],
) -> None:
    from transformers import Qwen2_5_VLProcessor

    class ImageOnly(Qwen2_5_VLProcessor):
        """The processor needs torchvision for its video half only."""

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = shape.image_id, shape.video_id
            start: Any = ProcessorMixin.__init__
            start(self, image_processor, tokenizer)

        @property
        def model_input_names(self) -> list[str]:
            return ProcessorMixin.model_input_names.fget(self)  # type: ignore[attr-defined,no-any-return]

    processor: Any = ImageOnly(Qwen2VLImageProcessorPil.from_pretrained(model_folder), theirs)
    example = row(prompt=user(parts("a", "image", "b", "image")), images=["1", "2"])
    expected = processor(
        text=[maker.render(example)], images=[picture(90, 60, 1), picture(120, 120, 2)], return_tensors="np"
    )
    grids = [Grid(frames=time, height=high, width=wide) for time, high, wide in expected["image_grid_thw"].tolist()]
    prompt = maker.finish(maker.skeleton(example), grids, [None, None])
    assert prompt.ids.tolist() == expected["input_ids"][0].tolist()
    assert prompt.ids.dtype == prompt.positions.dtype == np.int64
    assert prompt.positions.shape == (3, len(prompt.ids))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"prompt": "a <image> b<image>", "images": ["1", "2"]}, f"a {IMAGE} b{IMAGE}"),
        ({"prompt": "a <video>", "videos": [["1"]]}, f"a {VIDEO}"),
        ({"prompt": f"{IMAGE}a", "images": ["1"]}, f"{IMAGE}a"),
        ({"prompt": "a"}, "a"),
        ({"prompt": "a <image> <video>"}, "a <image> <video>"),
        ({"prompt": "a <image> <video>", "images": ["1"]}, f"a {IMAGE} <video>"),
    ],
)
def test_a_plain_text_is_taken_as_it_is_with_its_marks_replaced(
    fields: dict[str, Any], wanted: str, maker: PromptMaker
) -> None:
    assert maker.render(row(**fields)) == wanted


def test_marks_in_a_message_become_media_in_their_places(maker: PromptMaker) -> None:
    rendered = maker.render(row(prompt=user("a<image>b<video><image>"), images=["1", "2"], videos=[["3"]]))
    assert f"<|im_start|>user\na{IMAGE}b{VIDEO}{IMAGE}<|im_end|>" in rendered


def test_marks_in_typed_texts_become_media_too(maker: PromptMaker) -> None:
    parts = [{"type": "text", "text": "a<image>b"}, {"type": "image"}, {"type": "text", "text": "c<video>"}]
    rendered = maker.render(row(prompt=[{"role": "user", "content": parts}], images=["1", "2"]))
    assert f"<|im_start|>user\na{IMAGE}b{IMAGE}c<video><|im_end|>" in rendered
    with pytest.raises(DataError, match="2"):
        maker.skeleton(row(prompt=[{"role": "user", "content": parts}], images=["1"]))


def test_marks_of_a_kind_that_the_row_has_no_media_of_are_text(maker: PromptMaker) -> None:
    assert "user\na<image>b<|im_end|>" in maker.render(row(prompt=user("a<image>b")))
    rendered = maker.render(row(prompt=user("a<video>b<image>c<video>"), images=["1"]))
    assert f"user\na<video>b{IMAGE}c<video><|im_end|>" in rendered
    rendered = maker.render(row(prompt=user("a<video>b"), images=["1"]))
    assert f"user\n{IMAGE}a<video>b<|im_end|>" in rendered


def test_media_without_marks_stand_before_the_first_user_message(maker: PromptMaker) -> None:
    prompt = [{"role": "system", "content": "s"}, *user("what?"), {"role": "assistant", "content": "?"}, *user("now")]
    rendered = maker.render(row(prompt=prompt, images=["1", "2"], videos=[["3"]]))
    assert f"<|im_start|>user\n{IMAGE}{IMAGE}{VIDEO}what?<|im_end|>" in rendered
    with pytest.raises(DataError, match="no user message"):
        maker.render(row(prompt=[{"role": "system", "content": "s"}], images=["1"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": f"a {IMAGE}"},
        {"prompt": user(parts("image"))},
        {"prompt": "a", "images": ["1"]},
        {"prompt": "a <image> <image>", "images": ["1"]},
        {"prompt": user("<image>"), "images": ["1", "2"]},
        {"prompt": user(parts("image", "image")), "images": ["1"]},
        {"prompt": user(parts("image")), "videos": [["1"]]},
        {"prompt": user(f"{IMAGE} a <image>"), "images": ["1"]},
        {"prompt": user(parts("video")), "images": ["1"]},
    ],
)
def test_as_many_places_as_media_are_needed(fields: dict[str, Any], maker: PromptMaker) -> None:
    with pytest.raises(DataError, match="not as many places"):
        maker.skeleton(row(**fields))


@pytest.mark.parametrize(
    ("prompt", "name", "value", "do"),
    [
        ("a <image>", "imagse", ["1"], 'Rename "imagse" to "images".'),
        (user(parts("image")), "Images", ["1"], 'Rename "Images" to "images".'),
        ("a <image>", "imagee", "1", 'Rename "imagee" to "image".'),
        ("a <video>", "vidoes", [["1"]], 'Rename "vidoes" to "videos".'),
        (user(parts("video")), "images", [], 'Add the column "videos", or take the places out.'),
        (f"a {IMAGE}", "answer", ["1"], 'Add the column "images", or take the places out.'),
        (f"a {IMAGE}", "imagse", 3, 'Add the column "images", or take the places out.'),
        (f"a {IMAGE}", "image_file", "1", 'Add the column "images", or take the places out.'),
    ],
)
def test_places_without_media_are_told_of_a_column_that_may_hold_them(
    prompt: object, name: str, value: object, do: str, maker: PromptMaker
) -> None:
    with pytest.raises(DataError, match="not as many places") as caught:
        maker.skeleton(row(**{"prompt": prompt, name: value}))
    assert caught.value.do.startswith(do)


def test_placeholders_are_repeated_for_each_token_of_their_medium(
    maker: PromptMaker, shape: ModelShape, tokenizer: TextTokenizer
) -> None:
    example = row(prompt="a<image>b<video>c", images=["1"], videos=[["2"]])
    grids = [Grid(frames=1, height=4, width=6), Grid(frames=2, height=2, width=4)]
    prompt = maker.finish(maker.skeleton(example), grids, [None, 1.0])
    start, end = shape.vision_start_id, shape.vision_end_id
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    wanted = [a, start, *[shape.image_id] * 6, end, b, start, *[shape.video_id] * 4, end, c]
    assert prompt.ids.tolist() == wanted
    assert prompt.positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]


def test_decoding_leaves_out_special_tokens_as_transformers_does(tokenizer: TextTokenizer, theirs: Any) -> None:
    text = "<|im_start|> red , 你 <|vision_pad|>x<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == " red , 你 x"
    assert tokenizer.decode(ids[:4]) == theirs.decode(ids[:4], skip_special_tokens=True)


def test_a_token_is_named_by_its_text(tokenizer: TextTokenizer) -> None:
    assert tokenizer.text_of(tokenizer.id_of("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.id_of(" ") == tokenizer.encode(" ")[0]
    for text in ("<|no_such|>", "red green", ""):
        with pytest.raises(ConfigError, match="not a token"):
            tokenizer.id_of(text)


def copy(folder: Path, target: Path, **changes: dict[str, Any]) -> Path:
    shutil.copytree(folder, target)
    for name, fields in changes.items():
        file = target / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return target


@pytest.mark.parametrize("name", ["config", "tokenizer_config", "preprocessor_config"])
def test_a_model_that_wants_its_own_code_run_is_refused(name: str, model_folder: Path, tmp_path: Path) -> None:
    folder = copy(model_folder, tmp_path / "m", **{name: {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="own code"):
        TextTokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_be_read_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = copy(model_folder, tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        TextTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        TextTokenizer(folder)
    folder = copy(model_folder, tmp_path / "n", tokenizer_config={"added_tokens_decoder": {"999": {"content": "<x>"}}})
    with pytest.raises(ModelError, match="disagree"):
        TextTokenizer(folder)


def test_truncation_and_padding_of_tokenizer_json_are_off(model_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = copy(model_folder, tmp_path / "m")
    cutting = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=50)
    cutting.save(str(folder / "tokenizer.json"))
    assert len(TextTokenizer(folder).encode("x 1 y 2 z")) == 9


def test_media_tokens_must_be_those_of_the_tokenizer(model_folder: Path, tmp_path: Path) -> None:
    from rollplex.layout.shape import read_shape

    folder = copy(model_folder, tmp_path / "m", config={"image_token_id": 5})
    with pytest.raises(ModelError, match="media tokens"):
        PromptMaker(TextTokenizer(folder), read_shape(folder))


def test_the_chat_template_is_found_where_transformers_writes_it(model_folder: Path, tmp_path: Path) -> None:
    folder = copy(model_folder, tmp_path / "m")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert TextTokenizer(folder).template().render([]) == "of the processor"
    (folder / "chat_template.jinja").write_text("{{ eos_token }} of the file")
    assert TextTokenizer(folder).template().render([]) == "<|im_end|> of the file"
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    folder = copy(model_folder, tmp_path / "n", tokenizer_config={"chat_template": named})
    assert TextTokenizer(folder).template().render([]) == "d"
    folder = copy(model_folder, tmp_path / "o", tokenizer_config={"chat_template": None})
    with pytest.raises(ModelError, match="no chat template"):
        TextTokenizer(folder).template()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%d %b %Y') }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_reaches_neither_python_nor_the_clock(source: str) -> None:
    with pytest.raises(ModelError, match="template failed"):
        ChatTemplate(source, {}, "here").render([{"role": "user", "content": "a"}])


def test_a_template_that_refuses_or_does_not_compile_says_so() -> None:
    with pytest.raises(DataError, match="needs a system message"):
        ChatTemplate("{{ raise_exception('needs a system message') }}", {}, "here").render([])
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}", {}, "here")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% generation %}a{{ messages[0].content }}{% endgeneration %}b",
        " {% set s = namespace(n=0) %}\n {% for m in messages %}{% set s.n = s.n + 1 %}\n{% endfor %}\n{{ s.n }}\n",
        "{{ messages | map(attribute='role') | join(',') }}<{{ '&' }}>{{ tools is none }}{{ '<' }}",
        "{{ messages | tojson(indent=2) }}{{ eos_token }}",
    ],
)
def test_the_sandbox_renders_what_transformers_renders(source: str, theirs: Any) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "é <b>", "name": None},
        {"role": "tool", "content": "x"},
    ]
    ours = ChatTemplate(source, {"eos_token": "<|im_end|>"}, "here").render(messages)
    assert ours == theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
