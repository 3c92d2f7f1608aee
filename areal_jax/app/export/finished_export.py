"""The export of a finished run: where it is, what it holds, and writing it from a process without jax.

run_export.py writes it in the process that has the weights.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from areal_jax import files
from areal_jax.errors import UserError

DIRECTORY = 'export'  # of a workdir: the weights of the finished run
RECORD = 'areal_jax.json'  # in the directory: which weights it holds
_FIX = 'remove the directory, it is written again'


def export_in_process(workdir: pathlib.Path, step: int, dtype: str) -> str:
    """Writes WORKDIR/export from the checkpoint of a step, in place of an earlier one; returns the weights' digest.

    Raises UserError with the last line of what the child says where it fails.
    """
    out = workdir / DIRECTORY
    if out.exists():
        files.remove_directory(out)
    command = [sys.executable, '-m', 'areal_jax.main_export', f'--workdir={workdir}', f'--out={out}']
    done = subprocess.run(
        [*command, f'--step={step}', f'--dtype={dtype}'],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},  # devices belong to other roles
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ['it said nothing'])[-1].removeprefix('error: ')
        raise UserError(
            f'the export of update {step} to {out} failed ({said}): python -m areal_jax.main_export writes it'
        )
    return str(read_record(workdir).get('weights_sha256', ''))


def holds_export(workdir: pathlib.Path, step: int) -> bool:
    """Whether the export of the weights after `step` updates is there, whole."""
    return (workdir / DIRECTORY / RECORD).exists() and read_record(workdir).get('step') == step


def read_record(workdir: pathlib.Path) -> files.JsonObject:
    return files.read_json(workdir / DIRECTORY / RECORD, _FIX)
