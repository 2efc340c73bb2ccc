"""The numbers that fix a model's shapes, read from a model folder: a Qwen2.5-VL or a Qwen2-VL.

Owns: which field of config.json (and generation_config.json) gives which number, in every form that transformers 5.12
to 5.24 write or read. Does not know: tensors, parameter names, tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollplex.errors import ModelError
from rollplex.layout.fields import Fields, load
from rollplex.layout.vision import ARCHITECTURES, Architecture, VisionShape, divides, read_vision_shape, width_name


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Qwen2.5-VL or a Qwen2-VL: one language model, two vision towers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    """Rows of the embedding without padding."""
    tied: bool
    """lm_head is the embedding."""
    mrope_section: tuple[int, ...]
    """How many of the head_dim / 2 frequencies follow the temporal, height and width position."""
    rope_theta: float
    rms_eps: float
    vision: VisionShape
    image_id: int
    video_id: int
    vision_start_id: int
    vision_end_id: int
    vision_pad_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Ids that end a response, those inside the vocabulary, in the order of the file."""

    @property
    def architecture(self) -> Architecture:
        return self.vision.architecture

    @property
    def row_width(self) -> int:
        """Numbers in a pixel row: channels * temporal patch * patch * patch."""
        vision = self.vision
        return vision.in_channels * vision.temporal_patch * vision.patch * vision.patch


def media_ids(shape: ModelShape) -> tuple[int, ...]:
    """Ids outside every log-softmax: media placeholders and delimiters, and the padding id. Ascending, no repeats.

    The padding id stays sampleable if it is the only id that ends a response (a model whose pad token is its
    end-of-sequence token could never stop otherwise).
    """
    ids = {shape.image_id, shape.video_id, shape.vision_start_id, shape.vision_end_id}
    if shape.vision_pad_id is not None:
        ids.add(shape.vision_pad_id)
    if shape.pad_id is not None and set(shape.eos_ids) != {shape.pad_id}:
        ids.add(shape.pad_id)
    return tuple(sorted(i for i in ids if 0 <= i < shape.vocab))


def read_shape(folder: Path) -> ModelShape:
    """Read config.json and, if it is there, generation_config.json of a model folder.

    Takes the nested form (text_config, vision_config) and the flat one (text fields at the top) with the precedence
    that transformers 5.24's configurations give them, and its defaults for fields that only select behaviour.

    Raises:
        ModelError: a file that cannot be read, a field that is absent or unusable (named in `where`), or another
            architecture.
    """
    root = Fields(load(folder / "config.json"), str(folder / "config.json"))
    architecture = _architecture(root)
    text = root.section("text_config") if root.get("text_config") is not None else root
    generation_file = folder / "generation_config.json"
    generation = Fields(load(generation_file) if generation_file.is_file() else {}, str(generation_file))
    shape = _model_shape(root, text, generation, architecture)
    _check(shape, root)
    return shape


def read_architecture(folder: Path) -> Architecture:
    """Of config.json. Raises ModelError as `read_shape`."""
    return _architecture(Fields(load(folder / "config.json"), str(folder / "config.json")))


def _architecture(root: Fields) -> Architecture:
    """Of a model that can be trained."""
    if root.get("quantization_config") is not None:
        raise ModelError(
            "Quantized weights cannot be trained",
            got="a quantization_config",
            needed="weights in float32, float16 or bfloat16",
            do="Use the folder that the model was quantized from.",
            where=root.where("quantization_config"),
        )
    model_type = root.get("model_type")
    for architecture in ARCHITECTURES:
        if architecture == model_type:
            return architecture
    raise ModelError(
        "This architecture is not supported",
        got=f"model_type {model_type!r}",
        needed=" or ".join(ARCHITECTURES),
        do="Use a Qwen2.5-VL or Qwen2-VL model folder.",
        where=root.where("model_type"),
    )


def _model_shape(root: Fields, text: Fields, generation: Fields, architecture: Architecture) -> ModelShape:
    heads = text.whole("num_attention_heads")
    hidden = text.whole("hidden_size")
    divides(text, "num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads
    if text.whole("head_dim", head_dim) != head_dim:
        raise ModelError(
            "head_dim is not what transformers computes",
            got=str(text.get("head_dim")),
            needed=f"hidden_size / num_attention_heads = {head_dim}",
            where=text.where("head_dim"),
        )
    kv_heads = text.whole("num_key_value_heads", heads)
    divides(text, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if text.get("use_sliding_window"):
        raise ModelError(
            "Sliding-window attention is not supported",
            got="true",
            needed="false",
            where=text.where("use_sliding_window"),
        )
    vocab = text.whole("vocab_size")
    rope = text.section("rope_parameters", "rope_scaling")
    _check_rope(rope)
    section = rope.wholes("mrope_section", (16, 24, 24))
    if len(section) != 3 or sum(section) * 2 != head_dim:
        raise ModelError(
            "mrope_section does not fill the head",
            got=f"{list(section)} (sum {sum(section)})",
            needed=f"three numbers with the sum head_dim / 2 = {head_dim // 2}",
            where=rope.where("mrope_section"),
        )
    tied = bool(root.get("tie_word_embeddings")) or bool(text.get("tie_word_embeddings"))
    return ModelShape(
        hidden=hidden,
        layers=text.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=text.whole("intermediate_size"),
        vocab=vocab,
        tied=tied,
        mrope_section=section,
        rope_theta=rope.number("rope_theta", text.number("rope_theta", 1_000_000.0)),
        rms_eps=text.number("rms_norm_eps", 1e-5),
        vision=read_vision_shape(root.section("vision_config"), architecture),
        image_id=root.whole("image_token_id", 151_655),
        video_id=root.whole("video_token_id", 151_656),
        vision_start_id=root.whole("vision_start_token_id", 151_652),
        vision_end_id=root.whole("vision_end_token_id", 151_653),
        vision_pad_id=_first_id("vision_token_id", vocab, root, text),
        pad_id=_first_id("pad_token_id", vocab, generation, text, root),
        eos_ids=_first_ids("eos_token_id", vocab, generation, root, text),
    )


def _check(shape: ModelShape, root: Fields) -> None:
    if shape.vision.out_hidden != shape.hidden:
        name = width_name(shape.architecture)
        raise ModelError(
            "Vision tokens do not fit between text tokens",
            got=f"{name} {shape.vision.out_hidden}",
            needed=f"the text model's hidden_size {shape.hidden}",
            where=root.where(f"vision_config.{name}"),
        )
    for name, value in (("image_token_id", shape.image_id), ("video_token_id", shape.video_id)):
        if value >= shape.vocab:
            raise ModelError(
                "A media placeholder lies outside the vocabulary",
                got=str(value),
                needed=f"an id below vocab_size {shape.vocab}",
                where=root.where(name),
            )
    if shape.image_id == shape.video_id:
        raise ModelError(
            "Images and videos have the same placeholder",
            got=str(shape.image_id),
            needed="two different ids",
            where=root.where("video_token_id"),
        )


def _check_rope(rope: Fields) -> None:
    """Frequencies must not depend on how long a sequence is: prompt and response are computed apart."""
    for name in ("rope_type", "type"):
        if rope.get(name) in ("dynamic", "longrope"):
            raise ModelError(
                "Rotary frequencies that change with the length of a sequence are not supported",
                got=str(rope.get(name)),
                needed="default, mrope, linear or yarn",
                where=rope.where(name),
            )


def _first_id(name: str, vocab: int, *sources: Fields) -> int | None:
    ids = _first_ids(name, vocab, *sources)
    return ids[0] if ids else None


def _first_ids(name: str, vocab: int, *sources: Fields) -> tuple[int, ...]:
    """The field from the first source that has it. Ids outside the vocabulary (transformers' own defaults in a small
    model) can be neither given nor sampled and are dropped."""
    for source in sources:
        value = source.get(name)
        if value is not None:
            ids = source.wholes(name) if isinstance(value, list) else (source.whole(name),)
            return tuple(i for i in ids if i < vocab)
    return ()
