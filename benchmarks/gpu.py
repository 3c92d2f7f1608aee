"""Everything that only a GPU shows: python -m benchmarks.gpu --json=FILE [--plan=check] [--minutes=8] [--tiny].

--plan=check: facts of the device, the self-check of every attention backend and of decoding, the tests marked `gpu`,
and benchmarks of training, decoding and a whole run with random weights. --plan=measure, which takes 590 s: above all
one run synchronously and asynchronously, then training, decoding, experts and sets of flags. Each part is a process
with a time limit; a part that fails is in the JSON with its error, and the others go on. What the numbers mean is in
docs/gpu.md.

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
from benchmarks.gpu_parts.plans import PLANS, make_parts


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
            'plan': options.plan,
            'minutes': options.minutes,
            'tiny': options.tiny,
            'seed': options.seed,
            'commit': _commit(),
            'python': platform.python_version(),
            'compilation_cache': os.environ['JAX_COMPILATION_CACHE_DIR'],
        }
        results: dict[str, Result] = {}

        def note(name: str, result: Result) -> None:
            results[name] = result
            _write(options.json, session | {'asynchrony': summary.compare_schedules(results), 'parts': results})
            print(summary.part_line(name, result), flush=True)

        announce = lambda name, limit_s: print(f'{name}: at most {limit_s:.0f} s', flush=True)
        run_parts(_choose(options), deadline - time.monotonic(), note, announce)
    ends = {'seconds': round(time.time() - began, 1), 'asynchrony': summary.compare_schedules(results)}
    _write(options.json, session | ends | {'parts': results})
    print(summary.table(results))
    return int(any(result['status'] in (FAILED, TIMED_OUT) for result in results.values()))


_FIX = (
    'put a folder with these packages on PYTHONPATH, or pass --wheels=FOLDER (launch/gpu_wheels.sh downloads them on a '
    'machine with a network)'
)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = list(make_parts(tiny=False))
    parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu', description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=pathlib.Path, required=True, help='file for all numbers')
    parser.add_argument('--plan', choices=PLANS, default='check', help='which parts, and in which order')
    parser.add_argument('--minutes', type=float, help='for all parts together; check: 8, measure: 590 s')
    parser.add_argument('--parts', help=f'in place of those of the plan, in this order: some of {",".join(names)}')
    parser.add_argument('--seed', type=int, default=0, help='of the runs')
    parser.add_argument('--tiny', action='store_true', help='tiny shapes on any device, to try the command')
    parser.add_argument('--keep', type=pathlib.Path, help='folder for the log, metrics and report of the part run')
    parser.add_argument('--wheels', type=pathlib.Path, help='folder with wheels of packages that are not installed')
    options = parser.parse_args(arguments)
    if options.parts and (unknown := sorted(set(options.parts.split(',')) - set(names))):
        parser.error(f'--parts={options.parts}: {", ".join(unknown)} is none of {", ".join(names)}')
    if options.minutes is None:
        options.minutes = PLANS[options.plan].minutes
    if not 0 <= options.seed < 2**31:
        parser.error(f'--seed={options.seed} must lie in [0, 2^31 - 1]')
    if options.minutes <= 0:
        parser.error(f'--minutes={options.minutes} must be above 0')
    if options.wheels and not list(options.wheels.glob('*.whl')):
        parser.error(f'--wheels={options.wheels} holds no wheel')
    return options


def _choose(options: argparse.Namespace) -> list[Part]:
    parts = make_parts(options.tiny)
    return [parts[name] for name in (options.parts.split(',') if options.parts else PLANS[options.plan].parts)]


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
    added['AREAL_JAX_GPU_SEED'] = str(options.seed)
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
