"""`foreword run`: answer a prompt, and show the steps."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from foreword import LLM, RequestOutput
from foreword.cli.answers import Printer, answer, check_generates, summary, timings
from foreword.cli.images import content_of, local_path, read_local_image
from foreword.cli.options import ModelOptions, check_used, engine_options, grouped
from foreword.cli.sampling_options import GivenParams, sampling_options
from foreword.cli.terminal import Interrupt, has_input, note, read_input, terminal_width
from foreword.errors import ConfigError, RequestError
from foreword.executors.native import NativeExecutor
from foreword.models.quantized import conversions
from foreword.sampling import TokenLogprobs


@grouped(engine=engine_options(without=("seed",)), sampling=sampling_options())
def run(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; standard input is appended. -: standard input only."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image", metavar="FILE", help="An image before the prompt, for a model that takes images. Repeatable."
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without a chat template.")] = False,
    show_steps: Annotated[
        bool, typer.Option("--explain", help="Show the tables of the first steps and the memory in use.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, max=2**20, metavar="N", help="Number of steps that --explain shows.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print the timing summary.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the timing summary even when output is not a terminal.")
    ] = False,
    *,
    engine: ModelOptions,
    sampling: GivenParams,
) -> None:
    """Generate an answer with a real model on this machine's CPU.

    The answer is shown as it is generated; Ctrl-C ends it, with exit status 130.
    """
    if not show_steps:
        check_used(context, ("steps",), "without --explain")
    text = _prompt_text(prompt)
    started = time.perf_counter()
    llm = LLM(engine.model, **engine.seeded(sampling.values.get("seed")))
    loaded = time.perf_counter() - started
    check_generates(llm, engine.model)
    remarks = conversions(llm.model.weights.values()) + sampling.remarks(llm.engine.suggested)
    if not quiet and remarks:
        note(*remarks)
    params = sampling.over(llm.default_sampling_params())
    tables: list[str] = []  # those of the first steps
    if show_steps:
        from foreword.insight.record import StepInspector  # here: an answer alone does not need these
        from foreword.insight.token_text import text_of

        if isinstance(llm.engine.executor, NativeExecutor):
            print(llm.engine.executor.memory_report(), file=sys.stderr)
        inspector = StepInspector(steps, terminal_width(), text_of(llm.tokenizer))
        llm.engine.observers.add(inspector)
        tables = inspector.shown
    is_text = raw or not llm.tokenizer.has_chat_template
    if is_text and system is not None:
        reason = "--raw is given" if raw else f"model {engine.model!r:.80} has no chat template"
        raise ConfigError(f"--system: {reason}, and it needs one. Leave it out, or write it into the prompt")
    if images and is_text:
        reason = "--raw is given" if raw else f"model {engine.model!r:.80} has no chat template"
        raise ConfigError(f"--image: {reason}, and it needs one. Leave it out")
    paths = [local_path(image, "--image") for image in images or ()]
    for path in paths:
        read_local_image(llm, path, "--image")
    if is_text and not raw and not quiet:
        note(f"model {engine.model!r:.80} has no chat template: the prompt is continued, as with --raw")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    question = [*messages, {"role": "user", "content": content_of(text, paths)}]
    outputs = (
        llm.stream(text, params, lora=engine.lora) if is_text else llm.chat_stream(question, params, lora=engine.lora)
    )
    output = None
    shows_text = not as_json and params.n == 1
    with Interrupt() as interrupt, Printer(strip=not is_text, is_shown=shows_text) as printer:
        for output in answer(outputs, interrupt):
            printer.show(output.outputs[0].text)
    llm.engine.close()  # writes the end of a recording
    if output is None:  # interrupted before the first
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(_as_json(llm, text, output, tables)))
    elif not shows_text:
        _print_all(output, strip=not is_text)
    if output.error is not None:
        raise output.error
    if verbose or (sys.stderr.isatty() and sys.stdout.isatty() and not as_json and not quiet):
        note(*summary(llm, output))
    if verbose:
        note(f"loaded in {loaded:.2f} s", output.metrics.cache_report)
    if not as_json:
        for table in tables:
            print("\n" + table)
        if tables:
            print("\n`foreword explain` ends with what each row is and who reads it.")
    if interrupt.pressed:
        raise typer.Exit(130)


def _prompt_text(argument: str | None) -> str:
    """Return the prompt: the argument, standard input, or both, one after the other."""
    typed = [] if argument in (None, "-") else [argument]
    if argument == "-" or has_input():
        typed.append(read_input())
    elif argument is None:
        raise typer.BadParameter(
            "give it as an argument or on standard input; `foreword chat` is for conversations.", param_hint="PROMPT"
        )
    text = "\n\n".join(part for part in typed if part)
    if not text.strip():
        raise RequestError(None, "prompt", text, "is empty", "Give a text.")
    return text


def _print_all(output: RequestOutput, *, strip: bool) -> None:
    """Print several completions, each below a line with its number."""
    for completion in output.outputs:
        print(f"--- {completion.index + 1} of {len(output.outputs)} ---")
        with Printer(strip=strip) as printer:
            printer.show(completion.text)


def _as_json(llm: LLM, prompt: str, output: RequestOutput, tables: list[str]) -> dict[str, object]:
    """Return the result for programs. The keys text, token_ids and finish_reason are those of the first completion."""
    completions = [
        {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason or "abort",
            "stop_reason": completion.stop_reason,
            "logprobs": None if completion.logprobs is None else list(map(_values, completion.logprobs)),
        }
        for completion in output.outputs
    ]
    of_prompt = output.prompt_logprobs
    return {
        "prompt": prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        **completions[0],
        "completions": completions,
        "prompt_logprobs": None if of_prompt is None else [e and _values(e) for e in of_prompt],
        "timings": timings(llm, output),
        "steps": tables,
    }


def _values(entry: TokenLogprobs) -> dict[int, float]:
    return {token: found.logprob for token, found in entry.items()}
