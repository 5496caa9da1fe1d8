"""Trains an EAGLE-3 head on texts, beside the model whose hidden states it continues.

Shapes: B texts of L tokens, T = B L rows, S anchors, D model, E hidden states, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.models.drafters.head import llama_like
from octavo.models.layer_cache import kv_groups
from octavo.models.llama import LlamaConfig
from octavo.models.registry import load_model, read_config
from octavo.ops.attention import GroupRows, PagedRows
from octavo.quant.stored import WeightFormat
from octavo.runtime.drafter import tap_layers
from octavo.runtime.kv_storage import KVStorage
from octavo.weights.checkpoint import Checkpoint
from octavo_bench.draft_texts import Text
from octavo_bench.eagle3_module import Eagle3

BLOCK = 32
ROUND_WEIGHT = 0.8
"""Weight of a round's loss, relative to the round before."""
WARM_UP = 0.03


class Training(NamedTuple):
    """Sizes and limits of a training."""

    num_rounds: int
    """Tokens that the head drafts in training."""
    draft_vocab_size: int
    text_length: int
    """Tokens of a text; longer ones are cut."""
    batch_size: int
    learning_rate: float
    max_steps: int
    max_seconds: float
    seed: int


class Batch(NamedTuple):
    """What the model computes for a batch of texts."""

    hidden_BLE: Tensor
    embedded_BLD: Tensor
    logits_BLW: Tensor
    """Of the draft vocabulary."""
    is_right_BL: Tensor
    """Rows whose most likely next token is in the draft vocabulary, and part of an answer."""


class Teacher:
    """The model, which computes whole texts of one length."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, training: Training) -> None:
        """Raises ``CheckpointError`` for a model that EAGLE-3 heads do not support."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        config = read_config(checkpoint.config)
        self.model = llama_like(load_model(config, checkpoint, WeightFormat(dtype, device)).model, "eagle3")
        self.config: LlamaConfig = self.model.config
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
    def compute(self, tokens_BL: Tensor, answers_BL: Tensor, target_ids_W: Tensor) -> Batch:
        """``answers``: rows whose next token is part of an answer."""
        shape, flat_T = tokens_BL.shape, tokens_BL.flatten()
        x_TD = self.model.forward(flat_T, self._positions_T, self._storage.layers, self._rows).clone()
        states = [x_TD if tap is None else tap.x_TD for tap in (self._taps[layer] for layer in self.layers)]
        logits_TV = self.model.logits(x_TD)
        is_known_V = torch.zeros(logits_TV.shape[1], dtype=torch.bool, device=flat_T.device)
        is_known_V[target_ids_W] = True
        return Batch(
            torch.cat(states, dim=1).view(*shape, -1),
            self.model.embedding(flat_T).view(*shape, -1),
            logits_TV[:, target_ids_W].view(*shape, -1),
            is_known_V[logits_TV.argmax(-1)].view(shape) & answers_BL,
        )


class Trained(NamedTuple):
    """A head, and how its training went."""

    head: Eagle3
    target_ids_W: Tensor
    layers: tuple[int, ...]
    config: LlamaConfig
    record: dict[str, Any]


def train(checkpoint: Checkpoint, device: torch.device, texts: Sequence[Text], training: Training) -> Trained:
    """Train a head on all but the last tenth of the texts, which is for the record's agreement."""
    torch.manual_seed(training.seed)
    teacher = Teacher(checkpoint, device, training)
    config = teacher.config
    target_ids_W, coverage = draft_vocabulary(texts, min(training.draft_vocab_size, config.vocab_size))
    ids = target_ids_W.to(device)
    head = Eagle3(config, len(teacher.layers), len(ids)).to(device)
    head.start_from(_rows_of_head(teacher, ids), teacher.model.norm.weight_D.float())
    optimiser = torch.optim.AdamW(head.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    num_held = max(training.batch_size, len(texts) // 10)
    used, held = texts[:-num_held], texts[-num_held:]
    curve, started, step, progress = [], time.perf_counter(), 0, 0.0
    while progress < 1:
        batch = teacher.compute(*_drawn(used, training, device, step), ids)
        for group in optimiser.param_groups:
            group["lr"] = training.learning_rate * min(progress / WARM_UP + 0.01, 1.0, 1.01 - progress)
        losses, agreements = _rounds(head, batch, training.num_rounds)
        optimiser.zero_grad()
        torch.stack([ROUND_WEIGHT**i * loss for i, loss in enumerate(losses)]).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
        step += 1
        seconds = time.perf_counter() - started
        progress = max(step / training.max_steps, seconds / training.max_seconds)
        if step == 1 or progress >= 1 or step % max(1, training.max_steps // 200) == 0:
            entry = {
                "step": step,
                "seconds": seconds,
                "losses": torch.stack(losses).detach(),
                "agreement": torch.stack(agreements),
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
        "held_agreement": _held_agreement(head, teacher, held, training, ids),
    }
    return Trained(head, target_ids_W, teacher.layers, config, record)


def draft_vocabulary(texts: Sequence[Text], size: int) -> tuple[Tensor, float]:
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


def _drawn(texts: Sequence[Text], training: Training, device: torch.device, number: int) -> tuple[Tensor, Tensor]:
    """Batch ``number``: tokens [B, L], and the rows whose next token is part of an answer [B, L]."""
    B, L = training.batch_size, training.text_length
    order = torch.randperm(
        len(texts), generator=torch.Generator().manual_seed(training.seed + number * B // len(texts))
    )
    tokens_BL, answers_BL = torch.zeros(B, L, dtype=torch.int64), torch.zeros(B, L, dtype=torch.bool)
    for row in range(B):
        text = texts[int(order[(number * B + row) % len(texts)])]
        kept = text.tokens[:L]
        tokens_BL[row, : len(kept)] = torch.tensor(kept)
        answers_BL[row, max(0, text.num_prompt_tokens - 1) : len(kept) - 1] = True
    return tokens_BL.to(device), answers_BL.to(device)


def _rounds(head: Eagle3, batch: Batch, num_rounds: int) -> tuple[list[Tensor], list[Tensor]]:
    """The loss of each round, and how often its most likely token is the model's."""
    losses, agreements = [], []
    bf16 = batch.hidden_BLE.device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        for number, logits_BSW in enumerate(
            head(_like(head, batch.hidden_BLE), _like(head, batch.embedded_BLD), num_rounds)
        ):
            S, ahead = logits_BSW.shape[1], number + 1
            target_BSW = batch.logits_BLW[:, ahead : ahead + S].float()
            counts_BS = batch.is_right_BL[:, ahead : ahead + S]
            each_BS = -(target_BSW.softmax(-1) * logits_BSW.float().log_softmax(-1)).sum(-1)
            num_rows = counts_BS.sum().clamp(min=1)
            losses.append((each_BS * counts_BS).sum() / num_rows)
            same_BS = logits_BSW.argmax(-1) == target_BSW.argmax(-1)
            agreements.append((same_BS & counts_BS).sum() / num_rows)
    return losses, agreements


def _like(head: Eagle3, x: Tensor) -> Tensor:
    return x.to(head.fc.weight.dtype)


@torch.no_grad()
def _held_agreement(
    head: Eagle3, teacher: Teacher, texts: Sequence[Text], training: Training, ids: Tensor
) -> list[float]:
    """How often each round's most likely token is the model's, on texts that were not used."""
    found = []
    for number in range(min(8, max(1, len(texts) // training.batch_size))):
        batch = teacher.compute(*_drawn(texts, training, ids.device, number), ids)
        found.append(torch.stack(_rounds(head, batch, training.num_rounds)[1]))
    return [round(float(value), 4) for value in torch.stack(found).mean(0)]


def _rounded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [round(float(each), 4) for each in value]
    return value if isinstance(value, int) or not math.isfinite(value) else round(value, 2)
