"""What programs need of the system, and must find in the sandbox."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from tests.workers.sandbox.place import Place


def write_temporary(place: Place) -> None:
    with tempfile.NamedTemporaryFile(dir=place.work) as file:
        file.write(b'x')


def run_thread(place: Place) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=seen.append, args=(1,))
    thread.start()
    thread.join()
    assert seen == [1]


def run_coroutine(place: Place) -> None:
    async def wait() -> int:
        await asyncio.sleep(0.001)
        return await asyncio.to_thread(int, '7')

    assert asyncio.run(wait()) == 7


def run_program(place: Place) -> None:
    subprocess.run(['/usr/bin/true'], check=True)


def import_again(*modules: str) -> Callable[[Place], object]:
    def attempt(place: Place) -> None:
        for module in modules:
            for name in [one for one in sys.modules if one == module or one.startswith(f'{module}.')]:
                del sys.modules[name]
            importlib.import_module(module)

    return attempt


def run_program_of_coroutine(place: Place) -> None:
    async def run() -> int:
        program = await asyncio.create_subprocess_exec('/usr/bin/true', stdout=asyncio.subprocess.PIPE)
        return await program.wait()

    assert asyncio.run(run()) == 0


def run_in_processes(place: Place) -> None:
    import multiprocessing

    context = multiprocessing.get_context('fork')
    ours, theirs = context.Pipe()
    processes = [context.Process(target=theirs.send, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    assert sorted(ours.recv() for _ in processes) == [0, 1]
    for process in processes:
        process.join()


def run_pool(place: Place) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(abs, range(-4, 4))) == 16


def use_sqlite(place: Place) -> None:
    import sqlite3

    with sqlite3.connect(place.work / 'rows.db') as base:
        base.execute('create table rows (number)')
        base.executemany('insert into rows values (?)', [(1,), (2,)])
        assert base.execute('select sum(number) from rows').fetchone() == (3,)


def compute_decimals(place: Place) -> None:
    import decimal

    with decimal.localcontext() as context:
        context.prec = 1000
        assert len(str(decimal.Decimal(2).sqrt())) == 1001


def multiply_in_threads(place: Place) -> None:
    """The library that numpy multiplies with starts its threads when it is loaded."""
    os.environ['OPENBLAS_NUM_THREADS'] = os.environ['OMP_NUM_THREADS'] = '4'
    import numpy as np

    ones = np.ones((600, 600))
    assert (ones @ ones == 600).all()
    assert np.linalg.solve(ones + 600 * np.eye(600), ones).shape == (600, 600)
