"""Reward functions and the reward child. No torch."""
