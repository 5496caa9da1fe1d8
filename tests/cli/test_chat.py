"""`octavo chat`: conversations with a server at a URL and with a model in this process."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from octavo.cli import chat, main
from octavo.cli.markdown import MarkdownWriter, split_blocks
from octavo.cli.terminal import write
from tests.cli.fake_server import DONE, FakeServer, event, running
from tests.llm.tiny import write_checkpoint

Say = Callable[..., int]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run `octavo chat ARGV` with these lines typed; returns the exit code."""

    def run(lines: list[str], *argv: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        return main(["chat", *argv])

    return run


def test_answers_stream_and_the_history_grows(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers = [
        [event(role="assistant", content=""), event(content="Hel"), event(content="lo"), event(), DONE],
        [b": keep-alive\n\n", event(content="Bye"), DONE],
    ]
    options = ("--system", "Be kind", "--temperature", "0.5", "--max-tokens", "9", "--stop", "x", "--stop", "y")
    assert say(["Hi", "", "Go"], fake.url, *options) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello\nBye\n"
    assert "first at " + fake.url in shown.err
    first, second = fake.bodies
    assert first == {
        "model": "first",
        "messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["x", "y"],
    }
    rest = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Go"}]
    assert second["messages"] == [*first["messages"], *rest]


def test_reset_keeps_only_the_system_prompt_and_exit_ends(fake: FakeServer, say: Say) -> None:
    fake.answers = [[event(content="1"), DONE], [event(content="2"), DONE]]
    assert say(["Hi", "/reset", "Ho", "/exit", "never"], fake.url, "--system", "S") == 0
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "Ho"}
    assert fake.bodies[-1]["messages"] == [system, user]
    assert len(fake.bodies) == 2


def test_an_image_goes_with_the_next_message(
    fake: FakeServer, say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    fake.answers = [[event(content=str(number)), DONE] for number in range(2)]
    lines = ["/image", f"/image {tmp_path}/none", f"/image {tmp_path}/a.png", "What is this?", "And now?"]
    assert say(lines, fake.url) == 0
    image = {"type": "image_url", "image_url": {"url": "data:;base64,cGl4ZWxz"}}
    assert fake.bodies[0]["messages"][0]["content"] == [image, {"type": "text", "text": "What is this?"}]
    assert fake.bodies[1]["messages"][-1]["content"] == "And now?"
    assert "cannot read" in capsys.readouterr().err


def test_an_unknown_command_is_not_sent(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(["/hlep me"], fake.url) == 0
    assert "/hlep is not a command; /help" in capsys.readouterr().err
    assert fake.bodies == []


def test_help_lists_every_command(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(["/help", *(usage.split()[0] for usage in chat.COMMANDS)], fake.url) == 0
    shown = capsys.readouterr().err
    assert all(f"\n{usage}  " in shown for usage in [*chat.COMMANDS][1:])
    assert "is not a command" not in shown


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['"""one', "  two", "", '/three"""'], "one\n  two\n\n/three"),
        (['"""', "def f():", "    pass", '"""'], "def f():\n    pass"),
        (['"""/one line"""'], "/one line"),
        (['"""', "open at the end"], "open at the end"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['""""""', "next"], "next"),
    ],
)
def test_a_message_can_have_several_lines(fake: FakeServer, say: Say, lines: list[str], message: str) -> None:
    fake.answers = [[event(content="1"), DONE]]
    assert say(lines, fake.url) == 0
    assert [body["messages"] for body in fake.bodies] == [[{"role": "user", "content": message}]]


def test_the_system_prompt_can_be_changed(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers = [[event(content=str(number)), DONE] for number in range(3)]
    assert say(["A", "/system Be brief", "B", "/system", '/system ""', "C"], fake.url, "--system", "Old") == 0
    openings = [body["messages"][0] for body in fake.bodies]
    assert [opening["content"] for opening in openings] == ["Old", "Be brief", "A"]
    assert len(fake.bodies[2]["messages"]) == 5
    assert "system prompt: Be brief\noctavo: system prompt: none" in capsys.readouterr().err


def test_a_conversation_is_kept_in_a_file(fake: FakeServer, say: Say, tmp_path: Path) -> None:
    fake.answers = [[event(content=f"é{number}"), DONE] for number in range(3)]
    file = tmp_path / "talk one.json"
    assert say(["Hi", f"/save {file}", "Ho", f"/save {file}"], fake.url, "--system", "S") == 0
    kept = json.loads(file.read_text("utf-8"))["messages"]
    assert [message["content"] for message in kept] == ["S", "Hi", "é0", "Ho", "é1"]
    assert say([f"/load {file}", "Now"], fake.url) == 0
    assert fake.bodies[-1]["messages"] == [*kept, {"role": "user", "content": "Now"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "has no list 'messages'"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "has no list 'messages'"),
        ("[]", "has no list 'messages'"),
        (None, "cannot read"),
    ],
)
def test_files_of_other_kinds_are_neither_loaded_nor_overwritten(
    fake: FakeServer,
    say: Say,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    message: str,
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    assert say([f"/load {file}"], fake.url) == 0
    assert message in capsys.readouterr().err
    if content is not None:
        assert say([f"/save {file}", "/save", f"/save {tmp_path}/no/file"], fake.url) == 0
        errors = capsys.readouterr().err
        assert "exists and holds no conversation" in errors
        assert "/save needs the name of a file" in errors
        assert "cannot write" in errors
        assert file.read_text() == content


def test_another_model_can_answer(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers = [[event(content="1"), DONE], [event(content="2"), DONE]]
    assert say(["Hi", "/model", "/model third", "/model second", "Ho", "/quit", "never"], fake.url) == 0
    assert [body["model"] for body in fake.bodies] == ["first", "second"]
    shown = capsys.readouterr().err
    assert f"talking to first at {fake.url}/v1; there are first, second" in shown
    assert "the server has no model 'third'; there are first, second" in shown


def test_blocks_end_at_empty_lines_outside_of_code() -> None:
    text = "# Title\n\nOne\ntwo\n\n```py\na\n\nb\n```\n\nrest"
    assert split_blocks(text) == (["# Title", "One\ntwo", "```py\na\n\nb\n```"], "rest")
    assert split_blocks("```\na\n\nb") == ([], "```\na\n\nb")


def test_a_terminal_shows_rendered_markdown_without_control_characters() -> None:
    shown = io.StringIO()
    with MarkdownWriter(Console(file=shown, force_terminal=True, color_system=None, width=60)) as writer:
        for piece in ("Some **bo", "ld** text\x1b]0;title\x07.\n", "\n- one\n- t", "wo"):
            writer.write(piece)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).splitlines()]
    assert "Some bold text]0;title." in lines
    assert " • two" in lines
    assert "\x07" not in shown.getvalue()
    assert "\x1b]" not in shown.getvalue()


def test_the_url_may_end_in_v1_and_the_model_may_be_named(fake: FakeServer, say: Say) -> None:
    fake.answers = [[DONE]]
    assert say(["Hi"], fake.url + "/v1/", "--model", "second") == 0
    assert fake.bodies[0]["model"] == "second"


def test_the_key_comes_from_the_flag_or_the_environment(
    fake: FakeServer, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    say([], fake.url)
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    say([], fake.url)
    say([], fake.url, "--api-key", "given")
    keys = [headers["Authorization"] for headers in fake.headers]
    assert keys == ["Bearer theirs", "Bearer ours", "Bearer given"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, b'{"error": {"message": "too long", "code": "x"}}'), "the server answered 400: too long"),
        ((401, b'{"error": "Unauthorized"}'), "the server answered 401: Unauthorized"),
        ((502, b"<h1>Bad gateway</h1>"), "the server answered 502: <h1>Bad gateway</h1>"),
        ((500, b""), "the server answered 500: no explanation"),
        ([event(content="Half")], "the server ended the stream before the answer was complete"),
        ([b'data: {"error": {"message": "out of luck"}}\n\n'], "out of luck"),
        ([b"data: {half\n\n"], "not JSON"),
    ],
)
def test_a_failed_answer_is_reported_and_removed(
    fake: FakeServer,
    say: Say,
    capsys: pytest.CaptureFixture[str],
    answer: list[bytes] | tuple[int, bytes],
    message: str,
) -> None:
    fake.answers = [answer, [event(content="Fine"), DONE]]
    assert say(["Hi", "Again"], fake.url) == 0
    shown = capsys.readouterr()
    assert f"octavo: error: {message}" in shown.err or message in shown.err
    assert shown.out.endswith("Fine\n")
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "Again"}]


def test_lines_are_split_at_line_feeds_only(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    """Characters that some libraries treat as line ends, and events split anywhere, even inside a character."""
    text = "a\u2028b\u0085c 🦋"
    stream = event(content=text) + DONE
    fake.answers = [[stream[i : i + 1] for i in range(len(stream))]]
    assert say(["Hi"], fake.url) == 0
    assert capsys.readouterr().out == text + "\n"


def test_no_server_is_one_line_and_exit_code_2(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(["Hi"], "http://127.0.0.1:1") == 2
    assert capsys.readouterr().err.startswith("octavo: error: No server can be reached at http://127.0.0.1:1: ")


def test_a_server_without_models_is_reported(fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    fake.models = b'{"data": []}'
    assert say(["Hi"], fake.url) == 2
    assert "lists no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["URL", "--dtype", "float32"], "--dtype"),
        (["URL", "--config", "x"], "--config"),
        (["--api-key", "k"], "--api-key"),
    ],
)
def test_flags_that_would_have_no_effect_are_refused(
    fake: FakeServer, say: Say, capsys: pytest.CaptureFixture[str], argv: list[str], flag: str
) -> None:
    assert say([], *(fake.url if part == "URL" else part for part in argv)) == 2
    assert f"octavo: error: {flag}: " in capsys.readouterr().err


class Interrupted:
    """A partner whose first answer is interrupted by Ctrl-C."""

    name = "someone"

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.num_closed = 0

    def reply(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        self.seen.append([dict(message) for message in messages])
        try:
            yield "Once"
            if len(self.seen) == 1:
                raise KeyboardInterrupt
        finally:
            self.num_closed += 1

    def models(self) -> list[str]:
        return [self.name]

    def choose(self, model: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_ctrl_c_stops_the_answer_and_keeps_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nGo on\n"))
    partner = Interrupted()
    chat.converse(partner, None)
    assert capsys.readouterr().out == "Once\nOnce\n"
    assert [message["content"] for message in partner.seen[1]] == ["Hi", "Once", "Go on"]
    assert partner.num_closed == 2


def test_ctrl_c_at_the_prompt_ends_the_command(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert main(["chat", fake.url]) == 130


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b]0;title\x07\r\x9b2J\tb\n"
    write(hostile)
    assert capsys.readouterr().out == hostile
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write(hostile)
    assert capsys.readouterr().out == "a]0;title2J\tb\n"


def test_a_local_model_answers(tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path)
    settings = ["--load-format", "dummy", "--num-kv-blocks", "32", "--block-size", "16"]
    assert say(["Hi", "/reset", "Hi"], str(folder), "--temperature", "0", "--max-tokens", "5", *settings) == 0
    shown = capsys.readouterr()
    assert f"talking to {folder}" in shown.err
    assert len(shown.out) > 2
    half = len(shown.out) // 2
    assert shown.out[:half] == shown.out[half:]
