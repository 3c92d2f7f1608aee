"""A task whose scorer does what the text of the answer says; areal-score and the tests load it from this file."""

import os
import pathlib
import time

from areal_jax.tasks.questions import question_task
from areal_jax.tasks.scoring.score_call import UNPARSED


def build(tokenizer, count=20, notes=''):
    """`count` problems; each call of the scorer appends a line to the file `notes`."""
    problems = [{'question': f'q{n}', 'task_id': f'own/{n}', 'gold': n, 'notes': notes} for n in range(count)]
    return question_task(tokenizer, problems, score)


def score(problem, answer_text, finish_reason):
    if problem['notes'] and answer_text:
        with pathlib.Path(problem['notes']).open('a') as file:
            file.write(f'{os.getpid()} {problem["gold"]}\n')
    if answer_text == 'hang':
        time.sleep(1000)
    if answer_text == 'crash':
        os._exit(3)
    if answer_text == 'raise':
        raise ValueError('no digit\nin it')
    if answer_text == 'none':
        return None
    if answer_text == 'unread':
        return UNPARSED
    if answer_text.startswith('slow'):
        time.sleep(0.02)
    return problem['gold'] + (0.5 if finish_reason == 'length' else 0.0)
