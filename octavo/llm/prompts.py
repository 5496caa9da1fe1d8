"""Validate and encode prompts and their sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from octavo.engine.protocols import Grammars
from octavo.errors import InvalidParameter, RequestError, failures_as
from octavo.images.preparer import ImagePreparer, placed
from octavo.images.processors import ImageProcessor, PreparedClip, PreparedImage
from octavo.llm.image_inputs import MEDIA_KEYS, audio_file_of, audio_of, file_of, files_of, images_of, videos_of
from octavo.llm.vllm_arguments import grammar_of
from octavo.sampling_params import SamplingParams, resolve_max_tokens
from octavo.text.message_format import find_format
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
from octavo.types import EngineInfo, ImageInput, Request, ThinkingBudget

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each; ``None`` is the model's default."""


BYTES = (bytes, bytearray, memoryview)
"""Sequences of whole numbers that are not meant as token ids."""
READ = SamplingParams(max_tokens=0)
"""Parameters of embedding and scoring requests, which generate nothing."""


WITH_IMAGES = ("audio", "detail", "images", "multi_modal_data", "videos")
"""Keys of a prompt with images, videos or audio."""


MOST_OF_A_MARK = 64
"""Tokens at the end of a prompt that may have the mark with which reasoning begins."""


class Checked(NamedTuple):
    """A validated and encoded prompt."""

    text: str | None
    tokens: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    banned_sequences: Sequences
    images: Sequence[ImageInput] = ()
    thinking: ThinkingBudget | None = None


def check_all(
    prompts: Any, params: Any, tokenizer: Tokenizer | None, info: EngineInfo, preparer: ImagePreparer | None = None
) -> list[Checked]:
    """Validate every prompt with its parameters; raise ``RequestError`` with the index of the first invalid one."""
    check_task("generate", info)
    items = _as_list(prompts)
    checked = []
    for place, (prompt, own) in enumerate(zip(items, _params_for_each(params, len(items)), strict=True)):
        name = "prompt" if len(items) == 1 else f"prompts[{place}]"
        if own.structured_outputs is not None:
            own = msgspec.structs.replace(own, grammar=grammar_of(own.structured_outputs), structured_outputs=None)
        given, media = _with_media(prompt, name, preparer)
        text, tokens = _encode(given, name, tokenizer, info)
        if own.truncate_prompt_tokens is not None:
            tokens = tokens[-own.truncate_prompt_tokens :]
        images: Sequence[ImageInput] = ()
        if preparer is not None:
            tokens, images = placed(tokens, media, preparer.processor)
        _check_params(own, tokenizer, info)
        max_tokens = resolve_max_tokens(own, len(tokens), info.max_model_len, field=name)
        ends = end_tokens(own, tokenizer, info)
        banned = () if tokenizer is None else banned_sequences(own.bad_words, tokenizer)
        check_something_is_left(own, banned, {*ends, *own.stop_token_ids})
        thinking = _thinking_budget(own.thinking_token_budget, tokens, tokenizer)
        checked.append(Checked(text, tokens, own, max_tokens, ends, banned, images, thinking))
    return checked


def _thinking_budget(num_tokens: int | None, prompt: list[int], tokenizer: Tokenizer | None) -> ThinkingBudget | None:
    """The bound on reasoning. Raises ``InvalidParameter`` for a model whose messages have no marks of it."""
    if num_tokens is None:
        return None
    format = None if tokenizer is None else find_format("auto", "auto", tokenizer.chat_template, {})
    if tokenizer is None or format is None or not format.can_reason:
        message = "'thinking_token_budget' needs a model whose chat template marks reasoning."
        raise InvalidParameter("thinking_token_budget", message)
    end = tokenizer.decode(prompt[-MOST_OF_A_MARK:], skip_special_tokens=False)
    return format.thinking_budget(num_tokens, end, tokenizer.encode_mark)


def check_grammars(prompts: Sequence[Checked], grammars: Grammars) -> None:
    """Compile every grammar, which the engine caches; raise ``InvalidParameter`` for one that cannot be used."""
    distinct = {prompt.params.grammar: prompt for prompt in prompts if prompt.params.grammar is not None}
    for prompt in distinct.values():
        with failures_as(lambda e: InvalidParameter("grammar", f"'grammar' {str(e).rstrip('.')}."), RequestError):
            grammars.prepare(Request(0, prompt.tokens, prompt.params, prompt.max_tokens)).result()


class TokenizedText(NamedTuple):
    """Tokens of a text, or of a pair whose second text begins at ``second_start``, to embed or score."""

    tokens: list[int]
    second_start: int | None = None


def check_texts(prompts: Any, tokenizer: Tokenizer | None, info: EngineInfo) -> list[TokenizedText]:
    """Validate every text; raise ``RequestError`` with the index of the first invalid one."""
    items = _as_list(prompts)
    names = ["prompt"] if len(items) == 1 else [f"prompts[{place}]" for place in range(len(items))]
    if tokenizer is not None and all(type(item) is str for item in items):
        encoded = tokenizer.encode_all(items)
        for tokens, name in zip(encoded, names, strict=True):
            check_prompt(tokens, name, info)
    else:
        encoded = [_encode(item, name, tokenizer, info)[1] for item, name in zip(items, names, strict=True)]
    return [_fitting(TokenizedText(tokens), name, info) for tokens, name in zip(encoded, names, strict=True)]


def check_pairs(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer | None, info: EngineInfo) -> list[TokenizedText]:
    """Encode every pair of texts as one sequence; raise ``RequestError`` for the first invalid one."""
    if tokenizer is None:
        raise InvalidParameter("text_1", "The model has no tokenizer, so texts cannot be scored.")
    return [
        _fitting(TokenizedText(*tokenizer.encode_pair(*pair)), f"text_2[{i}]", info) for i, pair in enumerate(pairs)
    ]


def _fitting(text: TokenizedText, name: str, info: EngineInfo) -> TokenizedText:
    resolve_max_tokens(READ, len(text.tokens), info.max_model_len, field=name)
    return text


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise InvalidParameter("prompts", f"'prompts' must be text, token ids or a list, not {type(prompts).__name__}.")
    if prompts and all(type(token) is int for token in prompts):
        return [prompts]
    return list(prompts)


def _params_for_each(params: Any, count: int) -> list[SamplingParams]:
    if not isinstance(params, SamplingParams | Sequence):
        message = f"'sampling_params' must be SamplingParams or a list of them, not {type(params).__name__}."
        raise InvalidParameter("sampling_params", message)
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidParameter("sampling_params", f"There are {len(each)} sampling_params for {count} prompts.")
    for own in each:
        if not isinstance(own, SamplingParams):
            raise InvalidParameter("sampling_params", f"{type(own).__name__} is not SamplingParams.")
    return each


def _with_media(prompt: Any, name: str, preparer: ImagePreparer | None) -> tuple[Any, list[PreparedImage]]:
    """The prompt with one token for each image and for each part of a video or audio, and all of these."""
    if not isinstance(prompt, Mapping):
        return prompt, []
    images, videos, audio = images_of(prompt, name), videos_of(prompt, name), audio_of(prompt, name)
    if not images and not videos and not audio:
        return prompt, []
    if preparer is None:
        raise InvalidParameter(name, f"'{name}' has images, but this model reads text only.")
    given, processor = _from_mapping(prompt, name), preparer.processor
    detail, found = processor.detail_of(str(prompt.get("detail", "auto")), len(images)), list[PreparedImage]()
    for place, image in enumerate(images):
        where, is_done = f"{name}.images[{place}]", isinstance(image, PreparedImage)
        if not is_done and not processor.takes_images:
            raise InvalidParameter(name, f"'{where}': this model takes no images.")
        found.append(image if is_done else preparer.prepare(file_of(image, where), detail, where))
    if not isinstance(given, str):
        if videos or audio:
            what = "videos" if videos else "audio"
            raise InvalidParameter(name, f"'{name}' has {what}, so it must be text, which says where.")
        return given, found
    clips = {
        "video": [preparer.prepare_video(*files_of(each, w), w) for each, w in _named(videos, f"{name}.videos")],
        "audio": [preparer.prepare_audio(audio_file_of(each, w), w) for each, w in _named(audio, f"{name}.audio")],
    }
    return _in_places(given, name, processor, found, {kind: each for kind, each in clips.items() if each})


def _named(media: Sequence[Any], name: str) -> list[tuple[Any, str]]:
    return [(each, f"{name}[{place}]") for place, each in enumerate(media)]


def _in_places(
    text: str,
    name: str,
    processor: ImageProcessor,
    images: Sequence[PreparedImage],
    clips: Mapping[str, Sequence[PreparedClip]],
) -> tuple[str, list[PreparedImage]]:
    """A text with what the model reads in place of its placeholders, and all images in their order; those that have no
    placeholder come last. ``clips``: by kind, "video" or "audio".

    Raises ``InvalidParameter`` if the text has not as many places for these as there are.
    """
    placeholders = processor.image_text.placeholders
    for kind, given in clips.items():
        count = text.count(placeholders[kind])
        if count != len(given):
            message = f"'{name}' has places for {count} {MEDIA_KEYS[kind]}, and there are {len(given)}."
            raise InvalidParameter(name, message)
    kinds = {place: kind for kind, place in placeholders.items() if kind in clips or kind == "image"}
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    waiting, of_images, media = (
        {kind: iter(given) for kind, given in clips.items()},
        iter(images),
        list[PreparedImage](),
    )
    for index in range(1, len(pieces), 2):
        if kinds[pieces[index]] == "image":
            pieces[index] = processor.written
            media += islice(of_images, 1)
        else:
            clip = next(waiting[kinds[pieces[index]]])
            pieces[index] = clip.written
            media += clip.images
    return "".join(pieces), [*media, *of_images]


def _encode(prompt: Any, name: str, tokenizer: Tokenizer | None, info: EngineInfo) -> tuple[str | None, list[int]]:
    """The text, or ``None`` for token ids, and the token ids of a prompt."""
    if isinstance(prompt, Mapping):
        prompt = _from_mapping(prompt, name)
    text = None
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidParameter(name, f"The model has no tokenizer: '{name}' must be token ids.")
        text, tokens = prompt, tokenizer.encode(prompt)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, BYTES) and all(type(token) is int for token in prompt):
        tokens = list(prompt)
    else:
        raise InvalidParameter(name, f"'{name}' must be text, a list of token ids or a dict with one of them.")
    check_prompt(tokens, name, info)
    return text, tokens


def _from_mapping(prompt: Mapping[str, Any], name: str) -> Any:
    known = {"prompt", "prompt_token_ids", *WITH_IMAGES}
    if unknown := [key for key in prompt if key not in known]:
        raise InvalidParameter(name, f"'{name}' has the unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}.")
    prompt = {key: value for key, value in prompt.items() if key not in WITH_IMAGES}
    if len(prompt) != 1:
        raise InvalidParameter(name, f"'{name}' must have either 'prompt' or 'prompt_token_ids'.")
    return next(iter(prompt.values()))


def _check_params(params: SamplingParams, tokenizer: Tokenizer | None, info: EngineInfo) -> None:
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            raise InvalidParameter(name, f"The model has no tokenizer, so '{name}' cannot be used.")
    check_params(params, info)
