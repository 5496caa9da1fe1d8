"""The `octavo` command: help, exit codes, and that help imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import pytest

import octavo
from octavo import cli, plugins
from octavo.cli import COMMANDS, main
from octavo.config import ServeConfig, settings
from octavo.errors import CheckpointError, ConfigError

HEAVY = ("torch", "numba", "transformers", "starlette", "tokenizers", "httpx", "rich", "yaml", "shtab")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Replace what `octavo serve` does."""

    def replace(action: Callable[[], int]) -> None:
        monkeypatch.setattr("octavo_server.cli.serve.run", lambda args: action())

    return replace


def fail(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


def test_the_table_of_commands_is_complete() -> None:
    modules = [importlib.import_module(f"octavo.cli.{found.name}") for found in pkgutil.iter_modules(cli.__path__)]
    named = {module.NAME for module in modules if hasattr(module, "NAME")}
    found = list(cli.commands())
    assert named | plugins.OWN[plugins.COMMANDS].keys() == {command.NAME for command in found}
    assert [command.NAME for command in found] == [*COMMANDS, "bench", "demo"]
    assert all(command.HELP and command.run and command.add_arguments for command in found)


def test_every_part_of_the_packages_around_is_there() -> None:
    for group, named in plugins.OWN.items():
        assert plugins.parts(group).keys() >= named.keys()
        if group == plugins.STAGE_HOSTS and find_spec("ray") is None:
            with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
                plugins.load(group, "ray")
        elif group != plugins.COMPILERS:
            assert all(plugins.load(group, name) is not None for name in named)


@pytest.fixture
def other_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of other distributions, to be filled before they are first asked for."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in entries if each.group == group])
    plugins.parts.cache_clear()
    yield entries
    plugins.parts.cache_clear()


def test_without_a_package_its_commands_are_not_there(
    other_parts: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "find_spec", lambda name: None if name == "octavo_bench" else find_spec(name))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "overhead"])
    assert ended.value.code == 2
    assert "there is no command 'bench'" in capsys.readouterr().err


def test_an_older_entry_of_a_name_changes_nothing(other_parts: list[EntryPoint]) -> None:
    """As an editable installation has, that was made before a module moved."""
    other_parts.append(EntryPoint("bench", "octavo.no_longer_there", plugins.COMMANDS))
    assert [command.NAME for command in cli.commands()] == [*COMMANDS, "bench", "demo"]


def test_a_command_that_cannot_be_imported_leaves_the_others(
    other_parts: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    other_parts.append(EntryPoint("broken", "no_such_package", plugins.COMMANDS))
    assert [command.NAME for command in cli.commands()] == [*COMMANDS, "bench", "demo"]
    assert capsys.readouterr().err == "octavo: warning: no command 'broken': No module named 'no_such_package'\n"


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["chat", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys, octavo.cli\n"
        f"try:\n    octavo.cli.main({argv!r})\n"
        "except SystemExit as done:\n    assert not done.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_the_whole_help_of_serve_is_grouped_and_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    text = capsys.readouterr().out
    assert text.startswith("usage: octavo serve [MODEL ...] [options]\n")
    places = [text.index(f"\n{group} settings:\n") for group in ("model", "cache", "scheduler", "server")]
    assert places == sorted(places)
    assert "\n  The paged KV cache.\n" in text
    assert "OCTAVO_MAX_NUM_SEQS" in text
    words = " ".join(text.split())
    assert "--port INT port to listen on; 0 picks a free one (default: 8000)" in words
    assert "--enable-prefix-caching, --no-enable-prefix-caching reuse the blocks of equal prompt prefixes" in words
    assert "--dtype {auto,float32,bfloat16,float16}" in words
    unbroken = words.replace("- ", "-")  # a line may end at a hyphen
    for item in settings(ServeConfig):
        assert item.help.replace("- ", "-") in unbroken, item.name


def test_the_short_help_of_serve_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["serve", "-h"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert "--port INT" in text
    assert "--help [all]" in text
    assert "--kv-watermark" not in text


def test_other_commands_show_their_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    text = capsys.readouterr().out
    assert "--system TEXT" in text
    assert "--block-size" not in text


def test_without_a_command_its_help_leads_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    text = capsys.readouterr().out
    assert "octavo serve" in text
    assert "doctor" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max-num-seq", "3"], "unknown argument '--max-num-seq'; did you mean --max-num-seqs?"),
        (["--fast", "serve", "--port", "8000"], "octavo serve: error: unknown argument '--fast'\n"),
        (["models", "model", "more"], "octavo models: error: unknown argument 'more'\n"),
        (["generate", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["srve"], "octavo: error: there is no command 'srve'; did you mean 'serve'?"),
        (["xyz"], "octavo: error: there is no command 'xyz'; commands are serve, chat,"),
    ],
)
def test_invalid_arguments_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 2


def test_an_octavo_error_is_one_line(
    serving: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serving(fail(CheckpointError("model.gguf: is cut short")))
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "octavo: error: model.gguf: is cut short\n"


def test_a_bug_keeps_its_traceback(serving: Callable[[Callable[[], int]], None]) -> None:
    serving(fail(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_the_command_decides_the_exit_code(serving: Callable[[Callable[[], int]], None]) -> None:
    serving(lambda: 7)
    assert main(["serve"]) == 7


def test_ctrl_c_ends_with_130_and_without_a_traceback(serving: Callable[[Callable[[], int]], None]) -> None:
    serving(fail(KeyboardInterrupt()))
    assert main(["serve"]) == 130


def test_a_closed_pipe_is_not_an_error() -> None:
    code = (
        "import sys, octavo.cli, octavo.cli.doctor as doctor\n"
        "doctor.run = lambda args: [print('x' * 9999, flush=True) for _ in range(99)]\n"
        "sys.exit(octavo.cli.main(['doctor']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_an_unknown_variable_is_warned_about(
    serving: Callable[[Callable[[], int]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OCTAVO_PORTS", "1")
    serving(lambda: 0)
    assert main(["serve"]) == 0
    assert "OCTAVO_PORTS is not a setting; did you mean OCTAVO_PORT?" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"octavo {octavo.__version__}\n"


def test_serve_hands_its_settings_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_server.front import serving

    seen: list[ServeConfig] = []
    monkeypatch.setattr(serving, "run", lambda config, others, listener: seen.extend([config, *others]) or 5)
    monkeypatch.setattr(os, "environ", {})
    assert main(["serve", "some/model", "--port", "1"]) == 5
    assert [(each.model.model, each.server.port) for each in seen] == [("some/model", 1)]
    seen.clear()
    assert main(["serve", "a/b", "c", "d=e/f", "--port", "1"]) == 5
    named = [(each.model.model, each.server.served_model_name, each.server.port) for each in seen]
    assert named == [("a/b", None, 1), ("c", None, 1), ("e/f", "d", 1)]
