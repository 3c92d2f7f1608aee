"""SmolLM2-135M-Instruct learns to ask two tools: prices are known to one of them only, products to the other.

    python -m areal_jax.main_train --config=configs/agents/sft_shop.py --workdir=runs/sft_shop
    python -m areal_jax.main_train --config=configs/agents/shop.py --workdir=runs/shop

The reward is 1 if the last turn is the right number. docs/agents.md says what was measured.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import ListedTask
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import FinishReason

ITEMS = (
    'apple', 'ball', 'bell', 'boat', 'book', 'bottle', 'bowl', 'candle', 'chair', 'clock', 'coat', 'cup', 'desk',
    'drum', 'fan', 'flag', 'fork', 'hat', 'jar', 'kite', 'lamp', 'lemon', 'map', 'mirror', 'pan', 'pen', 'pillow',
    'plate', 'ring', 'rope', 'shirt', 'shoe', 'sock', 'spoon', 'table', 'towel', 'toy', 'truck', 'vase', 'wheel',
)  # fmt: skip
PROBLEMS = 1200
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _define(name: str, description: str, parameter: str) -> dict[str, object]:
    parameters = {'type': 'object', 'properties': {parameter: {'type': 'string'}}}
    return {'type': 'function', 'function': {'name': name, 'description': description, 'parameters': parameters}}


TOOLS = [_define('price', 'Computes with prices of items.', 'expression')]
TOOLS.append(_define('weight', 'Computes with weights of items.', 'expression'))


def build(tokenizer: Tokenizer, demonstrate: bool = False, held_out_fraction: float = 0.25) -> ListedTask:
    """Purchases; with `demonstrate`, each with a conversation to imitate."""
    problems = list(draw_problems())
    if demonstrate:
        problems = [{**problem, 'messages': demonstrate_tools(problem), 'tools': TOOLS} for problem in problems]
    return question_task(tokenizer, problems, score, held_out_fraction=held_out_fraction)


def draw_problems() -> Iterator[dict[str, Any]]:
    draws = random.Random(0)
    for number in range(PROBLEMS):
        first, second = draws.sample(ITEMS, 2)
        counts = draws.randint(11, 99), draws.randint(11, 99)
        goods = f'{counts[0]} {first}s and {counts[1]} {second}s'
        wanted = f'{counts[0]} * {first} + {counts[1]} * {second}'
        paid = draws.randint(10, 19) * 1000
        tool, question, expression = (
            ('price', f'What do {goods} cost?', wanted),
            ('weight', f'What do {goods} weigh?', wanted),
            ('price', f'I pay {paid} for {goods}. What do I get back?', f'{paid} - {wanted.replace("+", "-")}'),
        )[number % 3]
        values = {item: draws.randint(11, 99) for item in (first, second)}
        yield {
            'question': question,
            'answer': str(evaluate(expression, values)),
            'tool': tool,
            'expression': expression,
            'values': {
                tool: values,
                'weight' if tool == 'price' else 'price': {item: draws.randint(11, 99) for item in values},
            },
        }


def demonstrate_tools(problem: Mapping[str, Any]) -> list[dict[str, Any]]:
    call = {'name': problem['tool'], 'arguments': {'expression': problem['expression']}}
    return [
        {'role': 'user', 'content': problem['question']},
        {'role': 'assistant', 'content': f'<tool_call>{json.dumps(call)}</tool_call>', 'train': True},
        {'role': 'tool', 'content': problem['answer']},
        {'role': 'assistant', 'content': problem['answer']},
    ]


async def agent(chat, call_tool, problem):
    history = [{'role': 'user', 'content': problem['question']}]
    while True:
        reply = await chat(history, TOOLS)
        history.append(reply.message)
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            name, arguments = call['function']['name'], call['function']['arguments']

            async def use(name=name, arguments=arguments):
                return use_tool(problem, name, json.loads(arguments))

            result = await call_tool(name, arguments, use)
            history.append({'role': 'tool', 'tool_call_id': call['id'], 'content': result})


def use_tool(problem: Mapping[str, Any], name: str, arguments: Mapping[str, str]) -> str:
    """Returns the result that the model reads; what it raises, the model reads as an error."""
    if name not in problem['values']:
        raise ValueError(f'there is no tool {name}')
    return str(evaluate(arguments['expression'], problem['values'][name]))


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """Computes sums, differences and products of integers and items; raises ValueError or SyntaxError."""
    if len(expression) > 80:
        raise ValueError('the expression is too long')
    return _evaluate(ast.parse(expression, mode='eval').body, values)


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=item) if item in values:
            return values[item]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
    raise ValueError(f'no number, item, sum, difference or product: {ast.unparse(node)}')


def score(
    problem: Mapping[str, str], answer_text: str, finish_reason: FinishReason, episode: Mapping[str, list[dict]]
) -> float:
    """1 for the right number in the last turn, else 0."""
    last = episode['messages'][-1]['content'] or ''
    return float(finish_reason == 'stop' and re.findall(r'\d+', last)[-1:] == [problem['answer']])


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 12
    config.model.source = 'run'
    config.model.path = 'runs/sft_shop'
    config.task.name = 'package:configs/agents/shop.py:build'
    config.rollout.workflow = 'package:configs/agents/shop.py:agent'
    config.rollout.slots = 16
    config.rollout.decode_steps = 4
    config.rollout.group_size = 8
    config.rollout.max_new_tokens = 96
    config.rollout.context_tokens = 224
    config.rollout.block_tokens = 224  # on a CPU one long block is faster than two
    config.rollout.prefill_buckets = (256,)
    config.agent.max_turns = 3
    config.agent.max_turn_tokens = 48
    config.staleness.eta = 2.0
    config.learner.groups_per_update = 4
    config.learner.row_tokens = 640
    config.learner.row_loss_tokens = 480
    config.loss.behavior_weight_cap = 5.0
    config.evaluation.problems = 64
    config.evaluation.samples = 1
    config.checkpoint.every = 6
    return config
