"""Which experts a mixture uses for each token, against transformers: chunks, hits, drafts, preemption, and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.build import build_engine as build
from octavo.build.build_executor import ExecutorParts
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.runner.route_reading import RouteReading, as_array
from octavo.errors import ConfigError, InvalidParameter
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.types import Request
from tests.models.families import make_checkpoint
from tests.models.test_architectures import random_tokens
from tests.tiers import nightly, one_in

ROWS = [
    "qwen3_moe/normalised",
    "mixtral/two_of_five",
    "deepseek_v3/groups",
    *map(nightly, ("qwen2_moe/some_layers_dense", "deepseek_v2/groups", "qwen3_5_moe/experts", "lfm2_moe/experts")),
]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 16,
    "kv_cache_memory": 0.02,
    "enable_return_routed_experts": True,
}
PROMPT = random_tokens(61, 5)
Experts = npt.NDArray[np.uint8]


class Selected:
    """The experts that the routers of a model of transformers select, from the inputs that they get."""

    def __init__(self, model: torch.nn.Module, num_chosen: int) -> None:
        self._model, self._num_chosen = model, num_chosen
        self._kept: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith((".mlp.gate", ".block_sparse_moe.gate", ".feed_forward.gate")):
                layer = int(name.split(".layers.")[1].split(".")[0])
                module.register_forward_hook(lambda _, given, found, layer=layer: self._keep(layer, found))

    def _keep(self, layer: int, found: Any) -> None:
        """A router gives logits, or with them the experts."""
        parts = found if isinstance(found, tuple) else (found,)
        ids = [part for part in parts if part.dtype == torch.int64]
        self._kept[layer] = ids[0] if ids else parts[0]

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> dict[int, torch.Tensor]:
        self._kept.clear()
        self._model(torch.tensor([tokens]), use_cache=False)
        return {layer: found.view(len(tokens), -1) for layer, found in self._kept.items()}


def as_sets(experts: Any) -> list[list[int]]:
    return [sorted(row) for row in np.asarray(experts).tolist()]


@pytest.fixture(scope="module", params=ROWS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, make_checkpoint(folder, request.param)


def generated(llm: LLM, prompt: list[int], **params: Any) -> tuple[list[int], Experts, int]:
    asked = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, return_routed_experts=True, **params)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], asked)
    experts = output.outputs[0].routed_experts
    assert experts is not None
    return output.outputs[0].token_ids, experts, output.num_cached_tokens


@one_in(2)
def test_they_are_those_of_transformers(made: tuple[Path, Any]) -> None:
    folder, reference = made
    with LLM(str(folder), **SETTINGS) as llm:
        tokens, experts, _ = generated(llm, PROMPT)
        assert experts.shape[0] == len(PROMPT) + len(tokens) - 1
        num_chosen = experts.shape[2]
        found = Selected(reference, num_chosen)([*PROMPT, *tokens][:-1])
        assert found
        for layer in range(experts.shape[1]):
            if layer not in found:
                assert not experts[:, layer].any(), "a layer without experts"
            elif found[layer].dtype == torch.int64:
                assert as_sets(experts[:, layer]) == as_sets(found[layer])
            else:
                assert as_sets(experts[:, layer]) == as_sets(found[layer].topk(num_chosen).indices)
        again, cached, num_cached = generated(llm, PROMPT)
        assert num_cached > 0
        assert again == tokens
        assert np.array_equal(cached, experts), "those of a cached prefix"
        _, rest, _ = generated(llm, PROMPT, routed_experts_prompt_start=50)
        assert np.array_equal(rest, experts[50:])
    with LLM(str(folder), **SETTINGS, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert np.array_equal(generated(llm, PROMPT)[1], experts), "with drafts"


def built(folder: Path, **settings: Any) -> Engine:
    values = {"model": str(folder), **SETTINGS, **settings}
    if "num_kv_blocks" in settings:
        del values["kv_cache_memory"]
    engine, info = build.build_engine(EngineConfig.from_flat(values))
    assert info.routes is not None
    return engine


def run(engine: Engine, *requests: Request) -> dict[int, tuple[list[int], Experts, list[float]]]:
    """Tokens, experts, and log-probabilities of the prompt."""
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[int, list[float]] = {request.id: [] for request in requests}
    experts = {}
    assert engine.scheduler.routes is not None
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            tokens[output.request_id] += output.tokens
            logprobs[output.request_id] += [entry.logprob for entry in output.prompt_logprobs or []]
            if output.finish_reason is not None:
                assert isinstance(output.routes, bytes), "and nothing that keeps pinned memory"
                experts[output.request_id] = as_array(output.routes, engine.scheduler.routes.info)
        engine.check()
    return {number: (tokens[number], experts[number], logprobs[number]) for number in tokens}


def asking(number: int, prompt: list[int], max_tokens: int = 12, routes: bytes = b"", **params: Any) -> Request:
    asked = SamplingParams(temperature=0.0, return_routed_experts=True, **params)
    return Request(number, prompt, asked, max_tokens, routes=routes, cache_salt=str(hash(routes)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, make_checkpoint(folder, "qwen3_moe/normalised")


def test_preempted_sequences_and_steps_ahead(mixture: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of few blocks, and an executor that runs ahead: outputs wait for the copy of their experts."""
    prompts = [random_tokens(20, seed) for seed in range(4)]
    alone = built(mixture[0])
    expected = [run(alone, asking(0, prompt, 60))[0] for prompt in prompts]
    monkeypatch.setitem(build.DEPTH, "cpu", 2)
    monkeypatch.setattr(build, "make_executor", lambda settings, *given: stream_executor(*given))
    engine = built(mixture[0], num_kv_blocks=10, enable_prefix_caching=False)
    held, added = list[bool](), RouteReading.added

    def noted(self: RouteReading, *args: Any, **kwargs: Any) -> Any:
        found = added(self, *args, **kwargs)
        held.append(bool(self))
        return found

    monkeypatch.setattr(RouteReading, "added", noted)
    found = run(engine, *(asking(number, prompt, 60) for number, prompt in enumerate(prompts)))
    assert engine.stats().num_preemptions > 0
    assert any(held), "an output was held back"
    for number, (tokens, experts, _) in enumerate(expected):
        assert found[number][0] == tokens
        assert np.array_equal(found[number][1], experts)


def stream_executor(model: Any, storage: Any, vocab_size: int, most: Any, parts: ExecutorParts) -> StreamExecutor:
    return StreamExecutor(
        *(model, storage, vocab_size, most, False, True, parts.pooler, parts.adapters),
        drafter=parts.drafter,
        verify=parts.verify,
        embeddings=parts.pool,
        updates=parts.updates,
    )


@pytest.mark.parametrize("start", [31, 32, 1000])
def test_of_full_blocks_and_none_that_is_asked_for(mixture: tuple[Path, Any], start: int) -> None:
    engine = built(mixture[0])
    _, experts, _ = run(engine, asking(1, PROMPT[:32], 1, routed_experts_prompt_start=start))[1]
    assert len(experts) == max(0, 32 - start)


def test_their_replay_scores_with_the_same_bits(mixture: tuple[Path, Any]) -> None:
    engine = built(mixture[0])
    tokens, experts, _ = run(engine, asking(0, PROMPT))[0]
    text = [*PROMPT, *tokens]
    plain = run(engine, asking(1, text, 0, prompt_logprobs=0))[1]
    given = experts.astype(np.uint16).tobytes()
    again = run(engine, asking(2, text, 0, given, prompt_logprobs=0), asking(3, PROMPT[:7]))[2]
    assert again[2] == plain[2]
    assert np.array_equal(again[1], plain[1])


def test_other_experts_are_those_of_the_model_with_them(mixture: tuple[Path, Any]) -> None:
    folder, reference = mixture
    engine = built(folder)
    _, experts, own = run(engine, asking(1, PROMPT, 0, prompt_logprobs=0))[1]
    assert engine.scheduler.routes is not None
    given = (experts[:50] + 1) % engine.scheduler.routes.info.num_experts
    _, found, logprobs = run(engine, asking(2, PROMPT, 0, given.astype(np.uint16).tobytes(), prompt_logprobs=0))[2]
    assert np.array_equal(found[:50], given)
    assert not np.allclose(logprobs, own, atol=1e-3)
    hooks = []
    for name, module in reference.named_modules():
        if name.endswith(".mlp.gate"):
            layer = int(name.split(".layers.")[1].split(".")[0])
            hooks.append(module.register_forward_hook(lambda _, x, out, layer=layer: forced(out, given[:, layer])))
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    wanted = [float(row[token]) for row, token in zip(expected[:-1], PROMPT[1:], strict=True)]
    np.testing.assert_allclose(logprobs, wanted, atol=2e-4)


def forced(found: Any, given: Experts) -> Any:
    """What the router of transformers gives with some rows of other experts."""
    logits, _, ids = found
    ids = ids.clone()
    ids[: len(given)] = torch.from_numpy(given.astype(np.int64))
    scores = logits.float().softmax(-1).gather(1, ids)
    return logits, (scores / scores.sum(-1, keepdim=True)).to(logits.dtype), ids


def test_without_the_setting_nobody_may_ask(mixture: tuple[Path, Any]) -> None:
    with LLM(str(mixture[0]), **{**SETTINGS, "enable_return_routed_experts": False}) as llm:
        asked = SamplingParams(return_routed_experts=True)
        with pytest.raises(InvalidParameter, match="return_routed_experts"):
            llm.generate([{"prompt_token_ids": PROMPT}], asked)


@pytest.mark.parametrize(
    ("row", "message"), [("llama/gqa", "no routers"), ("mixtral/window", "a layer of full attention")]
)
def test_models_of_which_nothing_can_be_kept(tmp_path: Path, row: str, message: str) -> None:
    make_checkpoint(tmp_path, row)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize("size", [nightly(2)])
def test_ranks_have_the_same(mixture: tuple[Path, Any], size: int) -> None:
    found = []
    for count in (1, size):
        with LLM(str(mixture[0]), **SETTINGS, tensor_parallel_size=count) as llm:
            found.append(generated(llm, PROMPT))
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])
