"""The prefix service."""
