"""Probabilities beside those of float32: nothing apart where the arithmetic is the same."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.models.registry import read_config
from octavo.quant.stored import WeightFormat
from octavo_bench import quality
from tests.models.checkpoints import FolderSource, make_checkpoint


def test_windows_are_scored_as_transformers_scores_them(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    scorer = quality.Scorer(read_config(source.config), source, WeightFormat(torch.float32, quality.CPU), torch.float32)
    for seed in range(2):
        tokens = torch.randint(97, (60,), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            expected = reference(tokens[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(scorer.logprobs(tokens.tolist()), expected, rtol=1e-4, atol=1e-4)


def test_the_divergence_is_that_of_the_definition() -> None:
    exact, found = torch.randn(2, 5, 31).double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(found, exact, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(quality.divergences(found, exact), expected)
    assert quality.divergences(exact, exact).abs().max() == 0
