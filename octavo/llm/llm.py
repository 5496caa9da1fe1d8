"""``LLM``: load a model and generate, embed or score in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from octavo.config import DEFAULT_MODEL
from octavo.engine.beam_search import BeamSearchParams, check_beam_search
from octavo.engine.engine import Engine
from octavo.errors import InvalidParameter, RequestFailed, Unavailable
from octavo.images.preparer import preparer_of, read_by_model
from octavo.llm.adapters import Adapter, adapters_of, chosen
from octavo.llm.beam_search import BeamSearchOutput, search_beams
from octavo.llm.continuations import GenerationJob
from octavo.llm.image_inputs import audio_file_of, file_of, files_of, source_in
from octavo.llm.live_requests import LiveRequests
from octavo.llm.loading import build, settle
from octavo.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.llm.prompts import (
    Checked,
    Params,
    Prompt,
    TokenizedText,
    check_all,
    check_grammars,
    check_pairs,
    check_texts,
)
from octavo.llm.vllm_arguments import VLLMArguments, adapter_of, check_names, priorities
from octavo.sampling_params import SamplingParams
from octavo.system.garbage_collection import collecting_seldom
from octavo.text.chat_messages import KINDS
from octavo.text.chat_template import load_chat_template
from octavo.text.conversation import Conversation
from octavo.text.embedding_vectors import Floats, check_dimensions, cosine, late_interaction, pairs_of, results_of
from octavo.text.message_format import find_format
from octavo.text.tokenizer import Tokenizer, check_task
from octavo.types import MEMORY_PARTS, MemoryPart, Task
from octavo.weights.tensor_file import written

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, as in the OpenAI API."""


class LLM:
    """A model with its engine, in this process.

    ``settings`` are those of ``EngineConfig`` by name, such as ``max_model_len=2048``. Raises ``ConfigError`` for
    settings that cannot work and ``CheckpointError`` for a model that cannot be loaded. Threads may share it:
    what they ask for at the same time is computed together. Close it, or use it in a ``with`` statement, to free the
    memory.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        self.config, self._tokenizer = settle(model, settings)
        self._chat_template = load_chat_template(self.config.model, self._tokenizer)
        self._message_format = find_format("auto", "auto", self._chat_template.source, {})
        self._adapters = adapters_of(self.config.model)
        engine, self.info = build(self.config)
        self._images = preparer_of(self.config.model, self.info.num_image_slots)
        self._requests = LiveRequests(engine, self._tokenizer, self.config.model.seed)
        self._job_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_progress: bool = False,
        adapter: str | None = None,
        **of_vllm: Unpack[VLLMArguments],
    ) -> list[RequestOutput]:
        """Continue every prompt; results are in the order of the prompts.

        ``sampling_params`` is one for all prompts or one for each; ``None`` is ``get_default_sampling_params()``.
        ``adapter`` names a LoRA adapter of the setting ``lora_modules``; ``None`` is the model without any.
        Every prompt is validated before the first one starts; an invalid one raises a ``RequestError`` that names it.
        A later failure ends the affected continuation only, with the ``finish_reason`` ``"error"``. Ctrl-C ends all
        of them, between two steps. Requests without a seed get one derived from the setting ``seed`` and the number
        of earlier requests. ``of_vllm`` are names that scripts for vLLM use.
        """
        check_names(of_vllm)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prompts_read = check_all(prompts, params, self._tokenizer, self.info, self._images)
        used = adapter_of(adapter, of_vllm.get("lora_request"), self._adapters, self.engine)
        jobs = self._jobs(prompts_read, used, priorities(of_vllm.get("priority"), len(prompts_read)))
        self._run(jobs, use_progress or bool(of_vllm.get("use_tqdm")))
        return [job.result() for job in jobs]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_progress: bool = False
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of every prompt, ``params.beam_width`` each; results are in their order.

        Every prompt is validated before the search begins; an invalid one raises a ``RequestError`` that names it.
        Raises ``RequestFailed`` if the engine fails on a beam.
        """
        check_beam_search(params)
        limits = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        checked = check_all(prompts, limits, self._tokenizer, self.info)
        with _progress_bar(params.max_tokens, use_progress) as advance:
            return search_beams(self._requests, checked, params, self._tokenizer, advance)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_progress: bool = False
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every text, in their order; ``dimensions`` truncates it, ``None`` keeps the model's size.

        Every text is validated before the first one is computed; an invalid one raises a ``RequestError`` that names
        it, as does a model without embeddings. Raises ``RequestFailed`` if the engine fails on one.
        """
        check_dimensions(dimensions, self.info.embedding_size, self.info.pooling)
        texts = check_texts(prompts, self._tokenizer, self.info)
        vectors = self._read("embed", texts, use_progress, dimensions=dimensions)
        return [
            EmbeddingRequestOutput(str(next(self._job_ids)), EmbeddingOutput(vector.tolist()), text.tokens)
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_progress: bool = False
    ) -> list[ClassificationRequestOutput]:
        """The scores of a classifier's labels for every text; ``info.pooling.labels`` has the labels' names. Raises as
        ``embed`` does."""
        texts = check_texts(prompts, self._tokenizer, self.info)
        found = self._read("classify", texts, use_progress)
        return [
            ClassificationRequestOutput(str(next(self._job_ids)), ClassificationOutput(scores.tolist()), text.tokens)
            for text, scores in zip(texts, found, strict=True)
        ]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_task: Task | None = None, use_progress: bool = False
    ) -> list[PoolingRequestOutput]:
        """The result of a pooling task for every text: "embed", "classify", "token_embed" or "token_classify".

        The default is the first that the model has. Raises as ``embed`` does.
        """
        first: Task = next((name for name in self.info.tasks if name not in ("generate", "score")), "embed")
        task = first if pooling_task is None else pooling_task
        return self._pooled(prompts, task, use_progress)

    def reward(self, prompts: Prompt | Sequence[Prompt], *, use_progress: bool = False) -> list[PoolingRequestOutput]:
        """The logits of a reward model for every text: of the text, or of each token. Raises as ``embed`` does."""
        task: Task = "token_classify" if "token_classify" in self.info.tasks else "classify"
        return self._pooled(prompts, task, use_progress, is_raw=True)

    def _pooled(
        self, prompts: Prompt | Sequence[Prompt], task: Task, use_progress: bool, is_raw: bool = False
    ) -> list[PoolingRequestOutput]:
        texts = check_texts(prompts, self._tokenizer, self.info)
        found = self._read(task, texts, use_progress, is_raw=is_raw)
        return [
            PoolingRequestOutput(str(next(self._job_ids)), PoolingOutput(data), text.tokens)
            for text, data in zip(texts, found, strict=True)
        ]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, use_progress: bool = False
    ) -> list[ScoringRequestOutput]:
        """Similarity scores: one text with each of several, or two lists of equal length, pair by pair.

        A cross-encoder reads both texts together; with an embedding model, the score is the cosine similarity of the
        two embeddings, and with embeddings of tokens alone their late interaction. Raises as ``embed`` does.
        """
        pairs = pairs_of(text_1, text_2)
        task: Task | None = next((name for name in ("embed", "token_embed") if name in self.info.tasks), None)
        if task is not None:
            compare = cosine if task == "embed" else late_interaction
            single = list(dict.fromkeys(text for pair in pairs for text in pair))
            read = dict(zip(single, check_texts(single, self._tokenizer, self.info), strict=True))
            vectors = dict(zip(single, self._read(task, list(read.values()), use_progress), strict=True))
            tokens = [read[first].tokens + read[second].tokens for first, second in pairs]
            scores = [compare(vectors[first], vectors[second]) for first, second in pairs]
        else:
            texts = check_pairs(pairs, self._tokenizer, self.info)
            tokens = [text.tokens for text in texts]
            scores = [float(score[0]) for score in self._read("score", texts, use_progress)]
        return [
            ScoringRequestOutput(str(next(self._job_ids)), ScoringOutput(score), ids)
            for score, ids in zip(scores, tokens, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[CompletionOutput, None, None]:
        """Continue one prompt and stream: each item is the output of a step for one of the continuations.

        Texts and token ids of the items concatenate to what ``generate`` gives; the last item of a continuation
        has its ``finish_reason``. Closing the generator early aborts the unfinished continuations.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        checked = check_all([prompt], params, self._tokenizer, self.info, self._images)
        (job,) = self._jobs(checked, chosen(adapter, self._adapters), [0])
        return self._pieces(job)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapter: str | None = None,
        **of_vllm: Unpack[VLLMArguments],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages; otherwise like ``generate``.

        ``tools`` are function definitions in the form of the OpenAI API, for the chat template. With
        ``continue_final_message``, which needs ``add_generation_prompt=False``, the answers continue the last message.
        """
        is_one = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            self.chat_prompt(each, chat_template_kwargs, tools, add_generation_prompt, continue_final_message)
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_progress=use_progress, adapter=adapter, **of_vllm)

    def render_chat(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation rendered by the model's chat template, ready for the answer.

        ``chat_template_kwargs`` are further variables of the template. One token stands for each image and for
        each part of a video or of audio. Raises ``InvalidParameter`` if the model has no chat template or the template
        rejects the messages.
        """
        prompt = self.chat_prompt(messages, chat_template_kwargs, tools, add_generation_prompt, continue_final_message)
        tokens: list[int] = prompt["prompt_token_ids"]
        return tokens

    def chat_prompt(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> dict[str, Any]:
        """A conversation, with its images, videos and audio, as a prompt for ``generate`` and ``stream``; errors as
        ``render_chat``."""
        tokenizer = self.get_tokenizer()
        conversation = Conversation(
            messages,
            self._chat_template,
            tools,
            chat_template_kwargs or {},
            self._message_format.write_calls,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            image_text=None if self._images is None else self._images.processor.image_text,
        )
        prompt = conversation.prompt()
        if not prompt.images or self._images is None:
            return {"prompt_token_ids": prompt.encode(tokenizer)}
        media: dict[int, Any] = {}
        detail_of, num_images = self._images.processor.detail_of, len(set(prompt.images) - set(prompt.clips))
        for number in prompt.images:
            part, where = conversation.images[number]
            source = source_in(part, where)
            if number not in prompt.clips:
                detail = detail_of(str(part.get("detail", "auto")), num_images)
                media[number] = self._images.prepare(file_of(source, where), detail, where)
            elif KINDS[part["type"]] == "video":
                media[number] = self._images.prepare_video(*files_of(source, where), where)
            else:
                media[number] = self._images.prepare_audio(audio_file_of(source, where), where)
        prompt, images = read_by_model(prompt, media)
        return {"prompt_token_ids": prompt.encode(tokenizer), "images": images}

    def load_weights(self, weights: str | Path | Iterable[tuple[str, Tensor]]) -> None:
        """Take other weights in place of the model's own: those of a folder, or tensors by their names in a checkpoint.

        They are quantised and divided among ranks as the first ones were; adapters stay. Tensors that are not given
        are those of the latest folder, so that each call must have all that an earlier one had. Requests of other
        threads end first. Raises ``CheckpointError``, and then nothing is changed; after another error the model must
        be closed.
        """
        if isinstance(weights, str | Path):
            self._requests.load_weights(str(weights), [])
            return
        with written(weights) as file:
            self._requests.load_weights("", [file.path])

    def reset_prefix_cache(self) -> None:
        """Drop what the prefix cache holds of ended requests."""
        self.engine.clear_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults from the model's generation config; neutral values with ``generation_config="vllm"``."""
        return SamplingParams(**self.info.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ``Unavailable`` if it has none and takes token ids only."""
        if self._tokenizer is None:
            raise Unavailable("The model has no tokenizer.")
        return self._tokenizer

    def sleep(self, level: int = 1) -> None:
        """Free the GPU's memory until ``wake_up``, once the requests of all threads have ended; the weights are kept in
        host memory at each ``level``. Raises ``RunnerError`` where that is not possible, as on a CPU."""
        self._requests.sleep()

    def wake_up(self, tags: Sequence[MemoryPart] | None = None) -> None:
        """Undo ``sleep`` for ``"weights"``, over which others can then be loaded, ``"kv_cache"``, or both."""
        if wrong := [tag for tag in tags or () if tag not in MEMORY_PARTS]:
            raise InvalidParameter("tags", f"'tags' must be of {', '.join(MEMORY_PARTS)}, not {wrong[0]!r}.")
        self._requests.wake(tags or MEMORY_PARTS)

    @property
    def engine(self) -> Engine:
        """The engine, for its statistics; raises ``Unavailable`` after ``close``."""
        return self._requests.engine

    llm_engine = engine

    def close(self) -> None:
        """Free the memory and drop unfinished requests. May be called twice."""
        self._requests.close()
        self._chat_template.close()
        if self._images is not None:
            self._images.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(
        self,
        task: Task,
        texts: Sequence[TokenizedText],
        use_progress: bool,
        *,
        is_raw: bool = False,
        dimensions: int | None = None,
    ) -> list[Floats]:
        """The result of a pooling task for each text; see ``result_of``. Raises ``InvalidParameter`` or
        ``RequestFailed``."""
        check_task(task, self.info)
        with collecting_seldom():
            jobs = [self._requests.make_reading(text, task) for text in texts]
            self._run(jobs, use_progress)
        values = []
        for job in jobs:
            (answer,) = job.continuations
            if answer.values is None:
                raise RequestFailed(answer.output().error or "The engine gave no answer.")
            values.append(answer.values)
        return results_of(task, values, self.info.pooling, is_raw=is_raw, dimensions=dimensions)

    def _run(self, jobs: Sequence[GenerationJob], use_progress: bool) -> None:
        """Run the engine until all jobs are finished."""
        with self._requests.submitted(jobs) as unfinished, _progress_bar(unfinished.count, use_progress) as advance:
            while left := unfinished.count:
                self._requests.step(unfinished)
                advance(left - unfinished.count)

    def _jobs(self, prompts: Sequence[Checked], adapter: Adapter, order: Sequence[int]) -> list[GenerationJob]:
        check_grammars(prompts, self.engine.grammars)
        return [
            self._requests.make(str(next(self._job_ids)), prompt, priority, adapter)
            for prompt, priority in zip(prompts, order, strict=True)
        ]

    def _pieces(self, job: GenerationJob) -> Generator[CompletionOutput, None, None]:
        unfinished = list(job.continuations)
        with self._requests.submitted([job]) as call:
            while unfinished:
                # Another call may have finished these requests while this generator was suspended.
                if all(continuation.finish_reason is None for continuation in unfinished):
                    self._requests.step(call)
                for continuation in list(unfinished):
                    piece = self._requests.next_piece(continuation)
                    if piece is None:
                        continue
                    if piece.finished():
                        unfinished.remove(continuation)
                    yield piece


@contextlib.contextmanager
def _progress_bar(total: int, visible: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields a function that advances it by a count."""
    with Progress(console=Console(stderr=True), disable=not visible) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda count: progress.advance(task, count)
