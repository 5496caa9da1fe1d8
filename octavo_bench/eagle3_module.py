"""An EAGLE-3 head in plain torch, for training; its parameters have the names of the authors' checkpoints.

It is trained as it is used ("training-time test", arXiv 2503.01840): in round j it continues its own output of round
j - 1. An *anchor* is the last row that has the model's hidden states. Round j of anchor s is at position s + j, gets
the token behind that position, and attends to the rows of round 0 up to s, and to rounds 1 to j of its own anchor.

Shapes: B texts, S anchors, D width, K heads, H head dim, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.models.llama import LlamaConfig

KeysValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Over embeddings and hidden states side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim, self.group = H, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(2 * D, config.num_heads * H, bias=False)
        self.k_proj = nn.Linear(2 * D, config.num_kv_heads * H, bias=False)
        self.v_proj = nn.Linear(2 * D, config.num_kv_heads * H, bias=False)
        self.o_proj = nn.Linear(config.num_heads * H, D, bias=False)
        self.theta = config.rope.theta

    def forward(self, x_BSE: Tensor, rounds: list[KeysValues]) -> Tensor:
        """The output [B, S, D] of the next round, whose keys and values are added to ``rounds``."""
        S, number = x_BSE.shape[1], len(rounds)
        at_S = torch.arange(S, device=x_BSE.device) + number
        q = self._rotated(self._heads(self.q_proj(x_BSE)), at_S)
        k = self._rotated(self._heads(self.k_proj(x_BSE)), at_S).repeat_interleave(self.group, 1)
        v = self._heads(self.v_proj(x_BSE)).repeat_interleave(self.group, 1)
        rounds.append((k, v))
        (first_k, first_v), later = rounds[0], rounds[1:]
        is_later = torch.ones(S, S, dtype=torch.bool, device=x_BSE.device).triu(1)
        scores = [(q @ first_k.mT).float().masked_fill(is_later, -torch.inf)]
        scores += [(q * keys).float().sum(-1, keepdim=True) for keys, _ in later]
        weights = (torch.cat(scores, dim=-1) * self.head_dim**-0.5).softmax(-1).to(v.dtype)
        out = weights[..., :S] @ first_v
        for i, (_, values) in enumerate(later):
            out = out + weights[..., S + i : S + i + 1] * values
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x_BSN: Tensor) -> Tensor:
        B, S, _ = x_BSN.shape
        return x_BSN.view(B, S, -1, self.head_dim).transpose(1, 2)

    def _rotated(self, x_BKSH: Tensor, at_S: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = at_S[:, None] / self.theta ** (torch.arange(half, device=at_S.device) / half)
        cos, sin = angles.cos().to(x_BKSH.dtype), angles.sin().to(x_BKSH.dtype)
        low, high = x_BKSH[..., :half], x_BKSH[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D, F = config.hidden_size, config.ffn_size
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.norm_eps
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(D, eps), nn.RMSNorm(D, eps)
        self.post_attention_layernorm = nn.RMSNorm(D, eps)
        self.self_attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, embedded_BSD: Tensor, x_BSD: Tensor, rounds: list[KeysValues]) -> Tensor:
        joined = torch.cat((self.input_layernorm(embedded_BSD), self.hidden_norm(x_BSD)), dim=-1)
        x_BSD = x_BSD + self.self_attn(joined, rounds)
        result: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return result


class TrainableEagle3(nn.Module):
    """The head; ``config`` has the sizes of its layer."""

    def __init__(self, config: LlamaConfig, num_inputs: int, draft_vocab_size: int) -> None:
        super().__init__()
        D = config.hidden_size
        self.fc = nn.Linear(num_inputs * D, D, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(D, config.norm_eps)
        self.lm_head = nn.Linear(D, draft_vocab_size, bias=False)

    @torch.no_grad()
    def start_from(self, head_WD: Tensor, norm_D: Tensor) -> None:
        """Start with the model's head and final norm, and with the last of the hidden states."""
        self.lm_head.weight.copy_(head_WD)
        self.norm.weight.copy_(norm_D)
        D = len(norm_D)
        self.fc.weight.mul_(0.1)[:, -D:].add_(torch.eye(D, device=self.fc.weight.device))
        for last in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            last.weight.mul_(0.1)

    def forward(self, hidden_BLE: Tensor, embedded_BLD: Tensor, num_rounds: int) -> Iterator[Tensor]:
        """The output [B, S, D] of each round, for S = L - num_rounds - 1 anchors; the last rows have none."""
        S = hidden_BLE.shape[1] - num_rounds - 1
        x_BSD, rounds = self.fc(hidden_BLE[:, :S]), list[KeysValues]()
        for number in range(num_rounds):
            x_BSD = self.midlayer(embedded_BLD[:, number + 1 : number + 1 + S], x_BSD, rounds)
            yield x_BSD

    def logits(self, x: Tensor) -> Tensor:
        """The logits [..., W] of outputs [..., D]."""
        result: Tensor = self.lm_head(self.norm(x))
        return result
