"""Pages in a real browser: Debian's chromium, driven by playwright, one browser for all tests of a process.

A test takes the fixture ``page_opened`` and is marked ``browser``; it is skipped, with the reason, where chromium or
playwright is missing::

    from browser import IN_A_BROWSER, check_page, check_sorting

    pytestmark = IN_A_BROWSER

    def test_the_page(page_opened, tmp_path):
        path = write_report(...)
        opened = page_opened(path, width=420, scheme="dark")  # one page; see :class:`Opened`
        opened.page.click("th")  # playwright's own page
        opened.quiet()  # no console error, no request but for the file
        check_page(page_opened, path)  # all that every page must hold, wide and narrow, light and dark

``faults_of`` says what :func:`check_page` would: nothing that is cut off or leaves the window, text and lines with contrast
against what lies behind them, no light ground on a dark page.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "EVIL", "IN_A_BROWSER", "SCHEMES", "WIDTHS", "Opened", "check_markup", "check_page", "check_sorting", "chromium",
    "faults_of", "page_opened",
]  # fmt: skip

WIDTHS = (1280, 420)
SCHEMES = ("light", "dark")
IN_A_BROWSER = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
"""The marks of a test that opens pages: all of them in one worker, which starts one browser."""

EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
"""A name or a prompt that would run in the reader's browser."""

_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


@dataclasses.dataclass
class Opened:
    """A page that was opened.

    Attributes:
        page: Playwright's page.
        console: Errors and warnings of the console, and exceptions of scripts.
        asked: The address of everything that was asked for, but for the page's own file and data within it.
    """

    page: Any
    console: list[str]
    asked: list[str]

    def quiet(self) -> None:
        """No error in the console, and nothing asked for."""
        assert self.console == [], self.console
        assert self.asked == []


# Fixtures --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser; :func:`page_opened` opens pages in it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=_ARGUMENTS)
        loop = asyncio._get_running_loop()
        # Playwright's loop counts as running for as long as it is there, and then no other test of this process could run one.
        asyncio._set_running_loop(None)
        yield browser, loop
        asyncio._set_running_loop(loop)
        browser.close()


@pytest.fixture
def page_opened(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file: ``page_opened(path, width=1280, scheme="light")``; it is closed when the test ends."""
    browser, loop = chromium
    asyncio._set_running_loop(loop)
    contexts = []

    def opened(path: Path, width: int = 1280, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        found = Opened(context.new_page(), [], [])
        found.page.set_default_timeout(20_000)
        found.page.on("console", lambda m: found.console.append(m.text) if m.type in ("error", "warning") else None)
        found.page.on("pageerror", lambda error: found.console.append(str(error)))
        found.page.on("request", lambda r: found.asked.append(r.url) if _is_foreign(r.url, path) else None)
        found.page.goto(path.absolute().as_uri())
        return found

    try:
        yield opened
        for context in contexts:
            context.close()
    finally:
        asyncio._set_running_loop(None)


def _is_foreign(url: str, path: Path) -> bool:
    return not (url.startswith("data:") or url == path.absolute().as_uri())


# What every page must hold ---------------------------------------------------------------------------------------------


def check_page(
    page_opened: Callable[..., Opened],
    path: Path,
    widths: Sequence[int] = WIDTHS,
    schemes: Sequence[str] = SCHEMES,
    prepared: Callable[[Any], Any] = lambda page: None,
) -> None:
    """Opens a page at every width in every scheme, with all that is folded unfolded, and asserts what every page must hold.

    Args:
        page_opened: The fixture.
        path: The page.
        widths: Widths of the window in pixels.
        schemes: ``light``, ``dark``.
        prepared: Done to playwright's page before it is measured: a click, say.
    """
    for scheme in schemes:
        opened = page_opened(path, widths[0], scheme)
        prepared(opened.page)
        for width in widths:
            opened.page.set_viewport_size({"width": width, "height": 900})
            faults = faults_of(opened)
            assert not faults, "\n".join([f"{path.name}, {width} pixels, {scheme}:", *faults])
        opened.quiet()
        assert opened.page.title() != "owned", "markup in a text was run"


def faults_of(opened: Opened) -> list[str]:
    """What is cut off, leaves the window, cannot be read on its ground, or is light on a dark page; everything is unfolded."""
    return list(opened.page.evaluate(_FAULTS))


def check_markup(opened: Opened, *texts: str) -> None:
    """Markup that came with names and prompts is on the page as text, and nothing of it ran."""
    shown = opened.page.evaluate("() => document.documentElement.textContent")
    for text in texts or (EVIL,):
        assert text in shown
    assert opened.page.evaluate("() => document.querySelectorAll('img[src=x], [onerror]').length") == 0
    assert opened.page.title() != "owned"


def check_sorting(opened: Opened) -> None:
    """Every head of every table of two rows and more sorts its rows and turns them round again: by a click and by Enter."""
    found = opened.page.evaluate(_SORTED)
    assert found, "the page has no table that could be sorted"
    head = opened.page.locator("table.sortable th").first
    head.click()
    head.press("Enter")
    for before, up, down in found:
        assert (up["sorted"], down["sorted"]) == ("ascending", "descending")
        assert sorted(before["cells"]) == sorted(up["cells"]) == sorted(down["cells"])
        said = {cell for cell in up["cells"] if not _SILENT.fullmatch(cell)}
        assert len(said) < 2 or len(said) != len(up["cells"]) or up["cells"] != down["cells"], up
    assert head.get_attribute("aria-sort") in ("ascending", "descending")


_SILENT = re.compile("|–|none|nan|n/a|not given|not run")
"""What says that there is no number: it stays last."""
_SORTED = """() => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const found = [];
  for (const table of document.querySelectorAll("table.sortable"))
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const now = () => ({
        cells: [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim()),
        sorted: head.getAttribute("aria-sort"),
      });
      const before = now();
      head.click();
      const up = now();
      head.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
      found.push([before, up, now()]);
    });
  return found;
}"""

_FAULTS = (Path(__file__).parent / "faults.js").read_text(encoding="utf-8")
