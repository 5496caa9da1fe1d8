"""The settings of the HTTP server; ``octavo.config`` has those of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.sampling_params import MAX_N
from octavo.setting import setting

TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "granite4", "llama3_json", "llama4_json", "mistral", "deepseek_v3", "deepseek_v31"),
    *("deepseek_v32", "deepseek_v4", "openai", "pythonic", "llama4_pythonic", "qwen3_coder", "qwen3_xml", "step3p5"),
    *("mimo", "glm45", "glm47", "minimax_m2", "kimi_k2", "seed_oss", "granite", "phi4_mini_json", "olmo3", "lfm2"),
    *("hunyuan_a13b", "jamba", "nemotron_json", "cohere_command3", "cohere_command4", "longcat"),
    *("gemma4", "functiongemma", "internlm", "granite-20b-fc", "minimax", "ernie45"),
)
"""Names of the formats in ``octavo.text.message_format``, most of them vLLM's."""
REASONING_PARSERS = (
    *("auto", "none", "deepseek_r1", "deepseek_v3", "ernie45", "exaone4", "glm45", "glm47", "holo2", "kimi_k2", "mimo"),
    *("minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5", "mistral", "seed_oss", "kimi_vl", "gemma4"),
    *("cohere_command3", "cohere_command4", "granite", "granite33", "hunyuan_a13b", "openai_gptoss"),
)
"""Names in ``octavo.text.reasoning``."""
DIALECTS = ("openai", "infer")
"""Forms of ``/v1/completions``."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    headless: bool = setting(
        False, "serve no HTTP, but compute layers for the host with node_rank 0, until this process is ended"
    )
    served_model_name: str | None = setting(None, "comma-separated model names in the API; default: from the model")
    api_key: str | None = setting(None, "key that clients must send as a Bearer token; default: none required")
    api_key_file: str | None = setting(
        None, "file of keys, one per line: name, SHA-256 of the key, requests_per_minute=, tokens_per_minute=, admin"
    )
    admin_key: str | None = setting(None, "key for /admin and, with api_key_file, /metrics and /stats; default: none")
    allowed_hosts: str | None = setting(
        None,
        "comma-separated Host names that requests may carry, or *; default: names of this machine if host is a "
        "loopback address, else any",
    )
    allowed_origins: str | None = setting(
        None, "comma-separated origins of web pages that may use this server (CORS), or *; default: none"
    )
    ssl_certfile: str | None = setting(None, "certificate file, to serve HTTPS")
    ssl_keyfile: str | None = setting(None, "file of the certificate's private key; default: ssl_certfile")
    ssl_ca_certs: str | None = setting(None, "file of CAs; every client must present a certificate of one of them")
    console: bool = setting(True, "serve a page at / that chats with the model and shows what the engine does")
    max_num_queued_reqs: int = setting(256, "maximum waiting requests; further ones get 429", low=1)
    max_request_bytes: int = setting(32 << 20, "maximum size of a request body in bytes", low=1024)
    max_images: int = setting(32, "maximum number of images and videos in a request", low=1)
    max_image_bytes: int = setting(20 << 20, "maximum size of the file of an image or a video, in bytes", low=1024)
    allowed_media_domains: str | None = setting(
        None,
        "comma-separated hosts, such as images.example.com or images.example.com:8443, from which images and videos of "
        "http: and https: URLs are fetched; default: none, they come in data: URLs and uploaded files",
    )
    tool_call_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto: from its chat template, else hermes, described in the prompt",
        TOOL_CALL_PARSERS,
    )
    enable_auto_tool_choice: bool = setting(True, "accept tool_choice auto: the model decides whether to call a tool")
    reasoning_parser: str = setting(
        "auto", "format of the model's reasoning; auto: from its chat template", REASONING_PARSERS
    )
    allow_runtime_lora_updating: bool = setting(
        False, "allow clients to load LoRA adapters from folders of this machine, and to unload them"
    )
    enable_sleep_mode: bool = setting(
        False, "let clients free the memory of a model with POST /sleep, until the next request or POST /wake_up"
    )
    weight_updates_dir: str | None = setting(
        None,
        "folder of checkpoints whose weights clients may have this server take while it serves, as trainers do, with "
        "POST /update_weights, /pause and /resume; default: none",
    )
    weight_transfer_config: str | None = setting(
        None,
        'let clients broadcast weights to this server while it serves, as trainers do, as JSON: {"backend": "nccl"}, '
        'or "gloo"; default: off',
        is_json=True,
    )
    models_memory_budget: float | None = setting(
        None,
        "GiB of memory that several models may take together; those used least recently sleep until asked for; "
        "default: no bound",
        low=0.001,
    )
    unknown_fields: str = setting(
        "warn",
        "request fields that have no effect: warn names them in a header, reject refuses the request, ignore is silent",
        ("warn", "reject", "ignore"),
    )
    isolate_keys: bool | None = setting(
        None, "share the prefix cache only among requests of the same API key; default: on with api_key_file"
    )
    tenant_by: str | None = setting(
        None,
        "what identifies the tenant under the fair policy: the field 'user', the API key, or the LoRA adapter; "
        "default: key with api_key_file, else user",
        ("user", "key", "adapter"),
    )
    tenant_header: str | None = setting(None, "header that names the tenant, instead of the field 'user'")
    state_dir: str | None = setting(
        None, "folder for stored responses, files and batches; default: a temporary file, until the server stops"
    )
    retention_hours: float = setting(720.0, "hours until stored responses, files and batches are deleted", low=0.001)
    journal: str | None = setting(
        None, "folder for a journal of requests with an Idempotency-Key, which then continue after a restart"
    )
    journal_retention: float = setting(600.0, "seconds for which the journal keeps ended requests", low=0)
    request_timeout: float | None = setting(
        None, "seconds until an unfinished request ends with 504; its own 'timeout' may be shorter", low=0.001
    )
    request_seed: int | None = setting(
        None,
        "seed of requests that give none, whose tokens are then reproducible; default: random",
        low=0,
        high=2**64 - 1,
    )
    max_n: int = setting(128, "most continuations of a prompt that a request may ask for", low=1, high=MAX_N)
    repetition_detection: str | None = setting(
        None,
        "end texts of requests without this field that repeat a pattern of tokens, as JSON with the field's members: "
        '{"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 4}; default: off',
        is_json=True,
    )
    accept_any_model: bool = setting(False, "serve requests for any model name, and answer with that name")
    completions_dialect: str = setting(
        "openai",
        "form of /v1/completions: the OpenAI API's, or the events token, done and error of the project infer; "
        "a request may choose by the header x-octavo-dialect",
        DIALECTS,
    )
    shutdown_timeout: float = setting(30.0, "seconds that running requests have to finish on SIGTERM", low=0)
    supervise: float | None = setting(
        None,
        "start the server as a child process, and again when it dies, or gives no sign of life for so many seconds",
        low=0.2,
    )
    engine_timeout: float = setting(
        120.0,
        "seconds without a finished step, while requests run, until the engine is restarted; "
        "while it starts, seconds in which it uses no processor time",
        low=1,
    )
    health_fail_after: float | None = setting(
        None, "seconds without a sign of life of the engine after which /health fails; default: only /ready does", low=1
    )
    data_parallel_size: int = setting(
        1,
        "engine processes behind this server, each with its own GPU, or an equal share of the cores",
        low=1,
        high=1024,
    )
    data_parallel_router: str = setting(
        "prefix-aware",
        "which engine process a request goes to",
        ("round-robin", "random", "session", "least-loaded", "prefix-aware"),
    )
    kv_events_config: str | None = setting(
        None,
        'publish changes of the prefix cache over ZeroMQ in vLLM\'s format, as JSON: {"endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558", "topic": ""}; default: off',
        is_json=True,
    )
    upstream: str | None = setting(
        None,
        "URL of the server that backend openai forwards requests to, such as http://127.0.0.1:8001; of several, with "
        "commas between, completions go to the one that has most of the prompt or least to do, all else to the first",
    )
    prefill_upstream: str | None = setting(
        None, "comma-separated URLs of servers with --role prefill, for an upstream of servers with --role decode"
    )
    upstream_command: str | None = setting(
        None, "command that serves at upstream; it is started, restarted when it fails, and ended with this server"
    )
    upstream_api_key: str | None = setting(
        None, "key that is sent to upstream; default: the client's own, unless this server asks for keys"
    )
    log_level: str = setting("info", "lowest level that is logged", ("debug", "info", "warning", "error"))
    log_format: str = setting("text", "format of the log on standard error", ("text", "json"))
    takeover_socket: str | None = setting(
        None,
        "Unix socket at which the next server that is started with it takes over the port, open connections and the "
        "journal, for restarts without a gap; default: none",
    )
    access_log: bool = setting(True, "log each request: client, method, path, status, seconds and id")
    otlp_traces_endpoint: str | None = setting(
        None, "URL to send OpenTelemetry traces to, by OTLP over HTTP, such as http://127.0.0.1:4318; default: none"
    )
