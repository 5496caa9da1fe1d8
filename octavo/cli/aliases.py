"""Flags of other servers: those that mean a setting of Octavo are accepted, for the others an error says what to use.

``infer`` stands for the server of the project of this name.
"""

from __future__ import annotations

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
    "--dp-size": "data_parallel_size",  # SGLang
    "--schedule-policy": "scheduling_policy",  # SGLang
    "--alias": "served_model_name",  # llama.cpp
    "-hf": "model",  # llama.cpp
    "--hf-repo": "model",  # llama.cpp
    "--disable-cuda-graph": "enforce_eager",  # SGLang
    "--otlp-endpoint": "otlp_traces_endpoint",  # TGI
}
"""The setting that a flag of another server stands for."""


_DRAFTS = 'a draft model is given by --speculative-config \'{"method": "draft_model", "model": ...}\''
_PROMPT_TOKENS = (
    "the prompt tokens of a step are chosen by measured step times, up to --max-num-batched-tokens; "
    "--max-itl limits the time between tokens"
)
ADVICE = {
    "--batching-mode": "batching is always continuous; --scheduling-policy static admits whole batches",
    "--kv-cache-backend": "the KV cache is always paged; --block-size sets the tokens of a block",
    "--chunked-prefill": "prompts are always computed in chunks, of at most --max-num-batched-tokens",
    "--enable-chunked-prefill": "prompts are always computed in chunks, of at most --max-num-batched-tokens",
    "--max-num-mixed-tokens": _PROMPT_TOKENS,
    "--decode-interval": _PROMPT_TOKENS,
    "--cuda-graphs": "CUDA graphs are used unless --enforce-eager is given",
    "--speculative-decoding": _DRAFTS,
    "--draft-model": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--spec-length": "--speculative-config has the key num_speculative_tokens",
    "--num-speculative-tokens": "--speculative-config has the key num_speculative_tokens",
    "--pipeline-parallel-size": "a model is divided by --tensor-parallel-size alone",
    "--n-gpu-layers": "a model is on one kind of device; choose it with --device",
    "--threads": "the variable OMP_NUM_THREADS sets the number of threads",
    "--trust-remote-code": "code of checkpoints is never run; --backend transformers runs models of that library",
    "--collect-detailed-traces": "the spans of --otlp-traces-endpoint always have the times of each phase",
    "--calculate-kv-scales": "--kv-cache-dtype fp8 takes the scales of the checkpoint; without any they are 1",
    "--swap-space": "--kv-offload-memory keeps evicted blocks in host memory",
}
"""What to use in place of a flag of another server, or of an earlier version, that is none here."""
