"""Tables of kinds: their functions exist, a user may bring a kind, and no other module knows the names."""

from __future__ import annotations

import ast
import pathlib

import pytest

from areal_jax.config.kinds import (
    CHANNELS,
    SERVERS,
    ChannelKind,
    ClientKind,
    ServerKind,
    find_channel,
    find_server,
    resolve,
)
from areal_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
CLIENTS = {client.name: client for kind in SERVERS.values() for client in kind.clients}
NAMES = {*SERVERS, *CHANNELS, *CLIENTS}
# 'files' of a dictionary of results, 'device' of an axis of places, 'own' of publication.listen, and 'stream' of prompts
# and of answers over HTTP are other words
OTHER_WORDS = {
    'areal_jax/app/evaluate/evaluate.py': {'files'},
    'areal_jax/sharding/rules.py': {'device'},
    'areal_jax/config/addresses.py': {'own'},
} | {
    f'areal_jax/{path}.py': {'stream'}
    for path in (
        *('app/run/supervised', 'checkpoint/store', 'control/controller'),
        *('rollout/http/wire/sglang', 'rollout/http/wire/vllm', 'rollout/jetstream/record'),
    )
}


def compared(source: str) -> list[str]:
    """Names of kinds that a module compares with something, looks up or keeps under a name of its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            inner = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
            found += [e.value for e in inner if isinstance(e, ast.Constant) and e.value in NAMES]
    return found


def test_no_module_outside_the_tables_knows_the_name_of_a_kind():
    found = {}
    for path in sorted([*(ROOT / 'areal_jax').rglob('*.py'), *(ROOT / 'launch').rglob('*.py')]):
        where = path.relative_to(ROOT).as_posix()
        if where != 'areal_jax/config/kinds.py':
            found[where] = set(compared(path.read_text())) - OTHER_WORDS.get(where, set())
    assert {where: names for where, names in found.items() if names} == {}
    assert len(found) > 400


@pytest.mark.parametrize(
    'source',
    ["c.server == 'own'", "'files' != channel", "kind in ('own', 'vllm')", "OWN = 'own'", "{'vllm': f}[kind]",
     "table['sglang']", "_STARTED: tuple[str, ...] = ('own',)", "match kind:\n case 'external': pass"],
)  # fmt: skip
def test_the_check_sees_each_form(source):
    assert compared(source)


@pytest.mark.parametrize('reference', [
    *(client.connect for client in CLIENTS.values()),
    *(kind.build for kind in CHANNELS.values()),
    *(reference for kind in SERVERS.values() if (launch := kind.launch)
      for reference in (launch.serve, launch.plan, launch.require, launch.prepare, launch.front, launch.enter)
      if reference),
])  # fmt: skip
def test_a_function_that_a_table_names_exists(reference):
    assert callable(resolve(reference, 'rollout.server'))


@pytest.mark.parametrize('name', SERVERS)
def test_fields_that_servers_read_are_declared(name):
    from areal_jax.config.declarations import FIELDS, SECTIONS

    assert [path for path in SERVERS[name].reads if path not in FIELDS and path not in SECTIONS] == []


def test_kinds_are_found_by_name():
    assert find_server('own') is SERVERS['own']
    assert find_channel('device') is CHANNELS['device']
    assert [name for name in SERVERS if find_server(name).in_process] == ['in_process']
    with pytest.raises(
        UserError,
        match=r"rollout.server='vlm' is not known; use one of in_process, own, vllm, sglang, jetstream, external",
    ):
        find_server('vlm')


OWN_KINDS = """
from areal_jax.config.kinds import ChannelKind, ClientKind, ServerKind

def server():
    return ServerKind('mine', (ClientKind('mine', print),))

def channel():
    return ChannelKind('mine', print, reaches_processes=True)

def fails():
    return 1 / 0
"""


def test_a_function_of_a_users_file_returns_a_kind(tmp_path):
    path = tmp_path / 'kinds.py'
    path.write_text(OWN_KINDS)
    assert find_server(f'{path}:server') == ServerKind('mine', (ClientKind('mine', print),))
    assert find_channel(f'{path}:channel') == ChannelKind('mine', print, reaches_processes=True)
    with pytest.raises(UserError, match=r'rollout.server=.*:channel returns a ChannelKind; return a ServerKind'):
        find_server(f'{path}:channel')
    with pytest.raises(UserError, match=r'publication.channel=.*line 11 of .*kinds.py raises ZeroDivisionError'):
        find_channel(f'{path}:fails')
