import pytest

from tests.agents.programs.loop_thread import LoopThread


@pytest.fixture(scope='module')
def loop():
    thread = LoopThread()
    yield thread
    thread.close()
