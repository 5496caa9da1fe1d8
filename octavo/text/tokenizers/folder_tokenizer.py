"""Read the tokenizer of a Hugging Face folder: tokenizer.json, tokenizer.model, strings by rank or Qwen's vocab.json,
and their configuration files.

tokenizer.json decides which special tokens surround a text, as in transformers 5; ``add_bos_token`` and the like in
tokenizer_config.json apply only to folders with a SentencePiece model instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from octavo.errors import CANCELLATIONS, CheckpointError, failures_as
from octavo.text.tokenizers import ranked_tokenizer
from octavo.text.tokenizers.gguf_tokenizer import WORD_RULES, byte_level
from octavo.text.tokenizers.sentencepiece_model import SentencePieceModel
from octavo.text.tokenizers.tokenizer_limits import TextLimits
from octavo.text.tokenizers.tokenizer_parts import TokenizerParts, wrap_with_special_tokens
from octavo.weights.generation_config import token_ids

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
MODEL_NAME = "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Classes for which it is known what a word is, as these two files do not say it."""
FILES = (
    *("tokenizer.json", MODEL_NAME, ranked_tokenizer.TEKKEN, ranked_tokenizer.TIKTOKEN),
    *(VOCABULARY, MERGES),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "chat_template.json"),
)
"""All files that are read here, but for templates."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LEAST_KNOWN = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 64), *range(0x10000, 0x110000, 0x1000))))
"""A text with each byte that UTF-8 has, and with characters that few vocabularies have."""
_OTHER_FORMS = (VOCABULARY, "vocab.txt")


def read_parts(folder: Path) -> TokenizerParts | None:
    """The tokenizer of ``folder``, or ``None`` if it has none; raise ``CheckpointError`` for a bad one."""
    config = _read_object(folder / "tokenizer_config.json")
    named = _special_tokens(config, _read_object(folder / "special_tokens_map.json"))
    declared = declared_tokens(config, _read_object(folder / "added_tokens.json"), folder)
    template: str | None = None
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    elif (folder / MODEL_NAME).is_file():
        model = SentencePieceModel(folder / MODEL_NAME)
        backend, named = model.backend(config, declared), model.special_tokens() | named
    elif (ranked := _read_ranked(folder, config, declared)) is not None:
        backend, named, template = ranked.backend, ranked.special_tokens | named, ranked.template
        config = {"add_bos_token": ranked.adds_bos, **config}
    elif config.get("tokenizer_class") in QWEN and (folder / VOCABULARY).is_file():
        backend = _read_qwen(folder, config)
    else:
        _refuse_other_forms(folder)
        return None
    add_tokens(backend, declared, further_special_tokens(config, named), folder)
    if not (folder / "tokenizer.json").is_file():
        _wrap(backend, config, named, folder)
    templates = _chat_templates(folder, config)
    return TokenizerParts(
        origin=folder,
        backend=backend,
        special_tokens=named,
        eos_token_ids=_eos_token_ids(folder, backend, named),
        chat_template=templates.get("default", template),
        tool_template=templates.get("tool_use"),
    )


def _read_ranked(
    folder: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]
) -> ranked_tokenizer.Ranked | None:
    """The tokenizer of a folder that has its strings by rank, if it has one."""
    if (folder / ranked_tokenizer.TEKKEN).is_file():
        return ranked_tokenizer.read_tekken(folder / ranked_tokenizer.TEKKEN)
    if (folder / ranked_tokenizer.TIKTOKEN).is_file():
        return ranked_tokenizer.read_tiktoken(folder / ranked_tokenizer.TIKTOKEN, config, declared)
    return None


def _read_qwen(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE with a vocabulary in JSON, and merges in lines."""
    file, vocabulary = folder / MERGES, _read_object(folder / VOCABULARY)
    lines = _read_text(file, MAX_CONFIG_BYTES).split("\n")
    pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    with failures_as(lambda error: CheckpointError(f"{file}: not a tokenizer that can be read: {str(error)[:500]}")):
        model = models.BPE(vocab=vocabulary, merges=pairs)
    return _checked(byte_level(model, WORD_RULES["qwen2"], config.get("add_prefix_space") is True), file)


def _refuse_other_forms(folder: Path) -> None:
    for name in _OTHER_FORMS:
        if (folder / name).is_file():
            readable = ", ".join(("tokenizer.json", MODEL_NAME, ranked_tokenizer.TEKKEN, "Kimi's tiktoken.model"))
            raise CheckpointError(f"{folder}: has {name}; only {readable} and Qwen's vocab.json can be read")


def _wrap(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str], folder: Path) -> None:
    """Surround texts with the special tokens that ``add_bos_token`` and ``add_eos_token`` enable.

    ``add_bos_token`` defaults to true if the model has such a token; all decoders were trained so.
    """
    flags = {}
    for name, default in (("add_bos_token", "bos_token" in special_tokens), ("add_eos_token", False)):
        value = config.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {name}: must be true or false")
        flags[name] = default if value is None else value
    wrap_with_special_tokens(backend, special_tokens, flags["add_bos_token"], flags["add_eos_token"], folder)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file, MAX_TOKENIZER_BYTES)
    with failures_as(lambda error: CheckpointError(f"{file}: not a tokenizer that can be read: {str(error)[:500]}")):
        backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()  # which could be of any length
    backend.no_truncation()
    return _checked(backend, file)


def _checked(backend: tokenizers.Tokenizer, file: Path) -> tokenizers.Tokenizer:
    TextLimits(backend, file)
    _check_unknown_token(backend, file)
    return backend


def _check_unknown_token(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Raise ``CheckpointError`` if a text can need an unknown token that the vocabulary lacks.

    That token may be missing where no text needs it: from a vocabulary that has all bytes.
    """
    try:
        backend.encode(_LEAST_KNOWN)
    except CANCELLATIONS:
        raise
    except BaseException as error:  # the library raises the bare class
        if not isinstance(error, Exception):
            raise CheckpointError(f"{file}: some texts cannot be encoded: {str(error)[:500]}") from None
        unknown = getattr(backend.model, "unk_token", None)
        is_missing = unknown is None or backend.model.token_to_id(unknown) is None
        reason = f"the unknown token {unknown!r} is not in model.vocab" if is_missing else "some texts have no tokens"
        raise CheckpointError(f"{file}: model.unk_token: {reason}: {error}") from None


def _read_text(file: Path, limit: int) -> str:
    try:
        if file.stat().st_size > limit:
            raise CheckpointError(f"{file}: more than {limit} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; an empty one when there is no such file."""
    if not file.is_file():
        return {}
    try:
        text = _read_text(file, MAX_CONFIG_BYTES)
        value = json.loads(text)
        if "\\ud" in text.lower():  # perhaps an unpaired surrogate, which is no text: raises UnicodeEncodeError
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; each is spelled as text or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids.update(token_ids(_read_object(folder / name), "eos_token_id", str(folder / name)))
    if "eos_token" in special_tokens and (index := backend.token_to_id(special_tokens["eos_token"])) is not None:
        ids.add(index)
    return tuple(sorted(ids))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The model's chat templates by name; files take precedence over tokenizer_config.json, and that over the
    chat_template.json of models with a processor."""
    named: dict[str, Any] = {}
    for source in (_read_object(folder / "chat_template.json"), config):
        value = source.get("chat_template")
        if isinstance(value, list):
            named |= {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        else:
            named |= {"default": value} if isinstance(value, str) else {}
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if file.is_file():
            named[name] = _read_text(file, MAX_CONFIG_BYTES)
    return {name: template for name, template in named.items() if isinstance(template, str)}


MAX_DIGITS = 10
"""Of a token's id."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def declared_tokens(config: Mapping[str, Any], added: Mapping[str, Any], folder: Path) -> dict[int, AddedToken]:
    """Tokens by id: ``added_tokens_decoder`` of tokenizer_config.json, else ``added`` of the older added_tokens.json.

    Raises ``CheckpointError`` naming the file and the token.
    """
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        where = f"{folder / 'added_tokens.json'}"
        decoder = {index: text for text, index in added.items()}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{where}: expected an object of token ids, found {type(decoder).__name__}")
    tokens = {}
    for key, value in decoder.items():
        if not str(key).isdecimal() or len(str(key)) > MAX_DIGITS:
            raise CheckpointError(f"{where}: {str(key)[:100]!r} is not a token id")
        tokens[int(key)] = _token(value, f"{where}: {key}")
    return dict(sorted(tokens.items()))


def _token(value: Any, where: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str) or not content:
        raise CheckpointError(f"{where}: a token must have a text as 'content'")
    return AddedToken(content, **_flags(value))


def _flags(value: Mapping[str, Any]) -> dict[str, bool]:
    return {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}


def further_special_tokens(config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[AddedToken]:
    """Tokens that the configuration names as special, in the order in which those without an id get one."""
    named: list[Any] = [config.get(name, text) for name, text in special_tokens.items()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        if isinstance(value, dict):
            value = list(value.values())
        named += value if isinstance(value, list) else []
    tokens = []
    for value in named:
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            continue
        flags = _flags(value) if isinstance(value, dict) else {}
        tokens.append(AddedToken(text, **{**flags, "special": True}))
    return tokens


def add_tokens(
    backend: tokenizers.Tokenizer, declared: Mapping[int, AddedToken], further: Sequence[AddedToken], folder: Path
) -> None:
    """Add ``declared`` tokens to ``backend``, by their ids, and ``further`` ones that it lacks.

    A declaration overrides an added token that ``backend`` has. Raises ``CheckpointError`` when a token would get an
    id other than the declared one: the model's embeddings would belong to other tokens.
    """
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in declared.values() if repr(token) not in known])
    for index, token in declared.items():
        found = backend.token_to_id(token.content)
        if found != index:
            raise CheckpointError(f"{folder}: the added token {token.content!r} should have id {index}, found {found}")
    names = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in further if token.content not in names])
