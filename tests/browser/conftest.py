"""One browser, one tab and one fake server for all tests; each test finds them as new.

A new tab a test costs a second, most of it for files that do not change; a reset costs a quarter of that. They are
gone after the last test of this folder: while Playwright's synchronous interface is open, the thread counts as one
that runs an event loop, and no asynchronous test could start.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, expect, sync_playwright

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
DESK = {"width": 1280, "height": 800}


@dataclass
class Watch:
    """What no page may do: ask another origin, open a dialog, break its own policy, throw."""

    origin: str
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def over(self, page: Page) -> None:
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._on_console)
        page.on("dialog", self._on_dialog)

    def assert_clean(self) -> None:
        assert (self.foreign, self.dialogs, self.errors) == ([], [], [])

    def forget(self) -> None:
        for kept in (self.foreign, self.dialogs, self.errors):
            kept.clear()

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.foreign.append(request.url)

    def _on_console(self, message: ConsoleMessage) -> None:
        # A socket or a fetch that a test breaks on purpose is logged by the browser, not by the page.
        on_purpose = any(words in message.text for words in ("WebSocket connection", "Failed to load"))
        if message.type == "error" and not on_purpose:
            self.errors.append(message.text)

    def _on_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = needs.chromium()
    expect.set_options(timeout=GUARD_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path), args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def running_server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    running_server.reset()
    return running_server


Tab = tuple[Page, Watch]


def open_tab(browser: Browser, url: str) -> Tab:
    """A tab with a profile of its own. Its context is to be closed."""
    context = browser.new_context(viewport=DESK, color_scheme="light")
    context.set_default_timeout(GUARD_MS)
    page = context.new_page()
    watch = Watch(url)
    watch.over(page)
    return page, watch


def load_anew(page: Page, watch: Watch) -> None:
    """The page of `watch.origin` as somebody sees it who comes for the first time."""
    page.set_viewport_size(DESK)
    page.emulate_media(color_scheme="light")
    # The page that goes writes what it has: it must be gone before the storage is emptied.
    page.goto(f"{watch.origin}/static/icon.svg")
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    watch.forget()
    page.goto(watch.origin)
    page.get_by_role("radio").first.wait_for(state="attached")


@pytest.fixture(scope="package")
def tab(browser: Browser, running_server: FakeServer) -> Iterator[Tab]:
    page, watch = open_tab(browser, running_server.url)
    yield page, watch
    page.context.close()


@pytest.fixture
def watch(tab: Tab) -> Watch:
    return tab[1]


@pytest.fixture
def page(tab: Tab, server: FakeServer) -> Iterator[Page]:
    """The chat page, newly loaded, its assistants shown. Afterwards it must have behaved."""
    page, watch = tab
    load_anew(page, watch)
    yield page
    page.unroute_all()
    page.context.clear_permissions()
    for other in page.context.pages:
        if other is not page:
            other.close()
    watch.assert_clean()
