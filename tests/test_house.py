"""The house: sizes of files, functions and classes, no import circle, types, one version, what tests reach into."""

import ast
import collections
import importlib.metadata
import pathlib
import re

import pytest

import areal_jax
from checks.mutations import MUTATIONS, ROOT, Mutation, mutate, pattern_of
from tests.test_imports import parse

PACKAGE = pathlib.Path(areal_jax.__file__).parent
PRIVATE_NAMES = ROOT / 'docs' / 'design' / 'private_names.md'
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 700, 80, 400
MOST_ANY = 335  # `Any` is for trees of arrays; everything else has a type
WITHOUT_TWIN = {pathlib.Path('gpu'), pathlib.Path('rollout/http/agents')}  # folders of tests: of a machine, of programs
MOST_PRIVATE = 26  # accesses of tests to private names of other objects: a public name or result shows the same
OF_OTHERS = {'_replace', '_asdict', '_fields', '_make', '_exit', '_getframe'}  # documented: namedtuple, os, sys
SYNCED = 'os.fsync(self._file.fileno())'  # stands in LineWriter.sync
BY_NAME = {'getattr', 'setattr', 'delattr', 'patch', 'object'}  # also monkeypatch.setattr, mock.patch.object


def sources() -> dict[str, str]:
    """Module name -> source of the whole package."""
    names = {path: '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts) for path in PACKAGE.rglob('*.py')}
    return {name.removesuffix('.__init__'): path.read_text() for path, name in sorted(names.items())}


def long_parts(name: str, source: str) -> list[str]:
    """Files, functions and classes above their bounds, 'areal_jax.app.session: Session has 320 lines'."""
    lines = source.count('\n')
    found = [f'{name} has {lines} lines'] if lines > FILE_LINES else []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            length = (node.end_lineno or 0) - node.lineno + 1
            found += [f'{name}: {node.name} has {length} lines'] if length > most else []
    return found


def imports(name: str, source: str, known: set[str]) -> set[str]:
    """Modules of the package that this one imports anywhere, also in functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= full if full <= known else full | {node.module}
    return {module for module in found if module in known and module != name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules along one circle, [] where there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if found := search(imported, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in graph if (found := search(module, []))), [])


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r'_[^\W_]\w*', name) is not None and name not in OF_OTHERS


def private_accesses(source: str) -> list[str]:
    """'line 3: pool._ledger': reads, writes, imports and patches of private names of anything but self and cls.

    Private names of other packages are not counted that docs/design/private_names.md lists.
    """
    listed, found = PRIVATE_NAMES.read_text(), []

    def note(node: ast.stmt | ast.expr, path: str) -> None:
        if is_private(path.rpartition('.')[2]) and f'`{path}' not in listed:
            found.append((node.lineno, path))

    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in ('self', 'cls'):
            note(node, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                note(node, f'{node.module}.{alias.name}')
        elif isinstance(node, ast.Call) and getattr(node.func, 'attr', getattr(node.func, 'id', '')) in BY_NAME:
            for argument in node.args[:2]:  # ('module.name', value) or (owner, 'name', value)
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    note(node, argument.value)
    return [f'line {line}: {path}' for line, path in sorted(found)]


def test_files_functions_and_classes_are_short():
    assert [part for name, source in sources().items() for part in long_parts(name, source)] == []


def test_the_bounds_are_seen():
    body = '    x = 1\n' * FUNCTION_LINES
    assert long_parts('m', f'def f():\n{body}') == [f'm: f has {FUNCTION_LINES + 1} lines']
    methods = '    def f(self): ...\n' * CLASS_LINES
    assert long_parts('m', f'class C:\n{methods}') == [f'm: C has {CLASS_LINES + 1} lines']
    assert long_parts('m', '\n' * (FILE_LINES + 1)) == [f'm has {FILE_LINES + 1} lines']


def test_no_modules_import_each_other():
    code = sources()
    graph = {name: imports(name, source, set(code)) for name, source in code.items()}
    assert sum(map(len, graph.values())) > 300  # the parser sees imports at all
    assert circle(graph) == []


def test_a_circle_is_seen():
    assert circle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']
    assert imports('m', 'if TYPE_CHECKING:\n    import a\ndef f():\n    import c', {'a', 'b', 'c'}) == {'a', 'c'}
    assert imports('m', 'from a import b', {'a', 'a.b'}) == {'a.b'}


def test_any_is_for_trees_of_arrays():
    assert sum(len(re.findall(r'\bAny\b', source)) for source in sources().values()) <= MOST_ANY


def test_one_version():
    assert importlib.metadata.version('areal_jax') == areal_jax.__version__


def test_folders_of_tests_are_folders_of_the_code():
    folders = {path.parent.relative_to(ROOT / 'tests') for path in (ROOT / 'tests').rglob('test_*.py')} - WITHOUT_TWIN
    assert [str(folder) for folder in folders if not (PACKAGE / folder).is_dir() and not (ROOT / folder).is_dir()] == []
    assert [str(folder) for folder in WITHOUT_TWIN if not (ROOT / 'tests' / folder).is_dir()] == []


def test_tests_use_public_names():
    paths = sorted(path for folder in ('checks', 'tests') for path in (ROOT / folder).rglob('*.py'))
    by_file = {path: private_accesses(path.read_text()) for path in paths}
    fullest = sorted(((len(found), path) for path, found in by_file.items() if found), reverse=True)
    for count, path in fullest:
        print(count, path.relative_to(ROOT), *by_file[path], sep='\n    ')
    assert sum(count for count, _ in fullest) <= MOST_PRIVATE


@pytest.mark.parametrize(
    ('source', 'found'),
    [
        ('rig.pool._ledger.close(entry)', ['rig.pool._ledger']),
        ('self.engine._stream._state', ['self.engine._stream', 'self.engine._stream._state']),
        ('super()._emit(w)', ['super()._emit']),
        ('engines[0]._state = 1', ['engines[0]._state']),
        ('from areal_jax.files import _lock', ['areal_jax.files._lock']),
        ("monkeypatch.setattr(io, '_END_S', 1.0)", ['_END_S']),
        ("monkeypatch.setattr('areal_jax.files._READ_S', 1.0)", ['areal_jax.files._READ_S']),
        ("setattr(io, '_END_S', 1.0)", ['_END_S']),
        ("getattr(thread, '_target', '')", ['_target']),
        ("with mock.patch.object(io, '_END_S'): ...", ['_END_S']),
        ("mock.patch('areal_jax.files._READ_S')", ['areal_jax.files._READ_S']),
        ("self._own = cls._own; one.__dict__; ids._replace(a=1); os._exit(2); f('_x'); _local = 1", []),
        ('from jax._src.cudnn import fused_attention_stablehlo; jax._src.distributed.global_state.client', []),
    ],
)
def test_the_private_names_of_others_are_seen(source, found):
    assert [line.split(': ')[1] for line in private_accesses(source)] == found


def test_every_module_says_what_it_is():
    assert [name for name, source in sources().items() if not ast.get_docstring(parse(source))] == []


def test_every_mutation_applies():
    for mutation in MUTATIONS:
        path, source = mutate(mutation)
        assert source != path.read_text(), mutation.name


@pytest.mark.parametrize(
    'where', ['areal_jax.files:LineWriter.sync', 'areal_jax.files:LineWriter', 'areal_jax/files.py']
)
@pytest.mark.parametrize('before', [SYNCED, 'os.fsync(\n    self._file\n    .fileno()\n)'])
def test_a_mutation_is_made_in_its_place_alone(where, before):
    path, source = mutate(Mutation('a', where, before, 'MUTATED', ''))
    assert source.count('MUTATED') == 1
    assert source.replace('MUTATED', SYNCED) == path.read_text()


def test_a_mutation_is_found_where_its_line_was_broken():
    for line in ('f(a, b_c)', 'f(\n    a,\n    b_c,\n)', 'f(\n    a, b_c\n)'):
        assert pattern_of('f(a, b_c)').fullmatch(line)
    for other in ('f(a, b, c)', 'f(a, bc)', 'f(a b_c)'):
        assert not pattern_of('f(a, b_c)').fullmatch(other)


@pytest.mark.parametrize(
    ('where', 'before', 'refused'),
    [
        ('areal_jax.files:LineWriter.close', SYNCED, 'stands 0 times'),
        ('areal_jax.files:LineWriter.write', 'self._error', 'stands 3 times'),
        ('areal_jax.files:LineWriter.stop', SYNCED, 'LineWriter.stop is there 0 times'),
        ('areal_jax.no_files:sync', SYNCED, 'there is no module areal_jax.no_files'),
    ],
)
def test_a_mutation_without_a_place_is_refused(where, before, refused):
    with pytest.raises(ValueError, match=refused):
        mutate(Mutation('a', where, before, 'MUTATED', ''))


MOST_FILES, MOST_SHARED = 30, 20  # a command is a module of the package's own folder
MOST_METHODS = 36  # of a class, those of its bases included
RUN_METHODS, RUN_ATTRIBUTES = 30, 25
OF_A_RUN = ('Run', 'RunContext', 'Site', 'LoopSite', 'Simulation', 'Loop', 'SftTraining', 'LoopParts', 'Host')


def members(code: dict[str, ast.ClassDef], name: str) -> tuple[set[str], set[str]]:
    """(methods, attributes) of a class and of the bases that the package has."""
    node, methods, attributes = code[name], set(), set()
    for base in node.bases:
        known = ast.unparse(base).partition('[')[0].rpartition('.')[2]
        if known in code and known != name:
            of_base = members(code, known)
            methods |= of_base[0]
            attributes |= of_base[1]
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            methods.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            attributes.add(part.target.id)
        elif isinstance(part, ast.Assign):
            attributes |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return methods, attributes | {n.attr for n in stored if ast.unparse(n.value) == 'self'}


def classes(under: str = '') -> dict[str, ast.ClassDef]:
    """By name; where two modules have a class of one name, the last one."""
    return {
        node.name: node
        for name, source in sources().items() if name.startswith(f'areal_jax{under}')
        for node in ast.walk(parse(source)) if isinstance(node, ast.ClassDef)
    }  # fmt: skip


def test_no_class_has_more_methods_than_a_reader_holds():
    code = classes()
    assert {name: len(members(code, name)[0]) for name in code if len(members(code, name)[0]) > MOST_METHODS} == {}
    run = classes('.app')
    counted = {name: tuple(map(len, members(run, name))) for name in OF_A_RUN}
    assert {name: found for name, found in counted.items() if found[0] > RUN_METHODS or found[1] > RUN_ATTRIBUTES} == {}


def test_methods_and_attributes_of_bases_are_counted():
    tree = ast.parse('class A:\n x: int\n def f(self): self.y = 1\nclass B(A):\n z = 2\n def g(self): ...')
    code = {node.name: node for node in tree.body}
    assert members(code, 'B') == ({'f', 'g'}, {'x', 'y', 'z'})


def test_folders_are_small_and_few_files_share_a_name():
    files = list(PACKAGE.rglob('*.py'))
    by_folder = collections.Counter(path.parent.relative_to(PACKAGE).as_posix() for path in files)
    assert {folder: count for folder, count in by_folder.items() if count > MOST_FILES} == {}
    by_name = collections.Counter(path.name for path in files if path.name != '__init__.py')
    assert len([name for name, count in by_name.items() if count > 1]) <= MOST_SHARED
