"""An engine with nano-vllm's data structures under a shadow."""

import numpy as np
import pytest
from nano_engine import Engine, ModelRunner, Scheduler

from foreword.shadow.nano_vllm import follow


def found_by(engine, steps=300):
    shadow = follow(engine.runner, engine.runner.get_context, first=10**6)
    engine.traffic(steps)
    return shadow.report()


def names(report):
    return {(finding.tensor, finding.origin) for finding in report.findings}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(3))
def test_healthy_traffic_has_no_finding(seed):
    engine = Engine(seed)
    report = found_by(engine, 400)
    assert report.ok, str(report)
    assert report.num_compared == report.num_steps > 350
    assert engine.scheduler.num_preemptions > 5
    assert engine.scheduler.num_hits > 20


def context_changed(change):
    """A runner whose context is changed after a prefill or a decode."""

    def install(monkeypatch):
        for name in ("prepare_prefill", "prepare_decode"):
            original = getattr(ModelRunner, name)

            def prepare(self, seqs, original=original):
                made = list(original(self, seqs))
                change(self, seqs, self.context, made)
                return tuple(made)

            monkeypatch.setattr(ModelRunner, name, prepare)

    return install


def full_length_in_a_chunk(runner, seqs, context, made):
    if context.is_prefill:
        context.cu_seqlens_k = np.cumsum([0, *(len(seq.token_ids) for seq in seqs)])


def longest_of_a_chunk(runner, seqs, context, made):
    if context.is_prefill:
        context.max_seqlen_k = max(len(seq.token_ids) for seq in seqs)


def one_slot_late(runner, seqs, context, made):
    if not context.is_prefill:
        context.slot_mapping[-1] += 1


def tables_exchanged(runner, seqs, context, made):
    if context.block_tables is not None:
        context.block_tables = context.block_tables[::-1].copy()


def position_is_the_length(runner, seqs, context, made):
    if not context.is_prefill:
        made[1] = made[1] + 1


def token_of_another(runner, seqs, context, made):
    if not context.is_prefill:
        made[0] = made[0][::-1].copy()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        (full_length_in_a_chunk, "seq_lens"),
        (longest_of_a_chunk, "max_seq_len"),
        (one_slot_late, "slot_mapping"),
        (tables_exchanged, "block_table"),
        (position_is_the_length, "positions"),
        (token_of_another, "input_ids"),
    ],
)
def test_a_changed_tensor_is_named(fault, tensor, monkeypatch):
    context_changed(fault)(monkeypatch)
    found = names(found_by(Engine(1)))
    assert (tensor, "runner") in found
    assert found <= {(tensor, "runner"), ("cache", "runner")}


def steps_of(engine, count):
    for _ in range(count):
        seqs, is_prefill = engine.scheduler.schedule()
        engine.scheduler.update(seqs, engine.runner.run(seqs, is_prefill))


def test_a_hit_on_equal_tokens_behind_another_prefix_is_the_schedulers(monkeypatch):
    monkeypatch.setattr(Scheduler, "key_of", lambda self, seq, end: tuple(seq.token_ids[end - self.size : end]))
    engine = Engine(2)
    engine.config.max_num_seqs = 1
    shadow = follow(engine.runner, engine.runner.get_context)
    engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    engine.add([5, 6, 7, 8, 9], 2)
    steps_of(engine, 2)
    assert engine.scheduler.num_hits == 1
    (finding,) = shadow.findings
    assert (finding.tensor, finding.request, finding.origin, finding.index) == ("cache", "1", "scheduler", (0, 0))


def test_a_block_that_is_freed_while_a_request_has_it_is_the_schedulers(monkeypatch):
    original = Scheduler.admit

    def freed(self, seq):
        if admitted := original(self, seq):
            self.free.appendleft(seq.block_table[0])
        return admitted

    monkeypatch.setattr(Scheduler, "admit", freed)
    engine = Engine(3)
    shadow = follow(engine.runner, engine.runner.get_context)
    engine.add(list(range(9)), 3)
    engine.add(list(range(20, 29)), 3)
    steps_of(engine, 1)
    assert names(shadow.report()) == {("cache", "scheduler")}


def test_tokens_that_count_as_computed_and_are_not_are_the_schedulers(monkeypatch):
    original = Scheduler.update

    def counted_twice(self, seqs, tokens):
        original(self, seqs, tokens)
        for seq in seqs:
            if seq.block_table and 0 < seq.num_cached_tokens < len(seq.token_ids) - 1:
                seq.num_cached_tokens += 1

    monkeypatch.setattr(Scheduler, "update", counted_twice)
    engine = Engine(4)
    shadow = follow(engine.runner, engine.runner.get_context)
    engine.add(list(range(30)), 3)  # in two chunks
    steps_of(engine, 2)
    finding = shadow.findings[0]
    assert (finding.tensor, finding.expected, finding.got) == ("num_computed_tokens", 24, 25)
    assert names(shadow.report()) == {("num_computed_tokens", "scheduler"), ("cache", "scheduler")}


def test_steps_before_it_is_followed_do_not_matter_to_requests_after_them():
    engine = Engine(5)
    engine.add([1, 2, 3], 1)
    steps_of(engine, 1)
    assert found_by(engine, 20).ok
