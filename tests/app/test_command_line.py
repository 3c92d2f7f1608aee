"""What a user may mistype, in process: one sentence that names the part, its value and the fix."""

import os
import subprocess
import sys

import pytest
from absl import flags

from areal_jax.app.command_line import CommandLineError, load_config, parse_train_command, require_workdir
from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError

TINY = '--config=configs/tiny_cpu.py'

FILES = {
    'syntax.py': ('def get_config():\n    return (\n', r"line 2 of .*syntax\.py is not Python: '\(' was never closed"),
    'imports.py': ('\nimport nosuch\n', r'line 2 of .*imports\.py raises ModuleNotFoundError: No module named .nosuch'),
    'raises.py': ('def get_config():\n    return 1 / 0\n', r'line 2 of .*raises\.py raises ZeroDivisionError'),
    'exits.py': ('import sys\nsys.exit(3)\n', r'line 2 of .*exits\.py raises SystemExit: 3'),
    'none.py': ('x = 3\n', r'none\.py has no function get_config\(\)'),
    'three.py': ('def get_config():\n    return 3\n', r'get_config\(\) returns int, not an ml_collections ConfigDict'),
    'argument.py': ('def get_config(n):\n    return n\n', r'get_config\(\) of .*argument\.py needs an argument'),
    'slotz.py': (
        'from areal_jax import config\n\n\ndef get_config():\n    c = config.default_config()\n'
        '    c.rollout.slotz = 3\n    return c\n',
        r"line 6 of .*slotz\.py raises AttributeError: 'slotz' is not a field of that section; did you mean slots\?$",
    ),
    **{
        f'former{number}.py': (
            'from areal_jax import config\n\n\ndef get_config():\n    c = config.default_config()\n'
            f'    {line}\n    return c\n',
            rf'line 6 of .*former{number}\.py raises {former}: this field was replaced; use {new}$',
        )
        for number, (line, former, new) in enumerate([
            ('c.mesh.fsdp = 4', 'mesh.fsdp=4', r"cluster\.learner='fsdp=4'"),
            ('c.rollout.engines = 2', 'rollout.engines=2', r"cluster\.engines='2 x shared'"),
            ("c.mesh.strategy = 'tensor'", 'mesh.strategy=tensor', r"cluster\.strategy='tensor'"),
            ("c.update_from_flattened_dict({'mesh.tensor': 2})", 'mesh.tensor=2', r"cluster\.learner='tensor=2'"),
        ])
    },
    'required.py': (
        'from ml_collections import config_dict\n\n\ndef get_config():\n'
        "    return config_dict.ConfigDict({'a': config_dict.required_placeholder(int)})\n",
        r'required\.py raises RequiredValueError',
    ),
    'bytes.py': (b'x = "\xff"\n', r'bytes\.py is not Python'),
}  # fmt: skip


def parse(*arguments):
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, '', values)
    flags.DEFINE_bool('resume', False, '', values)
    return parse_train_command(['main_train', *arguments], values)


@pytest.mark.parametrize('name', FILES)
def test_a_config_file_that_cannot_be_used_is_named_with_its_line(tmp_path, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CommandLineError, match=rf'^--config={tmp_path}/{name}: .*{message}') as refused:
        load_config(str(tmp_path / name))
    assert '\n' not in str(refused.value)


def test_a_missing_file_a_directory_and_an_argument_that_nobody_takes(tmp_path):
    with pytest.raises(CommandLineError, match=r"there is no file 'configs/tiny_cpy\.py'; did you mean tiny_cpu\.py\?"):
        load_config('configs/tiny_cpy.py')
    with pytest.raises(CommandLineError, match='configs is not a file'):
        load_config('configs')
    with pytest.raises(CommandLineError, match=r'takes no argument: leave out :3'):
        load_config('configs/tiny_cpu.py:3')


def test_a_config_that_takes_an_argument_gets_it(tmp_path):
    file = tmp_path / 'steps.py'
    file.write_text(
        'from areal_jax import config\n\n\ndef get_config(steps):\n'
        '    c = config.default_config()\n    c.run.steps = int(steps)\n    return c\n'
    )
    command = parse(f'--config={file}:7', f'--workdir={tmp_path}/w', '--config.rollout.slots=3')
    assert command.config.run.steps == 7
    assert command.config.rollout.slots == 3
    assert command.source == f'{file}:7'
    assert command.overrides == ('rollout.slots',)
    with pytest.raises(CommandLineError, match=r"line 6 of .*steps\.py raises ValueError: invalid literal.*'many'"):
        parse(f'--config={file}:many', f'--workdir={tmp_path}/w')


def test_every_way_of_writing_a_flag_works(tmp_path):
    words = ('--config', 'configs/tiny_cpu.py', '--workdir', str(tmp_path), '--noconfig.telemetry.plots', '--resume')
    command = parse(*words, '--config.run.steps', '3', '-config.rollout.prefill_buckets=8,16')
    assert (command.config.run.steps, command.config.rollout.prefill_buckets) == (3, (8, 16))
    assert command.config.telemetry.plots is False
    assert command.overrides == ('telemetry.plots', 'run.steps', 'rollout.prefill_buckets')


LINES = [
    ((), '--config is missing: name an experiment file'),
    (('--config',), '--config is missing'),
    (('--config', '--workdir=w'), '--config is missing'),
    (('--config=',), '--config is missing'),
    ((TINY,), '--workdir is missing: name a directory'),
    ((TINY, '--workdir='), '--workdir is missing'),
    ((TINY, '--workdir'), 'Missing value for flag --workdir'),
    ((TINY, TINY), '--config is given more than once'),
    ((TINY, '--wrkdir=w'), '--wrkdir is not a flag; did you mean --workdir?'),
    ((TINY, '--frobnicate=w'), '--frobnicate is not a flag; see --help'),
    ((TINY, '--flagfile=/nowhere'), "No such file or directory: '/nowhere'"),
    ((TINY, '--resume=maybe'), '--resume=maybe: '),
    ((TINY, '--confg.run.steps=3'), '--confg.run.steps is not a flag; did you mean --config.run?'),
    ((TINY, '--config.mesh.fsdp=4'), "--config.mesh.fsdp=4: this field was replaced; use cluster.learner='fsdp=4'"),
    ((TINY, '--config.mesh.fsdp', '4'), "use cluster.learner='fsdp=N'"),
    (
        (TINY, '--config.rollout.engines=2', '--config.mesh.data=2', '--config.mesh.tensor=2'),
        "these fields were replaced; use cluster.learner='data=2,tensor=2', cluster.engines='2 x shared'",
    ),
    ((TINY, '--config.run.steps.x=3'), 'run.steps.x is not a field of the config; did you mean run.steps?'),
    ((TINY, '--config.run.steps='), '--config.run.steps= must be a whole number'),
    ((TINY, '--config.staleness.eta=much'), '--config.staleness.eta=much must be a number'),
]  # fmt: skip


@pytest.mark.parametrize(('words', 'message'), LINES, ids=[' '.join(words) for words, _ in LINES])
def test_a_command_line_that_cannot_be_used_is_one_sentence(words, message):
    with pytest.raises((CommandLineError, ConfigError)) as refused:
        parse(*words)
    assert message in str(refused.value)
    assert '\n' not in str(refused.value)


def test_a_workdir_that_cannot_be_one_is_named(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    for name in ('file', 'file/below'):
        with pytest.raises(CommandLineError, match=r'/file is a file, not a directory; choose another one'):
            require_workdir(f'{tmp_path}/{name}')
    require_workdir(f'{tmp_path}/a/b/c')
    assert os.listdir(tmp_path) == ['file']
    with pytest.raises(CommandLineError, match='cannot be used as a path'):
        require_workdir('a\udcffb')
    with pytest.raises(CommandLineError, match='cannot be used as a path'):
        require_workdir(f'{tmp_path}/{"x" * 300}')
    monkeypatch.setattr(os, 'access', lambda *_: False)
    with pytest.raises(CommandLineError, match=r'is not writable; choose a directory of your own'):
        require_workdir(f'{tmp_path}/new')


def test_the_declared_sections_are_those_of_every_override():
    command = parse(TINY, '--workdir=/tmp', *(f'--config.{s}.{f}={v}' for s, f, v in scalars()))
    assert len(command.overrides) > 50


def scalars():
    kinds = (int, float, str)
    config = load_config('configs/tiny_cpu.py')
    for section, fields in default_config().items():
        for field, value in fields.items():
            if type(value) in kinds:
                yield section, field, config[section][field]


def test_a_mistake_is_answered_without_importing_jax():
    program = (
        'import sys\nfrom areal_jax import main_train\nfrom areal_jax.app.process.ending import end_command\n'
        'print(end_command(lambda: main_train.main(sys.argv, None), ""), "jax" in sys.modules)'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, TINY, '--workdir=/tmp/x', '--config.rollout.slotz=3'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == '2 False\n'
    assert done.stderr == 'error: rollout.slotz is not a field of the config; did you mean rollout.slots?\n'
