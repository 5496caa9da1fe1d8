"""The bodies of this API, and their conversion to a chat completion body.

https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from octavo.errors import InvalidParameter
from octavo.text.reasoning_effort import thinking_switch
from octavo_server.dialects.chat_reply import FieldNames, Translated
from octavo_server.dialects.history import LeftOut, note, omitted
from octavo_server.dialects.ollama.body import LEAST_SHARE
from octavo_server.dialects.openai.chat_body import ChatBody, effort
from octavo_server.dialects.openai.common_fields import sampling
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder, wrong_type
from octavo_server.services import ModelServices

ROLES = {"user": "user", "model": "assistant", "function": "user", "tool": "user"}
"""The last two name what has the results of functions."""
ABOUT_PARTS = {"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "mediaProcessing", "partMetadata"}
"""Members that say something of a part, and are not what it holds."""
RESULTS = {"output": "", "result": "", "error": "Error: "}
"""Names under which clients send a result that is no object, and what the model reads in front of it."""
_NUMBER = re.compile("[0-9]{1,19}")
_WORD = re.compile("(?<=[a-z0-9])_([a-z])")

T = TypeVar("T")


def camel(name: str) -> str:
    """A name in camel case."""
    return _WORD.sub(lambda found: found[1].upper(), name)


def members(value: Any, where: str) -> dict[str, Any]:
    """The members of an object, which this API takes in camel case and in snake case, in camel case; whole numbers
    without a decimal point, which Google's Python client may add. Raises ``InvalidParameter``."""
    if not isinstance(value, dict):
        raise InvalidParameter(where, f"'{where}' must be an object.")
    given = ((camel(name), member) for name, member in value.items() if member is not None)
    return {name: int(each) if isinstance(each, float) and each.is_integer() else each for name, each in given}


def listed(value: Any) -> list[Any]:
    """A list, or the only element of one that stands alone, as this API allows it."""
    return value if isinstance(value, list) else [] if value is None else [value]


ACCEPTED = frozenset({"model", "labels", "serviceTier", "store"})
"""The name that is in the path already; labels, where a request is computed, and whether it is logged."""
CALLING = "toolConfig.functionCallingConfig"
SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""Options of ``SamplingParams``."""
_BOUNDS = {"max_tokens": "maxOutputTokens", "stop": "stopSequences", "n": "candidateCount", "top_logprobs": "logprobs"}
_FORMS = {**dict.fromkeys(("response_format", "guided_choice"), "responseSchema"), **_BOUNDS}
_OWN = {**{name: camel(name) for name in SAMPLING}, **_FORMS, "thinking_token_budget": "thinkingConfig.thinkingBudget"}
NAMES = {"tool_choice": CALLING, **{name: f"generationConfig.{own}" for name, own in _OWN.items()}}
"""What fields of chat completions are called here."""
TOOL_MEMBERS = {f".function{name}": name for name in ("", ".name", ".description", ".parameters")}
"""Paths in a tool of chat completions, and what they are called here."""
MODES = {"AUTO": "auto", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto", "ANY": "required", "NONE": "none"}
TEXT, ENUM, JSON = "text/plain", "text/x.enum", "application/json"


class GenerationConfig(msgspec.Struct, kw_only=True, rename="camel"):
    """How to generate; with the members of ``thinkingConfig``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] = []
    candidate_count: int = 1
    response_mime_type: str = TEXT
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool = False
    logprobs: int | None = None
    response_modalities: list[str] = []
    thinking_config: dict[str, Any] | None = None
    include_thoughts: bool = False
    thinking_budget: int | None = None
    """Tokens; 0: no reasoning; -1: as many as the model likes."""
    thinking_level: str = ""


class GenerateContentBody(msgspec.Struct, kw_only=True):
    """The body of a request for the next content of a conversation. Fields have the names of the JSON."""

    contents: list[dict[str, Any]] | dict[str, Any]
    systemInstruction: dict[str, Any] | str = ""
    tools: list[dict[str, Any]] | dict[str, Any] = []
    toolConfig: dict[str, Any] = {}
    generationConfig: dict[str, Any] = {}

    @property
    def calling(self) -> dict[str, Any]:
        """Raises ``InvalidParameter``."""
        return members(members(self.toolConfig, "toolConfig").get("functionCallingConfig", {}), CALLING)

    @property
    def config(self) -> GenerationConfig:
        """Raises ``InvalidParameter``."""
        given = members(self.generationConfig, "generationConfig")
        thinking = members(given.get("thinkingConfig", {}), "generationConfig.thinkingConfig")
        return converted(given | thinking, GenerationConfig, "generationConfig")


class CountTokensBody(GenerateContentBody, kw_only=True):
    """The body of a token count request: contents, or a whole request."""

    contents: list[dict[str, Any]] | dict[str, Any] = []
    generateContentRequest: dict[str, Any] | None = None


class EmbedContentBody(msgspec.Struct, kw_only=True):
    """The body of a request for the vector of a text."""

    content: dict[str, Any]
    outputDimensionality: int | None = None


class EmbedContentsBody(msgspec.Struct, kw_only=True):
    """The body of a request for the vectors of several texts."""

    requests: list[dict[str, Any]]


# Cached contents are not here; no answer is looked through.
content_decoder = BodyDecoder(
    *(GenerateContentBody, {"cachedContent": ()}, ACCEPTED, {"safetySettings": ()}), rename=camel
)
count_decoder = BodyDecoder(CountTokensBody, {}, ACCEPTED, rename=camel)
embed_decoder = BodyDecoder(EmbedContentBody, {}, ACCEPTED, rename=camel)
embed_all_decoder = BodyDecoder(EmbedContentsBody, {}, ACCEPTED, rename=camel)


def converted(value: dict[str, Any], kind: type[T], where: str) -> T:
    """An object as ``kind``. Raises ``InvalidParameter``."""
    try:
        return msgspec.convert(members(value, where), kind)
    except msgspec.ValidationError as error:
        raise wrong_type(where, error) from None


def without_effect(body: GenerateContentBody, services: ModelServices) -> list[str]:
    """Members that are ignored in this request. Raises ``InvalidParameter``."""
    config, given = body.config, members(body.generationConfig, "generationConfig")
    named = [f"toolConfig.{name}" for name in body.toolConfig if camel(name) != "functionCallingConfig"]
    named += [f"generationConfig.{name}" for name in given if name not in config.__struct_encode_fields__]
    asked, reasons = _thinking(config, services).get("reasoning_effort"), services.message_format.can_reason
    is_idle = asked != "none" and not (reasons and effort(asked, services))
    return [*named, "generationConfig.thinkingConfig"] if config.thinking_config and is_idle else named


def translated(body: GenerateContentBody, services: ModelServices, model: str, is_streamed: bool = False) -> Translated:
    """Convert the request for ``model`` to a chat completion. Raises ``InvalidParameter``."""
    left_out, config = LeftOut(), body.config
    if not {"TEXT", "MODALITY_UNSPECIFIED"}.issuperset(config.response_modalities):
        raise UnsupportedParameter("generationConfig.responseModalities")
    system = text_of(body.systemInstruction, "systemInstruction")
    pairs = [({"role": "system", "content": system}, "systemInstruction")] if system else []
    pairs += ContentReader(left_out, services.takes).messages(listed(body.contents))
    messages = [message for message, _ in pairs]
    # A last content of the model is the beginning of the answer.
    is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    tools = _functions(body, left_out)
    given, budget = {name: getattr(config, name) for name in SAMPLING}, config.thinking_budget or 0
    if config.top_p == 0:  # there the most likely token alone; no share of 0 is known to the engine
        given["top_p"] = LEAST_SHARE
    chat = ChatBody(
        model=model,
        messages=messages,
        tools=list(tools.values()),
        tool_choice=_tool_choice(body),
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        max_tokens=config.max_output_tokens,
        n=config.candidate_count,
        stop=config.stop_sequences,
        stream=is_streamed,
        logprobs=config.response_logprobs,
        top_logprobs=config.logprobs,
        sampling=sampling(**given, thinking_token_budget=budget if budget > 0 else None),
        **_thinking(config, services),
        **_form(config),
    )
    places = {"messages": [place for _, place in pairs], "tools": list(tools)}
    return Translated(chat, FieldNames(NAMES, places, TOOL_MEMBERS), left_out.names)


def _thinking(config: GenerationConfig, services: ModelServices) -> dict[str, Any]:
    """Fields of a chat completion for how much to reason: the model's own default if nothing is asked for."""
    level = config.thinking_level.lower()
    if config.thinking_budget == 0:
        return {"reasoning_effort": "none"}
    if level and level != "thinking_level_unspecified":
        return {"reasoning_effort": level}
    switches = thinking_switch(True, services.chat_template.source or "")
    return {"chat_template_kwargs": switches} if config.thinking_config else {}


def _form(config: GenerationConfig) -> dict[str, Any]:
    """Fields of a chat completion for the form of the answer. Raises ``InvalidParameter``."""
    kind, schema = config.response_mime_type, config.response_json_schema
    if kind not in (TEXT, ENUM, JSON):
        where = "generationConfig.responseMimeType"
        raise InvalidParameter(where, f"'{where}' must be {TEXT}, {JSON} or {ENUM}.")
    if schema is None:
        schema = json_schema(config.response_schema)
    if kind == ENUM:
        return {"guided_choice": (schema or {}).get("enum", [])}
    if schema is not None:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}
    return {"response_format": {"type": "json_object"}} if kind == JSON else {}


def json_schema(given: Any) -> Any:
    """A schema of this API, which has types in capitals and words of its own, as a JSON schema."""
    if not isinstance(given, dict):
        return [json_schema(each) for each in given] if isinstance(given, list) else given
    schema = members(given, "")
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            found[name] = value.lower()
        elif name in ("properties", "$defs") and isinstance(value, dict):
            order = [key for key in listed(schema.get("propertyOrdering")) if isinstance(key, str) and key in value]
            found[name] = {key: json_schema(value[key]) for key in dict.fromkeys((*order, *value))}
        elif name in ("items", "additionalProperties", "anyOf"):
            found[name] = json_schema(value)
        elif name.startswith(("min", "max")) and isinstance(value, str) and _NUMBER.fullmatch(value):
            found[name] = int(value)  # this API writes numbers of 64 bits as text
        elif name not in ("nullable", "propertyOrdering", "example"):
            found[name] = value
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def _functions(body: GenerateContentBody, left_out: LeftOut) -> dict[str, dict[str, Any]]:
    """The functions as those of a chat completion, by their places; without tools that a server would have to run.
    Raises ``InvalidParameter``."""
    is_strict = body.calling.get("mode") == "VALIDATED"  # calls keep to schemas, although none must be made
    found: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(listed(body.tools)):
        for kind, held in members(tool, f"tools[{place}]").items():
            if kind != "functionDeclarations":
                left_out.add("tools", kind)
                continue
            for index, declared in enumerate(listed(held)):
                where = f"tools[{place}].{kind}[{index}]"
                given = members(declared, where)
                schema = given.get("parametersJsonSchema", json_schema(given.get("parameters")))
                made = {"name": given.get("name"), "description": given.get("description"), "parameters": schema}
                function = {name: value for name, value in made.items() if value is not None}
                found[where] = {"type": "function", "function": function | ({"strict": True} if is_strict else {})}
    return found


def _tool_choice(body: GenerateContentBody) -> str | dict[str, Any]:
    """``tool_choice`` as in chat completions. Raises ``InvalidParameter``."""
    mode, names = MODES.get(str(body.calling.get("mode", "AUTO"))), body.calling.get("allowedFunctionNames")
    if mode is None:
        raise InvalidParameter(CALLING, f"'{CALLING}.mode' must be one of AUTO, ANY, NONE and VALIDATED.")
    if not names or mode == "none":
        return mode
    allowed = [{"type": "function", "function": {"name": name}} for name in listed(names)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}


class ContentPart(NamedTuple):
    """A part of a content, and where it is in the request."""

    given: dict[str, Any]
    where: str

    @property
    def kind(self) -> str:
        """What it holds, such as "inlineData"; "" if nothing."""
        return next((name for name in self.given if name not in ABOUT_PARTS), "")

    @property
    def text(self) -> str:
        """Raises ``InvalidParameter`` if it holds something else."""
        if not isinstance(text := self.given.get("text"), str):
            raise InvalidParameter(re.split(r"\W", self.where)[0], f"'{self.where}.text' must be a string.")
        return text

    @property
    def held(self) -> dict[str, Any]:
        """The members of what it holds. Raises ``InvalidParameter``."""
        return members(self.given[self.kind], f"{self.where}.{self.kind}")

    @property
    def media(self) -> str:
        """The kind of the file in it; "" without one. Raises ``InvalidParameter``."""
        kind = str(self.held.get("mimeType")).partition("/")[0] if self.kind in ("inlineData", "fileData") else None
        return "" if kind is None else kind if kind in ("image", "video", "audio") else "file"

    @property
    def url(self) -> str:
        """Where the file is. Google's Python client writes in the alphabet of base64 for URLs."""
        data = str(self.held.get("data")).replace("-", "+").replace("_", "/")
        return str(self.held.get("fileUri", f"data:{self.held.get('mimeType')};base64,{data}"))


def parts_of(content: Any, where: str) -> list[ContentPart]:
    """The parts of a content. Raises ``InvalidParameter``."""
    given = enumerate(listed(members(content, where).get("parts")))
    return [ContentPart(members(part, f"{where}.parts[{place}]"), f"{where}.parts[{place}]") for place, part in given]


def text_of(content: Any, where: str) -> str:
    """The text of a content that may hold nothing else. Raises ``InvalidParameter``."""
    return content if isinstance(content, str) else "\n".join(part.text for part in parts_of(content, where))


class ContentReader(NamedTuple):
    """Makes chat completion messages of contents. What these have no part for becomes text, or is left out, as
    signatures of thoughts are: see ``octavo_server.dialects.history``."""

    left_out: LeftOut
    takes: tuple[str, ...]
    """Kinds of files that the model reads."""

    def messages(self, contents: list[Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Each message, and the place that it comes from. Raises ``InvalidParameter``, also for files that the model
        does not read, unless they have been answered."""
        found = [(content, f"contents[{place}]") for place, content in enumerate(contents)]
        roles = [ROLES.get(str(members(*each).get("role", "user"))) for each in found]
        if None in roles or not roles:
            raise InvalidParameter("contents", "'contents' must have contents with the 'role' user or model.")
        num_answered = max((place + 1 for place, role in enumerate(roles) if role == "assistant"), default=0)
        # Clients keep each part of the model's stream as a content of its own.
        for role, group in itertools.groupby(range(len(roles)), lambda place: roles[place]):
            places = list(group)
            if role == "assistant":
                turn = [part for place in places for part in parts_of(*found[place])]
                yield self._of_model(turn), found[places[0]][1]
                continue
            for place in places:
                for message in self._of_user(parts_of(*found[place]), place >= num_answered):
                    yield message, found[place][1]

    def _of_model(self, parts: list[ContentPart]) -> dict[str, Any]:
        texts: dict[str, list[str]] = {"content": [""], "reasoning_content": []}
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "functionCall":
                call = part.held
                if not isinstance(call.get("name"), str) or not isinstance(call.setdefault("args", {}), dict):
                    where = f"{part.where}.functionCall"
                    raise InvalidParameter("contents", f"'{where}' must have a 'name' and an object as 'args'.")
                function = {"name": call["name"], "arguments": call["args"]}
                calls.append({"id": call.get("id"), "type": "function", "function": function})
            elif part.kind == "text":
                texts["reasoning_content" if part.given.get("thought") else "content"].append(part.text)
            elif shown := self._shown(part):
                texts["content"].append(f"\n{shown}\n")
        message: dict[str, Any] = {name: "".join(found) for name, found in texts.items() if found}
        return {"role": "assistant", **message, **({"tool_calls": calls} if calls else {})}

    def _of_user(self, parts: list[ContentPart], is_new: bool) -> list[dict[str, Any]]:
        """Messages of a user's turn: results first, as they must follow their calls."""
        others = [part for part in parts if part.kind != "functionResponse"]
        for part in others:
            if is_new and part.media not in {"", *self.takes}:
                raise UnsupportedParameter("contents", f"'{part.where}': {part.media}s are not supported here.")
        found = [self._result(part) for part in parts if part.kind == "functionResponse"]
        return [*found, *([{"role": "user", "content": self._content(others)}] if others or not found else [])]

    def _content(self, parts: list[ContentPart]) -> str | list[dict[str, Any]]:
        """Parts as one text, or with media among them as parts of a message."""
        found: list[dict[str, Any]] = []
        for part in parts:
            if part.media in self.takes:
                found.append({"type": f"{part.media}_url", f"{part.media}_url": {"url": part.url}})
            elif (text := part.text if part.kind == "text" else self._shown(part)) or part.kind == "text":
                found.append({"type": "text", "text": text})
        is_text = all(each["type"] == "text" for each in found)
        return "\n".join(each["text"] for each in found) if is_text else found

    def _result(self, part: ContentPart) -> dict[str, Any]:
        given = part.held
        value = members(given.get("response", {}), f"{part.where}.functionResponse.response")
        kind = next(iter(value)) if len(value) == 1 else ""
        found = value[kind] if kind in RESULTS else given.get("response", {})
        text = RESULTS.get(kind, "") + (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
        files = self._content(parts_of(given, f"{part.where}.functionResponse"))
        content = [{"type": "text", "text": text}, *files] if isinstance(files, list) else text
        return {"role": "tool", "tool_call_id": given.get("id"), "name": given.get("name"), "content": content}

    def _shown(self, part: ContentPart) -> str:
        """What a model can read of a part that is no text."""
        if not part.kind:
            return ""
        self.left_out.add("contents", part.kind)
        return omitted(part.media) if part.media else note(part.kind, {"content": part.given[part.kind]})
