"""llama.cpp's operations on slots: conversations that are saved to files and restored."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from foreword.errors import ConfigError
from foreword.fields import STRING, Fields
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import FORBIDDEN, INVALID
from foreword.server.lists import check_query
from foreword.server.operation import Body, Operation
from foreword.server.replicas import Replicas, Spread
from foreword.server.reply import reply

NOT_SAVED = "slots cannot be saved: start the server with --slot-save-path, and without --replicas"


@dataclass(frozen=True, slots=True)
class SlotFile:
    """The body of /slots/{id}. name: "" without one."""

    name: str
    model: str | None


def parse_file(body: object) -> SlotFile:
    """Return the file and the model in a body. Raise RequestError for others."""
    fields = Fields(body)
    found = SlotFile(fields.take("filename", STRING, ""), fields.take("model", STRING))
    fields.end()
    return found


FILE = Body(parse_file, {"filename": "talk.bin", "model": "name"})


async def _slots(context: Context, request: Request) -> Response:
    check_query(request, ("model",))
    engine = context.engine.engine
    speculates, states, slots = engine.speculation is not None, engine.states, context.slots

    def listed() -> list[dict[str, object]]:
        return [
            {
                "id": slot,
                "id_task": -1,
                "n_ctx": states.max_model_len,
                "n_tokens": 0 if slots is None else slots.num_tokens(slot),
                "speculative": speculates,
                "is_processing": bool(states.live[slot]),
            }
            for slot in range(engine.config.scheduler.max_num_seqs)
        ]

    return reply(await context.engine.call(listed))


async def _act(context: Context, request: Request) -> Response:
    slots, file, action = context.slots, await FILE.read(request), check_query(request, ("action",)).get("action", "")
    if slots is None or context.config.slot_save_path is None:
        raise HttpError(FORBIDDEN, NOT_SAVED)
    context.check_model(file.model)
    number = request.path_params["id"]
    if not number.isascii() or not number.isdigit() or len(number) > 9 or int(number) >= len(slots):
        raise HttpError(INVALID, f"slot {number!r:.80}: must be a number from 0 to {len(slots) - 1}", param="id")
    slot, started = int(number), time.perf_counter()
    if action == "erase":
        if file.name:
            reason = f"filename = {file.name!r:.80}: erase has no file. Leave it out; delete the file yourself"
            raise HttpError(INVALID, reason, param="filename")
        return reply({"id_slot": slot, "n_erased": await context.engine.call(partial(slots.erase, slot))})
    if action not in ("save", "restore"):
        raise HttpError(INVALID, f"action = {action!r:.80}: must be save, restore or erase", param="action")
    path = _allowed(context.config.slot_save_path, file.name)
    try:
        if action == "save":
            conversation = await context.engine.call(partial(slots.content, slot))
            size = await asyncio.to_thread(slots.write, conversation, path)
        else:
            conversation = await asyncio.to_thread(slots.read_file, path)
            size = path.stat().st_size
            await context.engine.call(partial(slots.put, slot, conversation))
    except (ConfigError, OSError) as error:
        raise HttpError(INVALID, str(error), param="filename") from None
    milliseconds = round(1e3 * (time.perf_counter() - started), 3)
    tokens, num_bytes = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return reply(
        {
            "id_slot": slot,
            "filename": file.name,
            tokens: len(conversation.tokens),
            num_bytes: size,
            "timings": {f"{action}_ms": milliseconds},
        }
    )


def _allowed(directory: str, name: str) -> Path:
    """Return the path of a file in the directory. Raise HttpError for a name that is not that of a file alone."""
    plain = name.isprintable() and not set(name) & set('/\\:*?"<>|') and not name.startswith(".")
    if not name or not plain or len(name.encode("utf-8", "surrogatepass")) > 200:
        reason = f"filename = {name!r:.80}: must be a plain name of a file, without folders"
        raise HttpError(INVALID, reason, param="filename")
    path = Path(directory) / name
    if path.is_symlink():
        raise HttpError(INVALID, f"filename = {name!r:.80}: is a link", param="filename")
    return path


async def _refused(replicas: Replicas, request: Request) -> Response:
    if request.method == "POST":
        await FILE.read(request)
    raise HttpError(FORBIDDEN, NOT_SAVED)


# fmt: off
REFUSED = Spread("refused", _refused)
OPERATIONS = (
    Operation(
        "/slots", _slots,
        access="admin", summary="List the slots in which requests run (llama.cpp).",
        details="`n_tokens` is the length of the conversation that `save` would write. With several models, "
        "`?model=NAME` selects one, which is loaded if necessary.",
        replicas=REFUSED,
    ),
    Operation(
        "/slots/{id}", _act, FILE,
        access="admin", summary="Save the conversation of a slot to a file, restore or erase it (llama.cpp).",
        details="`?action=` is `save`, `restore` or `erase`. The file is in the directory of `slot_save_path`; "
        "without this setting the status is 403. A slot has the tokens of the last request that ran in it; if "
        "requests come one at a time, this is slot 0. The next request that begins with a restored conversation "
        "computes only the rest of its prompt, in any slot. With several models, `model` names the model of the "
        "slot. When that model is unloaded, restored conversations are lost.",
        replicas=REFUSED,
    ),
)
