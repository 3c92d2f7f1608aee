from __future__ import annotations

import math
import pathlib
import struct

import numpy as np
import pytest

from areal_jax.files import FileError
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import MetricsError, MetricsWriter, merge, read_metrics


def test_a_metric_has_one_producer():
    assert merge(learner={'reward/mean': 1.0}, controller={'time': 2.0}) == {'reward/mean': 1.0, 'time': 2.0}
    with pytest.raises(MetricsError, match="'reward/mean' has two producers: learner and controller"):
        merge(learner={'reward/mean': 1.0}, observer={'tokens/generated': 3}, controller={'reward/mean': 1.0})


def test_lines_are_there_before_the_writer_closes(tmp_path: pathlib.Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {'reward/mean': np.float32(0.5), 'mismatch/max_abs': math.nan, 'h': np.array([3, 1])})
    assert read_metrics(tmp_path / 'metrics.jsonl') == [
        {'step': 1, 'reward/mean': 0.5, 'mismatch/max_abs': None, 'h': [3, 1]}
    ]
    assert 'NaN' not in (tmp_path / 'metrics.jsonl').read_text()
    writer.close()
    assert not (tmp_path / 'tensorboard').exists()


def test_a_resumed_run_writes_the_updates_after_its_checkpoint_again(tmp_path: pathlib.Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 2, 3):
        writer.write(step, {'x': step})
    writer.truncate(1)
    writer.write(2, {'x': 20})
    writer.close()
    assert [(m['step'], m['x']) for m in read_metrics(tmp_path / 'metrics.jsonl')] == [(1, 1), (2, 20)]


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: pathlib.Path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2, "x"')
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(2, {'x': 5})
    writer.close()
    assert read_metrics(tmp_path / 'metrics.jsonl') == [{'step': 1}, {'step': 2, 'x': 5}]


def test_tensorboard_gets_numbers_and_histograms(tmp_path: pathlib.Path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, {'reward/mean': 0.25, 'nothing': math.nan, 'ages': [1, 3, 2]})
    writer.write(2, {'reward/mean': 0.5})
    writer.truncate(1)
    writer.write(2, {'reward/mean': 0.75})
    writer.close()
    events = [event for path in sorted((tmp_path / 'tensorboard').iterdir()) for event in _tensorboard_events(path)]
    values = {(event.step, value.tag): value for event in events for value in event.summary.value}
    assert values[1, 'reward/mean'].simple_value == 0.25
    # 1 token of age 0, 3 of age 1, 2 of age 2: n = 6, sum = 3 + 4, sum of squares = 3 + 8
    histogram = values[1, 'ages'].histo
    assert (histogram.num, histogram.sum, histogram.sum_squares, histogram.max) == (6, 7, 11, 2)
    assert list(histogram.bucket) == [1, 3, 2]
    assert {tag for _, tag in values} == {'reward/mean', 'ages'}
    assert any(event.session_log.status and event.step == 2 for event in events)  # TensorBoard forgets step 2 there
    assert values[2, 'reward/mean'].simple_value == pytest.approx(0.75)


def _tensorboard_events(path: pathlib.Path) -> list:
    """Records of a TFRecord file: length (8 bytes), its checksum (4), data, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack('<Q', data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


@pytest.mark.parametrize(
    ('line', 'found'),
    [('{"loss/value": 1.0}', "has no 'step'"), ('{"step": "2"}', "has step='2'"), ('{"step": null}', 'has step=None')],
)
def test_a_line_without_its_step_is_named(tmp_path, line, found):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1}\n' + line + '\n')
    with pytest.raises(FileError, match=rf'^{path}: line 2 {found}: it was edited .*; remove it$'):
        MetricsWriter(tmp_path, tensorboard=False)


def test_metrics_that_lack_updates_before_the_checkpoint_are_refused(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1}\n{"step": 2}\n')
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with pytest.raises(FileError, match=rf'^{path} has 2 updates, the checkpoint was saved after 3; restore the file'):
        writer.truncate(3)


def test_metrics_of_an_evaluation_are_in_tensorboard_at_the_version_that_they_are_of(tmp_path: pathlib.Path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    row = {names.EVALUATION_VERSION: 8, names.GREEDY_ACCURACY: 0.5, names.REWARD_MEAN: 1.0}
    writer.write(11, row)
    writer.close()
    (line,) = read_metrics(tmp_path / 'metrics.jsonl')
    assert line == {'step': 11, **row}
    events = [event for path in (tmp_path / 'tensorboard').iterdir() for event in _tensorboard_events(path)]
    steps = {value.tag: event.step for event in events for value in event.summary.value}
    assert steps == {'evaluation/version': 8, 'evaluation/greedy_accuracy': 8, 'reward/mean': 11}


@pytest.mark.parametrize('value', ['[1, [2]]', '[1, null]', '[-1]', f'[{10**30}]', '[NaN]', '[true]'])
def test_a_histogram_that_holds_no_counts_is_refused(tmp_path, value):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(f'{{"step": 1, "{names.HISTOGRAMS[0]}": {value}}}\n')
    with pytest.raises(FileError, match=r'line 1 has .*, which is no metric'):
        read_metrics(path)


def test_a_metric_that_is_no_number_is_null_in_the_file(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1, "loss": NaN}\n')
    with pytest.raises(FileError, match='has loss=nan, which is no metric'):
        read_metrics(path)


def test_loads_of_experts_have_a_file_of_their_own_with_a_line_an_update(tmp_path: pathlib.Path):
    loads, rows = tmp_path / 'expert_loads.jsonl', []
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.listeners.append(lambda step, row: rows.append(dict(row)))
    writer.write(1, {'x': 1})
    assert not loads.exists()  # a dense model's run has none
    writer.write(2, {'x': 2, 'experts/loads/1': [3, 0], 'experts/loads_of_age/0/tokens': 3})
    writer.write(3, {'x': 3})
    writer.sync()
    assert rows == [{'x': 1}, {'x': 2}, {'x': 3}]
    found = [{'step': 2, 'experts/loads/1': [3, 0], 'experts/loads_of_age/0/tokens': 3}, {'step': 3}]
    assert read_metrics(loads) == found
    writer.truncate(2)
    assert read_metrics(loads) == found[:1]
    writer.write(3, {'x': 30})
    writer.close()
    again = MetricsWriter(tmp_path, tensorboard=False)
    again.write(4, {'x': 4})
    again.close()
    assert read_metrics(loads) == [found[0], {'step': 3}, {'step': 4}]
    assert read_metrics(tmp_path / 'metrics.jsonl')[2:] == [{'step': 3, 'x': 30}, {'step': 4, 'x': 4}]


def test_loads_that_are_no_counts_are_refused(tmp_path: pathlib.Path):
    (tmp_path / 'expert_loads.jsonl').write_text('{"step": 1, "experts/loads/1": [3, -1]}\n')
    with pytest.raises(FileError, match=r'line 1 has experts/loads/1=\[3, -1\], which is no metric'):
        read_metrics(tmp_path / 'expert_loads.jsonl')
