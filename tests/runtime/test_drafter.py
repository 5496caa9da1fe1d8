"""Drafts that only the executor knows, from a model that is a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.proposer import DeviceDrafts
from octavo.engine.speculative.speculation import Speculation
from octavo.models.layer_cache import kv_groups
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.ops.drafting import NewestTokens
from octavo.runtime.drafting.drafter import DraftInputs
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Request
from tests.runtime.making import host_runner, stream_runner
from tests.runtime.test_model_runner import CPU, VOCAB, Loaded, requests, run, tokens_of
from tests.runtime.test_restricted_rows import EveryThird
from tests.tiers import one_in

NUM_DRAFTS = 3
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.6, "logprobs": 2},
    {"temperature": 0, "grammar": "every third"},
    {"temperature": 0.8},
]


class TableDrafter:
    """Proposes what followed each token before, and checks what it is given."""

    num_drafts = NUM_DRAFTS

    def __init__(self, table_V: Tensor, texts: list[list[int]], num_layers: int) -> None:
        self.table_V = table_V
        self.known = {tuple(text[:end]) for text in texts for end in range(len(text) + 1)}
        self.layers = (0, num_layers)
        self.texts: dict[int, dict[int, int]] = {}
        """Tokens by position, by batch index, as the rows have told."""
        self.num_checked = 0

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        drafts = [newest.tokens_S]
        for _ in newest.positions_KS:
            drafts.append(self.table_V[drafts[-1]])
        self._check(inputs)
        return torch.stack(drafts[1:], dim=1).int()

    def remember(self, inputs: DraftInputs) -> None:
        self._check(inputs)

    def _check(self, inputs: DraftInputs) -> None:
        """Tokens, positions and the tokens behind them must be those of the texts, up to the last accepted row."""
        starts = inputs.rows.cu_seqlens_q.tolist()
        for hidden in inputs.hidden.values():
            assert len(hidden) == len(inputs.token_ids_T)
        for s, index in enumerate(inputs.batch_indices_S.tolist()):
            if starts[s + 1] == starts[s]:
                continue  # padding
            text = self.texts.setdefault(index, {})
            for row in range(starts[s], int(inputs.last_rows_S[s]) + 1):
                position = int(inputs.positions_T[row])
                if position == 0:
                    text.clear()
                text[position], text[position + 1] = int(inputs.token_ids_T[row]), int(inputs.next_tokens_T[row])
            end = int(inputs.positions_T[int(inputs.last_rows_S[s])]) + 2
            if all(position in text for position in range(end)):
                assert tuple(text[position] for position in range(end)) in self.known
                self.num_checked += 1


def some_requests() -> list[Request]:
    return [
        Request(r.id, r.prompt_tokens, SamplingParams(**KINDS[r.id % 4]), r.max_tokens, r.seed) for r in requests(12)
    ]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def reference_operations() -> Iterator[None]:
    with dispatch.only(REFERENCE):
        yield


def with_grammars(engine: Engine) -> Engine:
    engine.grammars = EveryThird()
    return engine


@one_in(3)
@pytest.mark.parametrize("num_blocks", [100, 20])
@pytest.mark.parametrize(("kind", "depth"), [("host", 1), ("stream", 1), ("stream", 2), ("stream", 3)])
def test_no_token_changes(loaded: Loaded, kind: str, depth: int, num_blocks: int) -> None:
    some = some_requests()
    want = tokens_of(run(with_grammars(loaded.engine()), some))
    texts = [request.prompt_tokens + want[request.id] for request in some]
    table_V = torch.zeros(VOCAB, dtype=torch.int64)
    for text in texts:
        table_V[text[:-1]] = torch.tensor(text[1:])
    drafter = TableDrafter(table_V, texts, loaded.config.num_layers)
    limits = StepLimits(8, 32, 30, max_drafts=NUM_DRAFTS, num_drafts=NUM_DRAFTS)
    groups = kv_groups(loaded.config.cache)
    storage = KVStorage(loaded.config.cache, groups, [num_blocks], 4, torch.float32, CPU)
    layers = list(loaded.model.layers)
    make = host_runner if kind == "host" else stream_runner
    runner = make(loaded.model, storage, VOCAB, limits, drafter=drafter)
    scheduler = Scheduler(
        KVCache(num_blocks, 4, enable_prefix_caching=False),
        max_num_seqs=8,
        max_num_batched_tokens=32,
        speculation=Speculation(DeviceDrafts(NUM_DRAFTS), NUM_DRAFTS),
    )
    engine = with_grammars(Engine(scheduler, runner, depth=depth))
    found = tokens_of(run(engine, some))
    loaded.model.layers = layers
    assert found == want
    stats = engine.stats()
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert drafter.num_checked > 50
    assert (stats.num_preemptions > 0) is (num_blocks == 20)
