"""How classes of transformers are served, found by tiny checkpoints in child processes."""

from __future__ import annotations

import pytest

from octavo.cli import main
from octavo_bench.architectures import Judged, causal_classes, table


@pytest.mark.slow
@pytest.mark.nightly
def test_one_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "architectures", "SeedOssForCausalLM", "HeliumForCausalLM", "BartForCausalLM"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line.partition(", ")[0] for line in lines[1:]] == [
        "HeliumForCausalLM: backend",
        "SeedOssForCausalLM: native",
    ]
    assert lines[0].startswith("BartForCausalLM: refused")


def test_every_class_is_named_once_and_the_table_counts() -> None:
    names = [name for _, name in causal_classes()]
    assert len(names) == len(set(names)) > 150
    first, *_, last = table([Judged("A", "native"), Judged("B", "refused", "it | has no cache")])
    assert first == "1 native, 1 refused."
    assert last == "| `B` | refused | it \\| has no cache |"
