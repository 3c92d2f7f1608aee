"""Records what transformers and torch say of the checkpoints of parity.py into data/parity.npz.

    python -m tests.models.record_parity [NAME...]      (torch==2.13.0, transformers==5.23.0, safetensors)

With names these alone, beside what the file has of the others.

Of every checkpoint, in float32 on the CPU: the logits of each text alone, and the tokens that follow it greedily. Of
those that parity.EXACT names, and of hybrids, also the logits in float64. Of those that parity.SIGMOID names also the
logits with the experts of `foreign_routes`, in both.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from tests.models import parity


def run(directory: pathlib.Path, texts: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(logits float32 [T, V], following tokens int32 [NEW_TOKENS]) of every text, from a checkpoint directory."""
    model = load(directory)
    return [logits(model, text) for text in texts], [greedy(model, text) for text in texts]


def load(directory: pathlib.Path, **options: str) -> Any:
    """The model, once transformers has found every tensor it wants and no other."""
    import torch
    import transformers

    torch.set_num_threads(1)  # with more, sums have another order and logits other last digits
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **options
    )
    faults = {key: value for key, value in loading.items() if value}
    if faults:
        raise ValueError(f'{directory}: {faults}')
    return model.eval()


def logits(model: Any, text: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(text[None].astype(np.int64))).logits[0].numpy()


def greedy(model: Any, text: np.ndarray) -> np.ndarray:
    """By whole forward passes: the model's own cache has no part in it."""
    tokens = list(text)
    for _ in range(parity.NEW_TOKENS):
        tokens.append(int(logits(model, np.array(tokens))[-1].argmax()))
    return np.array(tokens[len(text) :], np.int32)


def forced_logits(model: Any, text: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Logits with the experts `routes`, int [L, T, k], in place of the router's choice."""
    import torch

    gates = [module for name, module in model.named_modules() if name.endswith('mlp.gate')]
    for gate, ids in zip(gates, torch.tensor(routes.astype(np.int64)), strict=True):

        def choose(states: Any, gate: Any = gate, ids: Any = ids) -> tuple[Any, Any, Any]:
            logits = torch.nn.functional.linear(states.view(-1, states.shape[-1]).float(), gate.weight.float())
            chosen = logits.sigmoid().gather(1, ids)
            if model.config.norm_topk_prob:
                chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
            return logits, chosen * model.config.routed_scaling_factor, ids

        gate.forward = choose
    found = logits(model, text)
    for gate in gates:
        del gate.forward
    return found


def exact_logits(models: dict[str, Any]) -> dict[str, np.ndarray]:
    """Logits in float64; torch cannot load a model afterwards, because its float32 is float64."""
    import torch

    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = lambda x: x.to(torch.float64)
    torch.set_default_dtype(torch.float64)
    arrays = {}
    for name, model in models.items():
        model.to(torch.float64)
        inner = model.model
        for key, module in list(inner.named_modules()):
            if type(module).__name__.endswith('RotaryEmbedding'):  # its frequencies were rounded
                inner.set_submodule(key, type(module)(model.config))
        if hasattr(inner.embed_tokens, 'embed_scale'):
            inner.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5)
        for number, text in enumerate(parity.texts(name)):
            arrays[f'{name}/{number}/exact'] = logits(model, text)
            if name in parity.SIGMOID:
                routes = parity.foreign_routes(name)[number]
                arrays[f'{name}/{number}/forced_exact'] = forced_logits(model, text, routes)
    return arrays


def main() -> None:
    arrays, exact = {}, {}
    if names := sys.argv[1:]:
        with np.load(parity.RECORDED) as file:
            arrays = dict(file)
    for name in names or parity.ALL:
        with tempfile.TemporaryDirectory() as folder:
            parity.write(pathlib.Path(folder), name)
            for number, (scores, following) in enumerate(
                zip(*run(pathlib.Path(folder), parity.texts(name)), strict=True)
            ):
                arrays[f'{name}/{number}/logits'], arrays[f'{name}/{number}/greedy'] = scores, following
            if name in parity.SIGMOID:
                model = load(pathlib.Path(folder))
                for number, (text, routes) in enumerate(
                    zip(parity.texts(name), parity.foreign_routes(name), strict=True)
                ):
                    arrays[f'{name}/{number}/forced'] = forced_logits(model, text, routes)
            if name in parity.EXACT or name in parity.HYBRIDS:
                exact[name] = load(pathlib.Path(folder), attn_implementation='eager', experts_implementation='eager')
    arrays |= exact_logits(exact)
    parity.RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(parity.RECORDED, **arrays)


if __name__ == '__main__':
    main()
