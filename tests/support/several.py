"""Nodes of several devices, watched from outside: their weights' segments, read while they stand still."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollplex.journal.events import LeaseGranted
from rollplex.journal.reader import Reader
from rollplex.layout.parameters import parameter_table
from rollplex.layout.shape import read_shape
from rollplex.memory.tensors import hf_views
from rollplex.model.weights import fill
from rollplex.protocol.common import Device, Kind
from support.nodes import Node
from support.slices import Model

_NAME = re.compile(r"/memfd:rollplex-actor_weights-(\d+)\b")


def weights_segments(node: Node) -> dict[Device, NDArray[np.uint8]]:
    """What the actor weights on each device of a node are now, through the descriptors that its coordinator holds."""
    held: dict[int, Path] = {}
    for link in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # another descriptor, which was closed meanwhile
            match = _NAME.match(str(link.readlink()))
            if match:
                held[int(match[1])] = link
    found: dict[Device, NDArray[np.uint8]] = {}
    with Reader(node.run_dir / "journal.sqlite") as reader:
        for record in reader.events_of_type(LeaseGranted):
            lease = record.event
            assert isinstance(lease, LeaseGranted)
            if lease.kind is Kind.ACTOR_WEIGHTS and lease.segment is not None:
                found[lease.device] = np.fromfile(held[lease.segment], dtype=np.uint8)
    return found


def whole_model(folder: Path) -> Model:
    """Every tensor of a model folder by transformers' name, as unsigned numbers of the same width."""
    shape = read_shape(folder)
    table = parameter_table(shape, dtype="float32", freeze_vision=False)
    views = {entry.name: torch.zeros(entry.shape) for entry in table.entries}
    fill(table, views, folder)
    return {name: view.contiguous().numpy().view(np.uint32) for name, view in hf_views(views, table).items()}


def placement(training: int, rollout: int, devices: int = 4) -> dict[str, Any]:
    """Overrides of a node."""
    return {"parallel.devices": devices, "parallel.training": training, "parallel.rollout": rollout}


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what depends on the clock."""
    return {name: value for name, value in row.items() if not name.startswith("time/")}
