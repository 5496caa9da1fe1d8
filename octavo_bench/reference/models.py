"""The page of models, formats and devices, docs/models.md, from the registries of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from octavo.cli.models import families
from octavo.cli.settings import flag_name
from octavo.config import ServeConfig, settings
from octavo.quant.methods import METHODS
from octavo.speculative_config import Method
from octavo.text.message_format import HARMONY_NAME, TOOL_FORMATS
from octavo.text.reasoning import FAMILIES
from octavo.weights.gguf.blocks import BLOCK_KINDS
from octavo.weights.safetensors import DTYPES
from octavo_bench.architectures import Judged, read_record

BACKENDS = "[backends.md](backends.md)"
START = """\
# Models, formats and devices

What runs, and what was tested. `octavo models MODEL` reads the headers of a checkpoint and says whether it is supported and fits into
the memory of this machine, without loading it.

`python -m octavo_bench.reference` writes this page.

## Architectures

The architecture is the entry of `architectures` in `config.json`, or of `general.architecture` in a GGUF file (`-`: no GGUF files of it are read;
those of vision models: [images](images.md)).
*LoRA* says which matrices adapters may change, *windows* which layers may have a sliding window.
"""
OTHERS = """\
The decoders of the table, and others with their parts, are also served as embedding models without a map to logits (`Qwen3Model`, `LlamaModel`, `Gemma3TextModel`),
as classifiers, rerankers and reward models (`...ForSequenceClassification`) and as classifiers of tokens (`...ForTokenClassification`): [embeddings.md](embeddings.md).

With longrope (Phi-3, Phi-3.5-MoE and others) a text up to the model's original length has the short factors, and a longer one the long factors for all of its tokens, as in
transformers. A text that grows past the original length is computed again, once; cached blocks of the two are kept apart, so that neither is found for the other. `dynamic` scaling
makes contexts longer than `max_position_embeddings`, `factor` times at most. A prompt that is longer has the base for exactly its length, as in transformers, and shares cached
blocks with texts of the same base only. As a text grows behind that, transformers computes each token with another base than those before it; here the base changes after every
sixteenth of `max_position_embeddings`, and the text is computed again then. The backend transformers ends contexts at the original length.
"""
CLASSES = f"""\
## Other decoders of transformers

Most other decoders of transformers run with `--backend transformers`, more slowly: {BACKENDS}. `octavo bench architectures` goes through all causal language models of
the installed library with tiny random checkpoints: it compares the log-probabilities of prompts, in chunks, together and again over the prefix cache, with the library's
own, and what `octavo models` says of a checkpoint with what a start then does.
"""
SERVED = {
    "native": "natively: the classes of the first table",
    "backend, paged": "backend `transformers`, with the paged KV cache: prefixes are cached, sequences batched",
    "backend, own cache": "backend `transformers`, one sequence at a time, without a prefix cache",
    "refused": "refused",
    "wrong": "wrong",
    "crash": "ends with an error",
    "not built": "not tried, as there is no tiny checkpoint",
}
RECORD = Path(__file__).parents[2] / "benchmarks/results/architectures.jsonl"
CALLS = """\
## Tool calls

How models write calls ([details](structured_output.md#tools)), in order of precedence. *Seen by* are marks in the chat template by which
`auto` chooses a format; where it shows none, calls are told and read as `hermes`. `none` reads no calls.
"""
REASONING = """\
## Reasoning

Marks of reasoning ([details](structured_output.md#reasoning)). `auto` takes those that the chat template has, in this order, else tags of its own whose names have
`think` or `thought` in them. `none` leaves reasoning in the content.
"""
TESTED = """
## Devices

| device | how it computes | measured on |
|---|---|---|
| x86-64 CPUs with AVX2, AVX-VNNI or AVX-512 with VNNI | compiled kernels; GGUF blocks and quantised weights stay packed | Intel Sapphire Rapids, AMD Zen 5, Zen 4 and Zen 3, which has AVX2 alone: [performance.md](performance.md#on-a-cpu-next-to-llamacpp); AVX-VNNI on Zen 5, with AVX-512 left out |
| 64-bit Arm CPUs, on Linux and macOS | the same kernels with NEON, products of bytes by `usdot` (i8mm), `sdot` or neither | compiled, and run under emulation on Linux, with the same bits as on x86-64; no speed was measured, and nothing was run on macOS |
| other CPUs | plain torch, all weights dense | not measured |
| NVIDIA GPUs | Triton kernels, one CUDA graph per step; FP8 products from compute capability 8.9 on | H200 and H100: [performance.md](performance.md#on-a-gpu-next-to-vllm) |
| several GPUs, one engine each | `--data-parallel-size` | CPUs, and two H100s of one host: [deployment.md](deployment.md#tensor-parallelism) |
| one model on several GPUs | `--tensor-parallel-size` | CPUs, and two H100s of one host: [comparisons.md](../benchmarks/notes/comparisons.md#two-gpus) |
| AMD and Intel GPUs, Apple GPUs, TPUs | not supported | - |

`octavo doctor` shows the kernels that this machine uses, and why others were declined.

## What was tested

| what | against what | test |
|---|---|---|
| every decoder of the table | transformers: greedy tokens, logits and log-probabilities, of tiny models with random weights | `tests/models/test_architectures.py` |
| every architecture in GGUF files | transformers, with files of the names and keys that llama.cpp's package `gguf` and its converter write | `tests/models/test_gguf.py` |
| every encoder | transformers | `tests/models/test_encoders.py` |
| keys of published `config.json` files | nothing is refused, nothing is left over | `tests/models/test_published.py` |
| LoRA adapters, many in a batch | the models that PEFT merges them into | `tests/models/test_adapters.py` |
| GPTQ, AWQ | matrices that AutoGPTQ, GPTQModel and AutoAWQ packed, to the bit | `tests/quant/test_golden.py` |
| compressed-tensors | its own package | `tests/quant/test_compressed_tensors.py` |
| GGUF blocks | the `gguf` package | `tests/weights/test_blocks.py` |
| CPU kernels | plain torch and float64 | `tests/ops/` |
| GPU kernels | the same, on a CPU interpreter of Triton in every run, those for packed weights on Hopper as Python on torch tensors, and on a GPU where there is one | `tests/ops/triton/`, `tests/gpu/` |
| the engine on a GPU | the engine on a CPU | `tests/gpu/test_cuda.py` |
| a model divided among ranks | the model in one process | `tests/models/test_sharding.py`, `tests/gpu/test_tensor_parallel.py` |

Published weights were run with the default model, SmolLM2-135M-Instruct, only. Speed was measured on GPUs with random weights of the shapes of
Qwen3-8B, Qwen3-0.6B, Llama-3.2-1B, Llama-3.1-8B and Qwen3-30B-A3B.
"""

MEANT = {
    "CpmAntForCausalLM": "the tokens of a prompt attend to each other, also to later ones",
    "MllamaForCausalLM": "Llama 3.2 Vision attends to images, by layers of their own, and this class is its text part",
    **dict.fromkeys(
        ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "its tokens are of sounds, several for each position"
    ),
    "ProphetNetForCausalLM": "it predicts several tokens ahead at once",
    "XLMWithLMHeadModel": "it is an encoder, whose tokens see later ones",
    "XLNetLMHeadModel": "it predicts tokens in any order, with a mask for each prompt",
}
"""What classes are for that have no continuation of a text token by token."""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from START.splitlines()
    title, *rows = families()
    yield from ("", *_table(title, *((f"`{name}`", *rest) for name, *rest in rows)))
    yield from ("", *OTHERS.splitlines())
    yield from ("", *CLASSES.splitlines(), "", *_classes(read_record(RECORD)))
    yield from ("", "## Formats", "", *_table(("what", "which"), *_formats()))
    yield from ("", *CALLS.splitlines(), "", *_table(("`--tool-call-parser`", "models", "seen by"), *_calls()))
    yield from ("", *REASONING.splitlines(), "", *_table(("`--reasoning-parser`", "reasoning"), *_reasoning()))
    yield from TESTED.splitlines()


def _classes(found: Sequence[Judged]) -> Iterator[str]:
    """How the classes of a record are served: a row for each way, then a line for each that is not served."""
    libraries = sorted({item.library for item in found})
    yield f"Of the {len(found)} classes of transformers {_words(libraries)}:"
    yield ""
    rows = []
    for kind, how in SERVED.items():
        names = [item.architecture for item in found if item.kind == kind]
        if names:
            rows.append((how, str(len(names)), "" if kind == "native" else _words(names)))
    yield from _table(("served", "classes", ""), *rows)
    yield from ("", "Why the others are not served, or were not tried:", "")
    for item in found:
        if item.kind not in ("native", "backend, paged", "backend, own cache"):
            reason = item.note.rpartition("the backend transformers: ")[2]
            meant = f"{MEANT[item.architecture]}: " if item.architecture in MEANT else ""
            yield f"- `{item.architecture}`: {meant}{reason}"


def _calls() -> Iterator[tuple[str, str, str]]:
    for format in TOOL_FORMATS:
        seen = " or ".join(" and ".join(_code(sign) for sign in group) for group in format.signs)
        without = f" without {_words(format.others)}" if format.others else ""
        yield _words((format.name, *format.also)), format.models, seen + without


def _reasoning() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        answer = "" if family.answer is None else f", the answer between {' and '.join(map(_code, family.answer))}"
        yield _words(family.names), f"between `{family.opens}` and `{family.closes}`{answer}"
    yield f"`{HARMONY_NAME}`", "the channels of gpt-oss"


def _formats() -> Iterator[tuple[str, str]]:
    choices = {item.name: item.choices or () for item in settings(ServeConfig)}
    yield "types of tensors in safetensors", _words(DTYPES)
    yield "types of tensors in GGUF files", _words(BLOCK_KINDS)
    yield "`quant_method` of quantised checkpoints ([details](quantization.md))", _words(METHODS)
    yield "`method` of `--speculative-config`", _words(str(kind.__struct_config__.tag) for kind in get_args(Method))
    for name in ("load_format", "quantization", "dtype", "kv_cache_dtype"):
        yield f"`{flag_name(name)}`", _words(choices[name])


def _table(*rows: Sequence[str]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|---" * len(row) + "|"


def _words(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"
