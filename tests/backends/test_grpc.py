"""The backend grpc: an ONNX worker against ``generate`` of transformers, and workers that fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch

from octavo import LLM
from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import ConfigError, WorkerLost
from octavo.sampling_params import SamplingParams
from octavo.system.addresses import is_loopback
from octavo.types import Output, Request
from octavo_fleet.worker import messages, onnx_worker
from tests.backends.checkpoints import save_checkpoint
from tests.backends.onnx_export import export
from tests.backends.test_transformers import expected, prompts, run
from tests.backends.workers import FakeWorker, WorkerProcess, serving
from tests.conftest import Server

WORKER = Path(messages.__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a checkpoint, with its ONNX graph next to it, and its model in transformers."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_checkpoint("llama", folder)
    export(folder)
    (folder / "model.safetensors").unlink()
    return folder, model


@pytest.fixture(scope="module")
def worker(checkpoint: tuple[Path, Any]) -> Iterator[WorkerProcess]:
    process = WorkerProcess(checkpoint[0].with_suffix(".onnx"))
    yield process
    process.end(signal.SIGTERM)
    assert process.process.returncode == 0


def build(folder: Path, address: str, **settings: Any) -> tuple[Any, Any]:
    given = {"model": folder, "backend": "grpc", "grpc_worker": address, "max_num_batched_tokens": 32, **settings}
    return build_engine(EngineConfig.from_flat(given))


def close(engine: Any) -> None:
    """End the connection, so that the worker is free."""
    engine.runner.executor._model._connection.close()


def finish(engine: Any, params: SamplingParams, prompt: list[int], max_tokens: int = 4) -> list[Output]:
    engine.add(Request(next(IDS), prompt, params, max_tokens=max_tokens))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


IDS = itertools.count(1000)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    from grpc_tools import protoc

    out = tmp_path / "worker.binpb"
    assert protoc.main(["", f"-I{WORKER}", f"--descriptor_set_out={out}", "worker.proto"]) == 0
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    kept, made = (FileDescriptorSet.FromString(file.read_bytes()) for file in (WORKER / "worker.binpb", out))
    assert kept == made


def test_tokens_equal_generate_alone_and_batched(checkpoint: tuple[Path, Any], worker: WorkerProcess) -> None:
    folder, model = checkpoint
    asked = prompts()
    right = [expected(model, prompt) for prompt in asked]
    engine, info = build(folder, f"127.0.0.1:{worker.port}")
    assert (info.vocab_size, info.block_size, info.num_kv_blocks) == (model.config.vocab_size, 4, 64)
    assert run(engine, asked) == right, "batched"
    assert [run(engine, [prompt], 100 + i)[0] for i, prompt in enumerate(asked)] == right, "alone"
    assert engine.scheduler.stats.num_preemptions > 0
    assert engine.stats().prefix_hits > 0
    with pytest.raises(WorkerLost, match="RESOURCE_EXHAUSTED: another engine uses this worker"):
        build(folder, f"127.0.0.1:{worker.port}")
    close(engine)


def test_a_closed_engine_frees_its_worker(checkpoint: tuple[Path, Any], worker: WorkerProcess) -> None:
    folder, model = checkpoint
    prompt = {"prompt_token_ids": prompts()[1]}
    for _ in range(2):
        with LLM(folder, backend="grpc", grpc_worker=f"127.0.0.1:{worker.port}") as llm:
            (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))
            assert output.outputs[0].token_ids == expected(model, prompts()[1])[:4]


def test_log_probabilities_of_a_prompt_in_chunks(checkpoint: tuple[Path, Any], worker: WorkerProcess) -> None:
    folder, model = checkpoint
    prompt = prompts()[0]
    assert len(prompt) > 32, "or it is one chunk"
    engine, _ = build(folder, f"127.0.0.1:{worker.port}")
    outputs = finish(engine, SamplingParams(temperature=0, prompt_logprobs=0, logprobs=1), prompt)
    found = [entry.logprob for output in outputs for entry in output.prompt_logprobs or []]
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    right = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), right, atol=1e-4, rtol=0)
    assert [output.logprobs[0].token_id for output in outputs if output.logprobs] == expected(model, prompt)[:4]
    close(engine)


def greedy(engine: Any, prompt: list[int]) -> list[Output]:
    return finish(engine, SamplingParams(temperature=0), prompt)


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("logits_type", [messages.FLOAT32, messages.BFLOAT16])
def test_what_a_worker_is_asked(tmp_path: Path, logits_type: int) -> None:
    worker = FakeWorker(logits_type=logits_type, shares_blocks=False, max_num_batched_tokens=8)
    with serving(worker) as address:
        engine, info = build(tmp_path, address)
        assert info.max_num_batched_tokens == 8
        worker.steps.clear()
        assert tokens(greedy(engine, [*range(10)])) == [10, 11, 12, 13]
        assert tokens(greedy(engine, [*range(10)])) == [10, 11, 12, 13]
        first, second, third, *_ = (step.sequences[0] for step in worker.steps)
        assert (first.start, list(first.token_ids)) == (0, [*range(8)])
        assert (second.start, list(second.token_ids), second.num_logits) == (8, [8, 9], 1)
        assert (third.start, list(third.token_ids), len(third.block_table)) == (10, [10], 3)
        assert len(worker.steps) == 10, "and the second time, nothing is cached: sequences cannot share blocks"
        with pytest.raises(ConfigError, match="eviction_policy: the worker's sequences cannot share blocks"):
            build(tmp_path, address, eviction_policy="lfu")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("rows", r"0 bytes of logits instead of 1 x 200, for a vocabulary of 50 and float32"),
        ("error", r"no memory \(code 8\)"),
        ("long error", r"no  \[31m(memory ){40}.{1,20}\.\.\. \(code 8\)"),
    ],
)
def test_a_failed_step_ends_its_requests(tmp_path: Path, fault: str, message: str) -> None:
    worker = FakeWorker()
    with serving(worker) as address:
        engine, _ = build(tmp_path, address)
        worker.fault = fault
        (output,) = greedy(engine, [1, 2])
        assert output.error is not None
        assert re.search(message, output.error)
        worker.fault = ""
        assert tokens(greedy(engine, [1, 2])) == [3, 4, 5, 6], "the engine goes on"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ends", "ended the call"),
        ("aborts", "ended the connection .INTERNAL: out of luck"),
        ("skips", r"sent the result of step \d in place of step \d"),
        ("hangs", "did not answer within 2 s"),
        ("floods", "sent (a result that no step had asked for|the result of step)"),
        ("huge", "ended the connection .RESOURCE_EXHAUSTED: .*larger than max"),
    ],
)
def test_a_lost_worker_ends_the_engine(tmp_path: Path, fault: str, message: str) -> None:
    worker = FakeWorker()
    with serving(worker) as address:
        engine, _ = build(tmp_path, address, grpc_timeout=2.0 if fault == "hangs" else 60.0)
        worker.fault = fault
        seconds = []
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(WorkerLost, match=message):
                greedy(engine, [1, 2])
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 30, "a busy machine may hold up one of them"
        worker.fault = ""
        assert tokens(greedy(build(tmp_path, address)[0], [1, 2])) == [3, 4, 5, 6]


def test_a_loss_is_noticed_between_steps(tmp_path: Path) -> None:
    lost = threading.Event()
    with serving(FakeWorker()) as address:
        given = {"model": tmp_path, "backend": "grpc", "grpc_worker": address}
        engine, _ = build_engine(EngineConfig.from_flat(given), on_lost=lambda status: lost.set())
        assert tokens(greedy(engine, [1, 2])) == [3, 4, 5, 6]
        assert not lost.is_set()
    assert lost.wait(30)


@pytest.mark.parametrize(
    ("description", "settings", "message"),
    [
        ({"vocab_size": 49}, {}, "a vocabulary of 49 tokens, and config.json says 50"),
        ({"num_blocks": 0}, {}, "num_blocks is missing"),
        ({"num_blocks": 4294967295}, {}, r"num_blocks is 4,294,967,295 in its description; at most 1,048,576"),
        ({"block_size": 4294967295}, {}, "block_size is 4,294,967,295"),
        ({"vocab_size": 4294967295}, {}, "vocab_size is 4,294,967,295"),
        ({"num_blocks": 1 << 20, "block_size": 1 << 10}, {}, "1,048,576 blocks of 1,024 positions are more than"),
        (
            {"num_blocks": 1 << 20, "block_size": 1, "max_model_len": 4294967295},
            {},
            "give max_model_len or max_num_seqs",
        ),
        ({"logits_type": 7}, {}, "logits_type 7 is not known"),
        ({"logits_type": -1}, {}, "logits_type -1 is not known"),
        ({"model": "m" * 100_000}, {}, "RESOURCE_EXHAUSTED"),
        ({}, {"max_model_len": 65}, "max_model_len: 65 is more than the worker allows, 64"),
        ({}, {"dtype": "float16"}, "dtype: has no effect with backend grpc"),
        ({}, {"backend": "octavo"}, "grpc_worker: has no effect with backend octavo"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, description: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    with serving(FakeWorker(**description)) as address, pytest.raises(ConfigError, match=message):
        build(tmp_path, address, **settings)


def certificate(folder: Path, name: str = "localhost") -> tuple[str, bytes, bytes]:
    """The file of a certificate, which is its own CA; its content, and its private key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return str(cert), cert.read_bytes(), key.read_bytes()


def test_a_worker_with_a_certificate_and_a_key(tmp_path: Path) -> None:
    file, cert, private_key = certificate(tmp_path)
    other, *_ = certificate(tmp_path, "other")
    given = {"grpc_ssl_ca_certs": file, "grpc_api_key": "secret"}
    with serving(FakeWorker(), "secret", cert, private_key) as address:
        engine, _ = build(tmp_path, address, **given)
        assert tokens(greedy(engine, [1, 2])) == [3, 4, 5, 6]
        close(engine)
        for key in ("Secret", "secret2", "s", None):
            with pytest.raises(ConfigError, match=r"grpc_api_key: the worker at .* refuses it: .* missing or wrong"):
                build(tmp_path, address, **{**given, "grpc_api_key": key})
        for settings in ({"grpc_ssl_ca_certs": other}, {"grpc_ssl_ca_certs": None}):
            with pytest.raises(ConfigError, match="no worker answers at"):
                build(tmp_path, address, **{**given, **settings, "grpc_timeout": 0.3})


def test_a_key_without_tls_on_this_machine(tmp_path: Path) -> None:
    with serving(FakeWorker(), "secret") as address:
        assert tokens(greedy(build(tmp_path, address, grpc_api_key="secret")[0], [1, 2])) == [3, 4, 5, 6]
        channel = grpc.insecure_channel(address)
        steps = channel.stream_stream(f"/{messages.SERVICE}/Execute", messages.Step.SerializeToString)
        for metadata in ((), (("authorization", "Bearer secret"),) * 2, (("authorization", "secret"),)):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                next(steps(iter([messages.Step()]), metadata=metadata, timeout=5))
        channel.close()


@pytest.mark.parametrize("address", ["10.0.0.7:50051", "worker.example:50051", "[2001:db8::1]:50051", "0.0.0.0:1", "1"])
def test_a_worker_elsewhere_needs_a_certificate_and_a_key(tmp_path: Path, address: str) -> None:
    for settings in ({}, {"grpc_api_key": "k"}, {"grpc_ssl_ca_certs": "ca.pem"}):
        with pytest.raises(ConfigError, match=r"give grpc_ssl_ca_certs, .*, and grpc_api_key"):
            build(tmp_path, address, **settings)


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        *((each, True) for each in ("127.0.0.1:1", "127.9.9.9", "localhost:1", "localhost", "[::1]:1", "::1")),
        *((each, True) for each in ("unix:/run/worker", "unix:///run/worker")),
        *(
            (each, False)
            for each in ("0.0.0.0", "::", "[::]:1", "localhost.evil:1", "127.0.0.1.evil:1", "dns:///x", "")
        ),
    ],
)
def test_addresses_of_this_machine(address: str, is_here: bool) -> None:
    assert is_loopback(address) == is_here


def test_a_worker_that_others_can_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.onnx"
    model.touch()
    monkeypatch.delenv("OCTAVO_GRPC_API_KEY", raising=False)
    for key, flags in ((None, []), (None, ["--ssl-certfile", "cert"]), ("k", [])):
        if key is not None:
            monkeypatch.setenv("OCTAVO_GRPC_API_KEY", key)
        with pytest.raises(SystemExit):
            onnx_worker.main([str(model), "--host", "0.0.0.0", *flags])
        assert "give --ssl-certfile and --ssl-keyfile, and a key" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        onnx_worker.main([str(model), "--host", "0.0.0.0", "--ssl-certfile", str(tmp_path / "none")])
    assert "--ssl-certfile: " in capsys.readouterr().err


def test_without_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend grpc needs grpc_worker"):
        build_engine(EngineConfig.from_flat({"model": tmp_path, "backend": "grpc"}))
    with pytest.raises(ConfigError, match=r"no worker answers at 127\.0\.0\.1:9 within 0\.3 s"):
        build(tmp_path, "127.0.0.1:9", grpc_timeout=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never says anything
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no worker answers at"):
            build(tmp_path, address, grpc_timeout=0.3)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[grpc\]'"):
        build(tmp_path, "127.0.0.1:9")


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_loses_nothing(checkpoint: tuple[Path, Any], serve: Callable[..., Server]) -> None:
    folder, _ = checkpoint
    worker = WorkerProcess(folder.with_suffix(".onnx"))
    server = serve(str(folder), *worker.settings, "--grpc-timeout", "2", "--served-model-name", "tiny")
    bodies = [
        {"model": "tiny", "prompt": text, "max_tokens": 120, "ignore_eos": True, **sampling}
        for text, sampling in (("hello", {"temperature": 0}), ("other words", {"temperature": 1, "seed": 5}))
        for _ in range(3)
    ]
    alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies[::3]]
    right = [text for text in alone for _ in range(3)]

    async def stream(client: httpx.AsyncClient, body: dict[str, Any], began: asyncio.Event) -> str:
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    began.set()
        return text

    async def under(disturb: Callable[[], None]) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            begins = [asyncio.Event() for _ in bodies]
            pairs = zip(bodies, begins, strict=True)
            streams = [asyncio.create_task(stream(client, body, began)) for body, began in pairs]
            await asyncio.gather(*(began.wait() for began in begins))
            disturb()
            assert not any(task.done() for task in streams)
            return await asyncio.gather(*streams)

    def kill() -> None:
        worker.end(signal.SIGKILL)
        wait_for(lambda: server.get("/ready").status_code == 503)
        worker.start()

    def stop() -> None:
        worker.process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        worker.process.send_signal(signal.SIGCONT)

    try:
        for count, disturb in enumerate((kill, stop), 1):
            assert asyncio.run(under(disturb)) == right
            assert re.search(rf"^octavo_engine_restarts_total\S* {count}\.0$", server.get("/metrics").text, re.M)
        lost = [line for line in server.lines if " E octavo" in line and ": worker 127.0.0.1" in line]
        assert "ended the connection (UNAVAILABLE" in lost[0]
        assert "did not answer within 2 s" in lost[1]
    finally:
        worker.end(signal.SIGTERM)
