"""What a format of weights costs and saves: distance from float32 on a text, perplexity, bytes, decoding speed.

The reference makes every weight of the model dense and computes, and caches, in float32. A text is divided into
windows, each computed without those before it. For each position, the Kullback-Leibler divergence (KL) of a format's
distribution of the next token from the reference's, in nats, over the whole vocabulary.

Shapes: T tokens of a window, R of these at a time, D model, V vocabulary.

Which formats and which text ``octavo bench quality`` compares.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.build.device_settings import resolve_device, resolve_kv_dtype, weight_format
from octavo.config import EngineConfig, ModelSettings, to_flat
from octavo.errors import ConfigError
from octavo.models.layer_cache import kv_groups
from octavo.models.model_config import ModelConfig
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.kv_storage import KVStorage
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model
from octavo_bench.offline import OfflineBench, bench_config
from octavo_bench.records.report import Say, spread

HEAD = "+lm_head"
FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Settings of each format. "auto" is what ``octavo serve`` makes of the checkpoint by itself."""
CACHE = "+kv_"
"""Behind it, the data type of keys and values."""
CACHES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
NEEDLES, NEEDLE_TOKENS = 4, 16
"""Needles of a window, and tokens of each, of which the second half is asked for."""
PACKED = ("auto", "fp8", "int8", "int4")
"""Formats whose map to logits can be quantised too."""


class Variant(NamedTuple):
    """A model in one format."""

    name: str
    config: EngineConfig


class ScoredText(NamedTuple):
    """What is scored."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """The first digits of its SHA-256."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:12]


def variants(config: EngineConfig, formats: Sequence[str], checkpoints: Sequence[Path]) -> list[Variant]:
    """The model in each format, then other checkpoints of it as they are, or with a head in int8: ``PATH+lm_head``.

    Raises ``ConfigError`` for a format that is not known, and a checkpoint that is not there.
    """
    found = [Variant(name, _with(config, _settings(name))) for name in formats]
    for path in checkpoints:
        own = path.with_name(path.name.removesuffix(HEAD))
        if not own.exists():
            raise ConfigError(f"checkpoints: {own} does not exist")
        settings = _settings("auto" + HEAD if own != path else "auto")
        found.append(Variant(path.name, _with(config, {**settings, "model": str(own)})))
    return found


def _settings(name: str) -> dict[str, Any]:
    weights, has_cache, cache = name.partition(CACHE)
    format, has_head = weights.removesuffix(HEAD), weights.endswith(HEAD)
    if format not in FORMATS or (has_head and format not in PACKED):
        heads = ", ".join(each + HEAD for each in PACKED)
        raise ConfigError(f"formats: {name!r} is not one of {', '.join(FORMATS)}, {heads}")
    if has_cache and cache not in CACHES:
        raise ConfigError(f"formats: {name!r} ends with none of {', '.join(CACHE + each for each in CACHES)}")
    kinds = {"kv_cache_dtype": cache} if has_cache else {}
    return {"dtype": "auto", "quantization": None, **FORMATS[format], "quantize_lm_head": has_head, **kinds}


def _with(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    return EngineConfig.from_flat({**to_flat(config), **changes})


def read_text(path: Path | None) -> ScoredText:
    """A file; by default every second help topic of Python, which is text that every installation has."""
    if path is not None:
        try:
            return ScoredText(path.name, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text: {path} cannot be read: {error}") from None
    from pydoc_data.topics import topics  # a large module

    return ScoredText("pydoc_data.topics, every second", "\n".join(topics[name] for name in sorted(topics)[::2]))


def windows_of(settings: ModelSettings, text: ScoredText, num_tokens: int, window: int) -> list[list[int]]:
    """The first ``num_tokens`` tokens of the text in windows, each after the token that begins a text, if there is one.

    Raises ``ConfigError`` for a model without a tokenizer, and for a text that is too short.
    """
    if num_tokens < 2 or window < 2:
        raise ConfigError("tokens and window must be at least 2")
    tokenizer = load_tokenizer(Path(settings.tokenizer or resolve_model(settings)))
    if tokenizer is None:
        raise ConfigError("model: it has no tokenizer; name another folder or file with --tokenizer")
    tokens = tokenizer.encode(text.content, add_special_tokens=False)
    if len(tokens) < num_tokens:
        raise ConfigError(f"text: {text.name} has {len(tokens)} tokens; {num_tokens} were asked for")
    begin, step = _beginning(tokenizer), window - len(_beginning(tokenizer))
    parts = [tokens[first : min(first + step, num_tokens)] for first in range(0, num_tokens, step)]
    return [begin + part for part in parts if len(begin + part) > 1]


def with_needles(windows: Sequence[list[int]]) -> list[list[int]]:
    """Plant sequences of the text's tokens in random order, evenly over each window, and repeat them at its end.

    A model that attends so far back knows after half a needle how it goes on. Raises ``ConfigError`` for short windows.
    """
    rng, known, size = random.Random(0), sorted({token for window in windows for token in window}), NEEDLE_TOKENS
    if len(known) < size or min(map(len, windows)) < 4 * NEEDLES * size:
        raise ConfigError(f"needles: windows must have at least {4 * NEEDLES * size} tokens, {size} of them different")
    planted = []
    for window in windows:
        needles, text = [rng.sample(known, size) for _ in range(NEEDLES)], window[: -2 * NEEDLES * size]
        cuts = [0, *(len(text) * (2 * i + 1) // (2 * NEEDLES) for i in range(NEEDLES)), len(text)]
        parts = [text[first:last] for first, last in itertools.pairwise(cuts)]
        body = [token for part, needle in zip(parts, [*needles, []], strict=True) for token in (*part, *needle)]
        rng.shuffle(needles)
        planted.append([*body, *itertools.chain(*needles)])
    return planted


def _asked(window: Sequence[int]) -> list[int]:
    """The positions before each token of the second half of a needle's repetition."""
    first, half = len(window) - NEEDLES * NEEDLE_TOKENS, NEEDLE_TOKENS // 2
    return [first + NEEDLE_TOKENS * i + half + j - 1 for i in range(NEEDLES) for j in range(half)]


def _beginning(tokenizer: Tokenizer) -> list[int]:
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []


BLOCK = 64
ROWS_AT_ONCE = 64
"""Positions whose whole distributions are in memory together."""
PROMPT, DECODE = 64, 48
"""Tokens of the one sequence whose decoding is timed."""


class Scorer:
    """A model in one format, its cache in one type, for windows of up to ``window`` tokens."""

    def __init__(
        self, config: ModelConfig, checkpoint: TensorSource, form: WeightFormat, kv_dtype: torch.dtype, window: int
    ) -> None:
        self.loaded: LoadedModel = load_model(config, checkpoint, form)
        self.device = form.device
        self.num_blocks = -(-window // BLOCK)
        groups = kv_groups(config.cache)
        self.storage = KVStorage(config.cache, groups, [self.num_blocks], BLOCK, kv_dtype, form.device)

    def outputs(self, tokens: Sequence[int]) -> Tensor:
        """The last layer's outputs [T, D] for one window."""
        T, device = len(tokens), self.device
        ids, positions = torch.tensor(tokens, device=device), torch.arange(T, device=device)
        values = [list(range(self.num_blocks))], [0, T], [T]
        tables, starts, lengths = (torch.tensor(each, dtype=torch.int32, device=device) for each in values)
        rows = PagedRows((GroupRows(positions, tables),), starts, lengths, T)
        with torch.inference_mode():
            return self.loaded.model.forward(ids, positions, self.storage.layers, rows)

    def logprobs(self, outputs_RD: Tensor) -> Tensor:
        """Log-probabilities float32 [R, V] of what follows each position."""
        with torch.inference_mode():
            return self.loaded.model.logits(outputs_RD).float().log_softmax(-1)


class Reference:
    """The model in float32, with its outputs for every window."""

    def __init__(self, config: EngineConfig, windows: Sequence[list[int]]) -> None:
        path = resolve_model(config.model)
        checkpoint = open_checkpoint(path, config.model.load_format, config.model.seed)
        self.config: ModelConfig = read_config(checkpoint.config)
        longest = max(map(len, windows))
        if longest > self.config.max_position_embeddings:
            raise ConfigError(f"window: {longest} tokens; the model's context is {self.config.max_position_embeddings}")
        form = WeightFormat(torch.float32, resolve_device(config.model.device))
        self.scorer = Scorer(self.config, checkpoint, form, torch.float32, longest)
        self.windows = windows
        self.outputs = [self.scorer.outputs(window) for window in windows]


class Score(NamedTuple):
    """Figures of each position, over all windows."""

    divergences: Tensor
    agrees: Tensor
    """Whether the most likely token is the reference's."""
    surprises: Tensor
    """Minus the log-probability of the text's next token; positions that end a window have none."""
    needles: tuple[float, float] | None = None
    """Of the tokens of needles that are asked for, the share that is the most likely one, and mean surprise."""

    def figures(self) -> dict[str, float]:
        needles = {} if self.needles is None else dict(zip(("needle_share", "needle_nats"), self.needles, strict=True))
        return {
            **{name: round(value, 4) for name, value in needles.items()},
            "perplexity": round(float(self.surprises.mean().exp()), 3),
            "mean_kl": _rounded(self.divergences.mean()),
            "p99_kl": _rounded(self.divergences.quantile(0.99)),
            "largest_kl": _rounded(self.divergences.max()),
            "same_top_token": round(float(self.agrees.double().mean()), 4),
        }


def _rounded(value: Tensor) -> float:
    return float(f"{float(value):.3g}")


def divergences(found_TV: Tensor, exact_TV: Tensor) -> Tensor:
    """Of log-probabilities from exact ones: sum of p (log p - log q), float64 [T]."""
    exact = exact_TV.double()
    return (exact.exp() * (exact - found_TV.double())).sum(-1)


def score(reference: Reference, scorer: Scorer, has_needles: bool = False) -> Score:
    """How far a format's probabilities are from the reference's."""
    apart, agrees, surprises = [], [], []
    shares, nats = list[Tensor](), list[Tensor]()
    for window, exact_TD in zip(reference.windows, reference.outputs, strict=True):
        found_TD, following = scorer.outputs(window), torch.tensor(window[1:], device=scorer.device)
        for first in range(0, len(window), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            found_RV, exact_RV = scorer.logprobs(found_TD[rows]), reference.scorer.logprobs(exact_TD[rows])
            apart.append(divergences(found_RV, exact_RV))
            agrees.append(found_RV.argmax(-1) == exact_RV.argmax(-1))
            next_R = following[rows]
            surprises.append(-found_RV[: len(next_R)].gather(1, next_R[:, None]).squeeze(1))
        if has_needles:
            asked = torch.tensor(_asked(window), device=scorer.device)
            found_RV, next_R = scorer.logprobs(found_TD[asked]), following[asked]
            shares.append((found_RV.argmax(-1) == next_R).double().mean())
            nats.append(-found_RV.gather(1, next_R[:, None]).double().mean())
    needles = (float(torch.stack(shares).mean()), float(torch.stack(nats).mean())) if has_needles else None
    return Score(torch.cat(apart).cpu(), torch.cat(agrees).cpu(), torch.cat(surprises).double().cpu(), needles)


@dataclass
class QualityRow:
    """What was measured of one variant."""

    variant: Variant
    bytes_by_format: dict[str, int]
    score: Score
    kv_dtype: str
    speeds: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        speed = {"decode_tok_s": spread(self.speeds)} if self.speeds else {}
        return {
            "format": self.variant.name,
            "weights_bytes": sum(self.bytes_by_format.values()),
            "bytes_by_format": self.bytes_by_format,
            "kv_dtype": self.kv_dtype,
            **self.score.figures(),
            **speed,
        }


def measure(
    config: EngineConfig,
    variants: Sequence[Variant],
    windows: Sequence[list[int]],
    rounds: int,
    say: Say,
    keep: Callable[[list[dict[str, Any]]], object],
    has_needles: bool = False,
) -> list[dict[str, Any]]:
    """One row of figures for each variant of the model. Decoding is timed in ``rounds`` rounds, all variants in turns.

    ``keep`` is given all that is known before the first of these and after each speed. A variant that cannot be has a
    row with the reason. Raises ``ConfigError`` if none can be, and ``CheckpointError`` for one that cannot be read.
    """
    reference = Reference(config, windows)
    say("reference computed")
    rows = []
    refused: list[dict[str, Any]] = []
    for variant in variants:
        try:
            rows.append(_scored(variant, reference, has_needles))
        except ConfigError as error:
            say(f"{variant.name}: {error}")
            refused.append({"format": variant.name, "failed": str(error)})
            continue
        say(f"{variant.name}: KL {float(rows[-1].score.divergences.mean()):.3g}")
    if not rows:
        raise ConfigError(f"formats: none can be measured; {refused[0]['format']}: {refused[0]['failed']}")
    del reference
    keep(figures := [*(row.figures() for row in rows), *refused])
    for number in range(rounds):
        for row in rows:
            row.speeds.append(_decode_speed(row.variant.config))
            say(f"{row.variant.name}: {row.speeds[-1]:,.1f} tokens/s, round {number + 1} of {rounds}")
            keep(figures := [*(row.figures() for row in rows), *refused])
    return figures


def _scored(variant: Variant, reference: Reference, has_needles: bool) -> QualityRow:
    settings = variant.config.model
    checkpoint = open_checkpoint(resolve_model(settings), settings.load_format, settings.seed)
    device = resolve_device(settings.device)
    form = weight_format(settings, device, checkpoint)
    model_config = read_config(checkpoint.config)
    kv_dtype = resolve_kv_dtype(variant.config.cache.kv_cache_dtype, form, model_config.cache)
    if model_config.vocab_size != reference.config.vocab_size:
        raise ConfigError(
            f"{variant.name}: its vocabulary has {model_config.vocab_size} tokens, the model's "
            f"{reference.config.vocab_size}; checkpoints must be of the same model"
        )
    scorer = Scorer(model_config, checkpoint, form, kv_dtype, max(map(len, reference.windows)))
    bytes_by_format = dict(scorer.loaded.bytes_by_format)
    found = score(reference, scorer, has_needles)
    return QualityRow(variant, bytes_by_format, found, str(kv_dtype).removeprefix("torch."))


def _decode_speed(config: EngineConfig) -> float:
    bench = OfflineBench(bench_config(config, [1]))
    bench.run(1, PROMPT, 4)
    speed = statistics.median(bench.run(1, PROMPT, DECODE)["decode_tok_s"] for _ in range(3))
    bench.engine.close()
    return speed


def run(
    config: EngineConfig,
    formats: Sequence[str],
    checkpoints: Sequence[Path],
    tokens: int,
    window: int,
    needles: bool,
    rounds: int,
    say: Say,
    keep: Callable[[dict[str, Any]], object],
    text: Path | None = None,
) -> dict[str, Any]:
    """``measure`` for these formats and checkpoints on a text. Raises ``ConfigError``."""
    compared, scored = variants(config, formats, checkpoints), read_text(text)
    windows = windows_of(config.model, scored, tokens, window)
    what = {"model": resolve_model(config.model).name, "text": scored.name, "text_sha256": scored.digest}
    asked = {"tokens": tokens, "window": window, "needles": needles}
    if needles:
        windows = with_needles(windows)
    rows = measure(config, compared, windows, rounds, say, lambda rows: keep({**what, **asked, "rows": rows}), needles)
    return {**what, **asked, "rows": rows}
