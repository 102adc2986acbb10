"""Model names and who sees which."""

from pathlib import Path

import openai

from app.config import FileConfig
from tests.app.serving import MODEL, serving

CONFIG = FileConfig.model_validate(
    {
        "tenants": [{"id": "a", "key": "key-of-a-123"}, {"id": "b", "key": "key-of-b-123"}],
        "assistants": [
            {"id": "support", "tenant": "a", "instructions": "Be kind."},
            {"id": "all", "shared": True, "instructions": "Be there."},
        ],
    }
)


async def test_each_tenant_sees_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, file_config=CONFIG) as gateway:

        async def names(key: str) -> list[str]:
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=key, max_retries=0)
            async with client:
                models = [m async for m in client.models.list()]
            assert all(m.object == "model" and m.created > 0 and m.owned_by for m in models)
            return [m.id for m in models]

        assert await names("key-of-a-123") == [MODEL, f"{MODEL}:support", f"{MODEL}:all"]
        assert await names("key-of-b-123") == [MODEL, f"{MODEL}:all"]
        assert (await gateway.client.get("/v1/models")).status_code == 401


async def test_one_model(tmp_path: Path) -> None:
    async with serving(tmp_path, file_config=CONFIG) as gateway:
        for key, model, status in (
            ("key-of-a-123", f"{MODEL}:support", 200),
            ("key-of-b-123", f"{MODEL}:support", 404),
            ("key-of-b-123", MODEL, 200),
            ("key-of-b-123", "../../etc/passwd", 404),
            ("key-of-b-123", "x" * 3000, 404),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            response = await gateway.client.get(f"/v1/models/{model}", headers=headers)
            assert response.status_code == status, model
            assert len(response.content) < 1000


async def test_names_of_models_in_chats(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        for model, status, code in (
            ("no-such-model", 404, "model_not_found"),
            (f"{MODEL}:", 404, "model_not_found"),
            (f"{MODEL}x", 404, "model_not_found"),
            ("\u0000", 404, "model_not_found"),
            ("", 400, "invalid_value"),
            (None, 400, "invalid_type"),
            (3, 400, "invalid_type"),
        ):
            response = await gateway.chat(model=model)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (status, code, "model")
