"""What measurements do with their results: print and keep the record, draw it, and compare it with a baseline."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.cli.settings import add_settings, refuse_settings
from octavo.config import EngineConfig, settings
from octavo.errors import ConfigError
from octavo_bench.cli.arguments import engine_config, require_cuda
from octavo_bench.records.evidence import check_folder, write_evidence, write_trace
from octavo_bench.records.gpu_watch import GpuWatch, gpus
from octavo_bench.records.plot_style import FORMATS, check_plot
from octavo_bench.records.record_figures import figures
from octavo_bench.records.report import keep

EXIT_WORSE = 1
"""Exit status when a figure is below ``--fail-under``, or nothing was measured of an engine."""

Result = Mapping[str, Any]
Measure = Callable[[argparse.Namespace], Result]


def add_kind(
    kinds: Any,
    name: str,
    help: str,
    measure: Measure | str,
    has_engine: bool = False,
    on_gpu: bool = False,
    refuses: tuple[Collection[str], str] = ((), ""),
    show: Callable[[Result], str] | None = None,
    is_good: Callable[[argparse.Namespace, Result], bool] = lambda args, result: True,
) -> argparse.ArgumentParser:
    """Add the measurement ``octavo bench NAME``, with the flags for its record and, if asked, the engine's settings.

    ``measure`` makes the result of its arguments, or is the place of a function of the laboratory, see ``measured_by``;
    ``refuses``: settings without an effect, and what to do instead; ``show`` says what is printed in place of the
    record. With a result that is not good the exit code is ``EXIT_WORSE``.
    """
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help)
    if has_engine:
        add_settings(parser, EngineConfig)
    add_results(parser)
    if isinstance(measure, str):
        measure = measured_by(measure, on_gpu, *refuses)
    parser.set_defaults(measure=measure, show=show, is_good=is_good, kind_parser=parser)
    return parser


def measured_by(place: str, on_gpu: bool, refused: Collection[str], advice: str) -> Measure:
    """A function of the laboratory, "module.function", called with ``arguments_of`` it and imported when it is."""

    def measure(args: argparse.Namespace) -> Result:
        if on_gpu:
            require_cuda(args.kind)
        if refused:
            refuse_settings(args, refused, advice)
        module, _, name = place.rpartition(".")
        function = getattr(importlib.import_module(f"octavo_bench.{module}"), name)
        result: Result = function(**arguments_of(function, args))
        return result

    return measure


def arguments_of(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """What a function of the laboratory is called with: the flags that have the names of its parameters.

    ``config`` is all settings of the engine, ``say`` tells a person who waits, and ``keep`` keeps the result so far.
    What is required and no flag is a tuple or dataclass, whose fields are flags.
    """
    own = {item.name for item in settings(EngineConfig)} if hasattr(args, "config") else set()
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name not in own}
    given |= {"say": say, "keep": functools.partial(keep, args.kind, output=args.output)}
    parameters, found = inspect.signature(function).parameters, dict[str, Any]()
    if "config" in parameters:
        given["config"] = engine_config(args)
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty
        if name in given and (is_required or given[name] is not None):
            found[name] = given[name]
        elif is_required:
            made = typing.get_type_hints(function)[name]
            found[name] = made(**arguments_of(made, args))
    return found


def measure_and_finish(args: argparse.Namespace) -> int:
    """Measure, and do with the result what the flags say; returns the exit code. Raises ``ConfigError``."""
    begin(args)
    result = args.measure(args)
    code = finish(args, result, None if args.show is None else args.show(result))
    return code if args.is_good(args, result) else EXIT_WORSE


def say(line: str) -> None:
    """Tell a person who waits."""
    print(f"octavo: {line}", file=sys.stderr, flush=True)


def add_results(parser: argparse.ArgumentParser, with_output: bool = True) -> None:
    """Add the flags."""
    results = parser.add_argument_group("results")
    if with_output:
        results.add_argument("--output", type=Path, metavar="FILE", help="also write the record, as JSON, to this file")
        results.add_argument(
            "--gpu-trace",
            type=Path,
            metavar="FILE",
            help="write utilisation, memory, power, clocks and temperature of this machine's GPUs over time, as .csv, "
            ".svg or .png",
        )
    results.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png; needs octavo[plots]")
    results.add_argument(
        "--evidence",
        type=Path,
        metavar="DIR",
        help="fill this empty folder with record, plot, packages, machine, GPU trace, and the commit and changes of "
        "the code",
    )
    results.add_argument("--baseline", type=Path, metavar="RECORD", help="a record of the same command")
    results.add_argument(
        "--fail-under",
        type=float,
        metavar="SHARE",
        help="exit with 1 if a figure is less than this share of the baseline's; without --baseline, of the other "
        "engine's",
    )
    results.add_argument(
        "--gate",
        nargs="+",
        default=[],
        metavar="FIGURE",
        help="figures that --fail-under compares, or parts of their names; default: throughput",
    )


def begin(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for flags that could only fail after the measurement; then watch the GPUs, if asked."""
    if args.gpu_trace is not None:
        if args.gpu_trace.suffix != ".csv":
            check_plot(args.gpu_trace, "gpu_trace", (".csv", *FORMATS))
        if not gpus():
            raise ConfigError("gpu_trace: nvidia-smi finds no GPU on this machine")
    check_results(args)
    args.gpu_watch = GpuWatch() if args.gpu_trace is not None or args.evidence is not None else None


def check_results(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for flags that could only fail after the measurement."""
    from octavo_bench.records.gate import read_record

    if args.plot is not None:
        check_plot(args.plot)
    if args.evidence is not None:
        check_folder(args.evidence)
    if args.baseline is not None:
        if args.fail_under is None:
            raise ConfigError("baseline: needs --fail-under, the least share of its figures")
        read_record(args.baseline)
    if args.fail_under is not None and not args.fail_under > 0:
        raise ConfigError("fail_under: must be above 0")
    if args.gate and args.fail_under is None:
        raise ConfigError("gate: needs --fail-under")


def finish(args: argparse.Namespace, result: Mapping[str, Any], shown: str | None = None) -> int:
    """Print the record, or ``shown`` in its place, and do what the flags say; returns the exit code. Raises
    ``ConfigError``."""
    if args.gpu_watch is not None:
        args.gpu_watch.close()
        if summary := args.gpu_watch.summary():
            result = {**result, "gpus": summary}
        if args.gpu_trace is not None:
            write_trace(args.gpu_watch, args.gpu_trace)
    text = keep(args.kind, result, args.output)
    if shown is not None and sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(shown))
    else:
        print(text if shown is None else shown)
    record = json.loads(text)
    figures(record)  # each has a unit and a direction
    code = conclude(args, record, args.gpu_watch)
    if missing := result.get("not_measured"):
        print(f"octavo: error: nothing was measured of {' and '.join(missing)}", file=sys.stderr)
        return EXIT_WORSE
    return code


def conclude(args: argparse.Namespace, record: Mapping[str, Any], watch: GpuWatch | None = None) -> int:
    """Draw a record and compare it; returns the exit code. ``watch``: what watched the GPUs. Raises ``ConfigError``."""
    from octavo_bench.records.gate import compare, differences, read_record
    from octavo_bench.records.plots import draw

    if args.plot is not None:
        draw(record, args.plot)
    if args.evidence is not None:
        write_evidence(record, args.evidence, watch)
    if args.fail_under is None:
        return 0
    baseline = None if args.baseline is None else read_record(args.baseline)
    found = compare(record, baseline, args.gate)
    for line in differences(record, baseline) if baseline is not None else ():
        print(f"octavo: warning: {line}", file=sys.stderr)
    for one in found:
        print(f"octavo: gate: {one.line(args.fail_under)}", file=sys.stderr)
    return 0 if all(one.is_good(args.fail_under) for one in found) else EXIT_WORSE
