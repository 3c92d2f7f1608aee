"""The table of model families in docs/your_model.md, made from the lists that the tests run through.

python -m tests.models.test_family_table      prints it
"""

from __future__ import annotations

import pathlib

from areal_jax.models.families import FAMILIES
from tests.app import test_families as runs
from tests.formats.config_forms import FORMS
from tests.models import family_examples, parity

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'your_model.md'
COLUMNS = ('`model_type`', 'read', 'train', 'decode', 'serve', 'export', 'replay', 'real weights')
# tests of single families: (name of the family, column) -> the file of the test
SINGLE = {
    ('llama', 'train'): 'tests/app/test_start.py',
    ('llama', 'serve'): 'tests/app/test_main_serve.py',
    ('llama', 'replay'): 'tests/app/run/test_replay.py',
    ('llama', 'real weights'): 'tests/models/test_smollm2.py',
    ('gemma3_text', 'real weights'): 'tests/models/test_gemma3.py',
    ('qwen2', 'train'): 'tests/learning/test_reference.py',
    ('qwen3', 'train'): 'tests/learning/test_meshes.py',
    ('qwen3', 'serve'): 'tests/app/test_main_serve.py',
    ('qwen3_moe', 'train'): 'tests/app/run/test_expert_run.py',
    ('qwen3_moe', 'replay'): 'tests/app/run/test_expert_run.py',
}


def families_of(configs):
    return {config['model_type'] for config in configs}


def table() -> str:
    read = families_of(FORMS.values()) | families_of(parity.ALL.values())
    in_learner = {config.family for config in family_examples.CONFIGS.values()}
    tested = {
        'read': read,
        'train': in_learner & set(runs.FAMILIES),
        'decode': families_of(parity.CONFIGS.values()),
        'serve': set(runs.FAMILIES),
        'export': families_of(parity.ALL.values()),
        'replay': set(runs.FAMILIES),
        'real weights': set(),
    }
    rows = [COLUMNS, ['---'] * len(COLUMNS)]
    for family in FAMILIES:
        cells = ['yes' if family in tested[name] or (family, name) in SINGLE else '' for name in COLUMNS[1:]]
        rows.append([f'`{family}`', *cells])
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), f'put this into {PAGE.name}:\n{table()}'


def test_the_files_of_single_tests_are_there():
    for path in SINGLE.values():
        assert (PAGE.parents[1] / path).is_file(), path


if __name__ == '__main__':
    print(table(), end='')
