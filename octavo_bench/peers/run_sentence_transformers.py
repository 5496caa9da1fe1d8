"""sentence-transformers on the work of ``octavo bench embeddings``. Run by the peer's interpreter.

Arguments: the model's folder, threads, "cpu" or "cuda", the weights' data type, and the texts of a batch.
Reads one JSON object a line, ``{"texts": [...]}``, and answers each with seconds by the clock and of processors, and
the first text's vector: ``{"finish_s": ..., "cpu_s": ..., "first": [...]}``.
"""

import json
import sys
import time

import sentence_transformers
import torch

if __name__ == "__main__":
    folder, threads, device, dtype, batch = *sys.argv[1:5], int(sys.argv[5])
    torch.set_num_threads(int(threads))
    kwargs = {"torch_dtype": getattr(torch, dtype)}
    model = sentence_transformers.SentenceTransformer(folder, device=device, model_kwargs=kwargs)
    version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"engine": "sentence-transformers", "package": version, "batch": batch}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start, cpu = time.perf_counter(), time.process_time()
        vectors = model.encode(texts, batch_size=batch, show_progress_bar=False)
        times = {"finish_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        print(json.dumps({**times, "first": vectors[0].tolist()}), flush=True)
