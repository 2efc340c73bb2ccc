"""The prefix service: reference and actor prefixes, reference scores, prefix backward."""
