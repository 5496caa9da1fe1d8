"""Every native family of models, tiny and with random weights: whether it computes, and the same in each way.

A family's shape is that of a published model where there is one, with each size cut down, so that its own keys
(scalings of positions, windows, biases, experts) stay.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.models.config_keys import ConfigKeys
from octavo.models.features import KEYS, OWN_KEYS
from octavo.models.registry import ARCHITECTURES
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_bench.offline import checked_step
from octavo_bench.records.report import Say
from octavo_fleet.sim.shapes import SHAPES

SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (64, "hidden_size n_embd"),
        (96, "intermediate_size n_inner"),
        (32, "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank"),
        (
            2,
            "num_hidden_layers n_layer n_layers num_key_value_heads num_experts_per_tok experts_per_token "
            "top_k_experts",
        ),
        (2, "eos_token_id"),
        (0, "num_kv_shared_layers pad_token_id"),
        (4, "num_attention_heads n_head num_experts num_local_experts n_routed_experts"),
        (16, "head_dim sliding_window qk_nope_head_dim v_head_dim query_pre_attn_scalar"),
        (1000, "vocab_size"),
        (512, "max_position_embeddings n_positions n_ctx"),
        (1, "n_shared_experts topk_group first_k_dense_replace bos_token_id"),
        (8, "qk_rope_head_dim"),
    )
    for name in names.split()
}
"""What replaces a size of the same name; of latent attention all heads have their own keys."""
_PLAIN: Mapping[str, Any] = {**SHAPES["llama-3.1-8b"], "rope_scaling": None}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "tie_word_embeddings": True}
_LATENT: Mapping[str, Any] = {**SHAPES["deepseek-v2-lite"], "rope_scaling": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5, "head_dim": 16,
}  # fmt: skip
_STATE: Mapping[str, Any] = {
    **{name: value for name, value in _PLAIN.items() if name not in ("rope_scaling", "rope_theta", "rope_parameters")},
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
}  # fmt: skip
_NEMOTRON: Mapping[str, Any] = {
    **{name: value for name, value in _STATE.items() if not name.startswith("mamba") and name != "num_hidden_layers"},
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip
UNPUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "GemmaForCausalLM": {**_PLAIN, **_GEMMA, "model_type": "gemma"},
    "Gemma2ForCausalLM": {
        **_PLAIN, **_GEMMA, "model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 16,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "GlmForCausalLM": {**SHAPES["glm-4-9b"], "model_type": "glm"},
    "Olmo2ForCausalLM": {**_PLAIN, "model_type": "olmo2"},
    "Qwen2MoeForCausalLM": {
        **SHAPES["qwen2.5-7b"], **_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": [], "use_sliding_window": False,
    },
    "Qwen3NextForCausalLM": {**SHAPES["qwen3-30b-a3b"], **_DELTA, "model_type": "qwen3_next"},
    "Qwen3_5ForCausalLM": {**SHAPES["qwen3-8b"], **_DELTA, "model_type": "qwen3_5_text"},
    "Qwen3_5MoeForCausalLM": {**SHAPES["qwen3-30b-a3b"], **_DELTA, "model_type": "qwen3_5_moe_text"},
    "BambaForCausalLM": {**_STATE, "model_type": "bamba", "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {
        **_STATE, "model_type": "granitemoehybrid", "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
    },
    "JambaForCausalLM": {
        **_PLAIN, "model_type": "jamba", "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_d_state": 16,
    },
    "Lfm2ForCausalLM": {**_PLAIN, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {
        **_PLAIN, **_EXPERTS, "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "Mamba2ForCausalLM": {
        "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "model_type": "mamba2", "num_heads": 8,
        "head_dim": 16, "n_groups": 2, "state_size": 16,
    },
    "NemotronHForCausalLM": {
        **_NEMOTRON, "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "Zamba2ForCausalLM": {
        **_PLAIN, "model_type": "zamba2", "n_mamba_heads": 8, "mamba_d_state": 16, "adapter_rank": 8,
        "hidden_act": "gelu", "layers_block_type": ["linear_attention", "hybrid"],
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 32, "n_group": 2, "topk_group": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
"""Families of which no shape is kept: keys of their own over those of a like one."""
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14] * 4, [20, 21, 22])
OUTPUT = 8
WAYS: Mapping[str, Mapping[str, Any]] = {
    "at once": {"max_num_batched_tokens": 256, "block_size": 16},
    "in chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 16},
    "not recorded": {"max_num_batched_tokens": 256, "block_size": 16, "enforce_eager": True},
}
"""Settings that change no token."""


def tiny_config(architecture: str) -> dict[str, Any]:
    """The ``config.json`` of a family, cut down; without a shape of it, sizes under the keys of all families."""
    published = next((shape for shape in SHAPES.values() if shape["architectures"] == [architecture]), None)
    found = UNPUBLISHED.get(architecture, published)
    if found is None:
        found = _own_keys(architecture)
    config = {name: SIZES.get(name, value) if value not in (None, 0) else value for name, value in found.items()}
    if (config.get("n_group") or 1) > 1:  # of others, groups are not implemented
        config["n_group"] = 2
    if "layer_types" in config:
        config["layer_types"] = sorted(set(config["layer_types"] or ()))[: SIZES["num_hidden_layers"]]
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return {**config, "architectures": [architecture], "torch_dtype": "float32"}


def _own_keys(architecture: str) -> dict[str, Any]:
    """Those of the keys of all families that a family reads."""
    sizes = {**KEYS, "num_hidden_layers": 2, "n_layer": 2, **OWN_KEYS.get(architecture, {}), "num_kv_shared_layers": 0}
    keys = ConfigKeys({**sizes, "architectures": [architecture]})
    ARCHITECTURES[architecture].read_config(keys, None)
    unread = keys.unread()
    return {name: value for name, value in sizes.items() if name not in unread}


def measure(families: Sequence[str], device: str, say: Say) -> dict[str, Any]:
    """A row of ``check`` for each of some families; for none, of all."""
    with tempfile.TemporaryDirectory() as folder:
        return {"device": device, "rows": list(check(Path(folder), device, families, say))}


def check(folder: Path, device: str, names: Sequence[str], say: Say) -> Iterator[dict[str, Any]]:
    """A row for each family: whether its tokens are the same in each way, or why it failed.

    Raises ``ConfigError`` for a name that is none.
    """
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        raise ConfigError(f"families: {unknown[0]!r} is not one of {', '.join(ARCHITECTURES)}")
    for architecture in names or ARCHITECTURES:
        started = time.perf_counter()
        try:
            row = _checked(architecture, folder, device)
        except OctavoError as error:
            row = {"failed": str(error)}
        seconds = time.perf_counter() - started
        say(f"{architecture}: {row.get('failed', 'the same tokens in each way')} ({seconds:.1f} s)")
        yield {"model": architecture, **row}


def _checked(architecture: str, folder: Path, device: str) -> dict[str, Any]:
    config = tiny_config(architecture)
    path = folder / architecture
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    found: dict[str, list[list[int]]] = {}
    parameters = 0
    for way, settings in WAYS.items():
        sizes = {"model": str(path), "load_format": "dummy", "device": device, "dtype": "float32", "max_model_len": 256}
        engine, info = build_engine(EngineConfig.from_flat({**sizes, "num_kv_blocks": 32, **settings}))
        parameters, found[way] = info.num_parameters, _tokens(engine)
        found[f"{way}, again"] = _tokens(engine)  # from the prefix cache
        engine.close()
    different = [way for way, tokens in found.items() if tokens != found["at once"]]
    failed = {"failed": f"other tokens {', '.join(different)}"} if different else {}
    return {"num_parameters": parameters, "same_tokens": not different, **failed}


def _tokens(engine: Any) -> list[list[int]]:
    """Greedy answers. Raises ``OctavoError`` where a log-probability is no number."""
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
    first = engine.stats().num_steps * len(PROMPTS) + 1
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(first + number, list(prompt), params, OUTPUT))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_work:
        for output in checked_step(engine):
            answers[output.request_id - first] += output.tokens
            if not all(math.isfinite(one.logprob) for one in output.logprobs or ()):
                raise OctavoError("a log-probability is no number")
    return answers
