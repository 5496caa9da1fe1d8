"""Logits processors of other packages: what they allow is what is sampled, and their errors end one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidParameter, SamplingParams
from octavo.engine import logits_processors
from octavo.engine.logits_processors import Allow, Ban, Processor


def cycle(extra_args: Mapping[str, Any]) -> Processor | None:
    """The tokens of ``cycle`` by turns."""
    tokens = extra_args.get("cycle")
    if tokens is None:
        return None
    if not tokens:
        raise ValueError("a cycle needs tokens")
    return lambda prompt, output: Allow([tokens[len(output) % len(tokens)]])


def no_repeats(extra_args: Mapping[str, Any]) -> Processor | None:
    """No token that is in the prompt or was sampled before."""
    return (lambda prompt, output: Ban({*prompt, *output})) if "no_repeats" in extra_args else None


def fails_at(extra_args: Mapping[str, Any]) -> Processor | None:
    """Fails after that many tokens, by banning a token that there is not."""
    if "fails_at" not in extra_args:
        return None

    def process(prompt: Sequence[int], output: Sequence[int]) -> Ban | None:
        return Ban([extra_args["token"]]) if len(output) == extra_args["fails_at"] else None

    return process


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("cycle", "no_repeats", "fails_at")
    entries = [EntryPoint(name, f"{__name__}:{name}", logits_processors.GROUP) for name in names]
    monkeypatch.setattr(logits_processors, "entry_points", lambda group: entries)
    logits_processors.factories.cache_clear()
    yield
    logits_processors.factories.cache_clear()


def params(max_tokens: int = 6, **extra_args: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra_args)


def sampled(llm: LLM, own: SamplingParams) -> list[int]:
    return llm.generate("Hello", own)[0].outputs[0].token_ids


@pytest.mark.usefixtures("_installed")
def test_only_what_processors_allow_is_sampled(llm: LLM) -> None:
    assert sampled(llm, params(cycle=[7, 8, 9], max_tokens=7)) == [7, 8, 9, 7, 8, 9, 7]
    free = sampled(llm, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    distinct = sampled(llm, params(no_repeats=True, max_tokens=40))
    prompt = llm.get_tokenizer().encode("Hello")
    assert len(set(free)) < 40
    assert len({*prompt, *distinct}) == len(set(prompt)) + 40
    assert distinct[0] == free[0] or free[0] in prompt


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("token", [10**9, -1])
def test_a_failure_ends_its_request_only(llm: LLM, token: int) -> None:
    failing, fine = llm.generate(["a", "b"], [params(fails_at=3, token=token), params(cycle=[5])])
    (output,) = failing.outputs
    assert (len(output.token_ids), output.finish_reason) == (3, "error")
    assert (output.error or "").startswith("the logits processor fails_at failed: ValueError: ")
    assert fine.outputs[0].token_ids == [5] * 6


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: params(other=1), "known to no logits processor; installed .*: cycle, fails_at, no_repeats"),
        (lambda: params(cycle=[]), "refused by cycle: a cycle needs tokens"),
        (lambda: SamplingParams(extra_args={}), "must be a dict"),
        (lambda: SamplingParams(extra_args=[1]), "must be a dict"),
    ],
)
def test_unknown_and_bad_arguments_are_refused(llm: LLM, make: Callable[[], SamplingParams], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as found:
        llm.generate("a", make())
    assert found.value.param == "extra_args"
    assert not llm.engine.has_work


def test_without_processors_the_arguments_are_refused(llm: LLM) -> None:
    logits_processors.factories.cache_clear()
    with pytest.raises(InvalidParameter, match=r"installed .*: none"):
        llm.generate("a", params(cycle=[1]))


def test_the_example_of_the_docs_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    section = page[page.index("## A logits processor") :]
    assert f'"{logits_processors.GROUP}"' in section
    names: dict[str, Any] = {}
    exec(section.split("```python\n")[1].split("```")[0], names)
    monkeypatch.setattr(logits_processors, "factories", lambda: {"no_repeats": names["no_repeats"]})
    biased = SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 100, 6: 50}, extra_args={"no_repeats": True})
    assert sampled(llm, biased) == [5, 6, 5, 6, 5, 6]
