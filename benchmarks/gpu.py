"""Everything that only a GPU shows: python -m benchmarks.gpu --json=FILE [--minutes=8] [--parts=A,B] [--tiny].

Facts of the device, the self-check of every attention backend and of decoding, the tests marked `gpu`, and benchmarks
of training, decoding and a whole run with random weights. Each part is a process with a time limit; a part that fails
is in the JSON with its error, and the others go on. What the numbers mean is in docs/gpu.md.

Exit code: 0 if every part ran or was left out for lack of time, 1 if one failed or hung, 2 for bad arguments or missing
packages. Needs no network and installs nothing; `bash launch/test_gpu.sh` starts it with the right interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.gpu_parts import packages, summary
from benchmarks.gpu_parts.parts import FAILED, ROOT, TIMED_OUT, Part, Result, run_parts

# cuBLAS alone for matrix products: the search among Triton kernels takes minutes of compilation
_CUBLAS = '--xla_gpu_enable_triton_gemm=false'
# repeats bit for bit, and searches for no kernels: products that Triton would take have no default without a search
_DETERMINISTIC = f'--xla_gpu_deterministic_ops=true {_CUBLAS}'


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    began, deadline = time.time(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(pathlib.Path(folder), options)
        os.environ.update(environment)
        missing = packages.find_missing()
        if missing:
            print(f'error: {sys.executable} lacks {", ".join(missing)}; {_FIX}', file=sys.stderr)
            return 2
        session = {
            'command': ' '.join(['python -m benchmarks.gpu', *arguments]),
            'started': datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(timespec='seconds'),
            'minutes': options.minutes,
            'tiny': options.tiny,
            'seed': 0,
            'commit': _commit(),
            'python': platform.python_version(),
            'compilation_cache': os.environ['JAX_COMPILATION_CACHE_DIR'],
        }
        results: dict[str, Result] = {}

        def note(name: str, result: Result) -> None:
            results[name] = result
            _write(options.json, session | {'parts': results})
            print(summary.part_line(name, result), flush=True)

        announce = lambda name, limit_s: print(f'{name}: at most {limit_s:.0f} s', flush=True)
        run_parts(_choose(options), deadline - time.monotonic(), note, announce)
    _write(options.json, session | {'seconds': round(time.time() - began, 1), 'parts': results})
    print(summary.table(results))
    return int(any(result['status'] in (FAILED, TIMED_OUT) for result in results.values()))


_FIX = (
    'put a folder with these packages on PYTHONPATH, or pass --wheels=FOLDER (launch/gpu_wheels.sh downloads them on a '
    'machine with a network)'
)


def make_parts(tiny: bool) -> list[Part]:
    """All parts in their order; a call that runs out of time leaves out the last ones."""
    slower = 10 if tiny else 1  # a CPU
    anywhere = {'AREAL_JAX_GPU_TESTS': 'anywhere'} if tiny else {}  # tests/gpu/__init__.py

    def part(name: str, *arguments: str, limit_s: float, least_s: float, flags: str = '', **variables: str) -> Part:
        module, _, _ = name.partition('_')
        command = [sys.executable, '-m', f'benchmarks.gpu_parts.{module}', *arguments, *(['--tiny'] if tiny else [])]
        return Part(name, command, slower * limit_s, 0 if tiny else least_s, variables, flags)

    train = {'limit_s': 110, 'least_s': 45, 'flags': _CUBLAS}
    return [
        part('facts', limit_s=60, least_s=10),
        part('energy', limit_s=40, least_s=15),
        part('backends', limit_s=110, least_s=30),
        part('tests', limit_s=210, least_s=30, flags=_DETERMINISTIC, **anywhere),
        part('train_1.5b', '1.5b', **train),
        part('decode_64', '64', '2048', limit_s=90, least_s=40),
        part('run', limit_s=160, least_s=80, flags=_CUBLAS),
        part('attention', limit_s=90, least_s=40),
        part('compile_beside', 'beside', limit_s=60, least_s=20, flags=_CUBLAS),
        part('compile_one', 'one', limit_s=150, least_s=110, flags=_CUBLAS),
        part('decode_16k', '64', '16384', limit_s=120, least_s=60),
        part('decode_256', '256', '2048', limit_s=90, least_s=40),
        part('train_3b', '3b', **train),
        part('train_0.5b', '0.5b', **train),
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [part.name for part in make_parts(tiny=False)]
    parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu', description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=pathlib.Path, required=True, help='file for all numbers')
    parser.add_argument('--minutes', type=float, default=8.0, help='for all parts together')
    parser.add_argument('--parts', default=','.join(names), help=f'some of {",".join(names)}')
    parser.add_argument('--tiny', action='store_true', help='tiny shapes on any device, to try the command')
    parser.add_argument('--keep', type=pathlib.Path, help='folder for the log, metrics and report of the part run')
    parser.add_argument('--wheels', type=pathlib.Path, help='folder with wheels of packages that are not installed')
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts.split(',')) - set(names)):
        parser.error(f'--parts={options.parts}: {", ".join(unknown)} is none of {", ".join(names)}')
    if options.minutes <= 0:
        parser.error(f'--minutes={options.minutes} must be above 0')
    if options.wheels and not list(options.wheels.glob('*.whl')):
        parser.error(f'--wheels={options.wheels} holds no wheel')
    return options


def _choose(options: argparse.Namespace) -> list[Part]:
    return [part for part in make_parts(options.tiny) if part.name in options.parts.split(',')]


def _environment(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, str]:
    """Variables of every part. What is set already stays."""
    added = {
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache'),  # parts compile some of the same programs
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92',  # of the GPU's memory, taken at the start; jax's default is 0.75
        'TF_CPP_MIN_LOG_LEVEL': '2',
        'PYTHONUNBUFFERED': '1',
    }
    added = {name: os.environ.get(name, value) for name, value in added.items()}
    if options.keep:
        added['AREAL_JAX_GPU_KEEP'] = str(options.keep.absolute())
    if options.wheels:
        packages.unpack_wheels(options.wheels, folder / 'site')
        sys.path.insert(0, str(folder / 'site'))
        added['PYTHONPATH'] = os.pathsep.join(filter(None, (str(folder / 'site'), os.environ.get('PYTHONPATH'))))
    return added


def _commit() -> str | None:
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _write(path: pathlib.Path, numbers: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
