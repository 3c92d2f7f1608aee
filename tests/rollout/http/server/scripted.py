"""A server around the toy backend whose answers are written by a test: text -> ids, one a character."""

import json
import string

import numpy as np

from areal_jax.rollout.backend import SamplingSupport
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.rollout.http.server.rig import SlowBackend, ToyServer
from tests.toys import STOP

CONTEXT = 16_000
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1, "b": 2}}\n</tool_call>'
ARGUMENTS = '{"a":1, "b": 2}'  # of CALL, as it is written
FUNCTION = {'name': 'add', 'description': 'a sum', 'parameters': {'type': 'object'}}
TOOL = {'type': 'function', 'function': FUNCTION}


class ScriptedTokenizer(CharacterTokenizer):
    """A conversation's prompt is JSON of its messages and tools, which `seen` keeps too.

    `write(messages, tools)` gives the answer to a conversation, up to its EOS.
    """

    takes_tools = True

    def __init__(self, write):
        super().__init__(string.printable)
        self.write, self.seen, self.answers = write, [], {}

    def encode_chats(self, conversations, tools=()):
        [messages] = conversations
        self.seen.append((messages, list(tools)))
        text = json.dumps([messages, list(tools)])
        prompt = self.encode(text)
        self.answers[prompt.tobytes()] = [*self.encode(self.write(messages, tools)).tolist(), STOP]
        return [prompt]


class ScriptedBackend(SlowBackend):
    """Draws what the tokenizer has for a prompt, and EOS after it."""

    sampling = SamplingSupport(vocab_size=128, cuts=True, adjusts=True, stop_tokens=8, biased_tokens=8)
    step_s = 0.0

    def __init__(self, slots, tokenizer):
        super().__init__(slots, context_tokens=CONTEXT, block_tokens=64, largest_piece=CONTEXT)
        self.tokenizer = tokenizer

    def draw_token(self, w, request, position):
        script = self.tokenizer.answers[np.asarray(request.prompt_tokens, np.int32).tobytes()]
        drawn = [*script, STOP][min(position - len(request.prompt_tokens), len(script))]
        return drawn, drawn in request.sampling.stop_tokens


class ScriptedServer(ToyServer):
    """Answers with what `write` says: a text, or a function of messages and tools."""

    context, vocabulary = CONTEXT, 128
    make_tokenizer = ScriptedTokenizer

    def __init__(self, write, **options):
        chosen = write if callable(write) else lambda messages, tools: write
        super().__init__(tokenizer=self.make_tokenizer(chosen), **options)

    def make_backend(self, slots, decode_steps):
        return ScriptedBackend(slots, self.tokenizer), (0, 0)

    @property
    def seen(self):
        """(messages, tools) of the last conversation."""
        return self.tokenizer.seen[-1]

    def metric(self, name):
        """Of a line of /metrics; None where there is none."""
        _, text = self.run(lambda client: client.get('/metrics'))
        found = [line.split()[-1] for line in text.splitlines() if line.startswith(f'areal_jax_{name} ')]
        return float(found[0]) if found else None
