"""The systemd unit: what it says agrees with the server, and systemd accepts it where its tools are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.cache.offload import CLOSING_SECONDS
from octavo.cli import parse_arguments
from octavo.config import ServeConfig, settings
from octavo.server_settings import ServerSettings
from octavo_fleet.proxy import upstream_process
from octavo_server.cli import launch
from octavo_server.engines.async_engine import STOP_GRACE

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/octavo.service"
PAGE = (ROOT / "docs/deployment.md").read_text()
MOST_EXPOSURE = 25
"""Of 100, in tenths of what `systemd-analyze security` prints."""
NAMES = {setting.name for setting in settings(ServeConfig)}


def service() -> dict[str, str]:
    """The lines of the section [Service]; of a key that occurs several times, the values joined."""
    section = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0]
    found: dict[str, str] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found[key] = f"{found[key]} {value}" if key in found else value
    return found


def test_its_command_and_variables_are_those_of_the_server() -> None:
    program, *arguments = service()["ExecStart"].split()
    assert Path(program).name == "octavo"
    assert parse_arguments(arguments).config == "/etc/octavo/serve.yaml"
    variables = re.findall(r"(OCTAVO_\w+)=", service()["Environment"])
    assert variables
    assert all(name.removeprefix("OCTAVO_").lower() in NAMES for name in variables)


def test_running_requests_can_end() -> None:
    seconds = ServerSettings().shutdown_timeout + STOP_GRACE  # an engine may write its cache after the last of them
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["octavo"]
    given = int(service()["TimeoutStopSec"]), int(compose["stop_grace_period"].removesuffix("s")), launch.STOP_SECONDS
    assert min(given) > seconds
    assert upstream_process.STOP_SECONDS > STOP_GRACE > CLOSING_SECONDS
    assert service()["KillMode"] == "mixed"  # engines must live until the front process has drained
    assert service()["OOMPolicy"] == "continue"  # the supervisor starts an engine that the kernel killed


def test_a_wrong_setting_is_not_tried_again(tmp_path: Path) -> None:
    wrong = tmp_path / "serve.yaml"
    wrong.write_text("modle: x\n")
    command = [sys.executable, "-m", "octavo", "serve", "--config", str(wrong)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "modle" in ended.stderr
    assert service()["RestartPreventExitStatus"] == str(ended.returncode)


def test_the_documented_file_has_settings_of_the_server() -> None:
    (written,) = re.findall(
        r"^    sudo tee /etc/octavo/serve.yaml <<END\n(.*?)^    END$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert set(yaml.safe_load(written)) <= NAMES


def test_systemd_accepts_it(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(service()["ExecStart"].split()[0], f'"{sys.executable}"'))
    verified = subprocess.run([systemd, "verify", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = [systemd, "security", "--offline=yes", f"--threshold={MOST_EXPOSURE}", "--no-pager", unit]
    ended = subprocess.run(rated, capture_output=True, text=True)
    if "offline" in ended.stderr:
        pytest.skip("this systemd-analyze cannot rate a file")
    assert ended.returncode == 0, ended.stdout
