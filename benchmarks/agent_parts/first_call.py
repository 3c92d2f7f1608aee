"""A program that makes a client of openai and one call, and writes what that took; agent.command runs it in a fork."""

import json
import os
import resource
import sys

import openai

if __name__ == '__main__':
    problem = json.loads(sys.stdin.readline())
    client = openai.OpenAI()
    client.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'q'}])
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(os.path.join(problem['directory'], f'{problem["number"]}.json'), 'w') as file:
        json.dump(used.ru_utime + used.ru_stime, file)
