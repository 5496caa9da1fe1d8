"""Images of the offline API: PIL images, arrays, paths and bytes."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import InvalidParameter

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


def images_of(prompt: Mapping[str, Any], name: str) -> list[Any]:
    """The images of a prompt: ``images``, or vLLM's ``multi_modal_data``. Raises ``InvalidParameter``."""
    given = prompt.get("images")
    if given is None and (data := prompt.get("multi_modal_data")) is not None:
        if not isinstance(data, Mapping) or data.keys() - {"image"}:
            raise InvalidParameter(name, f"'{name}.multi_modal_data' must be an object with 'image' alone.")
        given = data.get("image")
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray) else [given]


def image_in(part: Mapping[str, Any], where: str) -> Any:
    """The image of a part of a message: ``{"type": "image", "image": ...}``, or ``image_url`` with a data: URL."""
    given = part.get("image", part.get("image_url"))
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None or (isinstance(given, str) and given.startswith(("http:", "https:"))):
        raise InvalidParameter("messages", f"'{where}' must have an 'image': {FORMS}.")
    return given
