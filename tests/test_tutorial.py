"""docs/your_task.md and docs/agents.md, line by line: their files are written, examples and commands run and compared.

'```python FILE' writes a file, or adds to one that the page has begun; '```pycon' is a doctest; '```console' has
commands after '$', each followed by what it prints, where '...' stands for anything.
"""

import doctest
import pathlib
import re
import shlex

import pytest

from areal_jax import main_train
from areal_jax.app.process.ending import Interrupts, end_command

ROOT = pathlib.Path(__file__).parents[1]
TEMPLATES = ROOT / 'configs' / 'templates'
COMMANDS = {'your_task': (4, 3), 'agents': (2, 0)}  # of each page those that work, and that end with an error
QUIET = ['--config.telemetry.plots=False', '--config.telemetry.tensorboard=False']  # a new reader sees both


def blocks(page):
    """(language, file or '', text) of every fenced block."""
    text = (ROOT / 'docs' / f'{page}.md').read_text()
    return re.findall(r'^```(\w+)(?: (\S+))?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)


def commands(text):
    """(words, expected output) of a console block."""
    for part in re.split(r'^\$ ', text.replace('\\\n', ' '), flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition('\n')
        yield shlex.split(line), expected


def pattern(expected):
    """'...' on a line of its own stands for any lines, inside a line for anything in it."""
    lines = [
        r'(?:.*\n)*' if line == '...' else re.escape(line).replace(r'\.\.\.', '.*') + r'\n'
        for line in expected.splitlines()
    ]
    return ''.join(lines)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command of the page in this process; its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('areal_jax.app.process.setup.return_freed_memory', lambda: None)  # settings of a whole process
    monkeypatch.setattr('areal_jax.app.process.setup.space_full_collections', lambda: None)
    monkeypatch.setattr('areal_jax.native.compiled_library.keep_blocks', lambda: None)
    monkeypatch.setattr('areal_jax.app.process.setup.silence_libraries', lambda: None)

    def run(words):
        assert words[:3] == ['python', '-m', 'areal_jax.main_train']
        capsys.readouterr()
        code = end_command(lambda: main_train.main([*words[2:], *QUIET], Interrupts()), doing='')
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


@pytest.mark.slow
@pytest.mark.parametrize('page', COMMANDS)
def test_every_line_of_the_page(run, tmp_path, page):
    names, codes = {}, []
    for language, file, text in blocks(page):
        if language == 'python' and not file:
            compile(text, page, 'exec')
        elif language == 'python':
            with (tmp_path / file).open('a') as opened:
                opened.write(text)
        elif language == 'pycon':
            test = doctest.DocTestParser().get_doctest(text, names, page, page, 0)
            assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
        else:
            assert language == 'console'
            for words, expected in commands(text):
                code, shown = run(words)
                codes.append(code)
                assert re.fullmatch(pattern(expected), shown), f'{shlex.join(words)} printed\n{shown}'
                assert code == (2 if 'error: ' in expected else 0)
    assert (len(codes) - codes.count(2), codes.count(2)) == COMMANDS[page]


@pytest.mark.parametrize(('page', 'name'), [
    ('your_task', 'my_task.py'), ('your_task', 'two_turns.py'), ('agents', 'agent.py'),
])  # fmt: skip
def test_the_templates_have_the_code_of_the_pages(page, name):
    whole = ''.join(text for _, file, text in blocks(page) if file == name)
    written = re.findall(r'^(?:class|def|async def| {4}async def| {4}def) (\w+)', whole, re.MULTILINE)
    template = (TEMPLATES / name).read_text()
    missing = [function for function in written if not re.search(rf'(?:class|def) {function}\b', template)]
    assert missing == (['exact', 'centered'] if name == 'my_task.py' else [])


def test_the_patterns_see_a_difference():
    assert re.fullmatch(pattern('a ...\n...\nc\n'), 'a 1\nx\ny\nc\n')
    assert not re.fullmatch(pattern('a ...\nc\n'), 'a 1\nx\nc\n')
    assert not re.fullmatch(pattern('a.c\n'), 'abc\n')
