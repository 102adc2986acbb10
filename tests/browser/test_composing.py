"""B48: the Enter that accepts an input method's candidate does not send."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_server import FakeServer
from tests.browser.test_chat import answers, ask

pytestmark = pytest.mark.browser

# Fires the named events at the message box, all in one tick unless a step is "tick".
FIRE = """async (steps) => {
  const box = document.getElementById("message");
  const key = { key: "Enter", code: "Enter", keyCode: 13, bubbles: true, cancelable: true };
  const enter = (more) => new KeyboardEvent("keydown", { ...key, ...more });
  for (const step of steps) {
    if (step === "tick") await new Promise((done) => setTimeout(done, 20));
    else if (step === "enter") box.dispatchEvent(enter({}));
    else if (step === "enter composing") box.dispatchEvent(enter({ isComposing: true, keyCode: 229 }));
    else if (step === "enter 229") box.dispatchEvent(enter({ keyCode: 229 }));
    else box.dispatchEvent(new CompositionEvent(step, { bubbles: true, data: "日本" }));
  }
}"""


def fire(page: Page, *steps: str) -> int:
    """Returns how many messages stand in the chat afterwards."""
    page.get_by_label("Message", exact=True).fill("日本")
    page.evaluate(FIRE, list(steps))
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.locator(".question").count()


def test_b48_enter_within_a_composition_accepts_and_the_next_sends(page: Page) -> None:
    assert fire(page, "compositionstart", "enter composing", "compositionend") == 0
    assert fire(page, "tick", "enter") == 1


def test_b48_only_the_last_enter_of_the_usual_order_sends(page: Page) -> None:
    assert fire(page, "compositionstart", "enter composing", "compositionend", "enter") == 1
    expect(answers(page)).to_have_count(1)


def test_b48_enter_right_after_the_end_of_a_composition_does_not_send(page: Page) -> None:
    assert fire(page, "compositionstart", "compositionend", "enter") == 0
    assert fire(page, "tick", "enter") == 1


def test_b48_enter_right_after_the_end_with_its_key_code(page: Page) -> None:
    assert fire(page, "compositionstart", "compositionend", "enter 229") == 0
    assert fire(page, "tick", "enter") == 1


def test_b48_enter_a_tick_after_the_end_sends(page: Page) -> None:
    assert fire(page, "compositionstart", "compositionend", "tick", "enter") == 1


def test_b48_key_code_229_alone_does_not_send(page: Page) -> None:
    assert fire(page, "enter 229") == 0


def test_b48_a_real_composition(page: Page, server: FakeServer) -> None:
    """Chromium's own input method events, not ours."""
    box = page.get_by_label("Message", exact=True)
    box.focus()
    cdp = page.context.new_cdp_session(page)
    cdp.send("Input.imeSetComposition", {"text": "にほん", "selectionStart": 3, "selectionEnd": 3})
    expect(box).to_have_value("にほん")
    cdp.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", "key": "Enter", "windowsVirtualKeyCode": 229})
    cdp.send("Input.insertText", {"text": "日本"})
    expect(box).to_have_value("日本")
    assert server.messages == []
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("You said: 日本")


def test_shift_enter_breaks_the_line(page: Page, server: FakeServer) -> None:
    page.get_by_label("Message", exact=True).fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("one\ntwo")
    expect(answers(page)).to_have_count(1)
    assert [message["input"] for message in server.sent("response.create")] == ["one\ntwo"]


def test_blank_text_is_not_sent(page: Page, server: FakeServer) -> None:
    ask(page, "  \n ")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    assert server.messages == []
