"""The house: sizes of files, functions and classes, no import circle, types, one version."""

import ast
import importlib.metadata
import pathlib
import re

import areal_jax
from tests.mutations import MUTATIONS, ROOT

PACKAGE = pathlib.Path(areal_jax.__file__).parent
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 60, 300
MOST_ANY = 335  # `Any` is for trees of arrays; everything else has a type


def sources() -> dict[str, str]:
    """Module name -> source of the whole package."""
    names = {path: '.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts) for path in PACKAGE.rglob('*.py')}
    return {name.removesuffix('.__init__'): path.read_text() for path, name in sorted(names.items())}


def long_parts(name: str, source: str) -> list[str]:
    """Files, functions and classes above their bounds, 'areal_jax.app.session: Session has 320 lines'."""
    lines = source.count('\n')
    found = [f'{name} has {lines} lines'] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            most = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            length = (node.end_lineno or 0) - node.lineno + 1
            found += [f'{name}: {node.name} has {length} lines'] if length > most else []
    return found


def imports(name: str, source: str, known: set[str]) -> set[str]:
    """Modules of the package that this one imports anywhere, also in functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
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


def test_every_module_says_what_it_is():
    assert [name for name, source in sources().items() if not ast.get_docstring(ast.parse(source))] == []


def test_every_mutation_applies():
    places = [(ROOT / mutation.file).read_text().count(mutation.before) for mutation in MUTATIONS]
    assert [mutation.name for mutation, n in zip(MUTATIONS, places, strict=True) if n != 1] == []
