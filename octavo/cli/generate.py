"""``octavo generate [MODEL] --prompt TEXT``: continue a text, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from octavo.cli.sampling_flags import add_sampling, sampling_values
from octavo.cli.settings import add_settings, load_config
from octavo.cli.terminal import note, write
from octavo.config import EngineConfig, to_flat
from octavo.errors import InvalidParameter
from octavo.sampling_params import SamplingParams

NAME = "generate"
HELP = "continue a prompt, streaming to the terminal"

DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, sampling flags, and every setting of the engine."""
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; - or no --prompt reads standard input")
    add_sampling(parser)
    add_settings(parser, EngineConfig)
    parser.usage = f"{parser.prog} [MODEL] --prompt TEXT [options]"


def run(args: argparse.Namespace) -> int:
    """Print the continuation to standard output and a summary line to standard error."""
    config = load_config(EngineConfig, args)
    values = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_values(args)}
    SamplingParams(**values)  # validate before the model is loaded
    prompt = _prompt(args.prompt)
    from octavo.llm import LLM

    with LLM(**to_flat(config)) as llm:
        params = msgspec.structs.replace(llm.get_default_sampling_params(), **values)
        start, count, reason = time.perf_counter(), 0, None
        for piece in llm.stream(prompt, params):
            write(piece.text)
            count += len(piece.token_ids)
            reason = piece.finish_reason
    write("\n")
    note(f"{count} tokens in {time.perf_counter() - start:.2f} s, finish_reason {reason}")
    return 0 if reason != "error" else 1


def _prompt(text: str | None) -> str:
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise InvalidParameter("prompt", "There is nothing to continue: give --prompt TEXT, or text on standard input.")
    return sys.stdin.read().removeprefix("\ufeff")
