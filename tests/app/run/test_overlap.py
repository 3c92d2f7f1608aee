from areal_jax.app.run.overlap import alone_seconds
from areal_jax.report.event_log import LaneInterval, Window


def interval(lane, work, start, end, amount):
    return LaneInterval(lane, work, start, end, amount, 0, {})


def test_work_is_priced_where_the_other_lane_was_idle():
    # decoding alone cost 0.5 s a step, under training 1.0; 2 + 4 steps in 2 updates = 6 * 0.5 / 2 = 1.5 s an update
    # training cost 0.25 s a token alone, 0.4 beside decoding; 10 + 8 tokens = 18 * 0.25 / 2 = 2.25 s an update
    intervals = [
        interval('engine/0', 'decode', 0.0, 1.0, 2),
        interval('engine/0', 'decode', 2.0, 6.0, 4),
        interval('learner', 'train', 2.0, 6.0, 10),
        interval('learner', 'train', 7.0, 9.0, 8),
    ]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 2) == {'generate': 1.5, 'train': 2.25}


def test_work_alone_costs_at_most_what_it_costs_in_the_middle():
    # the only snapshot that ran alone was a checkpoint's of 5 s; those of publications took 0.5 s beside decoding
    intervals = [interval('engine/0', 'decode', 0.0, 4.0, 1)]
    intervals += [interval('learner', 'snapshot', start, start + 0.5, 1) for start in (0.0, 1.0, 2.0)]
    intervals.append(interval('learner', 'snapshot', 4.0, 9.0, 1))
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1)['train'] == 4 * 0.5


def test_a_price_may_come_from_the_evaluation_but_its_work_does_not_count():
    intervals = [interval('engine/0', 'decode', 0.0, 1.0, 2), interval('engine/0', 'decode', 5.0, 9.0, 2)]
    intervals.append(interval('learner', 'train', 5.0, 9.0, 1))
    assert alone_seconds(intervals, Window(((4.0, 10.0),)), 1) == {'generate': 1.0, 'train': None}


def test_several_engines_count_by_the_busiest_at_the_cost_of_one_alone():
    # a step cost 0.5 s on engine/0 alone and 1.0 s beside engine/1; 2 + 1 steps and 5 steps at 0.5 s: 1.5 and 2.5 s
    intervals = [
        interval('engine/0', 'decode', 0.0, 1.0, 2),
        interval('engine/0', 'decode', 2.0, 3.0, 1),
        interval('engine/1', 'decode', 2.0, 7.0, 5),
    ]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1) == {'generate': 2.5, 'train': None}
    # engine/1 has a kind of work that never ran alone: nothing is known about the busiest
    intervals += [interval('engine/1', 'prefill', 7.0, 9.0, 1), interval('engine/0', 'decode', 8.0, 9.0, 1)]
    assert alone_seconds(intervals, Window(((0.0, 10.0),)), 1) == {'generate': None, 'train': None}
