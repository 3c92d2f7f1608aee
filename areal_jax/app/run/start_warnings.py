"""Warnings on stderr before the first update: values that are probably a mistake, attention backends that fail here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import jax
from ml_collections import config_dict

from areal_jax.config.kinds import find_server
from areal_jax.config.objective_constraints import find_objective_warnings
from areal_jax.config.sandbox_fields import find_sandbox_warnings
from areal_jax.config.training import find_schedule_warnings

_DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
_BFLOAT16_COST = 1.6  # SmolLM2-135M with AVX-512 BF16: docs/log/


def print_warnings(config: config_dict.ConfigDict) -> None:
    for warning in (*find_warnings(config), *find_device_warnings(config, jax.default_backend())):
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def print_passed_over(field: str, reasons: Sequence[str]) -> None:
    """Says why 'auto' in the field did not choose a faster backend; a reason for each backend that failed."""
    for reason in reasons:
        print(f"warning: {field}='auto' passes over a backend: {reason}", file=sys.stderr, flush=True)


def find_warnings(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence each."""
    yield from find_objective_warnings(c)
    yield from find_sandbox_warnings(c)
    yield from find_schedule_warnings(c)


def find_device_warnings(c: config_dict.ConfigDict, platform: str) -> Iterator[str]:
    """What the platform (of jax.default_backend()) computes slowly, or does not keep of the config without a flag."""
    if platform == 'cpu' and c.publication.dtype == 'bfloat16' and find_server(c.rollout.server).in_process:
        yield (
            f"publication.dtype='bfloat16' on a CPU: a step of one row takes about {_BFLOAT16_COST} times as long as "
            "in float32, and more where the processor has no instructions for it; use publication.dtype='float32', or "
            "rollout.weights='int8' with it"
        )
    if platform == 'gpu' and c.run.clock == 'virtual' and _DETERMINISTIC not in os.environ.get('XLA_FLAGS', ''):
        yield (
            f"run.clock='virtual' repeats bit for bit on a GPU only with XLA_FLAGS='{_DETERMINISTIC} "
            "--xla_gpu_enable_triton_gemm=false', set before the start: its kernels add up in any order otherwise"
        )
