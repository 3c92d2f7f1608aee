"""The learner's end of the channel of a soak, as a process that can be killed: python -m checks.soak.sender.

It answers each line of JSON on its input with one: {"transfer": 3}, and {"release": 3, "pinned": [1]}.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from areal_jax import files
from areal_jax.app.command_line import load_config
from areal_jax.app.model.model import describe_model
from areal_jax.app.parts.channels import ChannelParts, build_channel
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import CONFIG as CONFIG_OF_RUN
from areal_jax.config import TrackedConfig
from areal_jax.files import JsonObject
from areal_jax.publication.carriers.stream_receiver import parse_version_name
from areal_jax.types import PublishedWeights
from checks.processes import ROOT
from checks.soak.scores import Scores
from checks.soak.servers import CHANNELS, CONFIG

_END_S = 30.0


class SenderProcess:
    """Starts again whenever it is dead. `transfer` and `release` are for one thread, `kill_next` for any."""

    def __init__(self, workdir: pathlib.Path, channel: str):
        self._workdir, self._channel = workdir, channel
        self._process: subprocess.Popen[str] | None = None
        self._kill_at: float | None = None
        self._transfer_s = 0.0  # of the last one
        self.kills = self.deltas = 0
        self._addresses: set[str] = set()  # one for each start

    def kill_next(self, at: float) -> None:
        """Kills it in the next transfer that takes this multiple of the time of the one before, at that moment."""
        self._kill_at = at

    def transfer(self, version: int) -> PublishedWeights:
        """Sends a version, again where the process was killed meanwhile; raises RuntimeError where it died itself."""
        while True:
            self._say({'transfer': version})
            if self._hear():  # the weights are drawn, and it begins
                with self._killed_after(None if self._kill_at is None else self._kill_at * self._transfer_s):
                    answer = self._hear()
                if answer:
                    self._transfer_s, self.deltas = answer['seconds'], self.deltas + answer['is_delta']
                    if named := parse_version_name(answer['handle']):
                        self._addresses.add(named[0])
                    return PublishedWeights(version, answer['manifest_hash'], handle=answer['handle'])

    def release(self, version: int, pinned: Collection[int]) -> None:
        self._say({'release': version, 'pinned': list(pinned)})
        self._hear()

    def end(self) -> list[str]:
        """Lets it close the channel; what this and earlier processes left is named."""
        if self._process is None or self._process.stdin is None:
            return []
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return [f'the sender did not end within {_END_S:.0f} s: {self._log.read_text()[-2000:]}']
        paths = [pathlib.Path(address.partition(':')[2]) for address in sorted(self._addresses)]
        return [f'a sender left {path}' for path in paths if path.exists()]

    @contextlib.contextmanager
    def _killed_after(self, seconds: float | None) -> Iterator[None]:
        assert self._process is not None
        kill = threading.Timer(seconds or 0.0, self._process.kill)
        if seconds is not None:
            kill.start()
        yield
        kill.cancel()

    @property
    def _log(self) -> pathlib.Path:
        return self._workdir / 'sender.log'

    def _say(self, asked: JsonObject) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_hear` finds out why
            self._process.stdin.write(json.dumps(asked) + '\n')
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        """The next answer; {} where it was killed."""
        assert self._process is not None
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        if (code := self._process.wait()) != -signal.SIGKILL:
            raise RuntimeError(f'the sender ended with code {code}: {self._log.read_text()[-2000:]}')
        self._kill_at, self.kills = None, self.kills + 1
        return {}

    def _start(self) -> None:
        command = [sys.executable, '-m', 'checks.soak.sender', str(self._workdir), self._channel]
        environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
        with self._log.open('ab') as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment | {'JAX_PLATFORMS': 'cpu'},
            )  # fmt: skip


def main(workdir: pathlib.Path, name: str) -> None:
    config = load_config(str(ROOT / CONFIG))
    config.update_from_flattened_dict(CHANNELS[name] | {'rollout.server': 'own'})
    files.write_json(workdir / CONFIG_OF_RUN, config.to_dict(), allow_nan=True)  # files of a version have its sampling
    tracked = TrackedConfig(config)
    channel = build_channel(ChannelParts(tracked, workdir, describe_model(tracked), build_allocation(tracked)))
    scores = Scores(config.publication.dtype)
    for line in sys.stdin:
        asked = json.loads(line)
        if 'transfer' in asked:
            params = scores.params(asked['transfer'])
            _answer(begins=True)
            began_s = time.monotonic()
            published = channel.transfer(asked['transfer'], params)
            _answer(
                handle=str(published.handle), manifest_hash=published.manifest_hash,
                seconds=time.monotonic() - began_s, is_delta=bool(published.size and published.size.record == 'delta'),
            )  # fmt: skip
        else:
            channel.release(asked['release'], asked['pinned'])
            _answer(released=asked['release'])
    channel.close()


def _answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
