"""What engines hold of adapters that are replaced, where something fails meanwhile. The engine processes are stubs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.config import ServeConfig
from octavo.errors import OctavoError, RequestFailed, Unavailable
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo.weights.adapter_files import digest
from octavo_fleet.data_parallel import DataParallelEngine
from octavo_server.engines import wire
from octavo_server.engines.async_engine import AsyncEngine
from octavo_server.engines.engine_link import EngineLink
from tests.server.child_engine import Recorder
from tests.server.fake_engine import make_info
from tests.server.forked_engine import forked


class StubLink:
    """An engine process that takes every adapter."""

    generation = 1

    def __init__(self, *held: str, ends_with: str = "") -> None:
        self.held = {*held}
        """Names of the adapters that it has."""
        self.closed = asyncio.Event()
        self.ends_with = ends_with
        """The adapter while whose loading it dies."""

    async def change_adapter(self, order: wire.LoadAdapter | wire.UnloadAdapter) -> str:
        if order.name == self.ends_with:
            self.closed.set()
            return "it ended"
        if isinstance(order, wire.LoadAdapter):
            self.held.add(order.name)
        else:
            self.held.remove(order.name)
        return ""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of a server with an adapter called a."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text("{}")
    return {"model": "x", "enable_lora": True, "lora_modules": f"a={tmp_path}"}


@pytest.mark.parametrize("goes_back", [True, False])
def test_an_adapter_that_one_engine_cannot_replace_keeps_the_name_by_which_requests_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], goes_back: bool
) -> None:
    every = DataParallelEngine(ServeConfig.from_flat({**settings, "data_parallel_size": 2}), forked("oracle_engine"))
    first, second = every.engines
    link = StubLink("a")
    links = [link] * (2 if goes_back else 1)

    @contextlib.asynccontextmanager
    async def awake_weights() -> AsyncIterator[EngineLink]:
        if not links:
            raise Unavailable("It is gone, too.")
        yield cast(EngineLink, links.pop())

    monkeypatch.setattr(second, "_awake_weights", awake_weights)
    error, message = (Unavailable, "restarting.$") if goes_back else (RequestFailed, "restarting. The engines now have")
    with pytest.raises(error, match=message):  # the first has not started
        asyncio.run(every.load_adapter("a", "new", "1" * 64, replaces=True))
    assert first.adapters.alias("a") == "a"
    assert (second.adapters.alias("a") == "a") == goes_back
    assert link.held == {"a", f"a,{'1' * 16}"}


def replaced(settings: dict[str, Any], folder: Path) -> tuple[AsyncEngine, Recorder]:
    """An engine that was started, with a request of an adapter that another one has replaced since."""
    engine = AsyncEngine(ServeConfig.from_flat(settings), forked("oracle_engine"))
    engine._info = make_info()
    request = Request(engine.next_id(), [1, 2], SamplingParams(), 4, adapter="a")
    engine.add(request, recorder := Recorder())
    engine.adapters.add("a", str(folder), digest(str(folder)))
    return engine, recorder


def test_requests_of_a_replaced_adapter_outlive_engines_that_die_while_they_load_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    engine, recorder = replaced(settings, tmp_path)
    with pytest.raises(OctavoError, match=r"ended while it loaded the adapter a$"):
        asyncio.run(engine.prepare(cast(EngineLink, StubLink(ends_with="a"))))
    asyncio.run(engine.prepare(cast(EngineLink, link := StubLink())))
    assert link.held == {"a", engine.adapters.alias("a")}
    assert recorder.error is None


def test_requests_of_a_replaced_adapter_whose_files_are_gone_end_with_its_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    engine, recorder = replaced(settings, tmp_path)
    engine.adapters.retired["a"].path = str(tmp_path / "gone")
    asyncio.run(engine.prepare(cast(EngineLink, StubLink())))
    assert "adapter `a` could not be loaded again" in str(recorder.error)
    assert engine.adapters.paths == {"a": str(tmp_path)}
