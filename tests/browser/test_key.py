"""The page on a server with tenants: it asks for a key once, and each socket gets a new ticket."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from app.config import FileConfig
from tests.browser.conftest import Tab, open_tab
from tests.browser.real_gateway import RealGateway
from tests.browser.test_chat import answers, ask, finish
from tests.scripted_engine import Pause

pytestmark = pytest.mark.browser
KEY = "the-key-of-acme"
SETTINGS = {"assistants": [{"id": "support", "shared": True, "instructions": "Be brief."}]}
CONFIG = FileConfig.model_validate({"tenants": [{"id": "acme", "key": KEY}], **SETTINGS})
ANOTHER_KEY = FileConfig.model_validate({"tenants": [{"id": "acme", "key": "another-key"}], **SETTINGS})


@pytest.fixture(scope="module")
def running_gateway(browser: Browser) -> Iterator[RealGateway]:
    gateway = RealGateway(CONFIG)
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture
def gateway(running_gateway: RealGateway) -> RealGateway:
    running_gateway.put_in_force(CONFIG)
    return running_gateway


@pytest.fixture(scope="module")
def key_tab(browser: Browser, running_gateway: RealGateway) -> Iterator[Tab]:
    page, watch = open_tab(browser, running_gateway.url)
    yield page, watch
    page.context.close()


@pytest.fixture
def page(key_tab: Tab, gateway: RealGateway) -> Iterator[Page]:
    page, watch = key_tab
    page.goto(f"{watch.origin}/static/icon.svg")
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    watch.forget()
    page.goto(watch.origin)
    page.get_by_label("API key").wait_for()
    yield page
    watch.assert_clean()


def log_in(page: Page, key: str = KEY) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Go on").click()


def test_chat_with_a_key(page: Page, gateway: RealGateway) -> None:
    expect(page.get_by_label("Message")).to_have_count(0)
    log_in(page)
    gateway.say(b"Hello.")
    ask(page, "Hi")
    finish(page)
    expect(answers(page)).to_have_text("Hello.")
    assert gateway.engine is not None
    assert gateway.engine.requests[-1].tenant == "acme"


@pytest.mark.parametrize("wrong", ["not-the-key", "no key"])
def test_a_wrong_key_is_asked_for_again(page: Page, gateway: RealGateway, wrong: str) -> None:
    log_in(page, wrong)
    expect(page.get_by_role("alert")).to_contain_text("does not take this key")
    log_in(page)
    gateway.say(b"Hello.")
    ask(page, "Hi")
    expect(answers(page)).to_have_text("Hello.")


def test_after_a_reload_the_answer_goes_on_with_a_new_ticket(page: Page, gateway: RealGateway) -> None:
    log_in(page)
    gateway.say(b"a", Pause(), b"b")
    ask(page, "Go")
    expect(answers(page)).to_have_text("a")
    page.reload()
    expect(answers(page)).to_have_text("a")
    gateway.release()
    expect(answers(page)).to_have_text("ab")
    finish(page)


def test_a_revoked_key_is_asked_for_again(page: Page, gateway: RealGateway) -> None:
    log_in(page)
    gateway.say(b"Hello.")
    ask(page, "Hi")
    finish(page)
    gateway.put_in_force(ANOTHER_KEY)
    ask(page, "More")  # refused, and the socket is closed
    expect(page.get_by_label("API key")).to_be_visible()
    log_in(page, "another-key")
    expect(answers(page).first).to_have_text("Hello.")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page).last).to_have_text("Hello.")


def test_a_limit_is_told_in_words(page: Page, gateway: RealGateway) -> None:
    limited = {"tenants": [{"id": "acme", "key": KEY, "requests_per_minute": 1}], **SETTINGS}
    gateway.put_in_force(FileConfig.model_validate(limited))
    log_in(page)
    gateway.say(b"Hello.")
    ask(page, "Hi")
    finish(page)
    ask(page, "More")
    expect(page.get_by_role("alert")).to_contain_text("Too many messages for now")
