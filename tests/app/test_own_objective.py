"""docs/own_objective.md: its file trains, and each mistake that it lists ends a run with its sentence."""

from __future__ import annotations

import pathlib
import re

import pytest

from areal_jax.app.library import build_run
from areal_jax.errors import UserError
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE, read_metrics
from tests.app.small import SmallRun, small_config

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'own_objective.md').read_text()
CODE = re.findall(r'^```python my_objective\.py\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)[0]
LINES = 25  # of an own objective, without imports and blank lines


def replaced(*pairs):
    """The file of the page with a mistake."""
    code = CODE
    for old, new in pairs:
        assert old in code
        code = code.replace(old, new)
    return code


RETURN = 'return -tokens.mean(gain), '
BUILD = 'return Asymmetric(failures)'
# what is replaced in the file; the sentence, without the field and the file that begin it
MISTAKES = {
    'no objective': ([(BUILD, 'return {}')], 'it returned dict, and must return an Objective'),
    'not hashable': ([(BUILD, 'return Asymmetric([0.5])')], "unhashable type: 'list': make it a frozen dataclass"),
    'unknown input': ([('frozenset({PROXIMAL})', "frozenset({'hidden'})")], "its `reads` has 'hidden', which no pass"),
    'undeclared input': (
        [('frozenset({PROXIMAL})', 'frozenset()')],
        "the objective reads 'proximal', which it did not declare: name it in its `reads`, or in `prepares`",
    ),
    'unknown aggregation': ([('contrasts = True', "aggregation = 'mean'")], "loss.aggregation='mean' is unknown"),
    'another shape': (
        [(RETURN, 'return gain, ')],
        'Asymmetric.loss: the loss has the shape (1, 32), and must be one number: sum over the tokens with tokens.mean',
    ),
    'a metric of another shape': ([('tokens.count()', 'gain')], 'Asymmetric.loss: token_count has the shape (1, 32)'),
    'no metrics': (
        [
            (
                "tokens.mean(gain), {'token_count': tokens.count(), 'weight_sum': tokens.total(weight)}",
                'tokens.mean(gain)',
            )
        ],
        'and must return (loss, metrics), metrics a dict',
    ),
    'an exception': ([('jnp.minimum(', 'jnp.smallest(')], 'my_objective.py raises AttributeError: '),
    'an unknown option': (
        [('def build(failures=0.5)', 'def build(failures)')],
        'missing 1 required positional argument',
    ),
}
LATE = {  # seen at the first update
    'NaN': (
        [(RETURN, 'return -tokens.mean(gain) * jnp.nan, ')],
        'the loss of update 1 is nan: Asymmetric.loss must be finite',
    ),
    'one advantage too few': (
        [('for r in rewards]', 'for r in rewards[:1]]')],
        'Asymmetric.advantages returned arrays of the shapes [(4,)], and must return one number an answer: [(4,), ',
    ),
    'another prepared array': (
        [('    contrasts = True', "    contrasts = True\n    prepares = ('gate',)")],
        "Asymmetric.prepare returned arrays of the shapes {}, and must return {'gate': (",
    ),
    'an infinite advantage': (
        [('* (r - r.mean())', '* np.inf')],
        'Asymmetric.advantages returned a number that is not finite',
    ),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(code):
        (tmp_path / 'my_objective.py').write_text(code)
        return 'my_objective.py:build'

    return write


def test_it_takes_25_lines():
    lines = [line for line in CODE.splitlines() if line.strip() and not re.match(r'import |from ', line)]
    assert len(lines) <= LINES


def test_the_file_of_the_page_trains(write, tmp_path):
    run = SmallRun(tmp_path / 'run', run__steps=2, loss__objective=write(CODE))
    report = run.train().report
    rows = read_metrics(tmp_path / 'run' / FILE)
    assert [row[names.SKIPPED_STEPS] for row in rows] == [0, 0]
    assert sum(row[names.OPTIMIZER_STEPS] for row in rows) >= 1
    assert all(0 < row['loss/behavior_weight_mean'] <= 2 for row in rows if row[names.OPTIMIZER_STEPS])
    assert report['objective'] == 'my_objective.py:build'


def test_an_option_reaches_the_function(write, tmp_path):
    spec = write(replaced((BUILD, "raise ValueError(f'failures is {failures}')")))
    config = small_config(loss__objective=spec)
    config.loss.options.failures = 0.2
    with pytest.raises(UserError, match=r'raises ValueError: failures is 0\.2'):
        build_run(config, tmp_path / 'run')


def test_the_choices_of_combinations_are_not_read_beside_it(write, tmp_path):
    config = small_config(loss__objective=write(CODE), loss__clip_epsilon=0.1)
    with pytest.raises(UserError, match=r'set but never read: loss\.clip_epsilon=0\.1'):
        build_run(config, tmp_path / 'run', overrides=('loss.clip_epsilon',))


@pytest.mark.parametrize('mistake', MISTAKES | LATE)
def test_a_mistake_is_one_sentence(mistake, write, tmp_path):
    pairs, sentence = (MISTAKES | LATE)[mistake]
    spec = write(replaced(*pairs))
    with pytest.raises(UserError) as refused:
        build_run(small_config(run__steps=2, loss__objective=spec), tmp_path / 'run').train()
    said = str(refused.value)
    assert said.startswith(f'loss.objective={spec}: ')
    assert sentence in said
    assert '\n' not in said


def test_a_run_that_meets_a_mistake_late_keeps_its_weights(write, tmp_path):
    spec = write(replaced(*LATE['NaN'][0]))
    run = SmallRun(tmp_path / 'run', run__steps=2, loss__objective=spec)
    with pytest.raises(UserError, match='the loss of update 1 is nan'):
        run.train()
    assert sorted(run.weights) == [0]
