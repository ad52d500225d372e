"""`foreword explain`: the tables of the first steps of some requests, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from foreword.batch import InputBatch
from foreword.cli.options import check_used, counts, option
from foreword.cli.terminal import print_text, terminal_width
from foreword.errors import ConfigError
from foreword.insight.changes import StepChanges
from foreword.insight.legend import legend
from foreword.insight.page import write_page
from foreword.insight.record import step_as_json
from foreword.insight.toy import TokenAt, given_step, ids_by_place, toy_steps
from foreword.insight.worked import EXAMPLES, ExampleName, Figure, compared

PROMPTS, BUDGET, BLOCK_SIZE, MAX_MODEL_LEN, STEPS = "3,2,8", 10, 2, 12, 2
LONGEST = 2**16  # tokens of a request whose progress is given


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Steps to show. steps: makes them, and records them in a file if there is one. title: above them.

    ids: says how token ids are made. text_of: the text of a token. figures: those of a document, of each step.
    """

    steps: Callable[[Path | None], Iterator[InputBatch]]
    title: str = ""
    ids: str = ""
    text_of: Callable[[int], str] | None = None
    figures: Sequence[tuple[Figure, ...]] = ()


def explain(
    context: typer.Context,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Prompts in place of --prompts, for --model.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help=f"Prompt lengths, one per request, separated by commas. [default: {PROMPTS}]")
    ] = None,
    computed: Annotated[
        str | None, typer.Option(help="Tokens that each request has computed before the step of --scheduled.")
    ] = None,
    scheduled: Annotated[
        str | None,
        typer.Option(help="Show a single step: the tokens that each request computes in it, separated by commas."),
    ] = None,
    budget: Annotated[int | None, option("max_num_batched_tokens", "--budget", default=BUDGET)] = None,
    block_size: Annotated[int | None, option("block_size", default=BLOCK_SIZE)] = None,
    max_model_len: Annotated[int | None, option("max_model_len", default=f"{MAX_MODEL_LEN}, or what is needed")] = None,
    null_block: Annotated[
        int, typer.Option(min=-1, max=0, help="0: block 0 means no block. -1: blocks are numbered from 0.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, max=2**20, help=f"Number of steps to show. [default: {STEPS}]")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Take the tokens of TEXT from this model's tokenizer.")
    ] = None,
    example: Annotated[
        ExampleName | None,
        typer.Option(
            metavar="NAME", help=f"Show every worked example of a document and compare: {', '.join(EXAMPLES)}."
        ),
    ] = None,
    token: Annotated[
        int | None, typer.Option(min=0, max=2**20, help="Describe the origin of one token of each step.")
    ] = None,
    with_legend: Annotated[
        bool,
        typer.Option(
            "--legend/--no-legend",
            help="Print what each row means, and which part of an engine reads it. [default: true]",
            show_default=False,
        ),
    ] = True,
    html: Annotated[
        Path | None, typer.Option(help="Write the page of `foreword inspect` for these steps, in place of text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tensors as JSON, one step per line.")] = False,
) -> None:
    """Show what a step prepares: which tokens, at which positions, from which rows, into which slots.

    The default is three requests with prompts of 3, 2 and 8 tokens, 10 tokens per step and blocks of 2: the first step
    computes all of two prompts and a chunk of the third, the second mixes two decodes with the rest of the chunk.
    """
    if as_json and token is not None:
        raise typer.BadParameter("cannot be combined with --json; give one of them", param_hint="--token")
    if html is not None and (as_json or token is not None):
        raise typer.BadParameter("cannot be combined with --json or --token; give one of them", param_hint="--html")
    sizes = (
        "texts",
        "prompts",
        "computed",
        "scheduled",
        "budget",
        "block_size",
        "max_model_len",
        "null_block",
        "steps",
    )
    block_size = block_size or BLOCK_SIZE
    if example is not None:
        check_used(context, (*sizes, "model"), "with --example")
        shown = [
            _Shown(steps=run.steps, title=f"{EXAMPLES[example].document}: {run.title}", figures=run.figures)
            for run in EXAMPLES[example].runs
        ]
    elif scheduled is not None or computed is not None:
        check_used(context, ("texts", "model", "budget", "steps"), "with --scheduled, which is one step")
        shown = [_given(prompts, computed, scheduled, block_size, max_model_len, null_block)]
    else:
        shown = [_planned(texts or (), model, prompts, budget, block_size, max_model_len, null_block, steps)]
    if html is not None:
        _write_html(shown, html)
    elif as_json:
        for one in shown:
            for batch in one.steps(None):
                print(step_as_json(batch))
    elif token is not None:
        _describe(shown, token)
    else:
        _print_tables(shown, with_legend=with_legend)


def _given(
    prompts: str | None, computed: str | None, scheduled: str | None,
    block_size: int, max_model_len: int | None, null_block: int,
) -> _Shown:  # fmt: skip
    """Return the one step of requests whose progress is given."""
    if scheduled is None:
        raise typer.BadParameter("give --scheduled too, the tokens that each request computes", param_hint="--computed")
    now = counts("--scheduled", scheduled, LONGEST)
    done = [0] * len(now) if computed is None else counts("--computed", computed, LONGEST, least=0)
    lengths = None if prompts is None else counts("--prompts", prompts, LONGEST)
    for flag, given in (("--computed", done), ("--prompts", lengths)):
        if given is not None and len(given) != len(now):
            raise typer.BadParameter(f"has {len(given)} numbers, and --scheduled {len(now)}", param_hint=flag)
    ends = [c + n for c, n in zip(done, now, strict=True)]
    longest = max([*ends, *(lengths or ())])
    if max_model_len is not None and longest > max_model_len:
        raise typer.BadParameter(
            f"{max_model_len}: a request has {longest} tokens; raise it to that", param_hint="--max-model-len"
        )
    length = max_model_len or max(longest, MAX_MODEL_LEN)
    return _Shown(
        steps=lambda record: given_step(
            now, done, block_size=block_size, max_model_len=length, null_block=null_block, prompt_lens=lengths,
            record=record,
        ),
        ids=_ids(length),
    )  # fmt: skip


def _planned(
    texts: Sequence[str], model: str | None, prompts: str | None, budget: int | None,
    block_size: int, max_model_len: int | None, null_block: int, steps: int | None,
) -> _Shown:  # fmt: skip
    """Return the first steps that the scheduler plans for prompts of given lengths, or for texts."""
    token_at: TokenAt | None = None
    vocab_size, text_of = None, None
    if model is None:
        if texts:
            raise typer.BadParameter("give --model too, such as smollm2, for its tokenizer", param_hint="TEXT")
        most = max_model_len or MAX_MODEL_LEN
        lengths, ids = counts("--prompts", PROMPTS if prompts is None else prompts, most - 1), _ids(most)
    else:
        if prompts is not None or not texts:
            raise typer.BadParameter("give prompts as TEXT, and no --prompts", param_hint="--model")
        from foreword.insight.token_text import text_of as text_of_tokenizer  # only texts need a tokenizer
        from foreword.models.loader import load_model

        tokenizer = load_model(model).tokenizer
        encoded = [tokenizer.encode(text) for text in texts]
        if not all(encoded):
            raise ConfigError(f"TEXT: {texts[encoded.index([])]!r:.80} has no tokens. Give a longer text")
        lengths = list(map(len, encoded))
        most = max_model_len or max(lengths) + (steps or STEPS) + 1
        if max(lengths) >= most:
            raise ConfigError(f"TEXT: has {max(lengths)} tokens, and max_model_len={most}. Shorten it, or raise that")
        vocab_size, text_of = tokenizer.vocab_size, text_of_tokenizer(tokenizer)
        ids = "No model runs: after its prompt, a request is given the tokens of its prompt again."

        def token_at(request: int, position: int) -> int:
            return encoded[request][position % lengths[request]]

    return _Shown(
        steps=lambda record: toy_steps(
            lengths, budget=budget or BUDGET, block_size=block_size, max_model_len=most, steps=steps or STEPS,
            record=record, null_block=null_block, token_at=token_at, vocab_size=vocab_size,
        ),
        ids=ids,
        text_of=text_of,
    )  # fmt: skip


def _ids(max_model_len: int) -> str:
    at = ids_by_place(max_model_len)
    return f"Token ids tell their place: {at(0, 0)} + {at(1, 0) - at(0, 0)}·r + p for request r, position p."


def _write_html(shown: Sequence[_Shown], html: Path) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder, "explain.jsonl")
        for _ in shown[0].steps(file):
            pass
        print(f"{html}: {write_page(file, html, text_of=shown[0].text_of)}")
    for one in shown[1:]:
        print_text(f"Not on the page, which has one engine's steps: {one.title}")


def _describe(shown: Sequence[_Shown], token: int) -> None:
    widest = 0
    for one in shown:
        for batch in one.steps(None):
            widest = max(widest, batch.num_tokens)
            if token < batch.num_tokens:
                print_text(f"Step {batch.step}. {batch.explain(token=token, text_of=one.text_of)}")
    if token >= widest:
        raise typer.BadParameter(f"{token}: the steps have tokens 0 to {widest - 1}", param_hint="--token")


def _print_tables(shown: Sequence[_Shown], *, with_legend: bool) -> None:
    width, names, is_first = terminal_width(), set[str](), True
    for one in shown:
        changes = StepChanges(one.text_of)
        if one.title:
            print_text(("" if is_first else "\n") + one.title + "\n")
        for i, batch in enumerate(one.steps(None)):
            explained = batch.explain(width=width, text_of=one.text_of)
            names.update(explained.names)
            parts = [str(explained), changes.since_last(batch, width)]
            parts += [compared(batch, one.figures[i], width)] if one.figures else []
            print(("\n" if i else "") + "\n\n".join(filter(None, parts)))
            is_first = False
        if one.ids:
            print()
            print_text(one.ids)
    if with_legend:
        print("\n" + legend(names, width))
