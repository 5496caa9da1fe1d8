"""What scripts for vLLM's ``LLM`` give besides the arguments that both have: the progress bar's name, adapters at run
time, priorities, structured outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

from octavo.engine.engine import Engine
from octavo.errors import InvalidParameter
from octavo.grammar import forms
from octavo.llm.adapters import BASE, Adapter, chosen
from octavo.sampling_params import MAX_TOKEN_ID, StructuredOutputsParams
from octavo.weights.adapter_files import digest


class LoRARequest(NamedTuple):
    """An adapter that is loaded when a request first names it, into an engine with ``enable_lora``."""

    lora_name: str
    lora_int_id: int
    """Not used: adapters have names."""
    lora_path: str


class VLLMArguments(TypedDict, total=False):
    """Arguments of ``generate`` and ``chat``."""

    use_tqdm: object
    """As ``use_progress``."""
    lora_request: LoRARequest | None
    """In place of ``adapter``."""
    priority: Sequence[int] | None
    """Of each prompt, under the priority policy; smaller goes first."""


def check_names(given: VLLMArguments) -> None:
    """Raise ``TypeError`` for an argument that ``LLM.generate`` has not."""
    for name in sorted(given.keys() - VLLMArguments.__annotations__):
        raise TypeError(f"LLM.generate() got an unexpected keyword argument {name!r}")


def adapter_of(name: str | None, given: LoRARequest | None, adapters: dict[str, Adapter], engine: Engine) -> Adapter:
    """The adapter that a call names, loaded now if it is ``given`` for the first time. Raises ``InvalidParameter`` or
    ``CheckpointError``."""
    if given is None:
        return chosen(name, adapters) if name is not None else BASE
    known = adapters.get(given.lora_name)
    salt = f"{digest(given.lora_path)}:"
    if known is None:
        engine.adapters.load(given.lora_name, given.lora_path)
        known = adapters[given.lora_name] = Adapter(given.lora_name, salt)
    if known.cache_salt != salt:
        message = f"'lora_request' names {given.lora_name!r}, which is loaded with other content."
        raise InvalidParameter("lora_request", message)
    return known


def priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    """The priority of each of ``count`` prompts. Raises ``InvalidParameter``."""
    if given is None:
        return [0] * count
    if len(given) != count or not all(type(value) is int and abs(value) <= MAX_TOKEN_ID for value in given):
        raise InvalidParameter("priority", f"'priority' must be a list of {count} whole numbers, one for each prompt.")
    return given


def _schema(value: Any) -> forms.Part:
    """Of a schema, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise forms.FormError("is not valid JSON") from None
    return forms.json_schema(value)


def grammar_of(given: StructuredOutputsParams) -> str:
    """The grammar that structured outputs stand for. Raises ``InvalidParameter``."""
    makers: dict[str, Any] = {
        "json": _schema,
        "regex": forms.regex,
        "choice": forms.choice,
        "grammar": forms.grammar,
        "json_object": lambda _: forms.json_object(),
    }
    asked = {name: value for name in makers if (value := getattr(given, name)) not in (None, False)}
    if len(asked) != 1:
        message = f"'structured_outputs' must have one of {', '.join(makers)}, not {', '.join(asked) or 'none'}."
        raise InvalidParameter("structured_outputs", message)
    [(name, value)] = asked.items()
    try:
        return forms.grammar_text(makers[name](value))
    except forms.FormError as error:
        raise InvalidParameter("structured_outputs", f"'structured_outputs.{name}' {error}.") from None
