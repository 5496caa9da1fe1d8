"""A round of reinforcement learning with the clients of two trainers, SkyRL's and prime-rl's, unmodified.

Each samples from the server, changes what it serves, and samples again. Usage: ``trainers.py URL MODEL_FOLDER ADAPTER
ADAPTER``; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # SkyRL's types are for Python 3.12

from openai import AsyncOpenAI  # noqa: E402
from renderers.base import create_renderer  # noqa: E402
from renderers.client import generate  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from transformers import AutoTokenizer  # noqa: E402

URL, FOLDER, *ADAPTERS = sys.argv[1:]
PROMPT = [*b"What is 2+2?"]


async def skyrl() -> dict[str, Any]:
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 12,
        "logprobs": 1,
        "seed": 3,
        "ignore_eos": True,
    }
    said = []
    async with RemoteInferenceClient(URL, [URL], 1, "policy", uses_lora_weight_sync=True) as client:
        sizes = await client.get_world_size()

        async def sample(model: str) -> Any:
            batch = {"prompt_token_ids": [PROMPT] * 2, "sampling_params": params, "session_ids": ["a", "b"]}
            return await client.generate(batch, model=model)

        said.append(await sample("policy"))
        for adapter in ADAPTERS:
            await client.pause_generation()
            await client.load_lora_adapter("rl", adapter)
            await client.reset_prefix_cache()
            await client.resume_generation()
            said.append(await sample("rl"))
        await client.sleep(1)
        await client.wake_up(["weights"])
        await client.wake_up(["kv_cache"])
        said.append(await sample("rl"))
        payload = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "num_samples": 2, "include_prompt_logprobs": True}
        payload |= {"model": "policy", "sampling_params": {"max_tokens": 2}, "session_id": "a"}
        scored = await client.sample({"json": payload})
        await client.finish_session("a")
        await client.unload_lora_adapter("rl")
    return {"sizes": sizes, "said": said, "scored": scored}


async def prime_rl() -> Any:
    renderer = create_renderer(AutoTokenizer.from_pretrained(FOLDER))
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "What is 2+2?"}]
    own = {"temperature": 1.0, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    found = await generate(
        client=client,
        renderer=renderer,
        messages=messages,
        model="policy",
        sampling_params=own,
        cache_salt="0",
        extra_headers={"X-Session-ID": "rollout"},
    )
    return {name: found[name] for name in ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")}


print(json.dumps({"skyrl": asyncio.run(skyrl()), "prime_rl": asyncio.run(prime_rl())}))
