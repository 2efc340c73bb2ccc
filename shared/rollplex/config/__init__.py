"""The YAML configuration. No torch.

load(file, ["a.b=v"]) ──► Config (frozen, checked) ──► wire.* ──► messages of rollplex.protocol
dump(config) ──► the same file with every default written out
"""

from rollplex.config.config import Config
from rollplex.config.loading import dump, from_mapping, load

__all__ = ["Config", "dump", "from_mapping", "load"]
