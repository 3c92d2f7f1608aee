"""launch.slurm with roles that compute nothing: python -m tests.launch.stand_in_slurm, flags as of launch.slurm.

They are this module too, with the flags of main_role: stand_in_peer, where STAND_IN_DEAF names a role that ignores
SIGTERM, and STAND_IN_ENDS one that ends soon after its start with a code (learner-1=2).
"""

import os
import sys
import time

from tests.launch.stand_in_peer import Role

ENDS_S = 0.5


class OddRole(Role):
    def __init__(self, arguments):
        super().__init__(arguments)
        self.name = f'{self.role}-{self.index}'

    def stop(self, number, frame):
        if os.environ.get('STAND_IN_DEAF') != self.name:
            super().stop(number, frame)

    def run(self):
        name, _, code = os.environ.get('STAND_IN_ENDS', '').partition('=')
        if name != self.name:
            return super().run()
        time.sleep(ENDS_S)  # the others have started
        print(f'error of {name}', flush=True)
        return self.end(int(code))


if __name__ == '__main__':
    if any(word.startswith('--role=') for word in sys.argv):
        sys.exit(OddRole(sys.argv[1:]).run())
    from launch import cluster_run, slurm

    cluster_run.MODULE = 'tests.launch.stand_in_slurm'
    slurm.run()
