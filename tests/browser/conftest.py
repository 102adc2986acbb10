"""A browser for the session, a fresh profile and a fresh fake server for each test."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from tests import needs
from tests.browser.fake_server import FakeServer

CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
GUARD_MS = 30_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = needs.chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@dataclass
class Watch:
    """What no page may do: ask another origin, open a dialog, break its own policy, throw."""

    origin: str = ""
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def assert_clean(self) -> None:
        assert (self.foreign, self.dialogs, self.errors) == ([], [], [])

    def over(self, page: Page) -> None:
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_console)
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.foreign.append(request.url)

    def _on_console(self, message: ConsoleMessage) -> None:
        # A socket or a fetch that a test breaks on purpose is logged by the browser, not by the page.
        if message.type == "error" and "WebSocket connection" not in message.text and "Failed to load" not in message.text:
            self.errors.append(message.text)


@pytest.fixture
def watch(server: FakeServer) -> Watch:
    return Watch(origin=server.url)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(GUARD_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, server: FakeServer, watch: Watch) -> Iterator[Page]:
    """The chat page, loaded, its assistants shown. Afterwards it must have behaved."""
    page = context.new_page()
    watch.over(page)
    page.goto(server.url)
    page.get_by_role("radio").first.wait_for(state="attached")
    yield page
    watch.assert_clean()
