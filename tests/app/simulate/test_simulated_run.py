"""Simulated runs: the events of real ones, jumps that change nothing, a kill, and what is refused."""

from __future__ import annotations

import json

import pytest

from areal_jax import main_check_log
from areal_jax.app.command_line import load_config
from areal_jax.app.library import build_run
from areal_jax.app.model.text_model import read_run_config
from areal_jax.app.simulate import simulated_site
from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode
from areal_jax.simulation.count_backend import CountBackend
from areal_jax.simulation.prices import find_shape
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, small_config, train_until_killed

# what depends on the values of tokens and weights, or says where the run was made
OF_VALUES = {'manifest', 'positions_read', 'devices'}
CLUSTER = {
    'simulation__prices': 'roofline', 'simulation__model': 'Qwen3-0.6B', 'simulation__answers': 'lognormal(300, 0.75)',
    'simulation__prompts': 'uniform(20, 90)', 'cluster__engines': '3 x tensor=1', 'cluster__learner': 'data=1',
    'rollout__slots': 8, 'rollout__context_tokens': 1024, 'rollout__max_new_tokens': 900, 'rollout__block_tokens': 16,
    'rollout__prefill_buckets': (256, 1024), 'rollout__decode_steps': 4, 'rollout__max_running_groups': 0,
    'learner__groups_per_update': 4, 'learner__row_tokens': 1024, 'learner__row_loss_tokens': 1024,
    'staleness__eta': 2.0,
}  # fmt: skip
# kinds of events that jumps may not move; their dispatches of decoding are fewer
KEPT = {
    'draw', 'admit', 'route', 'arrive', 'prefill', 'interrupt', 'load', 'publish', 'finish', 'reward', 'buffer',
    'consume', 'drop', 'preempt',
}  # fmt: skip


def simulate(workdir, resume=False, **fields):
    return build_simulation(small_config(**{**CLUSTER, **fields}), workdir, resume=resume)


def read_events(workdir):
    return [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]


def without(event, *names):
    return {name: value for name, value in event.items() if name not in names}


def simulate_again(real, fields, workdir, monkeypatch):
    """Events of a real run of these fields, and of the simulation with its lengths and the shapes of its programs."""
    program = real.session.program.parts.generation.rollout.engines[0].stream.backend
    for shape in ('prefill_bucket', 'batch_bucket'):
        monkeypatch.setattr(CountBackend, shape, staticmethod(getattr(program, shape)))
    [prompt] = {len(group.trajectories[0].prompt.tokens) for groups in real.batches for group in groups}
    config = small_config(
        **fields, simulation__prices='virtual', simulation__answers=f'log({real.workdir})',
        simulation__prompts=f'constant({prompt})',
    )  # fmt: skip
    build_simulation(config, workdir).train()
    return [[without(event, *OF_VALUES) for event in read_events(at)] for at in (real.workdir, workdir)]


def is_decoding(event):
    return event['kind'] == 'run_done' and event['work'] == 'decode'


def compared(workdir):
    return [without(event, 'seq', 'run') for event in read_events(workdir) if event['kind'] in KEPT]


def simulate_both_ways(directory, **fields):
    """The events that dispatches of decoding may not move, which are those of joined and of single dispatches."""
    for join in (True, False):
        simulate(directory / str(join), simulation__join=join, **fields).train()
    joined, single = (compared(directory / str(join)) for join in (True, False))
    assert joined == single
    return joined


@pytest.fixture(scope='module')
def simulated(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('simulated')
    simulate(workdir, run__steps=4).train()
    return workdir


def test_a_simulation_has_the_events_of_the_run_whose_lengths_it_has(tmp_path, monkeypatch):
    """Two engines and eta 2, the same prices, and the shapes of the programs that the run had compiled.

    Every event comes at the same nanosecond, token values aside.
    """
    fields = {
        'task__verifier': 'process', 'task__symbols': 8, 'cluster__engines': '2 x shared', 'staleness__eta': 2.0,
        'learner__filter_equal_rewards': False,
    }  # fmt: skip
    real = SmallRun(tmp_path / 'real', **fields).train()
    of_run, again = simulate_again(real, fields, tmp_path / 'again', monkeypatch)
    assert {event['kind'] for event in of_run} >= {'interrupt', 'decode', 'prefill', 'load', 'reward', 'consume'}
    assert again == of_run


@pytest.mark.parametrize(
    'fields',
    [
        {},
        pytest.param({'rollout__kv_policy': 'keep'}, marks=pytest.mark.slow),
        {'rollout__kv_policy': 'wait'},
        pytest.param({'rollout__cache_tokens': 2048}, marks=pytest.mark.slow),  # answers are preempted
        {'rollout__cache_tokens': 2048, 'rollout__block_tokens': 64, 'rollout__decode_steps': 32},
        {'simulation__engine_chips': '1 x H800, 2 x A100'},
        {'cluster__engines': '2 x shared', 'cluster__learner': 'data=2', 'learner__rows_per_microbatch': 2,
         'staleness__eta': 0.0, 'simulation__switch_s': 3.0},
    ],
    ids=['recompute', 'keep', 'wait', 'preempted', 'preempted, large blocks', 'mixed', 'in turns'],
)  # fmt: skip
def test_joined_dispatches_change_no_event_but_their_own(tmp_path, fields):
    joined = simulate_both_ways(tmp_path, run__steps=3, **fields)
    decoded = [
        [event for event in read_events(tmp_path / str(join)) if event['kind'] == 'decode'] for join in (True, False)
    ]
    assert len(decoded[0]) < len(decoded[1])
    assert sum(event['tokens'] for event in decoded[0]) == sum(event['tokens'] for event in decoded[1])
    seconds = []
    for join in (True, False):
        seconds.append(sum(event['seconds'] for event in read_events(tmp_path / str(join)) if is_decoding(event)))
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
    if 'rollout__cache_tokens' in fields:
        assert any(event['kind'] == 'preempt' for event in joined)


def test_ends_at_the_same_time_come_in_the_same_order(tmp_path, monkeypatch):
    """Steps of a tenth of a second on all engines: whole dispatches end together, and rewards and weights with them."""
    even = dict.fromkeys(('prefill', 'train', 'snapshot', 'publish', 'load', 'reward', 'save', 'compile'), 0.4)
    prices = {kind: lambda lane, work, seconds=seconds: seconds for kind, seconds in even.items()}
    monkeypatch.setattr(
        simulated_site, 'price_roofline', lambda settings, cluster, devices: {'decode': 0.1, **prices}
    )  # 0.1 a step: four of a dispatch take as long as all else
    simulate_both_ways(tmp_path, run__steps=4)


def test_the_log_keeps_every_rule_and_the_report_says_that_it_is_simulated(simulated):
    assert main_check_log.main([str(simulated)]) == ExitCode.FINISHED
    assert '**Simulated**, without weights: Qwen3-0.6B, learner on 1 x H800' in (simulated / 'report.md').read_text()
    assert 'simulated lanes' in (simulated / 'timeline.json').read_text()


def test_memory_does_not_hold_the_tokens(simulated):
    segments = [event for event in read_events(simulated) if event['kind'] == 'finish']
    assert sum(event['tokens'] for event in segments) > 1000
    (checkpoint,) = sorted((simulated / 'checkpoints').glob('step_*'))
    assert (checkpoint / 'run_state.json').stat().st_size < 1_000_000


def test_a_verifier_that_is_late_is_asked_again_and_then_given_up(tmp_path):
    fields = {
        'simulation__verifier': 'exponential(1000)',
        'task__verifier_deadline_s': 2.0,
        'learner__filter_equal_rewards': False,
    }
    simulate(tmp_path, run__steps=3, **fields, task__verifier_workers=4).train()
    events = read_events(tmp_path)
    rewards = [event for event in events if event['kind'] == 'reward']
    assert {(event['label'], event['attempts']) for event in rewards} == {('ok', 1), ('ok', 2), ('timeout', 2)}
    seconds = [event['seconds'] for event in events if event['kind'] == 'run_done' and event['work'] == 'reward']
    assert max(seconds) == 2.0
    assert len(seconds) == sum(event['attempts'] for event in rewards)


def kill_and_resume(tmp_path, step, **fields):
    """The events of a whole simulation and of one that was killed after `step`; their metrics are the same."""
    simulate(tmp_path / 'whole', **fields).train()
    train_until_killed(simulate(tmp_path / 'killed', **fields), step)
    simulate(tmp_path / 'killed', resume=True, **fields).train()
    whole, again = (read_metrics(tmp_path / name / 'metrics.jsonl') for name in ('whole', 'killed'))
    assert whole == again
    return [[{**event, 'seq': 0} for event in read_events(tmp_path / name)] for name in ('whole', 'killed')]


def test_a_simulation_that_is_killed_goes_on_as_one(tmp_path):
    kill_and_resume(tmp_path, 3, run__steps=5, checkpoint__every=1)
    assert len(read_metrics(tmp_path / 'killed' / 'metrics.jsonl')) == 5
    assert main_check_log.main([str(tmp_path / 'killed')]) == ExitCode.FINISHED


def test_a_simulation_never_becomes_a_run(tmp_path, simulated):
    with pytest.raises(ConfigError, match='run it with areal-simulate'):
        build_run(small_config(**CLUSTER), tmp_path)
    with pytest.raises(ConfigError, match='is a simulation, which has no weights'):
        read_run_config(str(simulated))
    with pytest.raises(ConfigError, match=r"simulation.prices='' makes this config none of a simulation"):
        build_simulation(small_config(), tmp_path)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'simulation__chip': 'H801'}, "the chip 'H801' is not known"),
        ({'simulation__model': 'Qwen9'}, 'Qwen9'),
        ({'simulation__engine_chips': '2 x H800'}, 'names 2 engines, and cluster.engines has 3'),
        ({'simulation__engine_chips': 'H800'}, "'H800' is not of the form '4 x H100'"),
        ({'simulation__model': 'R1-distill-Qwen-32B', 'simulation__engine_chips': '3 x v5e'}, 'has 16 GB, in which 0 '),
        ({'simulation__answers': 'normal(3)'}, "simulation.answers='normal\\(3\\)' is not known"),
        ({'simulation__prices': 'guess'}, "simulation.prices='guess' is unknown"),
        ({'cluster__engines': '1 x shared'}, 'in turns with it; set staleness.eta=0'),
        ({'loss__objective': 'sft'}, 'a simulation is of runs that generate'),
        ({'simulation__prices': 'virtual', 'cluster__reallocate': 'auto'}, 'only prices of chips follow the devices'),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate(tmp_path, **fields)


def test_a_log_must_hold_a_batch(tmp_path, simulated):
    with pytest.raises(ConfigError, match=r'whole groups of answers, fewer than learner.groups_per_update=64'):
        simulate(tmp_path, simulation__answers=f'log({simulated})', learner__groups_per_update=64)


@pytest.mark.parametrize(
    'name', ['quickstart', 'tiny_moe', 'clusters/qwen3_8b_h100', 'recipes/grpo', 'recipes/ppo_critic']
)
def test_the_config_of_a_run_needs_prices_and_engines_alone(tmp_path, name):
    """Neither its model nor the file of its task is there, and it has routes of experts, a critic, or evaluations."""
    config = load_config(f'configs/{name}.py')
    config.update_from_flattened_dict({
        'simulation.prices': 'roofline', 'simulation.model': 'Qwen3-8B', 'simulation.answers': 'lognormal(60, 0.75)',
        'simulation.prompts': 'constant(16)', 'cluster.engines': '2 x tensor=1', 'run.steps': 1,
        'learner.groups_per_update': 4, 'rollout.group_size': 4, 'telemetry.plots': False,
    })  # fmt: skip
    build_simulation(config, tmp_path).train()
    assert main_check_log.main([str(tmp_path)]) == ExitCode.FINISHED


def test_versions_over_sockets_take_what_their_links_take(tmp_path):
    """Of 3 engines on a host, from 2 processes: 1.2 GB by a link of 0.1 GB/s take 36 s there, 18 s at the senders."""
    fields = {
        'rollout__server': 'own', 'cluster__learner': 'hosts=2 x data=2', 'learner__rows_per_microbatch': 2,
        'simulation__link_bytes_s': 1e8, 'run__steps': 2,
    }  # fmt: skip
    took = {}
    for channel in ('stream', 'files'):
        simulate(tmp_path / channel, publication__channel=channel, **fields).train()
        events = read_events(tmp_path / channel)
        took[channel] = {e['seconds'] for e in events if e['kind'] == 'run_done' and e['work'] == 'load'}
    nbytes = 2 * find_shape('Qwen3-0.6B').parameters
    [of_stream], [of_files] = took['stream'], took['files']
    assert of_stream == pytest.approx(3 * nbytes / 1e8, rel=0.05)
    assert of_files == pytest.approx(nbytes / 50e9)
