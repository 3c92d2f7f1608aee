"""benchmarks/gsm8k.py: scores, gains and checks of evaluations and of lm_eval's answers, by hand."""

import json

import pytest

from benchmarks.gsm8k import compare, read_answers


def answers(rewards):
    return {
        f'q{i}': {'prompt': f'q{i}', 'tokens': [i], 'gold': '1', 'text': f't{i}', 'reward': r, 'finish_reason': 'stop'}
        for i, r in enumerate(rewards)
    }


def lm_eval(matches, equal=None):
    texts = [f' t{i}' for i in range(len(matches) - 1)] + ['another']
    return {'texts': texts, 'exact_match': matches, 'equal_tokens': len(matches) if equal is None else equal}


def failed(found):
    return [name for name, held in found['checks'].items() if not held]


def test_a_gain_is_the_mean_difference_of_the_same_questions():
    trained = dict(reversed(answers([0.0, 1, 1, 1]).items()))  # finished in another order
    found = compare(answers([1.0, 0, 0, 0]), {'run': trained}, lm_eval([1, 0, 0, 0]), 4)
    assert (found['base']['mean'], found['trained']['run']['mean']) == (0.25, 0.75)
    assert found['gains']['run']['mean'] == 0.5
    # differences -1, 1, 1, 1: SE² = 4/3 (1.5² + 3 (0.5²)) / 16, and t of 3 degrees is 3.1824
    assert found['gains']['run']['high'] == pytest.approx(0.5 + 3.1824 * 0.5, abs=1e-3)
    assert found['lm_eval']['equal_texts'] == 3
    assert failed(found) == []


def test_a_check_that_fails_is_named():
    base, same = answers([1.0, 0, 0, 0]), lm_eval([1, 0, 0, 0])
    assert failed(compare(base, {'run': answers([0.0] * 4)}, same, 5)) == ['5 problems']
    assert failed(compare(base, {'run': base | answers([0.0] * 5)}, same, 4)) == ['4 problems']
    assert failed(compare(base, {}, lm_eval([1, 0, 0, 0], equal=3), 4)) == ['lm_eval reads the same tokens']
    many, few = answers([1.0] * 20), lm_eval([0] * 20)
    assert failed(compare(many, {}, few, 20)) == ["the base model's score is in the interval of lm_eval's"]


def test_some_prompts_are_compared_among_themselves_and_are_not_all():
    found = compare(answers([1.0, 0, 1, 1]), {}, lm_eval([1, 0]), 4)
    assert found['base_of_lm_evals_prompts'] == found['lm_eval']['mean'] == 0.5
    assert failed(found) == ['lm_eval answered all']


def test_the_greedy_answer_of_an_evaluation_is_read(tmp_path):
    greedy = {'sample': 'greedy', 'text': 'so 2', 'reward': 1.0, 'finish_reason': 'stop', 'label': 'ok'}
    sampled = greedy | {'sample': 1, 'text': 'no', 'reward': 0.0}
    problem = {'question': '1 + 1?', 'answer': '#### 2'}
    line = {'draw': 0, 'problem': problem, 'prompt': 'Q: 1 + 1?', 'prompt_tokens': [5, 6], 'answers': [sampled, greedy]}
    (tmp_path / 'answers.jsonl').write_text(json.dumps(line) + '\n')
    asked = {'prompt': 'Q: 1 + 1?', 'tokens': [5, 6], 'gold': '#### 2'}
    assert read_answers(tmp_path) == {'1 + 1?': asked | {'text': 'so 2', 'reward': 1.0, 'finish_reason': 'stop'}}
