"""Models with recurrent state through the real engine: the same bits in any chunks, batch and after any hit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.runtime.kv_storage import KVStorage
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.tiers import nightly_after, one_in

ROW = "qwen3_5/dense"
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 100}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
Told = list[Mapping[int, Any]]
"""Tokens and log-probabilities of an answer."""


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


SHARED = words(200, 0)
PROMPTS = [
    [*SHARED, *words(40, 1)],
    words(1, 2),
    words(65, 3),
    words(128, 4),
    [*SHARED[:150], *words(30, 5)],
    [7, 8] * 40,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, ROW)
    return folder


def ask(llm: LLM, prompts: list[list[int]]) -> tuple[list[Told], list[int]]:
    """The answers, and how many tokens of each prompt came from the cache."""
    found = llm.generate(prompts, GREEDY)
    return [list(result.outputs[0].logprobs or ()) for result in found], [r.num_cached_tokens for r in found]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[int, ...], Told]:
    """The answer to each prompt, and to each with the answer and more, computed alone and in one chunk."""
    answers: dict[tuple[int, ...], Told] = {}
    with LLM(folder, **SETTINGS, enable_prefix_caching=False, max_num_batched_tokens=400) as llm:
        for prompt in PROMPTS:
            (first,), _ = ask(llm, [prompt])
            longer = next_turn(prompt, first)
            (second,), _ = ask(llm, [longer])
            answers |= {tuple(prompt): first, tuple(longer): second}
    return answers


def next_turn(prompt: list[int], answer: Told) -> list[int]:
    tokens = [max(entry, key=lambda token: entry[token].logprob) for entry in answer]
    return [*prompt, *tokens, *words(9, len(prompt))]


@one_in(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 4, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "block_size": 16},
        {"max_num_batched_tokens": 100, "block_size": 1, "num_kv_blocks": 2000},
        {"max_num_batched_tokens": 100, "num_kv_blocks": 13, "enforce_eager": True},
        {"max_num_batched_tokens": 48, "speculative_config": '{"method": "ngram", "prompt_lookup_min": 1}'},
        {"max_num_batched_tokens": 80, "speculative_config": '{"method": "suffix"}'},
        {"max_num_batched_tokens": 100, "num_state_snapshots": 1},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks_batches_and_hits(
    folder: Path, alone: dict[tuple[int, ...], Told], settings: dict[str, Any]
) -> None:
    with LLM(folder, **{**SETTINGS, **settings}) as llm:
        prompts, num_cached = PROMPTS, 0
        for _ in range(2):
            answers, hits = ask(llm, prompts)
            num_cached += sum(hits)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer == alone[tuple(prompt)]
            if prompts is PROMPTS:
                prompts = [next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert num_cached or settings.get("num_kv_blocks") == 13 or "num_state_snapshots" in settings


FAMILIES = (
    *("lfm2/conv", "falcon_h1/factors", "kimi_linear/experts", "mamba2/alone", "falcon_mamba/norms"),
    *("minimax/lightning", "jamba/experts", "zamba2/in_turn", "bailing_hybrid/bounded"),
    *("nemotron_h/experts", "granitemoehybrid/experts", "olmo_hybrid/no_positions", "qwen3_next/some_layers_dense"),
    *("zaya/two_windows", "qwen4_exp_text/blocks", "inkling_text/biases", "inkling2_text/blocks"),
)


@one_in(2)
@pytest.mark.parametrize("row", nightly_after(3, FAMILIES))
def test_families_keep_their_bits_with_drafts_and_over_hits(tmp_path: Path, row: str) -> None:
    """States of every kind, those of convolutions too, are taken back where drafts are rejected, and found again."""
    make_checkpoint(tmp_path, row)
    settings = SETTINGS | {"max_model_len": 400}
    prompts, drafts = [PROMPTS[0], [7, 8] * 40, words(3, 1)], '{"method": "ngram", "prompt_lookup_min": 1}'
    with LLM(tmp_path, **settings, enable_prefix_caching=False) as llm:
        expected = [ask(llm, [prompt])[0][0] for prompt in prompts]
    with LLM(tmp_path, **settings, max_num_batched_tokens=48, speculative_config=drafts) as llm:
        for is_known in (False, True):
            answers, hits = ask(llm, prompts)
            assert answers == expected
            assert hits == ([192, 64, 0] if is_known else [0, 0, 0])
        stats = llm.engine.stats()
        assert stats.num_drafts > stats.num_accepted_drafts
        llm.engine.check()


def test_answers_are_the_same_over_a_hit_at_every_snapshot(folder: Path) -> None:
    """Also while other sequences use the slots in between."""
    prompt = words(300, 9)
    with LLM(folder, **SETTINGS, enable_prefix_caching=False) as llm:
        expected = [ask(llm, [prompt[:end]])[0][0] for end in range(65, 300, 64)]
    with LLM(folder, **SETTINGS, max_num_batched_tokens=64) as llm:
        for end, answer in zip(range(65, 300, 64), expected, strict=True):
            ask(llm, [prompt[:end]])
            ask(llm, [words(80, end), words(30, end)])
            again, hits = ask(llm, [words(3, end), prompt[:end]])
            assert hits[1] == end - 1
            assert again[1] == answer


def test_a_prompt_takes_one_step_which_keeps_its_snapshots(folder: Path) -> None:
    """Also where the step is a recording that was made for another prompt."""
    prompts, once = [words(100, seed) for seed in range(4)], SamplingParams(temperature=0, max_tokens=1)
    with LLM(folder, **SETTINGS, enable_prefix_caching=False) as llm:
        expected = [ask(llm, [[*prompt, 1, 2]])[0][0] for prompt in prompts]
    with LLM(folder, **SETTINGS) as llm:
        for prompt in prompts:
            llm.generate([prompt], once)
        assert llm.engine.stats().num_steps == len(prompts)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert ask(llm, [[*prompt, 1, 2]]) == ([answer], [64])


def test_slots_that_were_used_and_those_of_padding_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool begins with numbers that would show."""
    plain = KVStorage._allocate_states

    def allocate(self: KVStorage, *args: Any) -> Any:
        caches = plain(self, *args)
        for pool in self.state_pools:
            pool.fill_(float("nan"))
        return caches

    with LLM(folder, **SETTINGS) as llm:
        expected, _ = ask(llm, PROMPTS[1:4])
    monkeypatch.setattr(KVStorage, "_allocate_states", allocate)
    with LLM(folder, **SETTINGS) as llm:
        assert ask(llm, PROMPTS[1:4])[0] == expected


@pytest.mark.parametrize(
    ("row", "changes"), [(ROW, {}), ("falcon_mamba/norms", {"state_size": 16, "time_step_rank": 32})]
)
def test_steps_of_models_without_experts_are_recorded(
    tmp_path: Path, row: str, changes: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, row, **changes)
    caplog.set_level("INFO", "octavo.runtime")
    with LLM(tmp_path, **SETTINGS, max_model_len=400) as llm:
        ask(llm, [words(1, 2), words(2, 3)])
    assert "not recorded" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"num_state_snapshots": 10**9}, "num_state_snapshots"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(folder, **{**SETTINGS, **settings})


@pytest.mark.parametrize("row", [ROW, "mamba2/alone"])
def test_snapshots_are_found_in_memory_and_after_a_restart(tmp_path: Path, row: str) -> None:
    """More conversations than the cache has snapshots for; the answers keep their bits."""
    make_checkpoint(tmp_path / "model", row)
    prompts = [words(150, seed) for seed in range(6)]
    of_all = SETTINGS | {"max_model_len": 400}
    settings = of_all | {"num_state_snapshots": 2, "max_num_seqs": 1, "kv_offload_dir": str(tmp_path / "kv")}
    with LLM(tmp_path / "model", **of_all, enable_prefix_caching=False) as llm:
        expected, _ = ask(llm, prompts)
    for is_new in (True, False):
        with LLM(tmp_path / "model", **settings) as llm:
            for known in (not is_new, True):
                answers, hits = ask(llm, prompts)
                assert answers == expected
                assert hits == [128 if known else 0] * 6


def test_states_of_sixteen_bits_are_nearly_as_good(folder: Path, alone: dict[tuple[int, ...], Told]) -> None:
    with LLM(folder, **SETTINGS, state_dtype="bfloat16") as llm:
        (answer,), _ = ask(llm, PROMPTS[2:3])
    first, expected = answer[0], alone[tuple(PROMPTS[2])][0]
    assert all(abs(first[token].logprob - expected[token].logprob) < 0.1 for token in first.keys() & expected.keys())


def test_log_probabilities_of_prompts_and_several_choices(folder: Path, alone: dict[tuple[int, ...], Told]) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, n=1, ignore_eos=True)
    with LLM(folder, **SETTINGS, max_num_batched_tokens=50) as llm:
        first, again = (llm.generate([PROMPTS[0]], params)[0] for _ in range(2))
        several = llm.generate([PROMPTS[0]], SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True))
        assert len({tuple(output.token_ids) for output in several[0].outputs}) == 3
    assert first.prompt_logprobs == again.prompt_logprobs
    assert len(first.prompt_logprobs or ()) == len(PROMPTS[0])
