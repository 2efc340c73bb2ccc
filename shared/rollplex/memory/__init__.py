"""Segments, attachments and predictions of memory."""
