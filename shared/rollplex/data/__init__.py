"""Datasets, images, prompts, the input child. No torch."""
