"""The YAML configuration. No torch."""
