"""Answers of gpt-oss: messages of several channels, each with marks, of which the last one may be a stop token."""

import tokenizers

from foreword.messages import FORMATS, parse_message
from foreword.messages.formats import format_of_template
from foreword.models.tokenizer_parts import turn_ends

THOUGHT = "<|channel|>analysis<|message|>Add them.<|end|>"


def test_reasoning_and_answer_are_told_apart():
    message = parse_message(f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>4", FORMATS["harmony"])
    assert (message.reasoning, message.content, message.tool_calls) == ("Add them.", "4", ())


def test_a_call_ends_where_the_stop_token_was():
    for head in ("<|channel|>commentary to=functions.add", " to=functions.add<|channel|>commentary"):
        for kind in ("", " json", " <|constrain|>json"):
            text = f'{THOUGHT}<|start|>assistant{head}{kind}<|message|>{{"a": 1}}'
            [call] = parse_message(text, FORMATS["harmony"], tool_names=["add"]).tool_calls
            assert (call.name, call.arguments, call.error) == ("add", '{"a": 1}', None)


def test_the_template_of_gpt_oss_belongs_to_harmony():
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
    assert format_of_template(template) is FORMATS["harmony"]


def test_the_end_of_a_message_ends_no_turn_where_turns_have_marks_of_their_own():
    def ends(*marks):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
        return [backend.id_to_token(i) for i in turn_ends(backend)]

    assert ends("<|end|>", "<|call|>", "<|return|>") == ["<|call|>", "<|return|>"]
    assert ends("<|end|>", "<|user|>") == ["<|end|>"]
