"""The digits demo: a tiny vision-language model learns to name handwritten digits, from scratch. No torch."""
