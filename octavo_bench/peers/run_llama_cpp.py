"""llama.cpp on the work of ``octavo bench offline``. Run by the peer's interpreter, which has llama-cpp-python.

Reads one JSON object a line, ``{"sequences": 4, "prompt": 512, "decode": 64}``, and answers each with
``{"prefill_tok_s": ..., "decode_tok_s": ...}``. All sequences share one batch, as ``llama_decode`` allows.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp
import numpy as np

BATCH = 512


class Peer:
    def __init__(self, path: str, threads: int) -> None:
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.threads = threads
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def decode(self, context: object, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted)."""
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = wanted
        self.batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(context, self.batch):
            raise RuntimeError("llama_decode failed")

    def best(self, context: object, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocab_size)).contents
        return int(np.frombuffer(values, np.float32).argmax())

    def run(self, sequences: int, prompt: int, decode: int) -> dict[str, float]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * (prompt + decode + 8)
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        context = llama_cpp.llama_init_from_model(self.model, params)
        rng = random.Random(0)
        last = []
        start = time.perf_counter()
        for sequence in range(sequences):
            tokens = [rng.randrange(self.vocab_size) for _ in range(prompt)]
            for first in range(0, prompt, BATCH):
                chunk = tokens[first : first + BATCH]
                self.decode(context, [(t, first + i, sequence, first + i == prompt - 1) for i, t in enumerate(chunk)])
            last.append(self.best(context, len(chunk) - 1))
        middle = time.perf_counter()
        for step in range(decode):
            self.decode(context, [(last[s], prompt + step, s, True) for s in range(sequences)])
            last = [self.best(context, s) for s in range(sequences)]
        end = time.perf_counter()
        llama_cpp.llama_free(context)
        return {
            "prefill_tok_s": sequences * prompt / (middle - start),
            "decode_tok_s": sequences * decode / (end - middle),
        }


if __name__ == "__main__":
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    about = {
        "engine": "llama.cpp",
        "package": f"llama-cpp-python {llama_cpp.__version__}",
        "build": llama_cpp.llama_print_system_info().decode(),
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), flush=True)
