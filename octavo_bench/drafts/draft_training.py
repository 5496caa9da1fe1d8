"""Trains an EAGLE-3 head on texts, beside the model whose hidden states it continues.

The head is in plain torch; its parameters have the names of the authors' checkpoints. It is trained as it is used
("training-time test", arXiv 2503.01840): in round j it continues its own output of round j - 1. An *anchor* is the last
row that has the model's hidden states. Round j of anchor s is at position s + j, gets the token behind that position,
and attends to the rows of round 0 up to s, and to rounds 1 to j of its own anchor.

Shapes: B texts of L tokens, T = B L rows, R of them are compared, S anchors, D width, K heads, H head dim, E hidden
states, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.models.drafters.head import drafted
from octavo.models.layer_cache import kv_groups
from octavo.models.parts import DecoderConfig
from octavo.models.registry import load_model, read_config
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.drafting.drafter import tap_layers
from octavo.runtime.kv_storage import KVStorage
from octavo.weights.checkpoint import Checkpoint
from octavo_bench.drafts.draft_texts import DraftText, DraftTexts

KeysValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Over embeddings and hidden states side by side."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim, self.group = H, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(2 * D, config.num_heads * H, bias=False)
        self.k_proj = nn.Linear(2 * D, config.num_kv_heads * H, bias=False)
        self.v_proj = nn.Linear(2 * D, config.num_kv_heads * H, bias=False)
        self.o_proj = nn.Linear(config.num_heads * H, D, bias=False)
        self.theta = config.ropes[0][0].theta

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
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        D, F = config.hidden_size, config.ffn_size
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
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

    def __init__(self, config: DecoderConfig, num_inputs: int, draft_vocab_size: int) -> None:
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


BLOCK = 32
ROUND_WEIGHT = 0.6
"""Weight of a round's loss, relative to the round before: a draft counts only if those before it are accepted."""
MATRIX_RATE = 4.0
"""Learning rate of matrices, relative to that of embeddings and norms."""
WARM_UP = 0.03


class Training(NamedTuple):
    """Sizes and limits of a training."""

    num_rounds: int
    """Tokens that the head drafts in training."""
    ffn_size: int | None
    """Width of the head's feed-forward layer; ``None``: that of the model's."""
    draft_vocab_size: int
    text_length: int
    """Tokens of a text; longer ones are cut."""
    batch_size: int
    learning_rate: float
    max_steps: int
    max_seconds: float
    seed: int = 0


class Drawn(NamedTuple):
    """Texts of a batch."""

    tokens_BL: Tensor
    rows_R: Tensor
    """Of all B L rows those whose next token is part of an answer, as far as every round has an anchor for them."""


class TeacherBatch(NamedTuple):
    """What the model computes for a batch of texts."""

    hidden_BLE: Tensor
    embedded_BLD: Tensor
    rows_R: Tensor
    target_RW: Tensor
    """Its distribution over the draft vocabulary."""
    most_likely_R: Tensor
    """Its most likely token of the whole vocabulary."""
    is_known_R: Tensor
    """Whether that is in the draft vocabulary."""


class Teacher:
    """The model, which computes whole texts of one length."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, training: Training) -> None:
        """Raises ``CheckpointError`` for a model that EAGLE-3 heads do not support."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        config = read_config(checkpoint.config)
        self.model = drafted(load_model(config, checkpoint, WeightFormat(dtype, device)).model, "eagle3")
        self.config: DecoderConfig = self.model.config
        L = self.config.num_layers
        self.layers = tuple(layer for layer in (2, L // 2, L - 3) if layer >= 0) if L > 4 else (0, L // 2, L)
        self._taps = tap_layers(self.model, self.layers)
        B, length, count = training.batch_size, training.text_length, -(-training.text_length // BLOCK)
        self._storage = KVStorage(config.cache, kv_groups(config.cache), [B * count], BLOCK, dtype, device)
        at_BL = torch.arange(length, device=device).repeat(B, 1)
        slots_BL = at_BL + BLOCK * count * torch.arange(B, device=device).unsqueeze(1)
        tables = torch.arange(B * count, dtype=torch.int32, device=device).view(B, count)
        starts = length * torch.arange(B + 1, dtype=torch.int32, device=device)
        lengths = torch.full((B,), length, dtype=torch.int32, device=device)
        self._positions_T = at_BL.flatten()
        self._rows = PagedRows((GroupRows(slots_BL.flatten(), tables),), starts, lengths, length)

    @torch.no_grad()
    def compute(self, drawn: Drawn, target_ids_W: Tensor) -> TeacherBatch:
        shape, flat_T = drawn.tokens_BL.shape, drawn.tokens_BL.flatten()
        x_TD = self.model.forward(flat_T, self._positions_T, self._storage.layers, self._rows).clone()
        states = [x_TD if tap is None else tap.x_TD for tap in (self._taps[layer] for layer in self.layers)]
        logits_RV = self.model.logits(x_TD[drawn.rows_R])
        is_known_V = torch.zeros(logits_RV.shape[1], dtype=torch.bool, device=flat_T.device)
        is_known_V[target_ids_W] = True
        most_likely_R = logits_RV.argmax(-1)
        return TeacherBatch(
            torch.cat(states, dim=1).view(*shape, -1),
            self.model.embedding(flat_T).view(*shape, -1),
            drawn.rows_R,
            logits_RV[:, target_ids_W].float().softmax(-1),
            most_likely_R,
            is_known_V[most_likely_R],
        )


class Trained(NamedTuple):
    """A head, and how its training went."""

    head: TrainableEagle3
    target_ids_W: Tensor
    layers: tuple[int, ...]
    config: DecoderConfig
    record: dict[str, Any]


def train(checkpoint: Checkpoint, device: torch.device, texts: DraftTexts, training: Training) -> Trained:
    """Train a head; what is held back is for the record's agreement."""
    torch.manual_seed(training.seed)
    teacher = Teacher(checkpoint, device, training)
    config = dataclasses.replace(teacher.config, ffn_size=training.ffn_size or teacher.config.ffn_size)
    used, held = texts
    target_ids_W, coverage = draft_vocabulary(used, min(training.draft_vocab_size, config.vocab_size))
    ids = target_ids_W.to(device)
    head = TrainableEagle3(config, len(teacher.layers), len(ids)).to(device)
    head.start_from(_rows_of_head(teacher, ids), teacher.model.norm.weight_D.float())
    optimisers = _optimisers(head)
    curve, started, step, progress = [], time.perf_counter(), 0, 0.0
    while progress < 1:
        batch = teacher.compute(_drawn(used, training, device, step), ids)
        rate = training.learning_rate * min(progress / WARM_UP + 0.01, 1.0, 1.01 - progress)
        losses, are_right = _rounds(head, batch, training.num_rounds, ids)
        head.zero_grad()
        torch.stack([ROUND_WEIGHT**i * loss for i, loss in enumerate(losses)]).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        for optimiser, factor in optimisers:
            optimiser.param_groups[0]["lr"] = factor * rate
            optimiser.step()
        step += 1
        seconds = time.perf_counter() - started
        progress = max(step / training.max_steps, seconds / training.max_seconds)
        if step == 1 or progress >= 1 or step % max(1, training.max_steps // 200) == 0:
            entry = {
                "step": step,
                "seconds": seconds,
                "losses": torch.stack(losses).detach(),
                "agreement": _shares(are_right),
            }
            curve.append({key: _rounded(value) for key, value in entry.items()})
    record = {
        "num_texts": len(used),
        "num_tokens": sum(len(text.tokens) for text in used),
        "vocabulary_coverage": round(coverage, 4),
        "num_parameters": sum(weight.numel() for weight in head.parameters()),
        "num_steps": step,
        "seconds": round(time.perf_counter() - started, 1),
        "curve": curve,
        **_held(head, teacher, held, training, ids),
    }
    return Trained(head, target_ids_W, teacher.layers, config, record)


def _optimisers(head: TrainableEagle3) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for matrices within the layer, AdamW for the rest; each with its share of the learning rate."""
    matrices = [weight for part in (head.fc, head.midlayer) for weight in part.parameters() if weight.ndim == 2]
    inner = set(matrices)
    rest = [weight for weight in head.parameters() if weight not in inner]
    muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [(muon, MATRIX_RATE), (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), 1.0)]


def draft_vocabulary(texts: Sequence[DraftText], size: int) -> tuple[Tensor, float]:
    """The most frequent tokens of the answers, in order, and the share of the answers that they cover."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt_tokens :])
    most = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(size) if token not in counts)
    most += [next(rest) for _ in range(size - len(most))]
    return torch.tensor(sorted(most)), sum(counts[token] for token in most) / max(1, counts.total())


def _rows_of_head(teacher: Teacher, ids: Tensor) -> Tensor:
    """The rows of the model's head for some tokens, float32 [W, D]."""
    parts = [weight.dense_NK for weight in teacher.model.head.weights]
    return torch.cat([part for part in parts if part is not None])[ids].float()


def _drawn(texts: Sequence[DraftText], training: Training, device: torch.device, number: int) -> Drawn:
    """Batch ``number``."""
    B, L, J = training.batch_size, training.text_length, training.num_rounds
    order = torch.randperm(
        len(texts), generator=torch.Generator().manual_seed(training.seed + number * B // len(texts))
    )
    tokens_BL, is_compared_BL = torch.zeros(B, L, dtype=torch.int64), torch.zeros(B, L, dtype=torch.bool)
    for row in range(B):
        text = texts[int(order[(number * B + row) % len(texts)])]
        kept = text.tokens[:L]
        tokens_BL[row, : len(kept)] = torch.tensor(kept)
        is_compared_BL[row, max(J, text.num_prompt_tokens - 1) : min(L - J, len(kept) - 1)] = True
    return Drawn(tokens_BL.to(device), is_compared_BL.flatten().nonzero().flatten().to(device))


def _rounds(
    head: TrainableEagle3, batch: TeacherBatch, num_rounds: int, ids: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The loss of each round, and the rows [R] for which its most likely token is the model's."""
    losses, are_right = [], []
    bf16, L = batch.hidden_BLE.device.type == "cuda", batch.hidden_BLE.shape[1]
    text_R, at_R = batch.rows_R // L, batch.rows_R % L
    num_known = batch.is_known_R.sum().clamp(min=1)
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        outputs = head(_like(head, batch.hidden_BLE), _like(head, batch.embedded_BLD), num_rounds)
        for number, x_BSD in enumerate(outputs):
            anchors_R = text_R * x_BSD.shape[1] + at_R - number - 1
            logits_RW = head.logits(x_BSD.flatten(0, 1).index_select(0, anchors_R))
            each_R = functional.cross_entropy(logits_RW.float(), batch.target_RW, reduction="none")
            losses.append((each_R * batch.is_known_R).sum() / num_known)
            are_right.append(ids[logits_RW.argmax(-1)] == batch.most_likely_R)
    return losses, are_right


def _shares(are_right: Sequence[Tensor]) -> Tensor:
    right_JR = torch.stack(list(are_right))
    return right_JR.sum(1) / max(1, right_JR.shape[1])


def _like(head: TrainableEagle3, x: Tensor) -> Tensor:
    return x.to(head.fc.weight.dtype)


@torch.no_grad()
def _held(
    head: TrainableEagle3, teacher: Teacher, texts: Sequence[DraftText], training: Training, ids: Tensor
) -> dict[str, list[float]]:
    """On texts that were not used: how often each round's most likely token is the model's, and how often those of all
    rounds before it are, too, from the same anchor on."""
    agreement, accepted, L = [], [], training.text_length
    for number in range(min(16, max(1, len(texts) // training.batch_size))):
        batch = teacher.compute(_drawn(texts, training, ids.device, number), ids)
        are_right = _rounds(head, batch, training.num_rounds, ids)[1]
        agreement.append(_shares(are_right))
        accepted.append(accepted_by_position(are_right, batch.rows_R, batch.hidden_BLE.shape[0] * L))
    return {
        "held_agreement": _rounded(torch.stack(agreement).mean(0)),
        "held_accepted_by_position": _rounded(torch.stack(accepted).mean(0)),
    }


def accepted_by_position(are_right: Sequence[Tensor], rows_R: Tensor, num_rows: int) -> Tensor:
    """How often the first drafts are right up to each one, by anchors whose rounds are all compared."""
    is_compared_T = torch.zeros(num_rows, dtype=torch.bool, device=rows_R.device)
    is_compared_T[rows_R] = True
    count = num_rows - len(are_right) + 1
    counts, chain, found = torch.ones_like(is_compared_T[:count]), torch.ones_like(is_compared_T[:count]), []
    for i in range(len(are_right)):
        counts = counts & is_compared_T[i : i + count]
    for i, is_right_R in enumerate(are_right):
        is_right_T = torch.zeros_like(is_compared_T)
        is_right_T[rows_R] = is_right_R
        chain = chain & is_right_T[i : i + count]
        found.append((chain & counts).sum() / counts.sum().clamp(min=1))
    return torch.stack(found)


def _rounded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [round(float(each), 4) for each in value]
    return value if isinstance(value, int) or not math.isfinite(value) else round(value, 2)
