"""Compiles the pinned cases of launch/aot_cases.json with areal-aot and holds each program to its bounds.

    bash launch/test_aot.sh [--only=NAME] [--json=DIR] [--record]

Needs the extras aot-tpu and aot-gpu, no accelerator, and minutes a case. What is bounded: bytes of temporaries and of
the peak, bytes of all exchanges and of those of the head, the largest copy and all large copies, products over what the
model needs; seconds and memory of the compilation. Exit code: 0 if every case held, 1 if one did not, 2 for bad
arguments or a compiler that is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.errors import suggest
from areal_jax.telemetry.progress import format_bytes

ROOT = pathlib.Path(__file__).parent.parent
TABLE = ROOT / 'launch' / 'aot_cases.json'
SLACK = 1.01  # over a bound, for passes of a compiler that choose differently
MOST_SECONDS, MOST_HOST_BYTES = 15 * 60, 16 * 2**30  # of the CPU, and of memory, for the compilation of one program
_COMPILERS = {'tpu': ('libtpu', 'aot-tpu'), 'gpu': ('jax_cuda13_plugin', 'aot-gpu')}

Program = Mapping[str, Any]  # as areal-aot writes it


@dataclasses.dataclass(frozen=True)
class Case:
    """A config and devices for which programs are compiled, and the bounds of each program."""

    name: str
    what: str
    flags: tuple[str, ...]  # of areal-aot
    # by program, 'learner: gradients 16 x 16384', and by measure; {} = programs must compile and fit, no more
    bounds: Mapping[str, Mapping[str, float]]

    @property
    def compiler(self) -> str:
        [topology] = [flag for flag in self.flags if flag.startswith('--topology=')]
        return 'tpu' if ':' in topology else 'gpu'


def read_cases(path: pathlib.Path = TABLE) -> list[Case]:
    """Reads the table of cases."""
    return [Case(one['name'], one['what'], tuple(one['flags']), one['bounds']) for one in json.loads(path.read_text())]


def main(arguments: Sequence[str]) -> int:
    cases = read_cases()
    options = _parse(arguments, [case.name for case in cases])
    chosen = [case for case in cases if options.only in (None, case.name)]
    if reason := find_missing(chosen):
        print(f'error: {reason}', file=sys.stderr)
        return 2
    faults: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        into = options.json or pathlib.Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            told = compile_case(case, into / f'{case.name}.json')
            case = dataclasses.replace(case, bounds=record(told)) if options.record else case
            cases = [case if one.name == case.name else one for one in cases]
            faults[case.name] = judge(case, told)
            print('\n'.join([*describe(case, told), *faults[case.name]]), flush=True)
    if options.record:
        write_cases(cases)
    held = sum(not found for found in faults.values())
    print(f'{held} of {len(chosen)} cases held')
    return 0 if held == len(chosen) > 0 else 1


def _parse(arguments: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='launch/test_aot.sh', description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('--only', metavar='NAME', help=f'one of {", ".join(names)}')
    parser.add_argument(
        '--json', metavar='DIR', type=pathlib.Path, help='folder for what areal-aot writes of each case'
    )
    parser.add_argument('--record', action='store_true', help='write what is found as the new bounds')
    options = parser.parse_args(arguments)
    if options.only not in (None, *names):
        parser.error(f'--only={options.only} is no case{suggest(options.only, names)}; use one of {", ".join(names)}')
    return options


def find_missing(cases: Sequence[Case]) -> str:
    """Tells in one sentence which compiler the cases lack; '' if they lack none."""
    for kind, (module, extra) in _COMPILERS.items():
        names = [case.name for case in cases if case.compiler == kind]
        if names and importlib.util.find_spec(module) is None:
            return f"{', '.join(names)}: {module} is not installed: pip install 'areal_jax[{extra}]'"
    return ''


def compile_case(case: Case, path: pathlib.Path) -> Mapping[str, Any]:
    """Runs areal-aot for a case, whose output goes on; returns what it wrote, {} if it ended before that."""
    path.unlink(missing_ok=True)
    print(f'{case.name}: {case.what}', flush=True)
    command = [sys.executable, '-m', 'areal_jax.main_aot', *case.flags, f'--json={path}']
    subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text()) if path.exists() else {}


# What a program is bounded by.


def measure(program: Program, told: Mapping[str, Any]) -> dict[str, float]:
    """Measures a compiled program, in bytes of a device; 'arithmetic' is products over what the model needs."""
    memory, copies, exchanges = program['memory'], program['copies'], program['collectives']
    found = {
        'temporaries': memory['temporaries'],
        'peak': memory['peak'],
        'exchanges': _sum(exchanges),
        'head': _sum(_of_head(exchanges, told)),
        'largest copy': max((one['bytes'] for one in copies), default=0),
        'copies': _sum(copies),
    }
    if needed := program['expected']['flops']:
        found['arithmetic'] = round(program['flops'] / needed, 4)
    return found


def _sum(buffers: Sequence[Program]) -> int:
    return sum(one['bytes'] * one['times'] for one in buffers)


def _of_head(exchanges: Sequence[Program], told: Mapping[str, Any]) -> list[Program]:
    """The exchanges of arrays with an axis that is the vocabulary or a device's share of it."""
    vocabulary, devices = told['vocabulary'], told['devices']
    sizes = {vocabulary // n for n in range(1, devices + 1) if vocabulary % n == 0}
    return [one for one in exchanges if sizes & {int(n) for n in re.findall(r'[\[,](\d+)', one['array'])} - {1}]


def judge(case: Case, told: Mapping[str, Any]) -> list[str]:
    """Lists what does not hold, each in a sentence with the program and the buffer."""
    programs = {f'{one["part"]}: {one["name"]}': one for one in told.get('programs', ())}
    faults = [f'{case.name}: {name} was not compiled' for name in case.bounds if name not in programs]
    faults += [] if told.get('complete') else [f'{case.name}: areal-aot ended before its last program']
    for name, program in programs.items():
        at = f'{case.name}: {name}'
        if program['memory'] is None:
            faults.append(f'{at} {program["refusal"]}')
            continue
        if case.bounds and name not in case.bounds:
            faults.append(f'{at} has no bounds; --record writes them')
        faults += [f'{at}: {fault}' for fault in _exceed(program, told, case.bounds.get(name, {}))]
        faults += [] if program['fits'] else [f'{at} does not fit a device']
        spent = program['cpu_seconds']
        faults += [] if spent < MOST_SECONDS else [f'{at} took {spent:.0f} s of the CPU to compile']
    if (most := told.get('host_peak_bytes', 0)) > MOST_HOST_BYTES:
        faults.append(f'{case.name}: the compilation took {format_bytes(most)} of the host')
    return faults


def _exceed(program: Program, told: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    found, culprits = measure(program, told), _find_culprits(program, told)
    show = lambda name, value: f'{value:.3f}' if name == 'arithmetic' else format_bytes(int(value))
    return [
        f'{name} {show(name, found[name])} over {show(name, bound)}{culprits.get(name, "")}'
        for name, bound in bounds.items()
        if found.get(name, 0) > SLACK * bound
    ]


def _find_culprits(program: Program, told: Mapping[str, Any]) -> dict[str, str]:
    """The largest buffers behind each measure."""
    exchanges, copies, buffers = program['collectives'], program['copies'], program['buffers']
    of_measure = {
        'temporaries': buffers, 'peak': buffers, 'exchanges': exchanges, 'head': _of_head(exchanges, told),
        'largest copy': copies[:1], 'copies': copies,
    }  # fmt: skip
    return {
        name: ''.join(f'; {one["times"]} x {one.get("kind", "")} {one["array"]} {one["source"]}' for one in found[:3])
        for name, found in of_measure.items()
    }


def describe(case: Case, told: Mapping[str, Any]) -> list[str]:
    """Describes each program of a case in a line."""
    lines = []
    for one in told.get('programs', ()):
        if one['memory'] is not None:
            found = measure(one, told)
            sizes = ', '.join(f'{name} {format_bytes(int(found[name]))}' for name in found if name != 'arithmetic')
            times = f', {found["arithmetic"]:.2f} x the arithmetic' if 'arithmetic' in found else ''
            fits = 'fits' if one['fits'] else 'does not fit'
            lines.append(
                f'    {one["part"]}: {one["name"]}  {fits}: {sizes}{times}, compiled in {one["seconds"]:.0f} s'
            )
    return [*lines, f'    {format_bytes(told.get("host_peak_bytes", 0))} of the host at most']


def record(told: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The bounds that a compiled case just meets."""
    return {f'{p["part"]}: {p["name"]}': measure(p, told) for p in told.get('programs', ()) if p['memory'] is not None}


def write_cases(cases: Sequence[Case], path: pathlib.Path = TABLE) -> None:
    """Writes the table of cases."""
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
