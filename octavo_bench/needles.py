"""What the type of the KV cache costs over long contexts: needles that are found, and perplexity, by format and length.

The model is a small one that is trained for it (``needle_model``), and everything is computed by the engine. A context
is phrases that occur a few times, and among them, evenly, needles: phrases that occur once. Each is asked for by its
first tokens behind the context, and found if the greedy answer is all the rest. The context with all needles repeated
behind it is scored as well.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.build.device_settings import resolve_device
from octavo.config import EngineConfig, to_flat
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo_bench.needle_model import COMPARED, KNOWN, PHRASE, USES, VOCAB_SIZE, NeedleTraining, train, write
from octavo_bench.records.report import Say

NEEDLE_UNITS = 4
"""At most one of so many phrases of a context is a needle."""
SCORED = 0.25
"""Share of a context, at its end, whose perplexity is told: nearly all of its phrases occurred before."""
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
ANSWER = SamplingParams(max_tokens=PHRASE - KNOWN, temperature=0, ignore_eos=True, detokenize=False)


class Context(NamedTuple):
    """Tokens, and the phrases among them that occur once."""

    tokens: list[int]
    needles: list[list[int]]


Scores = tuple[list[bool], list[float], list[float]]
"""Of one context: which needles are found, surprises of what is not known of them, and surprises of the text."""


def make_context(length: int, num_needles: int, num_decoys: int, rng: random.Random) -> Context:
    """A context that has, with its needles repeated behind it, ``length`` tokens or up to P fewer.

    Each needle has decoys: phrases that occur once and begin as it does, but for one of the last 4 known tokens.
    """
    num_units = length // PHRASE
    num_needles = min(num_needles, num_units // (NEEDLE_UNITS * (1 + num_decoys)))
    needles = [rng.choices(range(VOCAB_SIZE), k=PHRASE) for _ in range(num_needles)]
    decoys = [_decoy(needle, rng) for needle in needles for _ in range(num_decoys)]
    num_repeated = num_units - 2 * num_needles - len(decoys)
    book = [rng.choices(range(VOCAB_SIZE), k=PHRASE) for _ in range(max(1, num_repeated // USES))]
    units = [*rng.choices(book, k=num_repeated), *decoys]
    rng.shuffle(units)
    for number, needle in reversed([*enumerate(needles)]):
        units.insert(len(units) * (2 * number + 1) // (2 * num_needles), needle)
    return Context([*itertools.chain(*units)], needles)


def _decoy(needle: Sequence[int], rng: random.Random) -> list[int]:
    known, place = [*needle[:KNOWN]], KNOWN - rng.randint(1, COMPARED)
    known[place] = (known[place] + rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
    return [*known, *rng.choices(range(VOCAB_SIZE), k=PHRASE - KNOWN)]


def scores(llm: LLM, context: Context) -> Scores:
    """Raises ``RequestFailed`` if the engine fails."""
    (scored,) = llm.generate([[*context.tokens, *itertools.chain(*context.needles)]], SCORE)
    pairs = zip(scored.prompt_token_ids, scored.prompt_logprobs or [], strict=True)
    surprises, end = [-entry[token].logprob if entry else 0.0 for token, entry in pairs], len(context.tokens)
    asked = llm.generate([[*context.tokens, *needle[:KNOWN]] for needle in context.needles], ANSWER)
    found = [each.outputs[0].token_ids == needle[KNOWN:] for each, needle in zip(asked, context.needles, strict=True)]
    needle_nats = [nats for at in range(end, len(surprises), PHRASE) for nats in surprises[at + KNOWN : at + PHRASE]]
    return found, needle_nats, surprises[int(end * (1 - SCORED)) : end]


def run(
    config: EngineConfig,
    training: NeedleTraining,
    caches: Sequence[str],
    lengths: Sequence[int],
    num_contexts: int,
    num_needles: int,
    num_decoys: int,
    say: Say,
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Train the model unless its folder is there, and measure it with each type of cache. Raises ``ConfigError``."""
    if min(lengths) < (least := PHRASE * NEEDLE_UNITS * (1 + num_decoys)):
        raise ConfigError(f"lengths: must be at least {least}")
    folder, seed = Path(config.model.model), config.model.seed
    numbers = {"num_contexts": num_contexts, "num_needles": num_needles, "num_decoys": num_decoys}
    result: dict[str, Any] = {**numbers, "rows": []}
    if not (folder / "config.json").is_file():
        write(train(training, resolve_device(config.model.device), seed, say), folder)
        result["training"] = training._asdict()
    for cache in caches:
        with LLM(**{**to_flat(config), "max_model_len": max(lengths) + 1, "kv_cache_dtype": cache}) as llm:
            for length in lengths:
                rng = random.Random(seed)
                contexts = (make_context(length, num_needles, num_decoys, rng) for _ in range(num_contexts))
                all_scores = [scores(llm, context) for context in contexts]
                result["rows"].append({"kv_cache_dtype": cache, "context": length, **figures(all_scores)})
                say(str(result["rows"][-1]))
                keep(result)
    return result


def figures(all_scores: Sequence[Scores]) -> dict[str, float]:
    """Over contexts of one length."""
    found, needle_nats, text_nats = ([*itertools.chain(*parts)] for parts in zip(*all_scores, strict=True))
    return {
        "needle_share": round(statistics.mean(map(float, found)), 4),
        "needle_nats": round(statistics.mean(needle_nats), 5),
        "perplexity": round(math.exp(statistics.mean(text_nats)), 4),
    }
