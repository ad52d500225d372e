"""`foreword chat`: a conversation in the terminal, or one message per line through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foreword import LLM, RequestOutput, SamplingParams
from foreword.cli.answers import Printer, answer, check_generates, endings, summary
from foreword.cli.chat_input import Command, Interrupted, Message, read, unknown
from foreword.cli.conversation import Conversation, shown_content
from foreword.cli.images import content_of, local_path, read_local_image
from foreword.cli.kept import Kept, state_folder
from foreword.cli.options import ModelOptions, engine_options, grouped
from foreword.cli.sampling_options import FIELDS, OF_ONE_PROMPT, GivenParams, sampling_options, setting
from foreword.cli.terminal import Interrupt, note
from foreword.cli.wording import of_chat
from foreword.engine import EngineMetrics
from foreword.errors import ConfigError, ForewordError, RequestError
from foreword.models.quantized import conversions
from foreword.models.registry import KNOWN
from foreword.names import counted

try:
    import readline  # gives `input` line editing and a history
except ImportError:  # not part of every Python
    readline = None  # type: ignore[assignment]

TOO_LONG = ("prompt", "prompt_token_ids")  # fields of the errors for a prompt that does not fit


@grouped(engine=engine_options(without=("seed",)), sampling=sampling_options(without=OF_ONE_PROMPT))
def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="A conversation that /save wrote.")] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Continue the last conversation of a terminal.")] = False,
    history: Annotated[
        bool,
        typer.Option(
            help="Keep typed lines and the last conversation for later chats of a terminal. [default: true]",
            show_default=False,
        ),
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print timing summaries.")] = False,
    *,
    engine: ModelOptions,
    sampling: GivenParams,
) -> None:
    """Talk with a model; it remembers the conversation.

    /help lists the commands of the chat. Ctrl-C ends an answer or empties the line, and in an empty line, pressed
    twice, it ends the chat, as Ctrl-D does. Through a pipe each line is a message, and an error ends the chat.
    """
    conversation, kept = Conversation(), Kept(state_folder())
    if load is not None and resume:
        raise typer.BadParameter("--load gives a conversation too; give one of them.", param_hint="--continue")
    if load is not None:
        conversation.load(load)
    elif resume:
        kept.load(conversation)
    if system is not None:
        conversation.system = system
    is_terminal = sys.stdin.isatty()
    own = kept if history and is_terminal else None
    Chat(engine, sampling, conversation, is_terminal=is_terminal, quiet=quiet, kept=own).run()


class Chat:
    """A model, a conversation, and the commands that change them."""

    def __init__(
        self,
        engine: ModelOptions,
        sampling: GivenParams,
        conversation: Conversation,
        *,
        is_terminal: bool,
        quiet: bool = False,
        kept: Kept | None = None,
    ) -> None:
        """Keep the data for later chats in ``kept``; with None, nothing is kept."""
        self.conversation, self._sampling = conversation, sampling
        self._kept, self._saved = kept, conversation.text
        self._engine, self._is_terminal = engine, is_terminal
        self._shows_speed = sys.stderr.isatty() and not quiet
        self._last: RequestOutput | None = None
        self._before: list[int] = []  # the tokens of the turn before the last
        self._images: list[Path] = []  # those of the next message
        self._start(engine.model)

    @property
    def params(self) -> SamplingParams:
        """Return the parameters of the next answer: the given ones, else the model's defaults."""
        return self._sampling.over(self.llm.default_sampling_params())

    def run(self) -> None:
        """Read messages and answer them until the end of the input."""
        if self._is_terminal:
            self._begin()
        else:
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
        ends_next = False  # whether Ctrl-C in an empty line ends the chat
        while True:
            try:
                line = read(self._next_line)
                ends_next = False
                if isinstance(line, Message):
                    self.say(line.text)
                elif line is not None and self.do(line):
                    return self._end()
            except EOFError:
                if self._is_terminal:
                    print()
                return self._end()
            except Interrupted as press:
                print()
                if press.is_empty and ends_next:
                    self._end()
                    raise KeyboardInterrupt from None
                ends_next = press.is_empty
                if ends_next:
                    note("Ctrl-C again or /exit ends the chat", *self._not_saved())
            except KeyboardInterrupt:  # a second one, in an answer
                if not self._is_terminal:
                    raise
                print()
            except ForewordError as error:
                if not self._is_terminal:
                    raise
                print(f"foreword: {of_chat(error)}", file=sys.stderr)
            if self._kept is not None and not self.conversation.is_empty:
                self._kept.save(self.conversation)

    def _begin(self) -> None:
        """Print the name of the model, and the end of the conversation that is continued."""
        note(self._name, f"{self.llm.engine.states.max_model_len} tokens", "/help lists the commands")
        if (known := KNOWN.get(self._name)) and known.remark:
            note(f"{self._name} is {known.remark}")
        if self._kept is not None and readline is not None:
            for line in self._kept.lines():
                readline.add_history(line)
        if not self.conversation.is_empty:
            note(f"the conversation has {counted(len(self.conversation.messages), 'message')}; it ends with")
            for message in (self.conversation.up_to_question() or [])[-1:] + self.conversation.answers():
                print(("" if message["role"] == "assistant" else ">>> ") + shown_content(message))

    def _not_saved(self) -> list[str]:
        if self.conversation.is_empty or self.conversation.text == self._saved:
            return []
        kept = "" if self._kept is None else "; `foreword chat --continue` goes on with it"
        return [f"the conversation is not saved: /save FILE does it{kept}"]

    def _end(self) -> None:
        if self._is_terminal and (left := self._not_saved()):
            note(*left) if self._kept is None else note("`foreword chat --continue` goes on with this conversation")

    def say(self, text: str) -> None:
        """Answer a message of the user.

        Raise RequestError if it does not fit; then it is not part of the conversation.
        """
        content = content_of(text, self._images)
        self._answer([*self.conversation.messages, {"role": "user", "content": content}])
        self._images = []

    def do(self, command: Command) -> bool:
        """Run a command. Returns whether it ends the chat. Raise RequestError for one that does not exist or fails."""
        if command.name in ("exit", "quit"):
            return True
        if command.name not in COMMANDS:
            raise unknown(command.name, [*COMMANDS, "exit"])
        COMMANDS[command.name].run(self, command)
        return False

    def _next_line(self, continues: bool) -> str:
        prompt = "... " if continues else ">>> "
        try:
            if self._is_terminal and sys.stdout.isatty():
                line = input(prompt)
                if self._kept is not None:
                    self._kept.add(line)
                return line
            if self._is_terminal:
                print(prompt, end="", file=sys.stderr, flush=True)
            if not (line := sys.stdin.readline()):
                raise EOFError
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            raise Interrupted(not continues and not (readline and readline.get_line_buffer())) from None
        return line.removesuffix("\n").removesuffix("\r")

    def _start(self, model: str) -> None:
        llm = LLM(model, **self._engine.seeded(self._sampling.values.get("seed")))
        if remarks := conversions(llm.model.weights.values()) + self._sampling.remarks(llm.engine.suggested):
            note(*remarks)
        check_generates(llm, model)
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"model {model!r:.80} has no chat template. Use `foreword run --raw`, or another model")
        self.llm, self._name, self._metrics = llm, model, EngineMetrics()
        llm.engine.observers.add(self._metrics)

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Answer the last of the messages; they and the answer become the conversation, which otherwise stays."""
        output = None
        with Interrupt() as interrupt, Printer(strip=True) as printer:
            try:
                for output in answer(self.llm.chat_stream(messages, self.params, lora=self._engine.lora), interrupt):
                    printer.show(output.outputs[0].text)
            except RequestError as error:
                if error.field not in TOO_LONG:
                    raise
                reason, fix = f"does not fit: {error.reason}", "Use /undo or /clear, or start with --max-model-len."
                raise RequestError(None, "conversation", f"{len(messages)} messages", reason, fix) from None
        if output is None:  # interrupted before the first
            return
        self._before = [] if self._last is None else self._last.prompt_token_ids + self._last.outputs[0].token_ids
        self._last = output
        if output.error is not None:
            raise output.error
        completion = output.outputs[0]
        said = {"role": "assistant", "content": completion.text}
        if completion.message is not None:
            said = completion.message.as_dict()
        if completion.text or not interrupt.pressed:
            self.conversation.messages = [*messages, said]
        if self._shows_speed:
            note(*summary(self.llm, output))
        elif not interrupt.pressed and (found := endings(self.llm, output)):
            note(*found)

    # -- commands ----------------------------------------------------------------------------------------------------

    def help(self, command: Command) -> None:
        for name, (form, text, _) in COMMANDS.items():
            print(f"/{name + ' ' + form:<18} {text}")
        print(f"/{'exit':<18} End the chat.")
        print('""" begins and ends a message of several lines.')
        print("A backslash at the end of a line joins the next. // begins a text with a slash.")

    def system(self, command: Command) -> None:
        if command.argument:
            self.conversation.system = " ".join(command.words) if command.argument in EMPTY else command.argument
        print(f"system prompt: {self.conversation.system or 'none'}")

    def model(self, command: Command) -> None:
        if command.argument:
            before = self.llm
            self._start(command.argument)
            before.close()
            self._last, self._before = None, []
        print(f"model: {self._name}, {self.llm.engine.states.max_model_len} tokens")

    def image(self, command: Command) -> None:
        path = local_path(_file(command), "/image")
        image = read_local_image(self.llm, path, "/image")
        self._images.append(path)
        print(f"image {len(self._images)} of the next message: {path.name}, {image.size}")

    def set(self, command: Command) -> None:
        words = command.words
        if len(words) > 1:
            name, value = setting(words[0], words[1:])
            sampling = replace(self._sampling, values={**self._sampling.values, name: value})
            params = sampling.over(self.llm.default_sampling_params())
            params.check(None, vocab_size=self.llm.engine.states.vocab_size)
            self._sampling = sampling
        for name in FIELDS if not words else [setting(words[0], ["none"])[0]]:
            if name not in OF_ONE_PROMPT:
                print(f"{name:<27} {_shown(getattr(self.params, name))}")

    def save(self, command: Command) -> None:
        self.conversation.save(_path(command))
        self._saved = self.conversation.text
        if (tiers := self.llm.engine.tiers) is not None:
            tiers.flush()  # a later /load need not compute it
        print(f"saved {counted(len(self.conversation.messages), 'message')}")

    def load(self, command: Command) -> None:
        self.conversation.load(_path(command))
        waits = "; /retry answers the last" if self.conversation.waits else ""
        self._saved = self.conversation.text
        print(f"loaded {counted(len(self.conversation.messages), 'message')}{waits}")

    def retry(self, command: Command) -> None:
        messages = self.conversation.up_to_question()
        if messages is None:
            raise RequestError(None, "command", "/retry", "there is no message to answer", "Type one.")
        if self.params.temperature == 0:
            note("temperature is 0, so that equal messages have equal answers; /set temperature 0.7")
        self._answer(messages)

    def undo(self, command: Command) -> None:
        messages = self.conversation.up_to_question()
        if messages is None:
            raise RequestError(None, "command", "/undo", "there is no message to remove", "Type one.")
        self.conversation.messages = messages[:-1]
        print(f"removed: {shown_content(messages[-1]):.60}")

    def clear(self, command: Command) -> None:
        self.conversation.clear()
        self._images = []
        print("removed all messages but the system prompt")

    def why(self, command: Command) -> None:
        """Print how much of the last prompt was in the cache, and where the prompt differs from the cached text."""
        if self._last is None:
            print("nothing was computed yet")
            return
        prompt, decode = self._last.prompt_token_ids, self.llm.tokenizer.decode
        print(self._last.metrics.cache_report)
        reused = self._last.metrics.num_cached_tokens
        print(f"computed from token {reused}: {decode(prompt[reused : reused + 12], False)!r}")
        if (miss := self._last.metrics.cache_miss) is not None:
            print(*self.llm.engine.refined(miss).explained(lambda ids: decode(ids, False)), sep="\n")
        if self._before:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._before, prompt, strict=False)))
            was_sampled = same == len(self._before) == reused + 1
            last = "; the last of them was sampled, and not computed yet" * was_sampled
            turn = f"the {len(self._before)} tokens of the turn before"
            print(f"{turn}: the first {same} are the beginning of the prompt{last}")
            if same < len(self._before):
                was, now = (decode(ids[same : same + 6], False) for ids in (self._before, prompt))
                print(f"then there was {was!r}, and now there is {now!r}")

    def stats(self, command: Command) -> None:
        found, states = self._metrics, self.llm.engine.states
        used = 0 if self._last is None else len(self._last.prompt_token_ids) + len(self._last.outputs[0].token_ids)
        print(f"answers            {found.num_requests_ended}")
        print(f"prompt tokens      {found.num_prompt_tokens}, {found.num_cached_tokens} of them reused")
        print(f"output tokens      {found.num_sampled_tokens}")
        print(f"drafts             {found.num_proposed_drafts}, {found.num_accepted_drafts} of them right")
        print(f"steps              {found.num_steps}")
        print(f"conversation       {used} of {states.max_model_len} tokens")


class _Command(NamedTuple):
    form: str
    help: str
    run: Callable[[Chat, Command], None]


EMPTY = ("''", '""')
COMMANDS = {
    "help": _Command("", "Show this list.", Chat.help),
    "system": _Command("TEXT", 'Set the system prompt; "" removes it.', Chat.system),
    "model": _Command("NAME", "Go on with another model.", Chat.model),
    "image": _Command("FILE", "Show the model an image with the next message.", Chat.image),
    "set": _Command("NAME VALUE", "Change how tokens are chosen; alone: show all settings.", Chat.set),
    "retry": _Command("", "Answer the last message again.", Chat.retry),
    "undo": _Command("", "Remove the last message and its answer.", Chat.undo),
    "clear": _Command("", "Remove all messages.", Chat.clear),
    "save": _Command("FILE", "Write the messages as JSON.", Chat.save),
    "load": _Command("FILE", "Read messages from JSON.", Chat.load),
    "why": _Command("", "Show what the prefix cache reused, and why not more.", Chat.why),
    "stats": _Command("", "Show the numbers of this chat.", Chat.stats),
}
"""Name → form of the argument, help, function."""


def _path(command: Command) -> Path:
    return Path(_file(command)).expanduser()


def _file(command: Command) -> str:
    if not (words := command.words):
        raise RequestError(None, f"/{command.name}", "", "needs a file", f"Type /{command.name} FILE.")
    return " ".join(words)


def _shown(value: object) -> str:
    return (
        "none" if value is None or value == () else "on" if value is True else "off" if value is False else f"{value}"
    )
