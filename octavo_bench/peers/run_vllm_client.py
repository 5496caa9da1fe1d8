"""vLLM's serving benchmark, ``vllm bench serve``, loaded once. Run by an interpreter that has vLLM.

Reads one JSON object a line, ``{"arguments": [...]}`` with the arguments of ``vllm bench serve``, and answers each with
its result as one line. With ``"samples": true`` the answer has every request's times as well, in seconds, and when the
first began and the last ended, on a clock that all processes of the machine share. What vLLM prints goes to standard
error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import vllm  # noqa: E402
from vllm.benchmarks import serve  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

PACKAGES = ("torch", "triton", "transformers", "uvicorn", "uvloop", "httptools", "numpy")
PER_REQUEST = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def answer(value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def run(parser: FlexibleArgumentParser, arguments: Sequence[str], samples: bool) -> dict[str, Any]:
    """One measurement: the summary, with the first few errors instead of a list for each request."""
    result = serve.main(parser.parse_args([*arguments, "--save-detailed"]))
    errors = [text[-400:] for text in result.get("errors", []) if text]
    chunks = sum(len(gaps) + 1 for gaps in result.get("itls", []))
    summary = {key: value for key, value in result.items() if key not in PER_REQUEST}
    return {**summary, "chunks": chunks, "first_errors": errors[:3], **(samples_of(result) if samples else {})}


def samples_of(result: dict[str, Any]) -> dict[str, Any]:
    """Times to first tokens, between chunks, and per token after the first; start and end of it all."""
    starts, ttfts, gaps = (result[name] for name in ("start_times", "ttfts", "itls"))
    totals = [sum(own) for own in gaps]
    return {
        "ttfts": ttfts,
        "gaps": [round(gap, 6) for own in gaps for gap in own],
        "tpots": [
            total / (tokens - 1) for total, tokens in zip(totals, result["output_lens"], strict=True) if tokens > 1
        ],
        "began": min(starts),
        "ended": max(map(sum, zip(starts, ttfts, totals, strict=True))),
    }


def main() -> None:
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    answer({"engine": "vllm", "version": vllm.__version__, "versions": dict(versions())})
    for line in sys.stdin:
        try:
            work = json.loads(line)
            answer(run(parser, work["arguments"], work.get("samples", False)))
        except (Exception, SystemExit) as error:
            answer({"error": repr(error)[:500]})


if __name__ == "__main__":
    main()
