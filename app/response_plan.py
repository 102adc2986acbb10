"""From the body of a request to everything a response needs to start: its node, its prompt, its generation.

All that can be refused is refused here, before anything is stored or computed.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.assistants import Assistant
from app.conversation_store import ConversationStore, StoredConversation, check_room
from app.errors import ApiError, BadRequest, Conflict, NotFound
from app.events import ConversationRef, Item, Prompt, ResponseObject
from app.generation import Generation
from app.heads import num_leading
from app.ids import ResponseId, new_response_id
from app.live_config import Configured
from app.models import find_assistant_of_model
from app.prompts import BuiltPrompt
from app.response_input import parse_input
from app.response_node import HistoryMessage, ResponseNode
from app.response_schema import CreateResponse, parse_create
from app.resubmission import with_seed
from app.services import Services
from app.sessions import Sessions, SessionsUnavailable
from app.tenants import Tenant
from app.truncation import find_cuts, room_for_prompt
from engine.sampling_params import SamplingParams
from engine.text.chat_template import Message

T = TypeVar("T")


class StoreUnavailable(ApiError):
    """Redis does not answer: new state is refused, what runs goes on."""

    status = 503
    default_code = "session_store_unavailable"

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message, **more)
        self.headers.setdefault("Retry-After", "2")


async def or_unavailable(command: Awaitable[T]) -> T:
    """The result of a command to the session store. Raises StoreUnavailable."""
    try:
        return await command
    except SessionsUnavailable:
        raise StoreUnavailable("The session store does not answer; try again in a few seconds.") from None


@dataclass(frozen=True, slots=True)
class Parent:
    """What a new response hangs on: a node at its end, and everything said up to that end."""

    node: ResponseNode
    history: tuple[HistoryMessage, ...]

    @property
    def is_link(self) -> bool:
        """Whether its stored ancestors and itself tell all of the history. A conversation's past may change."""
        return self.node.response.store and self.node.response.conversation is None


@dataclass(frozen=True, slots=True)
class Before:
    """What a request goes on with: a response, a conversation, or neither."""

    parent: Parent | None = None
    conversation: StoredConversation | None = None

    @property
    def history(self) -> tuple[HistoryMessage, ...]:
        if self.parent is not None:
            return self.parent.history
        return self.conversation.messages if self.conversation is not None else ()

    def new_id(self) -> ResponseId:
        if self.parent is not None:
            return self.parent.node.id.child()
        return self.conversation.id.new_response() if self.conversation is not None else new_response_id()


@dataclass(frozen=True, slots=True)
class ChosenAssistant:
    assistant: Assistant
    variables: Mapping[str, str]

    def to_wire(self) -> Prompt:
        return Prompt(
            id=self.assistant.id,
            version=self.assistant.version,
            variables=dict(self.variables) if self.variables else None,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    node: ResponseNode
    generation: Generation
    """Not entered yet: nothing has been submitted."""
    prompt: BuiltPrompt
    params: SamplingParams
    priority: int
    created_at: float
    """In seconds since 1970."""
    history: tuple[HistoryMessage, ...] = ()
    """Everything said before the node's own input."""


class ResponsePlanner:
    """`find_node` gives a stored response of a tenant as it is now, None when there is none; it raises ApiError."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        conversations: ConversationStore,
        now: Callable[[], float],
        find_node: Callable[[Tenant, str], Awaitable[ResponseNode | None]],
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._conversations = conversations
        self._now = now
        self._find_node = find_node

    async def plan(
        self,
        configured: Configured,
        tenant: Tenant,
        body: Mapping[str, Any],
        *,
        stream_id: str | None,
        unstored: Mapping[str, Parent],
    ) -> Plan:
        """`unstored` are parents that only this caller may hang children on. Raises ApiError."""
        services = self._services
        request = parse_create(body)
        items = parse_input(request.input, configured.limits.max_messages)
        by_model = self._find_model(configured, tenant, request)
        before = await self._find_before(configured, tenant, request, unstored, len(items))
        parent, history = before.parent, before.history
        assistant = _choose_assistant(configured, tenant, request, by_model, parent)
        prompt, num_truncated = await self._build(tenant, request, assistant, _messages(request, history, items))
        params = request.to_params(
            services.tokenizer,
            services.model.manifest.sampling_defaults,
            request.max_output_tokens,
            logprobs=request.num_logprobs,
        )
        params = with_seed(params)
        answer_id = str(response_id := before.new_id())
        priority, created_at = request.priority or 0, services.now()
        generation = services.generation(
            prompt, params, tenant, priority=priority, is_told_first=True, answer_id=answer_id, created_at=created_at
        )
        is_told = before.conversation is not None or (parent is not None and parent.is_link)
        node = ResponseNode(
            id=response_id,
            tenant=tenant.id,
            ancestors=(*parent.node.ancestors, parent.node.id.node) if parent and parent.is_link else (),
            prefix=() if is_told else history,
            input=items,
            stream_id=stream_id,
            response=self._response(answer_id, request, params, assistant, num_truncated, before),
        )
        return Plan(node, generation, prompt, params, priority, created_at, history)

    async def count_input_tokens(self, configured: Configured, tenant: Tenant, body: Mapping[str, Any]) -> int:
        """How many tokens the prompt of this request has. Raises ApiError, but not for a prompt that is too long."""
        request = parse_create(body)
        items = parse_input(request.input, configured.limits.max_messages)
        by_model = None if request.model is None else self._find_model(configured, tenant, request)
        before = await self._find_before(configured, tenant, request, {}, len(items))
        assistant = _choose_assistant(configured, tenant, request, by_model, before.parent)
        messages = _messages(request, before.history, items)
        prompt, _ = await self._build(tenant, request, assistant, messages)
        return len(prompt.token_ids)

    async def _build(
        self, tenant: Tenant, request: CreateResponse, chosen: ChosenAssistant | None, messages: Sequence[Message]
    ) -> tuple[BuiltPrompt, int]:
        """The prompt, and how many tokens were left out so that it fits, if that was asked for."""

        async def build(messages: Sequence[Message]) -> BuiltPrompt:
            return await self._services.prompts.build(
                tenant,
                messages,
                assistant=chosen.assistant if chosen else None,
                variables=chosen.variables if chosen else None,
                narrowing=request.narrowing,
                template_options=request.chat_template_kwargs,
            )

        whole = prompt = await build(messages)
        if request.truncation == "auto":
            room = room_for_prompt(self._services.engine_info, request.max_output_tokens)
            if len(whole.token_ids) > room:
                head = messages[: num_leading(messages)]
                for cut in find_cuts(messages, await self._services.prompts.message_sizes(messages), room):
                    prompt = await build([*head, *messages[cut:]])
                    if len(prompt.token_ids) <= room:
                        break
        return prompt, len(whole.token_ids) - len(prompt.token_ids)

    def _find_model(self, configured: Configured, tenant: Tenant, request: CreateResponse) -> Assistant | None:
        """A model may be left out where an assistant or a parent stands for it. Raises ApiError."""
        if request.model is not None:
            return find_assistant_of_model(self._services.model_name, configured.assistants, tenant, request.model)
        if request.prompt is None and request.previous_response_id is None:
            raise BadRequest("Missing required parameter: 'model'.", code="missing_required_parameter", param="model")
        return None

    async def _find_before(
        self,
        configured: Configured,
        tenant: Tenant,
        request: CreateResponse,
        unstored: Mapping[str, Parent],
        num_items: int,
    ) -> Before:
        if request.conversation is None:
            return Before(parent=await self._find_parent(tenant, request.previous_response_id, unstored))
        conversation = await or_unavailable(self._conversations.find(tenant.id, request.conversation))
        check_room(len(conversation.items) + num_items, configured.limits.max_messages)
        return Before(conversation=conversation)

    async def _find_parent(
        self, tenant: Tenant, previous_id: str | None, unstored: Mapping[str, Parent]
    ) -> Parent | None:
        if previous_id is None:
            return None
        if previous_id in unstored:
            return unstored[previous_id]
        node = await self._find_node(tenant, previous_id)
        if node is None:
            raise _no_parent(previous_id)
        if node.response.is_running:
            raise Conflict(
                f"The response {previous_id} is still running.",
                code="response_in_progress",
                param="previous_response_id",
            )
        if node.response.conversation is not None:
            return Parent(node, await self._history_in_conversation(node, node.response.conversation.id))
        turns = await or_unavailable(self._sessions.find_history(node))
        if turns is None:
            raise _no_parent(previous_id)
        return Parent(node, tuple(message for turn in (*turns, node.turn) for message in turn.messages))

    async def _history_in_conversation(self, node: ResponseNode, conversation_id: str) -> tuple[HistoryMessage, ...]:
        """What was said up to the end of this response, as far as it has not been deleted."""
        try:
            conversation = await or_unavailable(self._conversations.find(node.tenant, conversation_id))
        except NotFound:
            raise _no_parent(str(node.id)) from None
        history = conversation.messages_to(str(node.id))
        if history is None:
            raise _no_parent(str(node.id))
        return history

    def _response(
        self,
        response_id: str,
        request: CreateResponse,
        params: SamplingParams,
        chosen: ChosenAssistant | None,
        num_truncated: int,
        before: Before,
    ) -> ResponseObject:
        return ResponseObject(
            id=response_id,
            created_at=int(self._now()),
            status="in_progress",
            background=bool(request.background),
            conversation=ConversationRef(id=str(before.conversation.id)) if before.conversation else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            model=request.model or self._services.model_name,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt=chosen.to_wire() if chosen else None,
            prompt_cache_key=request.prompt_cache_key,
            safety_identifier=request.safety_identifier,
            store=request.is_stored,
            temperature=params.temperature,
            tool_choice="none" if request.tool_choice == "none" else "auto",
            top_logprobs=request.top_logprobs or 0,
            top_p=params.top_p,
            truncation=request.truncation or "disabled",
            truncated_input_tokens=num_truncated,
            user=request.user,
        )


def _choose_assistant(
    configured: Configured,
    tenant: Tenant,
    request: CreateResponse,
    by_model: Assistant | None,
    parent: Parent | None,
) -> ChosenAssistant | None:
    """The one asked for, else the parent's with its variables: an assistant is inherited, unlike instructions. Always
    as it is now: a version that is asked for has to be the current one."""
    inherited = parent.node.response.prompt if parent else None
    variables = (request.prompt or inherited or Prompt(id="")).variables
    if by_model is not None:
        if request.prompt is not None and request.prompt.id != by_model.id:
            raise BadRequest(
                f"'prompt' names the assistant {request.prompt.id!r} and 'model' names {by_model.id!r}.",
                code="invalid_value",
                param="prompt",
            )
        assistant = by_model
    else:
        chosen = request.prompt or inherited
        if chosen is None:
            return None
        found = configured.assistants.find(tenant, chosen.id)
        if found is None:
            raise NotFound(f"The prompt {chosen.id!r} does not exist.", code="prompt_not_found", param="prompt")
        assistant = found
    wanted = request.prompt.version if request.prompt is not None else None
    if wanted not in (None, assistant.version):
        raise NotFound(
            f"The prompt {assistant.id!r} has no version {wanted!r} now, its version is {assistant.version!r}.",
            code="prompt_not_found",
            param="prompt.version",
        )
    return ChosenAssistant(assistant, variables or {})


def _messages(request: CreateResponse, history: tuple[HistoryMessage, ...], items: tuple[Item, ...]) -> list[Message]:
    first = [] if request.instructions is None else [Message("system", request.instructions)]
    said = [Message(m.role, m.content, m.token_ids) for m in history]
    return [*first, *said, *(Message(item.role, item.text) for item in items)]


def _no_parent(previous_id: str) -> BadRequest:
    return BadRequest(
        f"Previous response with id '{previous_id}' not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
