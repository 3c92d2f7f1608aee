"""What chat templates can call and see, as in transformers: expected texts by json.dumps and by hand."""

from __future__ import annotations

import json

import pytest

from areal_jax.text.chat_template import ChatTemplate

VALUE = {'b': [1, 'é<&'], 'a': {'d': None, 'c': 1.5}}


def render(source, messages=({'role': 'user', 'content': 'x'},), day='', **values):
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
    assert render(f'{{{{ value | {written} }}}}', value=VALUE) == json.dumps(VALUE, **{'ensure_ascii': False} | options)


def test_what_a_model_writes_may_be_marked():
    source = (
        '{% for m in messages %}{% if m.role == "assistant" %}{%- generation -%} {{ m.content }}|{% endgeneration %}'
        '{% else %}{{ m.content }};{% endif %}{% endfor %}{{ after is defined }}'
    )
    chat = [{'role': role, 'content': text} for role, text in (('user', 'a'), ('assistant', 'b'), ('user', 'c'))]
    assert render(source, chat) == 'a;b|c;False'
    with pytest.raises(ValueError, match='cannot be read: line 1'):
        render('{% generation %}a')


def test_time_is_that_of_the_day():
    assert render('{{ strftime_now("%d %b %Y, %H:%M") }}', day='2024-07-26') == '26 Jul 2024, 00:00'
    assert render('{{ strftime_now is defined }}', day='off') == 'False'


@pytest.mark.parametrize(('message', 'seen'), [
    ({'content': None, 'tool_calls': None}, []),
    ({'content': '', 'name': 0}, [('content', ''), ('name', 0)]),
    ({'reasoning': 'r'}, [('reasoning', 'r'), ('reasoning_content', 'r'), ('thinking', 'r')]),
    ({'thinking': 't', 'reasoning': 'r'}, [('reasoning', 'r'), ('reasoning_content', 't'), ('thinking', 't')]),
    ({'reasoning_content': None, 'reasoning': ''}, [('reasoning', ''), ('reasoning_content', ''), ('thinking', '')]),
])  # fmt: skip
def test_a_message_has_no_names_without_a_value_and_its_reasoning_under_all_of_them(message, seen):
    assert json.loads(render('{{ messages[0] | dictsort | tojson }}', [message])) == [list(pair) for pair in seen]
