"""The system's Chromium by Playwright, for tests of the dashboard; says what is missing where it cannot be had.

Nothing is downloaded: Playwright's own browsers are not used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE_PACKAGE = "axe_playwright_python"


def missing() -> str:
    """What is not there, in words; empty: all is."""
    wanted = [name for name in ("playwright", AXE_PACKAGE) if importlib.util.find_spec(name) is None]
    if wanted:
        return f"needs the Python packages {' and '.join(wanted)} (pip install 'rollplex[web-test]')"
    return "" if _chromium() else f"needs a Chromium on the path, as one of {', '.join(NAMES)}"


@contextmanager
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=_chromium(), args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()


def axe_findings(page: Any) -> list[tuple[str, str, list[str]]]:
    """What axe-core finds serious or critical in a page: impact, rule, the elements."""
    spec = importlib.util.find_spec(AXE_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    script = Path(spec.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(f"{script}\n;0")  # by the debugger, which the page's policy does not bind
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        (one["impact"], one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]


def _chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)
