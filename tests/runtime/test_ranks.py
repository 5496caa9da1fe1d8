"""Ranks give the tokens of one device: every family, with preemption, prefix hits and all ways of sampling."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelSettings
from octavo.engine.engine import Engine
from octavo.engine.runner import expert_balance
from octavo.engine.runner.adapter_numbers import LoadedAdapters
from octavo.engine.runner.expert_balance import BalancedRunner
from octavo.engine.runner.graph_dispatcher import GraphDispatcher
from octavo.engine.runner.step_runner import BlockMessages
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, RanksLost
from octavo.layers.lora import AdapterRows
from octavo.layers.stacked_lora import StackedRows
from octavo.models.layer_cache import kv_groups, own_cache, rank_cache
from octavo.models.model_adapters import ModelAdapters, make_stacks
from octavo.models.parts import DecoderConfig
from octavo.models.registry import load_model, read_config
from octavo.ops.attention.cached_rows import INT4
from octavo.ops.collective import SINGLE_RANK, ContextRanks
from octavo.ops.device_backend import RankMemory
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import ONE_STATE, KVStorage, StatePool
from octavo.runtime.ranks.ranks import check_divides
from octavo.runtime.ranks.stage_link import StageLink
from octavo.runtime.sharded_logits import part_of_vocabulary
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import GraphLimits, exact_shape
from octavo.steps.limits import StateSize, StepLimits
from octavo.steps.messages import Executor
from octavo.types import Output, Request, Sequence
from octavo.weights.checkpoint import open_checkpoint
from octavo_kernels.cpu.rank_memory import MappedRankMemory
from tests.models.adapter_files import make_adapter
from tests.models.families import FIRST_ROWS, TELLING, VOCAB_SIZE, make_checkpoint, make_config
from tests.models.gguf_files import write_gguf
from tests.models.test_quantised import FORMATS
from tests.quant.writers import quantise
from tests.runtime.making import CPU, make_runner
from tests.runtime.test_restricted_rows import EveryThird
from tests.runtime.thread_ranks import make_ranks
from tests.speculating import last_known, speculating
from tests.tiers import nightly_after

NUM_DRAFTS = 2
LIMITS = StepLimits(max_num_seqs=5, max_num_batched_tokens=24, max_blocks=30, max_drafts=NUM_DRAFTS)
BLOCK_SIZE, NUM_BLOCKS = 4, 34
FEW_BLOCKS = 24
"""Of each rank that has sequences of its own."""
STATES = StateSize(num_slots=14, num_held=10, every=16, interval=8, has_drafts=True)
NUM_REQUESTS = 14
DENSE_ON_CPUS = {"fp8, blocks"}
"""Formats that no kernel for CPUs takes."""
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1, "top_k": 7, "min_p": 0.02},
    {"temperature": 1.2, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0, "min_tokens": 4, "stop_token_ids": (1, 60, 90), "logit_bias": {7: 2.0, 70: 2.0, 96: 1.0}},
    {"temperature": 0, "grammar": "every third"},
    {"temperature": 1, "allowed_token_ids": tuple(range(20, 90)), "prompt_logprobs": 2, "seed": 5},
]


class Made(NamedTuple):
    engine: Engine
    executor: Any


def repeat(seq: Sequence) -> list[int]:
    """Drafts of the last token, which are sometimes right."""
    return [last_known(seq), 5] if seq.id % 3 == 0 else []


def make_engine(
    home: Path,
    size: int,
    packs: bool = False,
    runs_ahead: bool = False,
    whole_experts: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    num_parts: int = 1,
    num_stages: int = 1,
    dp_attention: bool = False,
    num_nodes: int = 1,
) -> Made:
    """An engine of the model in a folder or file, on one device or on ranks; ``runs_ahead``: with GPUs' executor.

    ``num_parts``: ranks that divide contexts, with as many positions in larger blocks. ``num_stages``: of ranks that
    divide layers, on so many hosts. ``dp_attention``: each rank has sequences of its own, and fewer blocks for them.
    """
    num_parts, dp_ranks = min(num_parts, size), size if dp_attention else 1
    block_size, num_blocks = BLOCK_SIZE * num_parts, (NUM_BLOCKS if dp_ranks == 1 else FEW_BLOCKS) // num_parts
    checkpoint = open_checkpoint(home)
    config = read_config(checkpoint.config)
    form = WeightFormat(torch.float32, CPU, packs, keeps_experts_whole=whole_experts, num_spare_experts=1)
    form = replace(form, keeps_attention_whole=dp_attention)
    is_plain = num_stages > 1 or dp_attention

    def check() -> None:
        if executor.failures:
            raise RanksLost("another rank failed")

    def make(memory: RankMemory | None) -> Executor:
        collective = SINGLE_RANK if memory is None else memory.within
        link = (
            None if memory is None or num_stages == 1 else StageLink(memory, check, torch.float32, config.hidden_size)
        )
        own_config = config if link is None else replace(config, stage=link.stage)
        rows = StackedRows(3, 8) if runs_ahead else AdapterRows()
        loaded = load_model(own_config, checkpoint, form, None if is_plain else rows, collective)
        specs = rank_cache(config.cache, collective.size // dp_ranks)
        groups = kv_groups(specs, max_window=1000)
        counts = [num_blocks] * len(groups)
        if link is not None:
            own = link.stage.layers(config.num_layers)
            specs, groups = own_cache(specs, own), [group.within(own) for group in groups]
        pool = ONE_STATE if states is None else StatePool(states.num_slots)
        context = None if num_parts == 1 else ContextRanks(collective, num_parts)
        divided: dict[str, Any] = {"context": context, "sequences": None if dp_ranks == 1 else collective}
        storage = KVStorage(specs, groups, counts, block_size, kv_dtype, CPU, states=pool, **divided)
        for part in storage.tensors:
            part.view(torch.uint8).fill_(255)  # NaN in every type
        storages.append(storage)
        vocabulary = part_of_vocabulary(VOCAB_SIZE, collective, is_on_host=not runs_ahead)
        if link is not None:
            forward = make_forward(loaded.model, storage.layers, CPU)
            return HostExecutor(loaded.model, storage, VOCAB_SIZE, LIMITS, forward, vocabulary=vocabulary, link=link)
        adapters = None if is_plain else ModelAdapters(loaded.maps, rows, form)
        if not runs_ahead:
            experts = ExpertMoves(loaded.mixtures)
            parts: dict[str, Any] = {"adapters": adapters, "vocabulary": vocabulary, "experts": experts}
            return HostExecutor(loaded.model, storage, VOCAB_SIZE, LIMITS, **parts)
        make_stacks(loaded.maps, form)
        return StreamExecutor(loaded.model, storage, VOCAB_SIZE, LIMITS, adapters=adapters, vocabulary=vocabulary)

    states = STATES if any(spec.state for spec in config.cache) else None
    storages: list[KVStorage] = []
    executor: Any = make(None) if size * num_stages == 1 else make_ranks(size * num_stages, make, num_stages, num_nodes)
    numbers: dict[str, int] = {}
    of_graphs = GraphLimits(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, has_adapters=True)
    graphs = GraphDispatcher(of_graphs, uses_graphs=False)
    choose = graphs.choose if runs_ahead else exact_shape
    served = None if is_plain else numbers
    runner = make_runner(executor, storages[0], VOCAB_SIZE, LIMITS, choose, served, has_stages=num_stages > 1)
    groups = kv_groups(config.cache, max_window=1000)
    counts = [GroupSize(num_blocks, group.window) for group in groups]
    cache = KVCache(counts, block_size, states=states, num_ranks=dp_ranks)
    cache.copy_slots = BlockMessages(runner, 0).copy_slots
    if cache.states is not None:
        cache.states.copy = BlockMessages(runner, 0).copy_state
    most = LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens
    scheduler = Scheduler(
        cache,
        max_num_seqs=most[0],
        max_num_batched_tokens=most[1],
        speculation=speculating(repeat, NUM_DRAFTS),
        num_stages=num_stages if size == 1 else 1,
    )
    adapters = LoadedAdapters(runner, numbers, 3)
    parts: dict[str, Any] = {"grammars": EveryThird(), "adapters": adapters}
    balanced = BalancedRunner(runner, runner, scheduler.stats) if whole_experts and size > 1 else runner
    return Made(
        Engine(scheduler, balanced, **parts, depth=2 if runs_ahead else 1 if states or size > 1 else num_stages),
        executor,
    )


def run(made: Made, adapter: Path | None = None, seed: int = 3) -> Iterator[Output]:
    """Random requests that share prefixes and need more blocks than there are."""
    engine, rng = made.engine, random.Random(seed)
    names = [""]
    if adapter is not None:
        engine.adapters.load("other", str(adapter))
        names = ["", "other", "other"]
    shared, number = rng.choices(range(VOCAB_SIZE), k=40), 0
    while number < NUM_REQUESTS or engine.has_work:
        if number < NUM_REQUESTS and rng.random() < 0.4:
            prompt = shared[: rng.choice([0, 13, 30, 40])] + rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 5, 20]))
            params, name = SamplingParams(**KINDS[number % len(KINDS)]), rng.choice(names)
            engine.add(Request(number, prompt, params, rng.choice([8, 20, 30]), number, adapter=name, cache_salt=name))
            number += 1
        yield from engine.step()
        engine.check()


def told(outputs: Iterator[Output]) -> tuple[dict[int, list[int]], list[float]]:
    """The tokens of each request, and all log-probabilities, request by request."""
    tokens: dict[int, list[int]] = {}
    numbers: dict[int, list[float]] = {}
    of_prompts: dict[tuple[int, int], list[float]] = {}
    """By request and position: those of a prompt that is computed again are told again."""
    for output in outputs:
        assert output.error is None, output.error
        tokens.setdefault(output.request_id, []).extend(output.tokens)
        for entry in output.logprobs or []:
            numbers.setdefault(output.request_id, []).extend([entry.logprob, *entry.top_logprobs])
        for position, entry in enumerate(output.prompt_logprobs or [], output.prompt_logprobs_start):
            of_prompts[output.request_id, position] = [entry.logprob, *entry.top_logprobs]
    every = [own for _, own in (*sorted(numbers.items()), *sorted(of_prompts.items()))]
    return tokens, [number for own in every for number in own]


def compare(
    home: Path,
    size: int,
    adapter: Path | None = None,
    num_stages: int = 1,
    num_nodes: int = 1,
    seed: int = 3,
    **kinds: Any,
) -> None:
    one = make_engine(home, 1, **kinds)
    ranks = make_engine(home, size, num_stages=num_stages, num_nodes=num_nodes, **kinds)
    expected, expected_numbers = told(run(one, adapter, seed))
    try:
        found, numbers = told(run(ranks, adapter, seed))
    finally:
        ranks.executor.close()
    assert found == expected
    assert len(numbers) == len(expected_numbers) > 50
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(numbers, expected_numbers, strict=True))
    if kinds.get("whole_experts"):
        assert ranks.engine.stats().num_moved_experts > 0
    for made in (one, ranks):
        stats, cache = made.engine.stats(), made.engine.scheduler.cache
        frees_blocks = all(group.window for group in cache.groups)
        assert stats.num_preemptions > 0 or frees_blocks, "the pool was not small enough"
        assert stats.num_copied_tokens > 0 if cache.states is None else cache.states.num_snapshots > 0


KEY_HEADS = {
    **dict.fromkeys(("mamba2", "nemotron_h"), "n_groups"),
    "zamba2": "mamba_ngroups",
    **dict.fromkeys(("inkling_text", "inkling2_text"), "num_key_value_heads"),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), "mamba_n_groups"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp_text"), "linear_num_key_heads"),
}
"""How families name the heads, or groups of them, by which their recurrent layers are divided."""


def sizes(row: str, size: int) -> dict[str, Any]:
    """Heads and widths that 2, 3 and 4 divide; on four ranks, KV heads are held twice."""
    if row.startswith("gpt2"):
        return {"n_embd": 48, "n_head": 12}
    heads = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 48}
    if row.startswith("deepseek_v4"):
        return {"hidden_size": 48, "num_attention_heads": 12, "moe_intermediate_size": 48, "o_groups": 4}
    if row.startswith("dots3"):
        windowed = {"swa_num_attention_heads": 24, "swa_num_key_value_heads": 24}
        return {**heads, "num_key_value_heads": 12, "moe_intermediate_size": 48, **windowed}
    if row.startswith(("axk2", "deepseek", "glm5_next", "glm_moe_dsa", "hy_v4")):
        return {**heads, "num_key_value_heads": 12}
    kv_heads = 1 if "one_kv_head" in row else 12 if row.startswith("zamba2") else {2: 2, 3: 3, 4: 2}[size]
    shared = {"shared_expert_intermediate_size": 48} if row.startswith("qwen2_moe") else {}
    experts = {"moe_intermediate_size": 48} if "moe" in row or row.startswith("hy_v3") else {}
    recurrent = {"head_dim": 12} if row.startswith("mamba2") else {}
    if size == 4 and (key := KEY_HEADS.get(row.partition("/")[0])):
        recurrent[key] = 4
    return {**heads, "num_key_value_heads": kv_heads, **shared, **experts, **recurrent}


@pytest.mark.parametrize(
    ("row", "size"),
    [
        *(("llama/gqa", 3), ("gpt2/small", 4), ("deepseek_v3/half_split", 4), (TELLING[0], 2)),
        *nightly_after(0, ((row, 2) for row in FIRST_ROWS if row not in TELLING)),
        *nightly_after(0, ((row, 2) for row in TELLING[1:])),
        *nightly_after(0, (("llama/gqa", 4), ("qwen3/biases", 4))),
        *nightly_after(0, ((row, 3) for row in ("mixtral/two_of_five", "deepseek_v3/groups", "gpt_oss/sinks"))),
        *nightly_after(0, ((row, 4) for row in FIRST_ROWS if row not in ("llama/gqa", "gpt2/small"))),
        *nightly_after(0, ((row, 4) for row in ("qwen2/windows", "gemma2/uncapped"))),
    ],
)
def test_ranks_give_the_tokens_of_one_device(row: str, size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row, **sizes(row, size))
    compare(tmp_path, size)


WITHOUT_STAGES = (
    *("deepseek_v4", "gemma3n", "gemma4/own", "glm5_next", "hy_v4", "inkling2", "longcat", "qwen4_exp", "zamba2"),
    "zaya",
)
"""Families whose layers need more of the ones before than the residual stream, or have names in common with them."""


@pytest.mark.parametrize(
    ("row", "size", "num_stages", "num_nodes", "changes"),
    [
        ("llama/gqa", 1, 3, 3, {"num_hidden_layers": 5}),
        ("qwen3_next/experts", 1, 2, 1, {}),
        *nightly_after(
            0,
            (
                ("llama/gqa", 1, 3, 1, {"num_hidden_layers": 5}),
                ("llama/gqa", 1, 4, 2, {"num_hidden_layers": 5}),
                ("llama/gqa", 2, 2, 1, {"num_hidden_layers": 3}),
                *((row, 1, 2, 1, {}) for row in FIRST_ROWS if not row.startswith(WITHOUT_STAGES)),
                ("qwen3_next/experts", 1, 2, 2, {}),
                ("deepseek_v3/groups", 2, 2, 2, {}),
                ("mixtral/two_of_five", 2, 2, 1, {}),
                ("kimi_linear/experts", 2, 2, 1, {}),
            ),
        ),
    ],
)
def test_stages_give_the_tokens_of_one_device(
    row: str,
    size: int,
    num_stages: int,
    num_nodes: int,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``size``: ranks of each stage; ``num_nodes``: hosts, with a link between them."""
    finish, pending = HostExecutor.finish_stage, list[int]()

    def counted(executor: Any, *begun: Any) -> Any:
        pending.append(len(executor._pending))
        return finish(executor, *begun)

    monkeypatch.setattr(HostExecutor, "finish_stage", counted)
    make_checkpoint(tmp_path, row, **(sizes(row, 2) if size > 1 else {}), **changes)
    compare(tmp_path, size, num_stages=num_stages, num_nodes=num_nodes)
    if row.startswith("llama") and size == 1:  # with drafts and recurrent states, one step is in flight
        assert max(pending) == num_stages - 1, "stages waited for each other"


def test_penalties_are_those_of_a_step_when_later_ones_have_begun(tmp_path: Path) -> None:
    """Stages but the last finish a step after they have begun the next ones, which replace its rejected drafts."""
    make_checkpoint(tmp_path, "llama/gqa", num_hidden_layers=3)
    one, ranks = make_engine(tmp_path, 1), make_engine(tmp_path, 1, num_stages=3)
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    try:
        found = []
        for made in (one, ranks):
            made.engine.add(Request(0, [1, 2, 3], params, 20))
            outputs: list[Output] = []
            while made.engine.has_work:
                outputs += made.engine.step()
            found.append(told(iter(outputs))[0])
        assert found[0] == found[1]
        assert ranks.engine.stats().num_drafts > 10
    finally:
        ranks.executor.close()


def test_a_stage_that_fails_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a single request, after whose step no message comes that the failure would show at."""
    begin = StageLink.begin

    def failing(link: StageLink, *given: Any) -> Any:
        if link.stage.is_last:
            raise MemoryError
        return begin(link, *given)

    monkeypatch.setattr(StageLink, "begin", failing)
    make_checkpoint(tmp_path, "llama/gqa")
    made = make_engine(tmp_path, 1, num_stages=2)
    made.engine.add(Request(0, [1, 2, 3], SamplingParams(), 5))
    with pytest.raises(RanksLost, match="another rank failed"):
        made.engine.step()
    assert "MemoryError" in str(made.executor.failures.pop())
    made.executor.close()


@pytest.mark.nightly
def test_outputs_without_room_in_the_channel_are_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedRankMemory, "channel_bytes", 0)
    make_checkpoint(tmp_path, "llama/gqa")
    compare(tmp_path, 1, num_stages=2)


def test_layers_that_need_more_than_the_one_before_are_not_divided(tmp_path: Path) -> None:
    settings = ModelSettings(pipeline_parallel_size=2)
    rows = ("gemma3n/streams", "Gemma3n"), ("glm_moe_dsa/shared", "GlmMoeDsa"), ("zamba2/in_turn", "Zamba2")
    for row, name in rows:
        make_checkpoint(tmp_path / name, row)
        with pytest.raises(ConfigError, match=f"2 does not go with {name}ForCausalLM"):
            check_divides(read_config(open_checkpoint(tmp_path / name).config), settings, CPU)
    config = read_config({**make_config("llama/gqa").to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert isinstance(config, DecoderConfig)
    with pytest.raises(ConfigError, match="layer 1 reads what layer 0 caches"):
        check_divides(config.with_attention(shared_with=[None, 0]), settings, CPU)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 2 is for CPUs"):
        check_divides(config, settings, torch.device("cuda"))


@pytest.mark.parametrize(("row", "kv_dtype"), nightly_after(1, (("llama/gqa", INT4), ("gemma2/uncapped", torch.int8))))
def test_ranks_divide_a_cache_of_few_bits(row: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    compare(tmp_path, 2, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("row", "size"),
    [
        ("mixtral/two_of_five", 3),
        *nightly_after(
            0,
            (
                ("deepseek_v3/groups", 2),
                ("gpt_oss/sinks", 4),
                ("qwen2_moe/shared", 4),
                ("nemotron_h/latent_experts", 2),
                ("gemma4/experts", 2),
                ("llama4/scaled_inputs", 2),
            ),
        ),
    ],
)
def test_ranks_with_whole_experts_give_the_tokens_of_one_device(
    row: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While experts move between them every few steps."""
    monkeypatch.setattr(expert_balance, "STEPS_BETWEEN_LOOKS", 3)
    make_checkpoint(tmp_path, row, **sizes(row, size))
    compare(tmp_path, size, whole_experts=True)


@pytest.mark.parametrize(
    ("row", "size", "num_parts", "values"),
    [
        ("deepseek_v3/groups", 3, 3, {}),
        ("llama/gqa", 4, 2, {}),
        *nightly_after(
            0,
            (
                ("qwen3_next/experts", 2, 2, {"num_key_value_heads": 1}),
                ("deepseek_v2/groups", 4, 2, {}),
                ("deepseek_v3/groups", 4, 4, {}),
                ("kimi_linear/experts", 2, 2, {}),
                ("llama/one_kv_head_tied", 3, 3, {}),
                ("falcon/one_kv_head", 4, 4, {}),
                ("glm4_moe_lite/latent", 2, 2, {}),
            ),
        ),
    ],
)
def test_ranks_that_divide_contexts_give_the_tokens_of_one_device(
    row: str, size: int, num_parts: int, values: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, row, **{**sizes(row, size), **values})
    compare(tmp_path, size, num_parts=num_parts)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [4, 16, 20])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["experts", "contexts", "both"])
def test_other_random_workloads(
    kind: str, size: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with experts and latents, which ranks divide in all ways."""
    monkeypatch.setattr(expert_balance, "STEPS_BETWEEN_LOOKS", 3)
    row = "deepseek_v3/groups"
    make_checkpoint(tmp_path, row, **sizes(row, size))
    num_parts = 1 if kind == "experts" else size
    compare(tmp_path, size, seed=seed, whole_experts=kind != "contexts", num_parts=num_parts)


@pytest.mark.parametrize(
    ("row", "size", "whole_experts"),
    [
        ("deepseek_v3/groups", 2, True),
        *nightly_after(
            0,
            (
                ("mixtral/two_of_five", 3, True),
                ("deepseek_v2/lite", 3, True),
                ("deepseek_v2/groups", 2, False),
                ("glm4_moe_lite/latent", 2, True),
                ("qwen3_moe/windows", 2, True),
                ("gpt_oss/sinks", 3, True),
                ("llama/gqa", 3, False),
                ("cohere2_moe/shared", 2, True),
                ("olmo2/biases", 2, False),
            ),
        ),
    ],
)
def test_ranks_with_sequences_of_their_own_give_the_tokens_of_one_device(
    row: str, size: int, whole_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemption, prefixes and drafts on each of them; whole experts move, too."""
    monkeypatch.setattr(expert_balance, "STEPS_BETWEEN_LOOKS", 3)
    make_checkpoint(tmp_path, row, **sizes(row, size))
    compare(tmp_path, size, whole_experts=whole_experts, dp_attention=True)


@pytest.mark.parametrize(
    ("row", "size"),
    [
        ("deepseek_v3/groups", 2),
        *nightly_after(0, (("gpt_oss/sinks", 3), ("llama/gqa", 3), ("gptj/adjacent", 3), ("gemma2/capped", 3))),
    ],
)
def test_sequences_of_their_own_with_the_executor_of_gpus(row: str, size: int, tmp_path: Path) -> None:
    """Whose shapes do not depend on which rank has which sequence, and others' rows attend to NaN."""
    make_checkpoint(tmp_path, row, **sizes(row, size))
    compare(tmp_path, size, dp_attention=True, runs_ahead=True)


def test_groups_of_heads_are_not_divided() -> None:
    changes = {"num_attention_heads": 12, "o_groups": 2}
    config = make_config("deepseek_v4/three_kinds", **changes).to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
    check_divides(read_config(config), ModelSettings(tensor_parallel_size=2), CPU)
    with pytest.raises(ConfigError, match="4 does not divide the 2 groups of heads"):
        check_divides(read_config(config), ModelSettings(tensor_parallel_size=4), CPU)


def test_layers_whose_attention_is_not_apart_are_refused(tmp_path: Path) -> None:
    settings = ModelSettings(tensor_parallel_size=2, enable_dp_attention=True)
    for row, name in (("gemma4/experts", "Gemma4"), ("qwen3_next/experts", "Qwen3Next")):
        config = read_config(make_config(row).to_dict() | {"architectures": [f"{name}ForCausalLM"]})
        with pytest.raises(ConfigError, match=f"enable_dp_attention: does not go with the layers of {name}"):
            check_divides(config, settings, CPU)
    config = read_config({**make_config("llama/gqa").to_dict(), "architectures": ["LlamaForCausalLM"]})
    check_divides(config, settings, torch.device("cuda"))
    config = read_config(make_config("deepseek_v32/groups").to_dict() | {"architectures": ["DeepseekV32ForCausalLM"]})
    check_divides(config, settings, CPU)
    with pytest.raises(ConfigError, match="on GPUs, does not go with attention to what an indexer chooses"):
        check_divides(config, settings, torch.device("cuda"))


@pytest.mark.parametrize(
    ("row", "size", "form"),
    nightly_after(1, (("mixtral/two_of_five", 2, "Q8_0"), ("llama/gqa", 4, "Q4_0"), ("llama/gqa", 2, "Q8_0"))),
)
def test_blocks_are_divided(row: str, size: int, form: str, tmp_path: Path) -> None:
    """Dense weights give the same tokens. Packed, products round activations to 8 bits, by rank: errors are alike."""
    width = 32 * size
    values = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = make_checkpoint(tmp_path, row, **values)

    def choose(name: str, values: Any) -> gguf.GGMLQuantizationType | None:
        return gguf.GGMLQuantizationType[form] if values.ndim > 1 and "inp" not in name else None

    path = write_gguf(tmp_path, model, choose)
    compare(path, size)
    compare_packed(path, size)


@pytest.mark.parametrize(
    ("row", "size", "name"),
    [
        ("llama/gqa", 4, "int4, zeros"),
        *nightly_after(
            0,
            (
                ("llama/gqa", 2, "gptq, in activation order"),
                ("mixtral/two_of_five", 2, "fp8, blocks"),
                ("llama/gqa", 2, "int4"),
                ("llama/gqa", 2, "fp8, blocks"),
                ("mixtral/two_of_five", 2, "awq"),
                ("llama/gqa", 2, "modelopt nvfp4"),
            ),
        ),
    ],
)
def test_quantised_weights_are_divided(row: str, size: int, name: str, tmp_path: Path) -> None:
    """Parts that end within a block of scales are among them: 96 inputs are 48 a rank, blocks of FP8 are 32."""
    source, home = tmp_path / "source", tmp_path / "quantised"
    widths = {"hidden_size": 32 * size, "intermediate_size": 48 * size}
    make_checkpoint(source, row, **widths, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    quantise(source, home, FORMATS[name])
    compare(home, size)
    if name not in DENSE_ON_CPUS:
        compare_packed(home, size)


def compare_packed(path: Path, size: int) -> None:
    """Compare the rounding errors of packed weights, on one device and on ranks."""
    exact, one, ranks = (make_engine(path, *kind) for kind in ((1, False), (1, True), (size, True)))
    (dense, packed, divided), _ = [[prompt_logprobs(made) for made in (exact, one, ranks)], ranks.executor.close()]
    errors = [max(abs(a - b) for a, b in zip(dense, found, strict=True)) for found in (packed, divided)]
    assert 0 < errors[1] < 2 * errors[0]


@pytest.mark.parametrize(
    ("row", "size", "num_parts"),
    [
        *(("llama/gqa", 2, 1), ("qwen2/windows", 4, 1), ("deepseek_v3/groups", 2, 2)),
        *nightly_after(0, (("deepseek_v3/groups", 2, 1), ("qwen3/biases", 4, 2))),
    ],
)
def test_the_executor_of_gpus_is_divided_too(row: str, size: int, num_parts: int, tmp_path: Path) -> None:
    """On the CPU, without graphs: padded shapes, steps that run ahead, gathered logits."""
    make_checkpoint(tmp_path / "model", row, **sizes(row, size))
    adapter = None
    if row.startswith("llama"):
        adapter = tmp_path / "adapter"
        make_adapter(tmp_path / "model", adapter, 1, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    compare(tmp_path / "model", size, adapter, runs_ahead=True, num_parts=num_parts)


def prompt_logprobs(made: Made) -> list[float]:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=60)
    made.engine.add(Request(0, prompt, SamplingParams(temperature=0, prompt_logprobs=0), 1, 0))
    found: list[float] = []
    while made.engine.has_work:
        for output in made.engine.step():
            found += [entry.logprob for entry in output.prompt_logprobs or []]
    assert len(found) == len(prompt) - 1
    return found


@pytest.mark.parametrize("size", nightly_after(1, (3, 2, 4)))
@pytest.mark.parametrize("row", nightly_after(1, ("glm4/biases", "llama/gqa")))
def test_adapters_are_divided_too(row: str, size: int, tmp_path: Path) -> None:
    home, targets = tmp_path / "model", ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    make_checkpoint(home, row, **sizes(row, size))
    make_adapter(home, tmp_path / "adapter", 1, target_modules=targets)
    compare(home, size, tmp_path / "adapter")
