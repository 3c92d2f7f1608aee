"""configs/agents: what is demonstrated earns the reward, tools refuse what they must, and a short form trains."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from areal_jax.agents.dialogue import NotationParser, Reply, TokenizerFormat
from areal_jax.app.command_line import load_config
from areal_jax.app.library import build_run
from areal_jax.plugins import load_module
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from areal_jax.text.tokenizer import CharacterTokenizer

SHOP = load_module('package:configs/agents/shop.py:build', 'task.name')
PROBLEMS = list(SHOP.draw_problems())
TOKENIZER = CharacterTokenizer(''.join(map(chr, range(32, 127))))


def play(problem, *answers):
    """The episode, as the scorer gets it, of an agent whose policy says these texts."""
    form = TokenizerFormat(TOKENIZER, NotationParser(TOKENIZER, NOTATIONS['hermes']))
    left, tools = list(answers), []
    messages = []

    async def chat(history, offered):
        message, _ = form.parse(TOKENIZER.encode(left.pop(0)), offered, 'call')
        messages[:] = [*history, message]
        return Reply(message, 'tool_calls' if message.get('tool_calls') else 'stop')

    async def call_tool(name, arguments, tool):
        try:
            text = await tool()
        except Exception as error:
            text = f'error: {type(error).__name__}: {error}'
        tools.append({'name': name, 'arguments': arguments, 'text': text, 'failed': False})
        return text

    asyncio.run(SHOP.agent(chat, call_tool, problem))
    return {'messages': messages, 'tools': tools}


def test_what_is_demonstrated_earns_the_reward():
    for problem in PROBLEMS[:30]:
        _, call, result, answer = SHOP.demonstrate_tools(problem)
        episode = play(problem, call['content'], answer['content'])
        assert [tool['text'] for tool in episode['tools']] == [result['content']]
        assert SHOP.score(problem, '', 'stop', episode) == 1
        assert SHOP.score(problem, '', 'length', episode) == 0


def test_prices_and_weights_are_in_no_prompt_and_differ():
    for problem in PROBLEMS:
        named = {int(number) for number in re.findall(r'\d+', problem['question'])}
        assert int(problem['answer']) not in named
    other = {'price': 'weight', 'weight': 'price'}
    for problem in PROBLEMS[:30]:
        call = {'name': other[problem['tool']], 'arguments': {'expression': problem['expression']}}
        [tool] = play(problem, f'<tool_call>{json.dumps(call)}</tool_call>', '')['tools']
        assert tool['text'] != problem['answer']


@pytest.mark.parametrize(
    'expression', ['1 / 2', 'apple ** 9', 'open("x")', 'x.y', '1 if 1 else 2', '1 +', '9' * 81, 'unicorn']
)
def test_a_tool_computes_nothing_else(expression):
    with pytest.raises((ValueError, SyntaxError)):
        SHOP.evaluate(expression, {'apple': 3})


def test_a_wrong_call_is_an_error_that_the_model_reads_and_may_correct():
    problem = PROBLEMS[0]
    good = SHOP.demonstrate_tools(problem)[1]['content']
    for wrong, reason in (
        ('<tool_call>{"name": "price", "arguments": {"sum": "1"}}</tool_call>', 'KeyError'),
        ('<tool_call>{"name": "cost", "arguments": {"expression": "1"}}</tool_call>', 'there is no tool cost'),
    ):
        episode = play(problem, wrong, good, problem['answer'])
        assert re.match(rf'error: .*{reason}', episode['tools'][0]['text'])
        assert SHOP.score(problem, '', 'stop', episode) == 1


@pytest.mark.slow
def test_the_recipe_trains_in_a_short_form(tmp_path):
    start = load_config('configs/agents/sft_shop.py')
    start.run.steps, start.learner.groups_per_update, start.evaluation.problems = 1, 4, 0
    build_run(start, tmp_path / 'sft').train()
    config = load_config('configs/agents/shop.py')
    config.run.steps, config.rollout.group_size, config.learner.groups_per_update = 1, 2, 1
    config.learner.filter_equal_rewards = False
    config.evaluation.problems = 2
    config.model.path = str(tmp_path / 'sft')
    build_run(config, tmp_path / 'rl').train()
    agents = json.loads((tmp_path / 'rl' / 'report.json').read_text())['agents']
    assert sum(agents['ended'].values()) >= 2
    assert '| agents |' in (tmp_path / 'rl' / 'report.md').read_text()
