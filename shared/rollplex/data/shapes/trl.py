"""TRL's shape, and our own: "prompt" is a text, taken as it is, or a conversation."""

from __future__ import annotations

from rollplex.data.shapes.base import Shape
from rollplex.protocol.inputs import ShapeName

TRL = Shape(name=ShapeName.TRL, needs=("prompt",), prompt="prompt")
