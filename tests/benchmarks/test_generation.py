"""benchmarks/generation.py: its arithmetic, its work, and its measurement of our engine against itself."""

import argparse
import dataclasses
import subprocess
import sys
import time

import numpy as np
import pytest

from areal_jax.errors import UserError
from areal_jax.models.families import ModelConfig
from benchmarks import generation, generation_cells, side_engine, side_rebuild, sides
from benchmarks.generation_cells import Cell, Program
from benchmarks.ratios import Bar, compare, ratio, seconds_a_token, strongest
from benchmarks.sides import cpu_seconds
from benchmarks.workload import RequestWorkload, load_requests

MODEL = ModelConfig(
    vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16, rope_theta=1e4
)  # fmt: skip
ENGINE = {'slots': 4, 'context_tokens': 64, 'block_tokens': 16, 'prefill_buckets': [64], 'decode_steps': 2}
OPTIONS = argparse.Namespace(
    seed=0, small=False, block_tokens=64, decode_steps=8, prefill_buckets='64,512', torch_caches='dynamic',
    vllm_python='v', torch_python='t', tunix_python='x',
)  # fmt: skip


def calls(*cpu_s, tokens=1, wall=2.0, **parts):
    return [{'cpu_s': s, 'wall_s': wall * s, 'checks': {'tokens': tokens, **parts}} for s in cpu_s]


# Ratios.


ONES = (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ('ours', 'peer', 'bar', 'expected'),
    [
        (ONES, (1.0, 1.3, 1.4, 1.6, 2.0), Bar(1.4, True), (1.4, 1.3)),  # a speed is judged by the lower quartile
        ((1.0, 1.1, 1.2, 1.3, 1.9), ONES, Bar(1.2, False), (1.2, 1.3)),  # a cost by the upper one
        ((1, 2, 4), (3, 6, 12), Bar(1, True), (3, 3)),  # a machine that gets slow slows both sides of a turn
    ],
)
def test_a_ratio_has_the_median_and_a_quartile_of_its_turns(ours, peer, bar, expected):
    found = ratio(calls(*ours), calls(*peer), 'cpu_s', bar)
    assert (found.median, found.quartile) == pytest.approx(expected)


def test_the_part_that_a_side_measured_is_what_counts():
    [run] = calls(10.0, tokens=4, part_cpu_s=2.0, part_wall_s=1.0)
    assert (seconds_a_token(run, 'cpu_s'), seconds_a_token(run, 'wall_s')) == (0.5, 0.25)


def test_the_better_peer_counts_in_each_clock():
    ours, eager, compiled = calls(1, 1, 1), calls(2, 2, 2, wall=1.0), calls(1.5, 1.5, 1.5, wall=4.0)
    peers = {'eager': eager, 'compiled': compiled}
    assert (strongest(peers, 'cpu_s'), strongest(peers, 'wall_s')) == ('compiled', 'eager')
    row = compare(ours, peers, Bar(1.4, True), ('cpu_s',))
    assert (row['against_cpu'], row['ratio_cpu'], row['met']) == ('compiled', 1.5, True)
    assert (row['against_wall'], row['ratio_wall']) == ('eager', 1.0)
    assert not compare(ours, peers, Bar(1.4, True), ('cpu_s', 'wall_s'))['met']  # wall seconds are judged too


@pytest.mark.parametrize(
    ('ours', 'peer', 'bar', 'expected'),
    [
        *((ONES, (1.0, quartile, 1.5, 1.5, 1.5), Bar(1.4, True), (1.5, quartile, met))
          for quartile, met in ((1.27, True), (1.25, False))),
        *(((1.0, 1.1, 1.2, quartile, 2), ONES, Bar(1.2, False), (1.2, quartile, met))
          for quartile, met in ((1.31, True), (1.33, False))),
    ],
)  # fmt: skip
def test_a_bar_is_met_by_the_median_where_the_quartile_comes_within_a_tenth(ours, peer, bar, expected):
    row = compare(calls(*ours), {'peer': calls(*peer)}, bar, ('cpu_s',))
    assert (row['ratio_cpu'], row['quartile_cpu'], row['met']) == expected


# Work.


@pytest.mark.parametrize(('lengths', 'mean', 'limit'), [('equal', 128, 128), ('lognormal', 64, 512)])
def test_lengths_have_their_mean_and_their_limit(lengths, mean, limit, tmp_path):
    path, about = generation_cells.draw_requests(OPTIONS, tmp_path, lengths, 1000)
    requests = load_requests(path)
    assert len(requests.prompts) == len(requests.new_tokens) == 64
    assert requests.total_tokens == about['expect_tokens'] == 64 * mean
    assert max(requests.new_tokens) <= limit
    assert min(requests.new_tokens) >= 1
    assert {len(p) for p in requests.prompts} <= set(range(56, 73))
    assert all(p.min() >= 8 and p.max() < 1000 for p in requests.prompts)


def test_lognormal_lengths_have_sigma_1():
    shape = RequestWorkload(4000, (1, 1), 64, 10**9, 1.0, 100)
    assert np.log(shape.draw().new_tokens).std() == pytest.approx(1.0, abs=0.05)


def test_a_seed_names_the_work():
    shape = RequestWorkload(8, (4, 9), 8, 64, 1.0, 100, seed=1)
    same, other = shape.draw(), dataclasses.replace(shape, seed=2).draw()
    assert all(map(np.array_equal, shape.draw().prompts, same.prompts))
    assert shape.draw().new_tokens == same.new_tokens != other.new_tokens


def test_a_head_has_short_answers_of_the_first_requests():
    head = RequestWorkload(8, (4, 9), 8, 64, 1.0, 100).draw().head(3, 2)
    assert len(head.prompts) == 3
    assert max(head.new_tokens) <= 2


# The command.


@pytest.mark.parametrize(
    ('rows', 'said'), [('2', 'row 2 needs --torch_python=PYTHON'), ('4,10', '--rows has 10; there are rows 1 to 9')]
)
def test_a_row_without_its_peer_and_an_unknown_one_are_refused(rows, said):
    with pytest.raises(UserError, match=said):
        generation.read_options([f'--rows={rows}'])


def test_every_row_has_the_bars_of_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(generation_cells, 'save_smollm2', lambda directory: 'model')
    bars = {row: [cell.bar for cell in make(OPTIONS, tmp_path)] for row, make in generation_cells.ROWS.items()}
    speeds = {row: [bar.value for bar in of] for row, of in bars.items() if of[0].at_least}
    costs = {row: [bar.value for bar in of] for row, of in bars.items() if not of[0].at_least}
    assert speeds == {1: [1.4, 1.3], 2: [1.5, 4.0], 3: [1.4, 1.4, 4.0, 4.0], 9: [1.3]}
    assert costs == {4: [1.2, 1.2], 5: [1.2], 6: [3.0], 7: [0.1], 8: [1.2]}


# Measurement.


def test_cpu_seconds_count_processes_that_a_side_started():
    burn = 'import time\nwhile time.process_time() < 0.4: pass'
    deep = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {burn!r}])\nprint(1, flush=True); input()'
    before, own = cpu_seconds(), time.process_time()
    child = subprocess.Popen([sys.executable, '-c', deep], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    alive = cpu_seconds() - before - (time.process_time() - own)
    child.communicate('\n')
    ended = cpu_seconds() - before - (time.process_time() - own)
    assert 0.35 < alive <= ended + 0.02


def test_a_stopwatch_adds_its_parts(monkeypatch):
    now = 0.0
    monkeypatch.setattr(sides, 'cpu_seconds', lambda: 2 * now)
    monkeypatch.setattr(sides.time, 'monotonic', lambda: now)
    watch = sides.Stopwatch()
    watch.stop()
    assert watch.parts() == {'part_cpu_s': 0.0, 'part_wall_s': 0.0}
    for start in (1.0, 10.0):
        now = start
        watch.start()
        now += 1
        watch.start()  # goes on
        now += 2
        watch.stop()
    assert watch.parts() == {'part_cpu_s': 12.0, 'part_wall_s': 6.0}


@pytest.mark.slow
def test_our_engine_against_itself(tmp_path):
    path = tmp_path / 'requests.json'
    requests = RequestWorkload(6, (4, 9), 6, 12, 1.0, MODEL.vocab_size).draw()
    requests.save(path)
    arguments = {'model': dataclasses.asdict(MODEL), 'engine': ENGINE, 'requests': str(path), 'temperature': 1.0}
    side = Program(sys.executable, 'benchmarks.side_engine', arguments)
    cell = Cell(1, 'itself', side, {'itself': side}, Bar(0.0, True), expect_tokens=requests.total_tokens)
    [entry] = generation.run_cell(cell, turns=2)
    assert (entry['row'], entry['cell'], entry['turns'], entry['met']) == (1, 'itself', 2, True)
    assert 0.05 < entry['ratio_cpu'] < 20
    runs = [run['checks'] for side in entry['calls'].values() for run in side]
    assert {run['tokens'] for run in runs} == {36.0}
    assert len({run['mean_logprob'] for run in runs}) == 1  # the same tokens, whoever asks
    assert all(run['part_cpu_s'] > 0 for run in runs)
    wrong = dataclasses.replace(cell, expect_tokens=37)
    with pytest.raises(RuntimeError, match='ours generated 36 tokens instead of 37, so the sides'):
        generation.require_tokens(wrong, entry['calls'])


def test_a_group_prefills_its_prompt_once_for_each_version():
    """6 samples of a prompt of 17 tokens, of whose 16 first ones the keys are computed; 4 are interrupted."""
    arguments = {'model': dataclasses.asdict(MODEL), 'engine': ENGINE, 'sequences': 6, 'prompt_tokens': 17}
    arguments |= {'answer_tokens': 24}
    decoder, weights = side_engine.load_model(arguments['model'])
    backend = side_engine.make_backend(decoder, ENGINE)
    counts = {}
    for task in ('group', 'separate'):
        run = side_rebuild.Run(backend, weights, arguments | {'task': task})
        counts[task] = side_rebuild.count_prefilled(run)
    assert counts['group']['interrupted'] == counts['separate']['interrupted'] == 4
    generated = counts['group']['tokens'] - 2 * 16  # by the interrupted answers, without the last token of each
    assert 0 < generated < 4 * 24
    assert counts['separate']['tokens'] >= (6 + 4) * 16 + generated


def test_a_rebuild_prefills_what_prompts_of_the_same_lengths_do():
    """4 sequences of 9 + 16 tokens; interrupted, they have what they generated before beside it."""
    arguments = {'model': dataclasses.asdict(MODEL), 'engine': ENGINE | {'context_tokens': 160}}
    arguments |= {'sequences': 4, 'prompt_tokens': 9, 'answer_tokens': 16}
    decoder, weights = side_engine.load_model(arguments['model'])
    backend = side_engine.make_backend(decoder, arguments['engine'])
    prompts = side_rebuild.prefill_prompts(side_rebuild.Run(backend, weights, arguments))
    rebuilt = side_rebuild.rebuild(side_rebuild.Run(backend, weights, arguments))
    assert prompts['tokens'] == 4 * (9 + 16 - 1)
    assert prompts['tokens'] < rebuilt['tokens'] <= prompts['tokens'] + 4 * 2 * side_rebuild.ROOM_DISPATCHES
    assert min(prompts['part_cpu_s'], rebuilt['part_cpu_s']) > 0
