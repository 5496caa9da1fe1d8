"""The page of models, formats and devices, docs/models.md, from the registries of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from octavo.cli.models import families
from octavo.cli.settings import flag_name
from octavo.config import ServeConfig, settings
from octavo.quant.methods import METHODS
from octavo.speculative_config import Method
from octavo.text.message_format import HARMONY_NAME, TOOL_FORMATS
from octavo.text.reasoning import FAMILIES
from octavo.weights.gguf.block_formats import BLOCK_KINDS
from octavo.weights.safetensors import DTYPES
from octavo_bench.architectures import Judged, read_record
from octavo_bench.reference.filling import filled, table

SERVED = {
    "native": "natively: the classes of the first table",
    "backend, paged": "backend `transformers`, with the paged KV cache: prefixes are cached, sequences batched",
    "backend, own cache": "backend `transformers`, one sequence at a time, without a prefix cache",
    "refused": "refused",
    "wrong": "wrong",
    "crash": "ends with an error",
    "not built": "not tried, as there is no tiny checkpoint",
}
RECORD = Path(__file__).parents[2] / "benchmarks/results/architectures.jsonl"

MEANT = {
    "CpmAntForCausalLM": "the tokens of a prompt attend to each other, also to later ones",
    "MllamaForCausalLM": "Llama 3.2 Vision attends to images, by layers of their own, and this class is its text part",
    **dict.fromkeys(
        ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "its tokens are of sounds, several for each position"
    ),
    "ProphetNetForCausalLM": "it predicts several tokens ahead at once",
    "XLMWithLMHeadModel": "it is an encoder, whose tokens see later ones",
    "XLNetLMHeadModel": "it predicts tokens in any order, with a mask for each prompt",
}
"""What classes are for that have no continuation of a text token by token."""


def page() -> str:
    """The page with fresh tables."""
    title, *rows = families()
    parts = {
        "architectures": table(title, *((f"`{name}`", *rest) for name, *rest in rows)),
        "classes": _classes(read_record(RECORD)),
        "formats": table(("what", "which"), *_formats()),
        "calls": table(("`--tool-call-parser`", "models", "seen by"), *_calls()),
        "reasoning": table(("`--reasoning-parser`", "reasoning"), *_reasoning()),
    }
    return filled("models.md", parts)


def _classes(found: Sequence[Judged]) -> Iterator[str]:
    """How the classes of a record are served: a row for each way, then a line for each that is not served."""
    libraries = sorted({item.library for item in found})
    yield f"Of the {len(found)} classes of transformers {_words(libraries)}:"
    yield ""
    rows = []
    for kind, how in SERVED.items():
        names = [item.architecture for item in found if item.kind == kind]
        if names:
            rows.append((how, str(len(names)), "" if kind == "native" else _words(names)))
    yield from table(("served", "classes", ""), *rows)
    yield from ("", "Why the others are not served, or were not tried:", "")
    for item in found:
        if item.kind not in ("native", "backend, paged", "backend, own cache"):
            reason = item.note.rpartition("the backend transformers: ")[2]
            meant = f"{MEANT[item.architecture]}: " if item.architecture in MEANT else ""
            yield f"- `{item.architecture}`: {meant}{reason}"


def _calls() -> Iterator[tuple[str, str, str]]:
    for format in TOOL_FORMATS:
        seen = " or ".join(" and ".join(_code(sign) for sign in group) for group in format.signs)
        without = f" without {_words(format.others)}" if format.others else ""
        yield _words((format.name, *format.also)), format.models, seen + without


def _reasoning() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        answer = "" if family.answer is None else f", the answer between {' and '.join(map(_code, family.answer))}"
        yield _words(family.names), f"between `{family.opens}` and `{family.closes}`{answer}"
    yield f"`{HARMONY_NAME}`", "the channels of gpt-oss"


def _formats() -> Iterator[tuple[str, str]]:
    choices = {item.name: item.choices or () for item in settings(ServeConfig)}
    yield "types of tensors in safetensors", _words(DTYPES)
    yield "types of tensors in GGUF files", _words(BLOCK_KINDS)
    yield "`quant_method` of quantised checkpoints ([details](quantization.md))", _words(METHODS)
    yield "`method` of `--speculative-config`", _words(str(kind.__struct_config__.tag) for kind in get_args(Method))
    for name in ("load_format", "quantization", "dtype", "kv_cache_dtype"):
        yield f"`{flag_name(name)}`", _words(choices[name])


def _words(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"
