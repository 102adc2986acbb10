"""What the routes of one gateway work with, built once and handed to each of them. Nothing here is global."""

from dataclasses import dataclass

from app.assistants import Assistants
from app.config import FileConfig, GatewayConfig
from app.metrics import Metrics
from app.prompts import PromptBuilder
from app.tenants import Tenants
from engine.client import EngineClient
from engine.prepared import PreparedModel
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Services:
    config: GatewayConfig
    file_config: FileConfig
    model: PreparedModel
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: EngineClient
    prompts: PromptBuilder
    assistants: Assistants
    tenants: Tenants
    metrics: Metrics

    @property
    def model_name(self) -> str:
        return self.model.manifest.name
