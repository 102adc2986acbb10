"""Values that a chat template asks for by name (`enable_thinking`), of an assistant or of one request."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

TemplateOption = bool | int | float | str

MAX_OPTIONS = 16
MAX_NAME_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 1024


def _checked(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_OPTIONS:
        raise ValueError(f"should be an object of at most {MAX_OPTIONS} template options")
    for name, option in value.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"should have names of at most {MAX_NAME_CHARACTERS} letters, digits and '_'")
        if not isinstance(option, TemplateOption):
            raise ValueError("should have strings, numbers or booleans as values")
        if isinstance(option, str) and len(option) > MAX_VALUE_CHARACTERS:
            raise ValueError(f"should have values of at most {MAX_VALUE_CHARACTERS} characters")
    return value


TemplateOptions = Annotated[dict[str, Any], BeforeValidator(_checked)]
"""Field of a pydantic model; the values are TemplateOption."""


def merged(*options: Mapping[str, TemplateOption] | None) -> dict[str, TemplateOption]:
    """The later ones win."""
    return {name: value for some in options for name, value in (some or {}).items()}


def canonical(options: Mapping[str, TemplateOption]) -> str:
    """The same text for equal options, in whatever order, and another one for all others: false is not 0."""
    return json.dumps(dict(sorted(options.items())))


def digest(options: Mapping[str, TemplateOption]) -> str:
    """32 hexadecimal digits that tell options apart; "" for none."""
    return hashlib.sha256(canonical(options).encode()).hexdigest()[:32] if options else ""
