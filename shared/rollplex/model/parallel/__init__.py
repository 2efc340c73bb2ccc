"""The passes of `rollplex.model` over one rank's shards of the weights. The passes themselves are the same code."""
