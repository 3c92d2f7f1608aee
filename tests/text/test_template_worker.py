"""One process renders all calls, is replaced where it ended, and outlives nobody."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from areal_jax.text.chat_template import ChatTemplate, ConversationError
from areal_jax.text.template_worker import TemplateWorker
from areal_jax.text.tokenizer import chat_messages
from areal_jax.workers.descendants import list_descendants

PLAIN = "{{ messages[0]['content'] }}"
PICKY = """
{%- set said = messages[0]['content'] %}
{%- if said == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == 'grow' %}{{ ('a' * 10 ** 10) | length }}{% endif %}
{%- if said == 'refuse' %}{{ raise_exception('no') }}{% endif %}
{{- said }}"""


def workers() -> set[int]:
    return {process.pid for process in list_descendants(os.getpid()) if process.is_alive}


def ask(template, *questions):
    return template.render([chat_messages(question) for question in questions])


def test_the_calls_share_a_process_which_starts_with_the_first_and_ends_when_closed():
    before = workers()
    template = ChatTemplate(PLAIN, {}, 'f')
    assert workers() == before
    ask(template, 'a')
    first = workers() - before
    assert ask(template, 'b', 'c') == ['b', 'c']
    assert (len(first), workers() - before) == (1, first)
    template.close()
    template.close()
    assert workers() == before
    assert ask(template, 'd') == ['d']
    del template  # collected at once: nothing else refers to it
    assert workers() == before


@pytest.mark.parametrize(
    ('question', 'reason', 'is_kept'),
    [
        ('loop', r'it takes more than 0\.3 s of CPU time', False),
        ('grow', 'MiB of memory', False),
        ('refuse', 'it refuses the messages: no', True),
    ],
)
def test_a_process_that_met_a_limit_is_replaced_at_the_next_call(question, reason, is_kept):
    before = workers()
    template = ChatTemplate(PICKY, {}, 'f', cpu_seconds=0.3)
    ask(template, 'a')
    first = workers() - before
    with pytest.raises(ConversationError, match=reason) as error:
        ask(template, 'fine', question, 'b')
    assert error.value.index == 1
    assert ask(template, 'again') == ['again']
    assert (workers() - before == first) == is_kept


def test_a_process_that_was_killed_between_two_calls_is_replaced_unseen():
    before = workers()
    template = ChatTemplate(PLAIN, {}, 'f')
    ask(template, 'a')
    [pid] = workers() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ask(template, 'b') == ['b']


def test_the_limit_of_cpu_time_is_of_a_call_and_not_of_the_process():
    template = ChatTemplate('{% for i in range(90000) %}{% endfor %}', {}, 'f', cpu_seconds=0.2)
    for _ in range(20):  # of about 0.02 s
        assert ask(template, 'a') == ['']


def test_a_process_that_does_not_answer_is_ended_at_the_deadline():
    before, worker = workers(), TemplateWorker(PLAIN)
    limits = {'characters': 99, 'memory_bytes': 2**30, 'cpu_seconds': 9.0, 'wall_seconds': 270.0}
    request = {'conversations': [chat_messages('a')], 'values': {}, 'day': '', **limits}
    assert worker.render(request) == ([{'text': 'a'}], '')
    [pid] = workers() - before
    os.kill(pid, signal.SIGSTOP)
    assert worker.render(request | {'wall_seconds': 0.1}) == ([], 'it takes more than 0.1 s')
    assert pid not in workers()  # those of other templates may end meanwhile
    assert worker.render(request) == ([{'text': 'a'}], '')


def test_threads_get_their_own_replies():
    template, found = ChatTemplate(PLAIN, {}, 'f'), {}

    def ask_often(name):
        found[name] = [ask(template, f'{name}{n}' * 20_000) for n in range(5)]  # more than a pipe holds

    threads = [threading.Thread(target=ask_often, args=(name,)) for name in 'abcd']
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [[f'{name}{n}' * 20_000] for n in range(5)] for name in 'abcd'}


FORKING = """
import os, signal, sys, time
from areal_jax.text.chat_template import ChatTemplate
from areal_jax.workers.descendants import list_descendants
template = ChatTemplate("{{ messages[0]['content'] }}", {}, 'f')
ask = lambda text: template.render([[{'role': 'user', 'content': text}]])[0]
assert ask('a') == 'a'
[first] = list_descendants(os.getpid())
if os.fork() == 0:
    assert ask('b') == 'b'
    [own] = list_descendants(os.getpid())
    template.close()
    os._exit(bool(list_descendants(os.getpid())))
assert os.wait()[1] == 0
if os.fork() == 0:
    sys.stdin.read()  # keeps the ends of all pipes open
    os._exit(0)
assert ask('c') == 'c'
print(first.pid, flush=True)
signal.pause()
"""


@pytest.mark.usefixtures('at_once')
def test_a_fork_has_a_process_of_its_own_and_a_killed_parent_leaves_none():
    program = subprocess.Popen([sys.executable, '-c', FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = os.pidfd_open(int(program.stdout.readline()))
    program.kill()
    assert select.select([worker], [], [], 10)[0]  # it has ended
    program.communicate()
    os.close(worker)
