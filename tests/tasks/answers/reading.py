"""Reads drawn numbers and golds by every kind of answer, and says where a reader is wrong.

    python -m tests.tasks.answers.reading --json=FILE --gsm8k=train.jsonl,test.jsonl

Parts:

  cases    every case of reader_cases.py, loaded from a file and scored
  numbers  --draws numbers in every notation and carrier of notations.py, by every kind, votes and the audit: read as
           their value, equal to no other
  golds    --golds golds in the forms of drawn_golds.py, by every kind: refused at load with the line, or equal to
           themselves in every carrier and, as mathematics, to the golds of their form that mean the same and no other
  tasks    golds of the generated tasks, and of the files of GSM8K where they are given, are right answers

Exit code 0: every part ran and nothing was wrong; 1: something was, or --minutes ended it early.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal_jax.tasks import jsonl, reasoning_gym, running_sums
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.scoring.score_call import ScoringError, score_answer
from areal_jax.tasks.task import TaskError
from tests.tasks.answers.drawn_golds import FORMS, Drawn
from tests.tasks.answers.notations import CARRIERS, NOTATIONS, draw_other, draw_value
from tests.tasks.answers.reader_cases import SORTS
from tests.tasks.answers.test_reader_cases import judge

TEXT_KINDS = ('integer', 'number', 'exact', 'normalised')
GOLD_CARRIERS = (r'so \boxed{%s}', '#### %s', 'The answer is %s.', '**Answer:** %s', '<answer>%s</answer>')
OTHERS = 3  # golds of the same form with which a gold is compared
_SECONDS = 20  # of CPU time for one comparison
Fault = dict[str, Any]


def check_cases(options: argparse.Namespace) -> Iterator[tuple[str, Fault | None]]:
    """One item a check: what it was of, and what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        for sort, cases in SORTS.items():
            for case in cases:
                found = judge(case, pathlib.Path(directory) / 'rows.jsonl')
                yield sort, None if found == case[3] else {'case': str(case), 'found': found}


def check_numbers(options: argparse.Namespace) -> Iterator[tuple[str, Fault | None]]:
    rng = random.Random(options.seed)
    for _ in range(options.draws):
        value = draw_value(rng)
        other = draw_other(value, rng)
        for name, notation in NOTATIONS.items():
            written = notation(value)
            if written is None:
                continue
            text = rng.choice(CARRIERS).format(written)
            for kind in TEXT_KINDS[: 2 if value.denominator == 1 else 0] or ('number',):
                yield name, _check_number(kind, text, str(value), str(other))
            yield name, _check_number('math', text, str(value), str(other))


def _check_number(kind: str, text: str, value: str, other: str) -> Fault | None:
    answers = jsonl.KINDS[kind]
    found = {
        'voted': answers.final_answer(text),
        'reward': _score(kind, value, text),
        'reward of another gold': _score(kind, other, text),
        'audit': [mathematics.compare_texts(gold, text) for gold in (value, other)],
    }
    right = {'voted': value, 'reward': 1.0, 'reward of another gold': 0.0, 'audit': [True, False]}
    return None if found == right else {'kind': kind, 'text': text, 'value': value, 'other': other, 'found': found}


def check_golds(options: argparse.Namespace) -> Iterator[tuple[str, Fault | None]]:
    rng = random.Random(options.seed)
    each = -(-options.golds // len(FORMS))
    with tempfile.TemporaryDirectory() as directory:
        for name, form in FORMS.items():
            drawn = [form(rng) for _ in range(each)]
            loaded, fault = _load(drawn, pathlib.Path(directory) / 'golds.jsonl')
            yield f'{name}: {"loaded" if loaded else "refused"}', fault
            for gold, meaning in drawn:
                if meaning is not None and not loaded:
                    yield name, {'gold': gold, 'found': 'refused'}
                elif loaded:
                    yield name, _check_mathematics(gold, meaning, rng.sample(drawn, min(OTHERS, each)))
                yield name, _check_texts(gold)


def _load(drawn: Sequence[Drawn], path: pathlib.Path) -> tuple[bool, Fault | None]:
    """Whether a file of these golds loads; a fault where the error names no line, or a line that is good."""
    lines = [json.dumps({'question': f'question {n}', 'answer': gold}) for n, (gold, _) in enumerate(drawn)]
    path.write_text('\n'.join(lines))
    try:
        jsonl.read_problems(path, 'math')
    except TaskError as error:
        place = str(error).removeprefix(f'{path}:').partition(':')[0]
        gold = drawn[int(place) - 1][0] if place.isdigit() else ''
        named = gold and mathematics.read_form(gold).kind == 'expression' and mathematics.find_gold_fault(gold)
        return False, None if named else {'error': str(error)}
    return True, None


def _check_mathematics(gold: str, meaning: object, others: Sequence[Drawn]) -> Fault | None:
    wrong = {text: score for text in _carry(gold) if (score := _score('math', gold, text)) != 1.0}
    for other, other_meaning in others if meaning is not None else ():
        score = _score('math', gold, rf'\boxed{{{other}}}')
        if score != float(other_meaning == meaning):
            wrong[other] = score
    return {'gold': gold, 'rewards': wrong} if wrong else None


def _check_texts(gold: str) -> Fault | None:
    """By the kinds without algebra: refused, or equal to itself wherever it stands."""
    for kind in TEXT_KINDS:
        read = jsonl.KINDS[kind].read_gold(gold)
        for text in _carry(gold) if read is not None else ():
            if (score := _score(kind, str(read), text)) != 1.0:
                return {'kind': kind, 'gold': gold, 'read': read, 'text': text, 'reward': score}
    return None


def _carry(gold: str) -> list[str]:
    return [carrier % gold for carrier in GOLD_CARRIERS]


def check_tasks(options: argparse.Namespace) -> Iterator[tuple[str, Fault | None]]:
    for dataset in reasoning_gym.DATASETS:
        for problem in reasoning_gym.list_arithmetic(dataset):
            wrong = [text for text in _carry(problem['answer']) if reasoning_gym.score(problem, text, 'stop') != 1.0]
            yield dataset, {'problem': problem, 'texts': wrong} if wrong else None
    rng = random.Random(options.seed)
    for _ in range(1000):
        steps = running_sums.write_steps([rng.randrange(1, 10) for _ in range(rng.randrange(2, 17))])
        total = steps.rpartition(' ')[2]
        yield 'running_sums', None if jsonl.KINDS['integer'].final_answer(steps) == total else {'steps': steps}
    for path in filter(None, options.gsm8k.split(',')):
        solutions = [json.loads(line)['answer'] for line in pathlib.Path(path).read_text().splitlines()]
        for kind in (*TEXT_KINDS, 'math'):
            problems = jsonl.read_problems(pathlib.Path(path), kind)
            for problem, solution in zip(problems, solutions, strict=True):  # no question stands there twice
                score = _score(kind, problem['answer'], solution)
                yield f'GSM8K as {kind}', None if score == 1.0 else {'file': path, 'solution': solution[-80:]}


def _score(kind: str, gold: str, text: str) -> float | str:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # without a handler: nothing else ends C code
    try:
        return float(score_answer(jsonl.KINDS[kind].score, {'answer': gold}, text, 'stop'))
    except ScoringError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, Fault | None]]]] = {
    'cases': check_cases,
    'numbers': check_numbers,
    'golds': check_golds,
    'tasks': check_tasks,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=60.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--draws', type=int, default=1000)
    parser.add_argument('--golds', type=int, default=12_000)
    parser.add_argument('--gsm8k', default='', help='files of GSM8K, with commas between them')
    parser.add_argument('--json', default='')
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + 60 * options.minutes
    row: dict[str, Any] = {'seed': options.seed}
    is_complete = True
    for part, check in PARTS.items():
        counts: collections.Counter[str] = collections.Counter()
        faults = []
        for name, fault in check(options):
            counts[name] += 1
            if fault:
                faults.append({'of': name, **fault})
                print(json.dumps(faults[-1]), flush=True)
            if time.monotonic() > end_s:
                is_complete = False
                break
        row[part] = {'checks': sum(counts.values()), 'faults': len(faults), 'of': counts, 'first': faults[:20]}
        print(json.dumps({part: {'checks': sum(counts.values()), 'faults': len(faults)}}), flush=True)
    row['met'] = is_complete and all(row[part]['checks'] and not row[part]['faults'] for part in PARTS)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(row, indent=1) + '\n')
    return 0 if row['met'] else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
