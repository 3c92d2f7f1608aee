"""SmolLM2-135M, float32, the same tokens: our decode engine and train step against a torch + transformers loop.

    python -m benchmarks.against_torch --torch_python=OTHER_VENV/bin/python --out=benchmarks/results/against_torch.json

The other environment needs torch 2.13.0 (CPU), transformers and numpy. Both sides run alternately, each in a process
of its own, on all cores; the first call of everything is thrown away. Ratios are of medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.models.gguf import find_package_file, load_gguf
from areal_jax.publication.export import export_hf
from benchmarks import workload
from benchmarks.side_ours import GGUF

ROOT = pathlib.Path(__file__).parent.parent


def run(*command: str) -> dict:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'{" ".join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def tokens_of(name: str) -> int:
    if name == 'generate':
        return workload.SLOTS * workload.NEW_TOKENS
    return sum(len(answer) for group in workload.answers(0, name.split()[-1]) for answer in group)


def summarize(rounds: list[dict]) -> dict[str, dict[str, float]]:
    names = [name for name in rounds[0] if isinstance(rounds[0][name], list)]
    summary = {}
    for name in names:
        runs = [r for one in rounds for r in one[name]]
        wall, cpu = (statistics.median(r[key] for r in runs) for key in ('wall_s', 'cpu_s'))
        summary[name] = {
            'wall_s': wall, 'cpu_s': cpu, 'tokens_per_second': tokens_of(name) / wall,
            'tokens_per_cpu_second': tokens_of(name) / cpu, 'runs': len(runs),
        }  # fmt: skip
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--torch_python', required=True)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--repetitions', type=int, default=3)
    parser.add_argument('--packings', default='shared_prompt,ordinary', help='of our rows')
    options = parser.parse_args()
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as directory:
        config, params, _ = load_gguf(find_package_file(GGUF))
        export_hf(f'{directory}/model', params, config)
        del params
        for _ in range(options.rounds):
            ours.append(run(sys.executable, '-m', 'benchmarks.side_ours', str(options.repetitions), options.packings))
            print(f'ours: {summarize(ours)}', file=sys.stderr, flush=True)
            theirs.append(
                run(options.torch_python, '-m', 'benchmarks.side_torch', str(options.repetitions), f'{directory}/model')
            )
            print(f'torch: {summarize(theirs)}', file=sys.stderr, flush=True)
    a, b = summarize(ours), summarize(theirs)
    ratios = {
        name: {key: a[name][key] / b[other][key] for key in ('tokens_per_second', 'tokens_per_cpu_second')}
        for name in a
        if (other := 'generate' if name == 'generate' else f'train {name.split()[-1]}') in b
    }
    report = {
        'ours_over_torch': ratios, 'ours': a, 'torch': b,
        'torch_threads': theirs[0]['threads'], 'hardware': hardware(),
        'versions': package_versions() | theirs[0]['versions'], 'commit': git_commit(),
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + '\n')


if __name__ == '__main__':
    main()
