"""B47: what a model or a person writes is shown, never run, and asks no other origin."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Watch
from tests.browser.fake_server import FakeServer
from tests.browser.test_chat import answers, ask, finish

pytestmark = pytest.mark.browser

EVIL = "https://evil.example"

PAYLOADS = {
    "img onerror": ["<img src=x onerror=window.ran=1>"],
    "svg onload": ["<svg onload=window.ran=1><animate onbegin=window.ran=1 attributeName=x dur=1s></svg>"],
    "iframe srcdoc": ["<iframe srcdoc='<script>parent.ran=1</script>'></iframe>"],
    "script": ["<script>window.ran=1</script>"],
    "script of another origin": [f"<script src={EVIL}/x.js></script>"],
    "split tag": ["<im", "g src=x on", "error=window", ".ran=1", ">"],
    "split script": ["<scr", "ipt>window.r", "an=1</scr", "ipt>"],
    "javascript link": ["[click](javascript:window.ran=1)"],
    "javascript link, spelt oddly": [
        "[click](JaVaScRiPt&#58;window.ran=1) [two](java&#10;script:window.ran=1) <javascript:window.ran=1>"
    ],
    "data link": ["[click](data:text/html,<script>opener.ran=1</script>)"],
    "vbscript link": ["[click](vbscript:msgbox(1))"],
    "file link": ["[click](file:///etc/passwd)"],
    "reference link": ["[click][1]\n\n[1]: javascript:window.ran=1"],
    "remote image": [f"![who reads this]({EVIL}/pixel.png)"],
    "data image": ["![x](data:image/svg+xml,<svg onload=window.ran=1>)"],
    "style": [f"<style>@import '{EVIL}/x.css'; body {{ background: url({EVIL}/y.png) }}</style>"],
    "style attribute": [f"<p style='background:url({EVIL}/z.png)'>x</p>"],
    "form": [f"<form action={EVIL}><button formaction=javascript:window.ran=1>x</button></form>"],
    "meta refresh": [f"<meta http-equiv=refresh content='0;url={EVIL}'>"],
    "base": [f"<base href={EVIL}/>"],
    "object": ["<object data='javascript:window.ran=1'></object><embed src='javascript:window.ran=1'>"],
    "math": ["<math><mtext></form><form><mglyph><style></math><img src onerror=window.ran=1>"],
    "noscript": ["<noscript><p title='</noscript><img src=x onerror=window.ran=1>'>"],
    "template": ["<template><img src=x onerror=window.ran=1></template>"],
    "code": ["```html\n<script>window.ran=1</script>\n<img src=x onerror=window.ran=1>\n```"],
    "code's language": ['```x" onmouseover=window.ran=1 <b>\ntext\n```'],
    "inline code": ["`<img src=x onerror=window.ran=1>`"],
    "table": ["| a | b |\n| :-: | --: |\n| <img src=x onerror=window.ran=1> | [x](javascript:window.ran=1) |"],
    "title of a link": [f'[x]({EVIL} "\' onmouseover=window.ran=1")'],
    "name that clobbers": ["<a id=app name=app></a><form id=location><input name=href></form>"],
}


FORBIDDEN = "img, svg, iframe, script, style, form, object, embed, math, template, base, meta"
ATTRIBUTES = {"class", "href", "title", "target", "rel", "start", "tabindex", "type", "aria-label"}
ATTRIBUTES_USED = """() => [...document.querySelectorAll("article .prose *")]
  .flatMap((node) => [...node.attributes].map((attribute) => attribute.name))"""


def test_b47_nothing_in_an_answer_runs(page: Page, server: FakeServer) -> None:
    """Every payload streamed, as one answer after the other."""
    for count, (name, parts) in enumerate(PAYLOADS.items(), start=1):
        server.say("Look: \n\n", *parts, "\n\nThat was it.")
        ask(page, name)
        finish(page, count)
    expect(answers(page).last).to_contain_text("That was it.")
    for link in answers(page).locator("a").all():
        assert (link.get_attribute("href") or "").startswith(EVIL), "only a harmless kind of link is left"
        assert link.get_attribute("target") == "_blank"
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        link.hover()
    expect(answers(page).locator(FORBIDDEN)).to_have_count(0)
    assert set(page.evaluate(ATTRIBUTES_USED)) <= ATTRIBUTES
    assert page.evaluate("window.ran") is None


def test_b47_code_is_shown_as_text(page: Page, server: FakeServer) -> None:
    server.say("```html\n<scr", "ipt>window.ran=1</script>\n```")
    ask(page, "Go")
    finish(page)
    expect(answers(page).locator("pre code")).to_have_text("<script>window.ran=1</script>")
    assert page.evaluate("window.ran") is None


def test_b47_nothing_in_a_question_or_a_title_runs(page: Page, server: FakeServer) -> None:
    text = "<img src=x onerror=window.ran=1>"
    ask(page, text)
    finish(page)
    expect(page.locator(".question")).to_have_text(text)
    expect(page.locator(".recent-title")).to_have_text(text)
    assert page.title().startswith(text)
    page.reload()
    expect(page.locator(".question")).to_have_text(text)
    assert page.evaluate("window.ran") is None


def test_b47_nothing_in_an_error_or_a_model_name_runs(page: Page, server: FakeServer) -> None:
    text = "<img src=x onerror=window.ran=1>"
    server.refuse("odd", text)
    ask(page, "Go")
    expect(page.get_by_role("alert")).to_contain_text(text)
    models = {"data": [{"id": f"m:{text}", "description": text}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.get_by_role("button", name="New chat").first.click()
    page.reload()
    expect(page.locator(".card-line")).to_have_text(text)
    assert page.evaluate("window.ran") is None


def test_b47_the_policy_stops_what_the_page_would_not(page: Page, watch: Watch) -> None:
    """The second lock: even a page that had let markup in would not run it."""
    thrown = page.evaluate(
        """() => {
          const nameOf = (act) => {
            try {
              act();
            } catch (error) {
              return error.name;
            }
          };
          const button = document.createElement("button");
          const script = document.createElement("script");
          return [
            nameOf(() => document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=window.ran=1>")),
            nameOf(() => button.setAttribute("onclick", "window.ran=1")),
            nameOf(() => (script.src = "data:text/javascript,window.ran=1")),
          ];
        }"""
    )
    assert thrown == ["TypeError", "TypeError", "TypeError"]
    assert page.evaluate("window.ran") is None
    assert len(watch.errors) >= 3, "the browser reports each"
    watch.errors.clear()


def test_b47_every_prefix_of_a_payload_is_harmless(page: Page) -> None:
    """The renderer at each step of a stream, without the stream."""
    page.evaluate(
        """async (payloads) => {
          const { renderMarkdown } = await import("/static/js/markdown.js");
          const { morphChildren } = await import("/static/js/morph.js");
          for (const text of payloads) {
            const box = document.createElement("div");
            document.body.append(box);
            for (let end = 1; end <= text.length; end++) morphChildren(box, renderMarkdown(text.slice(0, end)));
            const whole = document.createElement("div");
            whole.append(renderMarkdown(text));
            if (!box.isEqualNode(whole)) throw new Error(`morphed ${box.innerHTML}, whole ${whole.innerHTML}`);
          }
        }""",
        ["".join(parts) for parts in PAYLOADS.values()],
    )
    assert page.evaluate("window.ran") is None
