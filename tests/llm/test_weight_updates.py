"""Weights that are written over in place: every token and log-probability is that of a fresh start with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import distributed_c10d

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.runtime.weight_group import WeightGroup, packs
from octavo.types import AskReceiver, DropTensors, JoinGroup, ReceiveTensors, TakeWeights, WeightOrder
from tests.llm.tiny import write_checkpoint
from tests.models.adapter_files import make_adapter
from tests.models.drafter_files import mtp
from tests.models.families import EVERY_ROW, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly, nightly_after

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 120, "max_num_batched_tokens": 48}
HAVE_CONSTANTS = ("apertus/", "gemma4")
"""Families whose kernels get some numbers of the weights as constants."""
PROMPTS = [[5, 9, 3, 60, 2, 7, 9, 1, 8], [5, 9, 3, 60, 2, 7, 9, 1, 8, 44, 3]]
Said = list[tuple[list[int], list[float]]]


def said(llm: LLM, **settings: Any) -> Said:
    """Tokens and their log-probabilities."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params, **settings)]
    llm.engine.check()
    return [
        (
            list(out.token_ids),
            [top[token].logprob for token, top in zip(out.token_ids, out.logprobs or [], strict=True)],
        )
        for out in outputs
    ]


def changed(folder: Path, to: Path, seed: int = 1) -> Path:
    """The same model with other weights."""
    shutil.copytree(folder, to)
    torch.manual_seed(seed)
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = (tensor.float() * (1 + 0.3 * torch.rand(tensor.shape))).to(tensor.dtype)
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    write_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "a", "llama/gqa", vocab_size=264)
    return tmp_path / "a", changed(tmp_path / "a", tmp_path / "b")


def check(folders: tuple[Path, Path], **settings: Any) -> None:
    """Update by folder, by tensors of 32 bits, and back: each time the bits are those of a fresh start."""
    settings = {**SETTINGS, **settings}
    first, second = folders
    with LLM(str(second), **settings) as fresh:
        expected, checksums = said(fresh), fresh.engine.checksums()
    with LLM(str(first), **settings) as llm:
        before, own_checksums = said(llm), llm.engine.checksums()
        assert before != expected
        assert own_checksums.keys() == checksums.keys()
        assert own_checksums != checksums
        llm.load_weights(second)
        assert llm.engine.checksums() == checksums
        assert said(llm) == expected
        llm.load_weights(first)
        assert said(llm) == before
        assert llm.engine.checksums() == own_checksums
        llm.load_weights((name, tensor.float()) for name, tensor in load_file(second / "model.safetensors").items())
        assert said(llm) == expected


@pytest.mark.parametrize("row", nightly_after(0, [row if isinstance(row, str) else row.values[0] for row in EVERY_ROW]))
def test_families(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", row)
    second, settings = changed(tmp_path / "a", tmp_path / "b"), {"max_model_len": 128}
    if not row.startswith(HAVE_CONSTANTS):
        check((tmp_path / "a", second), **settings)
        return
    with LLM(str(tmp_path / "a"), **SETTINGS, **settings) as llm, pytest.raises(CheckpointError, match="be changed"):
        llm.load_weights(second)


FORMS: list[Any] = [
    {},
    {"enforce_eager": True},
    nightly({"dtype": "bfloat16"}),
    {"quantization": "int8"},
    nightly({"quantization": "int4", "quantize_lm_head": True}),
    nightly({"quantization": "fp8"}),
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
]


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_forms(settings: dict[str, Any], folders: tuple[Path, Path]) -> None:
    check(folders, **settings)


@needs_float_kernels
@pytest.mark.parametrize("enable_dp_attention", [False, nightly(True)])
def test_ranks(enable_dp_attention: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has tensors that the others have not: biases of sums over all ranks."""
    ranks_as_threads(monkeypatch)
    write_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "a", "llama/biases", vocab_size=264)
    folders = tmp_path / "a", changed(tmp_path / "a", tmp_path / "b")
    check(folders, tensor_parallel_size=2, enable_dp_attention=enable_dp_attention)


def test_what_routers_select_is_still_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", "mixtral/two_of_five")
    second = changed(tmp_path / "a", tmp_path / "b")
    settings = {**SETTINGS, "max_model_len": 128, "enable_return_routed_experts": True}
    asking = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, return_routed_experts=True)

    def experts(llm: LLM) -> list[Any]:
        return [np.array(result.outputs[0].routed_experts).tolist() for result in llm.generate(PROMPTS, asking)]

    with LLM(str(second), **settings) as fresh:
        expected = experts(fresh)
    with LLM(str(tmp_path / "a"), **settings) as llm:
        assert experts(llm) != expected
        llm.load_weights(second)
        assert experts(llm) == expected


def test_an_adapter_stays_and_one_that_was_merged_is_merged_again(folders: tuple[Path, Path], tmp_path: Path) -> None:
    make_adapter(folders[0], tmp_path / "lora", 1)
    settings = {**SETTINGS, "lora_modules": f"one={tmp_path / 'lora'}"}
    with LLM(str(folders[1]), **settings, enable_lora=True) as fresh:
        expected, plain = said(fresh, adapter="one"), said(fresh)
    with LLM(str(folders[0]), **settings, enable_lora=True) as llm:
        llm.load_weights(folders[1])
        assert (said(llm, adapter="one"), said(llm)) == (expected, plain)
    check(folders, lora_modules=settings["lora_modules"], merge_lora=True)


def test_the_drafter_of_the_checkpoint_is_updated_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    mtp(tmp_path / "a", "glm4/biases", "deepseek", vocab_size=264)
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}}
    second = changed(tmp_path / "a", tmp_path / "b")
    accepted = []
    for updates in (False, True):
        with LLM(str(tmp_path / "a" if updates else second), **SETTINGS, **drafting) as llm:
            if updates:
                llm.load_weights(second)
            accepted.append((said(llm), llm.engine.stats().num_accepted_drafts))
    assert accepted[0] == accepted[1]


def test_random_weights_are_replaced(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[1]), **SETTINGS) as fresh:
        expected = said(fresh)
    with LLM(str(folders[0]), **SETTINGS, load_format="dummy") as llm:
        said(llm)
        llm.load_weights(load_file(folders[1] / "model.safetensors").items())
        assert said(llm) == expected


def test_what_cannot_be_loaded_changes_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    with LLM(str(folders[0]), **SETTINGS) as llm:
        before = said(llm)
        with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[1, 2\]"):
            llm.load_weights({**tensors, name: torch.ones(1, 2)}.items())
        with pytest.raises(CheckpointError, match="tensors that this architecture does not have: other"):
            llm.load_weights({**tensors, "other": torch.ones(1, 2)}.items())
        with pytest.raises(CheckpointError, match="is there twice"):
            llm.load_weights([*tensors.items(), *tensors.items()])
        with pytest.raises(CheckpointError, match="does not exist"):
            llm.load_weights(tmp_path / "none")
        halves = changed(folders[1], tmp_path / "halves")
        save_file({name: tensor.half() for name, tensor in tensors.items()}, halves / "model.safetensors")
        with pytest.raises(CheckpointError, match="is of another type than before"):
            llm.load_weights(halves)
        assert said(llm) == before
        llm.load_weights([(name, tensors[name])])
        assert said(llm) != before
        with pytest.raises(CheckpointError, match=f"tensor {name} is missing, which an earlier update had"):
            llm.load_weights([("model.norm.weight", tensors["model.norm.weight"])])


def test_blocks_on_disk_are_those_of_the_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A block of the earlier weights is never found, and those of the folder's weights are when it is loaded again."""
    offload = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_memory": 0.1}
    with LLM(str(folders[0]), **SETTINGS, **offload) as llm:
        assert num_restored(llm) == 0
        llm.reset_prefix_cache()
        before = num_restored(llm)
        assert before > 0
        llm.load_weights(folders[1])
        assert num_restored(llm) == before
        llm.load_weights(load_file(folders[0] / "model.safetensors").items())
        assert num_restored(llm) == before
        llm.load_weights(folders[0])
        assert num_restored(llm) == 2 * before


def num_restored(llm: LLM) -> int:
    """How many blocks were found in slower tiers once a prompt has been answered, and its blocks are written."""
    llm.generate([list(range(1, 60))], SamplingParams(temperature=0, max_tokens=1))
    offload = llm.engine.scheduler.cache.offload
    assert offload is not None
    while llm.engine.save_idle() or offload._pending:  # a block that is being written is not looked for on disk
        time.sleep(0.001)
    return offload.stats.num_restored


def test_blocks_on_disk_are_those_of_the_configuration(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders[0], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    offload = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_memory": 0.1, "tokenizer": str(folders[0])}
    found = []
    for folder in (folders[0], other, folders[0]):
        with LLM(str(folders[0]), **SETTINGS, **offload, hf_config_path=str(folder)) as llm:
            found.append(num_restored(llm))
    assert found[:2] == [0, 0]
    assert found[2] > 0


TRAINER = """
import datetime, os, sys, torch
from safetensors.torch import load_file
from torch.distributed import BroadcastOptions, TCPStore, distributed_c10d

folder, name, device = sys.argv[1:]
is_gpu = device != "cpu"
if is_gpu:
    torch.cuda.set_device(device)
store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store = distributed_c10d.PrefixStore(name, store)
backend = distributed_c10d.Backend("nccl" if is_gpu else "gloo")
own = {"group_name": name, "timeout": datetime.timedelta(minutes=1)}
group, _ = distributed_c10d._new_process_group_helper(2, 0, [], backend, store, **own)
tensors = list(load_file(folder + "/model.safetensors", device).values())
for tensor in tensors:
    group.broadcast([tensor], BroadcastOptions()).wait()
packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
group.broadcast([packed], BroadcastOptions()).wait()
if is_gpu:
    torch.cuda.synchronize()
os._exit(0)  # torch may abort when the interpreter ends before the threads of its group
"""


def test_weights_that_a_trainer_broadcasts(folders: tuple[Path, Path]) -> None:
    """As tensors, then as one buffer of bytes, while steps are computed; then what cannot be received."""
    tensors = load_file(folders[1] / "model.safetensors")
    names, types = list(tensors), [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    announced = ReceiveTensors(names, types, [tuple(tensor.shape) for tensor in tensors.values()])
    with LLM(str(folders[1]), **SETTINGS) as fresh:
        expected = said(fresh)
    trainer, port = start_trainer(folders[1], "cpu")
    try:
        with LLM(str(folders[0]), **SETTINGS) as llm:
            before, engine = said(llm), llm.engine

            def received(order: WeightOrder) -> None:
                is_busy = engine.order_weights(order)
                while is_busy:
                    time.sleep(0.01)
                    is_busy = engine.order_weights(AskReceiver())

            with pytest.raises(CheckpointError, match="join one first"):
                engine.order_weights(announced)
            with pytest.raises(CheckpointError, match="nccl needs a GPU"):
                engine.order_weights(JoinGroup("127.0.0.1", port, 1, 2, "nccl"))
            received(JoinGroup("127.0.0.1", port, 1, 2, "gloo", "one"))
            with pytest.raises(CheckpointError, match="no weights were received"):
                engine.order_weights(TakeWeights())
            with pytest.raises(CheckpointError, match="float5 is no type of weights"):
                engine.order_weights(msgspec.structs.replace(announced, dtypes=["float5"] * len(names)))
            for is_packed in (False, True):
                received(msgspec.structs.replace(announced, is_packed=is_packed))
                assert said(llm) == before
                engine.order_weights(TakeWeights())
                assert said(llm) == expected
                engine.order_weights(TakeWeights(str(folders[0])))
            assert trainer.wait(30) == 0
            with pytest.raises(CheckpointError, match="weights were not received"):
                received(announced)
            assert said(llm) == before
            trainer, port = start_trainer(folders[1], "cpu")  # a new one whose group has the same name
            received(JoinGroup("127.0.0.1", port, 1, 2, "gloo", "one"))
            received(announced)
            engine.order_weights(TakeWeights())
            assert said(llm) == expected
            engine.order_weights(DropTensors(leaves_group=True))
    finally:
        trainer.kill()
        trainer.wait()


class Slow:
    """A group of torch.distributed whose members come when ``may_come`` says so, and whose broadcasts end then."""

    def __init__(self) -> None:
        self.may_come, self.may_send = threading.Event(), threading.Event()
        self.num_sent, self.is_ended = 0, False

    def broadcast(self, tensors: list[Tensor], options: object) -> Any:
        self.num_sent += 1
        return SimpleNamespace(wait=lambda: self.may_send.wait(10))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Slow]]:
    """The first and second group that are joined, by their ports 0 and 1."""
    found, store = [Slow(), Slow()], SimpleNamespace(set_timeout=lambda timeout: None)

    def make(size: int, rank: int, ranks: object, backend: object, group: Slow, **more: object) -> tuple[Slow, None]:
        group.may_come.wait(10)
        return group, None

    def meet(url: str, *given: object, **more: object) -> Iterator[Any]:
        store.number = int(url[-1])
        yield SimpleNamespace(set_timeout=lambda timeout: None, number=int(url[-1])), 1, 2

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", meet)
    monkeypatch.setattr(distributed_c10d, "PrefixStore", lambda name, store: found[store.number])
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: setattr(group, "is_ended", True))
    yield found
    for group in found:
        group.may_come.set()
        group.may_send.set()


ONE = ReceiveTensors(["a"], ["float32"], [(3,)])


@pytest.mark.parametrize("leaves", [True, False])
def test_a_group_whose_members_come_after_it_was_left_is_ended_and_has_no_effect(
    leaves: bool, groups: list[Slow]
) -> None:
    first, second = groups
    receiver = WeightGroup(torch.device("cpu"))
    receiver.join(JoinGroup("", 0, 1, 2, "gloo"))
    receiver.receive(ONE)
    if leaves:
        receiver.drop(leaves_group=True)
        assert not receiver.is_busy
    receiver.join(JoinGroup("", 1, 1, 2, "gloo"))
    receiver.receive(ONE)
    second.may_come.set()
    wait_for(lambda: second.num_sent == 1)
    first.may_come.set()
    wait_for(lambda: first.is_ended)
    second.may_send.set()
    wait_for(lambda: not receiver.is_busy)
    receiver.check()
    assert len(receiver.files()) == 1
    assert (first.num_sent, second.num_sent, second.is_ended) == (0, 1, False)


def test_what_comes_after_it_was_dropped_is_no_part_of_the_next_update(groups: list[Slow]) -> None:
    group = groups[0]
    group.may_come.set()
    receiver = WeightGroup(torch.device("cpu"))
    receiver.join(JoinGroup("", 0, 1, 2, "gloo"))
    receiver.receive(ONE)
    wait_for(lambda: group.num_sent == 1)
    receiver.drop(leaves_group=False)
    group.may_send.set()
    wait_for(lambda: not receiver.is_busy)
    with pytest.raises(CheckpointError, match="no weights were received"):
        receiver.files()
    receiver.receive(ONE)
    wait_for(lambda: not receiver.is_busy)
    assert len(receiver.files()) == 1
    with pytest.raises(CheckpointError, match="there is no memory for these tensors"):
        receiver.receive(msgspec.structs.replace(ONE, shapes=[(2**40, 2**40)]))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def start_trainer(folder: Path, device: str) -> tuple[subprocess.Popen[str], int]:
    """One that broadcasts the folder's weights, and the port of its group "one"."""
    command = [sys.executable, "-c", TRAINER, str(folder), "one", device]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    return trainer, int(trainer.stdout.readline())


def test_a_packed_buffer_ends_behind_the_tensor_that_fills_it() -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (3, 4, 1, 9, 2)]
    assert [[len(each) for each in pack] for pack in packs(tensors, 7)] == [[3, 4, 1], [9], [2]]
    assert [len(pack) for pack in packs(tensors, 0)] == [1] * 5


def test_other_models_say_that_they_cannot(tmp_path: Path) -> None:
    config = json.dumps({"prefill_ms": 0.0})
    with LLM(config, backend="toy") as llm, pytest.raises(CheckpointError, match="cannot be changed"):
        llm.load_weights(tmp_path)
