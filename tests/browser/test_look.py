"""The page on a phone and on a desk, light and dark, for the eye and for a reader."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_server import FakeServer
from tests.browser.test_chat import answers, ask, finish

pytestmark = pytest.mark.browser

ANSWER = """Here is **what happens** now:

1. Open the tracking link.
2. Send me `AF204918`.

| Delivery | Time | Price |
| --- | --- | ---: |
| Standard inside the country | 2 to 4 working days | 4.90 |

```python
def late(days: int) -> bool:
    return days > 5  # a line that is much too long for a narrow screen and must scroll within its own box
```

Averyveryveryveryveryveryveryveryveryveryveryveryveryveryveryveryverylongword."""

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(247, 246, 243)", "rgb(20, 22, 24)"


def overflow(page: Page) -> int:
    return page.evaluate(
        """() => {
          const widths = [document.documentElement, document.querySelector(".scroll")].map((node) => node.scrollWidth);
          return Math.max(...widths) - innerWidth;
        }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_is_cut_off(page: Page, server: FakeServer, tmp_path: Path, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    assert overflow(page) <= 0
    server.say(ANSWER)
    ask(page, "My parcel has not moved for a week, whatshouldIdowhatshouldIdowhatshouldIdowhatshouldIdo?")
    finish(page)
    assert overflow(page) <= 0
    assert page.evaluate(BACKGROUND) == {"light": LIGHT, "dark": DARK}[scheme]
    for name in ("Regenerate", "Copy answer", "Send"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= width, name
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png")


def test_the_list_of_chats_is_a_drawer_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    ask(page, "Hello")
    finish(page)
    expect(page.locator(".side")).not_to_be_visible()
    page.get_by_role("button", name="Show the list of chats").click()
    page.get_by_role("complementary").get_by_role("button", name="New chat").click()
    expect(page.get_by_text("Who should answer?")).to_be_visible()
    expect(page.locator(".side")).not_to_be_visible()


def test_the_theme_follows_the_system_until_another_is_chosen(page: Page) -> None:
    assert page.evaluate(BACKGROUND) == LIGHT
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(BACKGROUND) == DARK
    page.get_by_role("button", name="Use the light theme").click()
    assert page.evaluate(BACKGROUND) == LIGHT
    page.reload()
    assert page.evaluate(BACKGROUND) == LIGHT, "a choice outlives a reload"
    page.get_by_role("button", name="Use the dark theme").click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(BACKGROUND) == LIGHT, "choosing what the system says follows the system again"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Page, server: FakeServer) -> None:
    server.say("```\ncode\n```")
    ask(page, "Go")
    finish(page)
    seen = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(30):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => {
              const node = document.activeElement;
              const ring = (each) => getComputedStyle(each).outlineStyle !== "none";
              if (node === document.body) return ["the browser itself", true];
              const name = node.getAttribute("aria-label") || node.id || node.textContent.trim();
              return [name, ring(node) || node.id === "message"];
            }"""
        )
        assert outlined, f"{name} shows no ring"
        seen.append(name)
        if name == "message":
            break
    for name in ("New chat", "Copy code", "Copy answer", "Regenerate", "message"):
        assert name in seen


def test_every_control_has_a_name(page: Page) -> None:
    ask(page, "Go")
    finish(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea")]
          .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length))
          .map((node) => node.outerHTML)"""
    )
    assert nameless == []


def test_the_chat_is_a_polite_log(page: Page) -> None:
    ask(page, "Go")
    finish(page)
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_role("log", name="Chat")).to_have_attribute("aria-live", "polite")
