"""Anthropic's package with a tool, whole and streamed, and its count of tokens."""

import anthropic

TOOL = {'name': 'add', 'description': 'A sum.', 'input_schema': {'type': 'object', 'properties': {}}}
client = anthropic.Anthropic()


def ask(messages, streams):
    asked = {'model': 'any', 'max_tokens': 500, 'messages': messages, 'tools': [TOOL], 'system': 'Add.'}
    if not streams:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = ''.join(stream.text_stream)
        message = stream.get_final_message()
    assert text == ''.join(block.text for block in message.content if block.type == 'text')
    return message


def talk(streams):
    messages = [{'role': 'user', 'content': 'What is 1 + 2?'}]
    assert client.messages.count_tokens(model='any', messages=messages, tools=[TOOL]).input_tokens > 10
    while True:
        message = ask(messages, streams)
        if message.stop_reason != 'tool_use':
            return message.content[0].text
        calls = [block for block in message.content if block.type == 'tool_use']
        results = [
            {'type': 'tool_result', 'tool_use_id': call.id, 'content': str(call.input['a'] + call.input['b'])}
            for call in calls
        ]
        messages += [{'role': 'assistant', 'content': message.content}, {'role': 'user', 'content': results}]


answer = talk(streams=False)
assert talk(streams=True) == answer
print(answer)
