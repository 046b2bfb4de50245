"""How the page looks and how fast it is, with made-up steps of a thousand rows: nothing overflows, nothing fails."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from tests.console.big_batch import NUM_BLOCKS, TRACES, big_batch
from tests.console.browser import needs_chromium, opened, shoot, until

pytestmark = [needs_chromium, pytest.mark.release]
PHONE = (390, 844)
BUSY = "status of 503"
"""On a busy machine these tests' core responds late. The page then retries, and is filled."""
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
PIXELS = """canvas => {
  const {width, height} = canvas
  const found = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer)
  return new Set(found).size
}"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A front end with a batch of a thousand rows."""
    with big_batch(1000) as found:
        yield found


def _filled(page: Page) -> None:
    """Waits until the batch is full and all parts of the page have something to show."""
    until(page, "quire.gantt.steps?.count > 200 && quire.model.loads.length > 3 && quire.model.tables !== null")
    until(page, f"quire.blocks.maps.get('worker-0')?.device.cells.length === {NUM_BLOCKS}")


def test_a_thousand_rows_are_drawn_in_light_and_dark(address: str) -> None:
    """The chart and the map have the colours of all states; the colours follow the theme."""
    with opened(address, expected=BUSY) as page:
        _filled(page)
        page.emulate_media(color_scheme="light")
        light = shoot(page, "thousand-light")
        assert page.locator("#gantt").evaluate(PIXELS) >= 8
        assert page.locator("#blocks canvas").first.evaluate(PIXELS) >= 20
        ground = "getComputedStyle(document.body).backgroundColor"
        bright = page.evaluate(ground)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(700)
        assert page.evaluate(ground) != bright
        assert shoot(page, "thousand-dark") != light
        page.click("#theme")
        assert page.evaluate(ground) == bright, "the button chooses the light theme"


def test_the_page_fits_a_phone(address: str) -> None:
    """At the width of a phone nothing is wider than the screen, and every control can be reached by keyboard."""
    with opened(address, expected=BUSY, width=PHONE[0], height=PHONE[1]) as page:
        _filled(page)
        shoot(page, "thousand-phone")
        assert not page.evaluate(OVERFLOW)
        drain = page.locator("#workers button").bounding_box()
        table = page.locator(".scroll", has=page.locator("#workers")).bounding_box()
        assert drain
        assert table
        assert drain["x"] + drain["width"] <= table["x"] + table["width"], "the button is cut off"
        reached = set()
        for _ in range(130):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        controls = {"pause", "theme", "worker", "zoom", "gantt", "minutes", "strategy-rows", "prompt", "copies"}
        assert controls <= reached
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, select, textarea')].filter(each =>"
            " !(each.labels?.length || each.textContent.trim() || each.ariaLabel)).map(each => each.id)"
        )
        assert unnamed == []


def test_a_block_that_is_clicked_opens_its_owner(address: str) -> None:
    """The owner of a block is named under the map, and a click shows its request.

    The owner of another block may have ended since the page received the block tables.
    """
    with opened(address, expected="/console/api/explain") as page:
        _filled(page)
        page.click("#pause")
        place = page.evaluate(
            """() => {
              const grid = quire.blocks.maps.get('worker-0').device
              const owner = state => grid.owners[(state - 3) >> 1]
              const at = grid.cells.findIndex(state => state >= 3 && quire.model.requests.has(owner(state)))
              return [(at % grid.columns + .5) * grid.side, (Math.floor(at / grid.columns) + .5) * grid.side,
                      quire.model.name(owner(grid.cells[at]))]
            }"""
        )
        page.locator("#blocks canvas").first.click(position={"x": place[0], "y": place[1]})
        assert place[2] in page.inner_text("#block-hover")
        assert place[2] in page.inner_text("#details-title")
        number = int(place[2].removeprefix("request-"))
        assert page.get_attribute("#trace a", "href") == f"{TRACES}{number:032x}"
