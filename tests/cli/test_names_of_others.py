"""Flags of other servers, arguments of vLLM's ``LLM``: replaced, passed over by name, or refused with what to use."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from octavo import LLM, ConfigError
from octavo.cli import build_parser, parse_arguments
from octavo.config import ServeConfig, settings
from octavo.names_of_others import ADVICE, FLAGS_OF_OTHERS, PASSED_OVER, of_llm, translated
from tests.llm.tiny import write_checkpoint

SERVED = ["serve", "model"]


def test_no_flag_has_two_meanings() -> None:
    own = {f"--{item.name.replace('_', '-')}" for item in settings(ServeConfig)}
    assert not own & (FLAGS_OF_OTHERS.keys() | ADVICE.keys() | PASSED_OVER.keys())
    assert not FLAGS_OF_OTHERS.keys() & (ADVICE.keys() | PASSED_OVER.keys())
    limited = {flag for flag, found in PASSED_OVER.items() if found.values is not None}
    assert limited - {"--batching-mode", "--kv-cache-backend"} <= ADVICE.keys()  # for the other values
    assert not ADVICE.keys() & (PASSED_OVER.keys() - limited)


def test_what_changes_no_answer_is_passed_over_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """All flags at once, as the flags of all commands are declared for each line that is parsed."""
    flags = [flag for flag, found in PASSED_OVER.items() if found.values is None]
    given = [[flag, "3"] if PASSED_OVER[flag].has_value else [flag] for flag in flags]
    arguments = parse_arguments([*SERVED, *itertools.chain(*given), "--seed", "5"])
    assert arguments.seed in (5, "5")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(given) > 40
    for line, words in zip(lines, given, strict=True):
        assert line.startswith(f"octavo: {' '.join(words)}: "), line


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--task", "embed"], []),
        (["-O3"], []),
        (["--batching-mode", "static"], ["--scheduling-policy", "static"]),
        (["--tokenizer-mode=custom"], ["--tokenizer-mode=custom"]),
    ],
)
def test_values_decide(given: list[str], kept: list[str]) -> None:
    assert translated(given)[0] == kept


@pytest.mark.parametrize("flag", ["--rope-scaling", "--dist-init-addr"])
def test_others_are_refused_with_what_to_use(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*SERVED, flag, "ray"])
    assert ADVICE[flag] in capsys.readouterr().err


def test_short_names_of_vllm() -> None:
    found = build_parser().parse_args([*SERVED, "-tp", "2", "-pp", "3"])
    assert (int(found.tensor_parallel_size), int(found.pipeline_parallel_size)) == (2, 3)


def test_arguments_of_vllms_llm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path)
    others = {"trust_remote_code": True, "swap_space": 4, "tokenizer_mode": "auto", "compilation_config": None}
    with LLM(model, load_format="dummy", num_kv_blocks=20, disable_log_stats=True, runner="auto", **others) as llm:
        assert llm.generate([[1, 2]])[0].outputs[0].token_ids
    assert "swap_space=4: --kv-offload-memory keeps" in caplog.text
    with pytest.raises(ConfigError, match="there is no setting 'rope_scaling': --hf-overrides"):
        LLM(model, rope_scaling={"factor": 2})
    assert of_llm({"tp": 2, "nothing": 1}, {"seed"}) == ({"tensor_parallel_size": 2, "nothing": 1}, [])
