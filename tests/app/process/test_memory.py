import platform
import subprocess
import sys

import pytest

# 400 blocks of 4 MB, freed in an order that leaves a heap full of holes: the last one keeps it from shrinking
PROGRAM = """
import psutil, numpy as np
from areal_jax.app.process.memory import return_freed_memory
{call}
np.ones(3_000_000).sum()  # freeing 24 MB makes glibc raise its threshold for mapped blocks to that
blocks = [np.ones(500_000) for _ in range(400)]
keep = blocks[-1]
del blocks
print(psutil.Process().memory_info().rss >> 20)
"""


def resident_mb(call):
    done = subprocess.run([sys.executable, '-c', PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='mallopt is of glibc')
def test_freed_blocks_go_back_to_the_system():
    assert resident_mb('pass') > 1000  # 1.6 GB of holes
    assert resident_mb('assert return_freed_memory()') < 300
