"""OpenAI's chat with a tool."""

import json

import openai

TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}
client = openai.OpenAI()
messages = [{'role': 'user', 'content': 'What is 1 + 2?'}]
while True:
    reply = client.chat.completions.create(model='any', messages=messages, tools=[TOOL])
    message = reply.choices[0].message
    messages.append(message.model_dump())
    if reply.choices[0].finish_reason != 'tool_calls':
        print(message.content)
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = str(arguments['a'] + arguments['b'])
        messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': result})
