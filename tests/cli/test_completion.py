"""``octavo completion``: the scripts complete commands, flags and values."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.cli import COMMANDS, main
from tests.tiers import one_in


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Path:
    """The script of the shell that is the parameter."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    return path


def run(*argv: str) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


LINES = [
    (["se"], {"serve"}),
    (["serve", "--por"], {"--port"}),
    (["serve", "--dtype", ""], {"auto", "float32", "bfloat16", "float16"}),
    (["completion", "f"], {"fish"}),
    (["simulate", "--scheduling-policy", "fc"], {"fcfs"}),
]


@one_in(2)
@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(("words", "expected"), LINES)
def test_bash_completes(script: Path, words: list[str], expected: set[str]) -> None:
    line = " ".join(f"'{word}'" for word in ["octavo", *words])
    complete = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_octavo; echo ${{COMPREPLY[@]}}"
    code = f"source {shlex.quote(str(script))}; {complete}"
    assert set(run("bash", "-c", code)) == expected


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize(("words", "expected"), LINES)
def test_fish_completes(script: Path, words: list[str], expected: set[str]) -> None:
    code = f"source {shlex.quote(str(script))}; complete -C 'octavo {' '.join(words)}' | string split -f 1 \\t"
    assert set(run("fish", "--no-config", "-c", code)) == expected


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_the_script(script: Path) -> None:
    assert run("zsh", "-n", str(script)) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert "--max-running-requests" not in text, "flags of other servers are not offered"


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "choose from" in capsys.readouterr().err
