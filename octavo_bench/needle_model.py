"""A small model that is trained to look back: it continues phrases that stand anywhere before in its context.

A text is phrases of random tokens, each of which occurs a few times: only who finds where a phrase stood before knows
how it goes on, among *decoys* that begin nearly alike. The first of two layers attends to the last ``WINDOW`` tokens by
their rotated distances, the second to all without positions, so nothing depends on how long a context is, but for how
sharp attention must be. Weights begin as an induction circuit (arXiv 2209.11895): heads of the first layer fetch the
tokens 1 to 4 places back; those of the second compare the last four tokens with the four before each position, and copy
what stands there. Training does the rest. The family is SmolLM3, which has such layers.

Shapes: B texts of T tokens, U phrases each, out of M, P tokens of a phrase; E model, H heads, D head size, C code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from octavo_bench.records.report import Say

VOCAB_SIZE = 128
PHRASE = 16  # tokens
KNOWN, COMPARED = 6, 4
"""A phrase's decoy begins with the same first tokens, but for one of the last of these."""
USES = 3  # of a phrase in a text, on average
LEARNING_RATE = 2e-3
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 256, 4, 2, 64
WINDOW, THETA, EPS = 8, 10.0, 1e-6
CODE = 40
"""Numbers that stand for a token in the initial weights: of itself, of each of the four before it, and of the next."""
LOCAL, WHOLE = 0, 1  # layers
SIZES: dict[str, tuple[int, ...]] = {
    "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN), "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, HIDDEN), "mlp.up_proj": (HIDDEN, HIDDEN),
    "mlp.down_proj": (HIDDEN, HIDDEN),
}  # fmt: skip
"""Of a layer's weights: its heads together, and the feed-forward layer, are as wide as the stream."""
SHORTEST = 256  # tokens of the first texts in training
KEYS = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "dtype": "float32",
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "rms_norm_eps": EPS,
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": WINDOW,
    "no_rope_layers": [1, 0], "rope_theta": THETA, "max_position_embeddings": 2**18, "tie_word_embeddings": False,
}  # fmt: skip
Weights = dict[str, Tensor]


class NeedleTraining(NamedTuple):
    """Steps, tokens of each, and tokens of the last steps' texts: lengths double evenly over the steps."""

    max_steps: int
    step_tokens: int
    longest: int


def logits(weights: Weights, ids_BT: Tensor) -> Tensor:
    """Of the token behind each position, [B, T, V]."""
    x_BTE = weights["model.embed_tokens.weight"][ids_BT]
    for number in (LOCAL, WHOLE):
        of = {name: weights[f"model.layers.{number}.{name}.weight"] for name in SIZES}
        normed_BTE = functional.rms_norm(x_BTE, (HIDDEN,), of["input_layernorm"], EPS)
        parts = [functional.linear(normed_BTE, of[f"self_attn.{part}_proj"]) for part in "qkv"]
        q, k, v = (part.view(*part.shape[:2], -1, HEAD_SIZE).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        if number == LOCAL:
            y_BHTD = _local(_rotated(q), _rotated(k), v)
        else:
            y_BHTD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTE = x_BTE + functional.linear(y_BHTD.transpose(1, 2).flatten(2), of["self_attn.o_proj"])
        normed_BTE = functional.rms_norm(x_BTE, (HIDDEN,), of["post_attention_layernorm"], EPS)
        gate, up = (functional.linear(normed_BTE, of[f"mlp.{part}_proj"]) for part in ("gate", "up"))
        x_BTE = x_BTE + functional.linear(functional.silu(gate) * up, of["mlp.down_proj"])
    normed_BTE = functional.rms_norm(x_BTE, (HIDDEN,), weights["model.norm.weight"], EPS)
    return functional.linear(normed_BTE, weights["lm_head.weight"])


def _frequencies() -> Tensor:
    return THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)


def _rotated(x_BHTD: Tensor) -> Tensor:
    angles = torch.arange(x_BHTD.shape[2], device=x_BHTD.device)[:, None] * _frequencies().to(x_BHTD.device)
    (first, second), cos, sin = x_BHTD.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHTD.dtype)


def _local(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Each block of ``WINDOW`` queries attends to the keys of its block and of the one before."""
    q, k, v = (x.reshape(*x.shape[:2], -1, WINDOW, HEAD_SIZE) for x in (q_BHTD, k_BHTD, v_BHTD))
    k, v = (torch.cat((functional.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), 3) for x in (k, v))
    at, key = torch.arange(WINDOW, device=q.device)[:, None], torch.arange(2 * WINDOW, device=q.device)
    is_seen = ((key > at) & (key <= at + WINDOW)).repeat(q.shape[2], 1, 1)
    is_seen[0] &= key >= WINDOW
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=is_seen).flatten(2, 3)


def circuit() -> Weights:
    """Where training begins. The residual stream is a constant and six codes, whose norms the scales keep near 1."""
    sizes = {f"model.layers.{i}.{name}.weight": size for i in (LOCAL, WHOLE) for name, size in SIZES.items()}
    sizes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB_SIZE, HIDDEN))
    weights = {name: torch.randn(size) * 0.01 if len(size) > 1 else torch.ones(size) for name, size in sizes.items()}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    slots = [slice(1 + CODE * i, 1 + CODE * (i + 1)) for i in range(HEADS + 2)]
    codes_VC = functional.normalize(torch.randn(VOCAB_SIZE, CODE), dim=-1)
    weights["model.embed_tokens.weight"][:, 0] = 1
    weights["model.embed_tokens.weight"][:, slots[0]] += codes_VC
    weights["lm_head.weight"][:, slots[-1]] += codes_VC
    (q, k, v, o), whole = (
        [weights[f"model.layers.{number}.self_attn.{part}_proj.weight"] for part in "qkvo"] for number in (LOCAL, WHOLE)
    )
    angles_HF = _frequencies() * -torch.arange(1, HEADS + 1)[:, None]
    q[:, 0] += 0.4 * torch.cat((angles_HF.cos(), angles_HF.sin()), 1).flatten()
    k[:, 0] += 0.4 * (torch.arange(HEAD_SIZE) < HEAD_SIZE // 2).float().repeat(KV_HEADS)
    queries_KGNPE = whole[0].view(KV_HEADS, -1, HEADS, HEAD_SIZE // HEADS, HIDDEN)
    keys_KNPE = whole[1].view(KV_HEADS, HEADS, HEAD_SIZE // HEADS, HIDDEN)
    for number in range(KV_HEADS):
        spread_DC = nn.init.orthogonal_(torch.empty(HEAD_SIZE, CODE))
        for values in (v, whole[2]):
            values.view(KV_HEADS, HEAD_SIZE, HIDDEN)[number, :, slots[0]] += spread_DC
        for head in range(number * HEADS // KV_HEADS, (number + 1) * HEADS // KV_HEADS):
            o.view(HIDDEN, HEADS, HEAD_SIZE)[slots[head + 1], head] += spread_DC.T / 11
            whole[3].view(HIDDEN, HEADS, HEAD_SIZE)[slots[-1], head] += spread_DC.T / 9
        for place in range(HEADS):
            seen_PC = 1.4 * nn.init.orthogonal_(torch.empty(HEAD_SIZE // HEADS, CODE))
            queries_KGNPE[number, :, place, :, slots[place]] += seen_PC
            keys_KNPE[number, place, :, slots[place + 1]] += seen_PC
    return weights


def texts(num_texts: int, length: int, device: torch.device) -> Tensor:
    """Texts [B, T] of phrases, each text with phrases of its own, of which every other one is the decoy of another."""
    num_units = length // PHRASE
    half = max(1, num_units // (2 * USES))
    book_BMP = torch.randint(VOCAB_SIZE, (num_texts, 2 * half, PHRASE), device=device)
    known = book_BMP[:, :half, :KNOWN]
    place = torch.randint(KNOWN - COMPARED, KNOWN, (num_texts, half, 1), device=device)
    other = (known.gather(2, place) + torch.randint(1, VOCAB_SIZE, place.shape, device=device)) % VOCAB_SIZE
    book_BMP[:, half:, :KNOWN] = known.scatter(2, place, other)
    order_BU = torch.randint(2 * half, (num_texts, num_units), device=device)
    return book_BMP.gather(1, order_BU[:, :, None].expand(-1, -1, PHRASE)).flatten(1)


def train(training: NeedleTraining, device: torch.device, seed: int, say: Say) -> Weights:
    """Trained weights on the device, in float32; products are of bfloat16 on a GPU."""
    torch.manual_seed(seed)
    weights = {name: weight.to(device).requires_grad_() for name, weight in circuit().items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.98), weight_decay=0.0)
    doublings = max(1, (training.longest // SHORTEST).bit_length())
    for step in range(training.max_steps):
        length = SHORTEST << (step * doublings // training.max_steps)
        rate = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - 0.95 * step / training.max_steps)
        optimizer.param_groups[0]["lr"] = rate
        ids_BT = texts(max(1, training.step_tokens // length), length, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits_BTV = logits(weights, ids_BT)
        loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == training.max_steps:
            say(f"step {step} of {training.max_steps}: texts of {length} tokens, loss {loss.item():.3f}")
    return weights


def write(weights: Weights, folder: Path) -> None:
    """Write a checkpoint in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.detach().cpu() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(KEYS, indent=2))
