"""Programs around packages of others, unchanged, against a running server: each calls its tool once and ends.

They learn of the server by environment variables alone. `bash launch/test_agents.sh` makes environments with the
packages.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess

import pytest

from areal_jax.agents.dialogue import NotationParser, TokenizerFormat
from areal_jax.agents.programs.program_host import CommandHost
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from tests.agents.gateway_rig import SAMPLING, Run
from tests.agents.toy_format import ToyPool
from tests.rollout.http.server.scripted import ScriptedServer
from tests.text.test_extension import HERMES, build

PYTHON = os.environ.get('AREAL_JAX_AGENTS_PYTHON')
VERIFIERS = os.environ.get('AREAL_JAX_VERIFIERS_PYTHON')
TASKSETS = pathlib.Path(__file__).parents[4] / 'benchmarks' / 'agent_parts'
TWICE = ('anthropic_messages', 'openai_agents_chat', 'openai_agents_responses')  # streamed too, as another conversation
PROGRAMS = sorted(
    path for path in pathlib.Path(__file__).parent.glob('*_*.py') if not path.name.startswith(('test_', '__'))
)


def write(messages, tools):
    """The model calls add; with its result it answers, by the tool for that if there is one."""
    names = [tool['function']['name'] for tool in tools]
    results = [turn['content'] for turn in messages if turn['role'] == 'tool']
    if not results:
        return 'I add.\n' + call('add', {'a': 1, 'b': 2})
    return call('final_result', {'value': int(results[0])}) if 'final_result' in names else f'It is {results[0]}.'


def call(name, arguments):
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason='AREAL_JAX_AGENTS_PYTHON names no interpreter: bash launch/test_agents.sh')
@pytest.mark.parametrize('program', PROGRAMS, ids=lambda path: path.stem)
def test_a_program_calls_its_tool(program, tmp_path):
    with ScriptedServer(write, api_key='secret', required='wish') as server:
        told = {
            'OPENAI_BASE_URL': f'{server.url}/v1', 'OPENAI_API_KEY': 'secret', 'ANTHROPIC_BASE_URL': server.url,
            'ANTHROPIC_API_KEY': 'secret', 'OPENAI_AGENTS_DISABLE_TRACING': '1',
        }  # fmt: skip
        done = subprocess.run(
            [PYTHON, str(program)], cwd=tmp_path, env=os.environ | told, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.strip() == ('3' if 'structured' in program.stem else 'It is 3.')
        assert server.metric('tool_calls_unparsed_total') == 0
        assert server.metric('tool_calls_total') >= 1


class WrittenPool(ToyPool):
    """Answers with the ids of what `write` says to the text of the prompt."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def generate(self, request, prefer=''):
        text = self.tokenizer.decode(request.prompt_tokens)
        results = re.findall(r'<tool_response>\n(.*)\n</tool_response>', text)
        tools = [{'function': {'name': name}} for name in ('add', 'final_result') if f'"{name}"' in text]
        said = write([{'role': 'tool', 'content': result} for result in results], tools)
        self.answers = [[*self.tokenizer.encode(said).tolist(), self.tokenizer.eos_id]]
        return super().generate(request, prefer)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason='AREAL_JAX_AGENTS_PYTHON names no interpreter: bash launch/test_agents.sh')
@pytest.mark.parametrize('program', PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_an_episode_whose_turns_are_one_row(program, monkeypatch, smollm2_fields):
    monkeypatch.setenv('OPENAI_AGENTS_DISABLE_TRACING', '1')
    tokenizer = build(smollm2_fields, HERMES)
    run = Run(
        None, pool=WrittenPool(tokenizer), host=CommandHost([PYTHON, str(program)], ()), deadline_s=100.0,
        chat_format=TokenizerFormat(tokenizer, NotationParser(tokenizer, NOTATIONS['hermes'])), context_tokens=2000,
        sampling=dataclasses.replace(SAMPLING, max_new_tokens=500),
    )  # fmt: skip
    assert (run.ends, [str(error) for error in run.errors]) == (('stop', 'stop'), [])
    said = [call.reply['content'] for call in run.episode.calls]
    conversations = 2 if program.stem in TWICE else 1
    assert said.count('It is 3.') == (0 if 'structured' in program.stem else conversations)
    assert run.episode.counts['tool_calls'] == conversations * (2 if 'structured' in program.stem else 1)
    assert [row.fork for row in run.episode.rows] == ['', 'resampled'][:conversations]


def write_product(messages, tools):
    """The model has the tool multiply what the user asks for."""
    if results := [turn['content'] for turn in messages if turn['role'] == 'tool']:
        return f'It is {results[0]}.'
    a, b = map(int, re.findall(r'\d+', messages[-1]['content']))
    return call(tools[0]['function']['name'], {'a': a, 'b': b})


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS, reason='AREAL_JAX_VERIFIERS_PYTHON names no interpreter: bash launch/test_agents.sh')
def test_the_harness_of_verifiers_calls_a_tool_over_mcp(tmp_path):
    folder = pathlib.Path(VERIFIERS).parent
    with ScriptedServer(write_product, api_key='secret') as server:
        path = os.pathsep.join([str(folder), os.environ['PATH']])  # uv stands beside the interpreter
        done = subprocess.run(
            [
                str(folder / 'vf-eval'), 'product_tool', '-m', 'm', '-n', '2', '--no-push', '--client.base-url',
                f'{server.url}/v1', '--client.api-key-var', 'GIVEN_KEY', '--env.agent.harness.id', 'null',
                '--env.agent.runtime.type', 'subprocess', '--output-dir', str(tmp_path),
            ],
            env=os.environ | {'PYTHONPATH': str(TASKSETS), 'GIVEN_KEY': 'secret', 'PATH': path}, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert server.metric('tool_calls_total') == 2
    (found,) = tmp_path.rglob('traces.jsonl')
    episodes = [json.loads(line) for line in found.read_text().splitlines()]
    rewards = [trace['rewards'] for episode in episodes for trace in episode.get('traces', [episode])]
    assert rewards == [{'correct': {'score': 1.0, 'weight': 1.0}}] * 2
