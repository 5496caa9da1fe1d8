"""Adapters against the models that PEFT merges them into, through the real engine: many in one batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from octavo.build.build_engine import build_engine
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import CheckpointError, ConfigError, ModelNotFound
from octavo.models import model_adapters
from octavo.sampling_params import SamplingParams
from octavo.types import Output, Request
from octavo.weights.adapter import WEIGHTS_NAME, read_adapter
from tests.engine.making import serve
from tests.models.adapter_files import LLAMA_MAPS, make_adapter
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.writers import gptq, quantise
from tests.tiers import one_in

NEW_TOKENS = 12
COUNT = 16
PROMPT = random.Random(0).choices(range(VOCAB_SIZE), k=70)
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True)
KINDS: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj", "v_proj"], "r": 2},
    {"target_modules": ["gate_proj"], "use_rslora": True},
    {"target_modules": ["down_proj", "o_proj"], "r": 16},
    {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 3, "layers.0.self_attn.k_proj": 20}},
]


class Made:
    """A model, and adapters of it."""

    def __init__(self, home: Path, row: str, kinds: list[dict[str, Any]]) -> None:
        self.base = home / "base"
        self.models: dict[str, PreTrainedModel] = {"": make_checkpoint(self.base, row)}
        for i, kind in enumerate(kinds):
            self.models[f"a{i}"] = make_adapter(self.base, home / f"a{i}", i, **kind)
        self.paths = {name: str(home / name) for name in self.models if name}

    def build(self, names: list[str] | None = None, **settings: Any) -> Engine:
        modules = ",".join(f"{name}={self.paths[name]}" for name in (self.paths if names is None else names))
        values = {"model": str(self.base), "device": "cpu", "dtype": "float32", "block_size": 16, "max_num_seqs": 32}
        values |= {"enable_lora": True, "lora_modules": modules or None, "kv_cache_memory": 0.05}
        return build_engine(EngineConfig.from_flat({**values, "max_num_batched_tokens": 96, **settings}))[0]

    def check(self, name: str, tokens: list[int], found: list[Output]) -> None:
        """Every token is what the merged model likes best, and as probable as there."""
        made = [token for output in found for token in output.tokens]
        with torch.inference_mode():
            logits = self.models[name](torch.tensor([[*tokens, *made]]), use_cache=False).logits[0]
        expected = logits.log_softmax(dim=-1)[len(tokens) - 1 : -1]
        assert made == expected.argmax(dim=-1).tolist(), name
        logprobs = [entry for output in found for entry in output.logprobs or []]
        for entry, wanted in zip(logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(wanted[entry.token_id].item(), abs=1e-4)


def ask(number: int, adapter: str, tokens: list[int]) -> Request:
    return Request(number, tokens, PARAMS, NEW_TOKENS, adapter=adapter, cache_salt=adapter)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    kinds = [KINDS[i % len(KINDS)] for i in range(COUNT)]
    return Made(tmp_path_factory.mktemp("adapters"), "llama/biases", kinds)


def test_sixteen_adapters_and_none_in_one_batch_are_those_that_peft_merges(made: Made) -> None:
    """All begin with the same prompt: none may find another's blocks, and each finds its own the second time."""
    engine = made.build()
    for again in (0, 1):
        requests = [ask(100 * again + i, name, PROMPT) for i, name in enumerate(made.models)]
        for request, outputs in zip(requests, serve(engine, requests).values(), strict=True):
            made.check(request.adapter, PROMPT, outputs)
            assert outputs[0].num_cached_tokens == (len(PROMPT) - 1 if again else 0)


def test_rows_of_no_adapter_have_the_bits_of_a_model_without_any(made: Made) -> None:
    plain = serve(made.build([], enable_lora=False), [ask(0, "", PROMPT)])[0]
    beside = serve(made.build(), [ask(0, "", PROMPT), ask(1, "a0", PROMPT), ask(2, "a3", PROMPT)])[0]
    assert [output.logprobs for output in plain] == [output.logprobs for output in beside]


def test_an_adapter_has_the_same_bits_alone(made: Made) -> None:
    engine = made.build()
    alone = serve(engine, [Request(0, PROMPT, PARAMS, NEW_TOKENS, adapter="a0", cache_salt="x")])[0]
    beside = serve(engine, [ask(1, "a0", PROMPT), ask(2, "", PROMPT[:9]), ask(3, "a1", PROMPT)])[1]
    assert [output.logprobs for output in alone] == [output.logprobs for output in beside]


def test_adapters_come_and_go_while_the_engine_runs(made: Made) -> None:
    engine = made.build(["a0"])
    with pytest.raises(ModelNotFound):
        engine.add(ask(0, "a1", PROMPT))
    engine.adapters.load("a1", made.paths["a1"])
    requests = [ask(1, "a0", PROMPT), ask(2, "a1", PROMPT)]
    for request, outputs in zip(requests, serve(engine, requests).values(), strict=True):
        made.check(request.adapter, PROMPT, outputs)
    engine.adapters.unload("a0")
    with pytest.raises(ModelNotFound):
        engine.add(ask(3, "a0", PROMPT))
    made.check("a1", PROMPT, serve(engine, [ask(4, "a1", PROMPT)])[4])


def test_one_adapter_may_be_merged(made: Made) -> None:
    engine = made.build(["a4"], enable_lora=False, merge_lora=True)
    made.check("a4", PROMPT, serve(engine, [ask(0, "", PROMPT)])[0])


@needs_float_kernels
def test_a_merge_into_packed_weights_is_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the engine as by ``octavo models``; weights of an explicit dtype are dense, and merged."""
    base, quantised = tmp_path / "base", tmp_path / "quantised"
    make_checkpoint(base, "llama/gqa", hidden_size=64, intermediate_size=96)
    make_adapter(base, tmp_path / "a", 0, target_modules=["q_proj"])
    quantise(base, quantised, gptq(4, 16))
    flags = [str(quantised), "--device", "cpu", "--merge-lora", "--lora-modules", f"a={tmp_path / 'a'}"]
    settings = {"model": str(quantised), "device": "cpu", "merge_lora": True, "lora_modules": f"a={tmp_path / 'a'}"}
    settings |= {"num_kv_blocks": 40}
    assert main(["models", *flags, "--num-kv-blocks", "40", "--dtype", "float32"]) == 0
    build_engine(EngineConfig.from_flat({**settings, "dtype": "float32"}))
    capsys.readouterr()
    assert main(["models", *flags]) == 2
    assert "cannot be merged into quantised weights" in capsys.readouterr().err
    monkeypatch.setattr(model_adapters, "load_model", lambda *_, **__: pytest.fail("the model's weights were loaded"))
    with pytest.raises(CheckpointError, match="a: cannot be merged into quantised weights; use enable_lora"):
        build_engine(EngineConfig.from_flat(settings))


@one_in(3)
@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ("gpt2/small", ["c_attn", "c_proj", "c_fc"]),
        ("phi3/fused", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("gemma2/capped", LLAMA_MAPS),
        ("glm4/biases", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("mixtral/window", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
@pytest.mark.parametrize("merges", [False, True])
def test_other_families(row: str, targets: list[str], merges: bool, tmp_path: Path) -> None:
    made = Made(tmp_path, row, [{"target_modules": targets, "fan_in_fan_out": row.startswith("gpt2")}])
    engine = made.build(enable_lora=not merges, merge_lora=merges)
    made.check("a0", PROMPT, serve(engine, [ask(0, "" if merges else "a0", PROMPT)])[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"alpha_pattern": {"^q_proj$": 3}}, "alpha_pattern"),
        ({"alpha_pattern": [3]}, "alpha_pattern"),
    ],
)
def test_adapters_of_other_arithmetic_are_refused_by_name(
    made: Made, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    source = Path(made.paths["a0"])
    config = json.loads((source / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=named):
        made.build([]).adapters.load("bad", str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "rows", "named"),
    [
        ("layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_proj.lora_A", slice(0, 3), "q_proj"),
        ("layers.0.self_attn.q_proj.lora_A", "layers.9.self_attn.q_proj.lora_A", slice(None), "q_proj"),
        ("layers.0.self_attn.q_proj.lora_A", "layers.0.self_attn.q_proj.lora_C", slice(None), "lora_C"),
        ("layers.0.mlp.up_proj.lora_B", "layers.0.mlp.up_proj.lora_B", slice(0, 3), "up_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(
    made: Made, tmp_path: Path, old: str, new: str, rows: slice, named: str
) -> None:
    source = Path(made.paths["a0"])
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    name = next(name for name in tensors if old in name)
    tensors[name.replace(old, new)] = tensors.pop(name)[rows].contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    engine = made.build([])
    with pytest.raises(CheckpointError, match=named):
        engine.adapters.load("bad", str(tmp_path))
    assert "bad" not in engine.adapters
    engine.adapters.load("bad", made.paths["a0"])
    made.check("a0", PROMPT, serve(engine, [Request(0, PROMPT, PARAMS, NEW_TOKENS, adapter="bad")])[0])


def test_an_update_of_rank_0_is_named(made: Made, tmp_path: Path) -> None:
    source = Path(made.paths["a0"])
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    name = "base_model.model.model.layers.0.mlp.up_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.zeros(0, 4), f"{name}.lora_B.weight": torch.zeros(4, 0)},
        tmp_path / WEIGHTS_NAME,
    )
    with pytest.raises(CheckpointError, match="up_proj must have"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"enable_lora": False}, "lora_modules"),
        ({"enable_lora": False, "merge_lora": True}, "one adapter"),
        ({"merge_lora": True}, "merge_lora"),
        ({"lora_modules": "a0"}, "NAME=PATH"),
        ({"lora_modules": "a0=/x,a0=/y"}, "a unique name"),
    ],
)
def test_settings_that_cannot_work_are_refused(made: Made, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made.build(**settings)


def test_no_more_adapters_than_allowed(made: Made) -> None:
    with pytest.raises(CheckpointError, match="max_loras"):
        made.build(["a0", "a1"], max_loras=1)
