"""Admission control: every request of every API passes through here before it reaches the engine.

All limits are checked here, cheapest first: queue room before tokenisation, bytes before tokens, tokens before
submission. The engine relies on these checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import msgspec

from octavo.config import ModelSettings
from octavo.errors import ContextLengthExceeded, DeadlineExceeded, InvalidParameter, QueueFull
from octavo.grammar.forms import FormError
from octavo.grammar.trial_queue import GrammarRefused, TrialQueue
from octavo.grammar.vocabulary import PackedVocabulary
from octavo.images.media_sources import Part
from octavo.images.preparer import PreparedMedia, read_by_model
from octavo.sampling_params import SamplingParams, choice_key, resolve_max_tokens
from octavo.server_settings import ServerSettings
from octavo.system.cpus import num_cpus
from octavo.text.conversation import ChatPrompt, ImageText
from octavo.text.message_format import MessageFormat
from octavo.text.reasoning import AnswerMarks
from octavo.text.tokenizer import (
    Sequences,
    Tokenizer,
    banned_sequences,
    check_params,
    check_prompt,
    check_something_is_left,
    check_task,
    end_tokens,
)
from octavo.types import KVTransfer, Request, Task, ThinkingBudget
from octavo_server.engines.engine_client import EngineClient
from octavo_server.generation import Generation, Prompt
from octavo_server.http.error_responses import RETRY_AFTER_SECONDS
from octavo_server.image_files import ImageFiles, ReadFile
from octavo_server.tenants.api_keys import Caller, has_share
from octavo_server.tenants.turn_queue import Places

THREAD_BYTES = 1 << 10
"""Longer texts are tokenised in a thread: a millisecond each for many requests would stall every stream."""
SLOW_SECONDS = 0.05
"""Processor time of a short text, which takes a hundredth of this unless a regular expression goes back very often."""
LONG_BYTES = 1 << 18
"""Longer texts are tokenised one after the other, so that none of the others waits for them."""
THREAD_TOKENS = 64 << 10
"""Longer lists of token ids are checked in a thread."""


@dataclass(frozen=True)
class ShortenedText:
    """A text, or a pair for a cross-encoder, that loses the tokens at one side that are beyond a number."""

    texts: tuple[str, ...]
    max_tokens: int
    side: Literal["left", "right"] = "right"


PromptSource = str | list[int] | tuple[str, str] | ShortenedText | Callable[[], ChatPrompt]
"""Text, token ids, a text pair for a cross-encoder, either one shortened, or a slow function that renders a chat,
called in a thread; its attribute ``images`` has the parts that are images or videos, if there is one."""


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """A client's request in the form that all APIs share."""

    caller: Caller
    """Whose quota is charged, and who may read the request's timeline."""
    prompts: Sequence[PromptSource]
    prompt_field: str
    """Name of the body field with the prompts, for error messages."""
    params: SamplingParams
    """``max_tokens`` is ``None`` when the client did not set it."""
    default_max_tokens: int | None
    """Used when the client set no ``max_tokens``, capped by the context; ``None`` = up to the context length."""
    add_special_tokens: bool
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    ttft_target: float = 0.0
    tpot_target: float = 0.0
    session: str = ""
    cache_ttl: float = 0.0
    timeout: float | None = None
    """Deadline in seconds from arrival; the request then ends with ``DeadlineExceeded``."""
    grammar: Callable[[str], str] | None = None
    """Maps the prompt's text to the grammar of the output, not yet validated; may raise ``FormError``."""
    grammar_field: str = ""
    """Name of the body field with the grammar, for error messages."""
    report: Callable[[Sequence[str]], None] = lambda names: None
    """Reports parts of the body that turn out to have no effect; may raise ``RequestError``."""
    task: Task = "generate"
    model: str = ""
    """Name of the model or of an adapter."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens to keep in the output text because the message parser needs them."""
    read_file: ReadFile | None = None
    """Reads a file that the caller has uploaded."""
    transfer: KVTransfer | None = None
    """That another server has computed the prompt, or will go on from it."""
    message_format: MessageFormat | None = None
    """That of the model's messages, by which a bound on reasoning holds."""
    routes: bytes = b""
    """Experts for the first positions; see ``Request``."""
    answer_marks: AnswerMarks | None = None
    """Marks of the answer in a message that may begin with reasoning; stop strings count in the answer only."""


class Admission:
    """Admits requests, or rejects them with the error that the client receives."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        settings: ServerSettings,
        model: ModelSettings | None = None,
    ) -> None:
        self.engine = engine
        self.images = ImageFiles(model or ModelSettings(), settings, lambda: engine.info.num_image_slots)
        self.tokenizer = tokenizer
        self.max_num_queued_reqs = settings.max_num_queued_reqs
        self._timeout, self._seed = settings.request_timeout, settings.request_seed
        self.grammars = TrialQueue(self._vocabulary)
        self._reserved: Counter[str] = Counter()
        """Places from the room check until submission, by API key."""
        # Unbounded, tokenisation would starve the event loop of cores and of the GIL. No key takes the last place.
        num_each = max(1, num_cpus() // 2)
        self.tokenising = Places(num_each + 1, num_each)
        self._has_slow_rules = False
        """Whether a short text took long: then no text is tokenised outside a thread."""
        self.tokenising_long = Places(1)
        """Texts of over ``LONG_BYTES``, which may take seconds each, wait for each other alone."""

    @property
    def image_text(self) -> ImageText | None:
        """How the model's prompts have images; ``None`` if it takes none."""
        return self.images.image_text if self.engine.info.num_image_slots else None

    @property
    def room(self) -> int:
        """Most unfinished sequences, as long as a single API key has all of them."""
        return self.engine.info.max_num_seqs + self.max_num_queued_reqs

    def has_room(self, caller: Caller, count: int = 1) -> bool:
        """Whether there is room for ``count`` more sequences of this caller."""
        if self.engine.num_live + self._reserved.total() + count <= self.room:
            return True
        return has_share(self.engine.live_owners + self._reserved, caller.name, count, self.room)

    def check_room(self, caller: Caller, count: int = 1) -> None:
        """Raise ``QueueFull`` unless there is room for ``count`` more sequences of this caller."""
        if not self.has_room(caller, count):
            raise QueueFull(
                f"The queue is full: {self.room} requests are unfinished, and this API key has its share of them. "
                "Try again shortly.",
                retry_after=RETRY_AFTER_SECONDS,
            )

    async def admit(
        self, client_request: ClientRequest, begin: Callable[[Generation], Generation] | None = None
    ) -> Generation:
        """Validate a request and submit it to the engine. Raises ``RequestError``; nothing has been started then.

        ``begin`` gets the generation instead of the engine, and returns the one to use: what ``submit`` does, unless it
        raises ``RequestError``.
        """
        check_task(client_request.task, self.engine.info)
        count = len(client_request.prompts) * client_request.params.n
        if count > self.room:
            message = f"The request asks for {count} texts at once; this server has room for {self.room}."
            raise InvalidParameter(client_request.prompt_field, message)
        arrival = asyncio.get_running_loop().time()
        timeout = min((given for given in (client_request.timeout, self._timeout) if given is not None), default=None)
        deadline = None if timeout is None else arrival + timeout
        with self.reserved(client_request.caller, count):
            client_request.caller.account.admit()
            try:
                async with asyncio.timeout_at(deadline):
                    images = await self._prepared(client_request)
                    prompts_and_limits = await self._encode_all(client_request, images)
                    check_params(client_request.params, self.engine.info)
                    banned = await self._banned_sequences(client_request)
                    client_request = await self._with_grammar(client_request, prompts_and_limits[0][0])
            except TimeoutError:
                raise DeadlineExceeded(timeout or 0.0) from None
            generation = self._start(client_request, prompts_and_limits, banned, begin or self.submit)
        if deadline is not None:
            generation.expire_at(deadline, DeadlineExceeded(timeout or 0.0))
        return generation

    async def rendered(self, client_request: ClientRequest) -> list[tuple[Prompt, int]]:
        """What ``admit`` would submit: each prompt with its ``max_tokens``. Raises ``RequestError``."""
        with self.reserved(client_request.caller):
            prompts_and_limits = await self._encode_all(client_request, await self._prepared(client_request))
        check_params(client_request.params, self.engine.info)
        return prompts_and_limits

    async def _prepared(self, client_request: ClientRequest) -> list[PreparedMedia]:
        """The images, videos and audio of the prompt."""
        parts = images_of(client_request.prompts[0]) if client_request.prompts else []
        if not parts:
            return []
        return await self.images.prepare(parts, client_request.caller.name, client_request.read_file)

    async def _with_grammar(self, client_request: ClientRequest, prompt: Prompt) -> ClientRequest:
        """``client_request`` with its grammar in ``params``, which is tried without blocking the event loop."""
        if client_request.grammar is None:
            return client_request
        try:
            text = client_request.grammar(prompt.text or "")
            form, weakened = await self.grammars.try_grammar(text, client_request.caller.name)
        except (FormError, GrammarRefused) as error:
            message = f"'{client_request.grammar_field}' {str(error).rstrip('.')}."
            raise InvalidParameter(client_request.grammar_field, message) from None
        if weakened:
            client_request.report(weakened)
        return dataclasses.replace(client_request, params=msgspec.structs.replace(client_request.params, grammar=form))

    async def _banned_sequences(self, client_request: ClientRequest) -> Sequences:
        """Token sequences of ``bad_words``. Raises ``InvalidParameter`` if no token remains allowed."""
        banned: Sequences = ()
        params = client_request.params
        if params.bad_words:
            assert self.tokenizer is not None, "bad_words requires a tokenizer"
            async with self.tokenising.place(client_request.caller.name):
                banned = await asyncio.to_thread(banned_sequences, params.bad_words, self.tokenizer)
        check_something_is_left(
            params, banned, {*end_tokens(params, self.tokenizer, self.engine.info), *params.stop_token_ids}
        )
        return banned

    def _vocabulary(self) -> PackedVocabulary:
        assert self.tokenizer is not None, "a grammar requires a tokenizer"
        _, special_ids, eos_ids, _ = self.tokenizer.vocabulary(self.engine.info.eos_token_ids)
        return PackedVocabulary(self.tokenizer.packed_tokens, special_ids, eos_ids)

    @contextlib.contextmanager
    def reserved(self, caller: Caller, count: int = 1) -> Iterator[None]:
        """Reserve ``count`` places from the room check until submission. Raises ``QueueFull``."""
        self.check_room(caller, count)
        self._reserved[caller.name] += count
        try:
            yield
        finally:
            self._reserved[caller.name] -= count
            if not self._reserved[caller.name]:
                del self._reserved[caller.name]

    def submit(self, generation: Generation) -> Generation:
        """Give all requests of a generation to the engine."""
        for choice in generation.choices:
            self.engine.add(choice.request, choice)
        return generation

    def _start(
        self,
        client_request: ClientRequest,
        prompts: list[tuple[Prompt, int]],
        banned: Sequences,
        begin: Callable[[Generation], Generation],
    ) -> Generation:
        generation = Generation(self.engine, client_request.caller.account, self.engine.weight_version)
        adapters, adapter, salt = self.engine.adapters, "", client_request.cache_salt
        if adapters.is_enabled:
            adapters.check(client_request.model)
            adapter = adapters.alias(client_request.model)
            salt = adapters.salted(client_request.model, salt)
        arrival = time.monotonic()
        for prompt, max_tokens in prompts:
            thinking = self._thinking_budget(client_request, prompt)
            seed = self._seed if client_request.params.seed is None else client_request.params.seed
            if seed is None:
                seed = int.from_bytes(os.urandom(8), "little")
            for index in range(client_request.params.n):
                request = Request(
                    id=self.engine.next_id(),
                    prompt_tokens=prompt.tokens,
                    params=client_request.params,
                    max_tokens=max_tokens,
                    seed=choice_key(seed, index),
                    eos_token_ids=end_tokens(client_request.params, self.tokenizer, self.engine.info),
                    banned_sequences=banned,
                    thinking=thinking,
                    priority=client_request.priority,
                    arrival=arrival,
                    cache_salt=salt,
                    adapter=adapter,
                    tenant=client_request.tenant,
                    ttft_target=client_request.ttft_target,
                    tpot_target=client_request.tpot_target,
                    session=client_request.session,
                    cache_ttl=client_request.cache_ttl,
                    task=client_request.task,
                    second_start=prompt.second_start,
                    owner=client_request.caller.name,
                    images=prompt.images,
                    transfer=client_request.transfer,
                    routes=client_request.routes,
                )
                shown, marks = client_request.shown_ids, client_request.answer_marks
                generation.add(prompt, request, self.tokenizer, shown, marks)
        try:
            for choice in generation.choices:
                self.engine.timelines.own(choice.request.id, client_request.caller.name, client_request.session)
            generation = begin(generation)
        except BaseException:
            generation.close()
            raise
        self.engine.metrics.observe_choices(client_request.params.n)
        client_request.caller.account.charge(sum(len(prompt.tokens) for prompt, _ in prompts))
        return generation

    def _thinking_budget(self, client_request: ClientRequest, prompt: Prompt) -> ThinkingBudget | None:
        budget, format = client_request.params.thinking_token_budget, client_request.message_format
        if budget is None or format is None or self.tokenizer is None:
            return None
        marks = client_request.answer_marks
        text = self.tokenizer.decode(prompt.tokens, False) if prompt.text is None else prompt.text
        return format.thinking_budget(budget, text, self.tokenizer.encode_mark, marks is not None and marks.is_begun)

    # --- prompts ---

    async def _encode_all(
        self, client_request: ClientRequest, images: Sequence[PreparedMedia] = ()
    ) -> list[tuple[Prompt, int]]:
        """Each prompt with its ``max_tokens``; stops at the first prompt that does not fit."""

        sources, found = list(client_request.prompts), list[tuple[Prompt, int]]()

        def encode_all(may_be_long: bool = True) -> bool:
            """Returns whether all are encoded; without ``may_be_long``, it stops before a long text."""
            for source in sources[len(found) :]:
                size = _size(source)
                if callable(source):
                    rendered = source()
                    source = sources[len(found)] = repeat(rendered).__next__  # as it is rendered once
                    size = len(rendered)
                if size > LONG_BYTES and not may_be_long:
                    return False
                prompt = self._encode(source, client_request.prompt_field, client_request.add_special_tokens, images)
                found.append((prompt, self.max_tokens(client_request, prompt)))
            return True

        is_slow = any(callable(source) for source in sources)
        if not (is_slow or self._has_slow_rules) and sum(map(_size, sources)) <= THREAD_BYTES:
            started = time.thread_time()
            try:
                encode_all()
            finally:
                self._has_slow_rules = time.thread_time() - started > SLOW_SECONDS
            return found
        async with self.tokenising.place(client_request.caller.name):
            is_done = await asyncio.to_thread(encode_all, may_be_long=False)
        if not is_done:
            async with self.tokenising_long.place(client_request.caller.name):
                await asyncio.to_thread(encode_all)
        return found

    async def encode(
        self,
        source: PromptSource,
        field: str,
        add_special_tokens: bool,
        caller: Caller,
        read_file: ReadFile | None = None,
    ) -> Prompt:
        """Tokenise and validate one prompt. Raises ``QueueFull``, or ``RequestError`` about ``field``."""
        with self.reserved(caller):
            parts = images_of(source)
            images = await self.images.prepare(parts, caller.name, read_file) if parts else []
            async with self.tokenising.place(caller.name):
                return await asyncio.to_thread(self._encode, source, field, add_special_tokens, images)

    def _encode(
        self, source: PromptSource, field: str, adds_special: bool, images: Sequence[PreparedMedia] = ()
    ) -> Prompt:
        if isinstance(source, list):
            check_prompt(source, field, self.engine.info)
            return Prompt(source, None)
        if self.tokenizer is None:
            message = f"This model has no tokenizer: '{field}' must be given as token ids, to /v1/completions."
            raise InvalidParameter(field, message)
        if isinstance(source, ShortenedText):
            if not any(source.texts):
                raise InvalidParameter(field, f"'{field}' must not be empty.")
            most = min(source.max_tokens, self.engine.info.max_model_len)
            tokens, second_start = self.tokenizer.encode_shortened(source.texts, most, source.side, adds_special)
            return Prompt(tokens, None, second_start if len(source.texts) == 2 else None)
        if isinstance(source, tuple):
            for text in source:
                self._check_bytes(text, field)
            tokens, second_start = self.tokenizer.encode_pair(*source)
            return Prompt(tokens, None, second_start)
        prompt = source() if callable(source) else ChatPrompt(source, source)
        prompt, of_prompt = read_by_model(prompt, dict(enumerate(images))) if images else (prompt, [])
        self._check_bytes(prompt.text, field)
        tokens = prompt.encode(self.tokenizer, adds_special)
        if not tokens:
            raise InvalidParameter(field, f"'{field}' must not be empty.")
        if not of_prompt:
            return Prompt(tokens, prompt.seen)
        tokens, inputs = self.images.placed(tokens, of_prompt)
        return Prompt(tokens, prompt.seen, images=inputs)

    def _check_bytes(self, text: str, field: str) -> None:
        """Reject, before tokenisation, text whose bytes cannot fit the context under any tokenisation, or whose
        beginning does not fit."""
        assert self.tokenizer is not None
        limit = self.engine.info.max_model_len
        num_bytes = len(text.encode())
        if num_bytes > limit * self.tokenizer.longest_token_bytes or self.tokenizer.exceeds(text, limit):
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. However, your {field} has {num_bytes} bytes, "
                f"which cannot fit. Please reduce the length of the {field}.",
                param=field,
            )

    def max_tokens(self, client_request: ClientRequest, prompt: Prompt) -> int:
        """The most output tokens for ``prompt``. Raises ``ContextLengthExceeded``."""
        return resolve_max_tokens(
            client_request.params,
            len(prompt.tokens),
            self.engine.info.max_model_len,
            field=client_request.prompt_field,
            default=client_request.default_max_tokens,
        )


def images_of(source: PromptSource) -> Sequence[Part]:
    """The parts of a prompt that are images, videos or audio, and where each is in the request."""
    found: Sequence[Part] = getattr(source, "images", ())
    return found


def _size(source: PromptSource) -> int:
    """Approximate tokenisation cost in bytes; token ids, which are only validated, count less."""
    if isinstance(source, tuple | ShortenedText):
        return sum(map(len, source if isinstance(source, tuple) else source.texts))
    if isinstance(source, list):
        return len(source) * THREAD_BYTES // THREAD_TOKENS
    return len(source) if isinstance(source, str) else 0
