"""A rollout service that samples elsewhere: a model of its own, a remote one, older weights. It says so, and is refused.

A service that does not sample from the mapped weights must say `on_policy: false` in Loaded (section 7 of
docs/protocol.md). The gate then refuses the run before its first step: what is trained on must come from the weights
that are trained. (A service that says true and samples elsewhere is found out by the log-probability gap, and by
`rollplex conformance`, which updates the weights and compares.)

It is the simple rollout in all but that.
"""

import sys
from pathlib import Path

source = Path(__file__).parents[1] / "simple_rollout" / "service.py"
exec(compile(source.read_text().replace("ON_POLICY = True", "ON_POLICY = False"), str(source), "exec"), {"sys": sys})
