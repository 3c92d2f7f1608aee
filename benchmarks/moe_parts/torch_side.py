"""The other side of product.py: transformers' block of Qwen3-MoE with torch's grouped_mm, on one core.

Arguments as for product_side.py, without mixer. Needs torch, transformers and numpy, and nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.moe_parts.layer_case import GRADIENT, draw, pin, watch
from benchmarks.sides import Start, serve


def prepare(arguments: dict[str, Any]) -> Start:
    pin(arguments)
    torch.set_num_threads(1)
    sizes = arguments['sizes']
    inputs = {name: torch.from_numpy(array) for name, array in draw(sizes).items()}
    block = make_block(sizes, inputs)
    x = inputs['x'][None].requires_grad_(arguments['pass'] == GRADIENT)

    def call() -> float:
        with torch.set_grad_enabled(arguments['pass'] == GRADIENT):
            square = block(x).square().mean()
        if arguments['pass'] == GRADIENT:
            square.backward()
            block.zero_grad()
            x.grad = None
        return float(square.detach())

    versions = {'torch': torch.__version__, 'transformers': transformers.__version__}

    def start() -> tuple[Any, Any]:
        call()
        return watch(call), lambda: {'versions': versions, 'threads': torch.get_num_threads()}

    return start


def make_block(sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> Any:
    """With the weights of the inputs; matrices are [out, in] there, and gate and up one matrix."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=sizes['d'], moe_intermediate_size=sizes['width'], num_experts=sizes['experts'],
        num_experts_per_tok=sizes['choices'], norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = 'grouped_mm'
    block = Qwen3MoeSparseMoeBlock(config)
    joined = torch.cat([inputs['gate'], inputs['up']], dim=2).transpose(1, 2)
    with torch.no_grad():
        block.gate.weight.copy_(inputs['router'].T)
        block.experts.gate_up_proj.copy_(joined)
        block.experts.down_proj.copy_(inputs['down'].transpose(1, 2))
    return block


if __name__ == '__main__':
    serve(prepare)
