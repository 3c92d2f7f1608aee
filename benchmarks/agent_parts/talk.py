"""An agent of five turns of text through the client of openai, streamed or not, as a problem says."""

FOLLOWING = ('Are you sure?', 'Say it in other words.', 'Give one reason.', 'Name an example.')


async def talk(problem, client, model):
    messages = [{'role': 'user', 'content': problem['question']}]
    for turn in range(1 + len(FOLLOWING)):
        text = await ask(client, model, messages, problem['stream'])
        if turn < len(FOLLOWING):
            messages += [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': FOLLOWING[turn]}]


async def ask(client, model, messages, streams):
    if not streams:
        reply = await client.chat.completions.create(model=model, messages=messages)
        return reply.choices[0].message.content
    events = await client.chat.completions.create(model=model, messages=messages, stream=True)
    return ''.join([event.choices[0].delta.content or '' async for event in events if event.choices])
