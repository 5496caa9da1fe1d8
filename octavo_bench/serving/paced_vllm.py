"""A device for vLLM that is a clock, as ``paced_engine`` is one for this package; it is loaded by vLLM itself.

vLLM's server runs as it is, with its own scheduler in its engine process; only what would compute is exchanged, through
its setting ``distributed_executor_backend``. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from octavo_bench.overhead import TOKEN
from octavo_bench.serving.front_cost import STEP_VARIABLE


class PacedExecutor(Executor):  # type: ignore[misc]
    """Answers each step when its time is over; every sampled token is the same."""

    def _init_executor(self) -> None:
        self._step_seconds = float(os.environ[STEP_VARIABLE]) / 1e3
        self._due = 0.0
        self._output: Any = None
        self._places: dict[str, list[int]] = {}
        """Of each request: tokens of its prompt, and tokens computed."""
        self._answers = {
            "get_kv_cache_spec": {"layer": FullAttentionSpec(16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)},
            "get_supported_kv_cache_layouts": ["NHD", "HND"],
            "determine_available_memory": 1 << 30,
            "get_supported_tasks": ("generate",),
        }

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        return [] if method == "compile_or_warm_up_model" else [self._answers.get(method)]

    def supports_draft_weight_updates(self) -> bool:
        return False

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        now, self._due = time.monotonic(), self._due + self._step_seconds
        if self._due < now:  # it idled
            self._due = now + self._step_seconds
        self._output = self._sampled(scheduler_output)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing if non_block else None

    def _sampled(self, scheduled: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            self._places[request.req_id] = [len(request.prompt_token_ids), request.num_computed_tokens]
        for name in scheduled.finished_req_ids:
            self._places.pop(name, None)
        tokens = []
        for name, count in scheduled.num_scheduled_tokens.items():
            place = self._places[name]
            place[1] += count
            tokens.append([TOKEN] if place[1] >= place[0] else [])
        names = list(scheduled.num_scheduled_tokens)
        indices = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=tokens)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        wait = self._due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self._output

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
