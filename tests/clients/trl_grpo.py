"""GRPO with TRL in server mode against a server: its trainer and its client, unmodified but for one method.

TRL takes weights to a server by vLLM's NCCL, so that it asks for vLLM and a GPU. Here the functions that it takes from
vLLM come from modules of this file, which broadcast by torch.distributed, and ``init_communicator`` does not refuse a
CPU. Usage: ``trl_grpo.py URL MODEL_FOLDER NUM_STEPS GROUP_PORT``; the last line is JSON.
"""

from __future__ import annotations

import datetime
import importlib.machinery
import json
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed import BroadcastOptions, distributed_c10d
from torch.distributed.rendezvous import rendezvous

URL, FOLDER, STEPS, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
VERSION = "0.28.0"


def join(info: dict[str, Any]) -> Any:
    """Rank 0 of a group with the server."""
    size, minute = info["world_size"], datetime.timedelta(minutes=1)
    store, _, _ = next(rendezvous(f"tcp://{info['master_address']}:{info['master_port']}", 0, size, timeout=minute))
    store, backend = distributed_c10d.PrefixStore("", store), distributed_c10d.Backend("gloo")
    own = {"group_name": "", "timeout": minute}
    return distributed_c10d._new_process_group_helper(size, 0, [], backend, store, **own)[0]


def send_packed(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
    """All tensors as one buffer of bytes; the model is small."""
    flat = [post_iter_func(item).contiguous().reshape(-1).view(torch.uint8) for item in iterator]
    group.broadcast([torch.cat(flat)], BroadcastOptions()).wait()


def install(path: str, **members: Any) -> None:
    module = types.ModuleType(path)
    module.__spec__ = importlib.machinery.ModuleSpec(path, None)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(members)
    sys.modules[path] = module


metadata = Path(tempfile.mkdtemp()) / f"vllm-{VERSION}.dist-info"
metadata.mkdir()
(metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
sys.path.insert(0, str(metadata.parent))
install("vllm", LLM=None, RequestOutput=None, SamplingParams=None, __version__=VERSION)
install("vllm.sampling_params", StructuredOutputsParams=None)
install("vllm.utils")
install("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1")
install("vllm.distributed")
install("vllm.distributed.weight_transfer")
install("vllm.distributed.weight_transfer.nccl_common", trainer_init=join)
install("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=send_packed)

from datasets import Dataset  # noqa: E402 (TRL finds what is installed above)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402


def init_communicator(self: VLLMClient, device: Any = 0) -> None:
    assert self.get_server_info()["weight_transfer_config"] is not None
    size = self.get_world_size() + 1
    info = {"master_address": "127.0.0.1", "master_port": self.group_port, "rank_offset": 1, "world_size": size}
    body = {"init_info": {**info, "packed": True}}
    asked = threading.Thread(target=self._post, args=(f"{URL}/init_weight_transfer_engine",), kwargs={"json": body})
    asked.start()
    self.communicator = join(info)
    asked.join()


VLLMClient.init_communicator = init_communicator


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of lower-case letters."""
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=URL,
        vllm_group_port=PORT,
        use_cpu=True,
        max_steps=STEPS,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        bf16=False,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=1,
    )
    prompts = [f"{word}: " for word in ("one", "two", "three", "four")]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts * 64}),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
    )
    trainer.train()
    client = trainer.vllm_generation.vllm_client
    trainer.vllm_generation.sync_weights()
    found = client.generate(prompts, n=8, max_tokens=32, logprobs=0)
    sequences, lengths = [], []
    for index, completion in enumerate(found["completion_ids"]):
        prompt = found["prompt_ids"][index // 8]
        sequences.append([*prompt, *completion])
        lengths.append(len(prompt))
    scored = client.get_sequence_logprobs(sequences, lengths, top_logprobs=1)
    sampled = [value for row in found["logprobs"] for (value, *_) in row]
    again = [value for row in scored["actual_logprobs"] for (value,) in row]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "rewards": [entry["reward"] for entry in log],
                "trainer_difference": [entry.get("sampling/sampling_logp_difference/max") for entry in log],
                "num_scored": len(sampled),
                "largest_difference": max(abs(a - b) for a, b in zip(sampled, again, strict=True)),
            }
        )
    )


main()
