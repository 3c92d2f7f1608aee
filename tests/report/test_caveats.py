from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.caveats import sits_at_bound, warn_of_equal_rewards
from areal_jax.report.report import build_report
from areal_jax.telemetry.facts import RunFacts
from tests.telemetry.logs import two_facts, two_metrics, two_updates


def _warnings(events: list[dict[str, Any]] | None = None, facts: RunFacts | None = None) -> list[str]:
    return build_report(two_updates() if events is None else events, two_metrics(), facts or two_facts())['warnings']


def _ages(*histograms: list[int]) -> list[dict[str, Any]]:
    return [{'step': step, 'staleness/token_age_histogram': h} for step, h in enumerate(histograms, start=1)]


def test_the_pipeline_sits_at_its_bound():
    # eta = 2: updates 1 and 2 cannot hold tokens of age 2; from the third on nothing else
    assert sits_at_bound(_ages([5], [0, 5], [0, 0, 5], [0, 0, 5]), eta=2)
    assert sits_at_bound(_ages([5], [0, 5], [0, 1, 4], [0, 0, 5], [0, 0, 5], [0, 0, 5]), eta=2)  # from the 4th on
    assert sits_at_bound(_ages([5], [0, 5], [0, 0, 5]), eta=2)  # update 2 is in the second half but could not be older
    assert not sits_at_bound(_ages([5], [0, 5], [0, 0, 5], [0, 1, 4]), eta=2)
    assert not sits_at_bound(_ages([5], [5], [5], [5]), eta=2)
    assert not sits_at_bound(_ages([5], [0, 5]), eta=2)  # too short to tell
    assert not sits_at_bound(_ages([5], [5]), eta=0)  # synchronous: 0 is not old
    assert not sits_at_bound(_ages([5], [0, 5]), eta=float('inf'))
    assert not sits_at_bound(_ages([5], [0, 5], [0, 5]), eta=None)  # lock-step


def test_nothing_to_warn_of_but_an_uncertain_gain_and_the_drop():
    # gain .5 +- 1.24 contains 0; 1 of 5 groups dropped is more than a tenth
    gain, drops = _warnings()
    assert gain.startswith('The held-out gain is not distinguishable from zero')
    assert drops.startswith('1 of 5 groups were dropped')


@pytest.mark.parametrize(
    ('changes', 'warning'),
    [
        ({'compilations': 3, 'compilation_budget': 2}, '3 programs were compiled after warm-up (budget 2)'),
        ({'event_loop_lag_max': 0.5}, 'The event loop lagged by up to 0.5 s'),
    ],
)
def test_budgets(changes: dict[str, Any], warning: str):
    assert any(found.startswith(warning) for found in _warnings(facts=two_facts(**changes)))


def test_some_optimizer_steps_were_skipped():
    (found,) = [
        w for w in build_report(two_updates(), two_metrics((1, 0), (1, 2)), two_facts())['warnings'] if 'skipped' in w
    ]
    assert found.startswith('2 of 4 optimizer steps were skipped because their gradient was not finite: those steps')
    assert 'never changed' not in found


def test_no_optimizer_step_was_applied():
    found = build_report(two_updates(), two_metrics((0, 1), (0, 2)), two_facts())['warnings'][0]
    assert found == (
        '3 of 3 optimizer steps were skipped because their gradient was not finite: the weights never changed. '
        'Look at the weights that the model starts from, learner.loss_scale and optimizer.learning_rate.'
    )


def test_never_interrupted():
    calm = [event for event in two_updates() if event['kind'] != 'interrupt']
    assert any(found.startswith('No request was ever interrupted') for found in _warnings(calm))
    synchronous = _warnings(calm, two_facts(eta=0.0))
    assert not any('interrupted' in found for found in synchronous)  # eta = 0 has nothing to interrupt
    lock_step = _warnings(calm, two_facts(eta=None, schedule='fixed(1)'))
    assert not any('interrupted' in found for found in lock_step)


def test_broken_conservation_comes_first():
    broken = [event for event in two_updates() if event['kind'] != 'admit']
    assert _warnings(broken)[0].startswith('3 moves of draws break the rule')


def test_errors_are_repeated():
    events = [*two_updates(), {'seq': 99, 'time': 40.0, 'lane': None, 'kind': 'error', 'message': 'learner died'}]
    assert 'The run logged 1 errors, last: learner died' in _warnings(events)


def _with(**values: Any) -> list[dict[str, Any]]:
    return [line | values for line in two_metrics()]


@pytest.mark.parametrize(
    ('rewards', 'warns'),
    [
        ([(0.5, 0.0), (0.5, 0.0)], True),
        ([(0.1, 1e-17), (0.1 + 1e-17, 0.0)], True),  # the mean of equal rewards is rounded
        ([(0.5, 0.0), (0.6, 0.0)], False),
        ([(0.5, 0.0), (0.5, 0.1)], False),
        ([], False),
    ],
)
def test_equal_rewards_over_the_whole_run_are_no_signal(rewards: list[tuple[float, float]], warns: bool):
    lines = [{'step': 1, 'reward/mean': mean, 'reward/std': std} for mean, std in rewards]
    found = warn_of_equal_rewards(lines)
    assert found.startswith(f'Every reward was {rewards[0][0]:g}: the task gave no signal') if warns else found == ''


def test_cut_sampling_is_named_with_the_mass_it_kept():
    # 10 tokens at .9 and 30 at .8: .825
    lines = _with(**{'sampling/kept_mass_mean': 0.9})
    lines[1]['sampling/kept_mass_mean'] = 0.8
    for line, tokens in zip(lines, (10, 30), strict=True):
        line['update/trained_tokens'] = tokens
    found = build_report(two_updates(), lines, two_facts())['warnings']
    assert any('importance weights are biased by the kept mass, 0.82 on average' in warning for warning in found)
    assert not any('kept mass' in warning for warning in _warnings())


@pytest.mark.parametrize(
    ('bound', 'seconds', 'said'),
    [
        ('max_running_groups', 8.0, '20% of their time, because rollout.max_running_groups admits too few groups'),
        ('buffer_capacity', 20.0, '50% of their time, because buffer.capacity is too small'),
        ('max_running_groups', 2.0, ''),  # 2 of two slots times 20 s: 5%
        ('eta', 20.0, ''),  # that is what the study of staleness is about
    ],
)
def test_slots_that_wait_for_a_bound_on_memory_are_named_with_the_field(bound, seconds, said):
    lines = _with()
    lines[1].pop('admission/idle_slot_seconds/max_running_groups')
    lines[1][f'admission/idle_slot_seconds/{bound}'] = seconds
    warnings = build_report(two_updates(), lines, two_facts())['warnings']
    assert [said in warning for warning in warnings if 'Slots had' in warning] == ([True] if said else [])


def test_an_eta_that_never_held_admission_back():
    lines = _with()
    for line in lines:
        line.pop('admission/held_seconds/eta')
    lines += [{'step': 3}]  # with eta = 1 the third update is the first that could be held back
    warn = lambda metrics, **facts: [
        w for w in build_report(two_updates(), metrics, two_facts(**facts))['warnings'] if 'never held' in w
    ]
    (found,) = warn(lines)
    assert found == (
        'staleness.eta = 1 never held admission back (max_running_groups 30% of the time), so any larger eta gives the '
        'same run; the oldest trained token had age 1.'
    )
    assert warn(lines, eta=2.0) == []  # the run is too short to tell
    assert warn(lines, eta=float('inf')) == []
    assert warn(lines, eta=None, schedule='fixed(1)') == []
    assert warn(_with()) == []


def _dropped(reason: str, share: int) -> list[dict[str, Any]]:
    """Events in which `share` of 10 groups were dropped for `reason` and the others entered the buffer."""
    events: list[dict[str, Any]] = []
    for draw in range(10):
        end = {'kind': 'drop', 'reason': reason, 'detail': ''} if draw < share else {'kind': 'buffer', 'partial': False}
        events += [{'kind': 'draw', 'draw': draw}, {'kind': 'admit', 'draw': draw}, {**end, 'draw': draw}]
    return [{'seq': seq, 'time': 0.0, 'lane': None, **event} for seq, event in enumerate(events)]


def test_a_filter_that_drops_more_than_half_is_named():
    sentence = 'task.filter dropped 60% of the finished groups for their rewards'
    for share, found in ((5, False), (6, True)):
        report = build_report(_dropped('equal_rewards', share), two_metrics(), two_facts())
        assert report['groups']['filtered_rate'] == share / 10
        assert any(warning.startswith(sentence) for warning in report['warnings']) == found
        assert not any('what is lost may be biased' in warning for warning in report['warnings'])  # it was asked for
    report = build_report(_dropped('over_age', 6), two_metrics(), two_facts())
    assert report['groups']['filtered_rate'] is None
    assert any('6 of 10 groups were dropped; what is lost may be biased' in warning for warning in report['warnings'])


def _unparsed(*rates: float | None) -> list[str]:
    lines = [
        {'step': step} | ({} if rate is None else {'reward/unparsed_rate': rate}) for step, rate in enumerate(rates)
    ]
    found = build_report(two_updates(), lines, two_facts())['warnings']
    return [warning for warning in found if 'could be read' in warning or 'could not be read' in warning]


def test_answers_that_cannot_be_read_are_warned_of_where_they_are_most_or_more_than_before():
    assert _unparsed(0.0, 0.1, 0.1, 0.1) == _unparsed(None, None) == _unparsed(0.9, 0.8, 0.3, 0.2) == []
    (most,) = _unparsed(0.1, 0.1, 0.6, 0.5)  # mean of the second half: .55
    assert most.startswith('In 55% of the answers of the second half of the run no answer could be read')
    (more,) = _unparsed(0.1, 0.1, 0.1, 0.31)  # the last quarter against the first
    assert more.startswith('Answers that could not be read rose from 10% to 31% of a batch')


def _audited(*outcomes: str) -> list[dict[str, Any]]:
    events = two_updates()
    header = {'time': 15.0, 'lane': None, 'kind': 'audit', 'draw': 0}
    return [*events, *({**header, 'seq': 900 + k, 'sample': k, 'outcome': o} for k, o in enumerate(outcomes))]


def test_a_second_comparison_that_disagrees_is_counted_and_warned_of():
    report = build_report(_audited('agrees', 'disagrees', 'undecided', 'agrees'), two_metrics(), two_facts())
    assert report['audit'] == {'answers': 4, 'disagreements': 1, 'undecided': 1}
    assert 'A second comparison contradicts 1 of 4 rewards that were checked: read audit.jsonl.' in report['warnings']
    agreed = build_report(_audited('agrees'), two_metrics(), two_facts())
    assert agreed['audit'] == {'answers': 1, 'disagreements': 0, 'undecided': 0}
    assert not any('second comparison' in warning for warning in agreed['warnings'])
