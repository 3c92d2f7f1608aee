"""lm_eval's side of gsm8k.py: greedy answers of transformers to given prompts, read by its filter for GSM8K.

    PYTHON side_lm_eval.py MODEL PROMPTS.jsonl OUT.json [SERVER]

Needs lm-eval, transformers and torch, and nothing of ours. With the URL of a server that has the model under the name
`m`, such as vLLM's, lm_eval sends it the tokens. A line of PROMPTS has the prompt, the tokens that our side decoded
from, and the gold. OUT has the texts, exact_match of each, lm_eval's mean and standard error, and of how many prompts
the tokens are equal. The filter is `flexible-extract` of lm_eval's task gsm8k: the last number of the text.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import tempfile

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

NEW_TOKENS, BATCH = 256, 32
REQUESTS = {'tokenizer_backend': 'huggingface', 'num_concurrent': 64, 'max_length': 1024, 'timeout': 7200}
TASK = """
task: given_prompts
dataset_path: json
dataset_kwargs: {data_files: {test: PROMPTS}}
output_type: generate_until
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: NEW, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true, ignore_punctuation: false,
     regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]}
filter_list:
  - name: flexible-extract
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
metadata: {version: 1}
"""


def main(model: str, prompts: str, out: str, server: str = '') -> None:
    """Writes what lm_eval finds."""
    asked = [json.loads(line) for line in pathlib.Path(prompts).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    equal = sum(tokenizer(one['prompt'])['input_ids'] == one['tokens'] for one in asked)
    with tempfile.TemporaryDirectory() as made:
        file = pathlib.Path(made) / 'prompts.jsonl'
        lines = [json.dumps({'prompt': one['prompt'], 'target': read_gold(one['gold'])}) for one in asked]
        file.write_text('\n'.join(lines) + '\n')
        task = TASK.replace('PROMPTS', str(file)).replace('NEW', str(NEW_TOKENS))
        (pathlib.Path(made) / 'task.yaml').write_text(task)
        arguments: dict[str, object] = {'pretrained': model, 'dtype': 'float32', 'device': 'cpu'}
        backend, batch = 'hf', BATCH
        if server:
            backend, batch = 'local-completions', 1
            arguments = {'model': 'm', 'base_url': f'{server}/v1/completions', 'tokenizer': model} | REQUESTS
        found = lm_eval.simple_evaluate(
            model=backend, model_args=arguments, tasks=['given_prompts'],
            task_manager=TaskManager(include_path=made, include_defaults=False), bootstrap_iters=0, log_samples=True,
            batch_size=batch,
        )  # fmt: skip
    samples = sorted(found['samples']['given_prompts'], key=lambda sample: sample['doc_id'])
    pathlib.Path(out).write_text(
        json.dumps(
            {
                'texts': [sample['resps'][0][0] for sample in samples],
                'exact_match': [float(sample['exact_match']) for sample in samples],
                'results': {k: v for k, v in found['results']['given_prompts'].items() if isinstance(v, float)},
                'equal_tokens': equal,
            }
        )
    )


def read_gold(worked: str) -> str:
    """The number after ####, as lm_eval's own task compares it."""
    return re.split('#### *', worked)[-1].strip()


if __name__ == '__main__':
    main(*sys.argv[1:])
