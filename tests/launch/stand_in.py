"""What a stand-in for a trainer or a server does: it writes WORKDIR/events and obeys WORKDIR/behaviour.json."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time


class StandIn:
    """`name` begins each of its events; `behaviour` is its part of behaviour.json."""

    def __init__(self, name):
        flags = dict(word.removeprefix('--').split('=', 1) for word in sys.argv[1:] if '=' in word)
        self.workdir, self.flags, self.name = pathlib.Path(flags['workdir']), flags, name
        self.behaviour = json.loads((self.workdir / 'behaviour.json').read_text()).get(name, {})
        self.note('start', os.getpid(), *sys.argv[1:])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)

    def note(self, *words):
        with (self.workdir / 'events').open('a') as file:
            file.write(' '.join(map(str, (self.name, *words))) + '\n')

    def start_descendants(self):
        """One in the group of this process, and one that has left its session."""
        for apart in (False, True):
            child = subprocess.Popen(['sleep', '1000'], start_new_session=apart)
            self.note('descendant', child.pid)

    def stop(self, number, frame):
        self.note(signal.Signals(number).name)
        if not self.behaviour.get('ignores_signals'):
            time.sleep(self.behaviour.get('stop_s', 0))
            self.note('ends')
            os._exit(self.behaviour.get('stop_code', 0))

    def wait(self, beat=lambda: None):
        code = self.workdir / f'end_{self.name}'
        while not code.exists() or not (text := code.read_text()):  # a file is empty between its creation and its write
            beat()
            time.sleep(0.02)
        self.note('ends')
        return int(text)
