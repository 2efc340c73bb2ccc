"""Names that the rollout process and the scheduler process both use, without what they import."""

from __future__ import annotations

from typing import Final

BEGIN: Final = "rollplex_begin"
REST: Final = "rollplex_rest"
BUSY: Final = "requests are still running"
"""How a call that needs an idle scheduler is refused; the last step's results may still be on their way."""
