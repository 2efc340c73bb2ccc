"""Rollplex: reinforcement-learning post-training of vision-language models, prefix work shared and overlapped.

This package is what the services share: messages, memory, layouts, the model, data, rewards, configuration
and the command line. It imports no service.
"""

__version__ = "0.1.0"
