"""Answers that would rather have no verdict: generated ways to end, to lie on the link and to say what no log can hold.

    python -m tests.tasks.code.hostile_children --minutes=10 --seed=1 [--json=FILE]

Each must get a label of its own: never a fault of the machine, never 'ok'. It ends with 0 only where all did and each
kind was there.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.labels import CODE
from areal_jax.tasks.code.code_task import complete_problem
from areal_jax.tasks.code.judge import Judge
from areal_jax.tasks.scoring.score_call import REASON_CHARACTERS

LIMITS = {'time_limit_s': 0.3, 'memory_limit_mb': 512}
MOST_REASON = 12 * REASON_CHARACTERS  # bytes as JSON: each character may be a pair of surrogates
_SECRET = 'nobody guesses this'

# what an answer has: its link to the tests, and the id of the call that it is asked
_HEAD = """
import json, os, signal, stat, sys, time
def link():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): return fd
        except OSError: pass
def say(data):
    while data: data = data[os.write(link(), data):]
def frame(body): say(len(body).to_bytes(4, "big") + body)
def number():
    at = sys._getframe()
    while at:
        if "request" in at.f_locals: return at.f_locals["request"]["id"]
        at = at.f_back
    return "none"
def reply(**fields): frame(json.dumps({"id": number(), **fields}).encode())
def nest(depth, inner="1"): return "[" * depth + inner + "]" * depth
LONG = "x" * (4 * 2**20)
class Text(str):
    def __getitem__(self, *at): return LONG
    def __len__(self): return 0
"""


def _read_lines(text: str) -> list[str]:
    """One for each line, in which a bar is a line break of the answer."""
    return [line.replace(' | ', '\n    ') for line in text.strip().splitlines()]


_TEXTS = _read_lines(r"""
LONG
"\ud800" * 9999
"\0" * 9999
"\n" * 9999
"\U0001f600" * 99999
""
None
7
-1.5
float("nan")
float("inf")
[]
{}
[[]] * 999
{"a": LONG}
json.loads(nest(900))
True
[LONG] * 1
10 ** 4000
"ok"
["ok", ""]
[1, 2, 3]
""")
_NAMES = ('"IndexError"', '"exit"', '"ExceptionGroup"', '"UnicodeDecodeError"', '"__import__"', '"StopIteration"')
_VALUES = _read_lines(r"""
{"int": "zz"}
{"int": 5}
{"int": "0x" + "f" * 4000000}
{"fraction": ["0x1", "0x0"]}
{"range": [1, 2, 0]}
{"range": [0, 10**18, 1]}
{"decimal": "sNaN"}
{"decimal": "1e999999999"}
{"complex": ["a"]}
{"complex": [1, 2, 3]}
{"deque": [[1], -1]}
{"deque": 1}
{"dict": [[[1], 2]]}
{"dict": 5}
{"set": [[1]]}
{"bytes": "zz"}
{"bytes": 1}
{"tuple": 5}
{"object": 1}
{"a": 1, "b": 2}
{}
[[]] * 1500000
json.loads(nest(60))
json.loads(nest(900))
{"set": [{"int": hex(n * (2**61 - 1))} for n in range(9999)]}
{"frozenset": [{"tuple": [n]} for n in range(200000)]}
LONG
"\ud800"
None
float("nan")
[1, 2]
""")
_RAW = _read_lines(r"""
say(b"")
say(b"\0\0\0\0")
say(b"\xff\xff\xff\xff")
say(b"\0\0")
say(b"\0\0\0\x09{\"id\"")
frame(b"{")
frame(b"\xff\xfe")
frame(b"[]")
frame(b"7")
frame(b"null")
frame(nest(100000).encode())
frame(nest(990).encode())
frame(b"1" * 5000)
frame(b"[" + b"1e999," * 99999 + b"1]")
frame(b"NaN")
frame(b"{\"id\": \"" + b"\\ud800" * 9 + b"\"}")
frame(b" " * (5 * 2**20 - 1))
say((5 * 2**20).to_bytes(4, "big"))
frame(b"{\"result\": 1, \"id\": " + b"[" * 800 + b"]" * 800 + b"}")
frame(json.dumps({"id": number(), "result": "[" * 100000}).encode())
frame(json.dumps({"id": number(), **{str(n): n for n in range(99999)}}).encode())
[frame(b"{}") for _ in range(3)]
say(os.urandom(999))
""")
_RAISED = _read_lines(r"""
raise KeyError(LONG)
raise Exception(*range(99999))
raise type("A" * 4000000, (Exception,), {})("x")
raise type("A\nB\ud800", (ValueError,), {})("x")
raise type("E", (BaseException,), {})(LONG)
raise type("E", (Exception,), {"__str__": lambda s: LONG})
raise type("E", (Exception,), {"__str__": lambda s: 1 / 0})
raise type("E", (Exception,), {"__str__": lambda s: str(s)})
raise type("E", (Exception,), {"__str__": lambda s: os._exit(0)})
raise type("E", (Exception,), {"__str__": lambda s: print(LONG * 9)})
raise type("E", (Exception,), {"__str__": lambda s: 5})
raise type("S", (Exception,), {"__str__": lambda s: Text(LONG)})
raise type("E", (Exception,), {"__class__": property(lambda s: 1 / 0)})
raise type("E", (Exception,), {"__class__": int})
raise type("M", (type,), {"__name__": property(lambda s: LONG), "__mro__": ()})("E", (Exception,), {})
raise type("M", (type,), {"__getattribute__": lambda *a: 1 / 0})("E", (Exception,), {})
raise ExceptionGroup(LONG, [ValueError(LONG)] * 9)
raise UnicodeDecodeError("utf-8", b"x" * 4000000, 0, 1, LONG)
raise SystemExit(LONG)
raise SystemExit(0)
raise KeyboardInterrupt
raise GeneratorExit
raise StopIteration(LONG)
raise MemoryError
raise MemoryError(LONG)
raise RecursionError
raise PermissionError(1, LONG)
raise OSError(LONG, LONG)
raise SyntaxError(LONG, ("f", 1, 1, LONG))
raise ImportError(LONG, name=LONG)
return run()
return bytearray(2**40)
keep = [] | while True: keep.append(bytearray(2**20))
return object()
return type("A" * 4000000, (), {})()
return type("M", (type,), {"__name__": property(lambda s: 1 / 0)})("E", (), {})()
x = [] | for _ in range(99999): x = [x] | return x
return iter(int, 1)
print(LONG); return LONG * 3
return NotImplemented
return 10 ** 5000000
""")
_ENDS = _read_lines(r"""
os._exit({small})
os._exit(255)
os.kill(os.getpid(), {signal})
os.kill(os.getpid(), signal.SIGSTOP)
os.closerange(0, 64)
os.close(link())
os.abort()
sys.exit({small})
if os.fork(): os._exit({small}) | time.sleep(9)
if os.fork() == 0: time.sleep(9) | os.kill(os.getpid(), {signal})
os.dup2(os.open("/dev/null", os.O_RDWR), link())
return None
time.sleep(9)
while True: pass
import ctypes | ctypes.CDLL(None).syscall(58) | time.sleep(9)
import ctypes | ctypes.string_at({small})
import resource | resource.setrlimit(resource.RLIMIT_CPU, (0, 0)) | while True: pass
import threading | threading.Thread(target=time.sleep, args=(9,)).start() | os._exit({small})
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.setitimer(signal.ITIMER_REAL, 0.01) | time.sleep(9)
""")
_TOLD = (
    '["ok", LONG]',
    '["wrong", LONG]',
    '["wrong", 7]',
    '[["ok"], ""]',
    '{"ok": 1, "": 2}',
    '["visible_only", ""]',
    '[]',
    'null',
    '["wrong", {"a": ' + '[' * 500 + ']' * 500 + '}]',
    '[' * 30000,
    '["wrong", "' + 'é' * 30000 + '"]',
    '["wrong", "\\ud800"]',
    '["wrong", 1' + '0' * 5000 + ']',
    '"ok"',
    '\xff',
    '["exception", "' + '\\u0000' * 9000 + '"]',
)


def _choose(rng: random.Random, choices: Sequence[str]) -> str:
    chosen = rng.choice(choices).replace('{signal}', str(rng.randrange(1, 65)))
    return chosen.replace('{small}', str(rng.randrange(256)))


def _of_function(load: str, body: str) -> str:
    asked = 'def f(*args, **keywords):\n    return run(*args, **keywords)\n'
    return f'{_HEAD}\ndef run(*args, **keywords):\n    {body}\n{load}\n{asked}'


def _lie(rng: random.Random) -> str:
    kind = rng.randrange(6)
    text, other = _choose(rng, _TEXTS), _choose(rng, _TEXTS)
    if kind == 0:
        said = f'raised=[{_choose(rng, (*_NAMES, text))}, {other}, {_choose(rng, _TEXTS)}]'
    elif kind == 1:
        said = f'unusable={text}'
    elif kind == 2:
        pair = _choose(rng, (f'["wrong", {text}]', f'[{text}, {other}]', text))
        said = f'failed={pair}'
    elif kind == 3:
        said = f'result=json.dumps({_choose(rng, _VALUES)})'
    elif kind == 4:
        said = f'result={text}, args={other}'
    else:
        said = f'raised={text}, args=json.dumps({_choose(rng, _VALUES)})'
    return f'reply({said})'


def _of_link(rng: random.Random) -> str:
    return _of_function('', f'{_lie(rng)}\n    {_choose(rng, _ENDS)}')


def _of_bytes(rng: random.Random) -> str:
    return _of_function('', f'{_choose(rng, _RAW)}\n    {_choose(rng, _ENDS)}')


def _of_exception(rng: random.Random) -> str:
    body = _choose(rng, _RAISED)
    return _of_function('run()' if rng.random() < 0.3 else '', body)


def _of_end(rng: random.Random) -> str:
    return _of_function('run()' if rng.random() < 0.3 else '', _choose(rng, _ENDS))


def _of_load(rng: random.Random) -> str:
    return _of_function(f'def first():\n    {_choose(rng, _RAW)}\nfirst()', _choose(rng, (*_RAISED, *_ENDS)))


def _of_program(rng: random.Random) -> str:
    told = _choose(rng, _TOLD)
    said = f'data = {told!r}.encode("latin-1", "replace").replace(b"LONG", b"\\"" + b"x" * 60000 + b"\\"")\n'
    everywhere = 'for fd in range(3, 64):\n    try: os.write(fd, data)\n    except OSError: pass\n'
    tell = f'{said}{everywhere}' if rng.random() < 0.6 else ''
    ends = _choose(rng, (*_ENDS, *_RAISED))
    flood = _choose(rng, ('', '', 'print(LONG)\n', 'sys.stdout.write("\\ud800" * 9)\n', 'os.close(1)\n'))
    return f'{_HEAD}\n{tell}{flood}\ndef run():\n    {ends}\nrun()\n'


KINDS: Mapping[str, Callable[[random.Random], str]] = {
    'lies in a frame': _of_link, 'bytes that are no frame': _of_bytes, 'exceptions and values': _of_exception,
    'ends': _of_end, 'at the load': _of_load, 'programs': _of_program,
}  # fmt: skip


def make_problem(kind: str) -> dict[str, Any]:
    asked: dict[str, Any] = {'question': '?', 'tests': [{'input': '', 'output': _SECRET}]}
    if kind != 'programs':
        asked |= {'entry_point': 'f', 'tests': [f'assert f([1]) == {_SECRET!r}', [[[2]], _SECRET]]}
    return LIMITS | complete_problem(asked, 'here')


def find_fault(judge: Judge, kind: str, code: str) -> tuple[str, str]:
    """The label, and what is wrong with the verdict; '' for nothing."""
    problem = make_problem(kind)
    try:
        found = judge.check(problem, code, problem['tests'], is_partial=len(code) % 2 == 0)
    except Exception as error:
        return 'none', f'{type(error).__name__}: {error}'
    if found.label not in CODE or found.label == 'visible_only':
        return found.label, 'a label that no such answer may have'
    if len(json.dumps(found.reason)) > MOST_REASON:
        return found.label, f'a reason of {len(found.reason)} characters'
    return found.label, ''


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=10.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', default='')
    options = parser.parse_args(arguments)
    rng, judge = random.Random(options.seed), Judge('landlock')
    labels: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    faults = []
    end_s = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end_s:
        kind = rng.choice(list(KINDS))
        code = KINDS[kind](rng)
        label, fault = find_fault(judge, kind, code)
        labels[label] += 1
        kinds[kind] += 1
        if fault:
            faults.append({'kind': kind, 'fault': fault, 'code': code.removeprefix(_HEAD)})
            print(json.dumps(faults[-1]), flush=True)
            judge.close()
            judge = Judge('landlock')
    judge.close()
    met = not faults and len(kinds) == len(KINDS)
    row = {'answers': sum(kinds.values()), 'kinds': kinds, 'labels': labels, 'faults': faults[:20], 'met': met}
    print(json.dumps(row))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(row) + '\n')
    return 0 if met else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
