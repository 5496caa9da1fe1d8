"""``octavo serve [MODEL ...]``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.cli.settings import add_settings, load_config, secret_warnings
from octavo.config import ServeConfig

NAME = "serve"
HELP = "serve a model over an OpenAI-compatible HTTP API"
COMMON = (
    *("model", "quantization", "device", "tensor_parallel_size", "lora_modules", "max_model_len"),
    *("gpu_memory_utilization", "kv_cache_memory", "max_num_seqs", "speculative_config"),
    *("host", "port", "api_key", "served_model_name", "log_level"),
)
"""Settings in the short help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting of the engine and the server."""
    add_settings(parser, ServeConfig, COMMON, takes_several=True)
    for flag, level in (("--verbose", "debug"), ("--quiet", "warning")):
        parser.add_argument(
            *(flag[1:3], flag), dest="log_level", action="store_const", const=level, help=f"log level {level}"
        )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    configs = [_config(args, model) for model in (args.model_argument, *args.other_models)]
    for warning in secret_warnings(args):
        print(f"octavo: warning: {warning}", file=sys.stderr)
    settings, listener = configs[0].server, None
    if settings.headless:
        from octavo.build.serve_stages import serve_stages
        from octavo.telemetry.logs import log_to_stderr

        log_to_stderr(settings.log_level, settings.log_format)
        serve_stages(configs[0])
    if settings.supervise is not None:
        from octavo_server.front.front_supervisor import listen, supervise

        if settings.takeover_socket is None:  # otherwise the server before this one may have the address
            listener = listen(settings.host, settings.port)
        if (code := supervise(settings.supervise)) is not None:
            return code
    from octavo_server.front import serving

    return serving.run(configs[0], others=configs[1:], listener=listener)


def _config(args: argparse.Namespace, model: str | None) -> ServeConfig:
    """The settings of one model, given as a model or as NAME=MODEL."""
    name, equals, named = (model or "").partition("=")
    given = {**vars(args), "model_argument": model}
    if equals and not Path(model or "").exists():
        given |= {"model_argument": named, "served_model_name": name}
    return load_config(ServeConfig, argparse.Namespace(**given))
