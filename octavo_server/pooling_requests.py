"""Pooling requests: embeddings, scores and labels of many texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from starlette.requests import Request

from octavo.errors import InvalidParameter
from octavo.sampling_params import SamplingParams
from octavo.text.embedding_vectors import Floats, cosine, late_interaction, result_of
from octavo.types import Task
from octavo_server.admission import ClientRequest, PromptSource, ShortenedText
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import finished_choices
from octavo_server.services import Body, ModelServices, server_of
from octavo_server.tenants.api_keys import caller_of

MAX_TEXTS = 2048
"""Most texts per request, as in the OpenAI API."""
MAX_NUMBERS = 1 << 25
"""Most numbers in the results of a request for those of each token: 128 MiB, and some five times as much as JSON. A
single text may have more."""
WHOLE_CONTEXT = -1
"""Value of ``truncate_prompt_tokens`` for as many tokens as a text may have."""


class Shortening(NamedTuple):
    """To how many tokens texts are shortened, and at which side they lose the others."""

    max_tokens: int
    side: Literal["left", "right"] = "right"

    def of(self, source: PromptSource) -> PromptSource:
        """The source, shortened. Token ids lose tokens like texts, without regard to special ones."""
        if isinstance(source, list):
            return source[: self.max_tokens] if self.side == "right" else source[-self.max_tokens :]
        texts = (source,) if isinstance(source, str) else source
        return ShortenedText(texts, self.max_tokens, self.side) if isinstance(texts, tuple) else source


def shortening(
    services: ModelServices, max_tokens: int | None, side: Literal["left", "right"] | None
) -> Shortening | None:
    """That of the fields ``truncate_prompt_tokens`` and ``truncation_side``. Raises ``InvalidParameter``."""
    longest = services.engine.info.max_model_len
    if max_tokens is None:
        return None
    if max_tokens != WHOLE_CONTEXT and not 1 <= max_tokens <= longest:
        message = f"'truncate_prompt_tokens' must be from 1 to {longest}, or -1 for that, not {max_tokens}."
        raise InvalidParameter("truncate_prompt_tokens", message)
    return Shortening(longest if max_tokens == WHOLE_CONTEXT else max_tokens, side or "right")


async def read(request: Request, decoder: BodyDecoder[Body]) -> tuple[ModelServices, Body, dict[str, str]]:
    """The services of the model, the body, and headers of the response. Raises ``RequestError``."""
    server = server_of(request)
    server.check_room(request)
    return await server.read(request, decoder)


class PoolingCall(NamedTuple):
    """Who asks which model, and how the texts are read."""

    services: ModelServices
    request: Request
    model: str
    shorten: Shortening | None = None
    add_special_tokens: bool = True
    priority: int = 0
    user: str | None = None

    async def ask(self, task: Task, sources: Sequence[PromptSource], field: str) -> list[GeneratedChoice]:
        """Run ``task`` on each text, ``max_num_seqs`` at a time. Raises ``RequestError`` about ``field``."""
        services, request = self.services, self.request
        if self.shorten is not None:
            sources = [self.shorten.of(source) for source in sources]
        _check_number(sources, field)
        choices: list[GeneratedChoice] = []
        size, pooling = services.engine.info.max_num_seqs, services.engine.info.pooling
        width = {"token_embed": pooling.token_size, "token_classify": len(pooling.labels)}.get(task, 0)

        def begin(generation: Generation) -> Generation:
            count = num_tokens([*choices, *generation.choices]) * width
            if count > MAX_NUMBERS and len(sources) > 1:
                message = f"'{field}' has texts with too many tokens: the results of several may have {MAX_NUMBERS}"
                raise InvalidParameter(field, f"{message} numbers, {width} for each token.")
            return services.admission.submit(generation)

        for first in range(0, len(sources), size):
            client_request = ClientRequest(
                caller=caller_of(request),
                prompts=sources[first : first + size],
                prompt_field=field,
                params=SamplingParams(max_tokens=0),
                default_max_tokens=None,
                add_special_tokens=self.add_special_tokens,
                priority=self.priority,
                tenant=services.tenant(request, self.user, self.model),
                task=task,
                model=self.model,
            )
            choices += await finished_choices(await services.admission.admit(client_request, begin), request)
        return choices

    async def scores(
        self, pairs: Sequence[tuple[str, str]], fields: tuple[str, str], is_raw: bool = False
    ) -> tuple[list[float], int]:
        """The score of each pair of texts, and the total number of prompt tokens; errors are about one of ``fields``.

        A cross-encoder reads both texts together. With embeddings it is their cosine similarity, with those of tokens
        alone their late interaction.
        """
        services = self.services
        _check_number(pairs, fields[1])
        tasks = services.engine.info.tasks
        if "score" in tasks or not {"embed", "token_embed"} & set(tasks):
            choices = await self.ask("score", pairs, fields[1])
            return [float(numbers(services, choice, is_raw=is_raw)[0]) for choice in choices], num_tokens(choices)
        task: Task = "embed" if "embed" in tasks else "token_embed"
        compare = cosine if task == "embed" else late_interaction
        vectors: dict[str, Floats] = {}
        count = 0
        for field, texts in zip(fields, zip(*pairs, strict=True), strict=True):
            sources = list(dict.fromkeys(texts))
            choices = await self.ask(task, sources, field)
            count += num_tokens(choices)
            vectors |= dict(zip(sources, (numbers(services, choice) for choice in choices), strict=True))
        # In a thread: late interaction multiplies all tokens of two texts.
        return await asyncio.to_thread(lambda: [compare(vectors[a], vectors[b]) for a, b in pairs]), count


def _check_number(texts: Sequence[object], field: str) -> None:
    if len(texts) > MAX_TEXTS:
        raise InvalidParameter(field, f"'{field}' must have at most {MAX_TEXTS} texts, not {len(texts)}.")


def numbers(
    services: ModelServices,
    choice: GeneratedChoice,
    *,
    is_raw: bool = False,
    normalizes: bool | None = None,
    dimensions: int | None = None,
) -> Floats:
    """The result of a choice's task, see ``result_of``."""
    task, pooling = choice.request.task, services.engine.info.pooling
    return result_of(task, choice.values, pooling, is_raw=is_raw, normalizes=normalizes, dimensions=dimensions)


def num_tokens(choices: Sequence[GeneratedChoice]) -> int:
    """Total prompt tokens of all texts."""
    return sum(len(choice.prompt.tokens) for choice in choices)
