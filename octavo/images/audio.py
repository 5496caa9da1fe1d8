"""Audio: what stands for it in a prompt.

Audio is an image here, whose pixels are samples. The rules are those of the families' own processors, as published with
their checkpoints.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

RATE, HOP = 16_000, 160
"""Samples of a second, and from one frame of a spectrogram to the next."""
SAMPLE_BYTES = 3
LEAST_SAMPLES = RATE // 10
"""Silence follows what is shorter."""
MOST_SECONDS = 1000.0
"""Of audio that the model could read at any length: a request has no more samples."""


@dataclass(frozen=True, kw_only=True)
class AudioForm:
    """How a family's prompts have audio."""

    placeholder: str
    """What the chat template writes for it."""
    token: int
    """Id of the token at each embedding's position."""
    token_text: str
    before: str = ""
    after: str = ""
    """What is around its embeddings."""
    count: Callable[[int], int]
    """The embeddings of so many samples."""
    most_seconds: float
    least_samples: int = LEAST_SAMPLES
    language_end: str = ""
    """Of a model that only transcribes, and is asked by audio without words: what is in its answers between the
    language, ``language English``, and the transcript."""
    transcribe_token: str = ""
    """Ends the prompt of a model that has one for audio without words, after ``lang:en`` if the language is known."""

    @property
    def written(self) -> str:
        """What the model reads in place of the placeholder, with one token for all embeddings."""
        return f"{self.before}{self.token_text}{self.after}"

    def limited(self, most_tokens: int) -> AudioForm:
        """The form whose audio is so short that it has no more than so many tokens, to a tenth of a second, and not
        under a second."""
        tenths = range(10, int(10 * self.most_seconds) + 1)
        num_fitting = bisect_right(tenths, most_tokens, key=lambda length: self.count(length * RATE // 10))
        if num_fitting == len(tenths):
            return self
        return dataclasses.replace(self, most_seconds=tenths[max(0, num_fitting - 1)] / 10)


def in_halves(samples: int) -> int:
    """Embeddings of Whisper's rows, one for two frames, of which each two are one."""
    frames = -(-samples // HOP)
    return (frames + 1) // 2 // 2


def in_chunks(samples: int, chunk: int) -> int:
    """Those of three convolutions of each chunk of so many frames (Qwen3-Omni)."""
    frames = samples // HOP
    return frames // chunk * _thrice_halved(chunk) + _thrice_halved(frames % chunk)


def in_windows(samples: int, window: int, each: int) -> int:
    """As many of each window (Voxtral)."""
    return -(-samples // window) * each


def _thrice_halved(count: int) -> int:
    for _ in range(3):
        count = (count + 1) // 2
    return count


def read_audio_form(config: Mapping[str, Any], given: Mapping[str, Any], tokens: Mapping[str, int]) -> AudioForm | None:
    """The form of a checkpoint's audio; ``None`` if it takes none, or if its family is not known.

    ``given``: what is said of the feature extractor; ``tokens``: ids of added tokens by their text. Raises
    ``LookupError``, ``TypeError`` or ``ValueError``.
    """
    make = FORMS.get(str((config.get("architectures") or [None])[0]))
    inner = config.get("audio_config")
    if make is None or not isinstance(inner, Mapping):
        return None
    form = make(inner, given)
    token = int(next((config[key] for key in TOKEN_KEYS if config.get(key) is not None), form.token))
    text = next((text for text, number in tokens.items() if number == token), form.token_text)
    placeholder = form.placeholder.replace(form.token_text, text)
    return dataclasses.replace(form, token=token, token_text=text, placeholder=placeholder)


def _qwen2(inner: Mapping[str, Any], given: Mapping[str, Any]) -> AudioForm:
    return AudioForm(
        placeholder="<|audio_bos|><|AUDIO|><|audio_eos|>",
        token=151_646,
        token_text="<|AUDIO|>",
        before="<|audio_bos|>",
        after="<|audio_eos|>",
        count=in_halves,
        most_seconds=min(
            float(given.get("chunk_length") or 30), inner.get("max_source_positions", 1500) * 2 * HOP / RATE
        ),
    )


def _qwen25(inner: Mapping[str, Any], given: Mapping[str, Any]) -> AudioForm:
    return dataclasses.replace(_qwen2({}, {}), most_seconds=float(given.get("chunk_length") or 300))


def _qwen3(inner: Mapping[str, Any], given: Mapping[str, Any]) -> AudioForm:
    return AudioForm(
        placeholder="<|audio_start|><|audio_pad|><|audio_end|>",
        token=151_675,
        token_text="<|audio_pad|>",
        before="<|audio_start|>",
        after="<|audio_end|>",
        count=partial(in_chunks, chunk=2 * int(inner.get("n_window", 50))),
        most_seconds=MOST_SECONDS,
    )


def _qwen3_asr(inner: Mapping[str, Any], given: Mapping[str, Any]) -> AudioForm:
    least = int(given.get("min_length", RATE // 2))
    least = max(least, LEAST_SAMPLES)
    return dataclasses.replace(_qwen3(inner, given), token=151_676, least_samples=least, language_end="<asr_text>")


def _voxtral(inner: Mapping[str, Any], given: Mapping[str, Any]) -> AudioForm:
    rows = int(inner.get("max_source_positions", 1500))
    each = rows * int(inner.get("hidden_size", 1280)) // int(inner.get("intermediate_size", 5120))
    return AudioForm(
        placeholder="[BEGIN_AUDIO][AUDIO]",
        token=24,
        token_text="[AUDIO]",
        before="[BEGIN_AUDIO]",
        count=partial(in_windows, window=2 * rows * HOP, each=each),
        most_seconds=MOST_SECONDS,
        transcribe_token="[TRANSCRIBE]",
    )


TOKEN_KEYS = "audio_token_id", "audio_token_index"
FORMS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], AudioForm]] = {
    "Qwen2AudioForConditionalGeneration": _qwen2,
    "Qwen2_5OmniForConditionalGeneration": _qwen25,
    "Qwen2_5OmniModel": _qwen25,
    "Qwen3ASRForConditionalGeneration": _qwen3_asr,
    "Qwen3OmniMoeForConditionalGeneration": _qwen3,
    "VoxtralForConditionalGeneration": _voxtral,
}
"""By architecture of the checkpoint."""
