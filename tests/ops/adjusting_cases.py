"""Rows whose requests change their logits in all ways, together and apart, and what the sampler makes of them."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import force_setattr
from torch import Tensor

from octavo.ops.sampling.sampling import BANNED, Adjustments
from octavo.sampling_params import SamplingParams
from tests.ops.row_sampler import Row, process


def make_rows(R: int, V: int, seed: int = 0) -> list[Row]:
    """Row r asks for what the bits of r say; tokens repeat, and some ids are outside the vocabulary."""
    rng = np.random.default_rng(seed)
    rows = []
    for r in range(R):
        num_prompt, num_output = (int(n) for n in rng.integers(1, 1500, 2))
        few = rng.integers(0, V + 2, 40)
        tokens = np.concatenate((rng.integers(0, V + 2, num_prompt), few[rng.integers(0, 40, num_output)])).tolist()
        ids = rng.choice(V + 2, min(V, 300), replace=False)
        params = SamplingParams(
            frequency_penalty=float(rng.uniform(-2, 2)) if r & 2 else 0.0,
            presence_penalty=float(rng.uniform(-2, 2)) if r & 2 else 0.0,
            logit_bias={int(i): float(rng.uniform(-100, 100)) for i in ids} if r & 4 else {},
            min_tokens=2000 if r & 8 else 0,
            max_tokens=3000,
        )
        if r & 1:  # with one that no request may have, so that logits get out of range
            force_setattr(params, "repetition_penalty", float(rng.choice([0.5, 1.3, 1e-40])))
        mask = rng.integers(0, 256, int(rng.integers(1, -(-V // 8) + 1)), dtype=np.uint8) if r & 16 else None
        stops = frozenset(int(i) for i in rng.integers(0, V + 2, 9))
        banned = tuple((int(i),) for i in rng.integers(0, V + 2, 100)) if r % 3 == 2 else ()
        rows.append(Row(params, 0, len(tokens), [*tokens, 1, 2, 3], num_prompt, stops, mask, banned))
    return rows


def packed(rows: list[Row], V: int) -> Adjustments:
    """The rows as the op takes them; slots are in no order, and what is not used is full of valid ids."""
    R = len(rows)
    slots = torch.randperm(R + 3, generator=torch.Generator().manual_seed(0))[:R].int()
    history = torch.zeros(R + 3, 3100, dtype=torch.int32)
    bias_ids, biases = torch.full((R, 400), -1, dtype=torch.int32), torch.full((R, 400), 50.0)
    banned = torch.full((R, 10), -1, dtype=torch.int32)
    masks, has_mask = torch.zeros(R, -(-V // 8), dtype=torch.uint8), torch.zeros(R, dtype=torch.bool)
    for r, row in enumerate(rows):
        params = row.params
        history[slots[r], : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        if params.repetition_penalty == 1 and params.frequency_penalty == params.presence_penalty == 0:
            slots[r] = -1
        banned_ids = [] if row.must_stop else row.completing
        for i, (token, bias) in enumerate({**params.logit_bias, **dict.fromkeys(banned_ids, BANNED)}.items()):
            bias_ids[r, i], biases[r, i] = token, bias
        if row.bans_stops and not row.must_stop:
            banned[r, : len(row.stop_token_ids)] = torch.tensor(sorted(row.stop_token_ids), dtype=torch.int32)
        if row.mask is not None:
            masks[r, : len(row.mask)], has_mask[r] = torch.from_numpy(row.mask), True
    return Adjustments(
        history,
        slots,
        torch.tensor([row.position for row in rows], dtype=torch.int32),
        torch.tensor([row.num_prompt_tokens for row in rows], dtype=torch.int32),
        torch.tensor([row.params.repetition_penalty for row in rows]),
        torch.tensor([row.params.frequency_penalty for row in rows]),
        torch.tensor([row.params.presence_penalty for row in rows]),
        bias_ids,
        biases,
        banned,
        masks,
        has_mask,
    )


def by_process(logits_RV: Tensor, rows: list[Row]) -> Tensor:
    """What the sampler's steps 2 to 5 give, with finite numbers for infinities."""
    processed = torch.stack([process(x_V, row) for x_V, row in zip(logits_RV.float(), rows, strict=True)])
    return processed.clamp(BANNED, -BANNED)
