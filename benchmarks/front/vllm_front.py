"""vLLM's OpenAI server as it is, but for the engine: each running request gets a token whenever the server asks.

    python vllm_front.py DIRECTORY PORT

Parsing, templates, tokenizing, detokenizing and HTTP are vLLM's. Left out are the engine's process and the messages to
and from it: the figures are an upper bound.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient


class NoEngine:
    """The client of an engine that has computed everything already."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._left: dict[str, int] = {}  # tokens by request
        self._has_work = asyncio.Event()
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._has_work.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        await self._has_work.wait()
        await asyncio.sleep(0)  # the server's turn
        outputs = []
        for name, left in list(self._left.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(EngineCoreOutput(name, [self._token_id], finish_reason=reason))
            self._left[name] = left - 1
            if reason is not None:
                del self._left[name]
        if not self._left:
            self._has_work.clear()
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, names: list[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_async"):
            raise AttributeError(name)

        async def nothing(*arguments: object, **named: object) -> None:
            pass

        return nothing


def main(directory: str, port: str) -> None:
    from transformers import AutoTokenizer

    token_id = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("\u0120time")
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: NoEngine(token_id))
    parser = make_arg_parser(FlexibleArgumentParser())
    options = ["--model", directory, "--port", port, "--host", "127.0.0.1", "--load-format", "dummy"]
    args = parser.parse_args([*options, "--disable-uvicorn-access-log", "--max-model-len", "1024"])
    asyncio.run(run_server(args))


if __name__ == "__main__":
    main(*sys.argv[1:])
