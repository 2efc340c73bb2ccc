"""What several tests need: running nodes and small projects."""
