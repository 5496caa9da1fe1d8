"""The backend transformers: architectures that Octavo has no model of, against ``generate`` of the library itself."""

from __future__ import annotations

import io
import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MoshiForCausalLM,
    PhimoeForCausalLM,
    UnlimitedOcrForConditionalGeneration,
)

from octavo.build.build_engine import build_engine
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.llm import LLM
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime import memory_budget
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_bench.architectures import tiny_config, tiny_model
from octavo_fleet.transformers import build
from octavo_fleet.transformers import model as loading
from octavo_fleet.transformers.model import load_transformers, pretrained
from octavo_fleet.transformers.own_cache import OwnCacheTransformer
from octavo_fleet.transformers.paged import PagedTransformer
from tests.backends.checkpoints import FAMILIES, OWN, PAGED, save_checkpoint
from tests.gguf_reference import read_once
from tests.models.families import make_checkpoint
from tests.models.gguf_files import write_gguf
from tests.quant.writers import Writer, compressed, fp8, modelopt_fp8, modelopt_nvfp4, quantise
from tests.tiers import nightly_after, one_in

MAX_TOKENS = 24
SETTINGS: dict[str, Any] = {"backend": "transformers", "device": "cpu", "max_num_batched_tokens": 32, "block_size": 4}


def prompts() -> list[list[int]]:
    """Short and long ones; some begin alike, and some are longer than a step."""
    draw = random.Random(0)
    first = [draw.randrange(250) for _ in range(60)]
    others = [[draw.randrange(250) for _ in range(length)] for length in (3, 17, 41)]
    return [first, first[:30], [*first[:30], 7, 8, 9], [5], *others]


def expected(model: Any, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def run(engine: Any, asked: list[list[int]], first_id: int = 0) -> list[list[int]]:
    tokens: dict[int, list[int]] = {}
    for number, prompt in enumerate(asked, first_id):
        tokens[number] = []
        engine.add(Request(number, prompt, SamplingParams(temperature=0.0), max_tokens=MAX_TOKENS))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
        engine.check()
    return list(tokens.values())


@one_in(5)
@pytest.mark.parametrize("family", [*PAGED, *OWN])
def test_tokens_equal_generate_alone_and_batched(tmp_path: Path, family: str) -> None:
    model = save_checkpoint(family, tmp_path)
    asked = prompts()
    right = [expected(model, prompt) for prompt in asked]
    # Blocks for about three of the seven sequences: some are preempted.
    engine, info = build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path, "num_kv_blocks": 64}))
    kind = PagedTransformer if family in PAGED else OwnCacheTransformer
    assert isinstance(engine.runner.executor._model, kind)  # type: ignore[attr-defined]
    assert info.architecture == type(model).__name__
    assert info.num_parameters == model.num_parameters()
    assert run(engine, asked) == right, "batched"
    assert [run(engine, [prompt], 100 + i)[0] for i, prompt in enumerate(asked)] == right, "alone"
    if family != "starcoder2":  # whose window lets blocks go
        assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.stats().prefix_hits > 0) == (family in PAGED)


def test_passes_of_two_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As on a GPU, where a thread compiles kernels with passes of its own."""
    model, asked = save_checkpoint("smollm3", tmp_path), prompts()[:2]
    right = [expected(model, prompt) for prompt in asked]
    engine, _ = build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path}))
    paged = engine.runner.executor._model  # type: ignore[attr-defined]
    assert isinstance(paged, PagedTransformer)
    passes = 0

    def another_pass(*_: object) -> None:
        nonlocal passes
        if threading.current_thread() is threading.main_thread() and passes < 3:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(paged._decode, torch.zeros(2, dtype=torch.int64), torch.arange(2)).result()
            passes += 1

    paged._decoder.layers[0].register_forward_hook(another_pass)
    assert run(engine, asked) == right
    assert passes == 3


@one_in(2)
@pytest.mark.parametrize("kind", nightly_after(3, ["opt", "qwen2_vl", "roberta", "falcon_h1", "llava", "granite_swa"]))
def test_heads_and_parts_for_text(tmp_path: Path, kind: str) -> None:
    """Heads that call a part of their decoder or read its attributes, models that also see images, and one whose first
    position is behind the padding token's id."""
    config = tiny_config(kind)
    mapping = (
        AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    )
    model = tiny_model(config, mapping._model_mapping[type(config)])
    model.save_pretrained(tmp_path)
    engine, _ = build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path, "num_kv_blocks": 200}))
    asked = prompts()[:4]
    found = run(engine, asked)
    for prompt, tokens in zip(asked, found, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_contexts_end_where_longrope_chooses_other_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 6, "long_factor": [9.0] * 6}
    rope |= {"original_max_position_embeddings": 64, "short_mscale": 1.1, "long_mscale": 1.3, "factor": 8.0}
    config = tiny_config("phimoe", rope_parameters=rope, sliding_window=None)
    tiny_model(config, PhimoeForCausalLM).save_pretrained(tmp_path)
    loaded = load_transformers(tmp_path, WeightFormat(torch.float32, torch.device("cpu")), None)
    assert loaded.max_position_embeddings == 64


def test_a_cache_with_another_window_than_the_model_is_not_used(tmp_path: Path) -> None:
    """Moshi's decoder has no window, and the library's cache for it one."""
    config = tiny_config("moshi")
    tiny_model(config, MoshiForCausalLM).save_pretrained(tmp_path)
    loaded = load_transformers(tmp_path, WeightFormat(torch.float32, torch.device("cpu")), None).loaded
    assert loaded is not None
    assert isinstance(loaded.model, OwnCacheTransformer)
    assert not loaded.model.keeps_cache


def test_attention_that_depends_on_where_a_prompt_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlimited-OCR's is refused by name; a trial shows that its cache answers otherwise after several calls."""
    model = tiny_model(tiny_config("unlimited_ocr"), UnlimitedOcrForConditionalGeneration)
    model.save_pretrained(tmp_path)
    form = WeightFormat(torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"UnlimitedOcr.* layer_types has 'reference_sliding_attention'"):
        load_transformers(tmp_path, form, None)
    monkeypatch.setattr(loading, "OF_PROMPTS", "")
    loaded = load_transformers(tmp_path, form, None).loaded
    assert loaded is not None
    assert isinstance(loaded.model, OwnCacheTransformer)
    assert not loaded.model.keeps_cache


def test_caches_that_were_given_up_are_computed_again(tmp_path: Path) -> None:
    model = save_checkpoint("mamba", tmp_path)
    engine, _ = build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path, "num_kv_blocks": 200}))
    own = engine.runner.executor._model  # type: ignore[attr-defined]
    own.max_tokens = 70
    asked = prompts()[:3]
    assert run(engine, asked) == [expected(model, prompt) for prompt in asked]
    assert sum(known.num_cached for known in own._sequences.values()) <= 70


def test_settings_that_a_model_with_its_own_cache_cannot_honour(tmp_path: Path) -> None:
    save_checkpoint("mamba", tmp_path)
    with pytest.raises(ConfigError, match="eviction_policy"):
        build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path, "eviction_policy": "lfu"}))


def test_what_transformers_cannot_load(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["X"]}')
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path}))


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_the_share_of_a_gpus_memory_limits_a_cache_of_its_own(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 GiB, 4 are free."""
    monkeypatch.setattr(memory_budget, "release_unused", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 10 << 30))
    config = EngineConfig.from_flat({**SETTINGS, "model": "m", "gpu_memory_utilization": share})
    model: Any = SimpleNamespace(max_position_embeddings=1 << 14, num_layers=2, hidden_size=64)
    num_blocks = build._num_blocks(config, model, 16, torch.device("cuda"))
    assert num_blocks == ((4 << 30) - int((10 << 30) * (1 - share))) // (2 * 2 * 64 * 4 * 16)


CODE = """
from pathlib import Path
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
Path(__file__ + ".ran").touch()
Path({ran!r}).touch()
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
"""
CALLS: dict[str, Callable[[str], object]] = {
    "models": lambda path: main(["models", path, "--backend", "transformers", "--device", "cpu"]),
    "serve": lambda path: main(["generate", path, "--prompt", "a", "--backend", "transformers", "--device", "cpu"]),
    "engine": lambda path: build_engine(EngineConfig.from_flat({**SETTINGS, "model": path})),
    "library": lambda path: LLM(path, backend="transformers", device="cpu"),
    "debug": lambda path: main(["debug", "diff", path]),
    "comparison": lambda path: pretrained(Path(path)),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_code_of_a_checkpoint_runs_whatever_is_answered(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint("llama", tmp_path / "evil")
    config = json.loads((tmp_path / "evil/config.json").read_text())
    mapped = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    evil = {**config, "model_type": "evil", "auto_map": mapped}  # of an architecture that Octavo has
    (tmp_path / "evil/config.json").write_text(json.dumps(evil))
    (tmp_path / "evil/generation_config.json").write_text(json.dumps({"custom_generate": "evil.generate"}))
    (tmp_path / "evil/evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail(f"asked: {prompt}"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    try:
        status = CALLS[call](str(tmp_path / "evil"))
    except (CheckpointError, ConfigError) as error:
        status, said = 2, str(error)
    else:
        said = capsys.readouterr().err
    assert status == 2
    assert not (tmp_path / "ran").exists()
    assert "auto_map in config.json names code of the checkpoint, which is never run" in said


def test_code_that_the_library_has_itself_is_used_in_place_of_the_checkpoints(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    mapped = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": mapped}))
    (tmp_path / "evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    assert type(pretrained(tmp_path)).__module__.startswith("transformers.models.llama")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["evil/kernel", {"": "evil/kernel@main:attend"}])
def test_kernels_of_the_hub_are_not_fetched(tmp_path: Path, value: object) -> None:
    save_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changed in ({**config, "attn_implementation": value}, {**config, "a": {"experts_implementation": value}}):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="code of the hub is not run"):
            pretrained(tmp_path)


def test_an_adapter_in_the_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    """The library would apply it, and read the model that it names if there is none."""
    save_checkpoint("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(CheckpointError, match="must not hold an adapter"):
        pretrained(tmp_path)


INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
Q = "model.layers.0.self_attn.q_proj"


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q}.weight"), rf"all of its tensors; 1 missing: {Q}\.weight$"),
        (lambda tensors: tensors.update({f"{Q}.bias": torch.ones(32)}), rf"tensors; 1 unexpected: {Q}\.bias$"),
        (
            lambda tensors: tensors.update({f"{Q}.weight": torch.ones(16, 32)}),
            rf"tensors; 1 of another shape: {Q}\.weight \(found \[16, 32\], expected \[32, 32\]\)$",
        ),
    ],
    ids=["missing", "unexpected", "of another shape"],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    save_checkpoint("cohere", tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path}))


def test_buffers_of_other_versions_are_left_out(tmp_path: Path) -> None:
    save_checkpoint("cohere", tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{Q[:-6]}rotary_emb.inv_freq": torch.ones(4)}))
    build_engine(EngineConfig.from_flat({**SETTINGS, "model": tmp_path}))


@pytest.mark.parametrize(
    ("writer", "named"),
    [(modelopt_fp8(), "weight_scale"), (modelopt_nvfp4(), "weight_scale_2"), (fp8(), "weight_scale")],
    ids=["modelopt fp8", "modelopt nvfp4", "fp8"],
)
def test_formats_that_transformers_would_drop_scales_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: Writer, named: str
) -> None:
    save_checkpoint("cohere", tmp_path / "source")
    quantise(tmp_path / "source", tmp_path / "quantised", writer)
    assert main(["models", str(tmp_path / "quantised"), "--backend", "transformers", "--device", "cpu"]) == 2
    assert re.search(rf"unexpected: model\.layers\.\S*, .*\.{named},", capsys.readouterr().err)


@pytest.mark.parametrize("is_marked", [True, False])
def test_checkpoints_of_compressed_tensors(tmp_path: Path, is_marked: bool) -> None:
    """The library makes their weights dense in the first forward pass, and reads none without a status."""
    save_checkpoint("cohere", tmp_path / "source")
    folder = tmp_path / "quantised"
    config = {**INT4.config, **({"quantization_status": "compressed"} if is_marked else {})}
    quantise(tmp_path / "source", folder, Writer(config, INT4.write))
    settings = EngineConfig.from_flat({**SETTINGS, "model": folder, "num_kv_blocks": 64})
    if not is_marked:
        with pytest.raises(CheckpointError, match=r"28 missing: .*; 28 unexpected: .*weight_packed"):
            build_engine(settings)
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = [expected(model, prompt) for prompt in prompts()]
    assert run(build_engine(settings)[0], prompts()) == right


def test_a_gguf_file_is_read(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama/gqa")
    path = write_gguf(tmp_path, model, tokens=[f"t{number}" for number in range(model.config.vocab_size)])
    settings = {"model": path, "device": "cpu", "max_model_len": 128, "num_kv_blocks": 100}
    with read_once():
        engine, info = build_engine(EngineConfig.from_flat({**settings, "backend": "transformers"}))
    own, _ = build_engine(EngineConfig.from_flat(settings))
    assert info.architecture == "LlamaForCausalLM"
    asked = [[5, 6, 7], [number % 90 for number in range(40)]]
    assert run(engine, asked) == run(own, asked)


@pytest.mark.nightly
@pytest.mark.model
def test_the_file_of_the_default_model_is_read(default_model_path: Path) -> None:
    """Weights are rounded otherwise than by Octavo's kernels, so only the first tokens are compared."""
    asked = [[504, 3575, 282, 4649, 314]]  # "The capital of France is"
    settings = {"model": default_model_path, "device": "cpu", "max_model_len": 128, "kv_cache_memory": 0.1}
    with read_once():
        engine, info = build_engine(EngineConfig.from_flat({**settings, "backend": "transformers"}))
    own, _ = build_engine(EngineConfig.from_flat(settings))
    assert info.architecture == "LlamaForCausalLM"
    assert run(engine, asked)[0][:4] == run(own, asked)[0][:4]


@pytest.mark.parametrize(
    ("family", "cache"), [("diffllama", "the paged KV cache"), ("openai-gpt", "a cache of its own")]
)
def test_the_command_says_how_a_model_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, cache: str
) -> None:
    save_checkpoint(family, tmp_path)
    assert main(["models", str(tmp_path), "--backend", "transformers", "--device", "cpu"]) == 0
    assert cache in capsys.readouterr().out
    assert main(["models", str(tmp_path), "--device", "cpu"]) == 2
    assert "others, more slowly, with backend transformers" in capsys.readouterr().err


def test_every_family_is_tried() -> None:
    assert {"llama", *PAGED, *OWN} == set(FAMILIES)
