"""Inner loops of kernels for Arm: compiled for such processors; what can run here, with instructions of this one."""

from __future__ import annotations

import ctypes
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import types

from octavo_kernels.cpu import host, memory
from octavo_kernels.cpu.attention.attention_dots import exponentials, gather, score
from octavo_kernels.cpu.attention.attention_turned import score_turned
from octavo_kernels.cpu.linear import byte_dot
from octavo_kernels.cpu.linear.block_dot import block_dot
from octavo_kernels.cpu.linear.block_scales import JOINED
from octavo_kernels.cpu.linear.dense_dot import dense_dot
from octavo_kernels.cpu.vector_ir import BFLOAT16, E4M3, F32, FLOAT16, I32, I64, I32x16, load, store
from tests.tiers import nightly

CPUS = {
    "neoverse-n2": (byte_dot.USDOT, "usdot"),
    "neoverse-n1": (byte_dot.SDOT, "sdot"),
    "apple-m1": (byte_dot.SDOT, "sdot"),
    "cortex-a72": (byte_dot.PLAIN, "mla"),
}
MACHINE_TYPES = {types.float32: F32, types.int32: I32}


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IS_ARM", True)


def function_of(intrinsic: Any, *constants: int) -> str:
    """A module with a function that does what an ``emitted`` function does with these constants."""
    define = intrinsic._defn
    others = len(inspect.signature(define).parameters) - 1 - len(constants)
    signature, emit = define(None, *map(types.literal, constants), *[types.intp] * others)
    module = ir.Module()
    kinds = [MACHINE_TYPES.get(kind, I64) for kind in signature.args]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "f")
    b = ir.IRBuilder(function.append_basic_block())
    emit(SimpleNamespace(get_dummy_value=lambda: None), b, signature, function.args)
    b.ret_void()
    return str(module)


def assembly(cpu: str, code: str, triple: str = "aarch64-linux-gnu") -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=1)
    module = llvm.parse_assembly(code.replace('target triple = "unknown-unknown-unknown"', ""))
    module.triple = triple
    module.verify()
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize(
    ("cpu", "bits", "group", "scales"),
    [
        ("neoverse-n2", 4, 32, FLOAT16),
        ("neoverse-n1", 8, 32, FLOAT16),
        nightly("neoverse-n2", 8, 32, FLOAT16),
        nightly("neoverse-n1", 4, 64, JOINED),
        nightly("apple-m1", 8, 32, FLOAT16),
        nightly("cortex-a72", 4, 32, FLOAT16),
    ],
)
def test_products_of_bytes_are_the_processors_own(
    cpu: str, bits: int, group: int, scales: int, on_arm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    instruction, name = CPUS[cpu]
    monkeypatch.setattr(byte_dot, "INSTRUCTION", instruction)
    found = assembly(cpu, function_of(block_dot, 0, bits, group, 0, scales))
    assert f"\t{name}\t" in found
    assert not {"sdot", "usdot"} & set(found.split()) - {name}
    assert "\tbl\t" not in found, "something is left to a library"


@pytest.mark.parametrize(
    ("intrinsic", "constants"),
    [
        (dense_dot, (BFLOAT16,)),
        (dense_dot, (E4M3,)),
        (score, (FLOAT16, 1)),
        (score_turned, ()),
        (gather, (BFLOAT16, 1)),
        (exponentials, ()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_other_inner_loops_are_vectors(intrinsic: Any, constants: tuple[int, ...]) -> None:
    found = assembly("neoverse-n1", function_of(intrinsic, *constants))
    assert "\tfmla\t" in found or "\tfmax" in found
    assert "\tbl\t" not in found, "something is left to a library"


def test_waiting_and_clocks(on_arm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cntvct_el0" in assembly("neoverse-n1", function_of(memory.cycles)).lower()
    assert "\tisb\n" in assembly("neoverse-n1", function_of(memory.pause))
    monkeypatch.setattr(memory, "FUTEX_SYSCALL", 98)
    found = assembly("neoverse-n1", function_of(memory.futex))
    assert "\tbl\tsyscall" in found
    assert "#98" in found
    monkeypatch.setattr("sys.platform", "darwin")
    found = assembly("apple-m1", function_of(memory.futex), "arm64-apple-darwin")
    assert "___ulock_wait" in found
    assert "___ulock_wake" in found


def test_features_that_the_compiler_does_not_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"lse": True, "sve": False})
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("Features\t: fp asimd asimddp\nCPU part\t: 0xd0c\n")
    assert host.arm_features(cpuinfo) == "+dotprod,+lse,+neon"
    cpuinfo.write_text("Features\t: fp asimd asimddp i8mm\n")
    assert host.arm_features(cpuinfo) == "+dotprod,+i8mm,+lse,+neon"
    assert host.arm_features(tmp_path / "none") == "+lse,+neon"
    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host, "_has_apples", lambda name: name == "hw.optional.arm.FEAT_DotProd")
    assert host.arm_features(cpuinfo) == "+dotprod,+lse,+neon"


def signed_dot(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """What ``sdot`` computes, with instructions that any processor has."""
    kind = total.type
    x, y = (b.bitcast(value, kind) for value in (x, y))
    high = ir.Constant(kind, [24] * kind.count)
    for place in (24, 16, 8, 0):
        left = ir.Constant(kind, [place] * kind.count)
        total = b.add(total, b.mul(*(b.ashr(b.shl(value, left), high) for value in (x, y))))
    return total


@functools.cache
def engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("instruction", [byte_dot.SDOT, byte_dot.PLAIN], ids=["sdot", "plain"])
def test_sums_are_exact(instruction: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_dot, "INSTRUCTION", instruction)
    monkeypatch.setattr(byte_dot, "_dot", signed_dot)
    steps, module = 3, ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), f"dot_{instruction}_{bits}")
    b = ir.IRBuilder(function.append_basic_block())
    unsigned_at, signed_at, out = function.args
    dot = byte_dot.Dot4(b, load(b, I32x16, out), bits)
    for step in range(steps):
        dot.add(b, load(b, I32x16, unsigned_at, 64 * step), load(b, I32x16, signed_at, 64 * step))
    store(b, dot.total(b), out)
    b.ret_void()
    engine().add_module(llvm.parse_assembly(str(module)))
    engine().finalize_object()
    rng = np.random.default_rng(bits)
    unsigned, signed = rng.integers(0, 1 << bits, (steps, 16, 4), np.uint8), rng.integers(-127, 128, (steps, 16, 4))
    unsigned[0], signed[0] = (1 << bits) - 1, -127
    bytes_, total = signed.astype(np.int8), np.arange(16, dtype=np.int32)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine().get_function_address(function.name))
    call(unsigned.ctypes.data, bytes_.ctypes.data, total.ctypes.data)
    expected = np.arange(16) + (unsigned.astype(int) * signed).sum(axis=(0, 2))
    assert (total == expected).all()
