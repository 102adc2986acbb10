"""How the choices of one generation are asked of an engine: one request each, over the same prompts and parameters."""

import uuid
from collections.abc import Sequence

from app.choice import Choice
from app.errors import EngineUnavailable
from app.prompts import BuiltPrompt
from engine.client import Submitter
from engine.errors import EngineDeadError
from engine.protocol import AddRequest
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import PROMPT_SUFFIX_TOKENS
from engine.text.stop_strings import StopAutomaton
from engine.text.tokenizer import Tokenizer
from engine.token_stream import TokenStream

UNAVAILABLE = "The engine is not available at the moment; try again in a few seconds."


class Submission:
    """Choice indices are `prompt index * n + choice`. `continues_text`: the answer goes on with the prompt's text."""

    def __init__(
        self,
        engine: Submitter,
        tokenizer: Tokenizer,
        prompts: Sequence[BuiltPrompt],
        params: SamplingParams,
        tenant_id: str,
        *,
        priority: int,
        request_id: str | None,
        continues_text: bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._params = params
        self._tenant_id = tenant_id
        self._priority = priority
        self._request_id = request_id or uuid.uuid4().hex
        self._continues_text = continues_text
        self._stops = StopAutomaton(params.stop)

    def make_choice(self, index: int) -> Choice:
        """Nothing is asked of an engine yet."""
        prompt = self._prompts[index // self._params.n]
        suffix_ids = prompt.token_ids[-PROMPT_SUFFIX_TOKENS:] if self._continues_text else ()
        return Choice.begin(index, self._tokenizer, self._params, self._stops, suffix_ids)

    def submit(self, choice: Choice) -> TokenStream:
        """The stream of what follows on the choice's ids, which is now its own. Raises EngineUnavailable."""
        prompt = self._prompts[choice.index // self._params.n]
        request = AddRequest(
            request_id=f"{self._request_id}-{choice.index}",
            prompt_ids=prompt.token_ids,
            params=self._params,
            scopes=prompt.scopes,
            choice=choice.index % self._params.n,
            tenant=self._tenant_id,
            priority=self._priority,
            output_ids=list(choice.token_ids),
        )
        try:
            choice.stream = self._engine.submit(request)
        except EngineDeadError:
            raise EngineUnavailable(UNAVAILABLE) from None
        return choice.stream
