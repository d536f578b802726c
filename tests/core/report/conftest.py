"""The browser of the tests of pages."""

from browser import chromium, page_opened

__all__ = ["chromium", "page_opened"]
