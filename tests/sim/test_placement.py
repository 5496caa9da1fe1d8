"""What `octavo plan` says fits, and how fast it is: against the tables of docs/tasks, and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.engine.timing.step_model import StepWork
from octavo.errors import ConfigError
from octavo.ops.device_backend import backend_of
from octavo.plugins import GPU
from octavo_fleet.sim.costs.cost_model import Roofline
from octavo_fleet.sim.costs.devices import LINK_LATENCY, find_device
from octavo_fleet.sim.costs.roofline import shape_of
from octavo_fleet.sim.placement import Placement, placements
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.triton.collective import buffer_bytes

H200 = find_device("h200")
GIB = 1 << 30


def ways(name: str, gib: float, count: int = 1, context: int = 1024, **settings: object) -> list[Placement]:
    device = H200._replace(memory=gib * GIB)
    return placements(EngineConfig.from_flat(settings), SHAPES[name], device, count, context)


def only(found: list[Placement], **values: object) -> Placement:
    [way] = [way for way in found if all(getattr(way, name) == value for name, value in values.items())]
    return way


def test_it_is_the_arithmetic_of_the_tables_of_the_docs() -> None:
    found = ways("llama-3.1-70b", 80, 2, kv_cache_dtype="bfloat16")
    assert only(found, tensor_parallel_size=2, quantization="bfloat16").cached_tokens == 34_240
    assert only(found, tensor_parallel_size=2, quantization="fp8").cached_tokens == 234_688
    assert only(found, tensor_parallel_size=1, quantization="int4").cached_tokens == 2 * 108_544
    assert "GiB more than there is" in str(only(found, tensor_parallel_size=1, quantization="bfloat16").problem)


def test_memory_that_ranks_map_from_each_other_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each rank, so that halves of it make one engine's cache smaller by as much as their keys take."""
    settings = {"quantization": "fp8", "kv_cache_dtype": "bfloat16"}
    found = only(ways("llama-3.1-8b", 80, 2, **settings), tensor_parallel_size=2).cached_tokens or 0
    backend = backend_of(GPU)
    assert backend.peer_bytes(2) >= 2 * 2 * 16 << 20
    monkeypatch.setattr(backend, "peer_bytes", lambda num_ranks: 0)
    without = only(ways("llama-3.1-8b", 80, 2, **settings), tensor_parallel_size=2).cached_tokens or 0
    shape = shape_of(SHAPES["llama-3.1-8b"])
    assert without - found == pytest.approx(buffer_bytes(2) / shape.kv_values_per_token, abs=64)


def test_the_fastest_that_fit_are_first_and_every_engine_counts() -> None:
    found = ways("tiny", 24, 4)
    assert {(way.tensor_parallel_size, way.data_parallel_size) for way in found} == {(1, 4), (2, 2), (4, 1)}
    problems = [way.problem for way in found]
    assert problems == sorted(problems, key=lambda problem: problem is not None)
    speeds = [way.tokens_per_second or 0 for way in found if way.problem is None]
    assert speeds == sorted(speeds, reverse=True)
    one = only(ways("tiny", 24), quantization="bfloat16", kv_cache_dtype="bfloat16")
    four = only(found, tensor_parallel_size=1, quantization="bfloat16", kv_cache_dtype="bfloat16")
    assert four.cached_tokens == 4 * (one.cached_tokens or 0)
    assert four.tokens_per_second == pytest.approx(4 * (one.tokens_per_second or 0))
    assert only(found, flags=" --data-parallel-size 4").is_exact


def test_a_cache_of_8_bits_holds_twice_as_much() -> None:
    wide, narrow = (
        only(ways("llama-3.1-8b", 80, quantization="fp8", kv_cache_dtype=kind)) for kind in ("bfloat16", "fp8")
    )
    assert narrow.cached_tokens == pytest.approx(2 * (wide.cached_tokens or 0), rel=1e-3)
    assert (narrow.seconds_per_token or 1) < (wide.seconds_per_token or 0)


def test_ranks_that_divide_contexts_hold_more_and_read_less() -> None:
    """Latents, which every rank would hold: four times the tokens, for the exchange of queries and results."""
    keys = {**SHAPES["deepseek-v2-lite"], "num_hidden_layers": 2}
    whole, divided = (
        placements(EngineConfig.from_flat({"quantization": "fp8"}), keys, H200, 4, 4096, size) for size in (1, 4)
    )
    of = {"tensor_parallel_size": 4, "kv_cache_dtype": "bfloat16"}
    one, four = only(whole, **of), only(divided, **of)
    assert "--tensor-parallel-size 4 --decode-context-parallel-size 4" in four.flags
    assert four.cached_tokens == pytest.approx(4 * (one.cached_tokens or 0), rel=0.02)
    assert (four.tokens_per_second or 0) > (one.tokens_per_second or 0)
    assert all("decode_context_parallel_size" in str(way.problem) for way in divided if way.tensor_parallel_size < 4)


def test_the_command_takes_parts_of_contexts_and_whole_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Which are settings of an engine whose number of ranks is not known before."""
    assert main(["plan", "tiny", "--gpus", "4xh200", "-dcp", "2", "--enable-expert-parallel"]) == 0
    assert " --decode-context-parallel-size 2 --enable-expert-parallel" in capsys.readouterr().out


def test_dividing_a_context_costs_two_exchanges_a_layer() -> None:
    shape = shape_of(SHAPES["deepseek-v2-lite"])
    one, two = (Roofline(shape, H200, 2, context_parts=parts) for parts in (1, 2))
    short, long = StepWork(1, 1, 1, 1), StepWork(1, 1, 1 << 20, 1 << 20)
    waits = 2 * shape.layers * LINK_LATENCY
    assert two.seconds(short) - one.seconds(short) == pytest.approx(waits, rel=0.02)
    read = shape.kv_values_per_token * 2 * (1 << 20) / H200.bandwidth
    assert one.seconds(long) - two.seconds(long) == pytest.approx(read / 2 - waits, rel=0.02)


def test_a_setting_that_is_given_is_not_varied() -> None:
    [way] = ways("tiny", 24, quantization="int4", kv_cache_dtype="fp8", max_model_len=512, max_num_seqs=8)
    assert (way.quantization, way.kv_cache_dtype, way.max_model_len, way.concurrent) == ("int4", "fp8", 512, 8)


def test_a_quantised_checkpoint_stays_as_it_is() -> None:
    keys = SHAPES["gpt-oss-20b-mxfp4"]
    keys = {**keys, "num_hidden_layers": 4, "layer_types": keys["layer_types"][:4]}
    found = placements(EngineConfig(), keys, H200, 1, 1024)
    assert {way.quantization for way in found} == {"mxfp4"}
    assert 3.5 < (found[0].weight_gib or 0) < 4.5, "2.2 for tokens and logits, and 0.43 for each layer"


def test_latents_are_on_every_rank() -> None:
    """They are one KV head: two GPUs read what one reads, and weights take half as long."""
    shape = shape_of(SHAPES["deepseek-v2-lite"])
    one, two = Roofline(shape, H200), Roofline(shape, H200, 2)
    assert two._attention[0] == one._attention[0]
    less, more = StepWork(8, 8, 8, 8), StepWork(8, 8, 800_000, 800_000)
    gains = [cost.seconds(more) - cost.seconds(less) for cost in (one, two)]
    assert gains[1] == pytest.approx(gains[0], rel=0.01)


def test_models_whose_work_is_not_counted_have_no_speed() -> None:
    keys = {**SHAPES["nemotron-h-8b"], "layers_block_type": ["moe", "full_attention"], "n_routed_experts": 8}
    keys |= {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    way = placements(EngineConfig(), keys, H200, 1, 64)[0]
    assert way.problem is None
    assert way.cached_tokens
    assert way.tokens_per_second is None


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES["tiny"])))
    assert main(["plan", str(tmp_path), "--gpus", "2xl4"]) == 0
    text = capsys.readouterr().out
    assert "ways fit" in text
    assert "-tp" in text
    assert main(["plan", "tiny", "--gpus", "l4", "--quantization", "fp8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {way["quantization"] for way in found["ways"]} == {"fp8"}
    assert main(["plan", "llama-3.1-70b", "--gpus", "1xl4", "--quantization", "fp8"]) == 1
    assert "Does not fit" in capsys.readouterr().out


def test_it_says_nothing_of_a_way_but_in_its_table(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpus", "l4"]) == 0  # of which the longest context does not fit
    assert not caplog.records
    placements(EngineConfig(), SHAPES["llama-3.1-8b"], find_device("l4"), 1, 4096)
    assert "max_model_len is" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "two"], "device: 'two' is not one of"),
        (["--gpus", "0xh200"], "gpus: '0xh200'"),
        (["--gpus", "00xh200"], "gpus: '00xh200'"),
        (["--gpus", "2 h200"], "gpus: '2 h200'"),
        (["--context", "4096", "--max-model-len", "512"], "context: 4096 is more than max_model_len, 512"),
    ],
)
def test_what_it_does_not_know_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_encoders_are_not_divided() -> None:
    keys = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 100, "hidden_size": 32}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    with pytest.raises(ConfigError, match="is an encoder"):
        placements(EngineConfig(), keys, H200, 1, 64)
