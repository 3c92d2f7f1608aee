"""Every door through which tools reach a chat template: they are in the prompt, or refused with the remedy."""

from __future__ import annotations

import ast
import json
import pathlib

import numpy as np
import pytest

import areal_jax
from areal_jax.agents.agent_workflow import AgentWorkflow
from areal_jax.agents.dialogue import Dialogue, NotationParser, TokenizerFormat
from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.library import build_run
from areal_jax.app.model.text_model import TextModel
from areal_jax.app.parts import workflow_builder
from areal_jax.app.parts.workflow_builder import load_workflow
from areal_jax.config import TrackedConfig, default_config
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.server.tokenizer import parse_tokenize
from areal_jax.rollout.http.wire import chat, messages, responses
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from areal_jax.rollout.http.wire.exchange import RequestError, tokenize_call
from areal_jax.tasks.demonstrations import read_demonstrations, read_pairs
from areal_jax.tasks.task import TaskError
from areal_jax.text.chat_template import ConversationError, ToolsNotShownError, require_shown
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.agents import gateway_rig as rig
from tests.agents.test_dialogue import BUDGETS, PROMPT, SAMPLING
from tests.agents.toy_format import ToyPool
from tests.text.test_extension import HERMES, build

TOOL = {'type': 'function', 'function': {'name': 'multiply', 'parameters': {'type': 'object'}}}
CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'multiply', 'arguments': {'a': 1}}}
ASKED, CALLED = {'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': '', 'tool_calls': [CALL]}
RESULT, FLAT = {'role': 'tool', 'content': '7', 'tool_call_id': 'c'}, {'type': 'function', **TOOL['function']}
TURNS = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n'
)
TEMPLATES = {
    'shows': HERMES,
    'of smollm2, without': '',
    'with another name': '{% set functions = tools_of_model %}' + TURNS,
    'sets and does not read': '{% set tools = [] %}' + TURNS,
    'reads and does not show': '{% if tools is defined %}{% set ns = namespace(n=tools|length) %}{% endif %}' + TURNS,
    'shows to a system turn alone': "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + TURNS,
}
REMEDY = 'model.chat_template'


@pytest.fixture(scope='module', params=TEMPLATES)
def tokenizer(request, smollm2_fields):
    made = build(smollm2_fields, TEMPLATES[request.param])
    made.is_shown = request.param == 'shows'
    return made


@pytest.fixture(scope='module')
def form(tokenizer):
    return make_form(tokenizer)


def make_form(tokenizer):
    return TokenizerFormat(tokenizer, NotationParser(tokenizer, NOTATIONS['hermes']))


def hold(tokenizer, error, ask, *, line=''):
    """`ask` gives the ids of a prompt that names the tool, or raises `error` with the remedy."""
    if tokenizer.is_shown:
        assert 'multiply' in tokenizer.decode(np.asarray(ask(), np.int32))
        return
    with pytest.raises(error) as refused:
        ask()
    assert REMEDY in str(refused.value)
    assert str(refused.value).startswith(line)


# Doors.


def ask_dialect(parse, body):
    def ask(tokenizer):
        texts = Texts(tokenizer)
        return tokenize_call(parse(body), texts.encode, texts.apply_template).prompts[0]

    return ask


def ask_tokenize(tokenizer):
    asked = parse_tokenize({'messages': [ASKED], 'tools': [TOOL]})
    return Texts(tokenizer).apply_template(asked.messages, asked.tools)


USE = {'type': 'tool_use', 'id': 'c', 'name': 'multiply', 'input': {}}
DOORS = {
    'areal-serve /v1/chat/completions': ask_dialect(chat.parse, {'messages': [ASKED], 'tools': [TOOL]}),
    'areal-serve /v1/responses': ask_dialect(responses.parse, {'input': 'q', 'tools': [FLAT]}),
    'areal-serve /v1/messages': ask_dialect(
        messages.parse, {'messages': [ASKED], 'max_tokens': 1, 'tools': [{'name': 'multiply', 'input_schema': {}}]}
    ),
    'areal-serve /v1/messages/count_tokens': ask_dialect(
        messages.parse_count, {'messages': [ASKED], 'tools': [{'name': 'multiply', 'input_schema': {}}]}
    ),
    'areal-serve /tokenize': ask_tokenize,
    'areal-serve, a call that comes back': ask_dialect(
        chat.parse, {'messages': [ASKED, {**CALLED, 'tool_calls': [CALL]}, RESULT]}
    ),
    'areal-serve, a block that comes back': ask_dialect(
        messages.parse, {'messages': [ASKED, {'role': 'assistant', 'content': [USE]}, ASKED], 'max_tokens': 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize('door', DOORS)
def test_the_server_shows_or_refuses(tokenizer, door):
    hold(tokenizer, (RequestError, ConversationError), lambda: DOORS[door](tokenizer))


def test_the_refusal_of_the_server_names_the_field(smollm2_fields):
    with pytest.raises(RequestError) as refused:
        DOORS['areal-serve /v1/chat/completions'](build(smollm2_fields))
    assert (refused.value.field, refused.value.status) == ('tools', 400)
    assert 'package:configs/templates/hermes.jinja' in str(refused.value)


@pytest.mark.parametrize('path', ['/chat/completions', '/messages', '/messages/count_tokens', '/responses'])
def test_a_program_gets_the_tools_or_status_400(tokenizer, form, path):
    found = []
    body = {'messages': [ASKED], 'tools': [TOOL], 'max_tokens': 4}
    if 'messages' in path:
        body['tools'] = [{'name': 'multiply', 'input_schema': {}}]
    if path == '/responses':
        body = {'input': 'q', 'tools': [FLAT]}

    async def program(client):
        found.append(await client.post(body, path=path))

    run = rig.Run(program, [3], chat_format=form)
    [(status, reply)] = found
    assert status == (200 if tokenizer.is_shown else 400), reply
    if tokenizer.is_shown:
        asked = [] if 'count' in path else [run.pool.requests[0].prompt_tokens]
        assert all('multiply' in tokenizer.decode(tokens) for tokens in asked)
    else:
        assert REMEDY in json.dumps(reply)
        assert run.episode.label == 'agent_error'


@pytest.mark.parametrize('tools', [[TOOL], []], ids=['tools', 'calls'])
def test_an_agent_shows_them_or_ends_the_run(tokenizer, form, tools):
    pool, errors, clock = ToyPool([tokenizer.eos_id]), [], VirtualClock({'tools': 2}, EventLog(), {'tool': 0.5})

    async def agent(prompt, dialogue):
        await dialogue.chat([ASKED] if tools else [ASKED, CALLED, RESULT], tools)

    make = lambda prompt, episode: Dialogue(
        pool, clock, prompt, episode, sampling=SAMPLING, seed=7, chat_format=form,
        budgets=BUDGETS.__class__(**{**vars(BUDGETS), 'context_tokens': 4000}), lane='tools',
    )  # fmt: skip
    workflow = AgentWorkflow(agent, make, lambda prompt, error: errors.append(error), clock)

    def ask():
        clock.execute(workflow.run(PROMPT, Episode(0)))
        return pool.requests[0].prompt_tokens

    hold(tokenizer, ToolsNotShownError, ask)
    assert errors == []


AGENT = 'async def agent(chat, call_tool{}): pass'
SET = {
    'agent.mcp_servers': (', mcp', {'mcp_servers': ('python server.py',)}),
    'agent.tools': (', tools', {'tools': ('python',)}),
}


@pytest.mark.parametrize('field', SET)
def test_a_run_and_an_evaluation_with_tools_in_the_config_end_before_they_begin(tokenizer, tmp_path, field):
    parameter, fields = SET[field]
    (tmp_path / 'agent.py').write_text(AGENT.format(parameter))
    config = default_config()
    config.rollout.workflow = f'{tmp_path}/agent.py:agent'
    config.task.sandbox = 'none'
    config.agent.update(fields)
    if field == 'agent.mcp_servers':
        pytest.importorskip('mcp', reason="the package mcp is not installed: pip install -e '.[agents]'")
    load = lambda: load_workflow(TrackedConfig(config), tokenizer)
    if tokenizer.takes_tools:  # whether a prompt has their names is seen in the first one
        assert callable(load())
        return
    with pytest.raises(UserError, match=f'^{field}=.* is not shown to the model: .*{REMEDY}'):
        load()


@pytest.mark.parametrize('template', ['', 'package:configs/templates/hermes.jinja'])
def test_no_weight_is_loaded_before(tmp_path, template, smollm2_fields, monkeypatch):
    """The first step of a run and of an evaluation, before their models."""
    monkeypatch.setattr(workflow_builder, 'describe_text_model', lambda config: TextModel(None, build(
        smollm2_fields, HERMES if config.model.chat_template else '',
    )))  # fmt: skip
    (tmp_path / 'agent.py').write_text(AGENT.format(', tools'))
    config = default_config()
    config.model.chat_template = template
    config.agent.tools, config.rollout.workflow = ('python',), f'{tmp_path}/agent.py:agent'
    if template:
        workflow_builder.require_tools_shown(TrackedConfig(config))
        return
    for start in (
        lambda: build_run(config, tmp_path / 'run'),
        lambda: evaluate_model(config, tmp_path / 'evaluation'),
    ):
        with pytest.raises(UserError, match=rf'^agent\.tools=.*{REMEDY}'):
            start()


def test_an_agent_that_writes_its_tools_as_text_is_left_alone(smollm2_fields, tmp_path):
    (tmp_path / 'agent.py').write_text(AGENT.format(''))
    config = default_config()
    config.rollout.workflow, config.agent.tools = f'{tmp_path}/agent.py:agent', ('python',)
    config.task.sandbox = 'none'
    assert callable(load_workflow(TrackedConfig(config), build(smollm2_fields)))


DATA = {
    'tools': {'messages': [ASKED, {'role': 'assistant', 'content': 'a'}], 'tools': [TOOL]},
    'tools beside a question': {'question': 'q', 'answer': 'a', 'tools': [TOOL]},
}


@pytest.mark.parametrize('case', DATA)
def test_demonstrations_show_them_or_name_the_line(tokenizer, tmp_path, case):
    path = tmp_path / 'x.jsonl'
    path.write_text(json.dumps({'question': 'q', 'answer': 'a'}) + '\n' + json.dumps(DATA[case]))
    ask = lambda: read_demonstrations(str(path), tokenizer, '', 0.0).train[1].prompt_tokens
    hold(tokenizer, TaskError, ask, line=f'{path}:2: tools')


# What is shown.


def test_results_of_tools_are_shown_by_forms_that_write_any_turn(smollm2_fields):
    result = [[ASKED, {'role': 'assistant', 'content': 'a'}, RESULT]]
    require_shown(build(smollm2_fields), result, ())
    require_shown(CharacterTokenizer('qa7'), result, ())
    drops = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ToolsNotShownError, match=r"^messages\[2\]\.role='tool' is not shown to the model"):
        require_shown(build(smollm2_fields, drops), result, ())


def test_a_model_of_single_characters_shows_no_tools():
    for turns, tools in (([ASKED], [TOOL]), ([ASKED, CALLED], [])):
        with pytest.raises(ToolsNotShownError, match=REMEDY):
            make_form(CharacterTokenizer('q7')).render(turns, tools)


def test_the_first_conversation_that_hides_something_is_named(smollm2_fields):
    tokenizer = build(smollm2_fields, TEMPLATES['shows to a system turn alone'])
    with pytest.raises(ToolsNotShownError, match=r'^tools\[0\]=') as refused:
        tokenizer.encode_chats([[{'role': 'system', 'content': 's'}, ASKED], [ASKED]], [TOOL])
    assert refused.value.index == 1


# Nobody else makes prompts of conversations.

CALLERS = {
    'agents/dialogue.py': 'require_shown',
    'tasks/demonstrations.py': 'require_shown',
    'rollout/http/server/bridge.py': 'require_place',
    'tasks/task.py': None,  # questions of tasks, as user and system turns: no tools
    'text/tokenizer.py': None,  # the tokenizers themselves
}


def test_the_doors_are_all_that_there_are():
    root = pathlib.Path(areal_jax.__file__).parent
    found = set()
    for path in root.rglob('*.py'):
        source = path.read_text()
        if '_chat' not in source:
            continue
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        if any(
            isinstance(call.func, ast.Attribute) and call.func.attr in ('encode_chats', 'encode_chat', 'extend_chat')
            for call in calls
        ):
            found.add(str(path.relative_to(root)))
    assert found == set(CALLERS)
    for name, check in CALLERS.items():
        assert check is None or f'{check}(' in (root / name).read_text()


def test_pairs_show_them_or_name_the_line(smollm2_fields, tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_text(json.dumps({'prompt': 'q', 'chosen': 'a', 'rejected': 'b', 'tools': [TOOL]}))
    with pytest.raises(TaskError, match=r':1: '):
        read_pairs(str(path), build(smollm2_fields), '', 0.0)
