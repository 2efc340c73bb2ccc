"""What is written down: journal, numbers, responses; and what an earlier attempt left."""
