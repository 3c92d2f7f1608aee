"""The writer of answers: within its bound, whole after a kill and a resume, and never the end of a run."""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import pytest

from areal_jax.files import FileError
from areal_jax.telemetry.rollout_views import read_rollouts
from areal_jax.telemetry.rollout_writer import RolloutWriter, describe_group, write_record
from areal_jax.types import NOT_GENERATED, TokenArrays, TrajectoryGroup
from tests.learning.examples import segment, trajectory


def split(tokens: np.ndarray) -> list[str]:
    return [f'{" " if index else ""}{token}' for index, token in enumerate(tokens.tolist())]


def make_group(draw: int, tokens: int = 3) -> TrajectoryGroup:
    rows = [trajectory([1, 2], [segment([3] * tokens, 0)], draw=draw, sample=k, reward=k) for k in (0, 1)]
    return TrajectoryGroup(draw, tuple(rows))


def write(workdir: pathlib.Path, updates: range, *, after: int = 0, most_bytes: int = 1 << 20, tokens: int = 3) -> dict:
    """An attempt that makes `updates`, two groups each, of which the lower draw is kept."""
    writer = RolloutWriter(workdir, split, '1', most_bytes)
    writer.start(after)
    for update in updates:
        kept = writer.select([make_group(2 * update + 1, tokens), make_group(2 * update, tokens)])
        writer.put(update, kept, [[] for _ in kept])
    writer.close()
    writer.close()  # nothing the second time
    return writer.facts()


def draws(workdir: pathlib.Path) -> list[int]:
    return [record['draw'] for record in read_rollouts(workdir)]


def test_a_record_says_all_of_a_group():
    turn = [segment([3, 4], 5, [-0.1, -0.2]), segment([9], NOT_GENERATED), segment([5], 7, [-1e-8])]
    group = TrajectoryGroup(6, (trajectory([1, 2], turn, draw=6, sample=3, reward=0.5),))
    arrays: TokenArrays = {
        'policy_logprobs': np.float32([-0.3, -0.1, 1 / 3]),
        'advantages': np.float32([2, 2, 2]),
        'loss_mask': np.array([False, True, True]),
        'ratio': np.float32([1, 1, 1]),
        'weight': np.float32([1, 1, 2]),
        'clip': np.int8([0, 1, -1]),
        'closed': np.array([False, False, False]),
    }
    record = describe_group(8, group, [arrays], split)
    (answer,) = record['answers']
    assert record['prompt'] == {'text': '1 2', 'characters': [1, 2], 'tokens': [1, 2]}
    assert (answer['text'], answer['tokens'], answer['reward']) == ('3 4 9 5', [3, 4, 9, 5], 0.5)
    ends = itertools.accumulate(answer['characters'], initial=0)
    assert [answer['text'][a:b] for a, b in itertools.pairwise(ends)] == ['3', ' 4', ' 9', ' 5']
    assert (answer['versions'], answer['ages']) == ([[2, 5], [1, NOT_GENERATED], [1, 7]], [2, None, 0])
    assert answer['behavior_logprobs'] == [-0.1, -0.2, None, -1e-8]  # as few digits as float32 needs
    assert answer['policy_logprobs'][:3] == [-0.3, -0.1, None]
    assert np.float32(answer['policy_logprobs'][3]) == np.float32(1 / 3)
    assert (answer['advantage'], answer['ratio'], answer['weight']) == (2.0, 1.0, [1.0, 1.0, None, 2.0])
    assert (answer['loss_mask'], answer['clip']) == ('01 1', '.+ -')
    assert 'closed' not in answer
    assert json.loads(write_record(record, 10_000)) == record


def test_a_record_that_is_too_long_keeps_its_text_longest():
    record = describe_group(1, make_group(4, 400), [], split)
    whole = len(json.dumps(record, separators=(',', ':')))
    without = json.loads(write_record(record, whole - 1))
    assert (without['cut'], without['answers'][0]['text']) == ('tokens', record['answers'][0]['text'])
    assert 'tokens' not in without['answers'][0]
    line = write_record(record, 1500)
    assert len(line) <= 1500
    short = json.loads(line)
    assert short['cut'] == 'texts'
    assert record['answers'][0]['text'].startswith(short['answers'][0]['text'])
    assert short['answers'][0]['reward'] == 0


def test_a_resumed_run_writes_again_what_came_after_its_checkpoint(tmp_path: pathlib.Path):
    assert write(tmp_path, range(1, 6))['groups'] == 5
    (file,) = (tmp_path / 'rollouts').iterdir()
    file.write_bytes(file.read_bytes() + b'{"update": 6, "draw"')  # killed while it wrote
    assert draws(tmp_path) == [2, 4, 6, 8, 10]
    write(tmp_path, range(4, 7), after=3)
    assert draws(tmp_path) == [2, 4, 6, 8, 10, 12]
    write(tmp_path, range(1, 3))  # from the beginning
    assert draws(tmp_path) == [2, 4]


def test_the_bound_keeps_the_first_answers_and_the_newest(tmp_path: pathlib.Path):
    facts = write(tmp_path, range(1, 101), most_bytes=16_000)
    sizes = [path.stat().st_size for path in (tmp_path / 'rollouts').iterdir()]
    assert facts['bytes'] == sum(sizes) <= 16_000
    assert facts['groups'] == 100
    kept = draws(tmp_path)
    assert (kept[0], kept[-1]) == (2, 200)
    assert 10 < len(kept) < 60
    assert kept[2:] == list(range(kept[2], 201, 2)) or kept[1:] == list(range(kept[1], 201, 2))
    write(tmp_path, range(101, 120), after=100, most_bytes=16_000)  # the bound holds over attempts
    assert sum(path.stat().st_size for path in (tmp_path / 'rollouts').iterdir()) <= 16_000
    assert draws(tmp_path)[-1] == 238


def test_what_cannot_be_written_is_said_once(tmp_path: pathlib.Path, capsys):
    writer = RolloutWriter(tmp_path, split, 'all', 1 << 20)
    writer.start(0)
    writer.put(1, [make_group(0)], [[{}, {}, {}]])  # a bug: three answers are known of two
    writer.sync()
    writer.put(2, [make_group(1)], [[]])
    writer.close()
    assert writer.facts()['first_error'].startswith('ValueError')
    assert capsys.readouterr().err.count('gets no more answers') == 1
    assert read_rollouts(tmp_path) == []


def test_what_was_handed_over_is_readable_after_sync(tmp_path: pathlib.Path):
    writer = RolloutWriter(tmp_path, split, 'all', 1 << 20)
    writer.start(0)
    for update in range(1, 30):
        writer.put(update, [make_group(update)], [[]])
    writer.sync()
    assert draws(tmp_path) == list(range(1, 30))
    writer.close()


@pytest.mark.parametrize('line', ['{"update": 1}', '[]', '{"update": 1, "draw": "x", "prompt": {}, "answers": []}'])
def test_a_foreign_line_is_named(tmp_path: pathlib.Path, line: str):
    write(tmp_path, range(1, 3))
    path = tmp_path / 'rollouts' / '000001.jsonl'
    path.write_text(f'{line}\n{path.read_text()}')
    with pytest.raises(FileError, match=r'000001\.jsonl: line 1'):
        read_rollouts(tmp_path)
