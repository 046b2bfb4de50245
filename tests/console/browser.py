"""A page of the console in headless Chromium, which fails a test if the page reports an error."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
PATIENCE_MS = 60_000
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
SHOTS = os.environ.get("QUIRE_CONSOLE_SHOTS", "")
"""Folder for the screenshots; empty: none are kept."""


@contextlib.contextmanager
def opened(address: str, *, expected: str = "", width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A page that shows an address, HOST:PORT.

    At the end, asserts that the browser has reported no error, apart from messages that contain `expected`.
    """
    errors: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        text = f"{message.text} ({message.location['url']})"
        if message.type in ("error", "warning") and not (expected and expected in text):
            errors.append(text)

    # A killed browser leaves its temporary files behind.
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--no-proxy-server"],
            env={**os.environ, "TMPDIR": folder},
        )
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(PATIENCE_MS)
            page.on("console", heard)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"http://{address}/")
            yield page
        finally:
            browser.close()
    assert not errors, f"the browser reports {errors}"


def until(page: Page, condition: str) -> None:
    """Waits until an expression holds in the page. Playwright's own function evaluates text, which the page forbids."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not after {PATIENCE_MS} ms: {condition}"
        page.wait_for_timeout(20)


def shoot(page: Page, name: str) -> bytes:
    """Take a screenshot of the whole page; keep it if QUIRE_CONSOLE_SHOTS names a folder."""
    page.evaluate("scrollTo(0, 0)")
    image: bytes = page.screenshot(full_page=True)
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        (Path(SHOTS) / f"{name}.png").write_bytes(image)
    return image
