"""What transformers computes of a checkpoint with experts: a program for an environment with torch and transformers.

    python transformers_side.py DIRECTORY IN.npz OUT.npz

IN has tokens int64 [T], cotangent float32 [T, V] and routes int64 [layers with experts, T, k]. OUT gets routes/L, the
experts that each layer chooses by itself, scores/L [T, E], logits, and gradient/NAME of the sum of logits * cotangent
while every layer follows the given routes. Imports nothing of the package.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def main(directory: str, given: str, out: str) -> None:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    arrays = np.load(given)
    tokens = torch.tensor(arrays['tokens'][None])
    gates = [module for name, module in model.named_modules() if name.endswith('mlp.gate')]
    found: dict[str, np.ndarray] = {}

    def note(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found[f'routes/{layer}'] = output[2].numpy()
            found[f'scores/{layer}'] = torch.softmax(output[0], -1).numpy()

        return hook

    hooks = [gate.register_forward_hook(note(layer)) for layer, gate in enumerate(gates)]
    with torch.no_grad():
        found['logits'] = model(tokens).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    for layer, gate in enumerate(gates):
        follow_routes(gate, torch.tensor(arrays['routes'][layer]))
    (model(tokens).logits[0] * torch.tensor(arrays['cotangent'])).sum().backward()
    found |= {f'gradient/{name}': weight.grad.numpy() for name, weight in model.named_parameters()}
    np.savez(out, **found)


def follow_routes(gate: Any, routes: Any) -> None:
    """Has a router return the given experts with the weights that its own scores give them."""
    import torch

    normalised = getattr(gate, 'norm_topk_prob', True)

    def forward(states: Any) -> Any:
        logits = torch.nn.functional.linear(states.reshape(-1, states.shape[-1]), gate.weight)
        weights = torch.softmax(logits, -1).gather(-1, routes)
        return logits, weights / weights.sum(-1, keepdim=True) if normalised else weights, routes

    gate.forward = forward


if __name__ == '__main__':
    main(*sys.argv[1:])
