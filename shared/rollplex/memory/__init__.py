"""Segments, attachments and predictions of memory."""

from rollplex.memory.segment import Backend, Mapping, backend

__all__ = ["Backend", "Mapping", "backend"]
