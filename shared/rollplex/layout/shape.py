"""The numbers that fix a Qwen2.5-VL's shapes, read from a model folder.

Owns: which field of config.json (and generation_config.json) gives which number, in every form that transformers 5.12
to 5.24 write or read. Does not know: tensors, parameter names, tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollplex.errors import ModelError
from rollplex.layout.fields import Fields, load


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The vision tower. Lengths are in pixels where they concern images, else in numbers per vector."""

    depth: int
    """Blocks."""
    hidden: int
    intermediate: int
    """Width of the gated MLP as transformers has it, without SGLang's padding."""
    heads: int
    patch: int
    """Side of a patch in pixels."""
    temporal_patch: int
    """Frames per patch."""
    merge: int
    """merge x merge patches become one token."""
    in_channels: int
    window: int
    """Side of an attention window in pixels."""
    full_attention_blocks: tuple[int, ...]
    """Blocks without windows."""
    out_hidden: int
    tokens_per_second: int
    """Temporal mrope positions per second of video."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def merger_width(self) -> int:
        """Numbers per token inside the merger: merge * merge * hidden."""
        return self.merge * self.merge * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Qwen2.5-VL."""

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
    that transformers 5.24's `Qwen2_5_VLConfig` gives them, and its defaults for fields that only select behaviour.

    Raises:
        ModelError: a file that cannot be read, a field that is absent or unusable (named in `where`), or another
            architecture.
    """
    root = Fields(load(folder / "config.json"), str(folder / "config.json"))
    model_type = root.get("model_type")
    if model_type != "qwen2_5_vl":
        raise ModelError(
            "This architecture is not supported",
            got=f"model_type {model_type!r}",
            needed="qwen2_5_vl",
            do="Use a Qwen2.5-VL model folder.",
            where=root.where("model_type"),
        )
    text = root.section("text_config") if root.get("text_config") is not None else root
    generation_file = folder / "generation_config.json"
    generation = Fields(load(generation_file) if generation_file.is_file() else {}, str(generation_file))
    shape = _model_shape(root, text, generation)
    _check(shape, root)
    return shape


def _model_shape(root: Fields, text: Fields, generation: Fields) -> ModelShape:
    heads = text.whole("num_attention_heads")
    hidden = text.whole("hidden_size")
    _divides(text, "num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads
    if text.whole("head_dim", head_dim) != head_dim:
        raise ModelError(
            "head_dim is not what transformers computes",
            got=str(text.get("head_dim")),
            needed=f"hidden_size / num_attention_heads = {head_dim}",
            where=text.where("head_dim"),
        )
    kv_heads = text.whole("num_key_value_heads", heads)
    _divides(text, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if text.get("use_sliding_window"):
        raise ModelError(
            "Sliding-window attention is not supported",
            got="true",
            needed="false",
            where=text.where("use_sliding_window"),
        )
    vocab = text.whole("vocab_size")
    rope = text.section("rope_parameters", "rope_scaling")
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
        vision=_vision_shape(root.section("vision_config")),
        image_id=root.whole("image_token_id", 151_655),
        video_id=root.whole("video_token_id", 151_656),
        vision_start_id=root.whole("vision_start_token_id", 151_652),
        vision_end_id=root.whole("vision_end_token_id", 151_653),
        vision_pad_id=_first_id("vision_token_id", vocab, root, text),
        pad_id=_first_id("pad_token_id", vocab, generation, text, root),
        eos_ids=_first_ids("eos_token_id", vocab, generation, root, text),
    )


def _vision_shape(vision: Fields) -> VisionShape:
    shape = VisionShape(
        depth=vision.whole("depth"),
        hidden=vision.whole("hidden_size"),
        intermediate=vision.whole("intermediate_size"),
        heads=vision.whole("num_heads"),
        patch=vision.side("patch_size", 14),
        temporal_patch=vision.side("temporal_patch_size", 2),
        merge=vision.whole("spatial_merge_size", 2),
        in_channels=vision.whole("in_channels", 3),
        window=vision.whole("window_size", 112),
        full_attention_blocks=vision.wholes("fullatt_block_indexes", (7, 15, 23, 31)),
        out_hidden=vision.whole("out_hidden_size"),
        tokens_per_second=vision.whole("tokens_per_second", 4),
    )
    _divides(vision, "num_heads", shape.heads, "hidden_size", shape.hidden)
    if shape.head_dim % 4:
        raise ModelError(
            "A vision head cannot hold rotary positions of two axes",
            got=f"hidden_size / num_heads = {shape.head_dim}",
            needed="a multiple of 4",
            where=vision.where("num_heads"),
        )
    return shape


def _check(shape: ModelShape, root: Fields) -> None:
    if shape.vision.out_hidden != shape.hidden:
        raise ModelError(
            "Vision tokens do not fit between text tokens",
            got=f"out_hidden_size {shape.vision.out_hidden}",
            needed=f"the text model's hidden_size {shape.hidden}",
            where=root.where("vision_config.out_hidden_size"),
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


def _divides(fields: Fields, small_name: str, small: int, large_name: str, large: int) -> None:
    if large % small:
        raise ModelError(
            f"{small_name} does not divide {large_name}",
            got=f"{large} / {small}",
            needed="a whole number",
            where=fields.where(small_name),
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
