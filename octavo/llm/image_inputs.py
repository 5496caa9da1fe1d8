"""Images and videos of the offline API: PIL images, arrays, paths and bytes."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import InvalidParameter
from octavo.text.chat_messages import VIDEO_PARTS

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


def from_data_url(url: str, where: str) -> bytes:
    """The content of a data: URL. Raises ``InvalidParameter``."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidParameter("messages", f"'{where}' must be a data: URL with base64.")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidParameter("messages", f"'{where}' has no valid base64.") from None


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


def images_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The images of a prompt: ``images``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    return _media_of(prompt, name, "image")


def videos_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The videos of a prompt: ``videos``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    return _media_of(prompt, name, "video")


def _media_of(prompt: Mapping[str, Any], name: str, kind: str) -> list[Any]:
    given = prompt.get(f"{kind}s")
    if given is None and (data := prompt.get("multi_modal_data")) is not None:
        if not isinstance(data, Mapping) or data.keys() - {"image", "video"}:
            raise InvalidParameter(name, f"'{name}.multi_modal_data' must be an object with 'image' or 'video'.")
        given = data.get(kind)
    if given is None:
        return []
    is_one = isinstance(given, str | bytes | bytearray) or not isinstance(given, Sequence)
    if kind == "video" and not is_one:  # frames of one, or several
        is_one = isinstance(given, tuple) or any(
            hasattr(each, "save") or getattr(each, "ndim", 4) == 3 for each in given
        )
    return [given] if is_one else list(given)


def source_in(part: Mapping[str, Any], where: str) -> Any:
    """The image or video of a part of a message: ``{"type": "image", "image": ...}``, or ``image_url`` with a data:
    URL; the same with ``video``, and ``fps`` for a list of frames. Raises ``InvalidParameter``."""
    kind = "video" if part.get("type") in VIDEO_PARTS else "image"
    given = part.get(kind, part.get(f"{kind}_url"))
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None or (isinstance(given, str) and given.startswith(("http:", "https:"))):
        raise InvalidParameter(
            "messages", f"'{where}' must have {'a video' if kind == 'video' else f'an image: {FORMS}'}."
        )
    rate = part.get("fps", part.get("sample_fps"))
    return given if kind == "image" or rate is None else (given, {"fps": rate})
