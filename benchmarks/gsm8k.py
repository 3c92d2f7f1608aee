"""What training gains on GSM8K's test problems, and whether the base model's score is the score that lm_eval finds.

    python -m benchmarks.gsm8k --base=runs/gsm8k_base --trained=runs/gsm8k_sft_eval,runs/gsm8k_eval \
        --lm_eval=VENV/bin/python --model=EXPORT --json=benchmarks/results/gsm8k.json

The directories are evaluations by areal-eval over the same problems (docs/gsm8k.md has the commands). lm_eval, in an
environment of its own, answers the prompts of `--base` with transformers, float32 and greedy, and reads the answers by
its own filter, the last number. `--model` is the base model as a directory of Hugging Face files. `--answers` keeps the
answers of lm_eval: if the file is there, they are read instead. `--prompts` gives lm_eval the first ones only: scores
are then compared over these, and the check that lm_eval answered all of them fails. With `--server` lm_eval asks a
server that has the model in float32 under the name `m`, such as vLLM's, in place of transformers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.report.statistics import Interval, mean_interval, score_interval
from benchmarks.report import write_report

PROBLEMS = 1319
_SIDE = pathlib.Path(__file__).with_name('side_lm_eval.py')


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the evaluations; 0 if every check held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--base', type=pathlib.Path, required=True, help='evaluation of the base model')
    parser.add_argument('--trained', required=True, help='evaluations of trained models, with commas between them')
    parser.add_argument('--lm_eval', default='python', help='interpreter with lm_eval, transformers and torch')
    parser.add_argument('--model', type=pathlib.Path, help='the base model, a directory of Hugging Face files')
    parser.add_argument('--answers', type=pathlib.Path, default=pathlib.Path('runs/gsm8k_lm_eval.json'))
    parser.add_argument('--problems', type=int, default=PROBLEMS, help='that every evaluation must have')
    parser.add_argument('--prompts', type=int, help='that lm_eval answers; all without it')
    parser.add_argument('--server', default='', help='URL of a server of the base model that lm_eval asks')
    parser.add_argument('--json', type=pathlib.Path, help='file for the numbers')
    options = parser.parse_args(arguments)
    base = read_answers(options.base)
    if not options.answers.exists():
        asked = list(base.values())[: options.prompts]
        ask_lm_eval(options.lm_eval, options.model, asked, options.answers, options.server)
    trained = {path: read_answers(pathlib.Path(path)) for path in options.trained.split(',')}
    numbers = compare(base, trained, json.loads(options.answers.read_text()), options.problems)
    write_report(numbers, options.json)
    return 0 if all(numbers['checks'].values()) else 1


def read_answers(evaluation: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns by question: prompt, its tokens, gold, and text, reward and finish reason of the greedy answer."""
    found = {}
    for line in (evaluation / 'answers.jsonl').read_text().splitlines():
        shown = json.loads(line)
        [greedy] = [answer for answer in shown['answers'] if answer['sample'] == 'greedy']
        kept = {name: greedy[name] for name in ('text', 'reward', 'finish_reason')}
        asked = {'prompt': shown['prompt'], 'tokens': shown['prompt_tokens'], 'gold': shown['problem']['answer']}
        found[shown['problem']['question']] = asked | kept
    return found


def ask_lm_eval(
    python: str, model: pathlib.Path, base: Sequence[Mapping[str, Any]], out: pathlib.Path, server: str = ''
) -> None:
    """Has lm_eval answer the prompts of `base`, in their order, and writes what it says to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = out.with_suffix('.prompts.jsonl')
    lines = [json.dumps({name: one[name] for name in ('prompt', 'tokens', 'gold')}) for one in base]
    asked.write_text('\n'.join(lines) + '\n')
    subprocess.run([python, str(_SIDE), str(model), str(asked), str(out), server], check=True, stdout=sys.stderr)


def compare(
    base: Mapping[str, Mapping[str, Any]],
    trained: Mapping[str, Mapping[str, Mapping[str, Any]]],
    theirs: Mapping[str, Any],
    problems: int,
) -> dict[str, Any]:
    """Returns scores with intervals, gains by problem, lm_eval's score of the base, and the checks."""
    rewards = {name: [answers[question]['reward'] for question in base] for name, answers in trained.items()}
    ours = [one['reward'] for one in base.values()]
    lm_eval = mean_interval(theirs['exact_match'])
    asked = list(base.values())[: len(theirs['texts'])]  # by lm_eval
    same = [one['text'].strip() == text.strip() for one, text in zip(asked, theirs['texts'], strict=True)]
    of_asked = statistics.fmean(one['reward'] for one in asked)
    low, high = lm_eval.low, lm_eval.high
    assert low is not None
    assert high is not None
    return {
        'base': describe(ours),
        'base_stopped': statistics.fmean(one['finish_reason'] == 'stop' for one in base.values()),
        'trained': {name: describe(scores) for name, scores in rewards.items()},
        'gains': {name: vars(gain(ours, scores)) for name, scores in rewards.items()},
        'base_of_lm_evals_prompts': of_asked,
        'lm_eval': vars(lm_eval) | {'prompts_of_equal_tokens': theirs['equal_tokens'], 'equal_texts': sum(same)},
        'checks': {
            f'{problems} problems': {len(base), *map(len, trained.values())} == {problems},
            'lm_eval answered all': len(asked) == len(base),
            'lm_eval reads the same tokens': theirs['equal_tokens'] == len(asked),
            "the base model's score is in the interval of lm_eval's": low <= of_asked <= high,
        },
    }


def describe(scores: Sequence[float]) -> dict[str, float | int | None]:
    return vars(mean_interval(scores))


def gain(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Returns the interval of the mean difference by problem."""
    return score_interval([[b - a] for a, b in zip(before, after, strict=True)])


if __name__ == '__main__':
    sys.exit(main())
