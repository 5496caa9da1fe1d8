"""Flags of other servers, and arguments of vLLM's ``LLM``: many that mean a setting of Octavo are accepted, what would
change no answer is passed over with a line that says so, and for others an error says what to use.

``infer`` stands for the server of the project of this name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.errors import ConfigError

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
    "-tp": "tensor_parallel_size",  # vLLM
    "-pp": "pipeline_parallel_size",  # vLLM
    "--pp-size": "pipeline_parallel_size",  # SGLang
    "-dcp": "decode_context_parallel_size",  # vLLM
    "-dp": "data_parallel_size",  # vLLM
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
    "--max-waiting-requests": "--max-num-queued-reqs limits waiting requests",
    "--batch-wait-timeout": "requests join the batch at the next step, none waits for a batch to fill",
    "--max-num-mixed-tokens": _PROMPT_TOKENS,
    "--decode-interval": _PROMPT_TOKENS,
    "--speculative-decoding": _DRAFTS,
    "--speculative-model": _DRAFTS,
    "--spec-length": "--speculative-config has the key num_speculative_tokens",
    "--num-speculative-tokens": "--speculative-config has the key num_speculative_tokens",
    "--dist-init-addr": "--master-addr and --master-port name the host with --node-rank 0",
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
    "--rope-scaling": "--hf-overrides '{\"rope_scaling\": ...}' changes the model's configuration",
    "--rope-theta": "--hf-overrides '{\"rope_theta\": ...}' changes the model's configuration",
    "--hf-token": "the variable HF_TOKEN has the token of the hub",
    "--override-generation-config": "requests have their own values; --generation-config vllm takes neutral ones",
    "--pooler-config": "--pooling-type sets how hidden states are pooled",
    "--middleware": "docs/extending.md says how a package adds to the server",
    "--mm-processor-kwargs": "images are prepared as the checkpoint's preprocessor_config.json says",
    "--kv-transfer-config": "--role prefill or decode computes prompts apart, with --kv-transfer-key, and "
    "--kv-connector nixl for NIXL; "
    "--kv-offload-memory and --kv-offload-dir keep blocks outside the GPU",
    "--kv-cache-memory-bytes": "--kv-cache-memory has GiB",
    "--disable-sliding-window": "windows are part of the model; --max-model-len limits the context",
    "--enable-force-include-usage": "a request asks for it with stream_options.include_usage",
    "--model-impl": "--backend transformers runs the model of that library",
    "--disable-uvicorn-access-log": "--no-access-log turns it off",
    "--response-role": "answers have the role assistant",
    "--tokenizer-mode": "the checkpoint's files decide which tokenizer it has",
    "--calculate-kv-scales": "--kv-cache-dtype fp8 takes the scales of the checkpoint; without any they are 1",
}
"""What to use in place of a flag of another server, or of an earlier version, that is none here."""


class Passed(NamedTuple):
    """A flag that is passed over."""

    why: str
    values: Collection[str] | None = None
    """Those that are passed over, lower case; the flag is refused with others. ``None``: all."""
    has_value: bool = True


def _switches(why: str, *flags: str) -> dict[str, Passed]:
    return {flag: Passed(why, has_value=False) for flag in flags}


def _any(why: str, *flags: str) -> dict[str, Passed]:
    return {flag: Passed(why) for flag in flags}


PASSED_OVER: dict[str, Passed] = {
    "--batching-mode": Passed("batching is always continuous", ("continuous",)),
    "--kv-cache-backend": Passed("the KV cache is always paged", ("paged",)),
    "--cpu-offload-gb": Passed("all weights stay on the device", ("0", "0.0")),
    "--tokenizer-mode": Passed("the checkpoint's files decide", ("auto", "hf", "slow", "mistral")),
    "--task": Passed("the checkpoint decides", ("auto", "generate", "embed", "classify", "score", "reward")),
    "--model-impl": Passed("native code is used where there is some", ("auto", "vllm")),
    "--response-role": Passed("answers have this role", ("assistant",)),
    **_switches(
        "prompts are always computed in chunks",
        *("--chunked-prefill", "--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    ),
    **_switches("CUDA graphs are used where there is a GPU", "--cuda-graphs"),
    **_switches("code of checkpoints is never run, nor needed by the families that there are", "--trust-remote-code"),
    **_switches(
        "--access-log logs a line for each request, and never its text",
        *("--disable-log-requests", "--enable-log-requests", "--no-enable-log-requests"),
    ),
    **_switches("/metrics and the log always have figures", "--disable-log-stats", "--no-disable-log-stats"),
    **_switches("the front is a process of its own", "--disable-frontend-multiprocessing"),
    **_switches("usage always has the cached tokens", "--enable-prompt-tokens-details"),
    **_switches("each answer has the header X-Request-ID", "--enable-request-id-headers"),
    **_switches("/metrics always has the running and waiting requests", "--enable-server-load-tracking"),
    **_switches("there are no pages of that kind", "--disable-fastapi-docs"),
    **_switches(
        "ranks exchange sums as is fastest", "--disable-custom-all-reduce", "--disable-nccl-for-dp-synchronization"
    ),
    **_switches("kernels are chosen by measured time", "--disable-cascade-attn", "--enable-dbo"),
    **_any("the spans of --otlp-traces-endpoint always have the times of each phase", "--collect-detailed-traces"),
    **_any("--kv-offload-memory keeps evicted blocks in host memory", "--swap-space"),
    **_any(
        "kernels and graphs are chosen by measured time",
        *("--compilation-config", "-O", "--max-seq-len-to-capture", "--cuda-graph-sizes", "--attention-backend"),
        *("--performance-mode", "--mm-encoder-tp-mode", "--mm-encoder-attn-backend", "--num-scheduler-steps"),
        "--optimization-level",
    ),
    **_any(
        "grammars are always compiled in the same way",
        *("--guided-decoding-backend", "--structured-outputs-config", "--reasoning-backend"),
    ),
    **_any(
        "prompts share a step by the work that is left of them",
        *("--max-num-partial-prefills", "--long-prefill-token-threshold", "--max-long-partial-prefills"),
    ),
    **_any("--log-level sets what is logged", "--uvicorn-log-level", "--max-log-len", "--log-config-file"),
    **_any("the chat template decides", "--chat-template-content-format"),
    **_any("the checkpoint decides", "--runner", "--convert"),
    **_any("one process reads all requests; --data-parallel-size starts several engines", "--api-server-count"),
    **_any("metrics keep their names", "--show-hidden-metrics-for-version"),
    **_any("--max-images limits the images and videos of a request", "--limit-mm-per-prompt"),
    **_any("preempted sequences are computed again", "--preemption-mode"),
    **_any("files are read by memory mapping", "--model-loader-extra-config"),
}
"""Flags of others that ask for what Octavo does anyway, or for what changes no answer."""
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


def passed_over(flag: str, value: str) -> str | None:
    """Why a flag of another server is passed over with this value; ``None`` if it is not."""
    found = PASSED_OVER.get(flag)
    return found.why if found is not None and (found.values is None or value.lower() in found.values) else None


def of_llm(settings: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Arguments of ``LLM`` with those of other engines replaced, and a line for each that is passed over.

    ``known`` are the names of settings. Raises ``ConfigError`` for those that have something else here.
    """
    kept: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if name in known:
            kept[name] = value
        elif flag in FLAGS_OF_OTHERS:
            kept[FLAGS_OF_OTHERS[flag]] = value
        elif value is None or (why := passed_over(flag, str(value))) is not None:
            if value is not None:
                notes.append(f"{name}={value!r}: {why}")
        elif flag in ADVICE:
            raise ConfigError(f"there is no setting {name!r}: {ADVICE[flag]}")
        else:
            kept[name] = value
    return kept, notes


def translated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with flags of ``infer`` that are no single setting here replaced, and a line for each flag that is
    passed over."""
    kept: list[str] = []
    notes: list[str] = []
    drafts: dict[str, str | int] = {}
    has_drafts = any(part.partition("=")[0] == "--draft-model" for part in argv)
    parts = iter(argv)
    for part in parts:
        flag, equals, value = _split(part)
        found = PASSED_OVER.get(flag)
        if has_drafts and part == "--speculative-decoding":
            continue
        if found is None and not (has_drafts and flag in DRAFT_MODEL):
            kept.append(part)
            continue
        if not equals and (found is None or found.has_value):
            value = next(parts, "")
        if (why := passed_over(flag, value)) is not None:
            notes.append(f"{flag}{' ' if value else ''}{value}: {why}")
        elif (flag, value) == ("--batching-mode", "static"):
            kept += ["--scheduling-policy", "static"]
        elif flag in DRAFT_MODEL:
            drafts[DRAFT_MODEL[flag]] = int(value) if value.isdecimal() and flag == "--spec-length" else value
        else:
            kept.append(f"{flag}={value}")
    if drafts:
        kept += ["--speculative-config", json.dumps({"method": "draft_model", **drafts})]
    return kept, notes


def _split(part: str) -> tuple[str, bool, str]:
    """A flag, whether its value is in the same argument, and that value."""
    if part.startswith("-O") and part[2:].isdecimal():  # -O3
        return "-O", True, part[2:]
    flag, equals, value = part.partition("=")
    return flag, bool(equals), value
