"""Bring a client's chat messages into the form that chat templates expect.

A history is data: what cannot be rendered as it is becomes text, or is passed over by name, so that a conversation can
always go on. Only what a client's own API does not allow is refused, and media, without which an answer would be wrong.

For templates without tool support everything about tools becomes plain text: functions and the format of a call are
described in the system message, past calls become content of the assistant, and results messages of the user.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from octavo.errors import InvalidParameter
from octavo.grammar.forms import is_deep
from octavo.text.message_pieces import Call
from octavo.text.tool_calls.values import exact_value_of

ANSWER_REASONING_KEYS = ("reasoning_content", "reasoning")
"""Keys of the reasoning in an answer; both are sent, since clients read one or the other."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send a message's reasoning. Most templates read the first, gpt-oss's the second."""
TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""Types of parts that are text, and the key that has it."""
THOUGHT_PARTS = ("thinking", "reasoning")
MEDIA_PARTS = {
    **dict.fromkeys(("image", "image_url", "image_file", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("file", "input_file", "document"), "files"),
}
"""Types of parts that no text replaces, and what they hold."""

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of parts that are images, for models that take any."""
VIDEO_PARTS = ("video", "video_url", "input_video")
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
KINDS = {
    **dict.fromkeys(IMAGE_PARTS, "image"),
    **dict.fromkeys(VIDEO_PARTS, "video"),
    **dict.fromkeys(AUDIO_PARTS, "audio"),
}
"""What a part is, as templates name it, by its type."""

Message = dict[str, Any]


class ImageMarks:
    """Stands for images, videos and audio in the text of messages: each is a mark that no client can foresee, and its
    number."""

    def __init__(self, mark: str, takes: Sequence[str] = ("image",)) -> None:
        """``takes``: of "image", "video" and "audio" what the model takes."""
        self.pattern = re.compile(rf"{re.escape(mark)}(\d{{5}})")
        self.parts: list[tuple[Mapping[str, Any], str]] = []
        """The parts of messages that are images, videos or audio, and where each is in the request."""
        self.kinds = frozenset(type for type, kind in KINDS.items() if kind in takes)
        """Types of parts that the model takes."""
        names = ["text", *(kind if kind == "audio" else f"{kind}s" for kind in takes)]
        self.reads = f"{', '.join(names[:-1])} and {names[-1]}"
        self._mark = mark

    def add(self, part: Mapping[str, Any], where: str) -> str:
        """The mark of one more image, video or audio."""
        self.parts.append((part, where))
        return self.mark(len(self.parts) - 1)

    def mark(self, number: int) -> str:
        return f"{self._mark}{number:05}"

    def kind(self, number: int) -> str:
        """ "image", "video" or "audio"."""
        return KINDS[str(self.parts[number][0].get("type"))]

    def joined(self, texts: Sequence[str]) -> str:
        """Parts as one text: images stand next to their neighbours, between texts is a line end."""
        made = ""
        for index, text in enumerate(texts):
            is_next_to_image = index and (self.pattern.fullmatch(texts[index - 1]) or self.pattern.fullmatch(text))
            made += text if is_next_to_image or not index else f"\n{text}"
        return made

    def in_parts(self, content: str, written: Collection[str]) -> list[Message]:
        """A text with marks as parts, in the form that templates read; marks of a kind that is not among ``written``,
        which a template does not know, are text."""
        parts: list[Message] = []
        for index, piece in enumerate(self.pattern.split(content)):
            if not index % 2:
                parts += [{"type": "text", "text": piece}] if piece else []
            elif (kind := self.kind(int(piece))) in written:
                parts.append({"type": kind})
            else:
                parts.append({"type": "text", "text": self.mark(int(piece))})
        return parts


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], passed_over: list[str] | None = None, images: ImageMarks | None = None
) -> list[Message]:
    """Copies of ``messages`` in which every role is a string and every content is text.

    Parts with text are joined by newlines, as in vLLM; calls and results among the parts become members and messages
    of their own, as do the older ``function_call`` and the role ``function``. Missing content becomes empty text,
    except next to ``tool_calls``, where templates expect none. The role ``developer``, OpenAI's newer name, becomes
    ``system``, which templates know. Reasoning under any of ``REASONING_KEYS`` is set under both names that templates
    read, as in transformers. The arguments of calls are objects where they can be, else the client's text.
    Results follow in the order of their calls, with the calls' ids. Everything else is unchanged.
    With ``images`` a part that is one becomes its mark, else it is refused.
    What has no meaning here is added to ``passed_over`` by its kind, such as "messages.redacted_thinking". Raises
    ``InvalidParameter("messages", ...)``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidParameter("messages", "'messages' must be a list of at least one message.")
    names: list[str] = [] if passed_over is None else passed_over
    found: list[Message] = []
    for place, message in enumerate(messages):
        found += _Reading(f"messages[{place}]", names, images).message(message)
    return _with_results_in_order(found)


class _Reading:
    """Reads one message, which stands at ``where``."""

    def __init__(self, where: str, passed_over: list[str], images: ImageMarks | None = None) -> None:
        self._where = where
        self._images = images
        self._passed_over = passed_over
        self._thoughts: list[str] = []
        self._calls: list[Message] = []
        self._results: list[Message] = []

    def message(self, message: Any) -> list[Message]:
        """The message, after the results of tools that its content has."""
        if not isinstance(message, Mapping):
            raise InvalidParameter("messages", f"'{self._where}' must be an object with 'role' and 'content'.")
        made, role = dict(message), message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidParameter("messages", f"'{self._where}.role' must be a string such as 'user'.")
        made["role"] = role = {"developer": "system", "function": "tool"}.get(role, role)
        self._read_members(made, role)
        content = self._text(made.get("content"), f"{self._where}.content", role)
        if not content and isinstance(refusal := made.pop("refusal", None), str):
            content = refusal or content
        if self._results and not content:
            return self._results
        made["content"] = content if content is not None or self._calls else ""
        if self._calls:
            made["tool_calls"] = self._calls
        if self._thoughts:
            thought = "\n".join(self._thoughts)
            made |= {"reasoning_content": thought, "thinking": thought}
        return [*self._results, made]

    def _read_members(self, made: Message, role: str) -> None:
        """Take the reasoning and the calls out of ``made``."""
        thoughts = [(key, made.pop(key)) for key in REASONING_KEYS if key in made]
        key, thought = next(((key, thought) for key, thought in thoughts if thought), ("", ""))
        if thought:
            self._thoughts.append(_thought(thought, f"{self._where}.{key}"))
        calls, older = made.pop("tool_calls", None), made.pop("function_call", None)
        if made.get("audio"):
            self._pass_over("audio")
        made.pop("audio", None)
        if not isinstance(made.get("tool_call_id"), str | None):
            raise InvalidParameter("messages", f"'{self._where}.tool_call_id' must be a string.")
        if role != "assistant":
            for name, given in (("tool_calls", calls), ("function_call", older)):
                if given:
                    self._pass_over(name)
            return
        if calls and not isinstance(calls, list):
            raise InvalidParameter("messages", f"'{self._where}.tool_calls' must be a list.")
        self._calls += [_call(call, f"{self._where}.tool_calls[{place}]") for place, call in enumerate(calls or ())]
        if older:
            self._calls.append(_call({"function": older}, f"{self._where}.function_call"))

    def _pass_over(self, name: str) -> None:
        if (name := f"messages.{name[:40]}") not in self._passed_over:
            self._passed_over.append(name)

    def _text(self, content: Any, where: str, role: str) -> str | None:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise InvalidParameter("messages", f"'{where}' must be a string or a list of parts.")
        texts = (self._part_text(part, f"{where}[{index}]", role) for index, part in enumerate(content))
        found = [text for text in texts if text is not None]
        return "\n".join(found) if self._images is None else self._images.joined(found)

    def _part_text(self, part: Any, where: str, role: str) -> str | None:
        """The text of a part; ``None`` for one that is something else than text, or is passed over."""
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidParameter("messages", f"'{where}' must be an object with a 'type'.")
        if self._images is not None and kind in self._images.kinds:
            return self._images.add(part, where)
        if kind in MEDIA_PARTS:
            what = MEDIA_PARTS[kind]
            reads = "text" if self._images is None else self._images.reads
            message = f"'{where}' is of type '{kind}', but this model reads {reads} only: it has no part for {what}."
            raise InvalidParameter("messages", message)
        if kind in TEXT_PARTS or isinstance(part.get("text"), str):
            key = TEXT_PARTS.get(kind, "text")
            return _text_of(part.get(key), f"{where}.{key}")
        if kind in THOUGHT_PARTS and role == "assistant":
            self._thoughts.append(_thought(part.get(kind), f"{where}.{kind}"))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            self._calls.append(_call({"id": part.get("id"), "function": function}, where))
        elif kind == "tool_result" and role != "assistant":
            text = self._text(part.get("content"), f"{where}.content", "tool") or ""
            self._results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        else:
            self._pass_over(kind)
        return None


def _text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter("messages", f"'{where}' must be a string.")
    return value


def _thought(value: Any, where: str) -> str:
    """Reasoning, which some APIs divide into parts."""
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if value is None else _text_of(value, where)


def _call(call: Any, where: str) -> Message:
    """A call with an object as arguments, or with the client's text where that is none."""
    if not isinstance(call, Mapping):
        raise InvalidParameter("messages", f"'{where}' must be an object.")
    function = call.get("function")
    if isinstance(custom := call.get("custom"), Mapping) and function is None:
        call = {key: value for key, value in call.items() if key != "custom"}
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, Mapping):
        raise InvalidParameter("messages", f"'{where}' must have a 'function'.")
    if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str | None):
        raise InvalidParameter("messages", f"'{where}' must have strings as 'id' and 'function.name'.")
    arguments = _arguments(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(given: Any) -> dict[str, Any] | str:
    """Models write arguments that are cut, malformed, too deep or with numbers that JSON lacks, and clients send them
    back: these stay text."""
    if given is None or isinstance(given, dict):
        return given or {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        value = exact_value_of(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) and not is_deep(value) else text


def _with_results_in_order(messages: list[Message]) -> list[Message]:
    """``messages`` in which every call and result has an id, and results behind calls are in the order of the calls.

    Many templates tell results apart by their order alone.
    """
    taken = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    new_ids = (id for id in (f"call{number:05}" for number in itertools.count()) if id not in taken)
    ordered: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if calls := message.get("tool_calls"):
            calls = [call if call.get("id") else {**call, "id": next(new_ids)} for call in calls]
            message["tool_calls"] = calls
            end = place
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            ordered += [message, *_in_order(calls, messages[place:end], new_ids)]
            place = end
        else:
            ordered += _in_order([], [message], new_ids) if message["role"] == "tool" else [message]
    return ordered


def _in_order(calls: Sequence[Message], results: Sequence[Message], new_ids: Iterator[str]) -> list[Message]:
    """``results`` in the order of ``calls``. One without the id of a call belongs to the first call without a result,
    of the function that it names, if any. The results of no call come last."""
    owners: dict[int, int] = {}
    """Index of the call by that of its result."""
    open_calls = dict.fromkeys(range(len(calls)))
    for of_call, of_result in (
        (lambda call: call["id"], lambda result: result.get("tool_call_id")),
        (lambda call: call["function"]["name"], lambda result: result.get("name")),
        (lambda call: None, lambda result: None),
    ):
        waiting: dict[Any, list[int]] = {}
        for index in reversed(open_calls):
            waiting.setdefault(of_call(calls[index]), []).append(index)
        for place, result in enumerate(results):
            if place not in owners and (indices := waiting.get(_key(of_result(result)))):
                owners[place] = indices.pop()
                del open_calls[owners[place]]
    places = sorted(range(len(results)), key=lambda place: owners.get(place, len(calls)))
    ids = [calls[owners[place]]["id"] if place in owners else results[place].get("tool_call_id") for place in places]
    return [{**results[place], "tool_call_id": id or next(new_ids)} for place, id in zip(places, ids, strict=True)]


def _key(value: Any) -> str | None:
    return value if isinstance(value, str) else None


RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = Call("function-name", '{"argument-name": "value"}')
_INSTRUCTION = """\
You can call functions. These are available:
<tools>
{tools}
</tools>

If one of them helps with the question, reply only with a call, in this form:
{call}

If none of them helps, reply in plain text."""

WriteCalls = Callable[[Sequence[Call]], str]


def with_tools_told(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], write: WriteCalls, *, has_system: bool = True
) -> list[Message]:
    """``messages`` with a description of ``tools``; ``write`` formats the example of a call.

    Without ``has_system`` the functions are described in the user's first message, for templates that refuse a
    system message.
    """
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=listed, call=write([_EXAMPLE]))
    role = "system" if has_system else "user"
    index = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if index is None:
        return [{"role": role, "content": instruction}, *messages]
    own = messages[index]["content"]
    told = joined(own, instruction) if has_system else joined(instruction, own)
    return [*messages[:index], {**messages[index], "content": told}, *messages[index + 1 :]]


def with_calls_in_text(messages: Sequence[Message], write: WriteCalls) -> list[Message]:
    """Normalised ``messages`` with calls and results as text; ``write`` formats the calls.

    Results and what the user writes behind them are one message: many templates require alternating turns.
    """
    turns: list[tuple[Message, list[str | None]]] = []
    called: dict[Any, Message] = {}
    """Functions of the last message with calls, by the calls' ids."""
    follows_result = False
    for message in messages:
        message = dict(message)
        is_result = message["role"] == "tool"
        if is_result:
            function = called.get(message.get("tool_call_id")) if len(called) > 1 else None
            message = {"role": "user", "content": result_in_text(message["content"], function)}
        elif calls := message.pop("tool_calls", None):
            called = {call.get("id"): call["function"] for call in calls}
            message["content"] = joined(message["content"], _written([call["function"] for call in calls], write))
        if follows_result and message["role"] == "user":
            turns[-1][1].append(message["content"])
        else:
            turns.append((message, [message["content"]]))
            follows_result = is_result
    return [{**turn, "content": texts[0] if len(texts) == 1 else joined(*texts)} for turn, texts in turns]


def _written(functions: Sequence[Message], write: WriteCalls) -> str:
    try:
        return write([Call(each["name"], _as_text(each["arguments"])) for each in functions])
    except (ValueError, AttributeError, RecursionError):  # this format writes each argument for itself
        objects = [args if isinstance(args := each["arguments"], dict) else {"arguments": args} for each in functions]
        return write([Call(each["name"], _as_text(args)) for each, args in zip(functions, objects, strict=True)])


def _as_text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def result_in_text(content: str | None, function: Message | None = None) -> str:
    """The result of a call as text of the user; it names the ``function`` that was called if that is given."""
    call = "" if function is None else f"{function['name']}({_as_text(function['arguments'])}):\n"
    return RESULT.format(call + (content or ""))


def joined(*texts: str | None) -> str:
    """The texts that are not empty, as paragraphs."""
    return "\n\n".join(text for text in texts if text)
