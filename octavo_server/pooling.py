"""Pooling requests: embeddings and scores of many texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from octavo.errors import InvalidParameter
from octavo.sampling_params import SamplingParams
from octavo.text.vectors import Floats
from octavo.types import Task
from octavo_server.admission import ClientRequest, PromptSource
from octavo_server.generation import GeneratedChoice
from octavo_server.http.sse import finished_choices
from octavo_server.services import ModelServices
from octavo_server.tenants.api_keys import caller_of

MAX_TEXTS = 2048
"""Most texts per request, as in the OpenAI API."""


async def ask(
    services: ModelServices,
    request: Request,
    task: Task,
    model: str,
    sources: Sequence[PromptSource],
    field: str,
    *,
    add_special_tokens: bool = True,
    priority: int = 0,
    user: str | None = None,
) -> list[GeneratedChoice]:
    """Run ``task`` on each text, ``max_num_seqs`` at a time. Raises ``RequestError`` about ``field``."""
    if len(sources) > MAX_TEXTS:
        raise InvalidParameter(field, f"'{field}' must have at most {MAX_TEXTS} texts, not {len(sources)}.")
    choices: list[GeneratedChoice] = []
    size = services.engine.info.max_num_seqs
    for first in range(0, len(sources), size):
        client_request = ClientRequest(
            caller=caller_of(request),
            prompts=sources[first : first + size],
            prompt_field=field,
            params=SamplingParams(max_tokens=0),
            default_max_tokens=None,
            add_special_tokens=add_special_tokens,
            priority=priority,
            tenant=services.tenant(request, user, model),
            task=task,
            model=model,
        )
        choices += await finished_choices(await services.admission.admit(client_request), request)
    return choices


def numbers(choice: GeneratedChoice) -> Floats:
    """The embedding or score, as float32."""
    return np.frombuffer(choice.values, dtype="<f4")


def num_tokens(choices: Sequence[GeneratedChoice]) -> int:
    """Total prompt tokens of all texts."""
    return sum(len(choice.prompt.tokens) for choice in choices)
