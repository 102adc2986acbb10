"""The page against the real gateway: the same steps as with the fake one, so that the two cannot drift apart."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Tab, load_anew, open_tab
from tests.browser.real_gateway import RealGateway
from tests.browser.test_chat import answers, ask, finish
from tests.scripted_engine import Pause

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def running_gateway(browser: Browser) -> Iterator[RealGateway]:
    gateway = RealGateway()
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture
def gateway(running_gateway: RealGateway) -> RealGateway:
    return running_gateway


@pytest.fixture(scope="module")
def gateway_tab(browser: Browser, running_gateway: RealGateway) -> Iterator[Tab]:
    page, watch = open_tab(browser, running_gateway.url)
    yield page, watch
    page.context.close()


@pytest.fixture
def page(gateway_tab: Tab) -> Iterator[Page]:
    page, watch = gateway_tab
    load_anew(page, watch)
    yield page
    watch.assert_clean()


def test_chat_in_two_turns(page: Page, gateway: RealGateway) -> None:
    page.get_by_text("Translator").click()
    gateway.say(b"Guten ", Pause(), b"**Tag**", b".")
    ask(page, "Into German: Good day.")
    expect(answers(page)).to_have_text("Guten")
    gateway.release()
    expect(answers(page)).to_have_text("Guten Tag.")
    finish(page)
    expect(page.locator(".measures")).to_contain_text(
        re.compile(r"TTFT\s*\d.*tokens/s.*5000 of 5\d\d\d prompt tokens shared")
    )
    assert "You are a careful translator." in gateway.prompt()

    gateway.say(b"Gute Nacht.")
    ask(page, "And good night?")
    finish(page, 2)
    expect(answers(page).last).to_have_text("Gute Nacht.")
    assert "You are a careful translator." in gateway.prompt(), "the assistant comes along with the parent"
    assert "Guten **Tag**." in gateway.prompt()


def test_stop_then_regenerate(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"So far", Pause(), b" never")
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")
    gateway.say(b"Again")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text("Again")
    expect(page.get_by_role("group", name="Answers to this question")).to_contain_text("2/2")


def test_going_on_from_a_stopped_answer(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"So far", Pause(), b" never")
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")
    gateway.say(b"And on")
    ask(page, "Go on")
    finish(page, 2)
    expect(answers(page).last).to_have_text("And on")
    assert "So far" in gateway.prompt()


def test_b37_reload_in_mid_answer(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"a", b"b", Pause(), b"c", Pause(), b"never")
    ask(page, "Go")
    expect(answers(page)).to_have_text("ab")
    page.reload()
    expect(answers(page)).to_have_text("ab")
    gateway.release()
    expect(answers(page)).to_have_text("abc")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")


def test_reload_after_the_end_and_new_chat(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"Done")
    ask(page, "Go")
    finish(page)
    page.reload()
    expect(answers(page)).to_have_text("Done")
    page.get_by_role("button", name="New chat").first.click()
    ask(page, "Other")
    finish(page)
    assert gateway.prompt().count("Done") == 0, "a new chat knows nothing of the old one"


def test_the_answer_goes_on_when_the_engine_died(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"So far", Pause())
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    gateway.kill_engine()
    expect(answers(page)).to_have_text("So far")
    gateway.say(b"So far", b" and on")
    gateway.revive_engine()
    expect(answers(page)).to_have_text("So far and on")
    expect(page.get_by_role("alert")).not_to_be_visible()


def test_a_prompt_that_is_too_long_is_refused_in_words(page: Page, gateway: RealGateway) -> None:
    gateway.say(b"never")
    ask(page, "x" * 40_000)
    expect(page.get_by_role("alert")).to_contain_text("longer than the model can read")
