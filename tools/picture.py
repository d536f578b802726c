"""Takes the picture of a page: python tools/picture.py PAGE.html PICTURE.png [--width 1280] [--height 900] [--scheme light]."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Opens the page in Debian's chromium and keeps what is seen first."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("page", type=Path)
    asked.add_argument("picture", type=Path)
    asked.add_argument("--width", type=int, default=1280)
    asked.add_argument("--height", type=int, default=900)
    asked.add_argument("--scheme", choices=("light", "dark"), default="light")
    given = asked.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed: no picture is taken.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=chromium, args=options)
        size = {"width": given.width, "height": given.height}
        page = browser.new_context(color_scheme=given.scheme, viewport=size).new_page()  # type: ignore[arg-type]
        page.goto(given.page.resolve().as_uri())
        # A page of attention says when all its figures are drawn.
        if page.query_selector("#patterns"):
            page.wait_for_selector("body[data-drawn]", state="attached")
        # What is folded is drawn when it is unfolded.
        page.wait_for_function(
            "() => [...document.querySelectorAll('[data-chart]')].every((root) => !root.checkVisibility() || root.querySelector('svg'))"
        )
        page.screenshot(path=given.picture)
        browser.close()


if __name__ == "__main__":
    main()
