"""Writes quantised checkpoints of small models, with the matrices that they stand for.

The compressed-tensors library writes its own formats. GPTQ, AWQ, ModelOpt and FP8 are packed here, word by word, as
their documentation has it; ``test_golden.py`` holds what the libraries of GPTQ and AWQ wrote.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module by their names in it, and the matrix."""
KEPT = re.compile(r"embed_tokens|wte|lm_head|mlp\.gate\.|router|block_sparse_moe\.gate\.|norm|kv_b_proj|in_proj_[ab]")
"""Modules that are left unquantised. (Some writers quantise kv_b_proj, which is made dense anyway.)"""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_groups(weight: Tensor, bits: int, group: int, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0 to 2**bits - 1, scales [N, G] of float16 values, zero points [N, G]; rounded to nearest."""
    parts = weight.float().view(len(weight), -1, group)
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    if has_zeros:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-5).half().float()
        zeros = (-low / scales).round().clamp(0, top)
    else:
        scales = (parts.abs().amax(2) / (half - 0.5)).clamp(min=1e-5).half().float()
        zeros = torch.full_like(scales, half)
    codes = ((parts / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, top)
    return codes.view(weight.shape).int(), scales, zeros.int()


def matrix_of(codes: Tensor, scales: Tensor, zeros: Tensor, groups_K: Tensor) -> Tensor:
    """The matrix, each input being of a group."""
    return (codes - zeros[:, groups_K]).float() * scales[:, groups_K]


def words(fields: Tensor, bits: int) -> Tensor:
    """Fields [R, n], n times bits being whole words, one after another from the lowest bit on, as int32."""
    rows = []
    for row in fields.tolist():
        number = sum(value << bits * at for at, value in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), np.int32))
    return torch.from_numpy(np.stack(rows))


def gptq(bits: int, group: int, version: str = "gptq", has_zeros: bool = False, is_ordered: bool = False) -> Writer:
    def write(weight: Tensor) -> Written:
        K = weight.shape[1]
        order = torch.randperm(K) if is_ordered else torch.arange(K)
        codes, scales, zeros = by_groups(weight[:, order], bits, group, has_zeros)
        groups_K = torch.empty(K, dtype=torch.int64)
        groups_K[order] = torch.arange(K) // group
        codes = codes[:, torch.argsort(order)]
        stored = (zeros - int(version == "gptq")) & ((1 << bits) - 1)
        tensors = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words(stored.t(), bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": groups_K.int(),
        }
        return tensors, matrix_of(codes, scales, zeros, groups_K)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    return Writer({**config, "sym": not has_zeros, "desc_act": is_ordered}, write)


def awq(group: int) -> Writer:
    def write(weight: Tensor) -> Written:
        codes, scales, zeros = by_groups(weight, 4, group, True)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

        def packed(fields: Tensor) -> Tensor:
            return words(fields.t().reshape(-1, len(fields) // 8, 8)[:, :, order].flatten(1), 4)

        tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.t().half().contiguous()}
        return tensors, matrix_of(codes, scales, zeros, torch.arange(weight.shape[1]) // group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Writer({**config, "modules_to_not_convert": ["lm_head"]}, write)


def fp8(*block: int) -> Writer:
    def write(weight: Tensor) -> Written:
        height, width = block or weight.shape
        rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scales, matrix = torch.empty(rows, columns), torch.empty_like(weight, dtype=torch.float32)
        values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scales[i, j] = weight[place].float().abs().max() / 448
                values[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
                matrix[place] = values[place].float() * scales[i, j]
        if block:
            return {"weight": values, "weight_scale_inv": scales}, matrix
        return {"weight": values, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.1)}, matrix

    config = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    return Writer({**config, "weight_block_size": list(block) or None, "modules_to_not_convert": ["lm_head"]}, write)


def auto_round(bits: int, group: int) -> Writer:
    layout = gptq(bits, group)
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int", "sym": True}
    return Writer({**config, "bits": bits, "group_size": group}, layout.write)


def bitsandbytes_int8() -> Writer:
    def write(weight: Tensor) -> Written:
        scb = weight.float().abs().amax(1)
        codes = (weight.float() / scb[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (scb[:, None] / 127)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    return Writer({**config, "llm_int8_skip_modules": ["lm_head"]}, write)


def bitnet(**config: Any) -> Writer:
    """Packed by transformers, for a ``linear_class`` that multiplies or divides by the scale; or rounded at load."""
    from transformers.integrations.bitnet import pack_weights

    def write(weight: Tensor) -> Written:
        mean = weight.float().abs().mean()
        codes = (weight.float() / mean).round().clamp(-1, 1)
        if config.get("quantization_mode") == "online":
            return {"weight": weight}, codes * mean
        scale = mean if config.get("linear_class") == "autobitlinear" else 1 / mean
        tensors = {"weight": pack_weights(codes.clone()), "weight_scale": scale.reshape(1).bfloat16()}
        scale = tensors["weight_scale"].float()
        return tensors, codes * (scale if config.get("linear_class") == "autobitlinear" else 1 / scale)

    return Writer({"quant_method": "bitnet", **config}, write)


def modelopt_fp8() -> Writer:
    return Writer({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8().write)


def modelopt_nvfp4() -> Writer:
    def write(weight: Tensor) -> Written:
        tensor_scale = weight.float().abs().max() / (6 * 448)
        parts = weight.float().view(len(weight), -1, 16)
        scales = (parts.abs().amax(2) / 6 / tensor_scale).to(torch.float8_e4m3fn)
        whole = (scales.float() * tensor_scale).unsqueeze(2)
        numbers = parts / whole.clamp(min=1e-12)
        codes = (numbers.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
        matrix = (E2M1[codes] * numbers.sign() * whole).view(weight.shape)
        codes = (codes + 8 * (numbers < 0)).view(len(weight), -1, 2).to(torch.uint8)
        tensors = {"weight": codes[..., 0] | codes[..., 1] << 4, "weight_scale": scales, "weight_scale_2": tensor_scale}
        return {**tensors, "input_scale": torch.tensor(0.1)}, matrix

    return Writer({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, write)


def compressed(form: str, **weights: Any) -> Writer:
    """A format of compressed-tensors, written by the library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_range

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args = scheme.weights
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(weight: Tensor) -> Written:
        N, K = weight.shape
        height, width = args.block_structure or (N if args.strategy == "tensor" else 1, args.group_size or K)
        low, high = (float(bound) for bound in calculate_range(args, weight.device))
        parts = [part.split(width, dim=1) for part in weight.float().split(height)]
        largest = torch.tensor([[part.abs().max() for part in row] for row in parts])
        given = {"weight": weight.float(), "weight_scale": (largest / min(high, -low)).clamp(min=1e-5)}
        if not args.symmetric:
            given["weight_zero_point"] = torch.randint(-2, 3, largest.shape).to(torch.int8)
        if form.startswith("nvfp4"):
            given["weight_global_scale"] = 6 * 448 / weight.float().abs().max().reshape(1)
            given["weight_scale"] = (largest / 6 * given["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        if form.startswith("mx"):
            given["weight_scale"] = torch.exp2(torch.ceil(torch.log2(given["weight_scale"])))
        if args.strategy == "tensor":
            given["weight_scale"] = given["weight_scale"].reshape(1)
        written = compressor.compress(given, scheme)
        if form.startswith("nvfp4"):  # the library rounds the matrix to bfloat16
            codes = torch.stack((written["weight_packed"] & 15, written["weight_packed"] >> 4), 2).view(N, -1, 16).int()
            whole = written["weight_scale"].float() / written["weight_global_scale"]
            return written, (torch.cat((E2M1, -E2M1))[codes] * whole.unsqueeze(2)).view(N, K)
        return written, compressor.decompress(written, scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Writer({**config, "ignore": ["lm_head"]}, write)


class Writer:
    """A format: its ``quantization_config``, and what writes a module."""

    def __init__(self, config: dict[str, Any], write: Callable[[Tensor], Written]) -> None:
        self.config = config
        self.write = write


def quantise(source: Path, folder: Path, writer: Writer) -> dict[str, Tensor]:
    """Write the checkpoint in ``source`` quantised to ``folder``; returns its matrices by name of the tensor."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors, matrices = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim != 2 or KEPT.search(name):
            tensors[name] = tensor
            continue
        written, matrices[name] = writer.write(tensor)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in written.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": writer.config}))
    return matrices


def replace_matrices(source: Path, folder: Path, matrices: dict[str, Tensor]) -> None:
    """Write the checkpoint in ``source`` to ``folder``, with other matrices."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_file({**load_file(source / "model.safetensors"), **matrices}, folder / "model.safetensors")
