import json

import numpy as np
import pytest

from areal_jax.installation import locate_file
from areal_jax.tasks import jsonl
from areal_jax.tasks.demonstrations import Demonstrations, contrast_task, read_demonstrations, solve_task
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.token_reversal import build, characters
from areal_jax.text.chat_template import GivenTemplate
from areal_jax.text.file_tokenizers import GgufTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.tasks.declared import task_values

TOKENIZER = CharacterTokenizer(''.join(map(chr, range(32, 127))))
ROWS = [{'question': f'{n} + 1 = ?', 'answer': f'It is {n + 1}'} for n in range(40)]


def write(path, rows):
    path.write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows) + '\n')
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / 'rows.jsonl', ROWS)


def texts(demonstrations):
    return [(TOKENIZER.decode(d.prompt_tokens), TOKENIZER.decode(d.answers[0])) for d in demonstrations]


def read(path, tokenizer, **changes):
    return read_demonstrations(path, tokenizer, **task_values('system_prompt', 'held_out_fraction', **changes))


def read_row(tmp_path, row, **values):
    return texts(read(write(tmp_path / 'x.jsonl', [row]), TOKENIZER, held_out_fraction=0.0, **values).train)


def test_every_line_is_on_one_side_with_an_end_token_after_its_answer(path):
    found = read(path, TOKENIZER)
    assert sorted(texts(found.train + found.held_out)) == sorted((r['question'], r['answer']) for r in ROWS)
    assert 3 < len(found.held_out) < 20
    assert {d.answers[0][-1] for d in found.train} == {TOKENIZER.eos_id}
    lines = {int(d.source.rpartition(':')[2]): d for d in found.train}
    assert all(texts([d])[0][0] == ROWS[line - 1]['question'] for line, d in lines.items())


def test_the_sides_are_those_of_the_task_that_rewards(path):
    held_out = {prompt for prompt, _ in texts(read(path, TOKENIZER).held_out)}
    assert held_out == {
        p['question']
        for p in jsonl.build(TOKENIZER, path, **task_values('answer', 'system_prompt', 'held_out_fraction')).problems[
            'held_out'
        ]
    }


def test_several_answers_to_one_question_are_kept_on_one_side(tmp_path):
    rows = [{'question': 'q?', 'answer': a} for a in 'ab'] + [
        {'messages': [{'role': r, 'content': c} for r, c in zip(('user', 'assistant'), ('q?', 'c'), strict=True)]}
    ]
    found = read(write(tmp_path / 'x.jsonl', rows), TOKENIZER, held_out_fraction=0.5)
    assert sorted(map(len, (found.train, found.held_out))) == [0, 3]


def test_messages_are_context_up_to_the_last_answer(tmp_path):
    turns = [('user', 'a'), ('assistant', 'b'), ('user', 'c'), ('assistant', 'd')]
    messages = [{'role': role, 'content': content} for role, content in turns]
    assert read_row(tmp_path, {'messages': messages}) == [('abc', 'd')]
    assert read_row(tmp_path, {'messages': messages}, system_prompt='S') == [('Sabc', 'd')]
    own = [{'role': 'system', 'content': 'T'}, *messages]
    assert read_row(tmp_path, {'messages': own}, system_prompt='S') == [('Tabc', 'd')]


class _ShowingTokenizer(CharacterTokenizer):
    """Its chat form begins with the tools."""

    takes_tools = True

    def encode_chats(self, conversations, tools=()):
        shown = [{'role': 'system', 'content': tool['function']['name']} for tool in tools]
        return super().encode_chats([[*shown, *conversation] for conversation in conversations])


def test_the_tools_of_a_line_are_shown(tmp_path):
    tools = [{'type': 'function', 'function': {'name': name}} for name in ('add', 'mul')]
    rows = [ROWS[0], {**ROWS[1], 'tools': tools}, {**ROWS[2], 'tools': tools[:1]}, {**ROWS[3], 'tools': None}]
    found = read(write(tmp_path / 'x.jsonl', rows), _ShowingTokenizer(TOKENIZER.characters), held_out_fraction=0.0)
    before = [text.removesuffix(row['question']) for row, (text, _) in zip(rows, texts(found.train), strict=True)]
    assert before == ['', 'addmul', 'add', '']


def test_a_task_shows_its_own_answers():
    tokenizer = CharacterTokenizer(characters(2))
    found = solve_task(build(tokenizer, symbols=2, length=3, held_out_fraction=0.25), tokenizer)
    assert (len(found.train), len(found.held_out)) == (6, 2)
    for d in found.train + found.held_out:
        assert tokenizer.decode(d.prompt_tokens)[2::-1] == tokenizer.decode(d.answers[0])


def demonstrations():
    tokenizer = CharacterTokenizer(characters(2))
    return solve_task(build(tokenizer, symbols=2, length=3, held_out_fraction=0.25), tokenizer)


def answers(groups):
    return [tuple(int(t) for t in g.trajectories[0].tokens) for g in groups]


def test_an_epoch_draws_each_once_and_the_next_in_another_order():
    stream = demonstrations().stream(seed=3)
    groups = [stream.draw() for _ in range(3 * stream.size)]
    assert [g.draw for g in groups] == list(range(18))
    epochs = [answers(groups[k : k + 6]) for k in (0, 6, 12)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == 6
    assert len(set(map(tuple, epochs))) > 1


def test_a_draw_is_a_group_of_one_whose_answer_is_in_the_loss():
    (trajectory,) = demonstrations().stream(seed=0).draw().trajectories
    # 'abc=' is read, 'cba' and EOS are in the loss
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 4
    assert trajectory.tokens.dtype == np.int32


def say(role, content, **fields):
    return {'role': role, 'content': content, **fields}


def conversation():
    return [say('user', 'q'), say('assistant', 'bb', train=True), say('tool', 'r'), say('assistant', 'd')]


@pytest.mark.parametrize('key', ['train', 'weight', 'loss', 'training'])
def test_a_marked_turn_is_trained_in_the_same_row_and_the_turns_between_are_read(tmp_path, key):
    turns = [
        say('user', 'q'),
        say('assistant', 'bb', **{key: 1}),
        say('tool', 'r'),
        say('user', 'u'),
        say('assistant', 'd'),
    ]
    [found] = read(write(tmp_path / 'x.jsonl', [{'messages': turns}]), TOKENIZER, held_out_fraction=0.0).train
    assert texts([found]) == [('q', 'bb<eos>rud')]
    # 1 token of the prompt, 7 of the answer, of which the last is never read; bb, d and two EOS are in the loss
    assert found.size == (7, 5)
    (trajectory,) = Demonstrations((found,), ()).stream(0).draw().trajectories
    assert trajectory.loss_mask.tolist() == [False, True, True, True, False, False, True, True]


def test_a_turn_after_the_first_trained_one_may_be_context(tmp_path):
    turns = [*conversation(), say('user', 'u'), say('assistant', 'e')]  # 'd' is not marked
    [found] = read(write(tmp_path / 'x.jsonl', [{'messages': turns}]), TOKENIZER, held_out_fraction=0.0).train
    assert texts([found]) == [('q', 'bb<eos>rd<eos>ue')]
    [mask] = found.trained
    assert mask.tolist() == [True] * 3 + [False] * 4 + [True] * 2


@pytest.mark.parametrize(('changed', 'message'), [
    ({2: say('system', 's')}, 'turns of system after a trained turn: only results of tools'),
    ({1: say('assistant', 'b', train=True, tool_calls=[1])}, r'messages\[1\]\.tool_calls='),
    ({1: say('assistant', ' ', train=True)}, r'messages\[1\]\.content=.* must be a text that is not empty'),
    ({0: say('user', 'q', train=True)}, r'messages\[0\]\.train=True would change what is trained'),
    ({3: say('assistant', 'd', train=False)}, r'messages\[3\]\.train=False would change what is trained'),
])  # fmt: skip
def test_a_conversation_that_cannot_be_one_row_is_refused(tmp_path, changed, message):
    turns = [changed.get(number, turn) for number, turn in enumerate(conversation())]
    with pytest.raises(TaskError, match=message):
        read(write(tmp_path / 'x.jsonl', [{'messages': turns}]), TOKENIZER)


def test_calls_of_an_untrained_turn_after_a_trained_one_are_refused(tmp_path, smollm2_fields):
    template = GivenTemplate(locate_file('package:configs/templates/hermes.jinja').read_text(), 't')
    calls = [{'function': {'name': 'add', 'arguments': {}}}]
    turns = [
        *conversation(),
        say('user', 'u'),
        say('assistant', '', tool_calls=calls),
        say('tool', 'r'),
        say('assistant', 'e'),
    ]
    with pytest.raises(TaskError, match=r'messages\[5\]\.tool_calls=.* write them into the content'):
        read(write(tmp_path / 'x.jsonl', [{'messages': turns}]), GgufTokenizer(smollm2_fields, 'f', template))


@pytest.mark.parametrize(('template', 'space'), [('hermes', '\n'), ('compact', '')])
def test_a_conversation_of_a_task_is_the_row_that_the_template_renders(smollm2_fields, template, space):
    text = locate_file(f'package:configs/templates/{template}.jinja').read_text()
    tokenizer = GgufTokenizer(smollm2_fields, 'f', GivenTemplate(text, 't'))
    tools = [{'type': 'function', 'function': {'name': 'add', 'parameters': {'properties': {'a': {}, 'b': {}}}}}]
    call = f'<tool_call>{space}{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}{space}</tool_call>'
    turns = [say('user', 'q'), say('assistant', call, train=True), say('tool', '3'), say('assistant', 'It is 3.')]
    task = question_task(
        tokenizer, [{'question': 'q', 'messages': turns, 'tools': tools}], score, held_out_fraction=0.0
    )
    [found] = solve_task(task, tokenizer).train
    called = {'role': 'assistant', 'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1, 'b': 2}}}]}
    [whole] = tokenizer.encode_chats([[turns[0], called, *turns[2:]]], tools)
    row = np.concatenate([found.prompt_tokens, *found.answers])
    assert whole[: len(row)].tolist() == row.tolist()
    trained = [tokenizer.decode(segment.tokens) for segment in found.segments()[0] if segment.policy_version == 0]
    assert trained == [call, 'It is 3.']
    with pytest.raises(TaskError, match='pairs are of single answers'):
        contrast_task(task, tokenizer)


def score(problem, answer_text, finish_reason):
    return 0.0


def test_a_run_does_not_go_on_with_other_turns_in_the_loss(tmp_path):
    found = [
        read(write(tmp_path / 'x.jsonl', [{'messages': turns}]), TOKENIZER, held_out_fraction=0.0).stream(0)
        for turns in ([say('user', 'q'), say('assistant', 'b', train=True), *more] for more in MORE)
    ]
    with pytest.raises(TaskError, match='not those of the saved run'):
        found[1].restore(found[0].state())


MORE = [
    [say('user', 'u'), say('assistant', 'c', train=train), say('user', 'u'), say('assistant', 'd')]
    for train in (True, False)
]


def test_a_restored_stream_goes_on_where_the_saved_one_was():
    stream = demonstrations().stream(seed=0)
    for _ in range(8):
        stream.draw()
    state = json.loads(json.dumps(stream.state()))
    resumed = demonstrations().stream(seed=0)
    resumed.restore(state)
    assert answers(resumed.draw() for _ in range(9)) == answers(stream.draw() for _ in range(9))


def test_a_stream_of_other_demonstrations_is_not_gone_on_with(tmp_path):
    whole = read(write(tmp_path / 'a.jsonl', ROWS), TOKENIZER)
    changed = read(write(tmp_path / 'b.jsonl', [{**r, 'answer': r['answer'] + '.'} for r in ROWS]), TOKENIZER)
    with pytest.raises(TaskError, match='not those of the saved run'):
        changed.stream(0).restore(whole.stream(0).state())
    with pytest.raises(TaskError, match='seed=0, this one seed=1'):
        whole.stream(1).restore(whole.stream(0).state())


def test_held_out_groups_are_distinct_and_no_more_than_there_are():
    found = demonstrations()
    assert len(set(answers(found.held_out_groups(99, 0)))) == len(found.held_out) == 2
    assert found.held_out_groups(0, 0) == []


def sized(*sizes):
    """Training demonstrations of (prompt, answer) tokens."""
    from areal_jax.tasks.demonstrations import Demonstration

    made = [Demonstration(np.ones(p, np.int32), (np.ones(a, np.int32),), f'f:{i}') for i, (p, a) in enumerate(sizes)]
    return Demonstrations(tuple(made), ())


def test_the_last_token_needs_no_place():
    # 5 + 4 tokens: 8 are read, 4 are in the loss
    assert sized((5, 4)).fitting((8, 4), 'refuse').dropped == 0
    assert sized((5, 4)).fitting((7, 4), 'drop').dropped == 1
    assert sized((5, 4)).fitting((8, 3), 'drop').dropped == 1


def test_what_fits_no_row_is_refused_by_name_with_the_fix_or_dropped():
    found = sized((5, 4), (9, 4), (2, 8))
    with pytest.raises(TaskError) as error:
        found.fitting((8, 6), 'refuse')
    assert str(error.value) == (
        'f:1 takes 12 places of a row, 4 of them in the loss, and no row has as many; 2 of 3 demonstrations are too '
        'long: raise learner.row_tokens to 12 (it is 8) and learner.row_loss_tokens to 8 (it is 6), or leave them out '
        'with task.over_length=drop'
    )
    kept = found.fitting((8, 6), 'drop')
    assert ([d.source for d in kept.train], kept.dropped) == (['f:0'], 2)
    with pytest.raises(TaskError, match=r"on the side 'train' \(3 fit no row.*raise learner\.row_tokens"):
        found.fitting((2, 2), 'drop').stream(0)


GOOD = {'question': 'q', 'answer': 'a'}
USER, ASSISTANT = ({'role': role, 'content': 'x'} for role in ('user', 'assistant'))
BAD = {
    'no JSON': ('{"question": ', 'not JSON'),
    'a list': ([1], 'expected a JSON object, got'),
    'no answer': (
        {'question': 'q'},
        r"expected an object with question and answer, or messages; it has \['question'\]",
    ),
    'a number': ({'question': 'q', 'answer': 2}, 'answer=2 must be a text'),
    'nothing': ({'question': None, 'answer': 'a'}, 'question=None must be a text'),
    'empty answer': ({'question': 'q', 'answer': ' \n'}, r"answer=' \\n' must be a text that is not empty"),
    'empty question': ({'question': '', 'answer': 'a'}, "question='' must be a text that is not empty"),
    'no messages': ({'messages': []}, r'roles \[\]; they must end with assistant, after a user'),
    'no role': ({'messages': [{'content': 'x'}, ASSISTANT]}, r"messages\[0\] needs role, each a text; .*\['content'\]"),
    'role null': ({'messages': [USER, ASSISTANT | {'role': None}]}, r'messages\[1\] needs role, each a text'),
    'content parts': (
        {'messages': [USER | {'content': [{'type': 'text', 'text': 'x'}]}, ASSISTANT]},
        r'messages\[0\] needs content, each a text',
    ),
    'content empty': ({'messages': [USER, ASSISTANT | {'content': ''}]}, r"messages\[1\]\.content='' must be a text"),
    'half a character': (
        {'messages': [{'role': 'system', 'content': '\ud800'}, USER, ASSISTANT]},
        r"messages\[0\]\.content has '\\ud800' at character 0",
    ),
    'ends with user': ({'messages': [USER, ASSISTANT, USER]}, 'they must end with assistant'),
    'nobody asks': ({'messages': [ASSISTANT]}, 'they must end with assistant, after a user'),
    'messages of text': ({'messages': 'hello'}, 'messages must be a list of objects with role and content'),
    'message of text': ({'messages': ['hello']}, 'messages must be a list of objects with role and content'),
    'tools of text': (GOOD | {'tools': 'add'}, 'tools must be a list of objects'),
    'a tool without a function': (GOOD | {'tools': [{'type': 'function'}]}, 'tools must be a list of objects'),
    'unknown character': ({'question': 'q', 'answer': 'ä'}, 'characters'),
}


@pytest.mark.parametrize('case', BAD)
def test_a_bad_line_is_named(tmp_path, case):
    row, message = BAD[case]
    path = write(tmp_path / 'x.jsonl', [GOOD, '', row])
    with pytest.raises(TaskError, match=message) as error:
        read(path, TOKENIZER)
    assert str(error.value).startswith(f'{path}:3: ')


def test_context_may_be_blank_and_messages_may_have_more_fields(tmp_path):
    messages = [{'role': 'system', 'content': ' '}, USER | {'id': 3, 'weight': 0}, ASSISTANT]
    assert read_row(tmp_path, {'messages': messages, 'id': 7}) == [(' x', 'x')]


def test_an_empty_side_is_an_error_where_it_is_needed(path):
    everything = read(path, TOKENIZER, held_out_fraction=0.0)
    with pytest.raises(TaskError, match=r"'held_out'; change task\.held_out_fraction, set evaluation\.problems=0"):
        everything.held_out_groups(3, 0)
    assert everything.held_out_groups(0, 0) == []


def test_the_tokens_are_those_of_the_whole_conversation_in_the_chat_template(tmp_path, smollm2_fields):
    tokenizer = GgufTokenizer(smollm2_fields)
    row = {'question': 'What is 3*12?', 'answer': 'It is <<3*12=36>>36.\n#### 36'}
    (d,) = read(write(tmp_path / 'x.jsonl', [row]), tokenizer, held_out_fraction=0.0).train
    turns = [{'role': 'user', 'content': row['question']}, {'role': 'assistant', 'content': row['answer']}]
    whole = tokenizer.encode_chat(turns)  # goes on with a line end and the next generation prompt
    both = np.concatenate([d.prompt_tokens, d.answers[0]])
    np.testing.assert_array_equal(whole[: len(both)], both)
    assert both[-1] == tokenizer.eos_id


def test_an_answer_that_spells_the_end_token_is_refused(tmp_path, smollm2_fields):
    path = write(tmp_path / 'x.jsonl', [{'question': 'q', 'answer': 'a<|im_end|>b'}])
    with pytest.raises(TaskError, match=r'x\.jsonl:1: the answer .* contains the text of an end token'):
        read(path, GgufTokenizer(smollm2_fields))
