"""The page's routes: document and files, the policy that keeps answers from running, and caching."""

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app import page
from app.page import content_policy


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page.routes()), base_url="http://chat.example:8000")


def directives(policy: str) -> dict[str, str]:
    return dict(part.strip().split(" ", 1) for part in policy.split(";"))


def test_the_document(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", answer.text), "nothing inline"


def test_b47_the_policy_allows_nothing_but_our_own(client: TestClient) -> None:
    policy = directives(client.get("/").headers["content-security-policy"])
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
        "connect-src": "'self' ws://chat.example:8000 wss://chat.example:8000",
    }


@pytest.mark.parametrize("host", ["", "a b", "a;script-src *", "a'", "a:123456", "[::1", "a\r\nx"])
def test_b47_a_strange_host_is_left_out_of_the_policy(host: str) -> None:
    assert directives(content_policy(host))["connect-src"] == "'self'"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "chat.example"])
def test_a_usual_host_is_named_in_the_policy(host: str) -> None:
    assert directives(content_policy(host))["connect-src"] == f"'self' ws://{host} wss://{host}"


def test_every_file_that_the_document_names_is_there(client: TestClient) -> None:
    named = re.findall(r'(?:src|href)="(/[^"]+)"', client.get("/").text)
    assert named
    for path in named:
        assert client.get(path).status_code == 200, path


def test_every_module_imports_only_files_that_are_there() -> None:
    for module in page.STATIC.rglob("*.js"):
        for target in re.findall(r"""(?:from|import)\s*["']([^"']+)["']""", module.read_text("utf-8")):
            if module.parent.name != "vendor" or target.startswith("."):
                assert target.startswith("."), f"{module}: the bare import {target!r} finds nothing in a browser"
                assert (module.parent / target).resolve().is_file(), f"{module}: {target}"


@pytest.mark.parametrize("path", ["/", "/static/js/main.js", "/static/css/theme.css", "/static/icon.svg"])
def test_headers_of_every_answer(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"
    assert "content-security-policy" in headers


def test_modules_have_a_javascript_type(client: TestClient) -> None:
    assert client.get("/static/js/main.js").headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/static/js/main.js"])
def test_a_kept_copy_is_confirmed_by_its_etag(client: TestClient, path: str) -> None:
    etag = client.get(path).headers["etag"]
    again = client.get(path, headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["cache-control"]) == (304, b"", "no-cache")


@pytest.mark.parametrize("path", ["../page.py", "%2e%2e/page.py", "..%2fpage.py", "/etc/passwd"])
def test_nothing_outside_the_folder_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/static/{path}").status_code == 404


def test_head_and_other_methods(client: TestClient) -> None:
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert client.post("/").status_code == 405


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    for path in page.STATIC.rglob("*"):
        if path.suffix in {".js", ".css", ".html"} and "vendor" not in path.parts:
            assert len(path.read_text("utf-8").splitlines()) <= 300, path


def test_the_demo_assistants_are_plain_text() -> None:
    folder = Path(page.__file__).parent / "assistants"
    for name in ("support", "writing", "translator"):
        text = (folder / f"{name}.md").read_text("utf-8")
        assert text == text.strip() + "\n"
        assert not re.search(r"^[#>*-]|\*\*|```", text, re.MULTILINE), name
