"""Models whose rows attend to some positions alone: the same bits however a text is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.models.features import KEYS
from octavo.models.registry import read_config
from tests.models.families import make_checkpoint, make_config
from tests.models.test_architectures import PROMPTS, SETTINGS
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import nightly

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=2, logprobs=2)


@needs_float_kernels
@pytest.mark.parametrize(
    "row",
    [
        "hy_v4/shared",
        *map(nightly, ("axk2/gated_norms", "deepseek_v32/groups", "dots3_note_text/windows", "glm_moe_dsa/shared")),
    ],
)
def test_a_text_has_the_same_bits_alone_in_a_batch_and_in_any_chunks(row: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)

    def answers(prompts: list[list[int]], **more: Any) -> list[Any]:
        with LLM(tmp_path, dtype="float32", **{**SETTINGS, **more}) as llm:
            found = llm.generate(prompts, PARAMS)
            again = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2))
        for first, second in zip(found, again, strict=True):  # the second over what the first has cached
            assert first.outputs[0].logprobs == second.outputs[0].logprobs
        return [(result.prompt_logprobs, result.outputs[0].logprobs) for result in found]

    expected = answers(PROMPTS)
    assert answers(PROMPTS, max_num_batched_tokens=7) == expected
    assert answers(PROMPTS[-1:], max_num_batched_tokens=100, block_size=1) == expected[-1:]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "Glm5NextForCausalLM",
            {
                "layer_types": ["linear_attention", "indexed_attention"],
                "indexer_types": ["full", "shared"],
                "qk_rope_head_dim": 0,
            },
            r"indexer_types is \['full', 'shared'\]; it must be full for layer 1",
        ),
        ("GlmMoeDsaForCausalLM", {"index_head_dim": 6}, "index_head_dim is 6; it must be at least qk_rope_head_dim"),
    ],
)
def test_wrong_indexers(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({"architectures": [architecture], **KEYS, "num_hidden_layers": 2, **changes})


def test_hy_v4_has_one_activation() -> None:
    config = make_config("hy_v4/shared", hidden_act="gelu").to_dict()
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'; it must be 'silu' or 'swish'"):
        read_config(config)
