"""List families, check a model from its headers, and compare its layers with those of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.cli import main
from octavo.errors import CheckpointError
from octavo.models.encoders import BIDIRECTIONAL, CLASSES, ENCODERS, FAMILIES
from octavo.models.features import LAYER, features
from octavo.models.meta_model import outline
from octavo.models.multimodal_text import TEXT_PARTS
from octavo.models.registry import ARCHITECTURES, LoadedModel, read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime import memory_budget
from octavo.weights.checkpoint import open_checkpoint
from tests.models.adapter_files import make_adapter
from tests.models.encoder_families import make_encoder
from tests.models.families import FIRST_ROWS, ROWS, make_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.test_text_part import make as make_wrapper
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import one_in

FITTING = ["--device", "cpu", "--num-kv-blocks", "40"]


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    alone = [name for name in ENCODERS if not name.startswith(tuple(FAMILIES))]
    encoders = {*alone, *(f"{family}{CLASSES[0]}" for family in FAMILIES), *BIDIRECTIONAL}  # a line for each family
    assert {line.split()[0] for line in lines[1:]} == {*ARCHITECTURES, *TEXT_PARTS, *encoders}
    assert any(
        line.split()[:7] == ["MixtralForCausalLM", "llama", "not", "experts,", "gate", "all", "Mixtral"]
        for line in lines
    )
    assert all(len(line.split()) > 5 for line in lines[1:])


def test_a_tower_that_cannot_be_built_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a start does it."""
    make_wrapper(tmp_path)
    config = tmp_path / "config.json"
    assert main(["models", str(tmp_path), *FITTING]) == 0
    config.write_text(json.dumps({**json.loads(config.read_text()), "mm_tokens_per_image": 3}))
    capsys.readouterr()
    assert main(["models", str(tmp_path), *FITTING]) != 0
    assert "mm_tokens_per_image is 3" in "".join(capsys.readouterr())
    assert main(["models", str(tmp_path), "--language-model-only", *FITTING]) == 0


def test_families_say_which_layers_have_windows() -> None:
    names = ("MistralForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM")
    assert [features(name).windows for name in names] == ["all", "some", "some", "-"]


@one_in(4)
@pytest.mark.parametrize("row", FIRST_ROWS)
def test_listed_features_match_those_of_checkpoints(row: str, tmp_path: Path) -> None:
    """Linear maps listed as not adaptable are not adaptable; every other map of a layer is."""
    make_checkpoint(tmp_path, row)
    checkpoint = open_checkpoint(tmp_path)
    config = read_config(checkpoint.config)
    found = features(config.architecture)
    kind = ROWS[row][0]
    has_windows = any(values.get("sliding_window") for name, values in ROWS.values() if name == kind)
    assert found.windows != "-" or not has_windows
    loaded = outline(config, checkpoint, WeightFormat(torch.float32, torch.device("cpu")))
    assert isinstance(loaded, LoadedModel)
    own_name = getattr(ARCHITECTURES[config.architecture], "own_name", str)
    stored = [name for name in checkpoint.names() if len(checkpoint.describe(name)[1]) > 1 and LAYER.search(name)]
    for name in map(own_name, stored):
        if name.endswith(("norm.weight", "_bias", ".A_log", "_decay", "slope_rate", "tid2eid")):  # a row for each head,
            continue  # expert or token
        is_excluded = any(f".{part}." in f"{name}." for part in found.not_adaptable)
        assert (name.removesuffix(".weight") in loaded.maps) != is_excluded, name


@pytest.mark.parametrize("row", ["Bert/Model", "xlm_roberta/judge"])
def test_an_encoder_is_described_without_its_weights(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_encoder(tmp_path, row)
    assert main(["models", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"{type(model).__name__}: supported" in out
    assert "fits, with texts of 120 tokens" in out
    with LLM(tmp_path, device="cpu") as llm:
        assert f"{llm.info.num_parameters:,} parameters, stored as F32" in out
    assert main(["models", str(tmp_path), "--device", "cpu", "--max-model-len", "121"]) == 2
    assert "max_model_len" in capsys.readouterr().err
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), "--device", "cpu"]) == 2
    assert "extra.weight: expected none, found F32 of shape [2, 3]" in capsys.readouterr().err


def test_an_adapter_is_checked_against_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, other, adapter = tmp_path / "base", tmp_path / "other", tmp_path / "adapter"
    make_checkpoint(base, "llama/gqa")
    make_checkpoint(other, "llama/gqa", intermediate_size=40)
    make_adapter(base, adapter, 1)
    assert main(["models", str(adapter), *FITTING]) == 0
    out = capsys.readouterr().out
    assert "LoRA adapter of rank 4: supported" in out
    assert "for 14 maps: down_proj, gate_proj, k_proj" in out
    assert "adapter adapter fits: it changes 14 of 15 maps" in out
    assert "fits on cpu" in out
    broken = (base / "config.json").rename(base / "config.json.off")
    assert main(["models", str(adapter), *FITTING]) == 2
    assert capsys.readouterr().out == ""
    broken.rename(base / "config.json")
    assert main(["models", str(other), *FITTING, "--lora-modules", f"a={adapter}"]) == 2
    assert "mlp.down_proj has an update of shape [32, 48]; expected [32, 40]" in capsys.readouterr().err
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "who/knows"}))
    assert main(["models", str(adapter), *FITTING]) == 0
    assert "its model, who/knows, is not here" in capsys.readouterr().out
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert main(["models", str(adapter), *FITTING]) == 2
    assert "use_dora" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "layers"), [("mistral/window", "every layer has"), ("gpt_oss/sinks", "2 of 3 layers have")]
)
def test_windows_are_shown(row: str, layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path, row)
    assert main(["models", str(tmp_path), "--device", "cpu", "--num-kv-blocks", "40", "--block-size", "16"]) == 0
    assert f"{layers} a window: keys and values of {model.config.sliding_window} positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "head", "table", "flags"),
    [
        ("llama/one_kv_head_tied", "lm_head", "model.embed_tokens", FITTING),
        ("gpt_neox/parallel", "embed_out", "gpt_neox.embed_in", FITTING),
        (
            "Bert/ForMaskedLM",
            "cls.predictions.decoder",
            "bert.embeddings.word_embeddings",
            ["--device", "cpu", "--pooling-type", "splade"],
        ),
    ],
)
def test_a_stored_copy_of_a_tied_head_is_compared(
    row: str, head: str, table: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at a start, whatever it is called."""
    if row in ROWS:
        make_checkpoint(tmp_path, row, tie_word_embeddings=True)
    else:
        make_encoder(tmp_path, row)
    tensors = load_file(tmp_path / "model.safetensors")
    assert f"{head}.weight" not in tensors
    tensors[f"{head}.weight"] = tensors[f"{table}.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), *flags]) == 0
    tensors[f"{head}.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), *flags]) == 2
    refused = capsys.readouterr().err
    assert f"{head}.weight differs from the embedding" in refused
    with pytest.raises(CheckpointError, match="differs from the embedding") as error:
        LLM(tmp_path, device="cpu", **({"pooling_type": "splade"} if row not in ROWS else {}))
    assert str(error.value) in refused


@pytest.mark.parametrize(("num_parts", "num_tokens"), [(1, 16384), (2, 32768)])
def test_ranks_that_divide_contexts_cache_more_tokens(
    num_parts: int, num_tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "llama/one_kv_head_tied")
    ranks = ["--tensor-parallel-size", "2", "--decode-context-parallel-size", str(num_parts)]
    sizes = ["--device", "cpu", "--num-kv-blocks", "1024", "--block-size", "16"]
    assert main(["models", str(tmp_path), *sizes, *ranks]) == 0
    out = capsys.readouterr().out
    assert f"divided among 2 ranks with a KV cache for {num_tokens} tokens" in out
    assert "kv cache             2.0 MiB" in out


@needs_float_kernels
def test_weights_of_which_each_rank_has_all_count_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one KV head of each layer, whatever the ranks divide, and queries and outputs, if attention is whole."""
    model = make_checkpoint(tmp_path, "llama/one_kv_head_tied", intermediate_size=64)
    path = write_gguf(tmp_path, model, lambda name, values: gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else None)
    shares, plan = [], memory_budget.plan_memory

    def noted(*args: Any, **named: Any) -> Any:
        shares.append(sum(named["weights"].values()) / path.stat().st_size)
        return plan(*args, **named)

    monkeypatch.setattr(memory_budget, "plan_memory", noted)
    for flags in ([], ["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "2", "--enable-dp-attention"]):
        assert main(["models", str(path), *FITTING, *flags]) == 0
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}

    def share(*parts: str) -> float:
        return sum(size for name, size in sizes.items() if name.split(".")[-2] in parts) / sum(sizes.values())

    one_head, divided = share("k_proj", "v_proj"), share("q_proj", "o_proj")
    assert shares == pytest.approx([1, (1 + one_head) / 2, (1 + one_head + divided) / 2], abs=0.02)


def test_memory_is_that_of_both_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A context that fits only because two of three layers have sliding windows."""
    make_checkpoint(tmp_path, "gpt_oss/sinks")
    sizes = ["--device", "cpu", "--num-kv-blocks", "15", "--block-size", "16", "--max-num-batched-tokens", "32"]
    assert main(["models", str(tmp_path), *sizes, "--max-model-len", "400", "--max-num-seqs", "1"]) == 0
    assert "fits on cpu, with contexts of 400 tokens" in capsys.readouterr().out
    assert main(["models", str(tmp_path), *sizes, "--max-model-len", "400", "--kv-offload-memory", "0.1"]) == 1


@pytest.mark.parametrize("row", ["llama/one_kv_head_tied", "gpt2/small", "deepseek_v3/groups", "gpt_oss/sinks"])
def test_a_sound_checkpoint_is_described_without_its_weights(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path, row)
    count = sum(weight.numel() for weight in model.parameters())
    count += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert main(["models", str(tmp_path), *FITTING]) == 0
    out = capsys.readouterr().out
    assert f"{count:,} parameters, stored as F32" in out
    assert f"{type(model).__name__}: supported" in out
    assert "fits on cpu" in out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "draft_model", "model": "/nowhere"}, "speculative_config: model: '/nowhere' does not exist"),
        ({"method": "mtp"}, "no MTP layers"),
        ({"method": "draft_model", "model": "itself"}, "the drafter is found"),
    ],
)
def test_a_drafter_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, str], words: str
) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    if config.get("model") == "itself":
        config = {**config, "model": str(tmp_path)}
    code = main(["models", str(tmp_path), "--device", "cpu", "--speculative-config", json.dumps(config)])
    shown = capsys.readouterr()
    assert words in shown.out + shown.err
    assert (code == 0) == ("found" in words)


def test_a_model_that_does_not_fit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    assert main(["models", str(tmp_path), "--device", "cpu", "--num-kv-blocks", "100000000000"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit on cpu: the KV cache needs" in shown
    assert "MiB in float32" in shown
    assert "MiB without the weights" in shown


def test_overrides_of_the_configuration_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama/gqa", max_position_embeddings=64)
    assert main(["models", str(tmp_path), *FITTING, "--hf-overrides", '{"max_position_embeddings": 128}']) == 0
    assert "with contexts of 128 tokens" in capsys.readouterr().out


def test_a_folder_without_weights_is_checked_by_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    (tmp_path / "model.safetensors").unlink()
    assert main(["models", str(tmp_path), *FITTING]) == 0
    shown = capsys.readouterr().out
    assert "storage types not read" in shown
    assert "fits on cpu" in shown


def test_a_missing_tensor_and_an_unknown_architecture_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), *FITTING]) == 2
    assert "tensor model.norm.weight is missing; expected one of shape [32]" in capsys.readouterr().err
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["UnknownForCausalLM"]}))
    assert main(["models", str(tmp_path), *FITTING]) == 2
    assert "architecture UnknownForCausalLM is not supported" in capsys.readouterr().err


def test_of_a_model_on_the_hub_only_small_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe/normalised")
    (tmp_path / "model.safetensors").unlink()
    patterns: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **o: patterns.extend(o["allow_patterns"]) or str(tmp_path)
    )
    assert main(["models", "owner/name", *FITTING]) == 0
    assert patterns == ["*.json"]
    count = sum(weight.numel() for weight in model.parameters())
    assert f"{count:,} parameters, storage types not read" in capsys.readouterr().out


@pytest.mark.parametrize("row", ["llama/gqa", "gemma3/two_ropes", "gpt2/small", "deepseek_v2/groups"])
def test_diff_says_that_two_implementations_agree(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path, row)
    assert main(["debug", "diff", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [
        f"layer {i}" for i in range(model.config.num_hidden_layers)
    ]
    assert lines[-1].startswith("logits")


def test_diff_shows_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama/gqa", num_hidden_layers=4)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    monkey = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.self_attn.v_proj.weight"
    save_file({**monkey, name: torch.flip(monkey[name], [0])}, tmp_path / "model.safetensors")
    assert config["num_hidden_layers"] == 4
    from octavo_fleet.cli import debug

    ours = debug._ours(tmp_path, [1, 2, 3])
    save_file(monkey, tmp_path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug, "_ours", lambda path, tokens: ours)
        assert main(["debug", "diff", str(tmp_path), "--tokens", "1,2,3"]) == 1
    parting = [line for line in capsys.readouterr().out.splitlines() if "differs here" in line]
    assert len(parting) == 1
    assert parting[0].startswith("layer 2")


def test_diff_refuses_invalid_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    assert main(["debug", "diff", str(tmp_path), "--tokens", "1,x"]) == 2
    assert "'1,x' is not a list of ids" in capsys.readouterr().err
    assert main(["debug", "diff", str(tmp_path), "--tokens", "1,97"]) == 2
    assert "ids must be below 97" in capsys.readouterr().err


@pytest.mark.parametrize("error_class", [ImportError, ValueError])
def test_diff_says_which_package_is_missing(
    error_class: type[Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers raises the second without accelerate."""
    make_checkpoint(tmp_path, "llama/gqa")
    capsys.readouterr()

    def cannot(*args: object, **options: object) -> None:
        raise error_class("\nloading a GGUF file requires gguf\n`pip install gguf`\n")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", cannot)
        assert main(["debug", "diff", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "loading a GGUF file requires gguf `pip install gguf`; `pip install transformers accelerate gguf`" in error
    assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["debug", "diff", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "transformers is not installed; `pip install transformers accelerate gguf` installs what it needs" in error
    assert error.count("\n") == 1
