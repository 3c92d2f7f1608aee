"""An event loop outside the main thread, as the I/O loop of a clock is, and what tests ask of processes."""

import asyncio
import concurrent.futures
import pathlib
import threading
import time


class LoopThread:
    """Runs coroutines on a loop in a thread of its own, until `close`."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self, coroutine) -> concurrent.futures.Future:
        """Its `cancel` cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine):
        return self.start(coroutine).result(30)

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def read_when_there(path: pathlib.Path) -> str:
    """A line that a program writes into a file; waits for it."""
    return wait_for(lambda: path.exists() and path.read_text().endswith('\n') and path.read_text().strip())


def wait_for(look):
    end_s = time.monotonic() + 10
    while not (found := look()):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False
