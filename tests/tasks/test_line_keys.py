"""Keys of lines and messages: used, or refused by file and line, or ignored and named once."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from areal_jax.tasks import jsonl
from areal_jax.tasks.code import code_task
from areal_jax.tasks.demonstrations import read_demonstrations, read_pairs
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import OF_CODE, OF_DEMONSTRATIONS, OF_MESSAGES, OF_PAIRS, OF_TASKS, LineKeys
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.text.test_extension import HERMES, build

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'your_data.md'
TOKENIZER = CharacterTokenizer(''.join(map(chr, range(32, 127))))
USER, ANSWER = {'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}
TOOL = {'type': 'function', 'function': {'name': 'multiply', 'parameters': {'type': 'object'}}}
CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'multiply', 'arguments': '{"a": 17}'}}
READERS = {
    'demonstrations': (
        lambda path, tokenizer: read_demonstrations(str(path), tokenizer, '', 0.0).train,
        {'question': 'q', 'answer': 'a'}, OF_DEMONSTRATIONS, {'tools'},
    ),
    'messages': (
        lambda path, tokenizer: read_demonstrations(str(path), tokenizer, '', 0.0).train,
        {'messages': [USER, ANSWER]}, OF_DEMONSTRATIONS, {'tools'},
    ),
    'pairs': (
        lambda path, tokenizer: read_pairs(str(path), tokenizer, '', 0.0).train,
        {'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}, OF_PAIRS, {'tools'},
    ),
    'tasks': (
        lambda path, tokenizer: jsonl.read_problems(path, 'integer'), {'question': 'q', 'answer': '1'}, OF_TASKS, set(),
    ),
    'code': (
        lambda path, tokenizer: code_task.read_problems(str(path)),
        {'question': 'q', 'entry_point': 'f', 'tests': [[[1], 2]]}, OF_CODE, set(),
    ),
}  # fmt: skip
CASES = [(kind, key) for kind, (*_, telling, used) in READERS.items() for key in telling if key not in used]


def write(path, *rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


@pytest.mark.parametrize(('kind', 'key'), CASES)
def test_a_key_that_would_change_what_is_trained_is_refused_by_line(tmp_path, kind, key):
    read, row, *_ = READERS[kind]
    path = write(tmp_path / 'x.jsonl', row, {**row, key: [0.5]})
    with pytest.raises(TaskError, match=rf'^{re.escape(str(path))}:2: {key}=\[0\.5\] would change what is trained'):
        read(path, TOKENIZER)


@pytest.mark.parametrize('kind', READERS)
def test_keys_that_say_nothing_are_let_through(tmp_path, kind):
    read, row, telling, _ = READERS[kind]
    empty = [dict.fromkeys(telling, nothing) for nothing in (None, [], '', {})]
    ones = dict.fromkeys(('weight', 'weights', 'sample_weight'), 1)
    rows = [extra | row for extra in (*empty, ones)]
    assert len(read(write(tmp_path / 'x.jsonl', *rows), TOKENIZER)) >= 1


@pytest.mark.parametrize('kind', READERS)
def test_other_keys_are_ignored_and_named_once(tmp_path, kind, capsys):
    read, row, *_ = READERS[kind]
    path = write(tmp_path / 'x.jsonl', row, {**row, 'id': 1, 'source': 's'}, {**row, 'id': 2, 'level': 'easy'})
    read(path, TOKENIZER)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"warning: task.path={str(path)!r} has keys that nothing reads: 'id' (of 2), 'source' (of 1), 'level' (of 1)"
    ]


def test_a_misspelled_key_is_told_with_the_one_that_is_meant(capsys):
    keys = LineKeys('x.jsonl', ('question', 'answer', 'tools'), {})
    keys.require({'question': 'q', 'answr': 1, 'zz': 2}, 'x.jsonl:1')
    assert keys.describe() == (
        "task.path='x.jsonl' has keys that nothing reads: 'answr' (of 1; did you mean answer?), 'zz' (of 1)"
    )


def test_of_two_names_of_one_thing_the_one_that_is_not_read_is_named(tmp_path, capsys):
    path = write(tmp_path / 'x.jsonl', {'problem': 'q', 'solution': r'\boxed{1}', 'answer': '1'})
    assert jsonl.read_problems(path, 'integer') == [{'question': 'q', 'answer': '1'}]
    assert "nothing reads: 'solution' (of 1)" in capsys.readouterr().err
    turns = {'messages': [USER, ANSWER], 'question': 'other', 'answer': 'other'}
    read_demonstrations(str(write(path, turns)), TOKENIZER, '', 0.0)
    assert "nothing reads: 'question' (of 1), 'answer' (of 1)" in capsys.readouterr().err


# Messages.


def read_turns(tmp_path, tokenizer, *turns, **row):
    path = write(tmp_path / 'x.jsonl', {'messages': list(turns), **row})
    (found,) = read_demonstrations(str(path), tokenizer, '', 0.0).train
    return tokenizer.decode(found.prompt_tokens)


@pytest.mark.parametrize('key', OF_MESSAGES)
@pytest.mark.parametrize('place', [0, 1, 2])
def test_a_telling_key_of_a_message_is_refused_where_nothing_reads_it(tmp_path, key, place):
    turns = [{'role': 'system', 'content': 's'}, USER, ANSWER]
    turns[place] = {**turns[place], key: [CALL] if key == 'tool_calls' else 'x'}
    with pytest.raises(TaskError, match=rf'x\.jsonl:1: messages\[{place}\]\.{key}='):
        read_turns(tmp_path, TOKENIZER, *turns)


@pytest.mark.parametrize('kind', ['messages', 'prompt'])
def test_messages_of_pairs_and_demonstrations_are_read_alike(tmp_path, kind):
    turns = [{**USER, 'images': ['a.png']}]
    row = {'messages': [*turns, ANSWER]} if kind == 'messages' else {'prompt': turns, 'chosen': 'a', 'rejected': 'b'}
    read = READERS['messages' if kind == 'messages' else 'pairs'][0]
    with pytest.raises(TaskError, match=rf':1: {kind}\[0\]\.images=.* would change what is trained'):
        read(write(tmp_path / 'x.jsonl', row), TOKENIZER)


@pytest.mark.parametrize(('place', 'value', 'is_let_through'), [
    (0, 0, True), (0, 1, False), (0, 0.5, False), (1, 0, True), (1, 0.5, False), (3, 1, True), (3, 0, False),
    (3, 0.5, False), (3, True, True), (1, False, True),
])  # fmt: skip
def test_a_weight_may_say_what_is_done(tmp_path, place, value, is_let_through):
    turns = [USER, ANSWER, USER, ANSWER]
    turns[place] = {**turns[place], 'weight': value}
    if is_let_through:
        assert read_turns(tmp_path, TOKENIZER, *turns) == 'qaq'
        return
    with pytest.raises(TaskError, match=rf':1: messages\[{place}\]\.weight={value} would change what is trained'):
        read_turns(tmp_path, TOKENIZER, *turns)


def test_calls_and_results_before_the_answer_are_shown(tmp_path, smollm2_fields):
    turns = [USER, {'role': 'assistant', 'content': None, 'tool_calls': [CALL]}, {'role': 'tool', 'content': '68'}]
    text = read_turns(tmp_path, build(smollm2_fields, HERMES), *turns, ANSWER, tools=[TOOL])
    assert '<tool_call>\n{"name": "multiply", "arguments": {"a": 17}}\n</tool_call>' in text
    assert '<tool_response>\n68\n</tool_response>' in text
    with pytest.raises(TaskError, match=r'x\.jsonl:1: messages\[1\]\.tool_calls=.*model\.chat_template'):
        read_turns(tmp_path, build(smollm2_fields), *turns, ANSWER)


def test_calls_beside_the_content_of_the_answer_are_refused(tmp_path, smollm2_fields):
    with pytest.raises(TaskError, match=r':1: messages\[1\]\.tool_calls=.*write them into the content'):
        read_turns(tmp_path, build(smollm2_fields, HERMES), USER, {**ANSWER, 'tool_calls': [CALL]}, tools=[TOOL])


READS = (
    "{% for m in messages %}{{ m.name ~ ': ' if m.name }}{{ '<think>' ~ m.reasoning_content if m.reasoning_content }}"
    '{{ m.content }}\n{% endfor %}'
)


def test_what_the_template_reads_is_used(tmp_path, smollm2_fields):
    tokenizer = build(smollm2_fields, READS)
    turns = [{**USER, 'name': 'Ann'}, {**ANSWER, 'reasoning_content': 'hm'}, USER]
    assert read_turns(tmp_path, tokenizer, *turns, ANSWER) == 'Ann: q\n<think>hma\nq\n'
    with pytest.raises(TaskError, match=r'messages\[3\]\.reasoning_content=.* in the marks of the model'):
        read_turns(tmp_path, tokenizer, *turns, {**ANSWER, 'reasoning_content': 'hm'})


def test_a_name_that_is_not_shown_is_refused_though_the_template_reads_names_of_tools(tmp_path, smollm2_fields):
    with pytest.raises(TaskError, match=r":1: messages\[0\]\.name='Ann' would change"):
        read_turns(tmp_path, build(smollm2_fields, HERMES), {**USER, 'name': 'Ann'}, ANSWER)
    result = {'role': 'tool', 'content': '68', 'name': 'multiply', 'tool_call_id': 'c'}  # says which call it is of
    calls = {**ANSWER, 'tool_calls': [CALL]}
    assert '68' in read_turns(tmp_path, build(smollm2_fields, HERMES), USER, calls, result, ANSWER, tools=[TOOL])


def test_keys_of_messages_that_nothing_reads_are_named(tmp_path, capsys):
    assert read_turns(tmp_path, TOKENIZER, {**USER, 'id': 3}, {**ANSWER, 'id': 4, 'refusal': None}) == 'q'
    assert "keys that nothing reads: 'messages.id' (of 2), 'messages.refusal' (of 1)" in capsys.readouterr().err


def test_pairs_show_tools(tmp_path, smollm2_fields):
    row = {'prompt': 'q', 'chosen': 'a', 'rejected': 'b', 'tools': [TOOL]}
    tokenizer = build(smollm2_fields, HERMES)
    (pair,) = read_pairs(str(write(tmp_path / 'x.jsonl', row)), tokenizer, '', 0.0).train
    assert 'multiply' in tokenizer.decode(pair.prompt_tokens)


# The page.


def test_the_page_publishes_every_key():
    page = PAGE.read_text()
    section = page[page.index('## Keys of a line') :]
    rows = [line.split('|') for line in section.splitlines() if line.startswith('| `')]
    listed = {key: row[2:] for row in rows for key in re.findall(r'`(\w+)`', row[1])}
    for column, table in enumerate((OF_TASKS, OF_CODE, OF_DEMONSTRATIONS, OF_PAIRS, OF_MESSAGES)):
        assert {key for key, row in listed.items() if row[column].strip()} == set(table), column
