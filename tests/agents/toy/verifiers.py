"""A stand-in for the package verifiers: its wire, and the few names that verifiers_program.py imports.

A task has what the user says, `prompt` and `then`, and `do`, a word for what goes wrong. The program of an episode says
one message
after the other. It runs in a thread of the server, which relays its requests as the real one does.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
import types
import urllib.error
import urllib.request
import uuid

import msgpack
import zmq


class Seat:
    """Of an environment: what `agent_config_fields` looks for."""


class Taskset:
    def __init__(self, config):
        self.tasks, self.bounded = config.get('tasks', []), not config.get('endless')

    def __iter__(self):
        tasks = enumerate(self.tasks if self.bounded else itertools.cycle(self.tasks))
        return (types.SimpleNamespace(data=Data({'idx': index, **task})) for index, task in tasks)


class Data:
    def __init__(self, fields):
        self.fields = fields

    def model_dump(self, mode):
        return self.fields


def resolve_env_config(data):
    if data['taskset']['id'] != 'toy':
        raise ModuleNotFoundError(f'taskset {data["taskset"]["id"]!r} not found')
    return data


def agent_config_fields(config):
    return dict.fromkeys(config['taskset'].get('seats', ['agent']))


def load_environment(config):
    return types.SimpleNamespace(taskset=Taskset(config['taskset']))


def serve_env(*, max_workers, elastic, address, config):
    """One request a thread, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if 'SAYS' in os.environ:
        print(os.environ['SAYS'], os.environ['AREAL_GATEWAY_API_KEY'], json.dumps(config['agent']), file=sys.stderr)
        sys.exit(3)
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    front.bind(address)
    back.bind('inproc://replies')
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    cancelled = set()
    while True:
        ready = dict(poller.poll())
        if back in ready:
            front.send_multipart(back.recv_multipart())
        if front in ready:
            client, number, method, payload = front.recv_multipart()
            body = msgpack.unpackb(payload)
            if method == b'health':
                front.send_multipart([client, number, b'reply', msgpack.packb({'success': True, 'error': None})])
            elif method == b'cancel':
                cancelled.add(body['request_id'])
            else:
                episode = Episode(context, client, number, body, cancelled)
                threading.Thread(target=episode.run, daemon=True).start()


class Episode:
    def __init__(self, context, client, number, body, cancelled):
        self.socket = context.socket(zmq.PUSH)
        self.socket.connect('inproc://replies')
        self.to, self.number, self.body, self.cancelled = [client, number], number.decode(), body, cancelled
        self.trace, self.nodes = uuid.uuid4().hex, 0

    def send(self, kind, content):
        self.socket.send_multipart([*self.to, kind, msgpack.packb(content)])

    def delta(self, **fields):
        self.nodes += len(fields.get('nodes', ()))
        self.send(b'delta', {'trace': self.trace, **fields})

    def run(self):
        task = self.body['task_data']
        self.delta(open={'id': self.trace, 'task': task}, set={'rewards': {'long': None}})
        do, history, errors = task.get('do', ''), [], []
        try:
            for text in [task['prompt'], *task['then']]:
                self.do(do)
                history.append({'role': 'user', 'content': text})
                reply = self.ask(history)
                history.append(reply)
                said = {'role': 'assistant', 'content': reply['content'] + ('!' if do == 'rewrite' else '')}
                self.delta(nodes=[node(history[-2], False), node(said, do != 'forget')])
        except Exception as error:
            errors = [{'type': type(error).__name__, 'message': str(error)}]
            self.delta(errors=errors)
        score = {'score': 0.5, 'weight': 2.0}
        rewards = {'long': score, 'none': {'score': 1.0, 'weight': 0.0}}
        if do == 'unscored' or errors:
            rewards['long'] = None
        if do == 'infinite':
            score['score'] = 1e999
        self.delta(
            set={'rewards': rewards, 'metrics': {'turns': 2.0}, 'ok': not errors, 'stop_condition': 'agent_completed'}
        )
        traces = [{'id': self.trace, 'nodes': self.nodes + (do == 'lacks'), 'calls': 1}]
        if do == 'two':
            traces *= 2
        reply = {'success': True, 'error': None, 'head': {'ok': True, 'errors': []}, 'traces': traces}
        if do == 'fails':
            reply = {'success': False, 'error': 'ValueError: no such task'}
        self.send(b'reply', 7 if do == 'number' else reply)

    def do(self, word):
        if word == 'die':
            os.kill(os.getpid(), signal.SIGKILL)
        if word == 'raise':
            raise OSError('the box is gone')
        if word == 'garbage':
            self.socket.send_multipart([*self.to, b'delta', b'\xc1'])
        if word == 'hang':
            while self.number not in self.cancelled:
                time.sleep(0.01)
            with open(self.body['task_data']['file'], 'a') as file:
                file.write('cancelled')

    def ask(self, history):
        client = self.body['client']
        content = json.dumps({'model': self.body['model'], 'messages': history, 'stream': False}).encode()
        headers = {
            'Authorization': f'Bearer {os.environ[client["api_key_var"]]}', 'X-Session-ID': self.trace,
            'Content-Type': 'application/json',
        }  # fmt: skip
        request = urllib.request.Request(f'{client["base_url"]}/chat/completions', content, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read())['choices'][0]['message']
        except urllib.error.HTTPError as error:
            raise RuntimeError(f'upstream {error.code}: {error.read().decode()}') from error


def node(message, sampled):
    return {'message': message, 'sampled': sampled, 'token_ids': [], 'mask': [], 'logprobs': []}


def _add(name, **values):
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module


__path__: list[str] = []  # else Python looks for no modules in it
for _name in ('', '.configs', '.utils', '.serve'):
    _add(f'verifiers.v1{_name}', __path__=[])
_add('verifiers.v1.configs.agent', agent_config_fields=agent_config_fields)
_add(
    'verifiers.v1.utils.loaders', resolve_env_config=resolve_env_config, load_environment=load_environment,
    default_harness_id=lambda taskset: 'bash',
)  # fmt: skip
_add('verifiers.v1.serve.pool', serve_env=serve_env)
