"""A Llama checkpoint as an ONNX graph with a KV cache, with the inputs and outputs of Optimum's exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

OPSET = 23  # the first with rotary embeddings and attention


class Graph:
    """Nodes and constants; each value has the name that its node gives it."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, op: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        """Add a node; returns its first output."""
        names = outputs or (f"{op}_{len(self.nodes)}",)
        self.nodes.append(helper.make_node(op, list(inputs), list(names), **attributes))
        return names[0]

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Add a constant; returns its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name


def export(folder: Path, max_len: int = 256) -> Path:
    """Write the checkpoint in ``folder`` as ``model.onnx`` next to it; returns the file."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, vocab_size = config["hidden_size"] // heads, config["vocab_size"]
    angles = np.arange(max_len)[:, None] / config["rope_parameters"]["rope_theta"] ** (
        np.arange(0, head_dim, 2) / head_dim
    )
    g = Graph()
    cos, sin = (g.constant(part(angles).astype(np.float32)) for part in (np.cos, np.sin))

    def norm(x: str, name: str) -> str:
        scale = g.constant(weights[f"{name}.weight"])
        return g("RMSNormalization", x, scale, axis=-1, epsilon=config["rms_norm_eps"])

    def linear(x: str, name: str) -> str:
        return g("MatMul", x, g.constant(weights[f"{name}.weight"].T))

    def rotate(x: str, num_heads: int) -> str:
        return g("RotaryEmbedding", x, cos, sin, "position_ids", num_heads=num_heads)

    length = g("Gather", g("Shape", "attention_mask"), g.constant(np.array(1)))
    keys = g("Range", g.constant(np.array(0)), length, g.constant(np.array(1)))
    mask = g("LessOrEqual", keys, g("Transpose", "position_ids", perm=[1, 0]))  # [T, P + T]
    x = g("Gather", g.constant(weights["model.embed_tokens.weight"]), "input_ids")
    for i in range(config["num_hidden_layers"]):
        layer, past, present = f"model.layers.{i}", f"past_key_values.{i}", f"present.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(y, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        attended = g(
            *("Attention", rotate(q, heads), rotate(k, kv_heads), v, mask, f"{past}.key", f"{past}.value"),
            outputs=(f"attended_{i}", f"{present}.key", f"{present}.value"),
            q_num_heads=heads,
            kv_num_heads=kv_heads,
        )
        x = g("Add", x, linear(attended, f"{layer}.self_attn.o_proj"))
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (linear(y, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        x = g("Add", x, linear(g("Mul", g("Mul", gate, g("Sigmoid", gate)), up), f"{layer}.mlp.down_proj"))
    head = g.constant(weights["lm_head.weight"].T)
    g("MatMul", norm(x, "model.norm"), head, outputs=("logits",))

    tokens = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, size])
        for name, size in (("input_ids", "T"), ("attention_mask", "P + T"), ("position_ids", "T"))
    ]
    pasts, presents = (
        [
            helper.make_tensor_value_info(f"{name}.{i}.{part}", TensorProto.FLOAT, [1, kv_heads, size, head_dim])
            for i in range(config["num_hidden_layers"])
            for part in ("key", "value")
        ]
        for name, size in (("past_key_values", "P"), ("present", "P + T"))
    )
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "T", vocab_size])
    graph = helper.make_graph(g.nodes, "llama", [*tokens, *pasts], [logits, *presents], g.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model)
    file = folder.with_suffix(".onnx")
    onnx.save(model, file)
    return file
