"""Rows of given logits, sampled as an engine samples them: by a runner around a model that gives just these logits."""

from __future__ import annotations

from collections.abc import Sequence as Many
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor

from octavo.engine.runner.persistent_batch import PersistentBatch
from octavo.engine.runner.step_encoder import StepEncoder
from octavo.engine.runner.step_runner import StepRunner
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.steps.graph_shapes import exact_shape
from octavo.steps.limits import StepLimits
from octavo.types import Request, Scheduled, Sequence
from tests.ops.row_sampler import Choice, Row
from tests.runtime.making import CPU

BLOCK_SIZE = 16


class RowRunner:
    """Samples each row as the next token of a sequence of its own."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits_RV: Tensor, rows: Many[Row]) -> list[Choice]:
        """See ``tests.ops.row_sampler.Sampler``."""
        model: Any = SimpleNamespace(forward=lambda *_: logits_RV, logits=lambda x_RV: x_RV)
        storage: Any = SimpleNamespace(
            device=CPU,
            pools=[[]],
            layers=[],
            block_size=BLOCK_SIZE,
            num_groups=1,
            copy_slots=None,
            copy_state=None,
            routes_NC=None,
            context=None,
            sequences=None,
            num_blocks=[max(row.position for row in rows) // BLOCK_SIZE + 1],
        )
        max_blocks = max(row.position for row in rows) // BLOCK_SIZE + 1
        limits = StepLimits(len(rows), len(rows), max_blocks)
        executor = HostExecutor(model, storage, self._vocab_size, limits)
        batch = PersistentBatch(limits.max_num_seqs, limits.max_blocks)
        runner = StepRunner(executor, StepEncoder(batch, BLOCK_SIZE, self._vocab_size, exact_shape))
        plan = [_last_token(i, row) for i, row in enumerate(rows)]
        masks = {i: [row.mask] for i, row in enumerate(rows) if row.mask is not None}
        return [
            Choice(s.tokens[0] if s.tokens else 0, s.logprobs[0] if s.logprobs else None, s.error)
            for s in runner.submit(plan).sample(masks)
        ]


def _last_token(number: int, row: Row) -> Scheduled:
    params = row.params if row.mask is None else msgspec.structs.replace(row.params, grammar="a mask")
    tokens = [token for token in row.tokens[: row.position] if token is not None]
    tokens += [0] * (row.position - len(tokens))
    request = Request(
        number,
        tokens[: row.num_prompt_tokens],
        params,
        max_tokens=row.position,
        seed=row.seed,
        eos_token_ids=tuple(sorted(row.stop_token_ids)),
        banned_sequences=tuple(row.banned_sequences),
        output_tokens=tokens[row.num_prompt_tokens :],
    )
    seq = Sequence(request)
    seq.groups[0].block_table = [0] * (row.position // BLOCK_SIZE + 1)
    return Scheduled(seq, row.position - 1, (tokens[-1],), (), True, seq.epoch)
