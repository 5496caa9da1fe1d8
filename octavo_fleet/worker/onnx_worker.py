"""A worker over ONNX Runtime: serves a decoder that was exported with its KV cache, on a CPU.

    python -m octavo_fleet.worker.onnx_worker model.onnx --port 50051

It is an example of a worker, which may be written in any language: ``worker.proto`` says what one must do. The graph
has the inputs and outputs that Optimum gives a decoder (``optimum-cli export onnx --task text-generation-with-past``):
``input_ids``, optionally ``attention_mask`` and ``position_ids``, and ``past_key_values.N.key`` and ``.value``
[1, K, P, H] for each layer N; ``logits`` [1, T, V], and ``present.N.key`` and ``.value`` [1, K, P + T, H].

Shapes: T new tokens, P cached positions, K KV heads, H head dimension, V vocabulary, N blocks, S positions of a block.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CANCELLATIONS, ConfigError
from octavo.system.addresses import is_loopback
from octavo_fleet.worker import credentials, messages

try:
    import grpc
    import onnxruntime
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("this worker needs the packages grpcio and onnxruntime: pip install 'octavo[grpc]'")

KEEPALIVE = [("grpc.keepalive_time_ms", 20_000)]
"""So that a call ends when the machine of its engine is gone, and a new one can begin."""

HANDOVER_SECONDS = 1.0
"""How long a call waits for the end of the one before, of an engine that was just closed."""


class OnnxDecoder:
    """An exported decoder."""

    def __init__(self, file: Path, num_threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        inputs = {item.name: item.shape for item in self.session.get_inputs()}
        outputs = {item.name: item.shape for item in self.session.get_outputs()}
        self.pasts = [name for name in inputs if name.startswith("past_key_values.")]
        self.presents = [name.replace("past_key_values", "present") for name in self.pasts]
        missing = {"input_ids"} - inputs.keys() | {"logits", *self.presents} - outputs.keys()
        if missing or not self.pasts:
            sys.exit(f"{file}: is not a decoder exported with its cache; missing: {', '.join(missing) or 'its cache'}")
        self.optional = inputs.keys() & {"attention_mask", "position_ids"}
        self.heads = [(int(inputs[name][1]), int(inputs[name][3])) for name in self.pasts]
        self.vocab_size = int(outputs["logits"][2])

    def __call__(self, token_ids: list[int], pasts: list[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        """Logits [T, V] of the tokens, and each layer's keys and values [K, T, H], given those [K, P, H] before."""
        T, P = len(token_ids), pasts[0].shape[1]
        optional = {
            "attention_mask": np.ones((1, P + T), dtype=np.int64),
            "position_ids": np.arange(P, P + T, dtype=np.int64)[None],
        }
        inputs = {name: optional[name] for name in self.optional}
        inputs |= {"input_ids": np.array([token_ids], dtype=np.int64)}
        inputs |= {name: past[None] for name, past in zip(self.pasts, pasts, strict=True)}
        logits, *presents = self.session.run(["logits", *self.presents], inputs)
        return [logits[0], *(present[0, :, P:] for present in presents)]


class PagedCache:
    """Keys and values in blocks: an array [K, N * S, H] for each cache input of the decoder."""

    def __init__(self, decoder: OnnxDecoder, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.arrays = [np.zeros((K, num_blocks * block_size, H), np.float32) for K, H in decoder.heads]

    def slots(self, block_table: list[int], start: int, end: int) -> npt.NDArray[np.int64]:
        """Where positions ``start`` to ``end`` of a sequence are."""
        positions = np.arange(start, end)
        blocks = np.array(block_table, dtype=np.int64)[positions // self.block_size]
        slots: npt.NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots


class OnnxWorker:
    """The methods of the service."""

    def __init__(self, decoder: OnnxDecoder, description: Any) -> None:
        self._decoder, self._description = decoder, description
        self._is_free = threading.Lock()

    def describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The method ``Describe``."""
        return self._description

    def execute(self, steps: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The method ``Execute``; the memory of the cache is for one call at a time."""
        if not self._is_free.acquire(timeout=HANDOVER_SECONDS):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another engine uses this worker")
        try:
            cache = PagedCache(self._decoder, self._description.num_blocks, self._description.block_size)
            for step in steps:
                yield self._compute(step, cache)
        finally:
            self._is_free.release()

    def _compute(self, step: Any, cache: PagedCache) -> Any:
        try:
            rows = [self._advance(sequence, cache) for sequence in step.sequences]
        except CANCELLATIONS:
            raise
        except BaseException as error:  # any error of the runtime ends this step only
            code = grpc.StatusCode.INTERNAL.value[0]
            return messages.StepResult(number=step.number, error=messages.Error(code=code, message=str(error)))
        return messages.StepResult(number=step.number, logits=b"".join(rows))

    def _advance(self, sequence: Any, cache: PagedCache) -> bytes:
        """Compute the tokens of a sequence; returns the logits of the last ``num_logits``."""
        start, end = sequence.start, sequence.start + len(sequence.token_ids)
        slots = cache.slots(list(sequence.block_table), 0, end)
        pasts = [array[:, slots[:start]] for array in cache.arrays]
        logits, *news = self._decoder(list(sequence.token_ids), pasts)
        for array, new in zip(cache.arrays, news, strict=True):
            array[:, slots[start:]] = new
        return np.ascontiguousarray(logits[len(logits) - sequence.num_logits :], dtype="<f4").tobytes()


KEY_VARIABLE = "OCTAVO_GRPC_API_KEY"
"""Environment variable with the key, for both ends."""


def make_server(
    worker: OnnxWorker,
    address: str,
    key: str | None = None,
    certificate: bytes | None = None,
    private_key: bytes | None = None,
) -> tuple[grpc.Server, int]:
    """A server, not started, and its port. Two engines may be connected while one of them ends."""
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=4),
        options=[*messages.UNLIMITED, *KEEPALIVE],
        interceptors=[] if key is None else [credentials.key_check(key)],
    )
    describe = grpc.unary_unary_rpc_method_handler(
        worker.describe, messages.DescribeRequest.FromString, messages.Description.SerializeToString
    )
    execute = grpc.stream_stream_rpc_method_handler(
        worker.execute, messages.Step.FromString, messages.StepResult.SerializeToString
    )
    handlers = {"Describe": describe, "Execute": execute}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, handlers),))
    return server, credentials.listen(server, address, certificate, private_key)


def _secrets(args: argparse.Namespace) -> tuple[str | None, bytes | None, bytes | None]:
    """The key, the certificate and its private key. Raises ``ConfigError``."""
    key = os.environ.get(KEY_VARIABLE)
    if not is_loopback(args.host) and None in (key, args.ssl_certfile):
        raise ConfigError(
            f"--host {args.host} can be reached from other machines: give --ssl-certfile and --ssl-keyfile, and a key "
            f"in the environment variable {KEY_VARIABLE}"
        )
    if key is not None:
        credentials.check_key(key, KEY_VARIABLE)
    if args.ssl_certfile is None:
        return key, None, None
    certificate = credentials.read_file(args.ssl_certfile, "--ssl-certfile")
    return key, certificate, credentials.read_file(args.ssl_keyfile or args.ssl_certfile, "--ssl-keyfile")


def main(argv: list[str] | None = None) -> None:
    """Serve until the process is asked to end."""
    command = "python -m octavo_fleet.worker.onnx_worker"
    parser = argparse.ArgumentParser(prog=command, description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="decoder in ONNX, exported with its KV cache")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=50051, help="port to listen at; 0: any free one")
    parser.add_argument("--ssl-certfile", help="certificate file, to serve with TLS")
    parser.add_argument("--ssl-keyfile", help="file of the certificate's private key; default: --ssl-certfile")
    parser.add_argument("--max-model-len", type=int, default=2048, help="positions of the longest sequence")
    parser.add_argument("--block-size", type=int, default=16, help="positions of a block")
    parser.add_argument("--num-blocks", type=int, default=1024, help="blocks of the KV cache")
    parser.add_argument("--threads", type=int, default=0, help="threads of a computation; 0: one per core")
    args = parser.parse_args(argv)
    if not args.model.is_file():
        parser.error(f"{args.model} is not a file")
    try:
        secrets = _secrets(args)
    except ConfigError as error:
        parser.error(str(error))
    decoder = OnnxDecoder(args.model, args.threads)
    description = messages.Description(
        model=args.model.stem,
        vocab_size=decoder.vocab_size,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        shares_blocks=True,
        logits_type=messages.FLOAT32,
    )
    host = f"[{args.host}]" if ":" in args.host else args.host
    server, port = make_server(OnnxWorker(decoder, description), f"{host}:{args.port}", *secrets)
    server.start()
    print(f"worker of {args.model} at {args.host}:{port}", flush=True)
    is_ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_ending.set())
    is_ending.wait()
    server.stop(grace=0).wait()


if __name__ == "__main__":
    main()
