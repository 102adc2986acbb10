"""B49: the view follows the newest words until the person scrolls up, and is then left alone."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import GUARD_MS, Watch
from tests.browser.fake_answer import Hold
from tests.browser.fake_server import FakeServer
from tests.browser.test_chat import ask, finish

pytestmark = pytest.mark.browser

TOKENS = [f"line {i}\n\n" for i in range(500)]


def top(page: Page) -> float:
    return page.locator(".scroll").evaluate("(view) => view.scrollTop")


def distance(page: Page) -> float:
    return page.locator(".scroll").evaluate("(view) => view.scrollHeight - view.scrollTop - view.clientHeight")


def settled_top(page: Page) -> float:
    """scrollTop once the view has come to rest (a wheel glides)."""
    return page.locator(".scroll").evaluate(
        """async (view) => {
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          for (let last = NaN, still = 0; still < 10; last = view.scrollTop) {
            await frame();
            still = view.scrollTop === last ? still + 1 : 0;
          }
          return view.scrollTop;
        }"""
    )


def start(page: Page, server: FakeServer) -> None:
    """An answer of 500 tokens that stands still at the hundredth."""
    server.say(*TOKENS[:100], Hold(), *TOKENS[100:300], Hold(), *TOKENS[300:])
    ask(page, "Go")
    expect(page.get_by_text("line 99", exact=True)).to_be_visible()


def test_b49_the_end_is_followed(page: Page, server: FakeServer) -> None:
    start(page, server)
    assert distance(page) <= 1
    server.release()
    server.release()
    finish(page)
    assert distance(page) <= 1
    expect(page.get_by_role("button", name="Jump to latest")).to_have_count(0)


def test_b49_scrolling_up_by_the_wheel_is_not_fought(page: Page, server: FakeServer) -> None:
    start(page, server)
    before = top(page)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -200)
    stood = settled_top(page)
    assert abs(before - 200 - stood) <= 2
    server.release()
    expect(page.get_by_text("line 299", exact=True)).to_be_attached()
    assert abs(top(page) - stood) <= 2
    server.release()
    finish(page)
    assert abs(settled_top(page) - stood) <= 2, "no jump at the end"


def test_b49_scrolling_up_while_tokens_arrive(page: Page, server: FakeServer) -> None:
    start(page, server)
    server.release()
    page.mouse.move(700, 400)
    for _ in range(4):
        page.mouse.wheel(0, -60)
    stood = settled_top(page)
    server.release()
    finish(page)
    assert abs(settled_top(page) - stood) <= 2
    assert distance(page) > 1000


def test_b49_scrolling_up_by_keys_is_not_fought(page: Page, server: FakeServer) -> None:
    start(page, server)
    page.locator(".scroll").evaluate("(view) => { view.tabIndex = -1; view.focus(); }")
    page.keyboard.press("PageUp")
    stood = settled_top(page)
    server.release()
    server.release()
    finish(page)
    assert abs(settled_top(page) - stood) <= 2


def test_b49_back_at_the_end_it_is_followed_again(page: Page, server: FakeServer) -> None:
    start(page, server)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -200)
    settled_top(page)
    page.mouse.wheel(0, 300)
    settled_top(page)
    expect(page.get_by_role("button", name="Jump to latest")).to_have_count(0)
    server.release()
    server.release()
    finish(page)
    assert distance(page) <= 1


def test_b49_the_button_goes_back_to_the_end(page: Page, server: FakeServer) -> None:
    start(page, server)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -200)
    settled_top(page)
    page.get_by_role("button", name="Jump to latest").click()
    assert distance(page) <= 1
    server.release()
    server.release()
    finish(page)
    assert distance(page) <= 1


def test_a_new_question_is_shown_though_the_view_was_scrolled_up(page: Page, server: FakeServer) -> None:
    start(page, server)
    server.release()
    server.release()
    finish(page)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -500)
    settled_top(page)
    ask(page, "Next")
    finish(page, 2)
    assert distance(page) <= 1


@pytest.fixture
def touch_page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    context.set_default_timeout(GUARD_MS)
    page = context.new_page()
    watch = Watch(server.url)
    watch.over(page)
    page.goto(server.url)
    page.get_by_role("radio").first.wait_for(state="attached")
    yield page
    context.close()
    watch.assert_clean()


def test_b49_scrolling_up_by_touch_is_not_fought(touch_page: Page, server: FakeServer) -> None:
    page = touch_page
    start(page, server)
    cdp = page.context.new_cdp_session(page)
    finger = {"x": 195, "y": 300}
    cdp.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [finger]})
    for y in range(310, 521, 10):
        cdp.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{**finger, "y": y}]})
    cdp.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    stood = settled_top(page)
    assert distance(page) > 100
    server.release()
    server.release()
    finish(page)
    assert abs(settled_top(page) - stood) <= 2
