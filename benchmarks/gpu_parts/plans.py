"""All parts, with the seconds that each gets, and the plans: which of them run, and in which order.

A part that no longer fits into the time of a call is left out, and shorter ones behind it may still run; so a plan has
first what is worth most. Standard library only.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from benchmarks.gpu_parts.parts import Part

# cuBLAS alone for matrix products: the search among Triton kernels takes minutes of compilation
_CUBLAS = '--xla_gpu_enable_triton_gemm=false'
# repeats bit for bit, and searches for no kernels: products that Triton would take have no default without a search
_DETERMINISTIC = f'--xla_gpu_deterministic_ops=true {_CUBLAS}'
# sets of flags for an update of the 1.5b shape, to be compared with `train_1.5b`, which has cuBLAS alone
FLAG_SETS = {
    'triton': '',
    'latency': f'{_CUBLAS} --xla_gpu_enable_latency_hiding_scheduler=true',
    'commands': f'{_CUBLAS} --xla_gpu_enable_command_buffer=',  # none
    'cublaslt': f'{_CUBLAS} --xla_gpu_enable_cublaslt=true',
    'cudnn': f'{_CUBLAS} --xla_gpu_cudnn_gemm_fusion_level=2',
}


class Plan(NamedTuple):
    """What one call runs if it is not told otherwise."""

    minutes: float
    parts: tuple[str, ...]  # by name, in their order


PLANS = {
    'check': Plan(
        8.0,
        (
            *('facts', 'energy', 'backends', 'tests', 'train_1.5b', 'decode_64', 'run', 'attention'),
            *('compile_beside', 'compile_one', 'decode_16k', 'decode_256', 'train_3b', 'train_0.5b'),
        ),
    ),
    'measure': Plan(
        590 / 60,
        (
            *('facts', 'schedules_sync', 'schedules_async', 'train_1.5b', 'decode_64', 'decode_16k', 'rebuild'),
            *('train_3b', 'experts', 'decode_256', 'peer', *(f'flags_{name}' for name in FLAG_SETS), 'attention'),
            *('tests', 'backends'),
        ),
    ),
}


def make_parts(tiny: bool) -> dict[str, Part]:
    """All parts by name."""
    slower = 10 if tiny else 1  # a CPU
    anywhere = {'AREAL_JAX_GPU_TESTS': 'anywhere'} if tiny else {}  # tests/gpu/__init__.py

    def part(name: str, *arguments: str, limit_s: float, least_s: float, flags: str = '', **variables: str) -> Part:
        module = 'train' if name.startswith('flags_') else name.partition('_')[0]
        command = [sys.executable, '-m', f'benchmarks.gpu_parts.{module}', *arguments, *(['--tiny'] if tiny else [])]
        return Part(name, command, slower * limit_s, 0 if tiny else least_s, variables, flags)

    train = {'limit_s': 110, 'least_s': 45, 'flags': _CUBLAS}
    parts = [
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
        part('schedules_sync', 'sync', limit_s=160, least_s=110, flags=_CUBLAS),
        part('schedules_async', 'async', limit_s=140, least_s=95, flags=_CUBLAS),
        part('rebuild', limit_s=70, least_s=35),
        part('experts', limit_s=90, least_s=45, flags=_CUBLAS),
        part('peer', limit_s=45, least_s=20),
        *(
            part(f'flags_{name}', '1.5b', 'update', limit_s=80, least_s=40, flags=flags)
            for name, flags in FLAG_SETS.items()
        ),
    ]
    return {one.name: one for one in parts}
