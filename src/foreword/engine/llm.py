"""The offline interface: prompts in, completions or vectors out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

import numpy as np

from foreword.arrays import F32
from foreword.batch import PoolingParams, SamplingParams
from foreword.engine.build import build_engine, load
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.engine import Engine
from foreword.engine.model import Model
from foreword.engine.options import LLMOptions, split_options
from foreword.engine.outputs import RequestOutput
from foreword.engine.progress import progress_bar
from foreword.engine.prompt import Prompt
from foreword.engine.request_group import RequestGroup
from foreword.engine.transaction import Transaction
from foreword.errors import EngineError, ForewordError, RequestError
from foreword.media.limits import MediaLimits
from foreword.models.loader import LoadedModel
from foreword.models.tokenizer import Tokenizer

# Methods import the modules for chats, vectors and sounds when they need them, so that the start is faster.
if TYPE_CHECKING:
    from foreword.engine.chat import Conversation, Message
    from foreword.engine.pooling import PoolingRequestOutput
    from foreword.engine.transcription import Transcription

    Conversations = Conversation | Sequence[Conversation]

V = TypeVar("V")
Prompts = Prompt | Sequence[Prompt]
"""One prompt, or a list of them."""
Params = SamplingParams | Sequence[SamplingParams] | None
Pooling = PoolingParams | Sequence[PoolingParams] | None
"""The parameters of all prompts, or of each."""
Loras = str | Sequence[str | None] | None
"""The name of the adapter of all prompts, or of each."""
OneEach = tuple[str, type[V], str]
"""A parameter with one value per prompt: its name, type, and an example."""

PARAMS = "sampling_params", SamplingParams, "SamplingParams(temperature=…)"
POOLING = "pooling_params", PoolingParams, 'PoolingParams(task="embed")'
LORA = "lora", str, "the name of an adapter"


class LLM:
    """A model that completes prompts in batches.

        llm = LLM("smollm2")
        llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        llm.chat("What is the capital of France?")
        for output in llm.stream("Once upon a time"):
            print(output.outputs[0].new_text, end="")

    model: a name the project knows, a .gguf file, a directory of safetensors, a hub id, a `LoadedModel`, or what `load`
    returned for the same executor.
    options: see `LLMOptions` and docs/settings.md. Raise ConfigError for an unknown name and for a value that is not
    valid.
    """

    def __init__(self, model: str | Path | LoadedModel | Model[Any], **options: Unpack[LLMOptions]) -> None:
        given = split_options(options)
        loaded = load(model, given.executor, given.of_executor)
        engine = build_engine(
            loaded,
            given.config,
            observers=given.observers,
            logits_processors=given.logits_processors,
            drafter=given.drafter,
            tiers=given.tiers,
        )
        try:
            for name, path in given.loras.items():
                engine.load_lora(name, path)
        except BaseException:
            engine.executor.close()
            raise
        name = model.name if isinstance(model, LoadedModel | Model) else str(model)
        self._start(name, loaded, engine, given.media)

    @classmethod
    def of(cls, model: Model[Any], engine: Engine, *, media: MediaLimits | None = None) -> Self:
        """Return an LLM of a loaded model and an engine that serves it, such as `build_engine` returns."""
        llm = cls.__new__(cls)
        llm._start(model.name, model, engine, media or MediaLimits())
        return llm

    def _start(self, name: str, model: Model[Any], engine: Engine, media: MediaLimits) -> None:
        self.model, self.engine, self.media = model, engine, model.media(media)
        self.name, self._is_closed = name, False
        self._ids = count()
        self._running: list[RequestGroup] = []
        self._streaming: set[str] = set()  # requests of streams that are being read
        self._unread: dict[str, RequestOutput] = {}  # outputs of these requests from steps that other streams ran
        self._abandoned: deque[str] = deque()  # requests of closed streams that could not be aborted at once
        self._transaction = Transaction(self, ("_run", "_begin", "_next", "_leave", "close"), self._abort_running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<LLM {self.name!r} on {type(self.engine.executor).__name__}{state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an LLM holds memory and threads of its process. Make one in each: LLM({self.name!r}, …)")

    def close(self) -> None:
        """End the thread and the processes of ranks. The memory is freed with the object. Closing twice is harmless."""
        with self._transaction:
            self._is_closed = True
            self.engine.close()
            self.engine.executor.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def loras(self) -> dict[str, Path]:
        """The path of each adapter, by its name."""
        return self.engine.loras.paths

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter under a name; it replaces an adapter with this name: see `Engine.load_lora`.

        path: a directory that PEFT wrote, or a GGUF file.
        """
        self._check_open()
        self.engine.load_lora(name, path)

    def drop_lora(self, name: str) -> None:
        """Unload an adapter: see `Engine.drop_lora`."""
        self._check_open()
        self.engine.drop_lora(name)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without parameters: temperature 0 and 1024 tokens, as in `foreword run`
        (`SamplingParams` itself has 1 and 16), and the values that the model suggests unless generation_config is
        "ignore".

        To change some of them: ``replace(llm.default_sampling_params(), max_tokens=8)``.
        """
        return self.engine.default_params

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, lora: Loras = None, progress: bool | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or many, and return a list in the order of the prompts.

        prompts: a text, token ids, a `MixedPrompt`, or a list of these. sampling_params: one for all, or one per
        prompt, which are used unchanged; None: `default_sampling_params`. lora: the name of an adapter for all, or one
        per prompt; None: no adapter. progress: whether to show a bar; None: if the output is a terminal.

        Raise RequestError for a prompt or parameter that cannot be served, with its index in the list, before any
        request has started. A request that fails later, such as for logits that are not numbers, has its error in
        ``RequestOutput.error``; if all requests failed, the first error is raised.
        """
        return self._run(self._jobs(prompts, sampling_params, lora), progress)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, *, lora: Loras = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt or many, and iterate over their outputs while tokens are generated.

        The arguments and errors are those of `generate`. ``prompt_index`` of an output is the place of its prompt in
        the list; ``new_text`` and ``new_token_ids`` of its completions are what came since the one before. The requests
        begin with the first output that is asked for, and run whenever the LLM does. When the iterator is closed or
        forgotten they are aborted; other requests are not concerned.
        """
        return self._stream(self._jobs(prompts, sampling_params, lora, stream=True))

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        lora: Loras = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many through the model's chat template; outputs have their ``message``.

        messages: a list of messages, such as {"role": "user", "content": "…"}, one message alone, or a text of the
        user; or a list of conversations, each a list of messages or a text. A model that sees images takes parts such
        as {"type": "image", "image": "photo.jpg"}, see `take_media`. sampling_params, lora, errors: see `generate`.
        options: see `ChatOptions`; any other name is a variable that the template reads.
        """
        return self._run(self._chats(messages, sampling_params, lora, options), progress)

    def chat_stream(
        self, messages: Conversations, sampling_params: Params = None, *, lora: Loras = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Answer conversations like `chat`, and yield outputs like `stream`. Outputs have ``events``, the final one its
        ``message``.
        """
        return self._stream(self._chats(messages, sampling_params, lora, options, stream=True))

    def infill(
        self,
        prefixes: str | Sequence[str],
        suffixes: str | Sequence[str],
        sampling_params: Params = None,
        *,
        lora: Loras = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete the gap between a prefix and a suffix, or that of each pair of many, by the model's own tokens.

        suffixes: one for each prefix. The completion ends where the gap does. sampling_params, lora, errors: see
        `generate`; RequestError for a model that was not trained to fill gaps.
        """
        from foreword.engine.infill import make_infill

        if isinstance(prefixes, str) and isinstance(suffixes, str):
            prefixes, suffixes = [prefixes], [suffixes]
        are_texts = isinstance(prefixes, str) or isinstance(suffixes, str)
        are_lists = isinstance(prefixes, Collection) and isinstance(suffixes, Collection) and not are_texts
        if not are_lists or len(prefixes) != len(suffixes):
            reason = "are not one suffix for each prefix"
            raise RequestError(None, "suffixes", suffixes, reason, "Give two texts, or two lists of equal length.")
        pairs = [*zip(prefixes, suffixes, strict=True)]
        given = one_each(*PARAMS, sampling_params, [before for before, _ in pairs])
        limit = self.engine.states.max_model_len
        made = [
            make_infill(self.tokenizer, before, after, own or self.engine.default_params, limit)
            for (before, after), own in zip(pairs, given, strict=True)
        ]
        prompts, params = [prompt for prompt, _ in made], [own for _, own in made]
        return self.generate(prompts, params, lora=lora, progress=progress)

    def transcribe(self, audio: object, sampling_params: SamplingParams | None = None, **options: Any) -> Transcription:
        """Write down a sound of any length: the text, its language and its segments.

        audio: a WAV, FLAC, Ogg or MP3 file as its path, bytes, data URL or URL (see `MediaLimits`), or an array of
        samples in [−1, 1] at the model's rate. sampling_params: of each window; None: temperature 0. options: see
        `TranscriptionOptions`. Raises RequestError if the input is not audio or the model cannot transcribe.
        """
        from foreword.engine.transcription import TranscriptionOptions, make_transcriber

        chosen = TranscriptionOptions(**options)
        transcriber = make_transcriber(self.media, self.tokenizer, audio, sampling_params, chosen)
        part = transcriber.advance()
        while part is not None:
            [output] = self.generate(part.prompt, part.params, progress=False)
            part = transcriber.advance(output)
        return transcriber.result()

    def encode(
        self, prompts: Prompts, pooling_params: Pooling = None, *, lora: Loras = None, progress: bool | None = None
    ) -> list[PoolingRequestOutput]:
        """Pool one prompt or many as their parameters say, in one list in the order given.

        None: an embedding of each. lora, errors are those of `generate`.
        """
        from foreword.engine.pooling import pooling_output

        given = PoolingParams() if pooling_params is None else pooling_params
        jobs = self._jobs(prompts, given, lora, kind=POOLING)
        outputs = self._run(jobs, progress)
        return [pooling_output(output) for output in outputs]

    def embed(
        self, prompts: Prompts, pooling_params: Pooling = None, *, lora: Loras = None, progress: bool | None = None
    ) -> list[F32]:
        """Return the embedding of each prompt, float32 [dimensions], of unit length unless the parameters say
        otherwise.

        Raises the first error of a request that failed; `encode` has the outputs of the others.
        """
        return [output.outputs.data for output in self.encode(prompts, pooling_params, lora=lora, progress=progress)]

    def classify(
        self, prompts: Prompts, *, lora: Loras = None, progress: bool | None = None
    ) -> list[PoolingRequestOutput]:
        """Return the probabilities of each prompt's labels, in ``outputs.probs``; the model's ``pooling.labels`` name
        them.
        """
        return self.encode(prompts, PoolingParams(task="classify"), lora=lora, progress=progress)

    def reward(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | None = None,
        *,
        lora: Loras = None,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return what the model's head gives for each prompt, or for each of its steps, in ``outputs.data``."""
        from foreword.engine.pooling import with_task

        return self.encode(prompts, with_task(pooling_params, "reward"), lora=lora, progress=progress)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        lora: str | None = None,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return how well each document fits its query, in ``outputs.score``: query i with document i, or one with all.

        A model with a head of one output reads both texts together; for others it is the cosine of the embeddings.
        lora: the name of an adapter, for all texts.
        """
        from foreword.engine.pooling import plan_scores

        plan = plan_scores(self.tokenizer, self.model.pooling, queries, documents, pooling_params)
        return plan.read(self.encode(plan.prompts, plan.params, lora=lora, progress=progress))

    def _jobs(
        self, prompts: Prompts, given: object, lora: Loras, *, kind: OneEach[Any] = PARAMS, stream: bool = False
    ) -> list[CheckedRequest]:
        listed, check = as_list(prompts), self.engine.check
        params, loras = one_each(*kind, given, listed), one_each(*LORA, lora, listed)
        return [
            CheckedRequest(check(f"prompts[{i}]", prompt, params[i], lora=loras[i], stream=stream), index=i)
            for i, prompt in enumerate(listed)
        ]

    def _chats(
        self,
        messages: Conversations,
        sampling_params: Params,
        lora: Loras,
        options: Mapping[str, Any],
        *,
        stream: bool = False,
    ) -> list[CheckedRequest]:
        from foreword.engine.chat import chat_options, make_chat

        conversations, limit = as_conversations(messages), self.engine.states.max_model_len
        params, loras = one_each(*PARAMS, sampling_params, conversations), one_each(*LORA, lora, conversations)
        jobs = []
        chosen = chat_options(self.tokenizer, options)
        for i, conversation in enumerate(conversations):
            own = params[i] or self.engine.default_params
            chat = make_chat(self.tokenizer, conversation, own, limit, chosen, self.media, self.engine.follows_grammars)
            name = f"prompts[{i}]"
            group = self.engine.check(
                name, chat.prompt, chat.params, prompt_text=chat.text, lora=loras[i], stream=stream
            )
            jobs.append(CheckedRequest(group, chat.reader(), i))
        return jobs

    def _run(self, jobs: Sequence[CheckedRequest], progress: bool | None) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        with self._transaction:
            names = self._add(jobs)
            with progress_bar(len(jobs), show=progress) as advance:
                while len(results) < len(jobs):
                    for output in self._step(names):
                        results[output.request_id] = output
                        advance(1, sum(c.num_tokens for c in output.outputs))
            self._running = []
        raise_if_all_failed(results.values())
        return [job.read(results[job.group.request_id]) for job in jobs]

    def _stream(self, jobs: Sequence[CheckedRequest]) -> Iterator[RequestOutput]:
        running: dict[str, CheckedRequest] = {}
        finals: list[RequestOutput] = []
        try:
            self._begin(jobs, running)
            while running:
                for output in self._next(running):
                    job = running[output.request_id]
                    if output.finished:
                        finals.append(output)
                        del running[output.request_id]
                    yield job.read(output)
        finally:
            self._leave(jobs, running)
        raise_if_all_failed(finals)

    def _begin(self, jobs: Sequence[CheckedRequest], running: dict[str, CheckedRequest]) -> None:
        """Add the requests of a stream."""
        with self._transaction:
            self._streaming |= self._add(jobs)
            running.update((job.group.request_id, job) for job in jobs)
            self._running = []

    def _next(self, running: Mapping[str, CheckedRequest]) -> list[RequestOutput]:
        """Return the outputs of a stream, from a step of its own if others have run none for it."""
        with self._transaction:
            unread = [self._unread.pop(name) for name in list(self._unread) if name in running]
            outputs = unread or self._step(running)
            if not outputs and not any(name in self.engine for name in running):
                raise EngineError("the outputs of a stream are missing: only the LLM may step or abort in its engine")
            return outputs

    def _leave(self, jobs: Sequence[CheckedRequest], running: Mapping[str, CheckedRequest]) -> None:
        """End a stream: requests that still run are aborted; in the middle of a step, the next step aborts them."""
        self._abandoned += running
        for job in jobs:
            self._streaming.discard(job.group.request_id)
            self._unread.pop(job.group.request_id, None)
        with suppress(EngineError), self._transaction:
            self._abort_abandoned()

    def _add(self, jobs: Sequence[CheckedRequest]) -> set[str]:
        """Add requests under names that are free, and return these. In `_running` until they are in safe hands."""
        self._check_open()
        self._running = [job.group for job in jobs]
        for group in self._running:
            group.request_id = next(name for name in map(str, self._ids) if name not in self.engine)
            self.engine.add(group)
        return {group.request_id for group in self._running}

    def _step(self, names: Collection[str]) -> list[RequestOutput]:
        """Run a step and return the outputs of these requests. Those of streams are kept, and others given back."""
        self._check_open()
        self._abort_abandoned()
        mine: list[RequestOutput] = []
        others: dict[str, RequestOutput] = {}
        try:
            for output in self.engine.step():
                name = output.request_id
                if name in names:
                    mine.append(output)
                else:
                    kept = self._unread if name in self._streaming else others
                    kept[name] = output.following(kept.get(name))
        finally:
            self.engine.give_back(others.values())
        return mine

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            with suppress(ForewordError):
                self.engine.abort(self._abandoned[0])
            self._abandoned.popleft()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("this LLM is closed: make a new one")

    def _abort_running(self) -> None:
        """Abort every request of the batch that is still in the engine, also after an interrupt."""
        while self._running:
            with suppress(Exception):  # an observer's
                self.engine.abort(self._running[-1].request_id)
            self._running.pop()


def raise_if_all_failed(outputs: Collection[RequestOutput]) -> None:
    """Raise the first error if every request failed."""
    failures = [output.failure for output in outputs if output.failure is not None]
    if failures and len(failures) == len(outputs):
        raise failures[0]


def as_list(prompts: object) -> list[Prompt]:
    """Return one prompt as a list of one; a list of token ids is one prompt, a list of lists or texts many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    is_scalar = isinstance(prompts, np.ndarray) and not prompts.ndim
    is_bytes = isinstance(prompts, bytes | bytearray | memoryview)
    if is_scalar or is_bytes or not isinstance(prompts, Sequence | np.ndarray):
        reason = "must be a text, token ids, a dict with embeddings, or a list of these"
        raise RequestError(None, "prompts", prompts, reason, "Pass one of them.")
    items = list(prompts)
    if not items or isinstance(items[0], str | Mapping) or np.ndim(items[0]) > 0:
        return items
    return [items]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Sequence[Message]]:
    """Return one conversation as a list of one. Raise RequestError without any message."""
    from foreword.engine.chat import as_messages

    if isinstance(messages, str | Mapping):
        return [as_messages(messages)]
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            None,
            "messages",
            messages,
            "must be a string or a non-empty list of messages",
            "Give a text, or at least one message.",
        )
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(map(as_messages, messages))


def one_each(field: str, kind: type[V], example: str, given: object, prompts: Sequence[object]) -> Sequence[V | None]:
    """Return one value of a kind per prompt. Raise RequestError for anything else."""
    if given is None or isinstance(given, kind):
        return [given] * len(prompts)
    if not isinstance(given, Sequence) or not all(one is None or isinstance(one, kind) for one in given):
        raise RequestError(None, field, given, f"must be a {kind.__name__}", f"Give {example}, or a list of them.")
    if len(given) != len(prompts):
        reason, fix = f"there are {len(prompts)} prompts", "Give one, or one per prompt."
        raise RequestError(None, field, f"{len(given)} values", reason, fix)
    return given
