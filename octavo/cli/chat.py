"""``octavo chat [MODEL|URL]``: chat in the terminal with a model in this process or with a server."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from octavo.cli.sampling_flags import add_sampling, sampling_values
from octavo.cli.settings import add_settings, flag_name, from_flags, load_config
from octavo.cli.terminal import note, table, write
from octavo.config import EngineConfig, settings, to_flat
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams

# ---- The conversation of ``octavo chat``: its messages, its system prompt, and the file in which it can be kept.

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


NAME = "chat"
HELP = "chat in the terminal with a model, or with any OpenAI-compatible server"

HINT = "/help shows the commands, /exit quits; Ctrl-C stops an answer"
COMMANDS = {
    "/help": "show this help",
    "/system [TEXT]": 'show the system prompt, or replace it; /system "" removes it',
    "/save FILE": "keep the conversation in a JSON file",
    "/load FILE": "continue the conversation of such a file",
    "/model [NAME]": "show the models of the server, or go on with another one",
    "/image FILE": "send an image with the next message; several may be given",
    "/reset": "clear the conversation, except the system prompt",
    "/exit": "quit; so do /quit and the end of the input (Ctrl-D)",
}
QUOTES = '"""'
HELP_ON_LINES = f"{QUOTES} begins a message of several lines and ends it; so does \\ at the end of a line continue it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model or server, system prompt, sampling flags and every setting of the engine."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for the server at URL (default: OCTAVO_API_KEY, then OPENAI_API_KEY)"
    )
    add_sampling(parser)
    add_settings(parser, EngineConfig)
    parser.usage = f"{parser.prog} [MODEL|URL] [options]"


class Partner(Protocol):
    """The model or server that answers."""

    @property
    def name(self) -> str: ...

    def reply(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        """Stream the answer to a conversation; raise ``RequestError`` on failure."""
        ...

    def models(self) -> list[str]:
        """The names of the models to choose from; raises ``RequestError`` on failure."""
        ...

    def choose(self, model: str) -> None:
        """Let another model answer. Raises ``ConfigError`` or ``RequestError``."""
        ...

    def close(self) -> None: ...


class LocalChat:
    """A model in this process."""

    def __init__(self, config: EngineConfig, values: dict[str, Any]) -> None:
        from octavo.llm import LLM

        SamplingParams(**values)  # validate before the model is loaded
        self._llm = LLM(**to_flat(config))
        self._params = msgspec.structs.replace(
            self._llm.get_default_sampling_params(), **{"max_tokens": None, **values}
        )
        self.name = config.model.model

    def reply(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        prompt = self._llm.chat_prompt(messages)
        for piece in self._llm.stream(prompt, self._params):
            yield piece.text

    def models(self) -> list[str]:
        return [self.name]

    def choose(self, model: str) -> None:
        raise ConfigError(f"this process has one model; `octavo chat {model}` begins a chat with another")

    def close(self) -> None:
        self._llm.close()


def run(args: argparse.Namespace) -> int:
    """Chat until /exit or the end of the input."""
    with contextlib.closing(_partner(args)) as partner:
        note(f"talking to {partner.name}; {HINT}")
        converse(partner, args.system)
    return 0


def _partner(args: argparse.Namespace) -> Partner:
    url, values = args.model_argument, sampling_values(args)
    if url is None or not url.startswith(("http://", "https://")):
        if args.api_key is not None:
            raise ConfigError("--api-key: applies only to a server at a URL")
        return LocalChat(load_config(EngineConfig, args), values)
    from octavo.cli.remote_chat import RemoteChat

    args.model_argument = None
    others = from_flags({item.name: item for item in settings(EngineConfig) if item.name != "model"}, args)
    if others or args.config:
        flag = flag_name(next(iter(others), "config"))
        raise ConfigError(f"{flag}: applies to a model in this process, not to a server at a URL")
    key = args.api_key or os.environ.get("OCTAVO_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return RemoteChat(url, args.model, key, values)


def converse(partner: Partner, system: str | None) -> None:
    """Read messages and commands from the user and write the answers, until /exit or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() line editing and history)
    conversation = ChatHistory(system)
    while (text := _ask()) is not None:
        if text in ("/exit", "/quit"):
            return
        if text.startswith("/"):
            _obey(text, conversation, partner)
        elif content := text.removeprefix(QUOTES).strip("\n"):
            conversation.turns.append({"role": "user", "content": conversation.with_images(content)})
            answer = _answer(partner, conversation.messages)
            if answer is None:
                conversation.turns.pop()
            else:
                conversation.turns.append({"role": "assistant", "content": answer})


def _obey(line: str, conversation: ChatHistory, partner: Partner) -> None:
    """Execute a command other than /exit."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        match command:
            case "/help":
                rows = [[usage, about] for usage, about in COMMANDS.items()]
                print(f"{table(rows)}\n{HELP_ON_LINES}", file=sys.stderr, flush=True)
            case "/system":
                if rest:
                    conversation.system = "" if rest == '""' else rest
                note(f"system prompt: {conversation.system or 'none'}")
            case "/model":
                if rest:
                    partner.choose(rest)
                note(f"talking to {partner.name}; there are {', '.join(partner.models())}")
            case "/image":
                conversation.add_image(rest)
                note(f"{len(conversation.images)} images go with the next message")
            case "/reset":
                conversation.turns.clear()
                note("conversation cleared")
            case "/save" | "/load" if not rest:
                note(f"{command} needs the name of a file")
            case "/save":
                conversation.save(Path(rest).expanduser())
                note(f"saved {len(conversation.messages)} messages in {rest}")
            case "/load":
                conversation.load(Path(rest).expanduser())
                note(f"loaded {len(conversation.messages)} messages from {rest}")
            case _:
                note(f"{command} is not a command; {HINT}")
    except (ConfigError, RequestError) as error:
        note(f"error: {error}")


def _ask() -> str | None:
    """The next message or command, ``None`` at the end of the input; a message in quotes keeps the opening ones."""
    line = _read_line("> ")
    if line is None:
        return None
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES) and (line := _read_line("... ")) is not None:
            text += "\n" + line.rstrip()
        return QUOTES + text.removesuffix(QUOTES)
    while text.endswith("\\"):
        text = text.removesuffix("\\") + "\n" + (_read_line("... ") or "").rstrip()
    return text.strip()


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _answer(partner: Partner, messages: list[dict[str, Any]]) -> str | None:
    """Write the answer as it arrives and return it; partial after Ctrl-C, ``None`` after an error."""
    answer, began, times = "", time.perf_counter(), list[float]()
    with _output() as show:
        try:
            with contextlib.closing(partner.reply(messages)) as pieces:
                for piece in pieces:
                    times.append(time.perf_counter() - began)
                    answer += piece
                    show(piece)
        except KeyboardInterrupt:
            show("\n")
            note("stopped")
            return answer
        except RequestError as error:
            show("\n" if answer else "")
            note(f"error: {error}")
            return None
        show("\n")
    if sys.stdout.isatty() and len(times) > 1:
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        note(f"first token after {times[0]:.2f} s, then about {rate:.0f} tokens/s")
    return answer


@contextlib.contextmanager
def _output() -> Iterator[Callable[[str], None]]:
    """What shows pieces of an answer: rendered Markdown on a terminal, else the text as it is."""
    if not sys.stdout.isatty():
        yield write
        return
    from octavo.cli.markdown import MarkdownWriter

    with MarkdownWriter() as writer:
        yield writer.write
