"""Under the whole loop: arrays and run state of a step on the disk, both or neither, newest kept."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

_ARRAYS, _RUN_STATE, _CONTENTS = 'arrays', 'run_state.json', 'contents.json'
_PORTION_BYTES = 1 << 28  # of arrays in one orbax tree: what a save needs beside the arrays
_OVERHEAD_BYTES = 1 << 20  # more than orbax's own metadata of a step takes
_T = TypeVar('_T')


class CheckpointError(RuntimeError):
    """A checkpoint that can not be written or read; the message names the directory, the step and the fix."""


class CheckpointStore:
    """Steps `step_00000012/` of an orbax tree `arrays/`, `run_state.json` and `contents.json` (checksums).

    A step appears under its name only when all of it is on the disk; a step saved again gets a suffix `_1`, `_2`.
    Calls block: on the real clock they run on the lane `disk`. One process writes to the directory at a time.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 1):
        """`keep` >= 1 newest steps stay on the disk."""
        if keep < 1:
            raise ValueError(f'checkpoint.keep={keep}: the newest checkpoint must stay; use checkpoint.keep >= 1')
        self._directory, self._keep = pathlib.Path(directory).absolute(), keep

    def save(self, step: int, arrays: Any, run_state: Mapping[str, Any]) -> None:
        """Writes a pytree of numpy arrays and a JSON-able dict; removes old steps when the new one is complete.

        Raises CheckpointError, with the steps before untouched, when the disk is full or a write fails.
        """
        leaves = {name: np.asarray(leaf) for name, leaf in _by_name(arrays).items()}
        state = json.dumps(run_state)
        contents = {
            'leaves': {name: _describe(leaf) for name, leaf in leaves.items()},
            'tree': _skeleton(arrays, leaves),
            'run_state_crc32': zlib.crc32(state.encode()),
        }
        texts = {_RUN_STATE: state, _CONTENTS: json.dumps(contents)}
        target = self._directory / self._new_name(step)
        partial = _hidden(target)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for abandoned in self._directory.glob('.step_*.partial'):
                shutil.rmtree(abandoned)
            self._require_free_space(step, sum(leaf.nbytes for leaf in leaves.values()) + sum(map(len, texts.values())))
            _away_from_loops(lambda: _write_arrays(partial / _ARRAYS, leaves))
            for name, text in texts.items():
                (partial / name).write_text(text)
            _sync_tree(partial)
            partial.rename(target)
            _sync(self._directory)
        except CheckpointError:
            raise
        except Exception as error:  # orbax raises many kinds
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f'saving step {step} to {self._directory} failed ({_brief(error)}); the disk has {self._free_bytes()} '
                f'bytes free. {self._newest_stands()}Make room or use another workdir'
            ) from error
        self._remove_old()

    def latest(self) -> int | None:
        """The newest complete step."""
        saves = self._saves()
        return saves[-1][0] if saves else None

    def restore_latest(self, like: Any = None) -> tuple[int, Any, dict[str, Any]]:
        """(step, arrays, run state) of the newest step; see `restore`."""
        step = self.latest()
        if step is None:
            raise CheckpointError(f'--resume found no checkpoint in {self._directory}: start without --resume')
        return step, *self.restore(step, like)

    def restore(self, step: int, like: Any = None) -> tuple[Any, dict[str, Any]]:
        """(arrays, run state) of a step, every array compared with its checksum.

        The arrays are numpy and take the structure of `like`, a pytree whose leaves have shape and dtype; without it
        the saved tree must be of dicts with text keys.

        Raises CheckpointError for a step that is missing or damaged, or whose leaves are not those of `like`.
        """
        saves = self._saves()
        index = max((i for i, (saved, _, _) in enumerate(saves) if saved == step), default=None)
        if index is None:
            known = ', '.join(str(saved) for saved, _, _ in saves) or 'none'
            raise CheckpointError(f'{self._directory} has no checkpoint of step {step}; it has: {known}')
        path = saves[index][2]
        try:
            return _read_step(path, like)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged file makes the readers raise
            fix = f'go on from step {saves[index - 1][0]}' if index else 'start without --resume'
            raise CheckpointError(f'{path} is damaged ({_brief(error)}): remove it and {fix}') from error

    def _saves(self) -> list[tuple[int, int, pathlib.Path]]:
        """(step, repetition, path) of the complete steps, oldest first."""
        if not self._directory.is_dir():
            return []
        matches = [(re.fullmatch(r'step_(\d{8,})(?:_(\d+))?', path.name), path) for path in self._directory.iterdir()]
        return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches if match)

    def _new_name(self, step: int) -> str:
        repetitions = [repetition for saved, repetition, _ in self._saves() if saved == step]
        return f'step_{step:08d}' + (f'_{max(repetitions) + 1}' if repetitions else '')

    def _remove_old(self) -> None:
        for _, _, path in self._saves()[: -self._keep]:
            hidden = _hidden(path)  # out of sight first: a removal that is cut short leaves no damaged step
            path.rename(hidden)
            shutil.rmtree(hidden)

    def _require_free_space(self, step: int, size: int) -> None:
        needed, free = size + _OVERHEAD_BYTES, self._free_bytes()
        if free < needed:
            raise CheckpointError(
                f'{self._directory} has {free} bytes free, step {step} needs {needed}. {self._newest_stands()}'
                'Make room, lower checkpoint.keep, or use another workdir'
            )

    def _free_bytes(self) -> int:
        existing = next(path for path in (self._directory, *self._directory.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def _newest_stands(self) -> str:
        newest = self.latest()
        return '' if newest is None else f'The checkpoint of step {newest} is untouched. '


def _read_step(path: pathlib.Path, like: Any) -> tuple[Any, dict[str, Any]]:
    contents, state = json.loads((path / _CONTENTS).read_text()), (path / _RUN_STATE).read_bytes()
    described = contents['leaves']
    if zlib.crc32(state) != contents['run_state_crc32']:
        raise ValueError(f'{_RUN_STATE} is not what was saved')
    if like is not None:
        _require_same_model(path, described, _by_name(like))
    leaves = _away_from_loops(lambda: _read_arrays(path / _ARRAYS, described))
    for name, leaf in leaves.items():
        if _checksum(leaf) != described[name]['crc32']:
            raise ValueError(f'leaf {name!r} is not what was saved')
    return _rebuild(leaves, contents['tree'], like), json.loads(state)


def _write_arrays(directory: pathlib.Path, leaves: Mapping[str, np.ndarray]) -> None:
    """One orbax tree per portion: orbax copies all that it is given at once before it writes."""
    import orbax.checkpoint as ocp

    # float32 weights hardly compress: without it a save costs its bytes and no CPU that decoding needs
    alone = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False, multiprocessing_options=alone)
    directory.mkdir(parents=True)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        for index, names in enumerate(_portions({name: leaf.nbytes for name, leaf in leaves.items()})):
            portion = {name: leaves[name] for name in names}
            checkpointer.save(directory / f'{index:04d}', args=ocp.args.PyTreeSave(portion))


def _portions(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names in their order, cut where the bytes of a portion would pass the limit."""
    portions: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not portions or size > room:
            portions.append([])
            room = _PORTION_BYTES
        portions[-1].append(name)
        room -= size
    return portions


def _read_arrays(directory: pathlib.Path, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    wanted = {
        name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(leaf['dtype']))
        for name, leaf in described.items()
    }
    sizes = {name: np.dtype(leaf['dtype']).itemsize * int(np.prod(leaf['shape'])) for name, leaf in described.items()}
    arrays: dict[str, np.ndarray] = {}
    alone = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        for index, names in enumerate(_portions(sizes)):
            arguments = ocp.args.PyTreeRestore(restore_args={name: wanted[name] for name in names})
            arrays |= checkpointer.restore(directory / f'{index:04d}', args=arguments)
    return arrays


def _this_process_alone() -> Any:
    """Arrays come whole, to one process: orbax must not wait for the others of a distributed run."""
    import orbax.checkpoint as ocp

    this = jax.process_index()
    prefix = None if jax.process_count() == 1 else f'process{this}'
    active = None if jax.process_count() == 1 else {this}
    return ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes=active, barrier_sync_key_prefix=prefix
    )


def _away_from_loops(fn: Callable[[], _T]) -> _T:
    """Runs `fn` on a thread of its own and waits for it.

    orbax runs asyncio inside. Where a loop runs already (the virtual clock calls inline) it depends on version and
    platform what it does: uvloop on a thread, or asyncio patched to nest, which lets other coroutines run in between.
    """
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='orbax') as own:
        return own.submit(fn).result()


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by 'params/layers/0/query'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError('two leaves of the tree have the same path: no key may look like two joined by "/"')
    return named


def _skeleton(tree: Any, names: Iterable[str]) -> Any:
    """The tree with names for leaves, if it is one of dicts with text keys, else None."""
    named = jax.tree.unflatten(jax.tree.structure(tree), list(names))
    return named if _is_plain(named) else None


def _is_plain(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in tree.items())
    return isinstance(tree, str)


def _rebuild(leaves: Mapping[str, np.ndarray], skeleton: Any, like: Any) -> Any:
    if like is not None:
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _by_name(like)])
    if skeleton is None:
        raise CheckpointError('what was saved is not a tree of dicts with text keys: give `like` to restore it')
    return jax.tree.map(lambda name: leaves[name], skeleton)


def _require_same_model(path: pathlib.Path, described: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    saved = {name: (tuple(leaf['shape']), leaf['dtype']) for name, leaf in described.items()}
    here = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in like.items()}
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f'{path} is of another model or optimizer: leaf {name!r} has {_form(saved.get(name))} there and '
                f'{_form(here.get(name))} here. Resume with the configuration of the run that saved, or start without '
                '--resume'
            )


def _form(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return 'no place' if leaf is None else f'shape {leaf[0]} {leaf[1]}'


def _describe(leaf: np.ndarray) -> dict[str, Any]:
    return {'shape': list(leaf.shape), 'dtype': str(leaf.dtype), 'crc32': _checksum(leaf)}


def _checksum(leaf: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def _brief(error: BaseException) -> str:
    """Type and first line: orbax's messages go on for pages."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:200]}'


def _hidden(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f'.{path.name}.partial')


def _sync_tree(directory: pathlib.Path) -> None:
    for path in (*directory.rglob('*'), directory):
        _sync(path)


def _sync(path: pathlib.Path) -> None:
    """The file, or the names in the directory, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
