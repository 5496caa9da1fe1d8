"""`octavo bench sanity`, `architectures`, `outliving` and `fidelity`; and two tools, `shape` and `report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.cli.settings import above_zero, positive
from octavo.config import DEFAULT_MODEL
from octavo.errors import ConfigError
from octavo_bench.cli.arguments import words
from octavo_bench.cli.results import EXIT_WORSE, add_kind, add_results, check_results, conclude
from octavo_bench.records.report_tables import plain


def add_checks(kinds: Any) -> None:
    """Whether answers, and what the simulator predicts, are right."""
    help = "every native family, tiny: the same tokens at once, in chunks and cached"
    sanity = add_kind(kinds, "sanity", help, "sanity.measure", show=plain, is_good=_none_failed)
    sanity.add_argument("--families", type=words, default=[], help="some of them; default: all")
    sanity.add_argument("--device", default="auto", help="auto, cpu or cuda")

    kind = kinds.add_parser("architectures", help="how each decoder of the installed transformers is served, tiny")
    kind.add_argument("names", nargs="*", metavar="CLASS", help="default: every causal language model")
    kind.add_argument(
        "--output", type=Path, help="a record with a line for each class; those that it has are passed over"
    )
    kind.set_defaults(run=_architectures)

    help = "what is still cached of a prompt after its server ended, in each way, and after files were damaged"
    outliving = add_kind(kinds, "outliving", help, "outliving.run", is_good=_all_right)
    help = "as for `octavo serve`; tiny or wide: a random one, of small or large blocks"
    outliving.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=help)
    outliving.add_argument("--prompt", type=positive, default=8000, help="tokens of the long prompts")
    outliving.add_argument("--idle", type=above_zero, default=60, help="seconds of rest before the server is killed")
    outliving.add_argument("--damaged", type=positive, default=100, help="files that are damaged, and short prompts")
    outliving.add_argument("--kv-cache-memory", type=above_zero, default=1.0, help="GiB of KV cache")

    help = "what `octavo simulate` predicts beside what the engine does"
    fidelity = add_kind(kinds, "fidelity", help, "fidelity.run", has_engine=True)
    fidelity.add_argument("--num-prompts", type=positive, default=40, help="requests of a workload in each round")
    fidelity.add_argument(
        "--rounds", type=positive, default=5, help="parts of each workload; all together are compared"
    )


def add_tools(kinds: Any) -> None:
    """These print what they make themselves."""
    shape = kinds.add_parser("shape", help="write a model folder of a public model's shape")
    shape.add_argument("name")
    shape.add_argument("folder", type=Path)
    shape.add_argument("--weights", action="store_true", help="with random weights, so that engines serve the same")
    shape.set_defaults(run=_shape)

    report = kinds.add_parser("report", help="the tables of raw JSON files, as Markdown")
    report.add_argument("files", nargs="*", type=Path, metavar="FILE")
    report.add_argument("--fill", type=Path, metavar="PAGE", help="put them into a page's places for reports instead")
    add_results(report, with_output=False)
    report.set_defaults(run=_report)


def _none_failed(args: argparse.Namespace, result: Mapping[str, Any]) -> bool:
    return not any("failed" in row for row in result["rows"])


def _all_right(args: argparse.Namespace, result: Mapping[str, Any]) -> bool:
    return all(row["right"] == row["requests"] for row in result["rows"])


def _architectures(args: argparse.Namespace) -> int:
    """Print a line for each class; the exit code is that of a regression if one crashes or is wrong."""
    from octavo_bench.architectures import Judged, add_to_record, causal_classes, judge_all, read_record

    known = {} if args.output is None else {item.architecture: item for item in read_record(args.output)}
    known = {name: item for name, item in known.items() if item.library == Judged("", "").library}
    chosen = [pair for pair in causal_classes() if not args.names or pair[1] in args.names]
    for item in judge_all(pair for pair in chosen if pair[1] not in known):
        print(f"{item.architecture}: {item.kind}{f', {item.note}' if item.note else ''}", flush=True)
        known[item.architecture] = item
        if args.output is not None:
            add_to_record(args.output, item)
    return EXIT_WORSE if any(known[name].kind in ("crash", "wrong") for _, name in chosen) else 0


def _shape(args: argparse.Namespace) -> int:
    from octavo_bench.dummy_models import write_model

    print(write_model(args.name, args.folder))
    if args.weights:
        from octavo_bench.dummy_models import write_weights

        print(f"{write_weights(args.folder) / 1e9:.2f} GB of weights")
    return 0


def _report(args: argparse.Namespace) -> int:
    from octavo_bench.records.gate import read_record
    from octavo_bench.records.report_tables import fill, render

    check_results(args)
    if (args.plot or args.evidence or args.fail_under) and len(args.files) != 1:
        raise ConfigError("report: --plot, --evidence and --fail-under take one record")
    if args.fill is not None:
        if args.files or not args.fill.is_file():
            raise ConfigError(f"report: --fill takes a page that is there, which names its records; got {args.fill}")
        for file in fill(args.fill):
            print(f"octavo: {file} is not there; its place stays as it is", file=sys.stderr)
        return 0
    print("\n\n".join(render(file) for file in args.files))
    return conclude(args, read_record(args.files[0])) if len(args.files) == 1 else 0
