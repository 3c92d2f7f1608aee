"""Every token has one fate: by hand, and over toy runs with interruptions, drops, filters, failures and a resume."""

from __future__ import annotations

import json
import math

import pytest

from areal_jax.app.run.loop import find_ledger_fault
from areal_jax.telemetry import names
from areal_jax.telemetry.token_ledger import LedgerError, TokenLedger
from tests.telemetry.logs import event_log
from tests.toys import ToyRun

ENGINE = {'engine': 'engine/0', 'dispatch': 1, 'slots': [], 'bucket': 2, 'steps': 4}


def decode(tokens, version, **more):
    return (0, 'decode', {**ENGINE, 'tokens': tokens, 'version': version, **more})


def finish(draw, sample, versions, lengths, reason='stop'):
    fields = {'draw': draw, 'sample': sample, 'tokens': sum(lengths), 'reason': reason}
    return (0, 'finish', {**fields, 'versions': versions, 'lengths': lengths})


def reward(draw, sample, label='ok'):
    return (0, 'reward', {'draw': draw, 'sample': sample, 'value': 1.0, 'label': label, 'attempts': 1})


def fates(trained=(), filtered=(), masked=(), unused=()):
    """As the learner reports them: tokens of age 0, 1, ..."""
    lists = (names.TRAINED_BY_AGE, trained), (names.FILTERED_BY_AGE, filtered), (names.MASKED_BY_AGE, masked)
    return {name: [float(n) for n in tokens] for name, tokens in (*lists, (names.UNUSED_BY_AGE, unused))}


TRAIN = (0, 'run_done', {'run': 1, 'work': 'train', 'amount': 1.0, 'started': 0.0, 'seconds': 1.0})


def by_hand():
    """Draw 0 trained at version 0; draw 1 over two versions, a part masked; draw 2 dropped; draw 3 running."""
    ledger = TokenLedger(by_version=True)
    for event in event_log(
        (0, 'evaluate', {'phase': 'before', 'mode': 'start'}),
        decode(1000, 0),  # of an evaluation
        (0, 'evaluate', {'phase': 'before', 'mode': 'done'}),
        decode(9, 0),
        finish(0, 0, [0], [5]),
        reward(0, 0),
        (0, 'consume', {'update': 1, 'draws': [0]}),
        TRAIN,
        decode(8, 1, discarded=2),
        (0, 'evaluation_decode', {**ENGINE, 'tokens': 500, 'version': 1}),
        finish(1, 0, [0, -1, 1], [3, 7, 2]),  # seven tokens of a tool
        reward(1, 0),
        finish(2, 0, [0, 1], [1, 1]),
        reward(2, 0, 'timeout'),
        (0, 'drop', {'draw': 2, 'reason': 'verifier_failed', 'detail': ''}),
        (0, 'consume', {'update': 2, 'draws': [1]}),
    ):
        ledger.apply(event)
    ledger.note_update(1, fates(trained=[5]))
    ledger.note_update(2, fates(trained=[2], masked=[0, 3]))
    return ledger


def test_by_hand():
    ledger = by_hand()
    assert ledger.metrics() == {
        'ledger/generated': 17,
        'ledger/trained': 7,
        'ledger/filtered': 0,
        'ledger/masked': 3,
        'ledger/unused': 0,
        'ledger/dropped/cancelled': 2,
        'ledger/dropped/verifier_failed': 2,
        'ledger/unfinished': 3,
    }
    assert ledger.fates['trained'] == {0: 7}
    assert ledger.fates['masked'] == {1: 3}
    assert ledger.fates['dropped/verifier_failed'] == {0: 1, 1: 1}
    assert ledger.versions['trained'] == {0: 5, 1: 2}
    assert ledger.unfinished_versions() == {1: 3}  # of draw 3
    ledger.require_closed({1: 3})


@pytest.mark.parametrize('rest', [{}, {1: 2}, {0: 3}, {1: 3, 0: 1}])
def test_what_the_loop_holds_must_be_what_has_no_fate(rest):
    with pytest.raises(
        LedgerError, match=r'does not close: \{1: 3} tokens by version have no fate, and the loop holds'
    ):
        by_hand().require_closed(rest)


def test_a_learner_that_loses_tokens_of_its_batch_is_named():
    ledger = by_hand()
    ledger.apply({**event_log((0, 'consume', {'update': 3, 'draws': [7]}))[0]})
    ledger.note_update(3, fates(trained=[1]))
    with pytest.raises(LedgerError, match=r'update 3: its groups have \{} tokens by version, and the learner tells'):
        ledger.require_closed({1: 3})


def test_a_state_survives_json():
    ledger, other = by_hand(), TokenLedger()
    other.restore(json.loads(json.dumps(ledger.state())))
    assert other.state() == ledger.state()
    assert other.metrics() == ledger.metrics()


def receive(tokens, draw=0, sample=0):
    return (0, 'receive', {'engine': 's', 'request': f'0/{draw}/{sample}', 'tokens': tokens})


def from_servers(*entries):
    ledger = TokenLedger()
    for event in event_log((0, 'register', {'engine': 's', 'incarnation': 1, 'url': ''}), *entries):
        ledger.apply(event)
    return ledger


ADMIT, CONSUME = (0, 'admit', {'draw': 0}), (0, 'consume', {'update': 2, 'draws': [0]})


@pytest.mark.parametrize(
    ('entries', 'given_up'),
    [
        ([receive(4), receive(1), finish(0, 0, [0, 1], [4, 1]), CONSUME], 0),
        ([receive(4), receive(9), finish(0, 0, [0, 1], [4, 1]), CONSUME], 8),  # refused, or lost in a move
        ([receive(4), finish(0, 0, [0, 1], [4, 1]), receive(1), CONSUME], 0),  # the first call ends last
        ([receive(4), finish(0, 0, [0, 1], [4, 1]), CONSUME, receive(3)], 2),
        ([receive(4), finish(0, 0, [0, 1], [4, 1]), CONSUME], 0),  # it was cut off
        ([receive(16, draw=2**31 - 1), receive(5), finish(0, 0, [0, 1], [4, 1]), CONSUME], 0),  # a probe
    ],
)
def test_answers_of_servers_close_in_sum(entries, given_up):
    ledger = from_servers(ADMIT, *entries)
    state, ledger = json.loads(json.dumps(ledger.state())), TokenLedger()
    ledger.restore(state)
    ledger.note_update(2, fates(trained=[1, 4]))
    assert ledger.tokens('dropped/given_up') == given_up
    assert ledger.generated == 5 + given_up
    ledger.require_closed({})


def test_a_token_of_a_server_without_a_fate_is_found():
    ledger = from_servers(ADMIT, receive(7))
    ledger.require_closed({0: 5})  # an answer under way
    with pytest.raises(LedgerError, match=r'\{-2: 7} tokens by version have no fate'):
        ledger.require_closed({})


class CountedRun(ToyRun):
    """A toy run with a ledger, whose learner tells that everything is trained but groups of equal rewards."""

    def __init__(self, **settings):
        super().__init__(**settings)
        resume = settings.get('resume')
        self.ledger = TokenLedger()
        if resume:
            self.ledger.restore(json.loads(json.dumps(resume['run_state']['observer']['ledger'])))
        self.log.listeners.append(self.ledger.apply)
        update, note_step = self.learner.update, self.note_step

        def update_and_tell(groups, version):
            told = {'trained': [], 'filtered': []}
            for group in groups:
                fate = told['filtered' if group.has_equal_rewards() else 'trained']
                fate += [version - v for t in group.trajectories for v in t.policy_versions.tolist() if v >= 0]
            lists = {fate: [ages.count(a) for a in range(max(ages, default=-1) + 1)] for fate, ages in told.items()}
            return {**update(groups, version), **fates(**lists)}

        def note(record):
            self.ledger.note_update(record.step, record.metrics)
            row = self.ledger.metrics()
            assert row['ledger/generated'] == sum(row.values()) - row['ledger/generated']
            assert row['ledger/unfinished'] >= 0
            note_step(record)

        self.learner.update, self.note_step = update_and_tell, note

    def observer_state(self):
        return {**super().observer_state(), 'ledger': self.ledger.state()}

    def fault(self):
        return find_ledger_fault(self.ledger, self.controller.snapshot())


RUNS = {
    'interrupted': {'eta': 4, 'engines': 2, 'delays': [1.0, 9.0, 3.0]},
    'kept': {'eta': 4, 'kv_policy': 'keep'},
    'not interrupted': {'eta': 4, 'kv_policy': 'wait'},
    'lock-step': {'eta': math.inf, 'schedule': 'fixed(2)'},
    'dropped for age': {'steps': 10, 'eta': 6, 'max_token_age': 1, 'over_age': 'drop', 'delays': [30.0, 2.0, 9.0]},
    'failed': {'fail': [0, 4, 5, 11]},
    'filtered': {'max_filtered': 20},
    'evaluated beside': {'steps': 5, 'evaluation_every': 2},
}


@pytest.mark.parametrize('how', RUNS, ids=list(RUNS))
def test_it_closes_at_the_end_of_a_run(how):
    run = CountedRun(**RUNS[how]).run()
    assert run.fault() is None
    assert run.ledger.unfinished == 0
    row = run.ledger.metrics()
    answers = [t for g in run.groups for t in g.trajectories]
    in_batches = sum(int(t.loss_mask.sum()) for t in answers)
    assert row['ledger/trained'] + row['ledger/filtered'] == in_batches > 0
    decoded = [e['tokens'] for e in run.log.events if e['kind'] == 'decode']
    assert row['ledger/generated'] == sum(decoded)  # what was rebuilt is not generated again
    if how == 'interrupted':
        assert any(e['kind'] == 'prefill' and e['rebuilt'] for e in run.log.events)
    dropped = {'dropped for age': 'over_age', 'failed': 'verifier_failed', 'filtered': 'equal_rewards'}.get(how)
    assert {name for name in row if 'dropped' in name} == ({f'ledger/dropped/{dropped}'} if dropped else set())


@pytest.mark.parametrize('at', [0, 1, 2])
def test_it_closes_after_a_resume_in_the_middle_of_answers(at):
    whole = CountedRun(steps=8, eta=3, engines=2, checkpoint_every=2).run()
    checkpoint = whole.checkpoints[at]
    resumed = CountedRun(steps=8, eta=3, engines=2, checkpoint_every=2, resume=checkpoint).run()
    assert resumed.fault() is None
    assert resumed.ledger.metrics() == whole.ledger.metrics()


def test_it_closes_at_a_stop_with_answers_under_way():
    run = CountedRun(steps=8, eta=3, engines=2)
    run.note_step = lambda record, inner=run.note_step: (
        inner(record),
        run.controller.stop_requested.set() if record.step == 3 else None,
    )
    run.run()
    assert not run.finished
    assert run.ledger.unfinished > 0
    assert run.fault() is None


def test_it_closes_where_requests_are_cancelled_in_a_dispatch():
    run = CountedRun(steps=4, eta=3)
    run.note_step = lambda record, inner=run.note_step: (
        inner(record),
        run.pool.cancel_all() if record.step == 2 else None,
    )
    run.run()
    assert any(e.get('discarded') for e in run.log.events if e['kind'] == 'decode')
    assert run.ledger.tokens('dropped/cancelled') > 0
    assert run.fault() is None


@pytest.mark.parametrize(('label', 'reason'), [('timeout', 'verifier_failed'), ('ok', 'cancelled')])
def test_an_answer_that_its_group_goes_on_without_is_dropped(label, reason):
    ledger = TokenLedger()
    for event in event_log(
        decode(7, 0),
        finish(0, 0, [0], [3]),
        reward(0, 0),
        finish(0, 1, [0], [4], 'stop' if label == 'timeout' else 'cancelled'),
        *([reward(0, 1, label)] if label == 'timeout' else []),
        (0, 'buffer', {'draw': 0, 'partial': True}),
        (0, 'consume', {'update': 1, 'draws': [0]}),
    ):
        ledger.apply(event)
    ledger.note_update(1, fates(trained=[3]))
    assert ledger.tokens(f'dropped/{reason}') == 4
    ledger.require_closed({})


def test_a_token_that_is_lost_is_found():
    run = CountedRun(steps=4)
    write = run.log.write
    run.log.write = lambda kind, lane=None, **f: write(
        kind, lane, **(f | {'tokens': f['tokens'] + 1} if kind == 'decode' and f['dispatch'] == 3 else f)
    )
    run.run()
    assert 'tokens by version have no fate, and the loop holds {}' in str(run.fault())
