"""Arithmetic in two turns with feedback: as an own workflow, and as a function that talks to the gateway by openai."""

import re

RIGHT, WRONG = 'Right. Say the number once more.', 'Wrong. Try again, with the number only.'


def give_feedback(problem, text):
    numbers = re.findall(r'-?\d+', text or '')
    return RIGHT if numbers and int(numbers[-1]) == int(problem['answer']) else WRONG


def first_messages(problem):
    return [
        {'role': 'system', 'content': 'Answer with the number only.'},
        {'role': 'user', 'content': problem['question']},
    ]


async def workflow(chat, problem):
    history = first_messages(problem)
    first = await chat(history)
    await chat([*history, first.message, {'role': 'user', 'content': give_feedback(problem, first.text)}])


async def program(problem, client, model):
    history = first_messages(problem)
    reply = await client.chat.completions.create(model=model, messages=history)
    text = reply.choices[0].message.content
    history += [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': give_feedback(problem, text)}]
    await client.chat.completions.create(model=model, messages=history)
