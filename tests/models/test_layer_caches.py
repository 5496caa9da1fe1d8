"""Models whose layers cache different things: two windows, other widths, caches that layers share.

No family here is like that, so a decoder is given such layers. What the engine says is compared with attention
over the whole text that keeps nothing and is written out here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.layers.rotary import DefaultRope
from octavo.models.decoder import Decoder
from octavo.models.layer_cache import LayerCacheSpec, kv_groups
from octavo.models.loader import WeightLoader
from octavo.models.parts import AttentionPart, DecoderConfig, LayerPart, MLPPart
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Request
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.making import host_runner, stream_runner
from tests.runtime.test_model_runner import run, tokens_of
from tests.tiers import one_in

CPU, VOCAB, HEADS, STEP = torch.device("cpu"), 61, 4, 11
SPECS: dict[str, list[LayerCacheSpec]] = {
    "two windows": [LayerCacheSpec(2, 8, window) for window in (7, 0, 19, 7)],
    "no full attention": [LayerCacheSpec(2, 8, window) for window in (19, 5, 5)],
    "widths": [LayerCacheSpec(*sizes) for sizes in ((2, 8), (1, 16), (4, 8, 7), (1, 16, 7))],
    "shared": [
        *(LayerCacheSpec(2, 8, 7), LayerCacheSpec(1, 16)),
        *(LayerCacheSpec(2, 8, 7, shared_with=0), LayerCacheSpec(1, 16, shared_with=1)),
    ],
}


def part_of(spec: LayerCacheSpec) -> LayerPart:
    H, rule = spec.head_dim, {"window": spec.window, "shared_with": spec.shared_with}
    attention = AttentionPart(num_heads=HEADS, num_kv_heads=spec.num_kv_heads, head_dim=H, scale=H**-0.5, **rule)
    return LayerPart(attention=attention, mlp=MLPPart(size=48, activation="silu"))


class RandomWeights:
    """Whatever is asked for, by name."""

    is_dummy = True

    def names(self) -> set[str]:
        return set()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        raise NotImplementedError

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
        return torch.randn(shape, generator=generator) * 0.3 + (1 if "norm" in name else 0)


class Made(NamedTuple):
    """A model, and what it says to each of some prompts."""

    model: Decoder
    requests: list[Request]
    expected: dict[int, list[int]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are too small to be worth a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SPECS)
def made(request: pytest.FixtureRequest) -> Made:
    specs = SPECS[request.param]
    config = DecoderConfig(
        architecture="Own",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_size=48,
        num_layers=len(specs),
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_ids=(),
        ropes=((DefaultRope(10_000.0), 8),),
        layers=tuple(map(part_of, specs)),
    )
    model = Decoder(config, WeightLoader(RandomWeights(), WeightFormat(torch.float32, CPU)))
    rng = random.Random(0)
    shared = rng.choices(range(VOCAB), k=40)
    prompts = [[*shared[:kept], *rng.choices(range(VOCAB), k=more)] for kept, more in ((40, 3), (29, 9), (0, 25))]
    requests = [Request(i, prompt, SamplingParams(temperature=0), 12) for i, prompt in enumerate(prompts)]
    with dispatch.only(REFERENCE), torch.inference_mode():
        return Made(model, requests, {request.id: greedy(model, config, request) for request in requests})


def greedy(model: Decoder, config: DecoderConfig, request: Request) -> list[int]:
    tokens = list(request.prompt_tokens)
    for _ in range(request.max_tokens):
        tokens.append(int(logits(model, config, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(request.prompt_tokens) :]


def logits(model: Decoder, config: DecoderConfig, tokens_T: Tensor) -> Tensor:
    """After each token: every layer attends to keys and values of the whole text."""
    positions_T = torch.arange(len(tokens_T))
    x_TD = model.embedding(tokens_T)
    cos_TR, sin_TR = model.rotaries[0](positions_T)
    keys_and_values: list[tuple[Tensor, Tensor]] = []
    for layer, spec in zip(model.layers, config.cache, strict=True):
        projected = layer.qkv_proj.of_normed(x_TD, layer.before_attention).view(len(tokens_T), -1, spec.head_dim)
        q_TNH = turned(projected[:, :HEADS], cos_TR, sin_TR)
        if spec.shared_with is None:
            k_TKH, v_TKH = projected[:, HEADS:].chunk(2, 1)
            keys_and_values.append((turned(k_TKH, cos_TR, sin_TR), v_TKH))
        else:
            keys_and_values.append(keys_and_values[spec.shared_with])
        group = HEADS // spec.num_kv_heads
        k_TNH, v_TNH = (part.repeat_interleave(group, 1) for part in keys_and_values[-1])
        scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * spec.head_dim**-0.5
        distance_TT = positions_T[:, None] - positions_T
        is_hidden_TT = (distance_TT < 0) | ((distance_TT >= spec.window) if spec.window else torch.tensor(False))
        weights_NTT = scores_NTT.masked_fill(is_hidden_TT, -torch.inf).softmax(-1)
        attended_TN = torch.einsum("nts,snh->tnh", weights_NTT, v_TNH).flatten(1)
        x_TD = layer.mlp(layer.o_proj(attended_TN, residual=x_TD))
    return model.logits(x_TD)


def turned(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    R = cos_TR.shape[1]
    pairs = torch.complex(x_TNH[..., :R].contiguous(), x_TNH[..., R : 2 * R].contiguous())
    pairs = pairs * torch.complex(cos_TR, sin_TR)[:, None]
    return torch.cat((pairs.real, pairs.imag, x_TNH[..., 2 * R :]), -1)


def engine_of(made: Made, *, is_tight: bool, streams: bool = False, records: bool = False) -> Engine:
    """Tight: blocks for little more than one request, and none hold numbers before they are written."""
    config: Any = made.model.config
    groups = kv_groups(config.cache, max_window=1000)
    most = [-(-(group.window + STEP if group.window else 54) // 4) + 2 for group in groups]
    sizes = [count if is_tight else 60 for count in most]
    storage = KVStorage(config.cache, groups, sizes, 4, torch.float32, CPU)
    for part in [part for pool in storage.pools for part in pool]:
        part.fill_(torch.nan)
    limits = StepLimits(3, STEP, max_blocks=30)
    if streams:
        runner = stream_runner(made.model, storage, VOCAB, limits)
    else:
        forward = make_forward(made.model, storage.layers, CPU) if records else None
        runner = host_runner(made.model, storage, VOCAB, limits, forward)
    cache = KVCache([GroupSize(size, group.window) for size, group in zip(sizes, groups, strict=True)], 4)
    cache.copy_slots = storage.copy_slots
    return Engine(Scheduler(cache, max_num_seqs=3, max_num_batched_tokens=STEP), runner, depth=2 if streams else 1)


@one_in(5)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_tokens_are_those_without_a_cache(made: Made, is_tight: bool, streams: bool) -> None:
    """In chunks, side by side, after preemptions; the second time over what was cached."""
    with dispatch.only(REFERENCE):
        engine = engine_of(made, is_tight=is_tight, streams=streams)
        for _ in range(2):
            assert tokens_of(run(engine, made.requests)) == made.expected
    if not is_tight:
        assert engine.stats().prefix_hits > 0


@needs_float_kernels
def test_kernels_and_recorded_steps_do_the_same(made: Made) -> None:
    engine = engine_of(made, is_tight=True, records=True)
    assert tokens_of(run(engine, made.requests)) == made.expected
    forward: Any = engine.runner.executor._forward  # type: ignore[attr-defined]
    assert forward._steps, "no step was recorded"
