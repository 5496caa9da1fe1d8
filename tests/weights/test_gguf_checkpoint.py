from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from octavo.weights.gguf.gguf_checkpoint import GGUFCheckpoint
from octavo.weights.gguf.gguf_reader import GGUFFile
from tests.weights.gguf_bytes import llama_file

Opener = Callable[..., GGUFCheckpoint]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    def open_file(*args: object) -> GGUFCheckpoint:
        path = tmp_path / "model.gguf"
        path.write_bytes(llama_file(*args))
        return GGUFCheckpoint(path)

    return open_file


def dense(weight: torch.Tensor | BlockTensor) -> torch.Tensor:
    return torch.from_numpy(dequantize(weight)) if isinstance(weight, BlockTensor) else weight


def test_configuration_has_hugging_face_keys(opened: Opener) -> None:
    checkpoint = opened()
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 40,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.config == expected
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert not checkpoint.is_dummy
    assert checkpoint.has_blocks


def test_all_ways_a_text_ends(opened: Opener) -> None:
    assert opened({"tokenizer.ggml.eot_token_id": 7}).generation_config["eos_token_id"] == [2, 7]
    assert opened({"tokenizer.ggml.eot_token_id": 40}).generation_config["eos_token_id"] == 2
    assert opened({"tokenizer.ggml.bos_token_id": 2**32 - 1}).generation_config == {"eos_token_id": 2}
    assert opened({"tokenizer.ggml.eot_token_id": 2}).generation_config["eos_token_id"] == 2
    assert opened({"tokenizer.ggml.eos_token_id": None}).generation_config == {"bos_token_id": 1}


def test_recommended_sampling_goes_by_the_names_of_hugging_face(opened: Opener) -> None:
    keys = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5, "mirostat": 0}
    checkpoint = opened({f"general.sampling.{key}": value for key, value in keys.items()})
    found = {key: value for key, value in checkpoint.generation_config.items() if not key.endswith("_id")}
    assert found == {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    assert not set(found) & set(checkpoint.config)


def test_names_are_mapped_and_a_tied_head_has_none(opened: Opener) -> None:
    names = opened().names()
    assert len(names) == 20
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names
    assert {"model.layers.1.self_attn.o_proj.weight", "model.layers.0.post_attention_layernorm.weight"} < names
    assert "lm_head.weight" not in names
    untied = opened({}, {"output.weight": ("Q8_0", (40, 64))})
    assert "lm_head.weight" in untied.names()
    assert untied.config["tie_word_embeddings"] is False
    assert opened({}, {"blk.0.attn_q.bias": ("F32", (64,))}).config["attention_bias"] is True


@pytest.mark.parametrize(
    ("name", "stored", "shape", "heads"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", (64, 64), 4),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight", (32, 64), 2),
        ("model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight", (32, 64), 0),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias", (64,), 4),
    ],
)
def test_rows_of_queries_and_keys_are_reordered(
    opened: Opener, name: str, stored: str, shape: tuple[int, ...], heads: int
) -> None:
    checkpoint = opened({}, {"blk.0.attn_q.bias": ("F32", (64,))})
    file = GGUFFile.open(checkpoint.path)
    tensor = file.tensors[stored]
    raw = dequantize(
        BlockTensor(
            tensor.kind, (shape[0], shape[-1] if len(shape) > 1 else 1), file.data(stored).reshape(shape[0], -1)
        )
    )
    found = dense(checkpoint.load(name, shape)).float().numpy().reshape(shape[0], -1)
    width = 16
    for head in range(heads):
        for half in range(width // 2):
            start = head * width
            np.testing.assert_array_equal(found[start + half], raw[start + 2 * half])
            np.testing.assert_array_equal(found[start + width // 2 + half], raw[start + 2 * half + 1])
    if not heads:
        np.testing.assert_array_equal(found, raw)


def test_kinds_of_weights(opened: Opener) -> None:
    checkpoint = opened()
    assert checkpoint.load("model.norm.weight", (64,)).dtype == torch.float32
    assert checkpoint.load("model.layers.0.self_attn.k_proj.weight", (32, 64)).dtype == torch.float16
    assert checkpoint.load("model.layers.0.mlp.gate_proj.weight", (96, 64)).dtype == torch.bfloat16
    blocks = checkpoint.load("model.layers.0.mlp.down_proj.weight", (64, 96))
    assert (blocks.kind, blocks.shape) == ("Q4_0", (64, 96))


def test_rotary_scaling(opened: Opener) -> None:
    scaling = opened({}, {"rope_freqs.weight": ("F32", (8,))})
    found = scaling.config["rope_scaling"]
    assert found["rope_type"] == "factors"
    assert np.float32(found["factors"]).tobytes() == GGUFFile.open(scaling.path).data("rope_freqs.weight").tobytes()
    assert len(scaling.names()) == 20
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert opened(linear).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    del linear["llama.rope.scaling.type"]
    assert opened(linear).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32} | linear
    assert opened(yarn).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7' is not supported in GGUF files, supported are llama"),
        ({"general.architecture": None}, "architecture 'None' is not supported"),
        ({"llama.block_count": None}, "'llama.block_count': is None, expected an integer from 1"),
        ({"llama.block_count": 1 << 30}, "'llama.block_count': 1073741824, but there are only 20 tensors"),
        ({"llama.embedding_length": 65}, r"'token_embd.weight': has shape \(40, 64\), expected \(40, 65\)"),
        ({"llama.vocab_size": 41}, r"'token_embd.weight': has shape \(40, 64\), expected \(41, 64\)"),
        ({"llama.attention.head_count": 0}, "'llama.attention.head_count': is 0"),
        ({"llama.attention.head_count": [4, 4]}, "'llama.attention.head_count': is "),
        ({"llama.attention.head_count": True}, "'llama.attention.head_count': is True"),
        (
            {"llama.attention.value_length": 32},
            "'llama.attention.value_length': is 32, but must equal .*key_length, 16",
        ),
        ({"llama.rope.dimension_count": 15}, "'llama.rope.dimension_count': is 15, but must be even"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon': is nan, expected a positive number"),
        ({"llama.rope.freq_base": float("inf")}, "'llama.rope.freq_base': is inf"),
        ({"llama.rope.scaling.type": "longrope"}, "is 'longrope', supported are none, linear and yarn"),
        ({"llama.attention.sliding_window": 64}, "'llama.attention.sliding_window': this key is not known"),
        ({"llama.attention.causal": False}, "'llama.attention.causal': must be true"),
        ({"llama.expert_count": 8}, "'llama.expert_count': this key is not known"),
        ({"llama.rope.dimension_count": 64, "llama.attention.key_length": 16}, "at most the width of a head, 16"),
        ({"tokenizer.ggml.eos_token_id": -1}, "metadata: tokenizer.ggml.eos_token_id is -1; it must be a token id"),
        ({"tokenizer.ggml.eot_token_id": 2.0}, "metadata: tokenizer.ggml.eot_token_id is 2.0; it must be"),
        ({"tokenizer.ggml.bos_token_id": True}, "metadata: tokenizer.ggml.bos_token_id is True; it must be"),
        ({"tokenizer.ggml.padding_token_id": "0"}, "metadata: tokenizer.ggml.padding_token_id is '0'; it must be"),
    ],
)
def test_metadata_that_makes_no_sense(opened: Opener, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(changes)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.attn_norm_2.weight", (64,), "tensor 'blk.0.attn_norm_2.weight' has no place in the llama"),
        ("blk.00.attn_q.weight", (64, 64), "tensor 'blk.00.attn_q.weight' has no place"),
        ("rope_freqs.weight", (9,), r"'rope_freqs.weight': is F32 \(9,\).* expected F32 \(8,\)"),
    ],
)
def test_tensors_that_make_no_sense(opened: Opener, name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened({}, {name: ("F32", shape)})


def test_loading_says_what_is_wrong(opened: Opener) -> None:
    checkpoint = opened({}, {"output_norm.weight": ("Q8_0", (64,))})
    with pytest.raises(CheckpointError, match=r"no tensor for 'lm_head.weight'; expected one of shape \(40, 64\)"):
        checkpoint.load("lm_head.weight", (40, 64))
    message = r"model.gguf: tensor 'token_embd.weight': has shape \(40, 64\), expected \(41, 64\)"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load("model.embed_tokens.weight", (41, 64))
    with pytest.raises(CheckpointError, match=r"type Q8_0 and shape .* only matrices can be quantised"):
        checkpoint.load("model.norm.weight", (64,))


def test_an_unknown_key_that_turns_something_off_is_named_only(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    plain = opened({}).config
    for value in (0, 0.0, False, "", [0, 0]):
        caplog.clear()
        assert opened({"llama.attention.of_tomorrow": value}).config == plain
        assert "'llama.attention.of_tomorrow' is not known" in caplog.text
    for other in (1, 0.5, True, "yes", [0, 1]):
        with pytest.raises(CheckpointError, match=r"of_tomorrow': this key is not known"):
            opened({"llama.attention.of_tomorrow": other})
