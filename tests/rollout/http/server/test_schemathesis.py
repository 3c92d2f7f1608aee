"""schemathesis, unchanged, against the page of routes: what it makes of the schemas never breaks the server.

schemathesis may lie in an environment of its own: `bash launch/test_external.sh schemathesis` says which.
"""

import os
import re
import subprocess

import pytest

from tests.rollout.http.server.rig import ToyServer

COMMAND = os.environ.get('AREAL_JAX_SCHEMATHESIS')
CHECKS = 'not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance'
PAUSES = '^/(pause|pause_generation)$'  # after which everything waits


@pytest.mark.slow
@pytest.mark.skipif(
    not COMMAND, reason='AREAL_JAX_SCHEMATHESIS names no command: bash launch/test_external.sh schemathesis'
)
def test_schemathesis_finds_no_fault(tmp_path):
    with ToyServer() as server:
        done = subprocess.run(
            [
                COMMAND, 'run', f'{server.url}/openapi.json', f'--checks={CHECKS}', f'--exclude-path-regex={PAUSES}',
                '--max-examples=50', '--seed=0', '--request-timeout=20', '--no-color', '--continue-on-failure',
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(done.stdout[-4000:])
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        [cases] = re.findall(r'(\d[\d,]*) generated', done.stdout)
        assert int(cases.replace(',', '')) > 500
        status, _ = server.run(lambda client: client.get('/health'))
        assert status == 200
