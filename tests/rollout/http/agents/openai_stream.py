"""OpenAI's chat with a tool, streamed through the helper of the package."""

import json

import openai

TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
client = openai.OpenAI()
messages = [{'role': 'user', 'content': 'What is 1 + 2?'}]
while True:
    options = {'stream_options': {'include_usage': True}}
    with client.chat.completions.stream(model='any', messages=messages, tools=[TOOL], **options) as stream:
        texts = [event.delta for event in stream if event.type == 'content.delta']
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert completion.usage.completion_tokens > 0
    messages.append(message.model_dump())
    if completion.choices[0].finish_reason != 'tool_calls':
        assert ''.join(texts) == message.content
        print(message.content)
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = str(arguments['a'] + arguments['b'])
        messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': result})
