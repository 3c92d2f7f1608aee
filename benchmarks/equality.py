"""What stays equal while the structure of the project changes: weights, logs and names, as one table.

    git worktree add --detach BEFORE COMMIT
    python -m benchmarks.equality --tree=BEFORE --keep=RUNS --out=before.json   # makes the runs and keeps the logs
    python -m benchmarks.equality --against=before.json --replay=RUNS           # exits 1 where this tree differs

Each run is a process of the tree's own command, so that the table of any commit can be made. A run under the virtual
clock has one digest of its final weights. `--keep` also makes runs under the real clock, whose logs `--replay` makes
again, event by event, in the other tree. Names are of files, events, metrics, keys of report.json and config fields.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]
AGENT = """
async def agent(chat):
    first = await chat([{'role': 'user', 'content': 'ab='}])
    if first.finish_reason != 'length':
        await chat([{'role': 'user', 'content': 'ab='}, first.message, {'role': 'user', 'content': 'ba='}])
"""
_AGENT_FIELDS = ('rollout.workflow=AGENT:agent', 'rollout.max_new_tokens=11', 'agent.max_turn_tokens=6')
RUNS: Mapping[str, tuple[str, ...]] = {  # a config, then fields that differ
    'tiny_cpu': ('tiny_cpu.py',),
    'tiny_moe': ('tiny_moe.py',),
    'two_engines': ('tiny_cpu.py', 'cluster.engines=2 x shared'),
    'lora': ('tiny_cpu.py', 'lora.rank=4'),
    'sft': ('sft_tiny.py', 'run.steps=8'),
    'dpo': ('recipes/dpo.py:tiny', 'run.steps=8'),
    'grpo': ('recipes/grpo.py:tiny',),
    'ppo_critic': ('recipes/ppo_critic.py:tiny',),
    'fixed(4)': ('tiny_cpu.py', 'staleness.schedule=fixed(4)', 'checkpoint.every=1', 'run.steps=6'),
    'agents': ('tiny_cpu.py', *_AGENT_FIELDS),
    'sharded': (
        'tiny_cpu.py',
        'cluster.learner=fsdp=2',
        'cluster.engines=2 x tensor=2',
        'learner.rows_per_microbatch=2',
    ),
}
RECORDED: Mapping[str, tuple[str, ...]] = {
    'in_process': ('tiny_cpu.py', 'run.clock=real', 'run.steps=8', 'cluster.engines=2 x shared'),
    'agents': ('tiny_cpu.py', 'run.clock=real', *_AGENT_FIELDS),
}
_CLIENTS = ('optimizer.blocks=3', 'distributed.clients=2', 'checkpoint.every=1')
_ALWAYS = ('run.steps=3', 'run.export=False')
_ONLINE = (
    'run.clock=virtual',
    'telemetry.plots=False',
    'telemetry.tensorboard=False',
)  # supervised training reads none
_SUPERVISED = ('sft', 'dpo')


def run(tree: pathlib.Path, command: Sequence[str], where: str) -> None:
    """Runs `python -m` of the tree; raises SystemExit with its last words where it fails."""
    environment = os.environ | {'PYTHONPATH': str(tree), 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}
    done = subprocess.run([sys.executable, '-m', *command], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{where} of {tree}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}')


def train(tree: pathlib.Path, workdir: pathlib.Path, settings: Sequence[str], *more: str) -> None:
    config, *fields = settings
    agent = workdir.with_name('agent.py')
    agent.write_text(AGENT)
    values = dict(
        field.split('=', 1) for field in (*_ALWAYS, *(() if workdir.name in _SUPERVISED else _ONLINE), *fields)
    )
    flags = [f'--config.{name}={value.replace("AGENT", str(agent))}' for name, value in values.items()]
    run(
        tree,
        ['areal_jax.main_train', f'--config=configs/{config}', f'--workdir={workdir}', *flags, *more],
        workdir.name,
    )


def weights_of(workdir: pathlib.Path) -> str:
    return str(json.loads((workdir / 'report.json').read_text())['weights_sha256'])


def resume(tree: pathlib.Path, workdir: pathlib.Path) -> None:
    """Four updates of tiny_cpu, then four more from the checkpoint."""
    settings = ('tiny_cpu.py', 'checkpoint.every=2')
    train(tree, workdir, (*settings, 'run.steps=4'))
    train(tree, workdir, (*settings, 'run.steps=8'), '--resume')


def average(tree: pathlib.Path, directory: pathlib.Path) -> str:
    """Two clients that average their blocks, at the same time; returns the weights that both end with."""
    settings = ('tiny_cpu.py', *_CLIENTS, f'distributed.average_directory={directory / "means"}', 'run.steps=6')
    workdirs = [directory / f'client_{client}' for client in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(train, tree, workdir, (*settings, f'distributed.client={client}'))
            for client, workdir in enumerate(workdirs)
        ]
        for end in ends:
            end.result()
    first, second = map(weights_of, workdirs)
    return first if first == second else f'{first} and {second}'


def names_of(workdir: pathlib.Path) -> dict[str, list[str]]:
    """Names in a workdir: its files, kinds of events with their keys, metrics, keys of report.json."""
    events: dict[str, set[str]] = {}
    for line in (workdir / 'events.jsonl').read_text().splitlines():
        event = json.loads(line)
        events.setdefault(event['kind'], set()).update(event)
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    files = (path.relative_to(workdir) for path in workdir.rglob('*') if path.is_file())
    return {
        'files': sorted({str(path) for path in files if path.parts[0] != 'checkpoints'}),
        'events': sorted(f'{kind}: {", ".join(sorted(keys))}' for kind, keys in events.items()),
        'metrics': sorted({key for row in rows for key in row}),
        'report': sorted(_paths(json.loads((workdir / 'report.json').read_text()))),
    }


def _paths(value: object, prefix: str = '') -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f'{prefix}/{key}')
    else:
        yield prefix


def make_table(tree: pathlib.Path, keep: pathlib.Path | None) -> dict[str, object]:
    weights: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, settings in RUNS.items():
            workdir = pathlib.Path(directory) / name.strip(')').replace('(', '_')
            train(tree, workdir, settings)
            weights[name] = weights_of(workdir)
            print(name, weights[name], flush=True)
        names = names_of(pathlib.Path(directory) / 'tiny_cpu')
        resume(tree, workdir := pathlib.Path(directory) / 'resumed')
        weights['resumed'] = weights_of(workdir)
        print('resumed', weights['resumed'], flush=True)
        weights['clients'] = average(tree, pathlib.Path(directory))
        print('clients', weights['clients'], flush=True)
        for name, settings in RECORDED.items() if keep else ():
            assert keep is not None
            keep.mkdir(parents=True, exist_ok=True)
            train(tree, pathlib.Path(keep) / name, settings)
    page = (tree / 'docs' / 'config.md').read_bytes()
    return {'weights_sha256': weights, 'names': names, 'config_md': hashlib.sha256(page).hexdigest()}


def replay(tree: pathlib.Path, kept: pathlib.Path) -> list[str]:
    """Replays every kept run in the tree; raises SystemExit for the first that differs."""
    done = []
    for name in RECORDED:
        with tempfile.TemporaryDirectory() as directory:
            flags = [f'--workdir={kept / name}', f'--out={directory}/out']
            run(tree, ['areal_jax.main_replay', *flags], f'the replay of {name}')
        print('replayed', name, flush=True)
        done.append(name)
    return done


def compare(before: Mapping[str, object], after: Mapping[str, object], prefix: str = '') -> Iterator[str]:
    """A sentence for every value that differs."""
    for key in {**before, **after}:
        one, other = before.get(key), after.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from compare(one, other, f'{prefix}{key}.')
        elif one != other:
            if isinstance(one, list) and isinstance(other, list):
                one, other = sorted(set(one) - set(other)), sorted(set(other) - set(one))
            yield f'{prefix}{key}: {one} became {other}'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tree', type=pathlib.Path, default=ROOT, help='work tree of the commit')
    parser.add_argument('--keep', type=pathlib.Path, help='new directory for runs under the real clock')
    parser.add_argument('--replay', type=pathlib.Path, help='directory of runs that --keep made')
    parser.add_argument('--against', type=pathlib.Path, help='table of another commit')
    parser.add_argument('--out', type=pathlib.Path, help='where the table is written')
    options = parser.parse_args(arguments)
    keep = options.keep.resolve() if options.keep else None
    table = make_table(options.tree.resolve(), keep)
    if options.replay:
        table['replayed'] = replay(options.tree.resolve(), options.replay.resolve())
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + '\n')
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())
    found = list(compare(before, {key: table[key] for key in before}))
    print(*found or ['equal'], sep='\n')
    return int(bool(found))


if __name__ == '__main__':
    sys.exit(main())
