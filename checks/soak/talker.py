"""A program that asks three times, loses connections, retries, and sometimes dies: python talker.py DIRECTORY.

It writes a line of JSON for each reply to DIRECTORY/replies.jsonl, with the episode and the turn.
"""

import http.client
import json
import os
import pathlib
import random
import signal
import sys
import time
import urllib.parse

_TURNS = 3
_CUT, _RETRIED, _DIES = 0.1, 0.1, 0.04  # of the calls; of the programs


class Talker:
    """One episode. What is random depends on the episode and on how often it was started."""

    def __init__(self, directory):
        self._directory, self._episode = pathlib.Path(directory), os.environ['AREAL_EPISODE']
        starts = self._directory / f'starts.{self._episode}'
        with starts.open('a') as file:
            file.write('.')
        self._random = random.Random(f'{self._episode} {starts.stat().st_size}')
        self._address = urllib.parse.urlsplit(os.environ['OPENAI_BASE_URL'])
        self._dies_in = self._random.randrange(_TURNS) if self._random.random() < _DIES else None

    def run(self, question):
        history = [{'role': 'user', 'content': question}]
        for turn in range(_TURNS):
            if turn == self._dies_in:
                self._note(turn, 'died')
                os.kill(os.getpid(), signal.SIGKILL)
            message = self._ask(turn, {'model': 'policy', 'messages': history})
            history += [message, {'role': 'user', 'content': '='}]

    def _ask(self, turn, body):
        retries = 0
        if self._random.random() < _CUT:
            self._send(body, 0).sock.close()
            self._note(turn, 'cut')
            time.sleep(self._random.choice((0.0, 0.02, 0.2)))
            retries = 1
        message = self._read(body, retries)
        if self._random.random() < _RETRIED:
            self._note(turn, 'retried' if self._read(body, retries + 1) == message else 'another reply')
        self._note(turn, 'reply', text=message['content'])
        return message

    def _send(self, body, retries):
        connection = http.client.HTTPConnection(self._address.netloc)
        headers = {
            'Authorization': f'Bearer {os.environ["OPENAI_API_KEY"]}', 'Content-Type': 'application/json',
            'x-stainless-retry-count': str(retries),
        }  # fmt: skip
        connection.request('POST', f'{self._address.path}/chat/completions', json.dumps(body), headers)
        return connection

    def _read(self, body, retries):
        reply = self._send(body, retries).getresponse()
        content = json.loads(reply.read())
        if reply.status != 200:
            sys.exit(content['error']['message'])
        return content['choices'][0]['message']

    def _note(self, turn, what, **fields):
        line = json.dumps({'episode': self._episode, 'turn': turn, 'what': what, **fields})
        with (self._directory / 'replies.jsonl').open('a') as file:
            file.write(line + '\n')


if __name__ == '__main__':
    Talker(sys.argv[1]).run(json.load(sys.stdin)['question'])
