"""Tiny checkpoints of drafters in their public layouts, each with a plain reference that computes its draft logits.

Shapes: T positions, D model, E model and its hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.families import make_checkpoint

D, F, HEADS, KV_HEADS, H, EPS, THETA = 32, 48, 4, 2, 16, 1e-5, 10000.0
Weights = dict[str, Tensor]
Reference = Callable[[list[int], int], Tensor]
"""The logits [count, V] of so many greedy drafts behind a text."""


# ---- plain layers


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x_TKH: Tensor, positions_T: Tensor) -> Tensor:
    half = x_TKH.shape[-1] // 2
    angles = positions_T[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x_TKH[..., :half], x_TKH[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def attended(q_TKH: Tensor, k_UKH: Tensor, v_UKH: Tensor, sees_TU: Tensor) -> Tensor:
    """Grouped attention of rows to those that they see; [T, heads * H]."""
    group = q_TKH.shape[1] // k_UKH.shape[1]
    k, v = k_UKH.repeat_interleave(group, 1), v_UKH.repeat_interleave(group, 1)
    scores = torch.einsum("tkh,ukh->ktu", q_TKH, k) * H**-0.5
    weights = scores.masked_fill(~sees_TU, -torch.inf).softmax(-1)
    return torch.einsum("ktu,ukh->tkh", weights, v).flatten(1)


def heads_of(x_TD: Tensor, weight: Tensor) -> Tensor:
    return (x_TD @ weight.T).unflatten(1, (-1, H))


def feed_forward(x_TD: Tensor, weights: Weights, prefix: str) -> Tensor:
    h = norm(x_TD, weights[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = h @ weights[f"{prefix}.mlp.gate_proj.weight"].T, h @ weights[f"{prefix}.mlp.up_proj.weight"].T
    return x_TD + (functional.silu(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T


def layer_weights(prefix: str, num_inputs: int = D) -> dict[str, tuple[int, ...]]:
    sizes = {"q": HEADS * H, "k": KV_HEADS * H, "v": KV_HEADS * H}
    return {
        **{f"{prefix}.self_attn.{part}_proj.weight": (size, num_inputs) for part, size in sizes.items()},
        f"{prefix}.self_attn.o_proj.weight": (D, HEADS * H),
        f"{prefix}.input_layernorm.weight": (D,),
        f"{prefix}.post_attention_layernorm.weight": (D,),
        f"{prefix}.mlp.gate_proj.weight": (F, D),
        f"{prefix}.mlp.up_proj.weight": (F, D),
        f"{prefix}.mlp.down_proj.weight": (D, F),
    }


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    return {
        name: torch.randn(shape) * (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: Mapping[str, Any], weights: Weights) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


class Target:
    """A model's hidden states, entering each layer, and its embedding and head."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: Tensor = self.model.get_output_embeddings().weight

    @torch.no_grad()
    def hidden(self, text: list[int]) -> list[Tensor]:
        """[T, D] for each layer; the last is normalised."""
        found = self.model(torch.tensor([text]), output_hidden_states=True)
        return [state[0] for state in found.hidden_states]


# ---- draft models


def model_reference(folder: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def logits(text: list[int], count: int) -> Tensor:
        rows, text = [], list(text)
        for _ in range(count):
            rows.append(model(torch.tensor([text])).logits[0, -1])
            text.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    return logits


# ---- EAGLE-3

DRAFT_VOCAB = 61
LLAMA_KEYS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": H,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 400,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def eagle3(folder: Path, target: Path, layout: str, layers: tuple[int, ...], **flags: Any) -> Reference:
    """Write a head for ``target`` in the layout of its "authors" or of "speculators"."""
    torch.manual_seed(5)
    model = Target(target)
    vocab_size = len(model.embedding)
    shapes = layer_weights("layers.0", 2 * D) | {
        "layers.0.hidden_norm.weight": (D,),
        "fc.weight": (D, len(layers) * D),
        "norm.weight": (D,),
        "lm_head.weight": (DRAFT_VOCAB, D),
    }
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(layers) * D,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(len(layers))}
    weights = random_weights(shapes)
    chosen = torch.randperm(vocab_size)[:DRAFT_VOCAB].sort().values
    stored = weights | {"d2t": chosen - torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(vocab_size).to(torch.bool)}
    stored["t2d"][chosen] = True
    keys = {**LLAMA_KEYS, "vocab_size": vocab_size}
    if layout == "authors":
        stored = {name.replace("layers.0.", "midlayer."): weight for name, weight in stored.items()}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **keys, "draft_vocab_size": DRAFT_VOCAB, **flags}
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": keys,
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": layers,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
            **flags,
        }
    write(folder, config, stored)
    normalised_residual = flags.get("norm_before_residual", layout == "speculators")

    def rows(fused_TD: Tensor, tokens: list[int]) -> Tensor:
        h, embedded = norm(fused_TD, weights["layers.0.hidden_norm.weight"]), model.embedding[tokens]
        both = torch.cat((norm(embedded, weights["layers.0.input_layernorm.weight"]), h), dim=1)
        at = torch.arange(len(tokens))
        q, k, v = (heads_of(both, weights[f"layers.0.self_attn.{part}_proj.weight"]) for part in "qkv")
        seen = attended(rotated(q, at), rotated(k, at), v, at[:, None] >= at)
        x = (h if normalised_residual else fused_TD) + seen @ weights["layers.0.self_attn.o_proj.weight"].T
        return feed_forward(x, weights, "layers.0")

    @torch.no_grad()
    def logits(text: list[int], count: int) -> Tensor:
        states = [model.hidden(text)[layer][:-1] for layer in layers]
        if flags.get("fc_norm"):
            states = [norm(state, weights[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
        joined = torch.cat(states, dim=1)
        if flags.get("norm_before_fc"):
            joined = norm(joined, weights["input_norm.weight"])
        fused, tokens, found = joined @ weights["fc.weight"].T, text[1:], []
        for _ in range(count):
            last = rows(fused, tokens)[-1]
            output = norm(last, weights["norm.weight"])
            small = weights["lm_head.weight"] @ output
            found.append(torch.full((vocab_size,), -torch.inf).index_put((chosen,), small))
            fused = torch.cat((fused, (output if flags.get("norm_output") else last)[None]))
            tokens = [*tokens, int(found[-1].argmax())]
        return torch.stack(found)

    return logits


# ---- MTP


def mtp(folder: Path, row: str, names: str, **changes: Any) -> Reference:
    """Write a family's model with an MTP layer, whose tensors have the names of "deepseek" or "qwen"."""
    num_layers = 2
    whole = make_checkpoint(folder, row, num_hidden_layers=num_layers + 1, **changes)
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:num_layers]
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    stored = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{num_layers}."
    parts = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
    own = random_weights({f"{name}.weight": shape for name, shape in parts.items()})
    if names == "deepseek":
        stored |= {prefix + name: weight for name, weight in own.items()}
        stored[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    else:
        public = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
        }
        stored = {name.replace(prefix, "mtp.layers.0."): weight for name, weight in stored.items()}
        stored |= {f"mtp.{public[name.removesuffix('.weight')]}.weight": weight for name, weight in own.items()}
    write(folder, config, stored)
    inner: Any = whole.model
    layer, layers, offset = inner.layers[num_layers], inner.layers, float("qwen3_5" in row)

    @torch.no_grad()
    def logits(text: list[int], count: int) -> Tensor:
        inner.layers = layers[:num_layers]
        inner.config.num_hidden_layers = num_layers
        states = inner(torch.tensor([text])).last_hidden_state[0, :-1]
        tokens, found = text[1:], []
        for _ in range(count):
            embedded = inner.embed_tokens.weight[tokens].clone()
            if names == "deepseek":
                embedded[0] = 0
            joined = torch.cat(
                (norm(embedded, own["enorm.weight"] + offset), norm(states, own["hnorm.weight"] + offset)), dim=1
            )
            x, at = (joined @ own["eh_proj.weight"].T)[None], torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            out = layer(x, attention_mask=mask, position_ids=at, position_embeddings=inner.rotary_emb(x, at))
            last = norm((out[0] if isinstance(out, tuple) else out)[0, -1], own["shared_head.norm.weight"] + offset)
            found.append(whole.lm_head.weight @ last)
            states, tokens = torch.cat((states, last[None])), [*tokens, int(found[-1].argmax())]
        return torch.stack(found)

    return logits


def nemotron_mtp(folder: Path, **changes: Any) -> Reference:
    """Write a Nemotron 3 model, whose MTP layers are one with attention and one with experts."""
    own_kinds, kinds = ["linear_attention", "mlp", "full_attention"], ["full_attention", "moe"]
    whole = make_checkpoint(folder, "nemotron_h/experts", layers_block_type=[*own_kinds, *kinds], **changes)
    config, L = json.loads((folder / "config.json").read_text()), len(own_kinds)
    config |= {"layers_block_type": own_kinds, "mtp_layers_block_type": kinds, "num_nextn_predict_layers": 1}
    stored = load_file(folder / "model.safetensors")
    for i in range(2):
        prefix = f"backbone.layers.{L + i}."
        stored = {name.replace(prefix, f"mtp.layers.{i}."): weight for name, weight in stored.items()}
    own = random_weights({"0.enorm": (D,), "0.hnorm": (D,), "0.eh_proj": (D, 2 * D), "1.final_layernorm": (D,)})
    write(folder, config, stored | {f"mtp.layers.{name}.weight": weight for name, weight in own.items()})
    inner: Any = whole.model
    layers = inner.layers

    @torch.no_grad()
    def logits(text: list[int], count: int) -> Tensor:
        inner.layers, inner.config.layers_block_type = layers[:L], own_kinds
        states = inner(torch.tensor([text])).last_hidden_state[0, :-1]
        tokens, found = text[1:], []
        for _ in range(count):
            embedded = inner.embeddings.weight[tokens]
            x = torch.cat((norm(embedded, own["0.enorm"]), norm(states, own["0.hnorm"])), dim=1) @ own["0.eh_proj"].T
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            out = layers[L + 1](layers[L](x[None], attention_mask=mask))
            last = norm(out[0, -1], own["1.final_layernorm"])
            found.append(whole.lm_head.weight @ last)
            states, tokens = torch.cat((states, last[None])), [*tokens, int(found[-1].argmax())]
        return torch.stack(found)

    return logits


# ---- DFlash


def dflash(folder: Path, target: Path, layers: tuple[int, ...], layout: str, block_size: int = 5) -> Reference:
    """Write a block drafter of two layers; ``layers`` are those whose outputs it gets, as its configuration says."""
    torch.manual_seed(6)
    model = Target(target)
    mask_token = len(model.embedding) - 1
    shapes = {"fc.weight": (D, len(layers) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(2):
        shapes |= layer_weights(f"layers.{i}")
        shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (H,) for part in "qk"}
    weights = random_weights(shapes)
    keys = {**LLAMA_KEYS, "model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": len(model.embedding)}
    if layout == "authors":
        own = {"target_layer_ids": layers, "mask_token_id": mask_token}
        config = {"architectures": ["DFlashDraftModel"], **keys, "block_size": block_size, "dflash_config": own}
    else:
        config = {
            "speculators_model_type": "dflash",
            "transformer_layer_config": keys,
            "block_size": block_size,
            "mask_token_id": mask_token,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        }
    write(folder, config, weights)

    @torch.no_grad()
    def logits(text: list[int], count: int) -> Tensor:
        hidden = model.hidden(text)
        context = torch.cat([hidden[layer + 1][:-1] for layer in layers], dim=1) @ weights["fc.weight"].T
        context = norm(context, weights["hidden_norm.weight"])
        x = model.embedding[[text[-1], *[mask_token] * count]]
        known = torch.arange(len(context))
        at, sees = len(context) + torch.arange(count + 1), torch.ones(count + 1, len(context) + count + 1).bool()
        for i in range(2):
            name = f"layers.{i}.self_attn"
            h = norm(x, weights[f"layers.{i}.input_layernorm.weight"])
            q = norm(heads_of(h, weights[f"{name}.q_proj.weight"]), weights[f"{name}.q_norm.weight"])
            both, places = torch.cat((context, h)), torch.cat((known, at))
            k = norm(heads_of(both, weights[f"{name}.k_proj.weight"]), weights[f"{name}.k_norm.weight"])
            v = heads_of(both, weights[f"{name}.v_proj.weight"])
            x = x + attended(rotated(q, at), rotated(k, places), v, sees) @ weights[f"{name}.o_proj.weight"].T
            x = feed_forward(x, weights, f"layers.{i}")
        return norm(x[1:], weights["norm.weight"]) @ model.head.T

    return logits
