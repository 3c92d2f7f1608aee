"""Chat templates: whatever one does ends in a text or in one sentence, soon and in little memory; what they call and
see, as in transformers; the one with Hermes notation."""

from __future__ import annotations

import json
import re
import resource
import threading

import pytest

from areal_jax.installation import locate_file
from areal_jax.text.chat_template import ChatTemplate, ConversationError, TokenizerError
from areal_jax.text.tokenizer import chat_messages

PLAIN = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def render(source, *questions, cpu_seconds=0.5):
    template = ChatTemplate(source, {'eos_token': '<e>'}, 'model/chat_template.jinja', cpu_seconds)
    return template.render([chat_messages(question) for question in questions or ('hi',)])


def test_conversations_keep_their_order_and_every_character():
    questions = ['a', 'naïve\n数学 😀', '\ud800', '']
    assert render(PLAIN, *questions) == [f'{question}<e>' for question in questions]
    assert ChatTemplate(PLAIN, {}, 'f').render([]) == []


SHOWS_TOOLS = '{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].tool_calls[0].function.arguments }}'


def test_tools_are_shown_by_a_template_that_names_them():
    tools = [{'type': 'function', 'function': {'name': name}} for name in ('add', 'multiply')]
    call = {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1}}}]}
    template = ChatTemplate(SHOWS_TOOLS, {'tools': None}, 'f')
    assert (template.takes_tools, ChatTemplate(PLAIN, {}, 'f').takes_tools) == (True, False)
    assert template.render([[call]], tools) == ["add multiply {'a': 1}"]
    assert not ChatTemplate('{% set tools = 1 %}{{ messages[0].tools }}', {}, 'f').takes_tools


def test_many_conversations_cost_one_process():
    texts = render(PLAIN, *map(str, range(3000)), cpu_seconds=10)
    assert texts == [f'{n}<e>' for n in range(3000)]


RAISING = {
    'undefined': ('{{ nothing.at.all }}', "UndefinedError: 'nothing' is undefined"),
    'type': ("{{ 'a' + 1 }}", 'TypeError: can only concatenate str'),
    'zero': ('{{ 1 / 0 }}', 'ZeroDivisionError: division by zero'),
    'security': ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    'refusal': ("{{ raise_exception('no system turns') }}", 'it refuses the messages: no system turns'),
    'include': ("{% include 'other' %}", 'TypeError: no loader'),
    'range': ('{% for i in range(10**9) %}x{% endfor %}', 'OverflowError: Range too big'),
    'recursion': ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'RecursionError: maximum recursion depth'),
    'filter': ('{{ messages | no_such_filter }}', 'No filter named'),
}


@pytest.mark.parametrize('case', RAISING)
def test_a_template_that_raises_is_named_with_its_reason(case):
    source, reason = RAISING[case]
    with pytest.raises((TokenizerError, ConversationError)) as error:
        render(source)
    assert str(error.value).startswith('model/chat_template.jinja: the chat template ')
    assert reason in str(error.value)
    assert '\n' not in str(error.value)


LOOP = '{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}'
EXPLODING = {
    'silent loop': LOOP.replace('BODY', ''),
    'loop that writes': LOOP.replace('BODY', 'x'),
    'branching recursion': '{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}',
    'power': '{{ 10 ** (10 ** 10) }}',
    'constant': "{{ 'a' * 10 ** 10 }}",
    'multiplied': "{% set n = 10 ** 10 %}{{ ('a' * n) | length }}",
    'concatenated': (
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x|length }}"
    ),
    'list': '{% set s = [0] * 10 ** 10 %}{{ s | length }}',
    'filter': "{{ 'a' | center(10 ** 10) | length }}",
    'format': "{{ '%010000000000d' % 1 }}",
    'written at once': "{{ 'a' * 10 ** 8 }}",
}


@pytest.mark.parametrize('case', EXPLODING)
def test_a_template_that_explodes_ends_soon_and_costs_this_process_nothing(case):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConversationError, match=r'^model/chat_template\.jinja: the chat template gives no prompt: '):
        render(EXPLODING[case])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB; 'a' * 10**8 has 97_656


def test_a_loop_without_end_is_named_as_such():
    with pytest.raises(
        ConversationError, match=r'gives no prompt: it takes more than 0\.5 s of CPU time\. Use the template'
    ):
        render(EXPLODING['silent loop'])


def test_the_conversation_at_fault_is_counted():
    source = "{{ 'fine' if messages[0]['content'] != 'bad' else raise_exception('bad') }}"
    with pytest.raises(ConversationError) as error:
        render(source, 'a', 'b', 'bad', 'c')
    assert error.value.index == 2


UNREADABLE = {
    'syntax': ('{% if %}', 'cannot be read: line 1: Expected an expression'),
    'unknown block': ('{% generate %}', "cannot be read: line 1: Encountered unknown tag 'generate'"),
    'nested': ('{{ ' + '(' * 50_000 + '1' + ')' * 50_000 + ' }}', 'cannot be read: it is nested too deep'),
    'huge': ('x' * 2**19, 'has 524288 characters, more than 262144'),
    'number': (7, 'is a int, not a text'),
}


@pytest.mark.parametrize('case', UNREADABLE)
def test_a_template_that_cannot_be_read_is_refused_when_it_is_loaded(case):
    source, reason = UNREADABLE[case]
    with pytest.raises(TokenizerError) as error:
        ChatTemplate(source, {}, 'model/chat_template.jinja')
    assert str(error.value).startswith('model/chat_template.jinja: the chat template ')
    assert reason in str(error.value)


def test_usual_conversations_do_not_wait_for_a_large_one():
    source = (
        '{% if messages[0].content|length > 70000 %}{% for i in range(100000) %}{% for j in range(100000) %}'
        '{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}'
    )
    template, ended = ChatTemplate(source, {}, 'file', cpu_seconds=2.0), []

    def render_large():
        with pytest.raises(ConversationError, match=r'more than 2\.0 s of CPU time'):
            template.render([chat_messages('a' * 80_000)])
        ended.append(True)

    thread = threading.Thread(target=render_large)
    thread.start()
    assert template.render([chat_messages('small')]) == ['small']
    assert not ended
    thread.join()
    assert ended
    template.close()


VALUE = {'b': [1, 'é<&'], 'a': {'d': None, 'c': 1.5}}


def render_one(source, messages=({'role': 'user', 'content': 'x'},), day='', **values):
    template = ChatTemplate(source, values, 'file', day=day)
    [text] = template.render([messages])
    template.close()
    return text


@pytest.mark.parametrize(('written', 'options'), [
    ('tojson', {}),
    ('tojson(ensure_ascii=true)', {'ensure_ascii': True}),
    ('tojson(true)', {'ensure_ascii': True}),  # its first argument, as in transformers
    ('tojson(indent=2)', {'indent': 2}),
    ('tojson(indent="\t")', {'indent': '\t'}),
    ('tojson(separators=(",", ":"))', {'separators': (',', ':')}),
    ('tojson(separators=[", ", " : "], sort_keys=true)', {'separators': (', ', ' : '), 'sort_keys': True}),
    ('tojson(ensure_ascii=false, indent=4, separators=(",", ": "), sort_keys=true)',
     {'indent': 4, 'separators': (',', ': '), 'sort_keys': True}),
])  # fmt: skip
def test_tojson_is_json_dumps(written, options):
    assert render_one(f'{{{{ value | {written} }}}}', value=VALUE) == json.dumps(
        VALUE, **{'ensure_ascii': False} | options
    )


def test_what_a_model_writes_may_be_marked():
    source = (
        '{% for m in messages %}{% if m.role == "assistant" %}{%- generation -%} {{ m.content }}|{% endgeneration %}'
        '{% else %}{{ m.content }};{% endif %}{% endfor %}{{ after is defined }}'
    )
    chat = [{'role': role, 'content': text} for role, text in (('user', 'a'), ('assistant', 'b'), ('user', 'c'))]
    assert render_one(source, chat) == 'a;b|c;False'
    with pytest.raises(ValueError, match='cannot be read: line 1'):
        render_one('{% generation %}a')


def test_time_is_that_of_the_day():
    assert render_one('{{ strftime_now("%d %b %Y, %H:%M") }}', day='2024-07-26') == '26 Jul 2024, 00:00'
    assert render_one('{{ strftime_now is defined }}', day='off') == 'False'


@pytest.mark.parametrize(('message', 'seen'), [
    ({'content': None, 'tool_calls': None}, []),
    ({'content': '', 'name': 0}, [('content', ''), ('name', 0)]),
    ({'reasoning': 'r'}, [('reasoning', 'r'), ('reasoning_content', 'r'), ('thinking', 'r')]),
    ({'thinking': 't', 'reasoning': 'r'}, [('reasoning', 'r'), ('reasoning_content', 't'), ('thinking', 't')]),
    ({'reasoning_content': None, 'reasoning': ''}, [('reasoning', ''), ('reasoning_content', ''), ('thinking', '')]),
])  # fmt: skip
def test_a_message_has_no_names_without_a_value_and_its_reasoning_under_all_of_them(message, seen):
    assert json.loads(render_one('{{ messages[0] | dictsort | tojson }}', [message])) == [list(pair) for pair in seen]


TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
SYSTEM, USER = {'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'q'}


@pytest.fixture(scope='module')
def template():
    return ChatTemplate(locate_file('package:configs/templates/hermes.jinja').read_text(), {}, 'hermes.jinja')


def call(name, arguments):
    return {'id': 'c', 'type': 'function', 'function': {'name': name, 'arguments': arguments}}


def turns(text):
    return re.findall(r'<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)', text, re.DOTALL)


def test_a_chat_without_tools_is_plain_chatml(template):
    assert template.takes_tools
    assert template.render([[SYSTEM, USER]]) == [
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'
    ]


def test_tools_stand_in_the_one_system_turn(template):
    for messages, begins in (([USER], 'These functions'), ([SYSTEM, USER], 'Be brief.\n\nThese functions')):
        (role, text), *others = turns(template.render([messages], [TOOL, TOOL])[0])
        assert (role, text[: len(begins)]) == ('system', begins)
        shown = re.search(r'<tools>\n(.*)\n</tools>', text, re.DOTALL)[1].split('\n')
        assert [json.loads(line) for line in shown] == [TOOL, TOOL]
        assert others == [('user', 'q'), ('assistant', '')]


def read_calls(text):
    """(content, calls) of a turn: what a reader of Hermes notation finds."""
    content, *blocks = re.split(r'\n?<tool_call>\n', text)
    return content, [json.loads(block.removesuffix('\n</tool_call>')) for block in blocks]


@pytest.mark.parametrize('content', ['', 'Let me see.\n\nNow:'])
@pytest.mark.parametrize('arguments', [[{'a': 1, 'b': 'é"\n'}], [{}, {'c': [None, {'d': 1.5}]}]])
def test_text_and_calls_of_an_answer_come_back(template, content, arguments):
    answer = {'role': 'assistant', 'content': content, 'tool_calls': [call('add', value) for value in arguments]}
    found = turns(template.render([[USER, answer]], [TOOL])[0])[2]
    assert found[0] == 'assistant'
    assert read_calls(found[1]) == (content, [{'name': 'add', 'arguments': value} for value in arguments])


def test_arguments_in_a_text_stay_as_the_model_wrote_them(template):
    answer = {'role': 'assistant', 'content': None, 'tool_calls': [call('add', '{"a":  1}'), call('add', '{broken')]}
    text = turns(template.render([[USER, answer]], [TOOL])[0])[2][1]
    first = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    assert text == f'{first}\n<tool_call>\n{{"name": "add", "arguments": {{broken}}\n</tool_call>'


def test_results_that_follow_each_other_are_one_turn(template):
    results = [{'role': 'tool', 'content': text} for text in ('3', '4')]
    answer = {'role': 'assistant', 'content': 'a'}
    found = turns(template.render([[USER, answer, *results, USER, answer, results[0]]])[0])
    blocks = ['\n'.join(f'<tool_response>\n{text}\n</tool_response>' for text in given) for given in ('34', '3')]
    roles = ['user', 'assistant', 'user', 'user', 'assistant', 'user', 'assistant']
    assert found == list(zip(roles, ['q', 'a', blocks[0], 'q', 'a', blocks[1], ''], strict=True))
