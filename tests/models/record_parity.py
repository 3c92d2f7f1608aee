"""Records what transformers and torch say of the checkpoints of parity.py into data/parity.npz.

    python -m tests.models.record_parity      (torch==2.13.0, transformers==5.23.0, safetensors)

Of every checkpoint, in float32 on the CPU: the logits of each text alone, and the tokens that follow it greedily.
"""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import numpy as np

from tests.models import parity


def run(directory: pathlib.Path, texts: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(logits float32 [T, V], following tokens int32 [NEW_TOKENS]) of every text, from a checkpoint directory."""
    model = load(directory)
    return [logits(model, text) for text in texts], [greedy(model, text) for text in texts]


def load(directory: pathlib.Path) -> Any:
    """The model, once transformers has found every tensor it wants and no other."""
    import torch
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    faults = {key: value for key, value in loading.items() if value}
    if faults:
        raise ValueError(f'{directory}: {faults}')
    return model.eval()


def logits(model: Any, text: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(text[None].astype(np.int64))).logits[0].float().numpy()


def greedy(model: Any, text: np.ndarray) -> np.ndarray:
    """By whole forward passes: the model's own cache has no part in it."""
    tokens = list(text)
    for _ in range(parity.NEW_TOKENS):
        tokens.append(int(logits(model, np.array(tokens))[-1].argmax()))
    return np.array(tokens[len(text) :], np.int32)


def main() -> None:
    arrays = {}
    for name in parity.CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            parity.write(pathlib.Path(folder), name)
            for number, (scores, following) in enumerate(
                zip(*run(pathlib.Path(folder), parity.texts(name)), strict=True)
            ):
                arrays[f'{name}/{number}/logits'], arrays[f'{name}/{number}/greedy'] = scores, following
    parity.RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(parity.RECORDED, **arrays)


if __name__ == '__main__':
    main()
