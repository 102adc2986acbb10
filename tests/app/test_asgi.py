"""The application as a whole: routes, and what becomes of errors."""

import ast
import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.app.serving import CHAT, serving

APP = Path(__file__).parent.parent.parent / "app"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("POST", "/", 404),
        ("GET", CHAT, 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_routes_and_methods(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with serving(tmp_path) as gateway:
        response = await gateway.client.request(method, path)
    error = response.json()["error"]
    assert response.status_code == status
    assert {"message", "type", "param", "code"} == set(error)
    assert ("allow" in response.headers) == (status == 405)


async def test_a_bug_is_a_500_that_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: Request) -> Response:
        raise RuntimeError("the secret is 4711")

    async with serving(tmp_path, routes=[Route("/broken", broken)]) as gateway:
        response = await gateway.client.get("/broken")
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "4711" not in response.text
        assert "Traceback" not in response.text
        assert (await gateway.client.get("/health")).status_code == 200


async def test_a_client_that_goes_while_it_sends(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{{".encode()
        _, writer = await gateway.connect(head)
        writer.close()
        await writer.wait_closed()
        assert (await gateway.chat()).status_code == 200
        assert len(gateway.engine.requests) == 1


async def test_garbage_on_the_wire(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for garbage in (b"\x00\xff\xfe\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/models\r\n\r\n"):
            reader, writer = await gateway.connect(garbage)
            async with asyncio.timeout(30):
                assert not (await reader.read()).startswith(b"HTTP/1.1 5")
            writer.close()
        assert (await gateway.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", sorted(APP.glob("*.py")), ids=lambda p: p.name)
def test_b12_nobody_eats_a_cancel(path: Path) -> None:
    """No bare `except` and no `except BaseException`, unless what it caught is raised again."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "BaseException" if node.type is None else ast.unparse(node.type)
        if "BaseException" in caught or caught == "asyncio.CancelledError":
            assert any(isinstance(n, ast.Raise) for n in ast.walk(node)), f"{path.name}:{node.lineno}"
