"""How many bytes the passes of `rollplex.model` hold, from shapes alone.

Owns: the model of memory that the ledger and the planner use. Does not know: torch, who holds the bytes, budgets.
`rollplex.model.measure` counts what is really held; tests compare the two over many shapes.

Derived from what autograd saves in transformers' eager Qwen2.5-VL and Qwen2-VL modules (5.17 to 5.24; 5.12 keeps cos
and sin once per layer, up to 3 % more) with the attention functions of `rollplex.model`. RMSNorms and the vision rope
are in float32 whatever the dtype. i: bytes of a number of the model's dtype; a: of the softmax, 4 (8 for float64).
Bytes per token (language model) or per patch (vision tower):

    saved                                     bytes                     by
    norm of width W: input in float32         4 W                       pow, mul
      1 / rms                                 4                         rsqrt, mul
      normed, and weighted                    2 i W                     mul; the linear layers that follow
    attention: q, k after rope, v, output     i D (h + kv + kv + h)     attention; o_proj
      prefix, vision: log-sum-exp             a h                       attention
      packed suffix: log-sum-exp              a h                       attention
      padded suffix: weights over P + R keys  a h (P + R)               softmax
        and in half precision                 i h (P + R)               the two products with V
      vision, sequences of unequal length     i D h                     output put back in order
    MLP: gate, silu(gate), up, product        4 i I                     silu, mul, down_proj
    merger: before and after GELU             2 i W                     GELU, linear
    in a Qwen2-VL's tower
      LayerNorm: input, normed                2 i W                     layer norm; the linear layers that follow
        mean, 1 / deviation                   2 a                       layer norm
      MLP: before and after, sigmoid          3 i I                     sigmoid, mul, fc2
    once, not per layer: cos and sin          2 i D (vision 2 * 4 D)    rope
    patch embedding: its input                i row_width               product

`rollplex.model.fused` saves less; in all its modules, i I' of the MLP in its padded width:

    norm of width W in a layer: input         i W                       norm; 1 / rms: 4
      elsewhere also: weighted                i W                       the linear layers that follow
    MLP: gate and up                          2 i I'                    gate
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final, TypeAlias

from rollplex.layout.kv import KvLayout
from rollplex.layout.parameters import ITEM_BYTES, vision_mlp_width
from rollplex.layout.shape import ModelShape
from rollplex.layout.vision import VisionShape

Grid: TypeAlias = tuple[int, int, int]
"""Frames, height and width of one image or video, in patches."""
HALF_PRECISIONS: Final = ("bfloat16", "float16")
INDEX_BYTES: Final = 8
"""Ids and indices are int64."""
MULTIPROCESSORS: Final = 160
"""More than any GPU that this runs on has. A plan needs no GPU to be computed."""
LOGITS_CHUNK_BYTES: Final = 128 * 2**20
"""How much of the logits `rollplex.model.logprob` makes at a time. Part of what decides bits: never by free memory."""


def kv_bytes(shape: ModelShape, *, rows: int, tokens: int, dtype: str) -> int:
    """What a prefix state without a graph holds: K and V of `rows` prompts of `tokens`, and their last hidden state.

    The reference's prefix K/V, and the prompts' part of a rollout's.
    """
    kv = 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim
    return rows * (kv + shape.hidden) * ITEM_BYTES[dtype]


def rollout_kv_bytes(
    shape: ModelShape, *, rows: int, tokens: int, samples: int, max_new_tokens: int, dtype: str
) -> int:
    """What `rollplex.model.decode.Decoder` holds: the prompts' K/V, once, and the samples' own. The last token of a
    response is never fed."""
    own = 2 * shape.layers * (max_new_tokens - 1) * shape.kv_heads * shape.head_dim * ITEM_BYTES[dtype]
    return kv_bytes(shape, rows=rows, tokens=tokens, dtype=dtype) + rows * samples * own


def pool_kv_bytes(shape: ModelShape, *, kv_tokens: int, dtype: str) -> int:
    """The pool of keys and values of an engine that keeps one for all units (SGLang): a page of one token more than it
    is asked for, where padding is written."""
    return (kv_tokens + 1) * 2 * shape.layers * shape.kv_heads * shape.head_dim * ITEM_BYTES[dtype]


def engine_scratch_bytes(
    shape: ModelShape, *, prefill_tokens: int, patches: int, running: int, ranks: int, dtype: str
) -> int:
    """What SGLang's model works with beside its pool: one prefill step through a layer, the pictures that it encodes at
    once through a block, and the logits of the running responses (as they are made, in the CUDA graphs' buffer, and
    their softmax; of several ranks also gathered). An upper bound; what its allocator really took is compared with it
    by whoever watches the device.

    Args:
        patches: of the pictures of one prefill step.
        ranks: of one replica, each of which makes its part of the logits and gathers all.
    """
    item, vision = ITEM_BYTES[dtype], shape.vision
    text = prefill_tokens * item * (3 * shape.intermediate + 6 * shape.hidden)
    tower = patches * item * (3 * vision_mlp_width(vision) + 8 * vision.hidden + shape.row_width)
    logits = 4 if ranks == 1 else 5
    return text + tower + logits * running * shape.vocab * _softmax_bytes(dtype)


def kv_segment_bytes(shape: ModelShape, *, rows: int, tokens: int, dtype: str) -> int:
    """Size of an actor prefix unit's segment: K, V, the last hidden state, and the gradients of all of them."""
    return KvLayout(shape=shape, rows=rows, tokens=tokens, dtype=dtype).total_bytes


def prefix_activation_bytes(
    shape: ModelShape,
    *,
    rows: int,
    tokens: int,
    grids: Sequence[Grid],
    freeze_vision: bool,
    dtype: str,
    fused: bool = False,
) -> int:
    """What the graph of `prefix_forward(..., grad=True)` holds, with the state that it returns.

    Args:
        rows: prompts, copies included. tokens: of the longest, to which all are padded.
        grids: one (t, h, w) per image or video of all rows, copies included.
        fused: by the modules of `rollplex.model.fused`.
    """
    item, wide = ITEM_BYTES[dtype], _softmax_bytes(dtype)
    layer = text_layer_bytes(shape, item, fused=fused) + shape.heads * wide
    per_token = shape.layers * layer + norm_bytes(shape.hidden, item, fused=fused) - item * shape.hidden
    per_token += 2 * item * shape.head_dim + INDEX_BYTES
    last = rows * (item * shape.hidden + 2 * INDEX_BYTES)
    patches = sum(t * h * w for t, h, w in grids)
    features = patches // shape.vision.merge**2
    media = features * INDEX_BYTES
    if patches and not freeze_vision:
        media += _vision_bytes(shape, grids, item, wide, fused=fused) + features * item * shape.hidden
    return rows * tokens * per_token + last + media


def prefix_layers_bytes(
    shape: ModelShape,
    *,
    rows: int,
    tokens: int,
    grids: Sequence[Grid],
    freeze_vision: bool,
    dtype: str,
    fused: bool = False,
) -> tuple[int, int]:
    """What `prefix_forward(..., layers=True)` holds: inputs of layers, K and V, until the backward, with the state that
    it returns; and what the largest layer holds beside, while it runs again. Arguments of `prefix_activation_bytes`."""
    item, wide = ITEM_BYTES[dtype], _softmax_bytes(dtype)
    everything = prefix_activation_bytes(
        shape, rows=rows, tokens=tokens, grids=grids, freeze_vision=freeze_vision, dtype=dtype, fused=fused
    )
    inside = rows * tokens * (text_layer_bytes(shape, item, fused=fused) + shape.heads * wide)
    outside = rows * tokens * item * (shape.hidden + 2 * shape.kv_heads * shape.head_dim)
    kept = everything - shape.layers * (inside - outside)
    largest = inside
    if grids and not freeze_vision:
        blocks = _vision_blocks_bytes(shape, grids, item, wide, fused=fused)
        patches = sum(t * h * w for t, h, w in grids)
        kept -= sum(blocks) - len(blocks) * patches * item * shape.vision.hidden
        largest = max(inside, *blocks)
    return kept, largest


def scratch_bytes(
    shape: ModelShape, *, tokens: int, longest: int, rows: int, dtype: str, grids: Sequence[Grid] = ()
) -> int:
    """At most what a pass on a GPU holds for a moment, beyond its graph: in a forward what one layer does not keep, in
    a backward one layer's gradients, the float32 gradient of the queries of a deterministic flash attention, in as many
    parts as keep the multiprocessors busy, and the largest gradient of a weight before it is added to the arena. No
    graph shows it, so no lease is compared with it.

    Args:
        tokens: of all rows. longest: queries of one call of the attention. rows: sequences of such a call.
        grids: of the media whose tower is trained.
    """
    item = ITEM_BYTES[dtype]
    parts = MULTIPROCESSORS + rows * shape.heads
    attention = parts * longest * shape.head_dim * 4 + tokens * item * shape.head_dim * (4 * shape.heads)
    layer = tokens * 4 * item * shape.hidden + max(tokens * 4 * item * shape.intermediate, attention)
    vision = shape.vision
    patches = sum(t * h * w for t, h, w in grids)
    frame = max((h * w for _, h, w in grids), default=0)
    queries = patches * vision.hidden * 4 + MULTIPROCESSORS * frame * vision.head_dim * 4
    width = vision_mlp_width(vision) if vision.architecture == "qwen2_5_vl" else vision.intermediate
    block = patches * 4 * item * vision.hidden + max(
        patches * 4 * item * width, queries + patches * 4 * item * vision.hidden
    )
    weight = item * shape.hidden * max(shape.vocab, 2 * shape.intermediate)
    return max(layer, block) + weight


def packs_suffix(dtype: str, head_dim: int, *, cuda: bool) -> bool:
    """Whether the suffix pass is packed (`rollplex.model.packed`): where torch's flash attention runs. Elsewhere it is
    padded."""
    return cuda and dtype in HALF_PRECISIONS and head_dim % 8 == 0 and head_dim <= 256


def packed_suffix_saved_bytes(
    shape: ModelShape, *, prompts: int, lengths: Sequence[int], entropy: bool, dtype: str, fused: bool = False
) -> int:
    """The same as `suffix_saved_bytes` of a packed pass: no token but the real ones, and no attention weights."""
    item, wide = ITEM_BYTES[dtype], _softmax_bytes(dtype)
    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    fed = total - rows
    scored = scored_rows(prompts, lengths)
    out = (1 + entropy) * rows * longest * wide
    head = (scored if fed else 0) * item * shape.hidden + scored * (1 + entropy) * wide + 2 * total * INDEX_BYTES
    if total < rows * longest:
        head += (1 + entropy) * total * (INDEX_BYTES + wide)
    layer = text_layer_bytes(shape, item, fused=fused) + shape.heads * wide
    per_token = shape.layers * layer + norm_bytes(shape.hidden, item, fused=fused) - item * shape.hidden
    per_token += 2 * item * shape.head_dim + INDEX_BYTES
    return fed * per_token + head + out


def suffix_saved_bytes(
    shape: ModelShape, *, prompts: int, prefix_tokens: int, lengths: Sequence[int], entropy: bool, dtype: str
) -> int:
    """What the graph of `suffix_forward` holds until its backward, with its outputs, without K and V of the prefix.

    Args:
        prompts: rows of the prefix. prefix_tokens: to which they are padded.
        lengths: of all responses, prompt-major.
        entropy: the entropy is asked for.
    """
    item, wide = ITEM_BYTES[dtype], _softmax_bytes(dtype)
    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    fed = longest - 1
    scored = scored_rows(prompts, lengths)
    padded = total < rows * longest
    weights = shape.heads * (prefix_tokens + fed) * (wide if wide == item else wide + item)
    per_token = (
        shape.layers * (text_layer_bytes(shape, item, fused=False) + weights)
        + norm_bytes(shape.hidden, item, fused=False)
        - item * shape.hidden
    )
    per_token += 2 * item * shape.head_dim
    out = (1 + entropy) * rows * longest * wide
    head = scored * (item * shape.hidden + (1 + entropy) * wide) + 2 * total * INDEX_BYTES
    if not fed:
        head -= scored * item * shape.hidden
        return out + head
    ids = rows * longest * INDEX_BYTES
    if padded:
        head += rows * longest + (1 + entropy) * total * (INDEX_BYTES + wide) + 2 * (total - rows) * INDEX_BYTES
    return rows * fed * per_token + ids + head + out


def whole_saved_bytes(shape: ModelShape, *, tokens: int, grids: Sequence[Grid], freeze_vision: bool, dtype: str) -> int:
    """What the graph of `rollplex.model.whole.whole_forward` holds, at most: a prefix of `tokens`, response included,
    all of its last hidden states, and in each of transformers' own vision blocks q and k before rope (V is a view) and
    the outputs of the single windows."""
    item = ITEM_BYTES[dtype]
    saved = prefix_activation_bytes(shape, rows=1, tokens=tokens, grids=grids, freeze_vision=freeze_vision, dtype=dtype)
    saved += tokens * item * shape.hidden
    if not freeze_vision:
        patches = sum(t * h * w for t, h, w in grids)
        saved += patches * shape.vision.depth * 3 * item * shape.vision.hidden
    return saved


def whole_logits_bytes(shape: ModelShape, *, rows: int, dtype: str, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> int:
    """Scratch of the log-probabilities of `rows` response tokens in `whole_forward`: logits, those of the ids that may
    be sampled, scaled, log-softmax, probabilities, their product, and in the backward gradients of them; 8 in all."""
    width = shape.vocab * _softmax_bytes(dtype)
    return 8 * width * min(rows, max(1, chunk_bytes // width))


def logits_bytes(shape: ModelShape, *, rows: int, dtype: str, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> int:
    """Scratch of the log-probabilities of `rows` hidden states (`scored_rows`): scaled logits and their exponentials.

    Held only inside the forward and inside the backward, for as many hidden states at a time as fit `chunk_bytes`.
    """
    width = shape.vocab * _softmax_bytes(dtype)
    return 2 * width * min(rows, max(1, chunk_bytes // width))


def scored_rows(prompts: int, lengths: Sequence[int]) -> int:
    """Hidden states of a suffix pass that predict a token: the prompts' last ones, and those of all response tokens but
    the last ones."""
    return prompts + sum(lengths) - len(lengths)


def sequence_lengths(grids: Sequence[Grid], vision: VisionShape, *, windowed: bool) -> set[int]:
    """The different lengths, in patches, of the sequences that the vision tower attends within.

    A frame, or a window of it: windows of `window` pixels from the top left, cut off at the right and lower edge.
    """
    if not windowed:
        return {h * w for _, h, w in grids}
    side = vision.window // vision.merge // vision.patch
    lengths: set[int] = set()
    for _, height, width in grids:
        pairs = product(_parts(height // vision.merge, side), _parts(width // vision.merge, side))
        lengths |= {h * w * vision.merge**2 for h, w in pairs}
    return lengths


def _parts(length: int, side: int) -> set[int]:
    """The different sizes of the pieces when `length` is cut into pieces of `side`."""
    pieces = {side} if length >= side else set[int]()
    return pieces | ({length % side} if length % side else set())


def _softmax_bytes(dtype: str) -> int:
    return 8 if dtype == "float64" else 4


def norm_bytes(width: int, item: int, *, fused: bool) -> int:
    """Of one RMSNorm, per row."""
    return (4 + 2 * item * width) if fused else (4 * width + 4 + 2 * item * width)


def text_layer_bytes(shape: ModelShape, item: int, *, fused: bool) -> int:
    """Of one layer of the language model per token, without log-sum-exp or attention weights."""
    attention = item * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    if fused:
        return 2 * (item * shape.hidden + 4) + attention + 2 * item * shape.intermediate
    return 2 * norm_bytes(shape.hidden, item, fused=False) + attention + 4 * item * shape.intermediate


def _vision_bytes(shape: ModelShape, grids: Sequence[Grid], item: int, wide: int, *, fused: bool) -> int:
    """Of all patches, without the features themselves."""
    vision = shape.vision
    patches = sum(t * h * w for t, h, w in grids)
    windowed_tower = vision.architecture == "qwen2_5_vl"
    _, norm = _vision_block(vision, item, wide, fused=fused)
    per_patch = norm + 2 * item * vision.attention_width + item * shape.row_width + 2 * 4 * vision.head_dim
    tables = 2 * INDEX_BYTES * patches // vision.merge**2 if windowed_tower else 0
    tables += 2 * INDEX_BYTES * patches * sum(_unequal(vision, grids).values())
    return patches * per_patch + tables + sum(_vision_blocks_bytes(shape, grids, item, wide, fused=fused))


def _vision_blocks_bytes(
    shape: ModelShape, grids: Sequence[Grid], item: int, wide: int, *, fused: bool
) -> tuple[int, ...]:
    """Of each block, of all patches; their tables, which they share, are not among it."""
    vision = shape.vision
    patches = sum(t * h * w for t, h, w in grids)
    block, _ = _vision_block(vision, item, wide, fused=fused)
    unequal, full = _unequal(vision, grids), full_blocks(vision)
    kinds = [(False, full), (True, vision.depth - full)]
    return tuple(
        patches * (block + unequal[windowed] * item * vision.attention_width)
        for windowed, count in kinds
        for _ in range(count)
    )


def _unequal(vision: VisionShape, grids: Sequence[Grid]) -> dict[bool, bool]:
    """Of whole frames (False) and windows (True): blocks that attend so, within sequences of unequal length."""
    full = full_blocks(vision)
    counts = {False: full, True: vision.depth - full}
    return {
        windowed: count > 0 and len(sequence_lengths(grids, vision, windowed=windowed)) > 1
        for windowed, count in counts.items()
    }


def _vision_block(vision: VisionShape, item: int, wide: int, *, fused: bool) -> tuple[int, int]:
    """Of one block, and of one norm, per patch, where sequences have one length."""
    windowed_tower = vision.architecture == "qwen2_5_vl"
    fused &= windowed_tower
    norm = norm_bytes(vision.hidden, item, fused=fused) if windowed_tower else 2 * (item * vision.hidden + wide)
    attention = 4 * item * vision.attention_width + vision.heads * wide
    if fused:
        return 2 * (item * vision.hidden + 4) + attention + 2 * item * vision_mlp_width(vision), norm
    mlp = (4 if windowed_tower else 3) * item * vision.intermediate
    return 2 * norm + attention + mlp, norm


def full_blocks(vision: VisionShape) -> int:
    """How many blocks attend within whole frames."""
    return len({n for n in vision.full_attention_blocks if n < vision.depth})
