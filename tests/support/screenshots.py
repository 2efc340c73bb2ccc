"""`cd tests && python -m support.screenshots RUN_DIR OUT_DIR`: the pictures of docs/dashboard.md, from a live run.

Light and dark on a desk, a phone, and history. Needs what `support.browser` needs; colours are reduced to a palette.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from support.browser import browser

VIEWS = (
    ("dashboard-light", "light", 1280, 860, "live"),
    ("dashboard-dark", "dark", 1280, 860, "live"),
    ("dashboard-phone", "light", 390, 844, "live"),
    ("dashboard-history", "light", 1280, 1180, "history"),
)
SETTLE_MS = 3_000


def take(run_dir: Path, out: Path) -> None:
    """All of them."""
    url = json.loads((run_dir / "http.json").read_text(encoding="utf-8"))["url"]
    token = (run_dir / "token").read_text(encoding="ascii").strip()
    with browser() as chromium:
        for name, scheme, width, height, view in VIEWS:
            context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(url)
            page.fill("#token", token)
            page.click("text=Log in")
            page.wait_for_selector("#lanes svg")
            if view == "history":
                _open_history(page)
            page.wait_for_timeout(SETTLE_MS)
            picture = Image.open(io.BytesIO(page.screenshot()))
            picture.convert("RGB").quantize(128).save(out / f"{name}.png", optimize=True)
            context.close()


def _open_history(page: Any) -> None:
    page.click("#to-history")
    page.wait_for_selector("#runs table")
    for box in page.locator("#runs input[type=checkbox]:enabled").all()[:3]:
        box.check()
    page.locator("#runs tbody a").first.click()
    page.wait_for_selector("#one-lanes svg")
    page.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
