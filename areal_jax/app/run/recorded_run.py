"""What a replay needs of a run: read from its workdir, or from one compressed file that `pack` makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.app.parts.own_code import FILE as OWN_CODE
from areal_jax.app.parts.own_code import Digests
from areal_jax.app.run.start_records import FILE as STARTS
from areal_jax.app.run.start_records import Start, read_starts
from areal_jax.config import CONFIG
from areal_jax.config.structure import read_saved, require_saved
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.report.event_log import parse_events
from areal_jax.telemetry.facts import FILE as FACTS

FORMAT = 1  # of a packed run
_INDEX = 'packed.json'  # {'format', 'name', 'sha256': by member}
_PARTS = (CONFIG, EVENTS, STARTS, FACTS, OWN_CODE)  # the last two where the run has them
_FIX = 'restore the file as the run wrote it'
_PACK_AGAIN = 'pack the run again with main_replay --portable'


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run as its files tell it."""

    name: str  # the workdir or the file, for errors
    parts: Mapping[str, bytes]  # contents by name in the workdir
    events: Sequence[Event]
    starts: Sequence[Start]
    config: Mapping[str, Any]  # of the last start
    weights_sha256: str | None  # of the last version; None: the run has not finished
    own_code: Digests

    def where(self, part: str) -> str:
        """The name of one of its files, for errors."""
        return f'{self.name}/{part}'


def read_workdir(workdir: pathlib.Path) -> RecordedRun:
    """The run of a workdir; raises UserError for a directory without one, and for one that is running."""
    if not (workdir / CONFIG).is_file() or not (workdir / EVENTS).is_file():
        raise UserError(f'--workdir={workdir} holds no run of asynchronous RL: it has no {CONFIG} with {EVENTS}')
    if holder := files.find_holder(workdir):
        raise UserError(f'{workdir} is in use by {holder}: wait for the run to end, or stop it')
    found = {part: workdir / part for part in _PARTS}
    return parse_run({part: path.read_bytes() for part, path in found.items() if path.is_file()}, str(workdir))


def read_packed(path: pathlib.Path) -> RecordedRun:
    """The run in a file of `pack`; raises FileError for a file that is not whole, or none of these."""
    parts: dict[str, bytes] = {}
    try:
        with tarfile.open(path, 'r:xz') as archive:
            for member in archive:
                content = archive.extractfile(member)
                if member.name in (_INDEX, *_PARTS) and content is not None:
                    parts[member.name] = content.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise files.FileError(f'{path} is no packed run, or is cut short ({error}); {_PACK_AGAIN}') from error
    except OSError as error:
        raise files.FileError(f'{path} cannot be read ({error.strerror}); name a file of main_replay') from error
    if _INDEX not in parts:
        raise files.FileError(f'{path} is no packed run: it holds no {_INDEX}; {_PACK_AGAIN}')
    index = files.parse_object(parts.pop(_INDEX), f'{path}/{_INDEX}', _PACK_AGAIN)
    if index.get('format') != FORMAT:
        raise files.FileError(f'{path} has the format {index.get("format")!r}; this program reads {FORMAT}')
    listed = index.get('sha256')
    for part in sorted({*parts, *listed} if isinstance(listed, dict) else parts):
        found = hashlib.sha256(parts[part]).hexdigest() if part in parts else 'nothing'
        if not isinstance(listed, dict) or listed.get(part) != found:
            raise files.FileError(f'{path}/{part} is not what was packed (sha256 {found[:12]}); {_PACK_AGAIN}')
    return parse_run(parts, str(path))


@dataclasses.dataclass(frozen=True)
class Log:
    """An event log with the config that its run had."""

    name: str
    events: Sequence[Event]
    config_name: str
    config: Mapping[str, Any]


def read_log(path: pathlib.Path) -> Log:
    """The log in an events.jsonl, a workdir or a packed run; raises FileError for a file that is missing or no log."""
    file = path / EVENTS if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise files.FileError(
            f'{file} cannot be read ({error.strerror}): name a log, a workdir or a packed run'
        ) from error
    if content.startswith(lzma.compress(b'')[:6]):
        run = read_packed(file)
        log = Log(run.where(EVENTS), run.events, run.where(CONFIG), run.config)
    else:
        config = file.parent / CONFIG
        if not config.is_file():
            raise files.FileError(
                f'{file} has no {CONFIG} beside it, which says what the log must keep: check it in its own workdir'
            )
        log = Log(str(file), parse_events(content, str(file)), str(config), read_saved(config, _FIX))
    if not log.events:
        raise files.FileError(f'{log.name} holds no event: name the log of a run')
    return log


def pack(run: RecordedRun, path: pathlib.Path) -> int:
    """Writes config, seeds, log, verdicts and digests of a run as one compressed file; returns its bytes.

    Raises UserError for a file that exists.
    """
    if path.exists():
        raise UserError(f'--portable={path} exists: name another file')
    if not path.absolute().parent.is_dir():
        raise UserError(f'--portable={path} is in no directory: make {path.parent} first')
    digests = {part: hashlib.sha256(content).hexdigest() for part, content in run.parts.items()}
    index = json.dumps({'format': FORMAT, 'name': run.name, 'sha256': digests}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:xz', preset=9) as archive:
        for name, content in {_INDEX: index, **run.parts}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    files.write_bytes(path, buffer.getvalue())
    return len(buffer.getvalue())


def parse_run(parts: Mapping[str, bytes], name: str) -> RecordedRun:
    """The run whose files have these contents; raises UserError for one that is missing or not whole."""
    for part in (CONFIG, EVENTS):
        if part not in parts:
            raise files.FileError(f'{name} has no {part}; {_FIX}')
    config = files.parse_object(parts[CONFIG], f'{name}/{CONFIG}', _FIX)
    require_saved(config, f'{name}/{CONFIG}', _FIX)
    facts = files.parse_object(parts[FACTS], f'{name}/{FACTS}', _FIX) if FACTS in parts else {}
    own_code = files.parse_object(parts[OWN_CODE], f'{name}/{OWN_CODE}', _FIX) if OWN_CODE in parts else {}
    events = parse_events(parts[EVENTS], f'{name}/{EVENTS}')
    starts = read_starts(parts[STARTS], f'{name}/{STARTS}') if STARTS in parts else []
    return RecordedRun(name, parts, events, starts, config, facts.get('weights_sha256'), own_code)
