"""Steps of every family with the sizes that transformers gives it by default, and with those of people's checkpoints,
launched as on an H100 on tensors without numbers. Prints what was refused, and how many were tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from triton.compiler import compiler
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from octavo.models.parts import DecoderConfig
from octavo.models.registry import ARCHITECTURES, read_config
from octavo_bench.kernel_resources import STEPS, TARGETS, launches, pretend, resources, shortened

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERTS = {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
CHANGES: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": EXPERTS,
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3},
}
"""What defaults leave open, or have in a way that no model could be built of."""
HEADS = (64, 80, 96, 100, 112, 128, 192, 256, 512)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Query heads of a KV head."""
VOCABULARIES = (32_001, 49_155, 50_257, 151_665)
WIDTHS = ((2880, 2880), (4096, 13_696), (4096, 11_008), (3000, 7000))
"""Of the model and of its feed-forward layers."""


def default_config(architecture: str) -> dict[str, Any] | None:
    """The library's own ``config.json`` of a class; ``None`` for one that it does not have."""
    kinds = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
    if not kinds:
        return None
    found = {**AutoConfig.for_model(kinds[-1]).to_dict(), "architectures": [architecture], "dtype": "bfloat16"}
    return {**found, **CHANGES.get(architecture, {})}


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """With as few layers as have each kind once, and a part of the vocabulary."""
    known = read_config(config)
    assert isinstance(known, DecoderConfig)
    first = [known.layers.index(part) for part in known.layers]  # of the layers like this one
    count = max(first) + 1
    name = next((name for name in LAYERS if config.get(name)), LAYERS[0])
    return {**shortened({**config, "num_hidden_layers": known.num_layers}, count), name: count}


def shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each configuration, and what it is called."""
    for name in ARCHITECTURES:
        if (config := default_config(name)) is not None:
            yield name, cut(config)
    for width in HEADS:
        yield f"heads of {width}", plain(head_dim=width)
        for group in GROUPS:
            yield f"heads of {width} by {group}", plain(head_dim=width, num_attention_heads=2 * group)
    for size in VOCABULARIES:
        yield f"vocabulary of {size}", plain(vocab_size=size)
    for width, ffn_size in WIDTHS:
        yield f"width {width}, {ffn_size}", plain(hidden_size=width, intermediate_size=ffn_size)


def plain(**sizes: Any) -> dict[str, Any]:
    """A layer of Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 32_768,
        **sizes,
    }


class Reached(BaseException):
    """The compiler would begin here."""


def stop_before_compiling() -> None:
    """From now on, launches end where code would be made."""

    def make_ir(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Reached

    def passing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except Reached:
            return None

    for source in (compiler.ASTSource, GluonASTSource):
        source.make_ir = make_ir
    run, JITFunction.run = JITFunction.run, passing


def main() -> None:
    """Launch all, or with arguments compile the steps of those configurations."""
    target, names = TARGETS["h100"], sys.argv[1:]
    if not names:
        stop_before_compiling()
    pretend(target)
    count = 0
    for name, config in shapes():
        if names and name not in names:
            continue
        try:
            if names:
                assert all(row["shared_bytes"] <= target.shared_bytes for row in resources(config, target, STEPS))
            else:
                assert all(kernels for _, kernels in launches(config, target, STEPS))
            count += 1
        except Exception as error:  # whatever a launcher or the compiler refuses with
            print("FAILED", name, type(error).__name__, error)
    print(count, "tried")


if __name__ == "__main__":
    main()
