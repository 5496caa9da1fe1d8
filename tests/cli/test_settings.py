"""Where a setting comes from: flag before variable before file before default, and errors that name the source."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import build_parser, main, parse_arguments
from octavo.cli.reference import page
from octavo.cli.settings import environment_warnings, flag_name, load_config, secret_warnings, variable_name
from octavo.config import OWNERS, STORED_METHODS, EngineConfig, ServeConfig, settings, to_flat
from octavo.errors import ConfigError
from octavo.names_of_others import ADVICE, FLAGS_OF_OTHERS, VARIABLES_OF_OTHERS
from octavo.quant.methods import METHODS
from octavo.setting import Setting
from tests.tiers import one_in

SETTINGS = list(settings(ServeConfig))
SAMPLES: dict[type, Any] = {int: 3, float: 0.5, str: "text"}
JSON_SAMPLES = {"repetition_detection": '{"max_pattern_size": 8, "min_count": 4}'}
OF_HOSTS = (*("master_addr", "master_port", "node_key", "node_ssl_certfile", "node_ssl_keyfile", "node_ssl_ca_certs"),)
HOSTS = ["--nnodes", "4", "--pipeline-parallel-size", "4", "--node-key", "text"]
EXCLUSIVE = {
    *("num_kv_blocks", "enable_prefix_caching", "merge_lora", "isolate_keys", "tenant_by", *OWNERS),
    *("data_parallel_size", "backend", "upstream", "upstream_command", "upstream_api_key"),
    "prefill_upstream",
    *("grpc_ssl_ca_certs", "grpc_api_key"),
    *("grpc_worker", "grpc_timeout"),
    *("decode_context_parallel_size", "pipeline_parallel_size", "enable_dp_attention"),
    *("nnodes", "node_rank", "headless", "distributed_executor_backend", *OF_HOSTS),
}
"""Refused together with ``kv_cache_memory``, ``kv_offload_dir``, ``enable_kv_events``, ``tenant_header`` or
``enable_return_routed_experts`` (``enable_prefix_caching``: if off), or under policies or backends to which they do not
apply."""


NEEDED = {
    **{name: ["--scheduling-policy", policies[0]] for name, policies in OWNERS.items()},
    "kv_offload_dir": ["--kv-offload-memory", "1"],
    "kv_offload_disk": ["--kv-offload-memory", "1", "--kv-offload-dir", "kv"],
    "backend": ["--upstream", "http://127.0.0.1:1"],
    "grpc_worker": ["--backend", "grpc"],
    **{
        name: ["--backend", "grpc", "--grpc-worker", "127.0.0.1:1"]
        for name in ("grpc_timeout", "grpc_ssl_ca_certs", "grpc_api_key")
    },
    "upstream": ["--backend", "openai"],
    "prefill_upstream": ["--backend", "openai", "--upstream", "http://127.0.0.1:1"],
    "upstream_command": ["--backend", "openai", "--upstream", "http://127.0.0.1:1"],
    "upstream_api_key": ["--backend", "openai", "--upstream", "http://127.0.0.1:1"],
    "decode_context_parallel_size": ["--tensor-parallel-size", str(SAMPLES[int])],
    **dict.fromkeys(OF_HOSTS, HOSTS),
    "nnodes": ["--pipeline-parallel-size", str(SAMPLES[int]), "--node-key", "k"],
    "distributed_executor_backend": HOSTS[:4],
    "node_rank": [*HOSTS, "--headless"],
    "headless": [*HOSTS, "--node-rank", "1"],
    "quantize_lm_head": ["--quantization", "int8"],
    "tenant_by": ["--enable-lora"],
    "isolate_keys": ["--api-key-file", "keys"],
    "ssl_keyfile": ["--ssl-certfile", "cert.pem"],
    "ssl_ca_certs": ["--ssl-certfile", "cert.pem"],
    "role": ["--kv-transfer-key", "k"],
    "kv_transfer_key": ["--role", "decode"],
    **{
        name: ["--role", "prefill", "--kv-transfer-key", "k"]
        for name in (
            *("kv_connector", "kv_transfer_address", "kv_transfer_memory", "kv_transfer_ttl", "kv_transfer_timeout"),
            *("kv_transfer_ssl_certfile", "kv_transfer_ssl_keyfile", "kv_transfer_ssl_ca_certs"),
        )
    },
}
"""Flags without which a setting is refused."""


parser = functools.cache(build_parser)
"""Parsing leaves nothing behind in it."""


def load(*argv: str, environ: Mapping[str, str] | None = None, config_class: type[Any] = ServeConfig) -> Any:
    command = "serve" if config_class is ServeConfig else "doctor"
    args = parser().parse_args([command, *argv])
    return load_config(config_class, args, environ or {})


def sample(item: Setting) -> Any:
    """A value that is allowed and is not the default."""
    if item.type is bool:
        return not item.default
    if item.is_json:
        return JSON_SAMPLES.get(item.name, '{"method": "ngram"}')
    if item.choices:
        return item.choices[-1]
    return max(SAMPLES[item.type], item.low) if item.low is not None else SAMPLES[item.type]


def as_flag(item: Setting) -> list[str]:
    value = sample(item)
    if item.type is bool:
        return [flag_name(item.name) if value else "--no-" + flag_name(item.name)[2:]]
    return [flag_name(item.name), str(value)]


def write(folder: Path, text: str) -> list[str]:
    (folder / "octavo.yaml").write_text(text)
    return ["--config", str(folder / "octavo.yaml")]


@pytest.mark.parametrize("item", SETTINGS, ids=lambda item: item.name)
def test_every_setting_has_a_flag_a_variable_and_a_file_entry(item: Setting, tmp_path: Path) -> None:
    value = sample(item)
    dashed = item.name.replace("_", "-")
    needed = NEEDED.get(item.name, [])
    results = [
        load(*as_flag(item), *needed),
        load(*needed, environ={variable_name(item.name): str(value)}),
        load(*needed, *write(tmp_path, f"{item.name}: {value}\n")),
        load(*needed, *write(tmp_path, f"{dashed}: {value}\n")),
    ]
    for config in results:
        assert to_flat(config)[item.name] == value


def test_all_flags_together() -> None:
    given = [item for item in SETTINGS if item.name not in EXCLUSIVE]
    flat = to_flat(load(*(part for item in given for part in as_flag(item))))
    assert {item.name: flat[item.name] for item in given} == {item.name: sample(item) for item in given}


def test_without_any_source_defaults_hold() -> None:
    assert load() == ServeConfig()
    assert load(config_class=EngineConfig) == EngineConfig()


def test_flag_overrides_variable_overrides_file(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax-num-seqs: 10\nhost: file\n")
    environ = {"OCTAVO_PORT": "2", "OCTAVO_MAX_NUM_SEQS": "20"}
    config = load("--port", "3", *file, environ=environ)
    assert (config.server.port, config.scheduler.max_num_seqs, config.server.host) == (3, 20, "file")


def test_a_boolean_can_be_switched_back_on(tmp_path: Path) -> None:
    file = write(tmp_path, "enable_prefix_caching: off\n")
    assert load(*file).cache.enable_prefix_caching is False
    assert load(*file, environ={"OCTAVO_ENABLE_PREFIX_CACHING": "true"}).cache.enable_prefix_caching is True
    assert load(*file, "--enable-prefix-caching").cache.enable_prefix_caching is True


def test_flags_of_other_servers() -> None:
    flat = to_flat(load("--max-seq-len", "4096", "--max-batch-size=24", "--num-gpu-blocks", "2048", "--prefix-caching"))
    assert (flat["max_model_len"], flat["max_num_seqs"], flat["num_kv_blocks"]) == (4096, 24, 2048)
    assert not load("--no-prefix-caching").cache.enable_prefix_caching
    assert load("--tp", "2").model.tensor_parallel_size == load("--num-shard=2").model.tensor_parallel_size == 2
    assert load("--dp", "2").server.data_parallel_size == 2
    assert load("--model-id", "some/model", "--quantize", "fp8").model.quantization == "fp8"
    known = {item.name for item in SETTINGS}
    assert set(FLAGS_OF_OTHERS.values()) <= known
    assert not {flag_name(name) for name in known} & {*FLAGS_OF_OTHERS, *ADVICE}


def test_values_of_other_servers() -> None:
    config = load("--dtype", "half", "--quantization", "awq_marlin", "--kv-cache-dtype", "fp8_e4m3")
    assert (config.model.dtype, config.model.quantization, config.cache.kv_cache_dtype) == ("float16", "awq", "fp8")
    assert {*STORED_METHODS} <= {*METHODS, "gguf"}
    with pytest.raises(ConfigError, match="'marlin' is not one of fp8, int8, int4"):
        load("--quantization", "marlin")


@one_in(3)
@pytest.mark.parametrize("flag", ADVICE)
def test_what_other_servers_have_and_octavo_has_not(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"{flag}=other"])
    error = capsys.readouterr().err
    assert f"there is no flag {flag}: " in error
    advised = re.findall(r"--(?:no-)?([a-z-]+)", error.partition(f"no flag {flag}: ")[2].partition("Try")[0])
    assert {item.replace("-", "_") for item in advised} <= {item.name for item in SETTINGS}


def test_variables_of_inferengine_are_named() -> None:
    given = {"INFERENGINE_MAX_PAGES": "64", "INFERENGINE_DECODE_INTERVAL_MS": "0"}
    assert [*environment_warnings(given)] == [
        "INFERENGINE_DECODE_INTERVAL_MS is not read; nothing here stands for it",
        "INFERENGINE_MAX_PAGES is not read; use OCTAVO_NUM_KV_BLOCKS",
    ]
    assert set(VARIABLES_OF_OTHERS.values()) <= {item.name for item in SETTINGS}


SERVE_OF_INFER = "--batching-mode continuous --kv-cache-backend paged --max-batch-size 24 --num-gpu-blocks 2048"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        SERVE_OF_INFER,
        f"{SERVE_OF_INFER} --chunked-prefill --prefill-chunk-size 512",
        f"{SERVE_OF_INFER} --chunked-prefill --prefill-chunk-size 512 --prefix-caching",
        f"{SERVE_OF_INFER} --speculative-decoding --draft-model a/draft --spec-length 5",
        "--batching-mode=static --cuda-graphs",
    ],
)
def test_the_commands_of_infer_start(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_arguments(["serve", "--model", "some/model", *flags.split()])
    flat = to_flat(load_config(ServeConfig, args, {}))
    said = capsys.readouterr().err
    assert ("--batching-mode continuous: batching is always continuous" in said) == ("mode continuous" in flags)
    assert ("prompts are always computed in chunks" in said) == ("--chunked" in flags)
    assert flat["scheduling_policy"] == ("static" if "static" in flags else None)
    if "--draft-model" in flags:
        assert json.loads(flat["speculative_config"]) == {
            "method": "draft_model",
            "model": "a/draft",
            "num_speculative_tokens": 5,
        }


def test_all_wrong_flags_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--kv-cache-backend", "contiguous", "--max-waiting-requests", "3", "--colour", "red", "--hots", "::"]
    with pytest.raises(SystemExit):
        main(["serve", *wrong])
    said = capsys.readouterr().err
    assert "no flag --kv-cache-backend: the KV cache is always paged" in said
    assert "no flag --max-waiting-requests: --max-num-queued-reqs limits" in said
    assert "unknown argument '--colour'; unknown argument '--hots'; did you mean --host?" in said


def test_a_short_flag_of_another_server_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "-ngl", "99", "-m", "model.gguf"])
    assert "there is no flag -ngl: a model is on one kind of device" in capsys.readouterr().err


def test_the_model_is_also_an_argument() -> None:
    assert load("some/model").model.model == "some/model"
    assert load("some/model", environ={"OCTAVO_MODEL": "other"}).model.model == "some/model"
    assert load("same", "--model", "same").model.model == "same"
    with pytest.raises(ConfigError, match="two models"):
        load("one", "--model", "two")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port", "x"], {}, "--port: expected int, got 'x'"),
        ([], {"OCTAVO_PORT": "x"}, "OCTAVO_PORT: expected int, got 'x'"),
        ([], {"OCTAVO_PORT": ""}, "OCTAVO_PORT: is empty; give a value or unset it"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: must be at least 1, got '0'"),
        (["--kv-transfer-memory", "1e11"], {}, "--kv-transfer-memory: must be at most 1000000000, got '1e11'"),
        (["--kv-cache-memory", "nan"], {}, "--kv-cache-memory: expected a finite number, got 'nan'"),
        (
            ["--data-parallel-size", "1" + "0" * 30],
            {},
            f"--data-parallel-size: must be at most 1024, got '1{'0' * 30}'",
        ),
        ([], {"OCTAVO_SEED": "-1" + "0" * 30}, f"OCTAVO_SEED: must be at least -1000000000000, got '-1{'0' * 30}'"),
        (["--device", "gpu"], {}, "--device: 'gpu' is not one of auto, cpu, cuda"),
        ([], {"OCTAVO_ENABLE_PREFIX_CACHING": "2"}, "OCTAVO_ENABLE_PREFIX_CACHING: expected bool, got '2'"),
    ],
)
def test_a_bad_value_is_reported_under_its_source(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*argv, environ=environ)
    assert str(refused.value) == message


def test_no_number_is_too_large_for_an_answer() -> None:
    for item in settings(ServeConfig):
        if item.type in (int, float):
            for value in (10**400, -(10**400), "1e300", "9" * 400, float("nan"), float("-inf")):
                with pytest.raises(ConfigError, match=f"^{item.name}: "):
                    item.parse(value)


def test_an_overridden_bad_value_is_ignored() -> None:
    assert load("--port", "1", environ={"OCTAVO_PORT": "x"}).server.port == 1


def test_a_combination_that_cannot_work_names_both_sources(tmp_path: Path) -> None:
    file = write(tmp_path, "kv_cache_memory: 2\n")
    with pytest.raises(ConfigError) as refused:
        load(*file, environ={"OCTAVO_NUM_KV_BLOCKS": "9"})
    assert "num_kv_blocks is from OCTAVO_NUM_KV_BLOCKS" in str(refused.value)
    assert "octavo.yaml: kv_cache_memory" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3", "unknown setting 'max_num_seq'; did you mean max_num_seqs?"),
        ("colour: red", "unknown setting 'colour'"),
        ("port: 1\nport: 2\n", "port is given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs is given twice"),
        ("- port\n", "must hold lines of 'name: value'"),
        ("port: [1", "is not YAML"),
        ("port: eight", "port: expected int, got 'eight'"),
        ("port: 80\nport-: 5", "unknown setting 'port-'; did you mean port?"),
        ("port: 80.5", "port: expected int, got 80.5"),
        ("host: {a: b}", "host: expected str, got {'a': 'b'}"),
        ("host: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*write(tmp_path, text))
    assert message in str(refused.value)
    assert "octavo.yaml" in str(refused.value)


def test_an_empty_file_and_a_null_change_nothing(tmp_path: Path) -> None:
    assert load(*write(tmp_path, "")) == ServeConfig()
    assert load(*write(tmp_path, "max_num_seqs: null\n")) == ServeConfig()


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read none\.yaml"):
        load("--config", "none.yaml")


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax_num_seqs: 4\n")
    assert load(*file, config_class=EngineConfig).scheduler.max_num_seqs == 4


def test_variables_that_nothing_reads_are_warned_about() -> None:
    environ = {"OCTAVO_PORT": "1", "OCTAVO_CACHE_DIR": "/x", "OCTAVO_MAX_SEQS": "1", "OCTAVO_ZZZ": "", "OTHER": ""}
    assert list(environment_warnings(environ)) == [
        "OCTAVO_MAX_SEQS is not a setting; did you mean OCTAVO_MAX_NUM_SEQS?",
        "OCTAVO_ZZZ is not a setting",
    ]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("ngram", "malformed"),
        ('{"method": "eagle"}', "eagle"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_tokens": 3}', "num_tokens"),
        ('{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "prompt_lookup_min"),
        ("[]", "object"),
    ],
)
def test_a_bad_speculative_config_is_refused(config: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        load("--speculative-config", config)
    assert str(refused.value).startswith("speculative_config: ")


@pytest.mark.parametrize("flag", ["--takeover-socket", "--data-parallel-size"])
def test_what_hosts_of_one_engine_cannot_serve_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"nnodes and {flag[2:].replace('-', '_')}: "):
        load(*HOSTS, flag, "2")


def test_json_may_be_a_mapping(tmp_path: Path) -> None:
    text = "speculative_config:\n  method: ngram\n  num_speculative_tokens: 2\n"
    assert load(*write(tmp_path, text)).speculative.speculative_config == (
        '{"method": "ngram", "num_speculative_tokens": 2}'
    )


def test_a_key_given_as_a_flag_is_warned_about() -> None:
    args = parser().parse_args(["serve", "--api-key", "s3cret", "--admin-key", "s3cret"])
    admin, api = secret_warnings(args)
    assert admin.startswith("--admin-key ")
    assert "OCTAVO_ADMIN_KEY" in admin
    assert "OCTAVO_API_KEY" in api
    assert "s3cret" not in admin + api
    assert not list(secret_warnings(parser().parse_args(["serve", "--api-key-file", "keys"])))


@pytest.mark.parametrize("port", ["-1", "65536", "73767", "99999999", "x", "80.5"])
def test_invalid_ports_are_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="port"):
        ServeConfig.from_flat({"model": "x", "port": port})


@pytest.mark.parametrize("port", ["0", "1", "65535"])
def test_valid_ports_are_accepted(port: str) -> None:
    assert ServeConfig.from_flat({"model": "x", "port": port}).server.port == int(port)


def test_the_page_of_settings_is_current() -> None:
    written = (Path(__file__).parents[2] / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == page(), "run `python -m octavo.cli.reference > docs/flags.md`"


@pytest.mark.parametrize(("flag", "level"), [("-v", "debug"), ("--verbose", "debug"), ("-q", "warning")])
def test_verbose_and_quiet_are_log_levels(flag: str, level: str) -> None:
    assert load(flag, environ={"OCTAVO_LOG_LEVEL": "error"}).server.log_level == level
