"""Answers and a byte-level tokenizer for the tests of the dialects."""

import json

import numpy as np

from areal_jax.rollout.http.wire.exchange import Answer, Finish, Piece, ReplyInfo

INFO = ReplyInfo('served', 1795234194, token_text=lambda token: f'<{token}>')
PROMPT = np.array([11, 12, 13], np.int32)
CUT = {'sampling_logprobs': np.array([-0.25, -0.5], np.float32)}
STOP = Finish('stop', 2)


def pieces():
    """Five tokens, two under version 3, whose softmax was cut, and three under version 4."""
    first = Piece(np.array([21, 22], np.int32), np.array([-0.5, -1.25], np.float32), '3', CUT, 'ab')
    logprobs = np.array([-2.0, -0.125, -0.75], np.float32)
    return [first, Piece(np.array([23, 24, 2], np.int32), logprobs, '4', text='cd')]


def answer(request_id='r', index=0, finish=STOP):
    return Answer(request_id, PROMPT, index, pieces(), finish, '4', cached_tokens=1, latency_s=0.42)


def stream(module, call, request_ids=('r',)):
    """What a server sends for answers that grow piece by piece, one after the other: the events as objects."""
    frames, answers = [], []
    for index, request_id in enumerate(request_ids):
        growing = Answer(request_id, PROMPT, index, version='4', latency_s=0.42)
        answers.append(growing)
        for piece in pieces():
            growing.pieces.append(piece)
            growing.finish = STOP if len(growing.pieces) == 2 else None
            frames.append(module.render_event(call, growing, piece, INFO))
    frames.append(module.render_last(call, answers, INFO))
    lines = b''.join(frames).decode().split('\n\n')
    return [json.loads(line.removeprefix('data: ')) for line in lines if line]


def decode_bytes(tokens):
    return bytes(np.asarray(tokens).tolist()).decode('utf-8', 'replace')
