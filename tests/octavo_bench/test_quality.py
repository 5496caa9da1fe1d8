"""Formats beside float32: nothing apart where the arithmetic is the same, and figures as they are defined."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.registry import read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo_bench import quality
from octavo_bench.dummy_models import make_tokenizer
from tests.models import families
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.writers import compressed, quantise


def windows(count: int, length: int) -> list[list[int]]:
    return torch.randint(97, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig.from_flat({"model": str(folder), "kv_cache_memory": 0.05})


def test_windows_are_scored_as_transformers_scores_them(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    form = WeightFormat(torch.float32, torch.device("cpu"))
    scorer = quality.Scorer(read_config(source.config), source, form, torch.float32, 60)
    for tokens in windows(2, 60):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        torch.testing.assert_close(scorer.logprobs(scorer.outputs(tokens)), expected, rtol=1e-4, atol=1e-4)


def test_the_divergence_is_that_of_the_definition() -> None:
    exact, found = torch.randn(2, 5, 31).double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(found, exact, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(quality.divergences(found, exact), expected)
    assert quality.divergences(exact, exact).abs().max() == 0


@pytest.mark.nightly
@needs_float_kernels
def test_each_format_is_a_row(tmp_path: Path) -> None:
    model, parts = make_checkpoint(tmp_path, "gqa"), windows(3, 80)
    quantise(tmp_path, tmp_path / "w8", compressed("int-quantized", num_bits=8, type="int", strategy="channel"))
    config = config_of(tmp_path)
    compared = quality.variants(
        config, ["float32", "bf16", "int8", "int4+lm_head"], [tmp_path / "w8", tmp_path / "w8+lm_head"]
    )
    kept: list[list[dict[str, Any]]] = []
    rows = {row["format"]: row for row in quality.measure(config, compared, parts, 1, lambda line: None, kept.append)}
    assert [sum("decode_tok_s" in row for row in found) for found in kept] == list(range(len(rows) + 1))
    assert list(rows) == ["float32", "bf16", "int8", "int4+lm_head", "w8", "w8+lm_head"]
    with torch.inference_mode():
        losses = [model(torch.tensor([part]), labels=torch.tensor([part])).loss for part in parts]
    assert rows["float32"]["perplexity"] == pytest.approx(float(torch.stack(losses).mean().exp()), abs=0.01)
    assert rows["float32"]["mean_kl"] < 1e-6
    assert rows["float32"]["same_top_token"] == 1
    assert 1e-6 < rows["int8"]["mean_kl"] < rows["int4+lm_head"]["mean_kl"] < 1
    assert rows["w8"]["mean_kl"] == pytest.approx(rows["int8"]["mean_kl"], rel=0.2)
    sizes = [rows[name]["weights_bytes"] for name in ("float32", "bf16", "int8", "int4+lm_head")]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["w8+lm_head"]["weights_bytes"] < rows["w8"]["weights_bytes"]
    assert all(row["decode_tok_s"]["median"] > 0 for row in rows.values())


def test_needles_are_planted_evenly_and_asked_for_at_the_end() -> None:
    size, count = quality.NEEDLE_TOKENS, quality.NEEDLES
    for window in quality.with_needles(windows(2, 300)):
        assert len(window) == 300
        ends = [window[len(window) - size * (i + 1) : len(window) - size * i] for i in range(count)]
        body = window[: -size * count]
        places = sorted(at for at in range(len(body)) for needle in ends if body[at : at + size] == needle)
        assert len(places) == count
        assert all(later - earlier > size for earlier, later in itertools.pairwise(places))
    with pytest.raises(ConfigError, match="needles: windows must have at least"):
        quality.with_needles(windows(1, 100))


def test_a_model_that_copies_finds_every_needle(tmp_path: Path) -> None:
    """One that knows what it will be asked, in place of a model."""
    families.make_checkpoint(tmp_path, "llama/gqa", max_position_embeddings=300)
    [window] = quality.with_needles(windows(1, 300))
    reference = quality.Reference(config_of(tmp_path), [window])

    class Copier:
        device = torch.device("cpu")

        def outputs(self, tokens: list[int]) -> torch.Tensor:
            return torch.tensor([*tokens[1:], 0])

        def logprobs(self, outputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(outputs, reference.config.vocab_size).float().mul(9).log_softmax(-1)

    copier: Any = Copier()
    share, nats = quality.score(reference, copier, has_needles=True).needles or (0.0, 1.0)
    assert share == 1
    assert nats < 0.05
    found = quality.score(reference, reference.scorer, has_needles=True)
    assert found.needles is not None
    assert found.needles[0] < 0.5


@pytest.mark.parametrize(("name", "message"), [("bf16+kv_int3", "ends with none of"), ("bf17+kv_fp8", "is not one of")])
def test_a_cache_that_is_not_known_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        quality.variants(config_of(tmp_path), [name], [])
    [variant] = quality.variants(config_of(tmp_path), ["bf16+kv_fp8"], [])
    assert variant.config.cache.kv_cache_dtype == "fp8"


def test_the_command_prints_a_table_and_writes_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    families.make_checkpoint(tmp_path, "llama/gqa", vocab_size=1000)
    make_tokenizer(1000).save(str(tmp_path / "tokenizer.json"))
    record = tmp_path / "record.json"
    options = ["--formats", "float32", "--tokens", "60", "--window", "30", "--rounds", "0", "--output", str(record)]
    assert main(["bench", "quality", str(tmp_path), *options]) == 0
    assert "same top-1" in capsys.readouterr().out
    result = json.loads(record.read_text())["result"]
    assert (result["tokens"], result["window"], [row["format"] for row in result["rows"]]) == (60, 30, ["float32"])


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gqa")
    config = config_of(tmp_path)
    for name in ("int5", "bf16+lm_head"):
        with pytest.raises(ConfigError, match=f"formats: '{name.replace('+', '.')}' is not one of auto, float32"):
            quality.variants(config, [name], [])
    with pytest.raises(ConfigError, match=r"checkpoints: .*nothing does not exist"):
        quality.variants(config, [], [tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="it has no tokenizer"):
        quality.windows_of(config.model, quality.read_text(None), 100, 50)
    with pytest.raises(ConfigError, match="the model's context is 128"):
        quality.measure(config, [], windows(1, 129), 0, lambda line: None, lambda rows: None)
    other = tmp_path / "other"
    make_checkpoint(other, "gqa")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 96}))
    compared = quality.variants(config, [], [other])
    with pytest.raises(ConfigError, match="other: its vocabulary has 96 tokens, the model's 97"):
        quality.measure(config, compared, windows(1, 20), 0, lambda line: None, lambda rows: None)
