"""What wraps every connection: request ids, and whose pages may speak to us."""

from pathlib import Path

import pytest
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.config import FileConfig
from tests.app.serving import chat_body, serving

KEYED = FileConfig.model_validate(
    {"tenants": [{"id": "a", "key": "key-of-a-123"}], "allowed_origins": ["https://chat.example.com"]}
)


async def test_request_ids(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        given = await gateway.client.get("/health", headers={"X-Request-Id": "abc.1:2_3-4"})
        assert given.headers["x-request-id"] == "abc.1:2_3-4"
        for bad in ("", "a b", "x" * 129, "<script>"):
            own = (await gateway.client.get("/v1/nope", headers={"X-Request-Id": bad})).headers["x-request-id"]
            assert own != bad
            assert len(own) == 32


async def test_requests_are_counted_by_route_not_by_path(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for i in range(3):
            await gateway.client.get(f"/v1/secret-{i}")
        await gateway.client.get("/v1/models/x")
        text = (await gateway.client.get("/metrics")).text
    assert 'trunkline_http_requests_total{method="GET",route="other",status="404"} 3.0' in text
    assert 'route="/v1/models/{model:path}",status="404"} 1.0' in text
    assert "secret" not in text


async def test_malformed_headers_are_refused_not_a_fault(tmp_path: Path) -> None:
    for config in (FileConfig(), KEYED):
        folder = tmp_path / str(config.is_open)
        async with serving(folder, file_config=config) as gateway:
            for path in ("/v1/nope", "/health"):
                for headers in ({"Host": "[::1"}, {"Host": "localhost", "Origin": "http://["}):
                    response = await gateway.client.get(path, headers=headers)
                    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


async def test_a_foreign_page_gets_nothing(tmp_path: Path) -> None:
    from starlette.routing import WebSocketRoute

    async def hello(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    async with serving(tmp_path, file_config=KEYED, routes=[WebSocketRoute("/ws", hello)]) as gateway:
        headers = {"Origin": "https://evil.example", "Authorization": "Bearer key-of-a-123"}
        response = await gateway.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert gateway.engine.requests == []
        url = f"ws://127.0.0.1:{gateway.port}/ws"
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, origin="https://evil.example", proxy=None)  # type: ignore[arg-type]
        assert caught.value.response.status_code == 403
        for origin in ("https://chat.example.com", f"http://127.0.0.1:{gateway.port}", None):
            async with connect(url, origin=origin, proxy=None) as websocket:  # type: ignore[arg-type]
                assert await websocket.recv() == "hello"
