"""How much of a prompt is still cached after the server that computed it has ended, in each way that it can end.

A long prompt is answered, the server ends or sleeps, and the same prompt is answered again: by a server of the same
folder (``--kv-offload-dir``), or the one that woke. Answers are greedy, and on a CPU the same however a prompt was
computed, so they must be equal. At last files of many short prompts are damaged, and many of a long one, and all of
them are asked again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from octavo.cache.offload_tiers import INDEX
from octavo_bench.chaos.processes import session
from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.dummy_models import write_weights
from octavo_bench.serving.server_process import OCTAVO, ServerProcess, free_port

SECONDS = 1200.0
POLL_SECONDS = 0.05
FIRST_TOKEN, LAST_TOKEN = 100, 900
NUM_ANSWERED = 8
SHORT_PROMPT = 100
RANDOM_MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tiny": ({}, []),
    "wide": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 32,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "head_dim": 256,
        },
        ["--block-size", "4"],
    ),
}
"""What each changes in the tiny model's configuration, and flags of its servers. "wide" has 4 MiB of keys and values
for a token, in blocks of 16 MiB: as large as those of a real model, and hardly anything else to compute."""


class Found(NamedTuple):
    """An answer, how many tokens of its prompt were cached, and how long it took."""

    tokens: list[int]
    num_cached: int
    ms: float


class Outliving:
    """Servers of one model, one after the other, with one folder."""

    def __init__(self, model: str, flags: Sequence[str], folder: Path, prompt: int) -> None:
        self.prompt = prompt
        self.rows: list[dict[str, Any]] = []
        self._folder = folder / "kv"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        own = ["--port", str(port), "--enable-sleep-mode", "--kv-offload-dir", str(self._folder), "--quiet"]
        takeover = ["--takeover-socket", str(folder / "takeover")]
        self._command = [*OCTAVO, model, *flags, *own, *takeover]

    def start(self) -> ServerProcess:
        server = ServerProcess(self._command, self._url)
        server.wait_ready(SECONDS)
        return server

    def ask(self, number: int, num_tokens: int, num_answered: int = NUM_ANSWERED) -> Found:
        """The answer to the first tokens of prompt ``number``."""
        draw = random.Random(number)
        prompt = [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]
        body = {"prompt": prompt, "max_tokens": num_answered, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = httpx.post(self._url + "/v1/completions", json={**body, "return_token_ids": True}, timeout=SECONDS)
        ms = 1000 * (time.perf_counter() - began)
        found = answer.raise_for_status().json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return Found(found["choices"][0]["token_ids"], details.get("cached_tokens", 0), ms)

    def note(self, case: str, before: Found, after: Found) -> None:
        self.rows.append(
            {
                "case": case,
                "requests": 1,
                "right": int(after.tokens == before.tokens),
                "prompt_tokens": self.prompt,
                "cached_tokens": after.num_cached,
                "cached_percent": round(100 * after.num_cached / self.prompt, 2),
                "recomputed_ms": round(before.ms, 1),
                "cached_ms": round(after.ms, 1),
            }
        )

    def end_and_ask_again(self, idle: float) -> None:
        """Each way to end."""
        with self.start() as server:
            before = self.ask(1, self.prompt)
        with self.start() as server:
            self.note("SIGTERM", before, self.ask(1, self.prompt))
            before = self.ask(2, self.prompt)
            time.sleep(idle)
            for pid in session(server.process.pid):
                os.kill(pid, signal.SIGKILL)
        with self.start() as server:
            self.note(f"kill -9 after {idle:g} s", before, self.ask(2, self.prompt))
            before = self.ask(3, self.prompt)
            for path in ("/sleep", "/wake_up"):
                httpx.post(self._url + path, timeout=SECONDS).raise_for_status()
            self.note("sleep and wake", before, self.ask(3, self.prompt))
            before = self.ask(4, self.prompt)
            with ServerProcess(self._command, self._url) as successor:
                server.process.wait(SECONDS)
                successor.wait_ready(SECONDS)
                self.note("takeover", before, self.ask(4, self.prompt))

    def damage_and_ask_again(self, count: int, length: int, num_prompts: int) -> None:
        """A server computes prompts of ``length`` tokens or three blocks; then ``count`` of their files are damaged."""
        numbers, draw = range(10, 10 + num_prompts), random.Random(0)
        with self.start():
            block_size = httpx.get(self._url + "/stats", timeout=SECONDS).json()["cache"]["page_size"]
            length = max(length, 2 * block_size + 1)
            files = [self._files_of(number, length, block_size) for number in numbers]
            before = [self.ask(number, length) for number in numbers]
        each = min(count // num_prompts, len(files[0]))
        for own in files:
            for file in draw.sample(own, each):
                damage(file, draw)
        with self.start():
            after = [self.ask(number, length) for number in numbers]
            lines = httpx.get(self._url + "/metrics", timeout=SECONDS).text.splitlines()
        num_bad = sum(float(line.split()[-1]) for line in lines if line.startswith("octavo_kv_offload_bad_files_total"))
        num_cached, num_tokens = sum(found.num_cached for found in after), num_prompts * length
        self.rows.append(
            {
                "case": f"{each * num_prompts} damaged files" + (" of one prompt" if num_prompts == 1 else ""),
                "requests": num_prompts,
                "right": sum(one.tokens == other.tokens for one, other in zip(before, after, strict=True)),
                "prompt_tokens": num_tokens,
                "cached_tokens": num_cached,
                "cached_percent": round(100 * num_cached / num_tokens, 2),
                "bad_files": int(num_bad),
            }
        )

    def _files_of(self, number: int, length: int, block_size: int) -> list[Path]:
        """Those of the blocks of a prompt that are read when it is asked again; waits until they are written.

        The last token is left out: with it the last block may be full, and it is always computed.
        """
        others = set(self._files())
        self.ask(number, length - 1, 1)
        end = time.monotonic() + SECONDS
        while len(found := [file for file in self._files() if file not in others]) < (length - 1) // block_size:
            if time.monotonic() > end:
                raise TimeoutError(f"a prompt is not on disk after {SECONDS:g} s: {len(found)} of its blocks are")
            time.sleep(POLL_SECONDS)
        return found

    def _files(self) -> list[Path]:
        """Those of all blocks."""
        with contextlib.closing(sqlite3.connect(self._folder / INDEX)) as index:
            names = [key.hex() for (key,) in index.execute("SELECT key FROM blocks WHERE size >= 0")]
        return [self._folder / name[:2] / name for name in names]


def damage(path: Path, draw: random.Random) -> None:
    """Change a byte of a file, or cut it off, empty it or remove it."""
    content = bytearray(path.read_bytes())
    match draw.randrange(4):
        case 0:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case 1:
            del content[draw.randrange(len(content)) :]
        case 2:
            content.clear()
        case _:
            path.unlink()
            return
    path.write_bytes(content)


def run(model: str, kv_cache_memory: float, prompt: int, idle: float, damaged: int) -> dict[str, Any]:
    """``measure`` for a model as for ``octavo serve``, or a name of ``RANDOM_MODELS``."""
    with tempfile.TemporaryDirectory() as place:
        served, flags = model, ["--kv-cache-memory", str(kv_cache_memory)]
        if model in RANDOM_MODELS:
            changes, own = RANDOM_MODELS[model]
            made = write_tiny_model(Path(place) / model, max_position_embeddings=2 * prompt, **changes)
            write_weights(made)
            served, flags = str(made), [*flags, *own]
        return {"model": model, **measure(served, flags, Path(place), prompt, idle, damaged)}


def measure(
    model: str, flags: Sequence[str], folder: Path, prompt: int, idle: float, num_damaged: int
) -> dict[str, Any]:
    """One row for each way to end, and two for damaged files; see above. ``folder`` is for the servers' files."""
    servers = Outliving(model, flags, folder, prompt)
    servers.end_and_ask_again(idle)
    servers.damage_and_ask_again(num_damaged, SHORT_PROMPT, num_prompts=num_damaged)
    servers.damage_and_ask_again(num_damaged, prompt, num_prompts=1)
    return {"prompt": prompt, "idle": idle, "rows": servers.rows}
