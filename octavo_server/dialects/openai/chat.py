"""POST /v1/chat/completions: a conversation in, the assistant's next message out.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import Request

from octavo.text import reasoning
from octavo.text.chat_messages import ANSWER_REASONING_KEYS
from octavo.text.message_format import MessageFormat
from octavo.text.message_parser import Call, CallProgress, MessageParser, Piece, Text
from octavo.text.tokenizer import Tokenizer
from octavo_server.dialects.openai import kv_transfer
from octavo_server.dialects.openai.answer_parts import (
    ChunkFrame,
    TokenNames,
    chat_logprobs,
    identity_of,
    prompt_logprobs,
    usage,
)
from octavo_server.dialects.openai.chat_body import ChatBody, client_request, decoder, tools_of, without_effect
from octavo_server.dialects.openai.constraints import (
    ToolUse,
    arguments_of,
    in_older_words,
    input_of,
)
from octavo_server.generation import ChoiceUpdate, GeneratedChoice, Generation
from octavo_server.http.response import encode, encode_line
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices

_OPENS = b'"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
_GOES_ON = b'},"logprobs":null,"finish_reason":null'
_ENDS = b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b'


async def _translate(body: ChatBody, services: ModelServices, request: Request) -> Submission:
    is_older = bool(body.functions or body.function_call)
    in_words: Callable[[], AbstractContextManager[None]] = in_older_words if is_older else nullcontext
    with in_words():
        tools = tools_of(body, services)
        if tools is not None:
            services.report(request, tools.unbound)
        asked = client_request(body, services, request, tools)
    return Submission(
        request=asked,
        answer=lambda generation: ChatAnswer(services, body, generation, tools),
        is_streamed=body.stream,
        is_large=body.logprobs or body.prompt_logprobs is not None,
        is_resumable=True,
        in_words=in_words,
    )


class ChatAnswer:
    """Renders the choices of one request, unstreamed or as chunks."""

    def __init__(self, services: ModelServices, body: ChatBody, generation: Generation, tools: ToolUse | None) -> None:
        choices = generation.choices
        self.body = body
        self._services = services
        format, is_begun = services.message_format, body.continue_final_message
        self._messages = [
            chat_message(format, tools, choice.prompt.text or "", is_begun, body.stream) for choice in choices
        ]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.identity = identity_of(generation, "chatcmpl", kind, services.answering_name(body.model))
        self.id = self.identity.id
        self._names = TokenNames(services.tokenizer, body.return_tokens_as_token_ids)
        self._has_details = body.logprobs or body.return_token_ids
        self._frame = ChunkFrame(self.identity, choices, body.includes_usage, body.has_continuous_usage)
        self._starts = [self._frame.start + b'"index":%d,"delta":{"content":' % choice.index for choice in choices]
        self._empty_starts = [self._frame.start + b'"index":%d,"delta":{' % choice.index for choice in choices]
        self._unopened = set(range(len(choices)))

    # --- unstreamed ---

    def unstreamed(self, choices: list[GeneratedChoice]) -> dict[str, Any]:
        result = {
            **self.identity.as_dict(),
            "choices": [self._unstreamed_choice(choice) for choice in choices],
        }
        result["usage"] = usage(choices)
        result |= kv_transfer.answered(choices)
        if self.body.prompt_logprobs is not None:
            entries = choices[0].prompt_logprobs
            result["prompt_logprobs"] = prompt_logprobs(entries, self._names, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            result["prompt_token_ids"] = choices[0].prompt.tokens
        return result

    def _unstreamed_choice(self, choice: GeneratedChoice) -> dict[str, Any]:
        update, message = choice.take(), self._messages[choice.index]
        rendered: dict[str, Any] = {"role": "assistant", "content": update.text, "refusal": None}
        reason: str | None = choice.finish_reason
        if message is not None:
            rendered = message.unstreamed(message.pieces(update.text, reason))
            reason = message.finish_reason(reason)
            message.count_reasoning(choice, self._services.tokenizer)
        return {
            "index": choice.index,
            "message": rendered,
            **self._details(update),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }

    def _details(self, update: ChoiceUpdate) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            details["logprobs"] = chat_logprobs(update.logprobs, self._names, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            details["token_ids"] = update.tokens
        return details

    # --- streamed ---

    def frames(self, choice: GeneratedChoice) -> bytes:
        """The chunks of a choice's new output: the role in the first, the finish reason in the last."""
        data = b""
        if choice.index in self._unopened:
            self._unopened.discard(choice.index)
            data = self._frame.start + _OPENS % choice.index + self._prompt_ids(choice) + self._frame.end()
        if self._messages[choice.index] is None and not self._has_details:
            return data + self._text_frame(choice, choice.take_text())
        return data + self._delta_frames(choice, choice.take())

    def _text_frame(self, choice: GeneratedChoice, text: str) -> bytes:
        """The chunk of a message without reasoning or tool calls."""
        reason = choice.finish_reason
        if reason is None:
            if not text:
                return b""
            return self._starts[choice.index] + encode_line(text) + _GOES_ON + self._frame.end()
        start = self._starts[choice.index] + encode_line(text) if text else self._empty_starts[choice.index]
        return start + _ENDS % (encode(reason), encode_line(choice.stop_reason)) + self._frame.end()

    def _delta_frames(self, choice: GeneratedChoice, update: ChoiceUpdate) -> bytes:
        """Chunks with reasoning, tool calls or token details; the details are in the first of them."""
        message, reason = self._messages[choice.index], choice.finish_reason
        if message is not None:
            deltas = list(message.deltas(message.pieces(update.text, reason)))
        else:
            deltas = [{"content": update.text}] if update.text or (self._has_details and update.tokens) else []
        if self._has_details and update.tokens and not deltas:
            deltas.append({})
        end: dict[str, Any] = {}
        if reason is not None:
            if not deltas or "content" not in deltas[-1]:
                deltas.append({})  # after a tool call or reasoning, clients expect the end in a separate chunk
            end = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            if message is not None:
                message.count_reasoning(choice, self._services.tokenizer)
                end["finish_reason"] = message.finish_reason(reason)
        empty = {"logprobs": None, "finish_reason": None}
        chunks: list[dict[str, Any]] = [{"index": choice.index, "delta": delta, **empty} for delta in deltas]
        if chunks and update.tokens:
            chunks[0] |= self._details(update)
        if chunks:
            chunks[-1] |= end
        return b"".join([self._frame.start + encode_line(chunk)[1:-1] + self._frame.end() for chunk in chunks])

    def _prompt_ids(self, choice: GeneratedChoice) -> bytes:
        return b',"prompt_token_ids":' + encode(choice.prompt.tokens) if self.body.return_token_ids else b""

    def last_frames(self) -> bytes:
        return self._frame.usage_chunk()


CHAT = Dialect(decoder, _translate, without_effect)
ENDPOINTS = [CHAT.endpoint("/v1/chat/completions", "Answer a conversation", "create_chat_completion")]


class ChatMessage:
    """Parses one choice's text into a message."""

    def __init__(
        self, parser: MessageParser, new_id: Callable[[], str], tools: ToolUse | None, is_streamed: bool = True
    ) -> None:
        """A message that is not streamed is read with all of its text at hand; see ``after_thinking``."""
        self._parser = parser
        self._is_streamed = is_streamed
        self._new_id = new_id
        self._tools = tools
        self._num_calls = 0
        self._input: list[str] | None = None if tools is None or tools.content_as_input is None else []
        """Content so far, if it is the input of a custom tool."""
        self._custom_names = frozenset[str]() if tools is None else tools.custom_names
        self._is_call_open = False
        """Whether the stream has the beginning of a call."""
        self.reasoning = ""
        """All reasoning text so far."""
        self.places: list[tuple[int, int]] = []
        """Where the texts of the last pieces begin and end in the complete text."""

    def pieces(self, text: str, finish_reason: str | None) -> list[Piece]:
        """Pieces that became certain with ``text``; only the first call unless parallel calls are allowed.

        ``finish_reason`` is ``None`` while more text may come.
        """
        is_last, is_cut = finish_reason is not None, finish_reason == "length"
        found: list[Piece] = []
        self.places = []
        if self._is_streamed or not is_last:
            found, self.places = self._parser.push(text), self._parser.places
        if is_last:
            last = self._parser.finish(is_cut, "" if self._is_streamed else text)
            self.places += self._parser.places
            found += self._without_markup(last) if is_cut and self._input is None else last
        if self._input is not None:
            found = self._with_input(found, self._input, finish_reason)
        kept: list[Piece] = []
        for piece in found:
            if isinstance(piece, CallProgress) and piece.name in self._custom_names:
                continue  # its text is within JSON, and is told once that is complete
            if isinstance(piece, Call | CallProgress):
                if self._num_calls and self._tools is not None and not self._tools.is_parallel:
                    continue
                self._num_calls += isinstance(piece, Call)
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            kept.append(piece)
        return kept

    def _with_input(self, pieces: list[Piece], text: list[str], finish_reason: str | None) -> list[Piece]:
        """``pieces`` without the content, which is added to ``text``; at the end a call with it."""
        assert self._tools is not None
        text += [piece.text for piece in pieces if isinstance(piece, Text) and piece.kind == "content"]
        kept: list[Piece] = [piece for piece in pieces if isinstance(piece, Text) and piece.kind == "reasoning"]
        if finish_reason in ("stop", "length"):
            kept.append(Call(self._tools.allowed[0].name, arguments_of("".join(text)), finish_reason == "length"))
        return kept

    def _without_markup(self, pieces: list[Piece]) -> list[Piece]:
        """The last pieces of a truncated message. If a call is required and there is none yet, content is the truncated
        beginning of one, before its name is complete."""
        is_missing = self._tools is not None and self._tools.must_call and not self._num_calls
        if self._tools is None or not is_missing or any(isinstance(piece, Call) for piece in pieces):
            return pieces
        kept = [piece for piece in pieces if not isinstance(piece, Text) or piece.kind != "content"]
        if len(kept) < len(pieces) and len(self._tools.allowed) == 1:
            kept.append(Call(self._tools.allowed[0].name, "", is_cut=True))
        return kept

    def deltas(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Stream deltas; a call's id and name precede its arguments."""
        index = self._num_calls - sum(isinstance(piece, Call) for piece in pieces)
        for piece in pieces:
            if isinstance(piece, Call | CallProgress):
                kind, key, written = self._written(piece)
                if not self._is_call_open:
                    opened = {"index": index, "id": self._new_id(), "type": kind, kind: {"name": piece.name, key: ""}}
                    yield self._told([opened])
                if written and not (self._is_call_open and isinstance(piece, Call)):
                    yield self._told([{"index": index, kind: {key: written}}])
                self._is_call_open = isinstance(piece, CallProgress)
                index += not self._is_call_open
            elif piece.kind == "reasoning":
                yield dict.fromkeys(ANSWER_REASONING_KEYS, piece.text)
            else:
                yield {"content": piece.text}

    def unstreamed(self, pieces: list[Piece]) -> dict[str, Any]:
        """The complete message."""
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text) and piece.kind == "content")
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            told: list[dict[str, Any]] = []
            for call in calls:
                kind, key, written = self._written(call)
                told.append({"id": self._new_id(), "type": kind, kind: {"name": call.name, key: written}})
            message |= self._told(told)
        if self.reasoning:
            message |= dict.fromkeys(ANSWER_REASONING_KEYS, self.reasoning)
        return message

    def _told(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The member of a message, or of a delta, with these calls."""
        is_older = self._tools is not None and self._tools.is_older
        return {"function_call": calls[0]["function"]} if is_older else {"tool_calls": calls}

    def _written(self, call: Call | CallProgress) -> tuple[str, str, str]:
        """The type of a call, the member that says with what it calls, and that member's text."""
        if isinstance(call, CallProgress):
            return "function", "arguments", call.text
        if call.name in self._custom_names:
            return "custom", "input", input_of(call.arguments)
        return "function", "arguments", call.arguments

    def count_reasoning(self, choice: GeneratedChoice, tokenizer: Tokenizer | None) -> None:
        """Count the reasoning tokens of a finished choice from the reasoning text, without its delimiters."""
        if self.reasoning and tokenizer is not None:
            tokens = tokenizer.encode(self.reasoning, add_special_tokens=False)
            choice.num_reasoning_tokens = min(len(tokens), choice.num_tokens)

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` instead of ``stop`` when there are calls, unless the client named the function."""
        tools = self._tools
        if reason != "stop" or not self._num_calls or (tools is not None and tools.mode == "named"):
            return reason
        return "function_call" if tools is not None and tools.is_older else "tool_calls"


def chat_message(
    format: MessageFormat, tools: ToolUse | None, prompt: str, is_begun: bool = False, is_streamed: bool = True
) -> ChatMessage | None:
    """A parser for the message after ``prompt``, which may end with its beginning; ``None`` when all is content."""
    is_input = tools is not None and tools.content_as_input is not None
    functions = None if tools is None or is_input else {tool.name: tool.parameters for tool in tools.allowed}
    reader = format.reader(functions, prompt, is_begun)
    if is_input:
        reader = reader or reasoning.content_only
    return None if reader is None else ChatMessage(MessageParser(reader), format.new_id, tools, is_streamed)
