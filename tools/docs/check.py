"""Checks the built site: no page asks for anything that is not in it, and where there is a browser, none does so when it is opened.

Links among pages are checked by ``mkdocs build --strict``.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\ssrc=["']?(?P<src>[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|icon|preload|prefetch|preconnect|manifest))[^>]*?\shref=["']?(?P<href>[^"'\s>]+)""",
    re.IGNORECASE,
)
STYLED = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


def loads(site: Path) -> Iterator[tuple[Path, str]]:
    """What pages and style sheets load, each with its file."""
    for page in sorted(site.rglob("*.html")):
        for found in LOADS.finditer(page.read_text(encoding="utf-8")):
            yield page, found["src"] or found["href"]
    for sheet in sorted(site.rglob("*.css")):
        for found in STYLED.finditer(sheet.read_text(encoding="utf-8")):
            yield sheet, found[1] or found[2]


def wrong(site: Path) -> list[str]:
    """What is loaded from elsewhere, or is not there."""
    said = []
    for file, address in loads(site):
        target = address.partition("#")[0].partition("?")[0]
        if re.match(r"(?:[a-z]+:)?//", address, re.IGNORECASE):
            said.append(f"{file.relative_to(site)} loads {address}")
        elif target and not target.startswith("data:"):
            place = site / target.lstrip("/") if target.startswith("/") else file.parent / target
            if not place.exists():
                said.append(f"{file.relative_to(site)} loads {address}, which is not there")
    return said


def seen_in_a_browser(site: Path, chromium: str) -> list[str]:
    """What goes wrong when every page is opened: requests to elsewhere, errors in the console, what is wider than a phone."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        page = started.chromium.launch(executable_path=chromium, args=options).new_page()
        page.set_viewport_size({"width": 420, "height": 900})
        now = ""
        page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else said.append(f"{now}: {r.url}")
        )
        page.on("console", lambda message: said.append(f"{now}: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(f"{now}: {error}"))
        for file in sorted(site.rglob("*.html")):
            now = str(file.relative_to(site))
            if now == "404.html":  # Its addresses are those of a server's root.
                continue
            page.goto(file.resolve().as_uri())
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > 420:
                said.append(f"{now}: {width} pixels wide on a phone of 420")
    return said


def main(site: Path) -> None:
    """Says what is wrong, and leaves with 1 where anything is."""
    said, chromium = wrong(site), shutil.which("chromium")
    said += seen_in_a_browser(site, chromium) if chromium else []
    for line in said:
        print(line)
    how = "and in a browser" if chromium else "without a browser: chromium is not installed"
    print(f"{len(list(site.rglob('*.html')))} pages, {how}: {len(said)} faults")
    sys.exit(bool(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
