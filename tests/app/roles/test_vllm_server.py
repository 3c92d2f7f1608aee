"""areal_jax.app.roles.vllm_server: what its command line cannot be, and how it ends before it has a server."""

import pytest

from areal_jax.app.process.ending import STOPPED_CODE, code_of_stopped_server
from areal_jax.app.roles import vllm_server
from areal_jax.errors import UserError

FLAGS = ['areal_jax.app.roles.vllm_server', '--workdir=run', '--name=0', '--publication=run/publication']


@pytest.mark.parametrize(
    ('flags', 'said'),
    [(FLAGS[:1], '--workdir'), ([*FLAGS, '--slots=abc'], '--slots'), ([*FLAGS, '--slot=1'], "'slot'")],
)
def test_a_wrong_flag_is_one_sentence(flags, said):
    with pytest.raises(UserError, match=said):
        vllm_server.parse_flags(flags)


def test_a_server_that_is_told_to_stop_before_the_first_version_ends_with_the_code_of_its_executor(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(vllm_server, 'find_python', lambda: 'python')
    monkeypatch.setattr(vllm_server, 'await_version', lambda publication, wakeups: None)
    assert vllm_server.main(FLAGS) == 0
    monkeypatch.setenv(STOPPED_CODE, '75')
    assert vllm_server.main(FLAGS) == 75
    assert code_of_stopped_server() == 75
