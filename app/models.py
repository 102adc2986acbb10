"""Model names: the model itself, and `<model>:<assistant>` for each assistant that the caller may see."""

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.assistants import Assistant, Assistants
from app.errors import BadRequest, NotFound
from app.services import Services
from app.tenants import Tenant

OWNER = "trunkline"
_MAX_SHOWN = 100


def find_assistant_of_model(name: str, assistants: Assistants, tenant: Tenant, model: str) -> Assistant | None:
    """The assistant that the model name `model` selects, where the model itself has the name `name`; None for the bare
    model. Raises BadRequest or NotFound."""
    if not model:
        raise BadRequest("Invalid value for 'model': it must not be empty.", code="invalid_value", param="model")
    if model == name:
        return None
    if model.startswith(f"{name}:"):
        assistant = assistants.find(tenant, model[len(name) + 1 :])
        if assistant is not None:
            return assistant
    shown = model if len(model) <= _MAX_SHOWN else model[:_MAX_SHOWN] + "..."
    raise NotFound(f"The model {shown!r} does not exist.", code="model_not_found", param="model")


class Models:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.retrieve, methods=["GET"]),
        ]

    async def list_models(self, request: Request) -> Response:
        configured, name = self._services.current, self._services.model_name
        tenant = configured.tenants.authenticate(request.headers.get("authorization"))
        ids = [name, *(f"{name}:{a.id}" for a in configured.assistants.visible_to(tenant))]
        return json_response({"object": "list", "data": [self._card(i) for i in ids]})

    async def retrieve(self, request: Request) -> Response:
        configured, model = self._services.current, request.path_params["model"]
        tenant = configured.tenants.authenticate(request.headers.get("authorization"))
        find_assistant_of_model(self._services.model_name, configured.assistants, tenant, model)
        return json_response(self._card(model))

    def _card(self, model_id: str) -> dict[str, Any]:
        return {
            "id": model_id,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "root": self._services.model_name,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        """What the engine serves; None while there is none."""
        return self._services.engine.info.max_model_len if self._services.engine.is_ready else None


def json_response(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
