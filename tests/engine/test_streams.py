"""Synchronous streams of an `LLM`: several at the same time, closed early, beside other users."""

# ruff: noqa: F811 (fixtures)
import gc

import pytest
from test_llm import llm  # noqa: F401

from foreword import SamplingParams
from foreword.errors import EngineError, RequestError

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def is_empty(llm):
    return not llm.engine.has_work and llm.engine.cache.pool.num_used == 0


def test_a_stream_gives_the_text_of_generate(llm):
    (whole,) = llm.generate("abc", PARAMS)
    outputs = list(llm.stream("abc", PARAMS))
    assert "".join(output.outputs[0].new_text for output in outputs) == whole.outputs[0].text
    assert outputs[-1].outputs == whole.outputs
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == 8


def test_prompts_of_a_stream_run_together(llm):
    prompts = ["abc", [1, 2], "d", "ef", "g"]
    whole = llm.generate(prompts, PARAMS)
    texts, order = [""] * len(prompts), []
    for output in llm.stream(prompts, PARAMS):
        texts[output.prompt_index] += output.outputs[0].new_text
        order.append(output.prompt_index)
    assert texts == [output.outputs[0].text for output in whole]
    assert order[:3] != sorted(order)[:3]  # not one after another
    assert list(llm.stream([], PARAMS)) == []


def test_streams_and_other_users_do_not_disturb_each_other(llm):
    alone = {text: llm.generate(text, PARAMS)[0].outputs[0].text for text in ("abc", "de", "f", "gh")}
    llm.engine.add_request("direct", "gh", PARAMS, stream=True)
    first, second = llm.stream("abc", PARAMS), llm.stream("de", PARAMS)
    texts = {"abc": next(first).outputs[0].new_text, "de": next(second).outputs[0].new_text}
    assert llm.generate("f", PARAMS)[0].outputs[0].text == alone["f"]
    for stream, name in ((second, "de"), (first, "abc")):
        texts[name] += "".join(output.outputs[0].new_text for output in stream)
    direct = []
    while llm.engine.has_work:
        direct += llm.engine.step()
    texts |= {"f": alone["f"], "gh": "".join(output.outputs[0].new_text for output in direct)}
    assert texts == alone
    assert is_empty(llm)


@pytest.mark.parametrize("end", ["close", "forget", "raise"])
def test_a_stream_that_ends_early_aborts_its_requests_alone(llm, end):
    alone = llm.generate("de", PARAMS)[0].outputs[0].text
    other, stream = llm.stream("de", PARAMS), llm.stream(["abc", "xyz", "a", "b", "c"], PARAMS)
    text = next(other).outputs[0].new_text
    next(stream)
    if end == "close":
        stream.close()
    elif end == "raise":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    else:
        del stream
        gc.collect()
    assert llm.engine.num_unfinished == 1
    assert text + "".join(output.outputs[0].new_text for output in other) == alone
    assert is_empty(llm)


def test_a_stream_that_is_never_read_runs_nothing(llm):
    llm.stream("abc", PARAMS)
    assert is_empty(llm)


@pytest.mark.long
def test_a_stream_forgotten_inside_a_step_ends_with_the_next_one(llm):
    stream = llm.stream("abc", PARAMS)
    next(stream)
    streams = [stream]
    del stream
    launch = llm.engine.executor.launch

    def forgetful(*args):
        streams.clear()
        gc.collect()
        return launch(*args)

    llm.engine.executor.launch = forgetful
    llm.generate("d", PARAMS)
    llm.engine.executor.launch = launch
    assert llm.engine.num_unfinished == 0
    assert is_empty(llm)


def test_a_bad_prompt_is_refused_before_anything_runs(llm):
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        llm.stream(["a", []], PARAMS)
    assert is_empty(llm)


def test_a_step_that_fails_ends_the_stream(llm):
    stream = llm.stream("abc", PARAMS)
    next(stream)
    launch, llm.engine.executor.launch = llm.engine.executor.launch, None
    with pytest.raises(TypeError):
        next(stream)
    llm.engine.executor.launch = launch
    assert is_empty(llm)
    assert len(llm.generate("abc", PARAMS)) == 1


def test_a_closed_llm_ends_its_streams(llm):
    stream = llm.stream("abc", PARAMS)
    next(stream)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        next(llm.stream("abc", PARAMS))


def test_outputs_that_another_took_end_the_stream(llm):
    stream = llm.stream("abc", PARAMS)
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(EngineError, match="only the LLM may step"):
        list(stream)


def test_best_of_streams_its_final_output(llm):
    (output,) = llm.stream("abc", SamplingParams(best_of=3, n=2, seed=1, max_tokens=4))
    assert output.finished
    assert len(output.outputs) == 2
