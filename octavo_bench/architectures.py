"""How each causal-LM class of the installed transformers is served: by tiny random checkpoints, one child process each.

A checkpoint is served natively if there is a model of our own, else by the backend transformers, and what is served is
compared with the library's own forward pass: prompts in chunks, together, and again over the prefix cache. What
``octavo models`` says of the checkpoint is compared with what a start does. A record has a line of JSON for each class
as soon as it is judged, so that a run that was interrupted goes on where it ended.

The tiny models have the library's own configuration with small sizes. A size is reduced wherever its key occurs, in
parts for text, images and audio too; lists with an entry per layer are left to the class's defaults.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing
import random
import resource
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 331
NUM_LAYERS = 4
SIZES = {
    name: size
    for size, names in (
        (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input"),
        (48, "hidden_size embed_dim out_hidden_size projector_hidden_size word_embed_proj_dim n_embd d_model"),
        (48, "embedding_dim hidden_size_global"),
        (8, "hidden_size_per_layer_input rotary_dim qk_rope_head_dim"),
        (64, "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size encoder_ffn_dim"),
        (24, "shared_intermediate_size moe_intermediate_size expert_ffn_hidden_size"),
        (24, "shared_expert_intermediate_size global_head_dim sliding_window q_lora_rank window_size"),
        (NUM_LAYERS, "num_hidden_layers n_layer n_layers decoder_layers"),
        (NUM_LAYERS // 2, "num_layers"),
        (2, "depth num_kv_shared_layers encoder_layers num_key_value_heads num_experts_per_tok"),
        (2, "num_experts_per_token moe_topk zero_expert_num moe_k layer_group_size o_groups"),
        (4, "mm_tokens_per_image"),
        (4, "num_attention_heads num_heads n_head n_heads decoder_attention_heads encoder_attention_heads"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads"),
        (12, "head_dim qk_nope_head_dim v_head_dim"),
        (512, "max_position_embeddings n_positions"),
        (64, "image_size index_topk"),
        (1, "num_expert_group n_group topk_group first_k_dense_replace"),
        (16, "kv_lora_rank mamba_d_state"),
        (500, "encoder_hash_byte_group_vocab"),
        (96, "mamba_d_ssm"),
    )
    for name in names.split()
}
"""The most of each size."""
LISTS = (
    *("layer_types", "layer_rope_theta", "no_rope_layers", "mlp_layer_types", "moe_layers", "per_layer_config"),
    *("activation_sparsity_pattern", "num_attention_heads_per_layer", "layers_block_type", "attention_layers"),
    *("indexer_types", "num_layers_per_stack"),
    *(
        "mamba_d_head",
        "mamba_headdim",
        "qk_head_dim",
        "attention_hidden_size",
        "attention_head_dim",
        "hybrid_layer_ids",
    ),
)
"""Keys with an entry per layer, and what follows from other sizes."""
MOST_PARAMETERS = 20_000_000
WEIGHT_SCALE = 0.05
ROPE = ("rope_parameters", "rope_scaling")
MROPE = (
    *("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"),
    *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
)
"""Kinds that divide a head among three dimensions of a position, by default in parts that a small head lacks."""


def tiny_config(kind: str, config_class: Any = None, **changes: Any) -> Any:
    """The configuration of ``model_type`` ``kind`` with small sizes; ``changes`` are made to the part for text.

    ``config_class``: that of a model that is a part of what the kind names. Raises what the library raises for sizes
    that do not go together.
    """
    from transformers import CONFIG_MAPPING

    config_class = config_class or CONFIG_MAPPING[kind]
    values = _smaller(config_class().to_dict())
    values.pop("model_type", None)
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    if text.get("is_decoder") is False:  # without it, classes that began as encoders see later tokens
        text["is_decoder"] = True
    rope = text.get("rope_parameters")
    rotated = text.get("partial_rotary_factor") or 1.0
    if isinstance(rope, dict) and SIZES["head_dim"] * rope.get("partial_rotary_factor", rotated) % 2:
        text.update({"head_dim": 16} if "head_dim" in text else {"hidden_size": 64})
    text.update(changes)
    config = config_class(**values)
    part = config.get_text_config()
    rope = getattr(part, "rope_parameters", None)
    if isinstance(rope, Mapping) and ("mrope_section" in rope or kind in MROPE):
        width = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        part.rope_parameters = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    return config


def _smaller(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "head_dim" and value == values.get("qk_rope_head_dim"):  # rotary embeddings have its size
            found[key] = SIZES["qk_rope_head_dim"]
        elif key == "num_key_value_heads" and values.get("kv_lora_rank"):
            found[key] = SIZES["num_attention_heads"]
        elif isinstance(value, dict) and key not in (*ROPE, *LISTS):
            found[key] = _smaller(value)
        elif key in LISTS or value is None:
            continue
        elif isinstance(value, list) and key in SIZES:
            found[key] = SIZES[key]
        elif isinstance(value, bool) or not isinstance(value, int):
            found[key] = 2 if key == "eos_token_id" else value
        elif key == "vocab_size":
            found[key] = VOCAB_SIZE
        elif key in SIZES:
            found[key] = min(value, SIZES[key])
        elif key.endswith(("token_id", "token_index")):
            found[key] = 2 if key.startswith("eos") else min(value, VOCAB_SIZE - 1)
        else:
            found[key] = value
    return found


def tiny_model(config: Any, model_class: Any) -> Any:
    """A model of this class with random float32 weights, of which none keeps its initial zero or one.

    Raises ``ValueError`` for one with more than ``MOST_PARAMETERS``.
    """
    import torch

    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class._from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its smallest configuration has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * WEIGHT_SCALE)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * WEIGHT_SCALE)
    return model


LENGTHS = (5, 41, 100)
"""Tokens of the prompts."""
TOLERANCE = 1e-3
"""Largest difference of a log-probability."""
SECONDS = 120
"""CPU time that one class may take; ten times as much may pass, so that other load does not decide."""
MEMORY = 12 << 30
"""Bytes of address space of a child process."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_batched_tokens": 32,
    "kv_cache_memory": 0.05,
    "block_size": 16,
}
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 12, "budget": 64, "compress_ratio": 4}
"""With few heads many scores are zero, and equal: what the library then chooses is not said."""
MLA = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
HEADS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"layers_block_type": ["mamba", "hybrid"] * (NUM_LAYERS // 2)},
    {"head_dim": 12, "num_key_value_heads": 2},
    HEADS,
    {**HEADS, "num_attention_heads": 8, "hidden_size": 64},
    {"layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)},
    {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)},
    {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    {"head_dim": 24, "n_groups": 1},
    {"d_head": 12},
    {"attention_types": [[["global", "local"], NUM_LAYERS // 4]]},
    {"default_language": "en_XX"},
    {"axial_pos_embds_dim": [16, 32]},
    {f"indexer_{key}": size for key, size in INDEXER.items()},
    {
        **{f"swa_{key}": SIZES[key] for key in MLA},
        "swa_head_dim": SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"],
        "swa_num_key_value_heads": SIZES["num_attention_heads"],
    },
    {
        "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
)
"""Changes to a tiny configuration that are tried in turn, where the sizes of the first do not go together."""


class Judged(NamedTuple):
    """How one class is served."""

    architecture: str
    kind: str
    """"native", "backend, paged", "backend, own cache", "refused", "wrong", "crash" or "not built"."""
    note: str = ""
    told: str = ""
    """What ``octavo models`` says of the checkpoint, where there is one: "supported" or "refused"."""
    library: str = version("transformers")


def judge_all(names: Iterable[tuple[str, str]]) -> Iterator[Judged]:
    """Judge classes, given as ``model_type`` and class, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "octavo_bench.architectures",
            "transformers.models.llama.modeling_llama",
            "octavo.llm",
            "octavo.cli",
            "octavo_fleet.transformers.build",
        ]
    )
    for kind, name in names:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_judge, args=(kind, name, sender), daemon=True)
        child.start()
        sender.close()
        try:
            found = receiver.recv() if receiver.poll(10 * SECONDS) else None
        except EOFError:
            found = None
        if found is None:
            child.join(1)
            child.kill()
            child.join()
            late = child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
            reason = f"it took more than {SECONDS} s" if late else f"the process ended with {child.exitcode}"
            found = Judged(name, "crash", reason)
        yield found
        child.kill()
        child.join()


def read_record(path: Path) -> list[Judged]:
    """What a record has of the installed transformers; the last line of a class counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {item.architecture: item for item in (Judged(**json.loads(line)) for line in lines)}
    return sorted(found.values(), key=lambda item: item.architecture.lower())


def add_to_record(path: Path, item: Judged) -> None:
    """Append a line to a record."""
    with path.open("a") as file:
        file.write(json.dumps(item._asdict()) + "\n")


def causal_classes() -> list[tuple[str, str]]:
    """The ``model_type`` and the class of all causal language models of the library, one entry for each class.

    Not the assistants of Gemma 4: they draft tokens from keys and values of another model, and have none of their own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = {name: kind for kind, name in reversed(NAMES.items()) if "Assistant" not in name}
    return sorted(((kind, name) for name, kind in known.items()), key=lambda item: item[1].lower())


def _judge(kind: str, name: str, sender: Connection) -> None:
    """Judge one class in a process of its own, and send what was found."""
    import logging

    import torch
    import transformers

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    library_logging: Any = transformers.logging
    library_logging.set_verbosity(logging.CRITICAL)
    library_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model, reason = _built(kind, name, Path(folder))
        if model is None and not (Path(folder) / "config.json").exists():
            sender.send(Judged(name, "not built", reason))
            return
        try:
            sender.send(_served(name, model, Path(folder), reason))
        except Exception as error:  # whatever a start or a request raises without being meant to
            sender.send(Judged(name, "crash", _first_line(error)))


def _built(kind: str, name: str, folder: Path) -> tuple[Any, str]:
    """A tiny model that computes something, saved to the folder; or ``None`` and why not.

    A model that computes nothing from tokens alone is saved too: it must be refused.
    """
    import torch
    import transformers

    reason = ""
    for changes in VARIANTS:
        try:
            model_class = getattr(transformers, name)
            model = tiny_model(tiny_config(kind, model_class.config_class, **changes), model_class)
            model.save_pretrained(folder)
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([_prompts()[1]]), use_cache=False).logits
            if not torch.isfinite(logits).all():
                raise ValueError("its logits are not numbers")
        except Exception as error:  # any error of the library's code
            reason = reason or _first_line(error)
            continue
        return model, ""
    return None, reason


def _served(name: str, model: Any, folder: Path, reason: str) -> Judged:
    """Serve the checkpoint natively, or else by the backend, and compare; ``reason``: why there is no model."""
    from octavo import LLM
    from octavo.errors import CheckpointError, ConfigError

    refusal = ""
    for backend in ("native", "transformers"):
        settings = SETTINGS if backend == "native" else {**SETTINGS, "backend": backend}
        told, said = _told(folder, settings)
        try:
            llm = LLM(folder, **settings)
        except (CheckpointError, ConfigError) as error:
            refusal = _first_line(error).replace(str(folder), "the checkpoint")
            if told == "supported":
                return Judged(name, "wrong", f"octavo models calls it supported, but {refusal}", told)
            continue
        if model is None:
            return Judged(name, "wrong", f"it is served, but the library does not compute it: {reason}", told)
        with llm:
            worst = _worst(llm, model)
        how, note = "native", ""
        if backend != "native":
            how, note = (
                ("backend, own cache", said.partition(", as ")[2]) if ", as " in said else ("backend, paged", "")
            )
        if not worst < TOLERANCE:
            return Judged(name, "wrong", f"{how}: a log-probability differs by {worst:.2g}", told)
        if told != "supported":
            return Judged(name, "wrong", f"{how}, but octavo models refuses it", told)
        return Judged(name, how, note, told)
    return Judged(name, "refused", refusal, told)


def _told(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What ``octavo models`` says of a checkpoint with these settings: in a word, and its first line."""
    from octavo.cli import main

    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        code = main(["models", str(folder), *flags])
    first = output.getvalue().partition("\n")[0]
    return "supported" if code == 0 and ": supported" in first else "refused", first


def _prompts() -> list[list[int]]:
    return [random.Random(length).choices(range(3, VOCAB_SIZE - 3), k=length) for length in LENGTHS]


def _worst(llm: Any, model: Any) -> float:
    """The largest difference of a log-probability of the prompts, first and over the prefix cache."""
    import torch

    from octavo import SamplingParams

    prompts, worst = _prompts(), 0.0
    told = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, ignore_eos=True)
    cached = SamplingParams(temperature=0, max_tokens=1, logprobs=3, ignore_eos=True)
    results = [*llm.generate(prompts, told), *llm.generate(prompts, cached)]
    for prompt, result in zip([*prompts, *prompts], results, strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        rows = list(enumerate((result.prompt_logprobs or [])[1:]))
        rows += [(len(prompt) - 1, row) for row in result.outputs[0].logprobs or []]
        for index, row in rows:
            for token, entry in (row or {}).items():
                difference = abs(entry.logprob - expected[index, token].item())
                worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}"[:300]
