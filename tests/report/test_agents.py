"""How episodes of agents ended, and what their tools took, from the events of a run."""

import itertools

from areal_jax.report.agents import summarize_agents, tabulate_agents
from tests.telemetry.logs import event_log


def tool(run, start, end, name):
    common = {'lane': 'tool', 'run': run, 'work': 'tool', 'amount': 1.0}
    return [
        (start, 'run_start', {**common, 'draw': 0, 'sample': 0, 'tool': name}),
        (end, 'run_done', {**common, 'started': start, 'seconds': end - start}),
    ]


def reward(sample, value):
    fields = {'draw': 0, 'sample': sample, 'value': value, 'label': 'ok', 'attempts': 1}
    return (9, 'reward', {**fields, 'lane': 'reward'})


def finish(sample, reason, **fields):
    return (9, 'finish', {'draw': 0, 'sample': sample, 'tokens': 1, 'reason': reason, 'versions': [0], **fields})


UNCOUNTED = {'errors': 0, 'written': 0, 'well_formed': 0, 'episodes': 0, 'reward': None}


def test_ends_rows_and_tools_are_counted():
    events = event_log(
        *tool(1, 1, 2, 'search'),
        *tool(2, 2, 5, 'search'),
        *tool(3, 3, 3.5, 'add'),
        finish(0, 'stop', turns=2),
        finish(1, 'turns', turns=4, rows=[1, 1, 1], forks=['history', 'resampled'], counts=[['retried', 1], ['x', 2]]),
        finish(2, 'stop', turns=3, rows=[1, 1], forks=['history'], counts=[['retried', 2]]),
        finish(3, 'length'),  # of a workflow that is no agent
    )
    found = summarize_agents(events)
    assert found == {
        'ended': {'stop': 2, 'turns': 1},
        'turns': 3,
        'rows': 2,
        'forks': {'history': 2, 'resampled': 1},
        'tools': {
            'add': {'calls': 1, 'median_seconds': 0.5, 'max_seconds': 0.5, **UNCOUNTED},
            'search': {'calls': 2, 'median_seconds': 2, 'max_seconds': 3, **UNCOUNTED},
        },
        'counts': {'retried': 3, 'x': 2},
        'cached_prompts': None,
    }
    rows = tabulate_agents(found).rows
    assert rows[0] == ('episodes', '3', '3 turns and 2 rows, mean')
    assert ('rows begun for history', '2', '67%') in rows
    assert ('calls of search', '2', '2 / 3 s, median / max; 0% errors') in rows
    assert rows[-2:] == [('retries, answered from the record', '3', ''), ('x', '2', '')]


def test_calls_errors_and_reward_are_counted_by_tool():
    used = [['called/add', 3], ['well_formed/add', 2], ['errors/add', 1], ['called/ask', 1], ['tool_calls', 4]]
    events = event_log(
        *tool(1, 1, 2, 'add'),  # of sample 0
        finish(0, 'stop', turns=2, counts=used),
        finish(1, 'stop', turns=2, counts=[['called/add', 1], ['well_formed/add', 1]]),
        finish(2, 'stop', turns=1),
        finish(3, 'env_error', turns=1, counts=[['called/ask', 1]]),  # it has no reward
        *[reward(sample, value) for sample, value in enumerate((0.25, 0.75, 1.0))],
    )
    found = summarize_agents(events)
    assert found['tools'] == {
        'add': {
            'calls': 1, 'median_seconds': 1, 'max_seconds': 1,
            'errors': 1, 'written': 4, 'well_formed': 3, 'episodes': 2, 'reward': 0.5,
        },
        'ask': {
            'calls': 0, 'median_seconds': None, 'max_seconds': None,
            'errors': 0, 'written': 2, 'well_formed': 0, 'episodes': 1, 'reward': 0.25,
        },
    }  # fmt: skip
    assert found['counts'] == {'tool_calls': 4}
    rows = tabulate_agents(found).rows
    assert ('calls of add in answers', '4', '75% fit its definition') in rows
    assert ('calls of add', '1', '1 / 1 s, median / max; 100% errors') in rows
    assert ('reward with add', '0.5', 'mean of 2 episodes') in rows


def test_names_that_a_model_invents_share_a_row():
    seconds = [tool(number, number, number + 1, f'n{number:02}') for number in range(1, 15)]
    events = event_log(
        *tool(20, 20, 21, 'add'), *tool(21, 21, 22, 'add'), *itertools.chain(*seconds), finish(0, 'stop', turns=2)
    )
    found = summarize_agents(events)['tools']
    assert len(found) == 13
    assert (found['add']['calls'], found['other names']['calls']) == (2, 3)


def test_the_share_of_prompts_in_the_cache_is_without_what_an_interruption_computes_again():
    common = {'engine': 'engine/0', 'requests': [], 'bucket': 64, 'lane': 'engine/0'}
    events = event_log(
        (1, 'prefill', {**common, 'tokens': 30}),
        (2, 'prefill', {**common, 'tokens': 50, 'rebuilt': 40, 'kept': [50, 10]}),
        finish(0, 'stop', turns=2),
    )
    assert summarize_agents(events)['cached_prompts'] == 0.6
    assert tabulate_agents(summarize_agents(events)).rows[1][:2] == ('tokens of prompts in the cache', '60%')


def test_a_run_without_agents_has_no_table():
    assert summarize_agents(event_log(finish(0, 'stop'))) is None
    assert tabulate_agents(None).rows == []
