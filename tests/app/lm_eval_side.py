"""lm_eval on local tasks, through a server and through transformers. Runs in an environment of its own.

    PYTHON lm_eval_side.py URL MODEL_DIRECTORY TASK_DIRECTORY

Writes one JSON object: for each of 'server' and 'transformers', {task: [answers of each sample]}, where an answer is
[log-likelihood, is greedy] or a text; and the metrics.
"""

import json
import pathlib
import sys
import tempfile

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ['areal_jax_choices', 'areal_jax_continuations']


def evaluate(tasks, kind, **arguments):
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=TASKS, task_manager=tasks, bootstrap_iters=0, log_samples=True,
        batch_size=2,
    )  # fmt: skip
    answers = {
        task: [sample['resps'] for sample in sorted(samples, key=lambda sample: sample['doc_id'])]
        for task, samples in found['samples'].items()
    }
    metrics = {task: {k: v for k, v in of.items() if isinstance(v, float)} for task, of in found['results'].items()}
    return {'answers': answers, 'metrics': metrics}


def main(url, model, directory):
    with tempfile.TemporaryDirectory() as made:  # a task names its file by a path from the root
        for path in pathlib.Path(directory).glob('*.yaml'):
            (pathlib.Path(made) / path.name).write_text(path.read_text().replace('DIRECTORY', directory))
        tasks = TaskManager(include_path=made, include_defaults=False)
        server = evaluate(
            tasks, 'local-completions', model='smollm2', base_url=f'{url}/v1/completions', tokenizer=model,
            tokenizer_backend='huggingface', num_concurrent=4, max_retries=1,
        )  # fmt: skip
        remote = evaluate(
            tasks, 'local-completions', model='smollm2', base_url=f'{url}/v1/completions', tokenizer_backend='remote',
            num_concurrent=1, max_retries=1,
        )  # fmt: skip
        local = evaluate(tasks, 'hf', pretrained=model, dtype='float64', device='cpu')
    print(json.dumps({'server': server, 'remote tokenizer': remote, 'transformers': local}))


if __name__ == '__main__':
    main(*sys.argv[1:])
