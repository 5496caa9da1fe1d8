"""`octavo bench train-draft`: generates text with a model, trains an EAGLE-3 head on it, and measures what it gives."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.build.device_settings import resolve_device
from octavo.config import EngineConfig, ModelSettings
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model
from octavo_bench.drafts import speculate
from octavo_bench.drafts.draft_texts import WantedTexts, generate
from octavo_bench.drafts.draft_training import Trained, Training, train

MEMORY_SHARE = 0.5
"""Of a GPU's memory: the most that generation takes."""
SEQUENCES = 1024
"""That a GPU generates at once."""


def run(
    config: EngineConfig,
    folder: Path,
    wanted: WantedTexts,
    training: Training,
    num_drafts: int,
    kinds: Sequence[str],
    max_tokens: int,
    measured_rounds: int,
) -> dict[str, Any]:
    """Generate, train, write the head to ``folder``, and measure it on prompts that were not used; returns the record.

    ``num_drafts`` and what follows are of the measurement.
    """
    training = training._replace(seed=config.model.seed)
    share = min(config.cache.gpu_memory_utilization, MEMORY_SHARE)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, gpu_memory_utilization=share))
    started = time.perf_counter()
    texts = generate(_many_at_once(config), wanted, training.seed)
    generated = time.perf_counter() - started
    _give_memory_back()
    trained = train(_checkpoint(config.model), resolve_device(config.model.device), texts, training)
    write(trained, folder)
    record = {"generation_seconds": round(generated, 1), **wanted._asdict(), **training._asdict()}
    record |= trained.record
    (folder / "training.json").write_text(json.dumps(record, indent=2))  # should the measurement be cut short
    del trained, texts
    _give_memory_back()
    head = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_drafts}
    speculative = dataclasses.replace(config.speculative, speculative_config=json.dumps({**head, "adaptive": False}))
    with_head = dataclasses.replace(config, speculative=speculative)
    work = speculate.SpeculationWork(kinds, [1], max_tokens, 0.0, measured_rounds)
    return record | {"measured": speculate.measure(with_head, work)}


def _many_at_once(config: EngineConfig) -> EngineConfig:
    """With as many sequences in a step as a GPU's throughput needs, unless a number is given."""
    if config.scheduler.max_num_seqs is not None or resolve_device(config.model.device).type == "cpu":
        return config
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_num_seqs=SEQUENCES))


def _checkpoint(settings: ModelSettings) -> Any:
    return open_checkpoint(resolve_model(settings), settings.load_format, settings.seed)


def _give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(trained: Trained, folder: Path) -> None:
    """Write the head in the layout of EAGLE-3's authors, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config, ids_W = trained.config, trained.target_ids_W
    is_drafted_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_drafted_V[ids_W] = True
    tensors: dict[str, Tensor] = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in trained.head.state_dict().items()
    }
    tensors |= {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": is_drafted_V}
    save_file(tensors, folder / "model.safetensors")
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0][0].theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(ids_W),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(trained.layers), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(keys, indent=2))
