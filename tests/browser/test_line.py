"""When the line breaks: answers go on from their last number, nothing is asked twice, and what is lost is said."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_answer import Hold
from tests.browser.fake_server import FakeServer
from tests.browser.test_chat import answers, ask, finish

pytestmark = pytest.mark.browser


def test_a_dropped_socket_in_mid_answer_resumes(page: Page, server: FakeServer) -> None:
    server.say("a", "b", "c", Hold(), "d", "e")
    ask(page, "Go")
    expect(answers(page)).to_have_text("abc")
    server.drop_sockets()
    server.release()
    expect(answers(page)).to_have_text("abcde")
    finish(page)
    assert len(server.sent("response.create")) == 1
    stream_id = server.sent("response.create")[0]["stream_id"]
    # created, in progress, a, b, c
    assert server.sent("response.resume")[-1] == {
        "type": "response.resume",
        "response_id": "resp_1",
        "starting_after": 4,
        "stream_id": stream_id,
    }


@pytest.mark.parametrize("reason", ["lifetime", "shutting_down"])
def test_a_server_that_asks_for_a_new_connection_gets_it_and_answers_go_on(
    page: Page, server: FakeServer, reason: str
) -> None:
    server.say("a", "b", Hold(), "c")
    ask(page, "Go")
    expect(answers(page)).to_have_text("ab")
    server.ask_to_reconnect(reason)
    while not server.sent("response.resume"):
        page.wait_for_timeout(10)
    server.release()
    expect(answers(page)).to_have_text("abc")
    finish(page)
    assert (len(server.sent("response.create")), server.sent("response.resume")[-1]["starting_after"]) == (1, 3)
    expect(page.get_by_role("alert")).to_have_count(0)
    server.ask_to_reconnect(reason, after_ms=300)
    ask(page, "More")  # nobody takes it on the old one
    finish(page)
    expect(answers(page)).to_have_text(["abc", "You said: More"])
    assert len(server.sent("response.create")) == 2
    assert server.num_sockets == 1, "the old socket is still open"


def test_a_break_hides_the_speed_but_not_the_first_token(page: Page, server: FakeServer) -> None:
    server.say("a", Hold(), "b", "c")
    ask(page, "Go")
    expect(answers(page)).to_have_text("a")
    server.drop_sockets()
    server.release()
    finish(page)
    expect(page.locator(".measures")).to_contain_text("TTFT")
    expect(page.locator(".measures")).to_contain_text("812 of 840 prompt tokens shared")
    expect(page.locator(".measures")).not_to_contain_text("tokens/s")


def test_a_server_without_resume_is_asked_for_the_stored_answer(page: Page, server: FakeServer) -> None:
    server.resumes = False
    server.say("a", "b", Hold(), "c")
    ask(page, "Go")
    expect(answers(page)).to_have_text("ab")
    server.drop_sockets()
    server.release()
    expect(answers(page)).to_have_text("abc")
    finish(page)


def test_an_answer_that_the_server_forgot_keeps_its_text(page: Page, server: FakeServer) -> None:
    server.say("a", "b", Hold())
    ask(page, "Go")
    expect(answers(page)).to_have_text("ab")
    server.answers.clear()
    server.drop_sockets()
    expect(page.get_by_role("alert")).to_contain_text("no longer holds this answer")
    expect(answers(page)).to_have_text("ab")


def test_a_message_that_was_never_confirmed_is_not_sent_twice(page: Page, server: FakeServer) -> None:
    server.confirms = False
    ask(page, "Go")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    while not server.sent("response.create"):
        page.wait_for_timeout(10)
    server.drop_sockets()
    expect(page.get_by_role("alert")).to_contain_text("before the server confirmed")
    server.confirms = True
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text("You said: Go")
    first, second = server.sent("response.create")
    assert first == second, "the same message id, so that a server can tell that it is the same message"


def test_a_message_written_while_the_line_is_down_is_sent_when_it_is_up(page: Page, server: FakeServer) -> None:
    server.open = False
    server.drop_sockets()
    expect(page.get_by_text("Reconnecting…")).to_be_visible()
    ask(page, "Go")
    expect(page.locator(".question")).to_have_text("Go")
    assert server.messages == []
    server.open = True
    finish(page)
    assert len(server.sent("response.create")) == 1


def test_stop_before_it_was_sent_sends_nothing(page: Page, server: FakeServer) -> None:
    server.open = False
    server.drop_sockets()
    expect(page.get_by_text("Reconnecting…")).to_be_visible()
    ask(page, "Go")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")
    server.open = True
    expect(page.get_by_text("Reconnecting…")).to_have_count(0)
    assert server.messages == []


def test_stop_while_the_line_is_down_goes_over_http(page: Page, server: FakeServer) -> None:
    server.say("a", Hold(), "never")
    ask(page, "Go")
    expect(answers(page)).to_have_text("a")
    server.open = False
    server.drop_sockets()
    expect(page.get_by_text("Reconnecting…")).to_be_visible()
    with page.expect_response(lambda reply: reply.url.endswith("/v1/responses/resp_1/cancel")):
        page.get_by_role("button", name="Stop").click()
    server.open = True
    expect(page.locator(".remark")).to_have_text("Stopped")
    expect(answers(page)).to_have_text("a")


def test_b50_a_hidden_tab_asks_nothing_again(page: Page, server: FakeServer) -> None:
    server.say("a", Hold(), "b")
    ask(page, "Go")
    expect(answers(page)).to_have_text("a")
    for state in ("hidden", "visible"):
        page.evaluate(
            """(state) => {
              Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
              document.dispatchEvent(new Event("visibilitychange"));
            }""",
            state,
        )
    server.drop_sockets()
    server.release()
    expect(answers(page)).to_have_text("ab")
    finish(page)
    assert len(server.sent("response.create")) == 1


def test_no_models_says_so_and_asks_again(page: Page, server: FakeServer) -> None:
    page.route(
        "**/v1/models", lambda route: route.fulfill(status=503, json={"error": {"message": "the engine is loading"}})
    )
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("the engine is loading")
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("radio")).to_have_count(4)
