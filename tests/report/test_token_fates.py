"""The report's ledger of tokens: from the files of a run, with a fault where it does not close."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.events.schema import VERSION
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from areal_jax.report.token_fates import tabulate_fates, token_fates
from tests.telemetry.logs import event_log, two_facts, two_metrics, two_updates
from tests.telemetry.test_token_ledger import TRAIN, decode, fates, finish, reward

START = (0, 'log', {'version': VERSION})


def run(*more: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw 0 trained in update 1, draw 1 in update 2 with 3 of its 5 tokens masked, draw 2 dropped."""
    return event_log(
        START,
        decode(6, 0),
        finish(0, 0, [0], [4]),
        reward(0, 0),
        (0, 'consume', {'update': 1, 'draws': [0]}),
        TRAIN,
        decode(4, 1),
        finish(1, 0, [0, 1], [2, 3]),
        reward(1, 0),
        (0, 'consume', {'update': 2, 'draws': [1]}),
        finish(2, 0, [1], [1]),
        reward(2, 0),
        (0, 'drop', {'draw': 2, 'reason': 'over_age', 'detail': ''}),
        *more,
    )


def rows() -> list[dict[str, Any]]:
    first, second = two_metrics()
    return [first | fates(trained=[4]), second | fates(trained=[3], masked=[0, 2])]


def test_the_table_by_hand():
    found = token_fates(run(), rows(), finished=True)
    assert found == {
        'generated': 10,
        'fates': {'trained': 7, 'filtered': 0, 'masked': 2, 'unused': 0, 'dropped/over_age': 1, 'unfinished': 0},
        'by_age': {'trained': [7], 'filtered': [], 'masked': [0, 2], 'unused': [], 'dropped/over_age': [1]},
        'by_version': {
            'trained': [4, 3], 'filtered': [], 'masked': [2], 'unused': [], 'dropped/over_age': [0, 1],
            'unfinished': [],
        },
        'fault': '',
    }  # fmt: skip
    assert sum(found['fates'].values()) == found['generated']
    assert tabulate_fates(found).rows[0] == ('generated', '10', '', '')
    assert tabulate_fates(found).rows[3] == ('masked', '2', '20%', '1')


@pytest.mark.parametrize('finished', [True, False])
def test_a_token_without_a_fate_is_a_fault_of_a_finished_run(finished: bool):
    found = token_fates(run(decode(2, 1)), rows(), finished=finished)
    assert found is not None
    assert found['fates']['unfinished'] == 2
    assert found['by_version']['unfinished'] == [0, 2]
    assert found['fault'] == ('2 generated tokens have no fate' if finished else '')


def test_tokens_of_no_known_origin_are_a_fault():
    found = token_fates(
        run(finish(3, 0, [1], [5]), (0, 'drop', {'draw': 3, 'reason': 'over_age', 'detail': ''})),
        rows(),
        finished=False,
    )
    assert found is not None
    assert found['fault'] == '-5 generated tokens have no fate'
    report = build_report(run(decode(2, 1)), rows(), two_facts())
    assert 'The token ledger does not close: 2 generated tokens have no fate.' in report['warnings']


def test_a_log_of_an_earlier_program_has_no_table():
    assert token_fates(two_updates(), two_metrics(), finished=True) is None
    assert token_fates([{**run()[0], 'version': 5}, *run()[1:]], rows(), finished=True) is None
    assert token_fates(run(), two_metrics(), finished=True) is None


def test_servers_do_not_say_versions():
    received = event_log((0, 'admit', {'draw': 9}), (0, 'receive', {'engine': 's', 'request': '0/9/0', 'tokens': 1}))
    found = token_fates([*run(), *received], rows(), finished=False)
    assert found is not None
    assert found['by_version'] is None
    assert found['fates']['unfinished'] == 1


def test_the_page_has_the_table():
    page = render_page(build_report(run(), rows(), two_facts()), [])
    assert '## Token ledger' in page
    assert '| masked | 2 | 20% | 1 |' in page
    assert '| dropped: over_age | 1 | 10% | 0 |' in page
    assert '| trained | 1.6 | 4.38 | 0.333 | 1 | 0 |' in page  # 4 of 4 tokens, and 3 of 5: (4 + 0.6 * 5) / 1.6
    assert '## Token ledger' not in render_page(build_report(two_updates(), two_metrics(), two_facts()), [])
