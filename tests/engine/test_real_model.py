"""The default model on the native executor: bit-equal with any other requests, chunking, depth and drafts."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from foreword import LLM, AsyncLLM
from foreword.batch import SamplingParams
from foreword.engine import EngineConfig, engine_config
from foreword.engine.build import build_engine, load
from foreword.engine.speculation import SpeculationConfig
from foreword.native import available

PROMPTS = [
    "The capital of France is",
    "List the numbers: 1, 2, 3, 4, 5, 6,",
    "The quick brown fox jumps over the lazy dog. The quick brown",
]
PARAMS = [SamplingParams(temperature=t, seed=i, max_tokens=8, logprobs=1) for i, t in enumerate((0.0, 0.8, 0.0))]


def serve(model, config: EngineConfig, *, alone: bool = False) -> list[tuple]:
    engine = build_engine(model, config)
    outputs = {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
        while engine.has_work and (alone or i == len(PROMPTS) - 1):
            outputs |= {o.request_id: o.outputs[0] for o in engine.step()}
    engine.close()
    return [(outputs[str(i)].token_ids, outputs[str(i)].logprobs) for i in range(len(PROMPTS))]


@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_other_requests_change_no_bit(smollm2_path: Path):
    model = load(smollm2_path)
    alone = serve(model, EngineConfig(max_model_len=64, prefix_caching=False), alone=True)
    for config in (
        engine_config({"max_model_len": 64, "max_num_batched_tokens": 5}),
        EngineConfig(max_model_len=64, async_scheduling=True),
        engine_config({"max_model_len": 64, "num_blocks": 6, "reserve_full_prompt": False}),
        EngineConfig(max_model_len=64, speculation=SpeculationConfig()),
        EngineConfig(max_model_len=64, speculation=SpeculationConfig(adaptive=False), async_scheduling=True),
    ):
        assert serve(model, config) == alone


@pytest.mark.long
@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_python_runs_while_the_native_model_computes(smollm2_path: Path):
    """Threads are not switched by time here, so another one runs only because the model releases the lock."""
    engine = build_engine(load(smollm2_path), EngineConfig(max_model_len=1024))
    draw, began, events = engine.executor.draw, threading.Event(), []

    def watched(batch, sampling):
        began.set()
        drawn = draw(batch, sampling)
        events.append("model")
        return drawn

    engine.executor.draw = watched
    engine.add_request("a", list(range(1000, 1900)), SamplingParams(temperature=0.0, max_tokens=1))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        worker = threading.Thread(target=engine.step)
        worker.start()
        began.wait()
        events.append("python")
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert events == ["python", "model"]


@pytest.mark.long
@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_coroutines_get_what_a_batch_run_gets(smollm2_path: Path):
    messages = [[{"role": "user", "content": f"Say {word}."}] for word in ("yes", "no", "maybe")]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)

    async def main() -> list[str]:
        async with AsyncLLM(str(smollm2_path), max_model_len=128) as llm:

            async def ask(conversation) -> str:
                return [o async for o in llm.chat(conversation, greedy)][-1].outputs[0].text

            return await asyncio.gather(*map(ask, messages))

    wanted = LLM(str(smollm2_path), max_model_len=128).chat(messages, greedy, progress=False)
    assert asyncio.run(main()) == [output.outputs[0].text for output in wanted]
