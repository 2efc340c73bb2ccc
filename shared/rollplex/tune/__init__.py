"""Measures settings that only this model on this machine can tell, and writes them into the configuration."""
