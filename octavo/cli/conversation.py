"""The conversation of ``octavo chat``: its messages, its system prompt, and the file in which it can be kept."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


class ChatHistory:
    """Messages as in the OpenAI API, the system prompt first."""

    def __init__(self, system: str | None) -> None:
        self.system = system or ""
        self.turns: list[Message] = []
        """Messages of user and assistant in turn."""
        self.images: list[str] = []
        """data: URLs of images that go with the next message."""

    @property
    def messages(self) -> list[Message]:
        """What a model gets: the system prompt, if there is one, and the turns."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns]

    def add_image(self, path: str) -> None:
        """Let the image in a file go with the next message. Raises ``ConfigError``."""
        if not path:
            raise ConfigError("/image needs the name of a file")
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        self.images.append(f"data:;base64,{base64.b64encode(data).decode()}")

    def with_images(self, text: str) -> str | list[Message]:
        """The content of a message: its text, behind the images that were added."""
        images, self.images = self.images, []
        parts: list[Message] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return [*parts, {"type": "text", "text": text}] if parts else text

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises ``ConfigError``, also for an existing file that holds no conversation."""
        if path.exists():
            try:
                _read(path)
            except ConfigError:
                raise ConfigError(f"{path} exists and holds no conversation; it is left as it is") from None
        try:
            path.write_text(json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace the conversation by that of a file. Raises ``ConfigError``, and then nothing has changed."""
        messages = _read(path)
        self.system = "\n".join(str(message["content"]) for message in messages if message["role"] == "system")
        self.turns = [message for message in messages if message["role"] != "system"]


def _read(path: Path) -> list[Message]:
    """The messages of a file, ``{"messages": [{"role": ..., "content": ...}, ...]}``."""
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(f"{path} has no list 'messages' of objects with a role and text content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and _is_content(value.get("content"))


def _is_content(value: object) -> bool:
    """Whether this is a text, or parts as a message with images has them."""
    is_list = isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value)
    return isinstance(value, str) or is_list
