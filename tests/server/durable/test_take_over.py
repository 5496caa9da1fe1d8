"""A journal whose folder still belongs to another server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.config import ServeConfig
from octavo_server.durable.journal import Journal
from octavo_server.durable.synced_log import LogWriter
from octavo_server.front.takeover import Predecessor
from tests.server.in_process import InProcessEngine, byte_tokenizer


class Running(Predecessor):
    """A predecessor that has every request."""

    def __init__(self) -> None:
        pass

    async def has_request(self, folder: Path, owner: str, key: str) -> bool:
        return True


@pytest.mark.parametrize("is_readable", [True, False])
def test_requests_wait_until_it_has_ended_even_if_its_files_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    async def main() -> None:
        other = LogWriter(tmp_path)
        other.append(lambda: b"\x90")  # a record without items
        await other.synced()
        config = ServeConfig.from_flat({"model": "test"})
        journal = Journal(tmp_path, 600.0, config, InProcessEngine(), byte_tokenizer(), Running())
        await journal.resume()
        waiting = asyncio.create_task(journal._ask_predecessor("owner", "key"))
        taking = asyncio.create_task(journal.take_over())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        if not is_readable:

            def fail(files: object) -> None:
                raise OSError("broken disk")

            monkeypatch.setattr(journal, "_recover", fail)
        other.close()
        await asyncio.wait_for(asyncio.gather(waiting, taking), 30)
        await journal.synced()
        journal.close()

    asyncio.run(main())
    assert len(list(tmp_path.iterdir())) == (1 if is_readable else 2)  # what was not read stays
