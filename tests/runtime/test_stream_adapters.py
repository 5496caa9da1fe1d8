"""Adapters where steps run ahead of the host: what each request gets is what PEFT's merged model gives."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.runner.adapter_numbers import LoadedAdapters
from octavo.engine.scheduler import Scheduler
from octavo.errors import CheckpointError
from octavo.layers.stacked_lora import StackedRows
from octavo.models.layer_cache import kv_groups
from octavo.models.model_adapters import ModelAdapters, make_stacks
from octavo.models.registry import load_model, read_config
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Output, Request
from tests.engine.making import serve
from tests.models.adapter_files import make_adapter
from tests.models.checkpoints import FolderSource
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.runtime.making import stream_runner
from tests.runtime.test_stream_runner import without_host

NEW_TOKENS, PLACES, RANK = 8, 3, 16
PROMPT = random.Random(0).choices(range(VOCAB_SIZE), k=40)
KINDS: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj", "v_proj"], "r": 2},
    {"target_modules": ["gate_proj", "down_proj"], "r": 16, "use_rslora": True},
    {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 3}},
]


class Made:
    """A model, adapters of it, and an engine whose runner is that of a GPU, with the reference operations."""

    def __init__(self, home: Path) -> None:
        self.models: dict[str, Any] = {"": make_checkpoint(home / "base", "llama/biases")}
        for i, kind in enumerate(KINDS):
            self.models[f"a{i}"] = make_adapter(home / "base", home / f"a{i}", i, **kind)
        self.home = home

    def build(self, names: list[str], **settings: Any) -> Engine:
        source, form = FolderSource(self.home / "base"), WeightFormat(torch.float32, torch.device("cpu"))
        config, rows = read_config(source.config), StackedRows(PLACES, RANK)
        loaded = load_model(config, source, form, rows)
        assert make_stacks(loaded.maps, form) > 0
        storage = KVStorage(config.cache, kv_groups(config.cache), [60], 8, torch.float32, form.device)
        storage.pools[0][0].fill_(torch.nan)
        limits, numbers = StepLimits(8, 32, max_blocks=16), dict[str, int]()
        own = ModelAdapters(loaded.maps, rows, form)
        runner = stream_runner(loaded.model, storage, VOCAB_SIZE, limits, own, numbers, **settings)
        adapters = LoadedAdapters(runner, numbers, PLACES)
        for name in names:
            adapters.load(name, str(self.home / name))
        scheduler = Scheduler(KVCache(60, 8), max_num_seqs=8, max_num_batched_tokens=32)
        return Engine(scheduler, runner, adapters=adapters, depth=2)

    def check(self, adapter: str, outputs: list[Output], prompt: list[int] = PROMPT) -> None:
        """Every token is what the merged model likes best."""
        tokens = [token for output in outputs for token in output.tokens]
        with torch.inference_mode():
            logits = self.models[adapter](torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        assert len(tokens) == NEW_TOKENS
        assert tokens == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist(), adapter
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs or []]
        wanted = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1].max(dim=-1).values[: len(logprobs)]
        assert logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(autouse=True)
def reference_operations() -> Iterator[None]:
    with dispatch.only(REFERENCE):
        yield


def ask(number: int, adapter: str, **params: Any) -> Request:
    chosen = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, **params)
    return Request(number, PROMPT, chosen, NEW_TOKENS, adapter=adapter, cache_salt=adapter)


@pytest.mark.parametrize("settings", [{}, {"batch_invariant": True}], ids=str)
def test_several_adapters_and_none_in_one_batch(made: Made, settings: dict[str, Any]) -> None:
    if settings and not importlib.util.find_spec("triton"):
        pytest.skip("triton has the setting")
    engine = without_host(made.build(["a0", "a1", "a2"], **settings))
    some = [ask(i, name, **params) for i, (name, params) in enumerate(
        [("a0", {}), ("", {}), ("a1", {"logprobs": 1}), ("a2", {}), ("a0", {}), ("", {"logprobs": 0})]
    )]  # fmt: skip
    for request, outputs in zip(some, serve(engine, some).values(), strict=True):
        made.check(request.adapter, outputs)


def test_adapters_of_rows_that_the_host_computes(made: Made) -> None:
    engine = made.build(["a3"])
    some = [ask(0, "a3", prompt_logprobs=0), ask(1, ""), ask(2, "a3")]
    for request, outputs in zip(some, serve(engine, some).values(), strict=True):
        made.check(request.adapter, outputs)


def test_adapters_take_the_slots_of_unloaded_ones(made: Made) -> None:
    engine = without_host(made.build(["a0", "a1", "a2"]))
    with pytest.raises(CheckpointError, match="max_loras"):
        engine.adapters.load("a3", str(made.home / "a3"))
    engine.adapters.unload("a1")
    engine.adapters.unload("never")
    engine.adapters.load("a3", str(made.home / "a3"))
    engine.adapters.unload("a0")
    engine.adapters.load("a1", str(made.home / "a1"))  # it changes less than what was there
    some = [ask(i, name) for i, name in enumerate(["a1", "a2", "a3", ""])]
    for request, outputs in zip(some, serve(engine, some).values(), strict=True):
        made.check(request.adapter, outputs)


def test_adapters_are_loaded_before_there_is_a_cache(made: Made) -> None:
    engine: Any = without_host(made.build(["a0", "a1"]))
    engine.sleeper = engine.runner
    engine.sleep()
    engine.wake(["weights"])
    engine.adapters.unload("a0")
    engine.adapters.load("a2", str(made.home / "a2"))
    assert not any(pool.untyped_storage().nbytes() for pool in engine.runner.executor._pool)
    engine.wake(["kv_cache"])
    some = [ask(i, name) for i, name in enumerate(["a1", "a2", ""])]
    for request, outputs in zip(some, serve(engine, some).values(), strict=True):
        made.check(request.adapter, outputs)


def test_a_rank_for_which_there_is_no_room_is_refused(made: Made, tmp_path: Path) -> None:
    engine = made.build([])
    make_adapter(made.home / "base", tmp_path, 9, r=17)
    with pytest.raises(CheckpointError, match=r"rank 17; max_lora_rank allows 16"):
        engine.adapters.load("big", str(tmp_path))
    assert "big" not in engine.adapters


def test_a_thread_that_compiles_does_not_change_which_adapters_the_steps_of_another_want() -> None:
    rows = StackedRows(PLACES, RANK)
    running_T, compiled_T = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    is_compiling, is_done = threading.Event(), threading.Event()

    def compile_others() -> None:
        with rows.of_rows(compiled_T):
            is_compiling.set()
            is_done.wait(30)

    with rows.of_rows(running_T):
        thread = threading.Thread(target=compile_others)
        thread.start()
        assert is_compiling.wait(30)
        assert rows.adapters_T is running_T
        is_done.set()
        thread.join()
        assert rows.adapters_T is running_T
    assert rows.adapters_T is None
