"""The README and the notes in docs/ name files, tests, functions and config fields that exist."""

import ast
import functools
import pathlib
import re

import pytest

from areal_jax.config.declarations import FIELDS, SECTIONS
from tests import sandbox_page
from tests.workers.sandbox.attempts import ATTEMPTS

ROOT = pathlib.Path(__file__).parent.parent
LOG = sorted(ROOT.glob('docs/log/20*.md'), reverse=True)  # a page a month, which says what was
PAGES = [
    page
    for page in (*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md'))
    if page not in LOG and page.name != 'report.md'  # made by a run
]
WRITTEN_BY_RUNS = ('results.md', 'study.md')  # in folders of docs/ that hold what a command wrote
OF_OTHERS = ('pytest', 'venv', 'build', 'pip')  # modules that pages call with python -m
OPENING = re.compile(r'# .+\n\n(After this (page|note) you |With (this|these) |From here you )')
OF_A_RUN = (
    'runs/',
    'tensorboard/',
    'checkpoints/',
    'plots/',
    'export/',
    'mlruns/',
    'rollouts/',
    'slurm/',
)  # folders that a run leaves
FILE = r'[\w./*-]+\.(?:py|md|sh|svg|png)|[\w.-]+(?:/[\w.-]+)*/'


@functools.cache
def names_in(path: pathlib.Path) -> set[str]:
    """Functions, classes and constants of a file, those inside classes too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return found | {n.id for n in nodes if isinstance(n, ast.Name)}


def resolve(name: str, page: pathlib.Path) -> list[pathlib.Path]:
    """Files that a page may mean: from the root, the package or the page's folder; a bare name from anywhere."""
    found = [path for folder in (ROOT, ROOT / 'areal_jax', page.parent) for path in folder.glob(name.rstrip('/'))]
    if not found and '/' not in name:
        folders = ('areal_jax', 'tests', 'checks', 'configs', 'docs')
        found = [path for folder in folders for path in (ROOT / folder).rglob(name)]
    return found


def broken_links(text: str, page: pathlib.Path) -> list[str]:
    links = re.findall(r'\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)', text)
    return [link for link in links if not (page.parent / link).exists()]


def faults(text: str, page: pathlib.Path) -> list[str]:
    """What the text names and nobody has."""
    wrong = []
    for code in re.findall(r'`([^`\n]+)`', re.sub(r'```.*?```', '', text, flags=re.DOTALL)):
        if match := re.fullmatch(rf'({FILE})(?:::?(\w+))?', code):
            paths = resolve(match[1], page)
            known = [path for path in paths if not match[2] or match[2] in names_in(path)]
            wrong += [] if known or code.startswith(OF_A_RUN) else [code]
    wrong += broken_links(text, page)
    for name in re.findall(r'(?<![\w./])(?:--config\.)?(\w+\.\w+)(?![\w/(]|\.\w)', text):
        section, _, field = name.partition('.')
        known = [
            declared for declared in FIELDS if declared == name or (name.endswith('_') and declared.startswith(name))
        ]
        wrong += [] if known or section not in SECTIONS or field in ('py', 'md') else [name]
    for words in re.findall(r'python -m pytest ([^`\n]+)', text):
        tests = [word for word in words.split() if word.startswith('tests/')]
        wrong += [test for test in tests if not (ROOT / test.partition('::')[0]).exists()]
    for module in re.findall(r'python -m ([\w.]+)', text):
        # an installation has launch/ inside the package
        parts = pathlib.Path(*re.sub(r'^areal_jax\.launch\.', 'launch.', module).split('.'))
        known = [ROOT / parts.with_suffix('.py'), ROOT / parts / '__main__.py']
        wrong += [] if parts.parts[0] in OF_OTHERS or any(path.exists() for path in known) else [module]
    return wrong


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    assert faults(page.read_text(), page) == []


@pytest.mark.parametrize('page', LOG, ids=lambda page: page.name)
def test_links_of_the_log_resolve(page):
    assert broken_links(page.read_text(), page) == []


def test_the_first_sentence_says_what_a_reader_can_do_after_it():
    docs = ROOT / 'docs'
    pages = [page for page in PAGES if page.parent == docs or page.name not in WRITTEN_BY_RUNS]
    assert [str(page) for page in pages if page.parent != ROOT and not OPENING.match(page.read_text())] == []
    assert not OPENING.match('# A page\n\nThis page explains a thing.\n')


def test_the_index_of_the_log_has_every_entry():
    titles = [title for page in LOG for title in re.findall(r'^## (.+)$', page.read_text(), re.MULTILINE)]
    index = (ROOT / 'docs' / 'log' / 'index.md').read_text()
    assert re.findall(r'^ - (\d{4}-.+)$', index, re.MULTILINE) == titles


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('`control/gate.py` and `gate.py` and `control/`', []),
        ('`control/gates.py`', ['control/gates.py']),
        ('`tests/test_house.py::test_one_version`, `files.py:sync`', []),
        ('`tests/test_house.py::test_two_versions`', ['tests/test_house.py::test_two_versions']),
        ('[a note](docs/log/index.md), [elsewhere](https://example.org/a.md), [above](#here)', []),
        ('[a note](docs/nothing.md)', ['docs/nothing.md']),
        ('[a note](docs/nothing.md#part)', ['docs/nothing.md']),
        ('`run.steps`, --config.learner.layers=list, `task.verifier_*`', []),
        ('`mesh.fsdp=4` is gone, `rollout.engines=2` too', ['rollout.engines']),
        ('python -m areal_jax.main_report, python -m checks.chaos', []),
        ('python -m pytest -n 0 tests/learning/test_packing.py', []),
        ('python -m pytest tests/learning/test_absent.py', ['tests/learning/test_absent.py']),
        ('python -m areal_jax.main_absent', ['areal_jax.main_absent']),
        ('python -m areal_jax.launch.local', []),
        ('python -m areal_jax.launch.absent', ['areal_jax.launch.absent']),
    ],
)
def test_the_check_sees_what_is_gone(text, found):
    assert faults(text, ROOT / 'README.md') == found


def test_the_page_of_the_sandbox_has_every_attempt():
    page = sandbox_page.PAGE.read_text()
    assert page == sandbox_page.replace_table(page), 'run: python -m tests.sandbox_page'
    assert all(name in page for name in ATTEMPTS)


def test_every_harness_has_a_row():
    """Programs that a harness starts, `side_*.py` and folders `*_parts/`, are no harness."""
    harnesses = {
        '.'.join(path.relative_to(ROOT).with_suffix('').parts)
        for path in (ROOT / 'benchmarks').rglob('*.py')
        if "__name__ == '__main__'" in path.read_text() and not path.name.startswith('side_')
        and not path.parent.name.endswith('_parts') and '_parts' not in path.parent.parent.name
    }  # fmt: skip
    rows = re.findall(r'^\| `(benchmarks[\w.]+)` \|', (ROOT / 'docs' / 'benchmarks.md').read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(harnesses)


def test_every_raw_result_is_read():
    """By a page, a harness, a test or a table of bars; `benchmarks.simulation` names its files by their rows."""
    results = ROOT / 'benchmarks' / 'results'
    code = [(ROOT / name, '*.py') for name in ('benchmarks', 'checks', 'tests')]
    kinds = [(ROOT / 'docs', '*.md'), *code, (results / 'bars', '*')]
    texts = '\n'.join(path.read_text() for folder, kind in kinds for path in folder.rglob(kind) if path.is_file())
    raw = [path for path in results.rglob('*') if path.is_file() and path.parent.name not in ('bars', 'simulation')]
    assert [path.name for path in raw if path.name not in texts] == []
