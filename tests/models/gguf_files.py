"""GGUF files of the tiny checkpoints, written with llama.cpp's own package: its tensor names, its metadata keys.

What its converter does to weights is done here a second time, from its description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf_decoder_files import DECODERS, WRITTEN, converted_decoder, write_decoder_keys
from tests.models.gguf_hybrid_files import HYBRIDS, converted, fused_experts, write_keys

Array = npt.NDArray[np.float32]
Quantise = Callable[[str, Array], gguf.GGMLQuantizationType | None]

ARCHITECTURES = {
    "llama": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen2_vl_text": "QWEN2VL",
    "qwen3_vl_text": "QWEN3VL",
    "qwen3_vl_moe_text": "QWEN3VLMOE",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "phi3": "PHI3",
    "olmo2": "OLMO2",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "gemma4_text": "GEMMA4",
    "glm4": "GLM4",
    "gpt2": "GPT2",
    "gpt_oss": "GPT_OSS",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "glm_moe_dsa": "GLM_DSA",
    "mistral4": "MISTRAL4",
    "youtu": "DEEPSEEK2",
    **DECODERS,
    **HYBRIDS,
}
LATENT = ("deepseek_v3", "glm_moe_dsa", "mistral4", "youtu")
"""Those whose files have maps to keys and values apart."""
WITHOUT_MODEL = ("mixtral", "kimi_linear", "lfm2_moe", "minimax_m2", "phimoe")
"""Those whose experts' names begin with the layers."""
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")


def write_gguf(
    folder: Path,
    model: torch.nn.Module,
    quantise: Quantise = lambda name, values: None,
    tensors_of_a_part: int = 0,
    tokens: list[str] | None = None,
    fuses_queries: bool = False,
) -> Path:
    """Write what is in a checkpoint folder as a GGUF file; weights that are quantised are so in the model too.

    With ``tensors_of_a_part`` it is split, and the path is that of none of its parts. With ``fuses_queries``, queries,
    keys and values are one tensor.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind == "nemotron_h" and "moe" not in config["layers_block_type"]:
        kind = "nemotron_h_dense"
    arch = getattr(gguf.MODEL_ARCH, ARCHITECTURES[kind])
    path = folder / "model.gguf"
    written = WRITTEN.get(kind, gguf.MODEL_ARCH_NAMES[arch])
    writer = gguf.GGUFWriter(path, written, split_max_tensors=tensors_of_a_part)
    write = write_decoder_keys if kind in DECODERS else write_keys if kind in HYBRIDS else _write_keys
    write(writer, kind, config)
    if tokens is not None:
        writer.add_token_list(tokens)
    counts = (config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers"))
    layers = next(filter(None, counts), None) or len(config["layers_block_type"])
    names = gguf.get_tensor_name_map(arch, layers)
    stored = load_file(folder / "model.safetensors")
    if kind == "apertus":
        for part in ("alpha_p", "alpha_n"):
            numbers = [stored[f"model.layers.{i}.mlp.act_fn.{part}"].item() for i in range(layers)]
            getattr(writer, f"add_xielu_{part}")(numbers)
    tensors = _converted(kind, config, stored)
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) or name: part for name, part in tensors.items()}
    for written, tensor in (_fused(known) if fuses_queries else known).items():
        values = tensor.float().numpy()
        form = quantise(written, values)
        if form is None:
            writer.add_tensor(written, np.ascontiguousarray(values))
        else:
            writer.add_tensor(written, gguf.quants.quantize(np.ascontiguousarray(values), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {
        name: [name.replace("attn_q.", f"attn_{part}.") for part in "qkv"] for name in tensors if "attn_q." in name
    }
    rest = {name: tensor for name, tensor in tensors.items() if not re.search(r"attn_[qkv]\.", name)}
    joined = {name.replace("attn_q.", "attn_qkv."): [tensors[part] for part in own] for name, own in parts.items()}
    return rest | {name: torch.cat(own) for name, own in joined.items()}


def _converted(kind: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            base = (
                match[1]
                .replace("block_sparse_moe", "feed_forward")
                .replace("model.", "" if kind in WITHOUT_MODEL else "model.")
            )
            base = re.sub(r"backbone(.*)\.mixer", r"model\1.mlp", base)
            experts.setdefault(f"{base}.experts.{match[3]}.weight", {})[int(match[2])] = tensor
        elif match := re.fullmatch(r"(.*)\.norms\.(\d+)\.weight", name):
            experts.setdefault(f"{match[1]}.weight", {})[int(match[2])] = tensor
        else:
            convert = converted_decoder if kind in DECODERS else converted if kind in HYBRIDS else _one
            found |= convert(kind, config, name, tensor)
    stacked = {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return found | (fused_experts(stacked) if kind == "qwen3_next" else stacked)


def _one(kind: str, config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor]:
    if kind in ("llama", "mixtral") and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return {name: halves.transpose(1, 2).reshape(tensor.shape)}
    if kind == "glm4" and "mrope_section" in config["rope_parameters"] and re.search(r"\.[qk]_proj\.", name):
        heads = tensor.reshape(-1, config["head_dim"], *tensor.shape[1:])
        rotated = int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1.0))
        parts = [heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]]
        return {name: torch.cat(parts, dim=1).reshape(tensor.shape)}
    if kind == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        return {name: tensor.t()}
    if kind == "gemma4_text" and name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        return {f"{name}.weight": tensor}
    if kind == "gemma4_text" and (match := re.search(r"layers\.(\d+)\.router\.(scale|per_expert_scale)$", name)):
        return {f"blk.{match[1]}.ffn_{'gate_inp' if match[2] == 'scale' else 'down_exps'}.scale": tensor}
    if kind.startswith("gemma") and kind != "gemma4_text" and name.endswith("norm.weight"):
        return {name: tensor + 1}
    if name.endswith("shared_expert_gate.weight"):
        return {name: tensor.squeeze()}
    if name.endswith(".sinks"):
        return {name + ".weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor}
    if kind == "gpt_oss" and (match := re.fullmatch(r"(.*\.)(gate_up_proj|down_proj)(_bias)?", name)):
        return _gpt_oss(match, tensor)
    if kind == "mistral4" and name.endswith(("gate_up_proj", "down_proj")):
        return {f"{name}.weight": tensor}
    if kind in LATENT and name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.view(config["num_attention_heads"], -1, config["kv_lora_rank"]).split(sizes, dim=1)
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    return {name: tensor}


def _gpt_oss(match: re.Match[str], tensor: Tensor) -> dict[str, Tensor]:
    """Weights [X, inputs, outputs], gates and ups taking turns; biases [X, outputs]."""
    suffix = ".bias" if match[3] else ".weight"
    tensor = tensor if match[3] else tensor.transpose(1, 2)
    if match[2] == "down_proj":
        return {match[1] + "down_proj" + suffix: tensor}
    return {match[1] + "gate_proj" + suffix: tensor[:, ::2], match[1] + "up_proj" + suffix: tensor[:, 1::2]}


def _write_keys(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    if kind == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        return
    writer.add_block_count(config["num_hidden_layers"])
    if kind == "gemma4_text":
        _write_gemma4(writer, config)
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _write_rope(writer, kind, config)
    if kind in ("deepseek_v2", *LATENT):
        _write_deepseek(writer, kind, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.get("sliding_window") and kind != "qwen2_moe" and not kind.startswith("qwen"):
        writer.add_sliding_window(config["sliding_window"])
    if "mrope_section" in config["rope_parameters"]:
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    if kind == "gemma3_text" and "full_attention" in config["layer_types"]:
        writer.add_sliding_window_pattern(config["layer_types"].index("full_attention") + 1)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            getattr(writer, f"add_{key}")(config[key])
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config or kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _write_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config["per_layer_config"][str(windowed.index(False))]
    wide, narrow, shared = full["head_dim"], config["head_dim"], config["num_kv_shared_layers"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    size, first = config["intermediate_size"], len(windowed) - shared
    is_wide = config.get("use_double_wide_mlp")
    writer.add_feed_forward_length([size * (1 + (i >= first)) for i in range(len(windowed))] if is_wide else size)
    heads, of_full = config["num_key_value_heads"], full.get("num_key_value_heads")
    writer.add_head_count_kv([heads if has else of_full for has in windowed] if of_full else heads)
    for count, add in ((wide, ""), (narrow, "_swa")):
        getattr(writer, f"add_key_length{add}")(count)
        getattr(writer, f"add_value_length{add}")(count)
        getattr(writer, f"add_rope_dimension_count{add}")(count)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rotated = int(wide * rope["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    factors = np.array([1.0] * rotated + [1e30] * (wide // 2 - rotated), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _write_rope(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    rope: dict[str, Any] = config["rope_parameters"]
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = config.get("qk_rope_head_dim") or int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(width)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(getattr(gguf.RopeScalingType, rope["rope_type"].upper()))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
    if rope["rope_type"] == "llama3":
        from octavo.layers.rotary import DefaultRope, Llama3Rope

        scaled = Llama3Rope(
            rope["rope_theta"],
            *(
                rope[key]
                for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            ),
        )
        factors = DefaultRope(rope["rope_theta"]).frequencies(width) / scaled.frequencies(width)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_deepseek(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    """Newer files for all but V2."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    head = config["qk_nope_head_dim"] + rotated
    if kind in LATENT:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(head)
        writer.add_value_length(config["v_head_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_vocab_size(config["vocab_size"])
    if kind == "youtu":
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)
        return
    if kind == "glm_moe_dsa":
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if kind in ("deepseek_v3", "glm_moe_dsa") else kinds.SOFTMAX)
    if beta := config["rope_parameters"].get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config.get("n_routed_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if (config.get("n_group") or 1) > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def write_projector(folder: Path, path: Path, kind: str, form: Callable[[Array], Array]) -> None:
    """Write the tower of a vision-language checkpoint, as the converter does it, with its matrices in a form."""
    config = json.loads((folder / "config.json").read_text())
    inner = config["vision_config"]
    for key in ("image_size", "patch_size"):
        if isinstance(inner.get(key), list):  # of InternVL, as two equal numbers
            inner[key] = inner[key][0]
    writer = gguf.GGUFWriter(path, "clip")
    if kind != "mlp" or "image_grid_pinpoints" in config:  # the oldest files of LLaVA name no kind
        writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.has_vision_encoder", True)
    layers = inner.get("num_hidden_layers") or inner.get("depth", 0)
    writer.add_vision_block_count(layers - (kind == "mlp"))  # the last layer is not used
    places = inner.get("num_position_embeddings", 1600) ** 0.5
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    longest = processor["size"]["longest_edge"] if kind in ("pixtral", "lightonocr") else None
    if kind == "kimivl":
        longest = inner["init_pos_emb_height"] * 14
    if kind == "lfm2":
        longest = round(inner["num_patches"] ** 0.5) * 16
    writer.add_vision_image_size(longest or inner.get("image_size", round(places) * inner["patch_size"]))
    writer.add_vision_patch_size(inner.get("patch_size", 14))
    writer.add_vision_embedding_length(inner.get("mm_embed_dim") or inner["hidden_size"])
    writer.add_vision_feed_forward_length(inner.get("intermediate_size", 0))  # of Gemma 4 12B, which has no layers
    writer.add_vision_head_count(inner.get("num_attention_heads") or inner.get("num_heads", 0))
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_mean(processor.get("image_mean", [0.5] * 3))
    writer.add_vision_image_std(processor.get("image_std", [0.5] * 3))
    if kind in ("gemma3", "idefics3", "internvl", "gemma4v", "kimivl", "lfm2", "llama4"):
        writer.add_vision_projector_scale_factor(2)
    if kind == "mlp":
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_bool("clip.use_gelu", False)
        if points := config.get("image_grid_pinpoints"):
            writer.add_array("clip.vision.image_grid_pinpoints", [side for point in points for side in point])
    if kind in ("gemma4v", "gemma4uv"):
        side = inner["patch_size"] * inner["pooling_kernel_size"]
        writer.add_uint32("clip.vision.image_max_pixels", processor["max_soft_tokens"] * side**2)
    if kind == "glm4v":
        writer.add_uint32("clip.vision.image_min_pixels", processor["size"]["shortest_edge"])
        writer.add_uint32("clip.vision.image_max_pixels", processor["size"]["longest_edge"])
    if kind == "idefics3":
        writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])
    if kind == "internvl":
        writer.add_vision_preproc_max_tiles(processor["max_patches"])
    if "spatial_merge_size" in config and kind in ("pixtral", "lightonocr"):
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    deep = None
    if kind == "qwen3vl_merger":
        deep = inner.get("deepstack_visual_indexes") or []
        writer.add_vision_is_deepstack_layers([i in deep for i in range(layers)])
    if kind == "qwen2.5vl_merger":
        writer.add_vision_n_wa_pattern(inner["fullatt_block_indexes"][0] + 1)
        writer.add_uint32(gguf.Keys.ClipVision.WINDOW_SIZE, inner["window_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))  # maps behind them have numbers, too
    for name, tensor in load_file(folder / "model.safetensors").items():
        if kind in ("pixtral", "lightonocr") and re.search(r"attention\.[qk]_proj", name):
            halves = tensor.unflatten(0, (inner["num_attention_heads"], 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for stored, part in _tower_parts(name.removeprefix("model."), tensor, deep, kind, layers):
            known = stored.startswith(("v.", "mm.", "model.image_newline"))
            own = stored if known else names.get_name(stored, try_suffixes=(".weight", ".bias", *ENDS))
            if own is not None and (known or own.startswith(("v.", "mm."))):
                values = np.ascontiguousarray(part.squeeze().float().numpy())
                writer.add_tensor(own, form(values) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ENDS = (".input_min", ".input_max", ".output_min", ".output_max")
"""What Gemma 4 has of the limits of its maps."""


def _gemma4_part(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.startswith(("vision_tower", "embed_vision")):
        name = f"model.{name}"
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("input_proj.weight"):
        side = round((tensor.shape[1] // 3) ** 0.5)
        tensor = tensor.reshape(-1, side, side, 3).permute(0, 3, 1, 2)
    return [(name, tensor.reshape(-1) if tensor.ndim == 0 else tensor)]


def _gemma4_unified_part(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    name = name.replace("patch_dense", "patch_embd").replace("pos_norm", "patch_ln3").replace("patch_ln", "patch_norm.")
    if name.startswith(("vision_embedder.patch_embd.weight", "vision_embedder.patch_norm.1")):
        tensor = tensor.unflatten(-1, (-1, 3)).transpose(-1, -2).flatten(-2)
    if name == "vision_embedder.pos_embedding":
        name, tensor = "v.position_embd.weight", tensor.transpose(0, 1)
    name = name.replace("embed_vision.embedding_projection", "mm.input_projection")
    return [(name.replace("vision_embedder.", "v."), tensor)]


LEGACY_CLIP = (
    (r"^vision_tower\.(vision_model\.)?", "v."),
    (r"encoder\.layers", "blk"),
    (r"embeddings\.", ""),
    (r"_proj\b", ""),
    (r"self_attn\.", "attn_"),
    (r"layer_norm|layernorm|layrnorm", "ln"),
    (r"mlp\.fc1", "ffn_down"),
    (r"mlp\.fc2", "ffn_up"),
    (r"embedding", "embd"),
    (r"^multi_modal_projector\.linear_1", "mm.0"),
    (r"^multi_modal_projector\.linear_2", "mm.2"),
    (r"^image_newline", "model.image_newline"),
)
"""What LLaVA's converter makes of parts of names; it swaps those of the feed-forward layer."""


def _legacy_clip(name: str, tensor: Tensor, layers: int) -> list[tuple[str, Tensor]]:
    for pattern, stored in LEGACY_CLIP:
        name = re.sub(pattern, stored, name)
    return [] if name.startswith((f"v.blk.{layers - 1}.", "v.post_ln")) else [(name, tensor)]


def _tower_parts(name: str, tensor: Tensor, deep: list[int] | None, kind: str, layers: int) -> list[tuple[str, Tensor]]:
    """``deep``: the layers with mergers of Qwen3-VL and Qwen3.5, whose names the package does not know."""
    if kind == "mlp":
        return _legacy_clip(name, tensor, layers)
    if kind == "gemma4v":
        return _gemma4_part(name, tensor)
    if kind == "gemma4uv":
        return _gemma4_unified_part(name, tensor)
    if kind == "idefics3":
        return [(f"model.{name}", tensor)]
    if kind in ("pixtral", "lightonocr"):
        name = name.replace("vision_encoder.", "vision_tower.")
        return [(name.replace("vision_projection.", "multi_modal_projector."), tensor)]
    if kind == "kimivl":
        if name.endswith("pos_emb.weight"):
            tensor = tensor.flatten(0, 1)
        parts = zip("qkv", tensor.chunk(3), strict=True) if ".wqkv." in name else [("qkv", tensor)]
        return [(name.replace("wqkv", f"w{end}"), piece) for end, piece in parts]
    if kind == "lfm2":
        if name.endswith("patch_embedding.weight"):
            tensor = tensor.view(-1, 16, 16, 3).permute(0, 3, 1, 2)
        return [(re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name), tensor)]
    if kind == "llama4":
        name = name.replace("embedding_vlm", "embedding_vlm.weight")
        if found := re.search(r"^vision_model\.model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)$", name):
            return [(f"v.blk.{found[1]}.ln2.{found[2]}", tensor)]
        return [("mm.model.fc.weight" if name.startswith("multi_modal_projector") else name, tensor)]
    if kind == "internvl":
        parts = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
        name = re.sub(r"^multi_modal_projector\.(\w+)", lambda found: f"mlp1.{parts[found[1]]}", name)
        name = re.sub(r"(position_embeddings|lambda_\d)$", r"\1.weight", name)
        return [(f"model.{name}" if name.startswith("vision_tower") else name, tensor)]
    if deep is not None and (match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(.*)", name)):
        return [(f"v.deepstack.{deep[int(match[1])]}.{match[2]}", tensor)]
    if deep is not None and name.startswith("visual.merger."):
        stored = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
        own, end = name.removeprefix("visual.merger.").split(".")
        return [(f"{stored[own]}.{end}", tensor)]
    if ".attn.qkv." in name and (deep is not None or kind == "glm4v"):
        return [(name, tensor)]
    if name == "visual.patch_embed.proj.weight":
        return [("v.patch_embd.weight", tensor[:, :, 0]), ("v.patch_embd.weight.1", tensor[:, :, 1])]
    if ".attn.qkv." in name:
        return [(name.replace("qkv", part), piece) for part, piece in zip("qkv", tensor.chunk(3), strict=True)]
    if name.endswith("soft_emb_norm.weight"):
        return [(name, tensor + 1)]
    name = name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    return [(re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name), tensor)]
