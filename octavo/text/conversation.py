"""A conversation as a prompt: what a model's chat template makes of a client's messages.

Templates differ in what they accept. A history that a template refuses is rewritten step by step, until it accepts it:
the same words, in a form that it knows.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import InvalidParameter
from octavo.text import reasoning
from octavo.text.chat_messages import (
    ImageMarks,
    Message,
    WriteCalls,
    joined,
    normalise_messages,
    result_in_text,
    with_calls_in_text,
    with_tools_told,
)
from octavo.text.chat_template import ChatTemplate, TemplateRefusal, check_variables
from octavo.text.control_tokens import ControlTokens
from octavo.text.reasoning import Thinking
from octavo.text.tokenizer import Tokenizer

MAX_REWRITTEN_BYTES = 16 << 20
"""Of a conversation that is rewritten where a template refuses it: all renderings of one take about a second. What it
is must not depend on how long they take here, or the same conversation would be refused now and then."""
MESSAGE_BYTES = 2 << 10
"""To render one more message takes as long as so many bytes of text."""
ID_LENGTH = 9
"""Of a call's id, made of letters and digits: what Mistral's templates accept."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation; its length is that of its text."""

    text: str
    seen: str
    """``text`` for the reader of the answer: up to the mark that opens the reasoning which the answer continues."""
    guarded: tuple[ControlTokens, str, str] | None = None
    """Where a text of the client spells control tokens, which become text: what encodes it, the text with a barrier in
    these, and the barrier."""
    images: tuple[int, ...] = ()
    """The number of each image, video and audio of the conversation, in the order of their places in the text."""
    clips: Mapping[int, str] = field(default_factory=dict)
    """What stands for a video or audio until it is known what the model reads in its place, by number."""

    def __len__(self) -> int:
        return len(self.text)

    def with_clips(self, written: Mapping[int, str]) -> ChatPrompt:
        """The prompt with what the model reads in place of each video and audio."""

        def filled(text: str) -> str:
            for number, mark in self.clips.items():
                text = text.replace(mark, written[number])
            return text

        guarded = self.guarded and (self.guarded[0], filled(self.guarded[1]), self.guarded[2])
        return ChatPrompt(filled(self.text), filled(self.seen), guarded, self.images)

    def followed_by(self, text: str) -> ChatPrompt:
        """The prompt with the beginning of an answer, which is no text of a client."""
        guarded = self.guarded and (self.guarded[0], self.guarded[1] + text, self.guarded[2])
        return dataclasses.replace(self, text=self.text + text, seen=self.seen + text, guarded=guarded)

    def encode(self, tokenizer: Tokenizer, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Raises ``InvalidParameter`` as ``Tokenizer.encode`` does."""
        if self.guarded is None:
            return tokenizer.encode(self.text, add_special_tokens)
        controls, text, barrier = self.guarded
        return controls.encode(text, barrier, add_special_tokens)


@dataclass(frozen=True)
class ImageText:
    """How a model's prompts have images, videos and audio."""

    placeholder: str
    """What its chat template writes for an image; empty for a model that takes none."""
    written: str
    """What the model reads in its place, with one token for all of its embeddings."""
    alone: str
    """The same with what the chat template writes around it, for a prompt without a template."""
    video: str = ""
    """What the chat template writes for a video; empty for a model that takes none."""
    audio: str = ""

    @property
    def placeholders(self) -> dict[str, str]:
        """What the chat template writes for each kind that the model takes: "image", "video", "audio"."""
        known = {"image": self.placeholder, "video": self.video, "audio": self.audio}
        return {kind: text for kind, text in known.items() if text}


@dataclass(frozen=True)
class Conversation:
    """Messages in a client's form, and how to render them. Raises ``InvalidParameter``.

    ``continue_final_message`` makes the prompt end with the last message's content, or with its reasoning if it has no
    content, exactly as given: the answer continues it. A last message with calls is complete, so that the answer is
    the next message.
    """

    messages: Sequence[Mapping[str, Any]]
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    write_calls: WriteCalls | None = None
    """Format of tool calls as text, for a template without tool support."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    image_text: ImageText | None = None
    """``None`` for a model that takes no images: they are refused."""
    _marks: ImageMarks | None = field(init=False, default=None)
    _answer_start: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", "'continue_final_message' and 'add_generation_prompt' cannot both be true."
            )
        check_variables(self.tools, self.template_kwargs)
        marks = None if self.image_text is None else ImageMarks(_mark(), tuple(self.image_text.placeholders))
        object.__setattr__(self, "messages", normalise_messages(self.messages, images=marks))
        object.__setattr__(self, "_marks", marks if marks is not None and marks.parts else None)

    @property
    def images(self) -> list[tuple[Mapping[str, Any], str]]:
        """The parts that are images, videos or audio, and where each is in the request."""
        return [] if self._marks is None else self._marks.parts

    @property
    def _written(self) -> dict[str, str]:
        """What the template writes for each kind of media that it knows."""
        source, known = self.template.source or "", self.image_text.placeholders if self.image_text else {}
        return {kind: text for kind, text in known.items() if kind in source}

    def __call__(self) -> ChatPrompt:
        """See ``prompt``."""
        return self.prompt().followed_by(self._answer_start)

    def begun(self, text: str) -> Conversation:
        """The same, with an answer that begins with ``text``, which is none of a client."""
        found = copy.copy(self)  # which is checked already
        object.__setattr__(found, "_answer_start", text)
        return found

    def prompt(self) -> ChatPrompt:
        """Render the prompt. Runs the template, so call it in a thread."""
        controls = self.template.control_tokens
        if controls is None:
            text, seen = self._texts()
            return self._with_images(ChatPrompt(text, seen), None)
        barrier = _mark()
        guard = controls.guard(barrier)
        guarded = copy.copy(self)  # which is checked already
        object.__setattr__(guarded, "messages", guard.messages(self.messages))
        object.__setattr__(guarded, "tools", guard.value(self.tools))
        object.__setattr__(guarded, "template_kwargs", guard.value(self.template_kwargs))
        text, seen = guarded._texts()
        return guarded._with_images(ChatPrompt(text, seen), (controls, barrier))

    def _with_images(self, prompt: ChatPrompt, guarded: tuple[ControlTokens, str] | None) -> ChatPrompt:
        """The prompt as the model reads it, but for marks in place of its videos and audio. A placeholder that a
        client's text spells has a barrier in it until then.

        Raises ``InvalidParameter`` if the template has not as many places for images, videos and audio as there are.
        """
        text, seen, order, clips = prompt.text, prompt.seen, tuple[int, ...](), dict[int, str]()
        if self._marks is not None and self.image_text is not None:
            order = tuple(int(number) for m in self.messages for number in self._marks.pattern.findall(_words(m)))
            clips = {number: self._marks.mark(number) for number in order if self._marks.kind(number) != "image"}
            text, num_places = self._placed(text, order)
            if num_places != len(order):
                message = f"The chat template has no place for {len(order)} images, videos or audio here."
                raise InvalidParameter("messages", message)
            seen, _ = self._placed(seen, order)
        if guarded is None or guarded[1] not in text:
            return ChatPrompt(text, seen, images=order, clips=clips)
        controls, barrier = guarded
        plain, shown = text.replace(barrier, ""), seen.replace(barrier, "")
        return ChatPrompt(plain, shown, (controls, text, barrier), order, clips)

    def _placed(self, text: str, order: tuple[int, ...]) -> tuple[str, int]:
        """A rendered text with what the model reads in the places of images, and the marks of videos and audio in
        theirs; and the number of places, -1 if one is not for what comes next in ``order``."""
        marks, form = self._marks, self.image_text
        assert marks is not None
        assert form is not None
        written = {**self._written, "image": form.placeholder}
        places = "|".join([*map(re.escape, filter(None, written.values())), marks.pattern.pattern])
        pieces, end, num_places = list[str](), 0, 0
        for place in re.finditer(places, text):
            number = order[num_places] if num_places < len(order) else -1
            kind = marks.kind(number) if number >= 0 else ""
            if number < 0 or place[0] not in (marks.mark(number), written.get(kind)):
                return text, -1
            pieces += [text[end : place.start()], form.written if kind == "image" else marks.mark(number)]
            end, num_places = place.end(), num_places + 1
        return "".join([*pieces, text[end:]]), num_places

    def _texts(self) -> tuple[str, str]:
        """The text, and what of it the reader of the answer sees."""
        messages = [dict(message) for message in self.messages]
        last = messages[-1]
        if not self.continue_final_message or last.get("tool_calls"):
            text = self._accepted(messages, self.add_generation_prompt or self.continue_final_message)
            return text, text
        key = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
        texts = self._continued(messages, key)
        if texts is None and key == "reasoning_content":
            texts = self._continued(messages, "content")  # the template leaves reasoning out
        if texts is None:
            message = "The chat template leaves out the final message, or repeats it, so it cannot be continued."
            raise InvalidParameter("continue_final_message", message)
        return texts

    def _continued(self, messages: list[Message], key: str) -> tuple[str, str] | None:
        """The texts of the prompt that ends with the last message's text under ``key``; ``None`` if it has no place.

        Marks are rendered with the text, made of digits, which all filters keep. A template that changes the text
        has it replaced by a mark.
        """
        begin, end = _mark(), _mark()
        thinking = reasoning.thinking_shown(self.template.source or "") or reasoning.THINK
        text = messages[-1][key] or ""
        rendered = self._accepted([*messages[:-1], _with_text(messages[-1], key, begin + text + end)], False)
        if rendered.count(end) == 1:
            before = rendered[: rendered.index(end)].replace(begin, "")
            if before.endswith(text):
                return _ending_with(text, before[: len(before) - len(text)], thinking)
        rendered = self._accepted([*messages[:-1], _with_text(messages[-1], key, end)], False)
        return _ending_with(text, rendered[: rendered.index(end)], thinking) if rendered.count(end) == 1 else None

    def _accepted(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The rendering of ``messages``, rewritten as little as the template requires."""
        if self.write_calls is not None:
            messages = with_calls_in_text(messages, self.write_calls)
        elif _takes_one_call(self.template.source or ""):
            messages = _with_single_calls(messages)
        refusal: TemplateRefusal | None = None
        with_loss: str | None = None
        for version in _versions(messages, self.template.source or ""):
            try:
                text = self._rendered(version, add_generation_prompt)
            except TemplateRefusal as error:
                refusal = refusal or error
                continue
            if not _leaves_out_system(version, text):
                return text
            with_loss = with_loss or text
        if with_loss is not None:
            return with_loss
        assert refusal is not None
        raise refusal

    def _in_parts(self, messages: list[Message]) -> list[Message]:
        """``messages`` with media as templates read them: parts, of all messages where a template knows no strings."""
        source, marks = self.template.source or "", self._marks
        if marks is None or not self._written:
            return messages
        takes_strings = "is string" in source or "is not iterable" in source
        return [
            {**message, "content": marks.in_parts(_words(message), {"image", *self._written})}
            if message.get("content") and (not takes_strings or marks.pattern.search(_words(message)))
            else message
            for message in messages
        ]

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        messages = self._in_parts(messages)

        def render(messages: list[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
            return self.template.render(
                messages, add_generation_prompt, tools=tools, template_kwargs=self.template_kwargs
            )

        if self.write_calls is None:
            return render(messages, self.tools)
        tools = self.tools or ()
        try:
            return render(with_tools_told(messages, tools, self.write_calls), None)
        except TemplateRefusal:
            if not tools or any(message["role"] == "system" for message in messages):
                raise
            # The template may reject only the added system message.
            return render(with_tools_told(messages, tools, self.write_calls, has_system=False), None)


def _words(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _mark() -> str:
    """A text that no client can foresee, and that every filter of a template keeps."""
    return f"{secrets.randbelow(10**18):018}"


def _with_text(message: Message, key: str, text: str) -> Message:
    return {**message, "thinking": text, key: text} if key == "reasoning_content" else {**message, key: text}


def _ending_with(text: str, before: str, thinking: Thinking) -> tuple[str, str]:
    """The texts of a prompt that ends with ``text``, which the answer continues; it may open or close reasoning."""
    whole = before + text
    stripped = before.rstrip()
    start = len(stripped) - len(thinking.opens) if stripped.endswith(thinking.opens) else len(before)
    opens, closes = whole.rfind(thinking.opens, start), whole.rfind(thinking.closes, start)
    return whole, whole[: opens + len(thinking.opens)] if opens > closes else whole


def _leaves_out_system(messages: Sequence[Message], text: str) -> bool:
    """Whether ``text`` lacks a system message that is not the first message, of which some templates know nothing."""
    place = 0
    for message in messages[1:]:
        if message["role"] == "system":
            place = text.find(message["content"].strip(), place)
            if place < 0:
                return True
    return False


# --- rewriting ---


def _takes_one_call(source: str) -> bool:
    """Whether a template writes, or accepts, only the first call of a message."""
    return "tool_calls[0]" in source and not re.search(r"\bin +message(\.|\[['\"])tool_calls", source)


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, before its result."""
    found: list[Message] = []
    waiting: deque[Message] = deque()
    """Calls after the first of the last message with calls."""
    for message in messages:
        if message["role"] == "tool":
            if waiting and found[-1]["role"] == "tool":
                found.append(waiting.popleft())
        else:
            found += waiting
            waiting.clear()
        calls = message.get("tool_calls") or []
        found.append({**message, "tool_calls": calls[:1]} if calls else message)
        if len(calls) > 1:
            waiting.extend({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls[1:])
    return [*found, *waiting]


def _with_object_arguments(messages: Sequence[Message], source: str) -> list[Message]:
    """Arguments that are no object in an object."""

    def as_object(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            return call
        return {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}

    return [
        {**message, "tool_calls": [as_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_short_ids(messages: Sequence[Message], source: str) -> list[Message]:
    """Ids of ``ID_LENGTH`` letters and digits."""
    short: dict[Any, str] = {}

    def shortened(id: Any) -> str:
        if isinstance(id, str) and len(id) == ID_LENGTH and id.isascii() and id.isalnum():
            return id
        return short.setdefault(id, f"c{len(short):0{ID_LENGTH - 1}}")

    rewritten = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": shortened(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": shortened(message.get("tool_call_id"))}
        rewritten.append(message)
    return rewritten


def _with_one_leading_system(messages: Sequence[Message], source: str) -> list[Message]:
    """The leading system messages as one."""
    number = _num_leading_systems(messages)
    if number < 2:
        return list(messages)
    content = joined(*(message["content"] for message in messages[:number]))
    return [{**messages[0], "content": content}, *messages[number:]]


def _with_content_in_thought(messages: Sequence[Message], source: str) -> list[Message]:
    """Content next to calls as part of the reasoning, for templates like gpt-oss's, which refuse both together."""
    if not re.search(r"message(\.|\[['\"])thinking", source):
        return list(messages)
    rewritten = []
    for message in messages:
        if message.get("tool_calls") and message.get("content") and message.get("reasoning_content"):
            thought = joined(message["reasoning_content"], message["content"])
            message = {**message, "content": None, "reasoning_content": thought, "thinking": thought}
        rewritten.append(message)
    return rewritten


def _with_later_systems_as_user(messages: Sequence[Message], source: str) -> list[Message]:
    """System messages within the conversation as text of the user."""
    number = _num_leading_systems(messages)
    return [*messages[:number], *_with_systems_as_user(messages[number:], source)]


def _with_systems_as_user(messages: Sequence[Message], source: str) -> list[Message]:
    """System messages as text of the user's next message, or of one of their own where none follows directly."""
    rewritten: list[Message] = []
    texts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            texts.append(message["content"])
        elif not texts:
            rewritten.append(message)
        elif message["role"] == "user":
            rewritten.append({**message, "content": joined(*texts, message["content"])})
            texts = []
        else:
            rewritten += [{"role": "user", "content": joined(*texts)}, message]
            texts = []
    return [*rewritten, {"role": "user", "content": joined(*texts)}] if texts else rewritten


def _with_strays_as_user(messages: Sequence[Message], source: str) -> list[Message]:
    """Results that follow no call as text of the user."""
    rewritten: list[Message] = []
    follows_call = False
    for message in messages:
        if message["role"] == "tool" and not follows_call:
            message = {"role": "user", "content": result_in_text(message["content"])}
        follows_call = bool(message.get("tool_calls")) or (message["role"] == "tool" and follows_call)
        rewritten.append(message)
    return rewritten


def _with_alternating_turns(messages: Sequence[Message], source: str) -> list[Message]:
    """Messages of the user and of the assistant in turns, the user's first: neighbours of one role are joined."""
    number = _num_leading_systems(messages)
    if number < len(messages) and messages[number]["role"] == "assistant":
        messages = [*messages[:number], {"role": "user", "content": ""}, *messages[number:]]
    turns: list[tuple[Message, list[str | None]]] = []
    for message in messages:
        last, texts = turns[-1] if turns else ({"role": None}, [])
        both_call = message.get("tool_calls") and last.get("tool_calls")
        if message["role"] == last["role"] != "tool" and not both_call:
            last |= message
            texts.append(message["content"])
        else:
            turns.append((dict(message), [message["content"]]))
    return [{**turn, "content": texts[0] if len(texts) == 1 else joined(*texts)} for turn, texts in turns]


def _num_leading_systems(messages: Sequence[Message]) -> int:
    places = (place for place, message in enumerate(messages) if message["role"] != "system")
    return next(places, len(messages))


def _versions(messages: list[Message], source: str) -> Iterator[list[Message]]:
    """``messages`` as they are, which can be written as JSON, and then with one rewriting after the other."""
    yield messages
    if len(messages) * MESSAGE_BYTES + len(json.dumps(messages)) > MAX_REWRITTEN_BYTES:
        return
    for rewrite in _REWRITINGS:
        rewritten = rewrite(messages, source)
        if rewritten != messages:
            yield (messages := rewritten)


_REWRITINGS: tuple[Callable[[Sequence[Message], str], list[Message]], ...] = (
    _with_object_arguments,
    _with_short_ids,
    _with_one_leading_system,
    _with_content_in_thought,
    _with_later_systems_as_user,
    _with_strays_as_user,
    _with_systems_as_user,
    _with_alternating_turns,
)
"""From what a model notices least to what it notices most. Each is applied to the result of those before, so that a
conversation that grows keeps the prefix of its prompt."""
