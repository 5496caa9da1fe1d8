"""Flags of other servers: many that mean a setting of Octavo are accepted, for others an error says what to use.

``infer`` stands for the server of the project of this name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

FLAGS_OF_OTHERS = {
    "--max-seq-len": "max_model_len",  # infer
    "--context-length": "max_model_len",  # SGLang
    "--ctx-size": "max_model_len",  # llama.cpp
    "--max-batch-size": "max_num_seqs",  # infer
    "--max-running-requests": "max_num_seqs",  # SGLang
    "--num-gpu-blocks": "num_kv_blocks",  # infer
    "--num-gpu-blocks-override": "num_kv_blocks",  # vLLM
    "--prefill-chunk-size": "max_num_batched_tokens",  # infer
    "--chunked-prefill-size": "max_num_batched_tokens",  # SGLang
    "--prefix-caching": "enable_prefix_caching",  # infer
    "--mem-fraction-static": "gpu_memory_utilization",  # SGLang
    "--model-path": "model",  # SGLang
    "--tokenizer-path": "tokenizer",  # SGLang
    "--tp-size": "tensor_parallel_size",  # SGLang
    "--tp": "tensor_parallel_size",  # SGLang
    "--dp-size": "data_parallel_size",  # SGLang
    "--dp": "data_parallel_size",  # SGLang
    "--schedule-policy": "scheduling_policy",  # SGLang
    "--alias": "served_model_name",  # llama.cpp
    "-hf": "model",  # llama.cpp
    "--hf-repo": "model",  # llama.cpp
    "--chat-template-file": "chat_template",  # llama.cpp
    "--disable-cuda-graph": "enforce_eager",  # SGLang
    "--model-id": "model",  # TGI
    "--num-shard": "tensor_parallel_size",  # TGI
    "--quantize": "quantization",  # TGI
    "--max-batch-prefill-tokens": "max_num_batched_tokens",  # TGI
    "--otlp-endpoint": "otlp_traces_endpoint",  # TGI
}
"""The setting that a flag of another server stands for."""


_DRAFTS = 'a draft model is given by --speculative-config \'{"method": "draft_model", "model": ...}\''
_PROMPT_TOKENS = (
    "the prompt tokens of a step are chosen by measured step times, up to --max-num-batched-tokens; "
    "--max-itl limits the time between tokens"
)
_LAYERS = "a model is on one kind of device; choose it with --device"
_THREADS = "the variable OMP_NUM_THREADS sets the number of threads"
_SLOTS = "there are no slots, batching is continuous; --max-num-seqs limits the sequences in a step"
_EMBEDDINGS = "/v1/embeddings is always there; --pooling-type sets how hidden states are pooled"
ADVICE = {
    "--batching-mode": "batching is always continuous; --scheduling-policy static admits whole batches",
    "--kv-cache-backend": "the KV cache is always paged; --block-size sets the tokens of a block",
    "--chunked-prefill": "prompts are always computed in chunks, of at most --max-num-batched-tokens",
    "--enable-chunked-prefill": "prompts are always computed in chunks, of at most --max-num-batched-tokens",
    "--max-waiting-requests": "--max-num-queued-reqs limits waiting requests",
    "--batch-wait-timeout": "requests join the batch at the next step, none waits for a batch to fill",
    "--max-num-mixed-tokens": _PROMPT_TOKENS,
    "--decode-interval": _PROMPT_TOKENS,
    "--cuda-graphs": "CUDA graphs are used unless --enforce-eager is given",
    "--speculative-decoding": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--spec-length": "--speculative-config has the key num_speculative_tokens",
    "--num-speculative-tokens": "--speculative-config has the key num_speculative_tokens",
    "--pipeline-parallel-size": "a model is divided by --tensor-parallel-size alone",
    "--enable-expert-parallel": "--tensor-parallel-size gives every process a part of each expert",
    "--distributed-executor-backend": "--tensor-parallel-size starts its processes itself, on one machine",
    "--n-gpu-layers": _LAYERS,
    "-ngl": _LAYERS,
    "--threads": _THREADS,
    "-t": _THREADS,
    "-m": "give the model as an argument without a flag, or with --model",
    "-c": "--max-model-len sets the context length",
    "--parallel": _SLOTS,
    "-np": _SLOTS,
    "--jinja": "the chat template is always used; --chat-template gives another one",
    "--embeddings": _EMBEDDINGS,
    "--embedding": _EMBEDDINGS,
    "--task": "the checkpoint decides: decoders generate and embed, encoders embed; --pooling-type sets how they pool",
    "--disable-radix-cache": "--no-enable-prefix-caching turns the prefix cache off",
    "--max-total-tokens": "--max-model-len is the limit of a request (TGI), --num-kv-blocks that of the cache (SGLang)",
    "--max-concurrent-requests": "--max-num-seqs limits running requests, --max-num-queued-reqs waiting ones",
    "--cpu-offload-gb": "all weights stay on the device; --quantization makes them smaller",
    "--trust-remote-code": "code of checkpoints is never run; --backend transformers runs models of that library",
    "--collect-detailed-traces": "the spans of --otlp-traces-endpoint always have the times of each phase",
    "--calculate-kv-scales": "--kv-cache-dtype fp8 takes the scales of the checkpoint; without any they are 1",
    "--swap-space": "--kv-offload-memory keeps evicted blocks in host memory",
}
"""What to use in place of a flag of another server, or of an earlier version, that is none here."""

AS_ALWAYS = {
    ("--batching-mode", "continuous"): "batching is always continuous",
    ("--kv-cache-backend", "paged"): "the KV cache is always paged",
    ("--chunked-prefill", ""): "prompts are always computed in chunks",
    ("--enable-chunked-prefill", ""): "prompts are always computed in chunks",
    ("--cuda-graphs", ""): "CUDA graphs are used where there is a GPU",
}
"""Flags with their values that ask for what Octavo does anyway: accepted, with a line that says so."""
DRAFT_MODEL = {"--draft-model": "model", "--spec-length": "num_speculative_tokens"}
"""Of infer, with the keys of ``--speculative-config``."""

VARIABLES_OF_OTHERS = {
    "INFERENGINE_MODEL": "model",
    "INFERENGINE_BACKEND": "backend",
    "INFERENGINE_MAX_BATCH_SIZE": "max_num_seqs",
    "INFERENGINE_MAX_PAGES": "num_kv_blocks",
    "INFERENGINE_PAGE_SIZE": "block_size",
    "INFERENGINE_EVICTION_POLICY": "eviction_policy",
    "INFERENGINE_MAX_MODEL_LEN": "max_model_len",
    "INFERENGINE_TORCH_DTYPE": "dtype",
    "INFERENGINE_DEVICE_MAP": "device",
    "INFERENGINE_MAX_MEMORY": "gpu_memory_utilization",
}
"""Variables of InferEngine, with the setting that each stands for. They are named and not read, as values differ."""


def translated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with flags of ``infer`` that are no single setting here replaced, and a line for each that asks for
    what is so anyway."""
    kept: list[str] = []
    notes: list[str] = []
    drafts: dict[str, str | int] = {}
    has_drafts = any(part.partition("=")[0] == "--draft-model" for part in argv)
    parts = iter(argv)
    for part in parts:
        flag, equals, value = part.partition("=")
        if (part, "") in AS_ALWAYS:
            notes.append(f"{part}: {AS_ALWAYS[part, '']}")
        elif has_drafts and part == "--speculative-decoding":
            pass
        elif flag in ("--batching-mode", "--kv-cache-backend") or (has_drafts and flag in DRAFT_MODEL):
            value = value if equals else next(parts, "")
            if (flag, value) in AS_ALWAYS:
                notes.append(f"{flag} {value}: {AS_ALWAYS[flag, value]}")
            elif (flag, value) == ("--batching-mode", "static"):
                kept += ["--scheduling-policy", "static"]
            elif flag in DRAFT_MODEL:
                drafts[DRAFT_MODEL[flag]] = int(value) if value.isdecimal() and flag == "--spec-length" else value
            else:
                kept.append(f"{flag}={value}")
        else:
            kept.append(part)
    if drafts:
        kept += ["--speculative-config", json.dumps({"method": "draft_model", **drafts})]
    return kept, notes
