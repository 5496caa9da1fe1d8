"""Render chat messages to the prompt format that a model was trained on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.config import ModelSettings
from octavo.errors import ConfigError, InvalidParameter, Unavailable
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.system.child_worker import INVALID, REFUSED, RENDERED
from octavo.text.control_tokens import ControlTokens
from octavo.text.tokenizer import Tokenizer

WORKER = "octavo.text.template_worker"
RESERVED_VARIABLES = ("chat_template", "messages", "add_generation_prompt")
"""Names that ``chat_template_kwargs`` may not set; the first would let a client run its own template."""


class TemplateRefusal(InvalidParameter):
    """The template refuses these messages, or fails on them; it may accept the same words in another form."""


class ChatTemplate:
    """A model's chat template, rendered in a child process with bounded time, memory and output.

    The template is an untrusted program from the model's files: if it exceeds a limit, its request fails and the next
    rendering gets a fresh process. Thread-safe; rendering blocks, so do not call it on an event loop's thread.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_source: str | None = None,
        control_tokens: ControlTokens | None = None,
        max_seconds: float = 2.0,
        max_memory: int = 512 << 20,
        max_output: int = 16 << 20,
    ) -> None:
        """``source`` is Jinja text, ``None`` if the model has none; ``tool_source`` replaces it in conversations with
        tools; ``special_tokens`` are variables such as ``bos_token``; ``control_tokens`` are those that are text in the
        texts of a client, ``None`` if they keep their meaning there.

        Limits: wall and processor seconds of one rendering, bytes of memory, bytes of output.
        """
        self._special_tokens = dict(special_tokens or {})
        self.control_tokens = control_tokens
        self._source = source
        self._tool_source = tool_source if source is not None else None
        self._settings = {
            "source": source,
            "tool_source": tool_source,
            "max_seconds": max_seconds,
            "max_memory": max_memory,
            "max_output": max_output,
        }
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()

    @property
    def source(self) -> str | None:
        """Jinja text of the template, followed by the tool template if any; ``None`` if the model has none."""
        return self._source if self._tool_source is None else f"{self._source}\n{self._tool_source}"

    @property
    def process_id(self) -> int | None:
        """Id of the child process; ``None`` while there is none."""
        return None if self._process is None else self._process.id

    def check(self) -> None:
        """Compile the template, which also starts the process; raise ``ConfigError`` if it is invalid."""
        if self._source is None:
            return
        try:
            kind, text = self._ask(None)
        except ChildLost as error:
            raise ConfigError(f"chat template: {error}") from None
        if kind != RENDERED:
            raise ConfigError(f"chat template: {text}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``, in the form that ``normalise_messages`` gives them.

        ``template_kwargs`` are further variables of the template. Raises ``TemplateRefusal``, and ``InvalidParameter``
        about ``messages`` or ``chat_template_kwargs``: no template, a limit exceeded, or not plain values.
        """
        if self._source is None:
            raise InvalidParameter(
                "messages", "The model has no chat template. Give one with --chat-template FILE, or use completions."
            )
        check_variables(tools, template_kwargs)
        variables = {
            "documents": None,
            **self._special_tokens,
            **(template_kwargs or {}),
            "tools": tools,
            "messages": self._readable(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            kind, text = self._ask(variables)
        except Unavailable:
            raise
        except (TypeError, ValueError):
            raise InvalidParameter("messages", "Messages and template variables must be plain JSON values.") from None
        except ChildLost as error:
            raise InvalidParameter("messages", f"The chat template could not be rendered: {error}.") from None
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            raise TemplateRefusal("messages", text)
        problem = "is not valid" if kind == INVALID else "could not be rendered"
        raise TemplateRefusal("messages", f"The chat template {problem}: {text.rstrip('.')}.")

    def _readable(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """``messages`` with empty text for missing content if the template does not handle calls: such a template
        would fail at missing content, or render "None"."""
        if "tool_calls" in (self.source or ""):
            return messages
        return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]

    def close(self) -> None:
        """End the process. Rendering again starts a new one."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _ask(self, variables: dict[str, Any] | None) -> tuple[bytes, str]:
        with self._lock:
            if self._process is None or not self._process.is_alive:
                self._process = ChildProcess(WORKER, self._settings)
            return self._process.ask(variables)


def check_variables(tools: Any, template_kwargs: Any) -> None:
    """Raise ``InvalidParameter`` unless they have the types that ``render`` declares."""
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise InvalidParameter("chat_template_kwargs", "'chat_template_kwargs' must map names to values.")
    for name in RESERVED_VARIABLES:
        if template_kwargs and name in template_kwargs:
            raise InvalidParameter("chat_template_kwargs", f"'chat_template_kwargs' may not set '{name}'.")
    is_list = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not is_list:
        raise InvalidParameter("tools", "'tools' must be a list of objects, each the definition of a function.")


def load_chat_template(settings: ModelSettings, tokenizer: Tokenizer | None) -> ChatTemplate:
    """The chat template in the file named in the settings, else the model's own.

    Raises ``ConfigError`` for a file that cannot be read.
    """
    if settings.chat_template is not None:
        try:
            source: str | None = Path(settings.chat_template).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {settings.chat_template} cannot be read: {error}") from None
        tool_source = None
    else:
        source, tool_source = (None, None) if tokenizer is None else (tokenizer.chat_template, tokenizer.tool_template)
    if tokenizer is None:
        return ChatTemplate(source)
    control_tokens = ControlTokens(tokenizer, f"{source}\n{tool_source}")
    return ChatTemplate(
        source,
        tokenizer.special_tokens,
        tool_source=tool_source,
        control_tokens=None if settings.allow_special_tokens_in_messages else control_tokens,
    )
