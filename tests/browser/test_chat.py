"""Chatting at the page: ask, stop, regenerate, start anew, come back. The server is scripted."""

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.fake_answer import Break, Hold
from tests.browser.fake_server import FakeServer

pytestmark = pytest.mark.browser


SAMPLING = {"temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.1, "max_output_tokens": 1024}


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator("article .prose")


def finish(page: Page, count: int = 1) -> None:
    """Waits until `count` answers stand there, ended."""
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(count)


def test_the_assistants_are_offered_and_the_first_is_chosen(page: Page) -> None:
    cards = page.get_by_role("group", name="Assistant")
    assert [text.split("\n")[0] for text in cards.locator("label").all_inner_texts()] == [
        "Support desk",
        "Writing coach",
        "Translator",
        "No assistant",
    ]
    expect(page.get_by_role("radio").first).to_be_checked()
    expect(page.get_by_role("heading", name="Support desk")).to_be_visible()


def test_a_first_message_names_the_assistant_and_the_next_its_parent(page: Page, server: FakeServer) -> None:
    page.get_by_text("Translator").click()
    server.say("Guten ", "Tag.")
    ask(page, "Into German: Good day.")
    expect(answers(page)).to_have_text("Guten Tag.")
    server.say("Gute Nacht.")
    ask(page, "And good night?")
    expect(answers(page).last).to_have_text("Gute Nacht.")

    first, second = server.sent("response.create")
    assert first == {
        **SAMPLING,
        "type": "response.create",
        "model": "demo-model",
        "input": "Into German: Good day.",
        "prompt": {"id": "translator"},
        "client_message_id": first["stream_id"],
        "stream_id": first["stream_id"],
    }
    assert second == {
        **SAMPLING,
        "type": "response.create",
        "model": "demo-model",
        "input": "And good night?",
        "previous_response_id": "resp_1",
        "client_message_id": second["stream_id"],
        "stream_id": second["stream_id"],
    }
    assert first["stream_id"] != second["stream_id"]


def test_the_model_alone_has_no_prompt(page: Page, server: FakeServer) -> None:
    page.get_by_text("No assistant").click()
    ask(page, "Hello")
    expect(answers(page)).to_have_text("You said: Hello")
    assert "prompt" not in server.sent("response.create")[0]


def test_text_arrives_while_it_is_written(page: Page, server: FakeServer) -> None:
    server.say("Two **bo", Hold(), "ld** words")
    ask(page, "Go")
    expect(answers(page)).to_have_text("Two **bo")
    expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "true")
    server.release()
    expect(answers(page).locator("strong")).to_have_text("bold")
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "false")


def test_measures_under_an_answer(page: Page, server: FakeServer) -> None:
    server.say("One ", Hold(), "two ", "three.")
    ask(page, "Count")
    expect(answers(page)).to_have_text("One")
    server.release()
    measures = page.locator(".measures")
    expect(measures).to_contain_text("812 of 840 prompt tokens shared")
    expect(measures).to_contain_text(re.compile(r"TTFT\s*(\d+ ms|\d+\.\d\d s)"))
    expect(measures).to_contain_text(re.compile(r"\d+\.\d tokens/s"))


def test_stop_ends_the_answer_and_keeps_its_text(page: Page, server: FakeServer) -> None:
    server.say("So far", Hold(), " and never this")
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")
    expect(answers(page)).to_have_text("So far")
    assert server.sent("response.cancel") == [{"type": "response.cancel", "response_id": "resp_1"}]

    ask(page, "Go on")
    expect(answers(page).last).to_have_text("You said: Go on")
    assert server.sent("response.create")[1]["previous_response_id"] == "resp_1", "a stopped answer can be gone on from"


def test_escape_stops_too(page: Page, server: FakeServer) -> None:
    server.say("So far", Hold())
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    page.keyboard.press("Escape")
    expect(page.locator(".remark")).to_have_text("Stopped")


def test_enter_while_an_answer_runs_keeps_the_text(page: Page, server: FakeServer) -> None:
    server.say("So far", Hold(), ".")
    ask(page, "Go")
    expect(answers(page)).to_have_text("So far")
    ask(page, "Next")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Next")
    server.release()
    finish(page)
    page.keyboard.press("Enter")
    finish(page, 2)
    assert [message["input"] for message in server.sent("response.create")] == ["Go", "Next"]


def test_regenerate_makes_a_second_child_of_the_same_parent(page: Page, server: FakeServer) -> None:
    ask(page, "One")
    finish(page)
    server.say("First try")
    ask(page, "Two")
    finish(page, 2)
    server.say("Second try")
    page.get_by_role("button", name="Regenerate").last.click()
    expect(answers(page).last).to_have_text("Second try")
    creates = server.sent("response.create")
    assert [create["input"] for create in creates] == ["One", "Two", "Two"]
    assert [create.get("previous_response_id") for create in creates] == [None, "resp_1", "resp_1"]

    variants = page.get_by_role("group", name="Answers to this question")
    expect(variants).to_contain_text("2/2")
    variants.get_by_role("button", name="Previous answer").click()
    expect(answers(page).last).to_have_text("First try")
    expect(variants).to_contain_text("1/2")
    ask(page, "Three")
    finish(page, 3)
    assert server.sent("response.create")[3]["previous_response_id"] == "resp_2", "the shown variant is the parent"


def test_reload_keeps_the_conversation(page: Page, server: FakeServer) -> None:
    server.say("**One** answer")
    ask(page, "One")
    finish(page)
    page.reload()
    expect(answers(page)).to_have_text("One answer")
    expect(page.locator(".question")).to_have_text("One")
    expect(page.locator(".measures")).to_contain_text("812 of 840 prompt tokens shared")
    ask(page, "Two")
    finish(page, 2)
    assert server.sent("response.create")[1]["previous_response_id"] == "resp_1"


def test_the_bare_address_shows_what_the_tab_showed_last(page: Page, server: FakeServer) -> None:
    ask(page, "One")
    finish(page)
    page.goto(server.url)
    expect(answers(page)).to_have_text("You said: One")


def test_b37_reload_in_mid_answer_goes_on_and_can_stop(page: Page, server: FakeServer) -> None:
    server.say("a", "b", "c", "d", "e", Hold(), "f", Hold(), "never")
    ask(page, "Go")
    expect(answers(page)).to_have_text("abcde")
    page.reload()
    expect(answers(page)).to_have_text("abcde")
    server.release()
    expect(answers(page)).to_have_text("abcdef")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".remark")).to_have_text("Stopped")
    assert len(server.sent("response.create")) == 1
    assert server.sent("response.resume")[0]["response_id"] == "resp_1"


def test_new_chat_and_back(page: Page, server: FakeServer) -> None:
    ask(page, "First chat")
    finish(page)
    page.get_by_role("button", name="New chat").first.click()
    expect(page.get_by_text("Who should answer?")).to_be_visible()
    expect(answers(page)).to_have_count(0)
    page.get_by_text("Writing coach").click()
    ask(page, "Second chat")
    finish(page)
    assert "previous_response_id" not in server.sent("response.create")[1]
    recents = page.get_by_role("navigation", name="Recent chats")
    assert recents.locator(".recent-title").all_inner_texts() == ["Second chat", "First chat"]
    recents.get_by_text("First chat").click()
    expect(answers(page)).to_have_text("You said: First chat")
    page.go_back()
    expect(answers(page)).to_have_text("You said: Second chat")


def test_an_answer_goes_on_while_another_chat_is_shown(page: Page, server: FakeServer) -> None:
    server.say("Slow", Hold(), " and done")
    ask(page, "Slow one")
    expect(answers(page)).to_have_text("Slow")
    page.get_by_role("button", name="New chat").first.click()
    ask(page, "Quick one")
    expect(answers(page)).to_have_text("You said: Quick one")
    server.release()
    page.get_by_role("navigation", name="Recent chats").get_by_text("Slow one").click()
    expect(answers(page)).to_have_text("Slow and done")


def test_a_deleted_chat_is_gone(page: Page) -> None:
    ask(page, "Forget me")
    finish(page)
    page.get_by_role("button", name="Delete the chat Forget me").click()
    expect(page.get_by_text("Who should answer?")).to_be_visible()
    page.reload()
    expect(page.get_by_role("radio").first).to_be_attached()
    expect(page.get_by_text("Forget me")).to_have_count(0)


def test_a_refused_message_says_why_and_can_be_tried_again(page: Page, server: FakeServer) -> None:
    server.refuse("context_length_exceeded", "the limit is 2048 tokens, got 2050")
    ask(page, "Go")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("longer than the model can read")
    expect(problem).to_contain_text("the limit is 2048 tokens, got 2050")
    server.say("Now it fits")
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text("Now it fits")
    expect(page.locator(".question")).to_have_count(1)


def test_a_failed_answer_keeps_its_text_and_is_no_parent(page: Page, server: FakeServer) -> None:
    server.say("Half", Break("server_error", "the engine is gone"))
    ask(page, "One")
    expect(page.get_by_role("alert")).to_contain_text("the engine is gone")
    expect(answers(page)).to_have_text("Half")
    ask(page, "Two")
    expect(answers(page).last).to_have_text("You said: Two")
    assert "previous_response_id" not in server.sent("response.create")[1]


def test_a_message_too_long_for_a_frame_is_not_sent(page: Page, server: FakeServer) -> None:
    ask(page, "x" * 300_000)
    expect(page.get_by_role("alert")).to_contain_text("too long")
    assert server.messages == []


def test_two_tabs_show_the_same_chat(page: Page, server: FakeServer) -> None:
    server.say("Half", Hold(), " and whole")
    ask(page, "Go")
    expect(answers(page)).to_have_text("Half")
    other = page.context.new_page()
    other.goto(page.url)
    expect(answers(other)).to_have_text("Half")
    server.release()
    expect(answers(page)).to_have_text("Half and whole")
    expect(answers(other)).to_have_text("Half and whole")
    ask(page, "More")
    expect(answers(other)).to_have_count(2)
    expect(answers(other).last).to_have_text("You said: More")
    assert len(server.sent("response.create")) == 2


def test_code_can_be_copied(page: Page, server: FakeServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    server.say("```python\nprint('<b>')\n```")
    ask(page, "Code")
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print('<b>')\n"


def test_500_deltas_are_drawn_at_most_once_a_frame(page: Page, server: FakeServer) -> None:
    page.evaluate(
        """() => {
          window.frames_ = 0;
          window.draws = 0;
          const count = () => { window.frames_++; requestAnimationFrame(count); };
          count();
          const all = { subtree: true, childList: true, characterData: true };
          new MutationObserver(() => window.draws++).observe(document.body, all);
        }"""
    )
    words = [f"word{i} " for i in range(500)]
    server.say(*words)
    ask(page, "Go")
    finish(page)
    expect(answers(page)).to_have_text("".join(words).strip())
    frames, draws = page.evaluate("[window.frames_, window.draws]")
    # Both the page and the paced body may draw in one frame; far from 500.
    assert draws <= 2 * frames + 10


def test_what_is_kept_in_the_browser_is_bounded(page: Page, server: FakeServer) -> None:
    for i in range(45):
        chat = {"id": f"c{i}", "model": "demo-model", "title": f"chat {i}", "updatedAt": i, "turns": {}, "chosen": {}}
        page.evaluate(
            "([id, text]) => localStorage.setItem(`trunkline.chat.${id}`, text)", [chat["id"], json.dumps(chat)]
        )
    page.reload()
    ask(page, "One more")
    finish(page)
    kept = page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('trunkline.chat.')).length")
    assert kept == 40
