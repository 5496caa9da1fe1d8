"""How a model is asked for the words of a sound, and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.images.audio import AudioForm

MOST_HELD = 64
"""Characters of an answer that are held back until the language has ended."""
LANGUAGES: dict[str, str] = dict(
    re.findall(
        r"(\w+) (\w+)",
        "af Afrikaans, ar Arabic, az Azerbaijani, be Belarusian, bg Bulgarian, bn Bengali, bs Bosnian, ca Catalan, "
        "cs Czech, cy Welsh, da Danish, de German, el Greek, en English, es Spanish, et Estonian, eu Basque, "
        "fa Persian, fi Finnish, fil Filipino, fr French, gl Galician, gu Gujarati, he Hebrew, hi Hindi, hr Croatian, "
        "hu Hungarian, hy Armenian, id Indonesian, is Icelandic, it Italian, ja Japanese, ka Georgian, kk Kazakh, "
        "kn Kannada, ko Korean, lt Lithuanian, lv Latvian, mi Maori, mk Macedonian, ml Malayalam, mr Marathi, "
        "ms Malay, ne Nepali, nl Dutch, no Norwegian, pa Punjabi, pl Polish, pt Portuguese, ro Romanian, ru Russian, "
        "sk Slovak, sl Slovenian, sr Serbian, sv Swedish, sw Swahili, ta Tamil, te Telugu, th Thai, tl Tagalog, "
        "tr Turkish, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, yue Cantonese, zh Chinese",
    )
)
"""English names by codes of ISO 639."""


def language_name(given: str) -> str:
    """The English name of a language, by it or by its code, also as ``en-US``; "" for what is neither."""
    name = LANGUAGES.get(re.split("[-_]", given.lower())[0], given.capitalize())
    return name if name in LANGUAGES.values() else ""


@dataclass(frozen=True, kw_only=True)
class Transcription:
    """What is asked of a sound. Languages are English names."""

    form: AudioForm
    """That of the model."""
    spoken: str
    """The language of the sound; "" if it is not known."""
    into: str = ""
    """The language of a translation; "": the words are written down as they are."""
    context: str = ""
    """What may help: names, or what was said before."""

    @property
    def is_wordless(self) -> bool:
        """Whether the model is asked by the audio alone."""
        can_be = self.form.transcribe_token and not self.into and not self.context
        return bool(self.form.language_end or can_be)

    def messages(self, sound: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A conversation whose next message is the text; ``sound`` is a part of a message."""
        if self.is_wordless:
            system = [{"role": "system", "content": self.context}] if self.context else []
            return [*system, {"role": "user", "content": [sound]}]
        audio = f"the {self.spoken} audio" if self.spoken else "the audio"
        words = f"Translate {audio} into {self.into}." if self.into else f"Transcribe {audio}."
        asked = f"{words}\nContext: {self.context}" if self.context else words
        return [{"role": "user", "content": [sound, {"type": "text", "text": asked}]}]

    @property
    def answer_start(self) -> str:
        """What stands behind the conversation, where the answer begins; mostly ""."""
        if not self.is_wordless:
            return ""
        if self.form.language_end:
            return f"language {self.spoken}{self.form.language_end}" if self.spoken else ""
        code = next((code for code, name in LANGUAGES.items() if name == self.spoken), "")
        return f"lang:{code}{self.form.transcribe_token}" if code else self.form.transcribe_token


class TranscriptReader:
    """Tells the transcript from the language that an answer may begin with."""

    def __init__(self, asked: Transcription) -> None:
        self.language = asked.into or asked.spoken
        """Of the transcript; "" as long as it is not known."""
        self._end = "" if asked.answer_start else asked.form.language_end
        self._held = ""

    def push(self, text: str, is_last: bool) -> str:
        """What of the transcript became certain with more text of the answer."""
        if not self._end:
            return text
        self._held += text
        language, end, transcript = self._held.partition(self._end)
        if not end and not is_last and len(self._held) < MOST_HELD:
            return ""
        self._end = ""
        if not end:
            return self._held
        name = language.removeprefix("language").strip()
        self.language = "" if name == "None" else name
        return transcript
