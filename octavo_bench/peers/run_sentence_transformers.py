"""sentence-transformers on the work of ``octavo bench embeddings``. Run by the peer's interpreter.

Reads one JSON object a line, ``{"texts": [...]}``, and answers each with seconds by the clock and of processors, and
the first text's vector: ``{"finish_s": ..., "cpu_s": ..., "first": [...]}``.
"""

import json
import sys
import time

import sentence_transformers
import torch

BATCH = 32

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    model = sentence_transformers.SentenceTransformer(sys.argv[1], device="cpu")
    version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"engine": "sentence-transformers", "package": version, "batch": BATCH}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start, cpu = time.perf_counter(), time.process_time()
        vectors = model.encode(texts, batch_size=BATCH, show_progress_bar=False)
        times = {"finish_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        print(json.dumps({**times, "first": vectors[0].tolist()}), flush=True)
