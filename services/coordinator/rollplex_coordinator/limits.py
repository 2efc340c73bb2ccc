"""How many files and sockets this process may hold open: raised as far as it may be, refused if that is too few.

Each worker, segment and client of the API is one; a run that ended for want of them would end in the middle.
"""

from __future__ import annotations

import resource
from typing import Final

from rollplex.errors import ConfigError

LEAST_FILES: Final = 256
WANTED_FILES: Final = 1024
"""No more: `select` takes no descriptor above."""


def raise_file_limit() -> None:
    """Up to what is wanted, for this process and those that it starts.

    Raises:
        ConfigError: it may not be as high as a run needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = WANTED_FILES if hard == unlimited else min(WANTED_FILES, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != unlimited and soft < LEAST_FILES:
        raise ConfigError(
            "This process may not hold enough files open",
            got=f"at most {soft}",
            needed=f"{LEAST_FILES}",
            do=f"Raise the limit of this shell (ulimit -n {WANTED_FILES}), or its hard limit.",
        )
