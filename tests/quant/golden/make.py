"""Makes ``linears.safetensors``: small linear maps as the libraries of GPTQ and AWQ pack them, and as they read them.

These libraries need CUDA to be installed whole, so single files of theirs are run. Once::

    pip download --no-deps auto-gptq==0.7.1 gptqmodel==7.7.0 autoawq==0.2.9      (a wheel and two source archives)
    (unpack them here)
    python make.py FOLDER
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

SHAPE, GROUP = (32, 64), 32


def load(path: Path, name: str) -> Any:
    """One file of a package, as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def function(path: Path, name: str, **names: Any) -> Any:
    """One function of a file, without the rest of it."""
    tree = ast.parse(path.read_text())
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    found.decorator_list, found.returns = [], None
    for argument in found.args.args:
        argument.annotation = None
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names[name]


def given(bits: int, is_ordered: bool) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A linear map, scales [N, G], zero points [N, G], and the group of each input."""
    N, K = SHAPE
    linear = nn.Linear(K, N, bias=False).half()
    scales = (torch.rand(N, K // GROUP) * 0.05 + 0.01).half()
    zeros = torch.randint(1, 1 << bits, scales.shape).half()
    groups = torch.arange(K) // GROUP
    if is_ordered:
        groups = groups[torch.randperm(K)]
    return linear, scales, zeros, groups.int()


def auto_gptq(folder: Path, bits: int, is_ordered: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    module = load(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "auto_gptq_linear")
    linear, scales, zeros, groups = given(bits, is_ordered)
    made = module.QuantLinear(bits, GROUP, SHAPE[1], SHAPE[0], False, weight_dtype=torch.float16)
    made.pack(linear, scales, zeros, groups)
    matrix = made(torch.eye(SHAPE[1], dtype=torch.float16)).t()
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, matrix


def gptqmodel(folder: Path, bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    path = folder / "gptqmodel-7.7.0/gptqmodel/nn_modules/qlinear/__init__.py"
    lock = types.SimpleNamespace(threadpool_limits=lambda count: torch.no_grad())
    names = {"t": torch, "np": np, "nn": nn, "math": math, "transformers": transformers, "THREADPOOLCTL": lock}
    pack = function(path, "pack_original", _ConvNd=nn.modules.conv._ConvNd, **names)
    linear, scales, zeros, groups = given(bits, True)
    made = nn.Module()
    made.bits, made.maxq, made.planar, made.pack_factor = bits, (1 << bits) - 1, False, 32 // bits
    made.pack_dtype_bits, made.pack_np_math_dtype, made.pack_np_dtype = 32, np.uint32, np.int32
    pack(made, linear, scales, zeros, groups)
    weight = linear.weight.data
    codes = ((weight + (zeros * scales)[:, groups]) / scales[:, groups]).round().clamp(0, made.maxq)
    matrix = (codes - zeros[:, groups]) * scales[:, groups]
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, matrix


def autoawq(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    awq = folder / "autoawq-0.2.9/awq"
    for name in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
    packing = load(awq / "utils/packing_utils.py", "awq.utils.packing_utils")
    gemm = load(awq / "modules/linear/gemm.py", "awq_gemm")
    linear, scales, zeros, _ = given(4, False)
    linear.weight.data.clamp_(-0.03, 0.03)  # this packer does not clip codes
    zeros.fill_(7)
    zeros += torch.randint(0, 3, zeros.shape)
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scales.t().contiguous(), zeros.t().contiguous())
    matrix = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, GROUP).t()
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}, matrix


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = {"quant_method": "gptq", "group_size": GROUP}
    cases = {}
    for bits in (2, 3, 4, 8):
        for is_ordered in (False, True):
            v1 = {**config, "bits": bits, "desc_act": is_ordered, "checkpoint_format": "gptq"}
            cases[f"auto-gptq {bits} {is_ordered}"] = (v1, *auto_gptq(folder, bits, is_ordered))
        v2 = {**config, "bits": bits, "desc_act": True, "checkpoint_format": "gptq_v2"}
        cases[f"gptqmodel {bits}"] = (v2, *gptqmodel(folder, bits))
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    cases["autoawq"] = (awq, *autoawq(folder))
    tensors, configs = {}, {}
    for case, (values, parts, matrix) in cases.items():
        configs[case] = json.dumps(values)
        tensors |= {f"{case}/{name}": part.detach().contiguous() for name, part in {**parts, "matrix": matrix}.items()}
    save_file(tensors, Path(__file__).parent / "linears.safetensors", configs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
