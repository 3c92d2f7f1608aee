"""Two copies of the package have one code version where their sources are the same."""

import shutil

import areal_jax
from areal_jax.installation import digest_sources, read_code_version


def write(package, files):
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return digest_sources(package)


SOURCES = {'a.py': 'x = 1\n', 'native/b.cc': 'int b;\n', 'native/b.h': '', 'notes.md': 'one'}


def test_every_source_and_its_name_counts_and_nothing_else_does(tmp_path):
    digest = write(tmp_path / 'one', SOURCES)
    assert write(tmp_path / 'two', SOURCES | {'notes.md': 'other', '__pycache__/a.pyc': ''}) == digest
    changed = [
        SOURCES | {'a.py': 'x = 2\n'},
        SOURCES | {'native/b.cc': 'int c;\n'},
        SOURCES | {'native/b.h': '//'},
        SOURCES | {'new.py': ''},
        {'c.py': 'x = 1\n', **{name: text for name, text in SOURCES.items() if name != 'a.py'}},
    ]
    assert len({digest, *(write(tmp_path / f'changed_{k}', files) for k, files in enumerate(changed))}) == 6


def test_it_is_the_release_and_the_digest_of_this_package(tmp_path):
    version = read_code_version()
    assert version.startswith(f'{areal_jax.__version__}+')
    copy = tmp_path / 'copy'
    shutil.copytree(areal_jax.__path__[0], copy, ignore=shutil.ignore_patterns('__pycache__'))
    assert version.endswith(f'+{digest_sources(copy)}')
