"""lm-evaluation-harness over HTTP: its log-likelihoods are those of the engine in this process, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.clients.conftest import MODEL
from tests.conftest import Server

QUESTIONS = [
    ("Question: What is the capital of France?\nAnswer:", [" Paris", " London", " Rome is nice"], 0),
    ("Question: How many legs has a spider?\nAnswer:", [" two", " eight", " naïve 😀"], 1),
    ("The sky is", [" blue", " made of cheese and bread"], 0),
    ("One, two, three, four, five, six, seven,", [" eight", " nine", " zebra", " eight, nine, ten"], 0),
]
TASK = """
task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def in_process(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether each of its tokens is the likeliest."""
    tokenizer = llm.get_tokenizer()
    start = len(tokenizer.encode(context, add_special_tokens=False))
    tokens = tokenizer.encode(context + continuation, add_special_tokens=False)
    (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    rows = list(zip(tokens, output.prompt_logprobs, strict=True))[start:]
    entries = [row[token] for token, row in rows if row is not None]
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_likelihoods_are_the_engines_own(
    server: Server, run: Callable[..., str], tmp_path: Path, default_model_path: Path, batch_size: int
) -> None:
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "own.yaml").write_text(TASK.format(path=tmp_path / "own.jsonl"))
    model = f"base_url={server.url}/v1/completions,model={MODEL},tokenizer_backend=remote,num_concurrent=2"
    arguments = ["--model", "local-completions", "--model_args", model, "--batch_size", batch_size]
    arguments += ["--tasks", "own_choices", "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    run("lm_eval", *arguments, "--log_samples", HF_HUB_OFFLINE="1")
    (path,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = {sample["doc_id"]: sample for sample in map(json.loads, path.read_text().splitlines())}
    llm = LLM(str(default_model_path))
    for number, (question, choices, _) in enumerate(QUESTIONS):
        for choice, (answer,) in zip(choices, samples[number]["resps"], strict=True):
            total, is_greedy = in_process(llm, question, choice)
            assert (float(answer[0]), str(answer[1])) == (total, str(is_greedy)), (question, choice)


GENERATION = """
task: own_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def test_answers_of_chats_are_the_engines_own(
    server: Server, run: Callable[..., str], tmp_path: Path, default_model_path: Path
) -> None:
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "own.yaml").write_text(GENERATION.format(path=tmp_path / "own.jsonl"))
    model = f"base_url={server.url}/v1/chat/completions,model={MODEL},num_concurrent=2"
    arguments = ["--model", "local-chat-completions", "--model_args", model, "--apply_chat_template"]
    arguments += ["--tasks", "own_answers", "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    run("lm_eval", *arguments, "--log_samples", HF_HUB_OFFLINE="1")
    (path,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = {sample["doc_id"]: sample for sample in map(json.loads, path.read_text().splitlines())}
    llm, params = LLM(str(default_model_path)), SamplingParams(max_tokens=24, temperature=0, stop=["\n", "."])
    for number, (question, _, _) in enumerate(QUESTIONS):
        (output,) = llm.chat([{"role": "user", "content": question}], params)
        assert samples[number]["resps"] == [[output.outputs[0].text]], question
