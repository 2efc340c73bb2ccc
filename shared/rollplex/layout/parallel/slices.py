"""Where a training rank's shard of a part lies in the whole tensors: the stored one, and transformers'. Pure, no torch.

Ranks fill their shards from files by it, and whole tensors are put together from shards by it: checkpoints and files of
gradients are the same whatever the degree.

    stored tensor      q ............ | k .... | v .... |       parts one after the other, each with its padding
    of one rank             #####                               `stored`
    transformers' q    ............                             without padding
    of one rank             #####                               `file`

Owns: the arithmetic. Does not know: files, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.layout.parallel.plan import Parameter
from rollplex.layout.parallel.split import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """All ranges are along one axis; across it a shard is as wide as the whole."""

    axis: int
    """0: rows. 1: columns."""
    entry: str
    """SGLang's name of the stored tensor."""
    stored: Range
    """Of the stored tensor: all of the shard."""
    hf_name: str
    """transformers' name of the tensor that the part is, or is in (q, k and v of a vision tower)."""
    file: Range
    """Of transformers' tensor. May be empty: the shard is padding."""

    @property
    def size(self) -> int:
        """How many rows or columns of the shard, from its first on, are in the file; the others are padding."""
        return self.file[1] - self.file[0]


def slice_of(parameter: Parameter) -> Slice:
    """Of a parameter of the training layout (`DevicePlan.training`)."""
    split = parameter.stored.split
    number = [part.name for part in split.parts].index(parameter.name)
    part = split.parts[number]
    start, stop = parameter.pieces[0].of
    first = sum(each.size for each in split.parts[:number])
    hf_name, _, label = part.name.partition(":")
    begin = first if label else 0  # three parts of one tensor lie in the file as they are stored
    return Slice(
        axis=1 if split.axis == "columns" else 0,
        entry=split.entry.name,
        stored=(first + start, first + stop),
        hf_name=hf_name,
        file=(begin + min(start, part.real), begin + min(stop, part.real)),
    )
