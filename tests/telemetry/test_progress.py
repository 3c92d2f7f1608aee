from __future__ import annotations

import io

from areal_jax.telemetry.progress import Progress, format_line

METRICS = {
    'reward/mean': 0.531, 'staleness/token_age_mean': 1.84, 'staleness/token_age_max': 4,
    'throughput/generate_tokens_per_second': 209.6, 'throughput/train_tokens_per_second': 160.2, 'interruptions': 3,
}  # fmt: skip


def test_a_line_is_readable():
    assert format_line(7, 20, METRICS, 100.0) == (
        'step  7/20  reward 0.53  age 1.8 (max 4)  gen 210 tok/s  train 160 tok/s  interrupts 3  left 1m40s'
    )


def test_what_is_missing_is_a_dash():
    line = format_line(1, 9, {'reward/mean': float('nan')}, None)
    assert line == 'step 1/9  reward    -  age   - (max -)  gen   - tok/s  train   - tok/s  interrupts -  left -'


def test_skipped_steps_are_shown_where_there_are_any():
    steps = lambda applied, skipped: {'update/optimizer_steps': applied, 'update/skipped_steps': skipped}
    line = format_line(7, 20, METRICS | steps(3.0, 1.0), 100.0)
    assert line.endswith('interrupts 3  skipped 1 of 4 steps (gradient not finite)  left 1m40s')
    assert format_line(7, 20, METRICS | steps(4.0, 0.0), 100.0) == format_line(7, 20, METRICS, 100.0)


def test_time_left_follows_the_updates_of_this_process():
    # a run of 10 goes on after update 4 at 100 s; update 6 at 120 s: 10 s an update, 4 to go
    stream = io.StringIO()
    progress = Progress(10, stream, first_step=4, first_time=100.0)
    progress.update(5, {'time': 110.0})
    progress.update(6, {'time': 120.0})
    header, fifth, sixth = stream.getvalue().splitlines()
    assert header.startswith('reward:')
    assert fifth.endswith('left 50s')
    assert sixth.endswith('left 40s')
    assert '\x1b' not in stream.getvalue()
    assert '\r' not in stream.getvalue()


def test_time_before_the_first_update_does_not_count():
    # an evaluation ended at 40 s; update 1 of 3 at 50 s: 10 s an update, 2 to go
    stream = io.StringIO()
    progress = Progress(3, stream)
    progress.restart(40.0)
    progress.update(1, {'time': 50.0})
    assert stream.getvalue().splitlines()[-1].endswith('left 20s')
