"""A role without jax, for the executors: it beats, watches its peers, counts steps and saves them, and obeys SIGTERM.

The controller makes STAND_IN_STEPS steps, one in 0.1 s, while all learner processes and an engine are there. A learner
whose peer is lost ends with 75, and so does a controller without a learner.
"""

import os
import pathlib
import signal
import sys
import time

LOST_S, LOOK_S = 4.0, 0.1


class Role:
    def __init__(self, arguments):
        self.flags = dict(word.removeprefix('--').split('=', 1) for word in arguments if '=' in word)
        self.workdir = pathlib.Path(self.flags['workdir'])
        index = self.flags['index']
        self.role, self.index = self.flags['role'], int(os.environ[index[4:]] if index.startswith('env:') else index)
        self.told = False
        (self.workdir / 'beats').mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, self.stop)
        self.note('start', os.getpid(), os.environ.get('SLURMD_NODENAME', '-'), *arguments)
        if os.environ.get('STAND_IN_FAILS') == f'{self.role}-{self.index}':
            print('error: port 1 is in use: use another', flush=True)
            sys.exit(2)

    def stop(self, number, frame):
        self.told = True

    def note(self, *words):
        with (self.workdir / 'events').open('a') as file:
            file.write(' '.join(map(str, (self.role, self.index, *words))) + '\n')

    def beat(self):
        (self.workdir / 'beats' / f'{self.role}-{self.index}').write_text(str(time.time()))

    def count_living(self, role):
        ages = [time.time() - path.stat().st_mtime for path in (self.workdir / 'beats').glob(f'{role}-*')]
        return sum(age < LOST_S for age in ages)

    def end(self, code):
        self.note('end', code)
        return code

    def run(self):
        return {'controller': self.control, 'learner': self.learn}.get(self.role, self.serve)()

    def serve(self):
        while not self.told:
            self.beat()
            time.sleep(LOOK_S)
        return self.end(0)

    def learn(self):
        count, complete = int(self.flags['count']), False
        while not self.told:
            self.beat()
            complete = complete or self.count_living('learner') == count
            if (self.workdir / 'report.json').exists():
                return self.end(0)
            if complete and self.count_living('learner') < count:
                return self.end(75)
            time.sleep(LOOK_S)
        time.sleep(0.3)  # it saves
        return self.end(75)

    def control(self):
        saved, learners = self.workdir / 'step', 0
        step = int(saved.read_text()) if saved.exists() else 0
        self.note('continue', step)
        while not self.told:
            self.beat()
            living = self.count_living('learner')
            if living < learners:
                return self.end(75)
            learners = max(learners, living)
            if learners == int(os.environ.get('STAND_IN_LEARNERS', '2')) and self.count_living('engine'):
                step += 1
            if step >= int(os.environ.get('STAND_IN_STEPS', '100')):
                (self.workdir / 'report.json').write_text(f'{{"steps": {step}}}')
                return self.end(0)
            if step % 10 == 0:
                saved.write_text(str(step))
            time.sleep(LOOK_S)
        saved.write_text(str(step))
        return self.end(75)


if __name__ == '__main__':
    sys.exit(Role(sys.argv[1:]).run())
