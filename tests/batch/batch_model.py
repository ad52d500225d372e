"""A model of step preparation that shares no code with it: requests are lists, tensors are made token by token.

Written from the reference page, independently of the backends, and never shared with them. Slow and plain.
"""

from dataclasses import dataclass, field

FREE = {"num_accepted_tokens": 1, "last_sampled_token": -1}  # the values of a free row that are not 0


@dataclass
class Group:
    block_size: int
    window: int | None = None
    ranks: tuple[int, int, int] | None = None  # size, rank, interleave of a group spread over ranks
    state_of: int | None = None  # a recurrent group: entry 0 covers this many positions, and none has a slot
    kernel_block_size: int | None = None

    @property
    def span(self) -> int:
        """Positions that one block-table entry covers."""
        if self.state_of is not None:
            return self.state_of
        return self.block_size * (self.ranks[0] if self.ranks else 1)

    def local(self, num_keys: int) -> int:
        """Return how many of the first keys of a request this rank holds."""
        size, rank, interleave = self.ranks or (1, 0, 1)
        return len([p for p in range(num_keys) if p // interleave % size == rank])


@dataclass
class Request:
    row: int
    prompt: list[int]
    outputs: list[int]
    computed: int
    blocks: list[list[int]]
    prefill_len: int
    tenancy: int  # no two requests share one
    in_flight: int = 0  # tokens that the steps in flight add at most
    accepted: int = 1  # samples of the last step that count

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


@dataclass
class Scheduled:
    """One request of a step. is_cancelled: it was removed while its step was in flight, and none of it is read."""

    rid: str
    request: Request
    num: int
    drafts: list[int]
    computed: int
    samples: bool | None = None  # decided when the step is advanced
    is_cancelled: bool = False

    @property
    def end(self) -> int:
        """Positions up to the first draft."""
        return self.computed + self.num - len(self.drafts)

    @property
    def known(self) -> list[int]:
        """The tokens that the step may read."""
        return [0] * self.num if self.is_cancelled else self.request.tokens + [max(d, 0) for d in self.drafts]


@dataclass
class Model:
    max_num_reqs: int
    max_model_len: int
    groups: list[Group]
    max_drafts: int
    ranks: tuple[int, int, int] | None = None
    null: int = 0
    requests: dict[str, Request] = field(default_factory=dict)

    def width(self, g: int) -> int:
        if self.groups[g].state_of is not None:
            return 1 + self.max_drafts  # a state after each draft, and one before them
        return -(-self.max_model_len // self.groups[g].span)

    # -- one step ----------------------------------------------------------------------------------------------

    def plan(self, wanted: list[tuple[str, int, list[int]]], order: str) -> list[Scheduled]:
        step = [
            Scheduled(rid, self.requests[rid], num, drafts, self.requests[rid].computed) for rid, num, drafts in wanted
        ]
        if order == "decode_first":
            step.sort(key=lambda s: (not s.drafts, s.num != 1 + self.max_drafts, s.num))
        return step

    def block(self, g: int, s: Scheduled, position: int) -> int:
        return s.request.blocks[g][position // self.groups[g].span]

    def slot(self, g: int, s: Scheduled, position: int) -> int:
        group = self.groups[g]
        if group.state_of is not None or s.is_cancelled:
            return -1
        block = self.block(g, s, position)
        if group.ranks is None:
            return block * group.block_size + position % group.span
        size, rank, interleave = group.ranks
        mine = [p for p in range(group.span) if p // interleave % size == rank]  # this rank's part of a virtual block
        offset = position % group.span
        return block * group.block_size + mine.index(offset) if offset in mine else -1

    def block_row(self, g: int, s: Scheduled) -> list[int]:
        """An entry is shown where some token of the step can see one of its positions, or a later one."""
        group, row = self.groups[g], [self.null] * self.width(g)
        for k, block in enumerate([] if s.is_cancelled else s.request.blocks[g]):
            last_position = (k + 1) * group.span - 1
            first_visible = 0 if group.window is None else s.computed - group.window + 1
            row[k] = block if group.window == 1 or last_position >= first_visible else self.null
        return row

    def kernel_row(self, g: int, s: Scheduled) -> list[int]:
        """The blocks of the row in units of kernel blocks."""
        ratio = self.groups[g].block_size // (self.groups[g].kernel_block_size or self.groups[g].block_size)
        blocks = self.block_row(g, s)
        return [block if block == self.null else block * ratio + j for block in blocks for j in range(ratio)]

    def pages(self, g: int, s: Scheduled) -> list[int]:
        """The blocks that hold keys of this rank, up to the end of the step."""
        return self.block_row(g, s)[: -(-self.groups[g].local(s.computed + s.num) // self.groups[g].block_size)]

    def tensors(
        self, step: list[Scheduled], pad_tokens: int | None, pad_reqs: int | None, max_tokens: int
    ) -> dict[str, list]:
        """Every tensor, padding included; the raw buffers where the page says they are padded to their end."""
        tokens = [(b, s, s.computed + i) for b, s in enumerate(step) for i in range(s.num)]
        T, B, R = len(tokens), len(step), self.max_num_reqs
        starts = [sum(s.num for s in step[:b]) for b in range(B + 1)]
        known = [s.known for s in step]
        seq_lens = [s.computed + s.num for s in step]
        logits = [(b, j) for b, s in enumerate(step) for j in range(1 + len(s.drafts))]
        rest = max_tokens - T
        no_logits = min(max_tokens, R * (1 + self.max_drafts)) - len(logits)
        out: dict[str, list] = {
            "num_reqs": B,
            "num_tokens": T,
            "num_reqs_padded": B if pad_reqs is None else pad_reqs,
            "num_tokens_padded": T if pad_tokens is None else pad_tokens,
            "max_query_len": max([s.num for s in step], default=0),
            "max_seq_len": max(seq_lens, default=0),
            "attention_state": self.attention_state(step),
            "req_ids": [s.rid for s in step],
            "idx_mapping": [s.request.row for s in step] + [-1] * (R - B),
            "num_scheduled_tokens": [s.num for s in step],
            "num_draft_tokens": [len(s.drafts) for s in step],
            "num_computed_tokens": [s.computed for s in step] + [0] * (R - B),
            "is_prefilling": [not s.is_cancelled and s.computed < s.request.prefill_len for s in step]
            + [False] * (R - B),
            "query_start_loc": starts + [T] * ((B if pad_reqs is None else pad_reqs) - B),
            "seq_lens": seq_lens + [0] * (R - B),
            "cu_num_logits": [sum(1 + len(s.drafts) for s in step[:b]) for b in range(B + 1)],
            "cu_num_draft_tokens": [sum(len(s.drafts) for s in step[:b]) for b in range(B + 1)],
            "req_indices": [b for b, _, _ in tokens],
            "positions": [p for _, _, p in tokens] + [0] * rest,
            "input_ids": [known[b][p] for b, _, p in tokens] + [0] * rest,
            "logits_indices": [starts[b + 1] - len(step[b].drafts) - 1 + j for b, j in logits] + [0] * no_logits,
            "expanded_idx_mapping": [step[b].request.row for b, _ in logits] + [-1] * no_logits,
            "expanded_local_pos": [j for _, j in logits],
            "target_logits_indices": [i for i, (b, j) in enumerate(logits) if j < len(step[b].drafts)],
            "bonus_logits_indices": [i for i, (b, j) in enumerate(logits) if j == len(step[b].drafts)],
            "draft_token_ids": [d for s in step for d in s.drafts],
            "token_indices": [s.request.row * self.max_model_len + p for _, s, p in tokens],
        }
        for g, group in enumerate(self.groups):
            out[f"slot_mapping[{g}]"] = [self.slot(g, s, p) for _, s, p in tokens] + [-1] * rest
            padding = [[self.null] * self.width(g)] * (R - B)
            out[f"block_table[{g}]"] = [self.block_row(g, s) for s in step] + padding
            out[f"block_table_indices[{g}]"] = [s.request.row * self.width(g) + p // group.span for _, s, p in tokens]
            if not any(s.is_cancelled for s in step):  # what the row holds by then belongs to no token of the step
                out[f"block_numbers[{g}]"] = [self.block(g, s, p) for _, s, p in tokens]
            out[f"attention_mask[{g}]"] = self.mask(step, tokens, group)
        if self.ranks is not None:
            out["dcp_local_seq_lens"] = [Group(1, ranks=self.ranks).local(n) for n in out["seq_lens"]]
        return out

    @staticmethod
    def attention_state(step: list[Scheduled]) -> str:
        if any(s.drafts for s in step):
            return "SPEC_DECODING"
        if step and all(s.num == 1 and (s.computed or s.is_cancelled) for s in step):
            return "DECODE_ONLY"
        if all(s.computed == 0 for s in step):
            return "PREFILL_NO_CACHE"
        if all(s.is_cancelled or s.computed < len(s.request.prompt) <= s.computed + s.num for s in step):
            return "PREFILL_CACHE_HIT"
        return "CHUNKED_PREFILL"

    def mask(self, step: list[Scheduled], tokens: list, group: Group) -> list[list[bool]] | None:
        state = self.attention_state(step)
        if state == "DECODE_ONLY":
            return None
        queries = [p for _, _, p in tokens]
        keys = max([s.computed + s.num for s in step], default=0)
        if state == "PREFILL_NO_CACHE":
            keys = max([s.num for s in step], default=0)
            queries = list(range(keys))
        return [[j <= p and (group.window is None or p - j < group.window) for j in range(keys)] for p in queries]

    # -- after it ----------------------------------------------------------------------------------------------

    def is_gone(self, s: Scheduled) -> bool:
        """Return whether the request was removed since the step was prepared."""
        return s.rid not in self.requests or self.requests[s.rid].tenancy != s.request.tenancy

    def samples_of(self, s: Scheduled) -> bool:
        """Return whether the step reaches the last token known, so that what follows it can be sampled."""
        return s.end == len(s.request.tokens) + s.request.in_flight if s.samples is None else s.samples

    def discarded(self, step: list[Scheduled], num_reqs_padded: int) -> list[bool]:
        """Return whether the sample of each request means nothing."""
        left = [s.end < len(s.request.tokens) + s.request.in_flight or self.is_gone(s) for s in step]
        return left + [True] * (num_reqs_padded - len(step))

    def advance(self, step: list[Scheduled]) -> None:
        """Count the step as done, with all its drafts accepted."""
        for s in step:
            s.samples = self.samples_of(s)
            s.request.computed = s.computed + s.num
            s.request.in_flight += 1 + len(s.drafts) if s.samples else 0

    def commit(self, step: list[Scheduled], sampled: dict[str, list[int]]) -> None:
        for s in step:
            now, samples = s.request, self.samples_of(s)
            if self.is_gone(s):
                continue  # a late result
            if s.samples is None:
                now.computed = s.computed + s.num
            now.accepted = 1
            if samples:
                new = sampled.get(s.rid, [])
                now.computed -= len(s.drafts) - max(len(new) - 1, 0)
                now.in_flight -= 1 + len(s.drafts) if s.samples else 0
                now.accepted = max(len(new), 1)
                now.outputs += new

    def resolve(self, step: list[Scheduled]) -> None:
        """The step before is committed: what is computed is known, and who has left."""
        for s in step:
            s.is_cancelled = self.is_gone(s)
            s.computed = 0 if s.is_cancelled else s.request.computed

    def state(self) -> dict[str, dict[int, int]]:
        """Columns of the state by live row; those of a free row are `FREE`."""
        live = self.requests.values()
        return {
            "num_tokens": {r.row: len(r.tokens) for r in live},
            "num_computed_tokens": {r.row: r.computed for r in live},
            "num_placeholders": {r.row: r.in_flight for r in live},
            "num_accepted_tokens": {r.row: r.accepted for r in live},
            "prompt_len": {r.row: len(r.prompt) for r in live},
            "prefill_len": {r.row: r.prefill_len for r in live},
            "last_sampled_token": {r.row: r.outputs[-1] if r.outputs else -1 for r in live},
        }
