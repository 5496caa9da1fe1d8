"""Images, videos and audio of the offline API: PIL images, arrays, paths and bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import InvalidParameter
from octavo.images.audio import RATE
from octavo.images.preparer import from_data_url
from octavo.text.chat_messages import KINDS

AUDIO_FORMS = "an array of samples and their number a second, a path, the bytes of a file, or a data: URL"
MEDIA_KEYS = {"image": "images", "video": "videos", "audio": "audio"}
"""Keys of a prompt, by what they hold."""
FORMS = "a PIL image, an array of uint8 [rows, columns, 3], a path, the bytes of a file, or a data: URL"


def file_of(image: Any, where: str) -> bytes:
    """The bytes of an image file. Raises ``InvalidParameter``."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str) and image.startswith("data:"):
        return from_data_url(image, where)
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidParameter(where, f"'{where}': {image} cannot be read ({error}).") from None
    if isinstance(image, np.ndarray):
        from PIL import Image  # only here: most programs have no images

        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
            raise InvalidParameter(where, f"'{where}' must be {FORMS}, not an array {image.dtype} {image.shape}.")
        image = Image.fromarray(image)
    save = getattr(image, "save", None)
    if save is None:
        raise InvalidParameter(where, f"'{where}' must be {FORMS}, not {type(image).__name__}.")
    buffer = io.BytesIO()
    save(buffer, "PNG")
    return buffer.getvalue()


def files_of(video: Any, where: str) -> tuple[list[bytes], float | None]:
    """The files of a video, one or as many as it has frames, and the frames of a second, if they are given.

    Raises ``InvalidParameter``.
    """
    rate = None
    if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):  # as in vLLM
        video, rate = video[0], video[1].get("fps")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0):
        raise InvalidParameter(where, f"'{where}': 'fps' must be the frames of a second.")
    if isinstance(video, np.ndarray) and video.ndim != 4:
        raise InvalidParameter(where, f"'{where}' must be an array of uint8 [frames, rows, columns, 3].")
    if isinstance(video, np.ndarray | list | tuple):
        if not len(video):
            raise InvalidParameter(where, f"'{where}' has no frames.")
        return [file_of(frame, f"{where}: frame {place}") for place, frame in enumerate(video)], rate
    return [file_of(video, where)], rate


def audio_file_of(audio: Any, where: str) -> bytes:
    """The bytes of an audio file; of samples and their rate, as vLLM takes them, a WAV file. Raises
    ``InvalidParameter``."""
    rate: Any = RATE
    if isinstance(audio, tuple | list) and len(audio) == 2 and isinstance(audio[1], int | float | np.number):
        audio, rate = audio
    if not isinstance(audio, np.ndarray):
        if isinstance(audio, bytes | bytearray | memoryview | str | Path):
            return file_of(audio, where)
        raise InvalidParameter(where, f"'{where}' must be {AUDIO_FORMS}, not {type(audio).__name__}.")
    if audio.ndim != 1 or audio.dtype.kind not in "fi" or not 1 <= rate <= 1_000_000 or rate != int(rate):
        message = f"'{where}' must be {AUDIO_FORMS}, not an array {audio.dtype} {audio.shape} at {rate}."
        raise InvalidParameter(where, message)
    scaled = audio if audio.dtype.kind == "f" else audio / -float(np.iinfo(audio.dtype).min)
    samples = scaled.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, int(rate), 4 * int(rate), 4, 32)  # float32, one channel
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def images_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The images of a prompt: ``images``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    return _media_of(prompt, name, "image")


def videos_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The videos of a prompt: ``videos``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    return _media_of(prompt, name, "video")


def audio_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The audio of a prompt: ``audio``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    return _media_of(prompt, name, "audio")


def _media_of(prompt: Mapping[str, Any], name: str, kind: str) -> list[Any]:
    given = prompt.get(MEDIA_KEYS[kind])
    if given is None and (data := prompt.get("multi_modal_data")) is not None:
        if not isinstance(data, Mapping) or data.keys() - MEDIA_KEYS:
            message = f"'{name}.multi_modal_data' must be an object with 'image', 'video' or 'audio'."
            raise InvalidParameter(name, message)
        given = data.get(kind)
    if given is None:
        return []
    is_one = isinstance(given, str | bytes | bytearray) or not isinstance(given, Sequence)
    if kind == "audio" and not is_one:
        is_one = isinstance(given, tuple)  # samples and their rate
    if kind == "video" and not is_one:  # frames of one, or several
        is_one = isinstance(given, tuple) or any(
            hasattr(each, "save") or getattr(each, "ndim", 4) == 3 for each in given
        )
    return [given] if is_one else list(given)


def source_in(part: Mapping[str, Any], where: str) -> Any:
    """The image, video or audio of a part of a message: ``{"type": "image", "image": ...}``, or ``image_url`` with a
    data: URL; the same with ``video``, and ``fps`` for a list of frames; and with ``audio``, or ``input_audio`` with
    ``data`` in base64. Raises ``InvalidParameter``."""
    kind = KINDS[str(part.get("type"))]
    given = part.get(kind, part.get(f"{kind}_url", part.get(f"input_{kind}")))
    if isinstance(given, Mapping):
        data = given.get("data")
        given = given.get("url") if data is None else f"data:audio/wav;base64,{data}"
    if given is None or (isinstance(given, str) and given.startswith(("http:", "https:"))):
        what = {"image": f"an image: {FORMS}", "video": "a video", "audio": f"audio: {AUDIO_FORMS}"}[kind]
        raise InvalidParameter("messages", f"'{where}' must have {what}.")
    rate = part.get("fps", part.get("sample_fps"))
    return given if kind != "video" or rate is None else (given, {"fps": rate})
