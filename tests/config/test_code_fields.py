"""Rules of the task `code`."""

from __future__ import annotations

import pytest

from areal_jax import config as schema
from areal_jax.config.fields import ConfigError


def make(**fields):
    config = schema.default_config()
    config.task.name = 'code'
    for name, value in fields.items():
        config.task[name] = value
    return config


def test_the_defaults_are_right():
    schema.validate(make())
    schema.validate_evaluation(make(path='humaneval'))


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        ({'path': 'humaneval'}, "task.path='humaneval' is for evaluation only"),
        ({'time_limit_s': 10.0}, r'task.verifier_deadline_s=20 would end checks .* raise it to 66.7 or more'),
        ({'name': 'running_sums', 'show_tests': True}, "task.show_tests=True is for task.name='code', and it is"),
        ({'name': 'running_sums', 'partial_credit': True}, "task.partial_credit=True is for task.name='code'"),
        ({'verifier': 'inline'}, "task.verifier='inline' would run code of a model in the process of the run"),
    ],
)
def test_what_cannot_run_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        schema.validate(make(**fields))
