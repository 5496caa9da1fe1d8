"""`octavo bench synthetic` and `fairness`: the deciding half alone, over models that cost nothing."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli.settings import at_least_0, flag_name, positive
from octavo.config import POLICY_NAMES
from octavo.errors import ConfigError
from octavo_bench.cli.results import add_kind


def add_kinds(kinds: Any) -> None:
    """Add each sub-command."""
    synthetic = add_kind(kinds, "synthetic", "many short requests over a model that costs nothing", _synthetic)
    for flag, default in (("requests", 1000), ("max-batch-size", 32), ("prefill-budget", 512)):
        synthetic.add_argument(f"--{flag}", type=positive, default=default)
    for flag, default in (("min-prompt", 4), ("max-prompt", 96), ("min-new", 4), ("max-new", 24)):
        synthetic.add_argument(f"--{flag}", type=positive, default=default, help="tokens")
    for flag, default in (("block-size", 16), ("cache-blocks", 4096)):
        synthetic.add_argument(f"--{flag}", type=positive, default=default)
    synthetic.add_argument("--seed", type=int, default=7)
    synthetic.add_argument("--policy", choices=POLICY_NAMES, default="fcfs")
    synthetic.add_argument("--external", action="store_true", help="also external fragmentation, which takes time")

    waiting = add_kind(kinds, "waiting", "time of a step while thousands wait, and after a million requests", _waiting)
    waiting.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=POLICY_NAMES)
    waiting.add_argument("--running", type=positive, default=256)
    waiting.add_argument("--waiting", type=positive, default=10_000)
    waiting.add_argument("--seen", nargs="+", type=at_least_0, default=[0], help="requests that came and went before")

    fairness = add_kind(kinds, "fairness", "what a tenant gets while another floods, under each policy", _fairness)
    fairness.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=["fcfs", "fair"])


def _synthetic(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.synthetic import SyntheticWork, run

    for least, most in (("min_prompt", "max_prompt"), ("min_new", "max_new")):
        if getattr(args, least) > getattr(args, most):
            raise ConfigError(f"{flag_name(least)}: must be at most {flag_name(most)}")
    names = SyntheticWork.__dataclass_fields__
    return run(SyntheticWork(**{name: value for name, value in vars(args).items() if name in names}), args.external)


def _waiting(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.overhead import measure_waiting

    rows = [measure_waiting(policy, args.running, args.waiting, seen) for policy in args.policies for seen in args.seen]
    return {"rows": rows}


def _fairness(args: argparse.Namespace) -> dict[str, Any]:
    from octavo_bench.fairness import FLOOD_OF_LONG_PROMPTS, measure

    return {
        "short_prompts": measure(args.policies),
        "long_prompts": measure(args.policies, FLOOD_OF_LONG_PROMPTS, max_itl=0.01),
    }
