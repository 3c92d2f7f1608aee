"""The other side of product.py and decode.py: transformers' block of Qwen3-MoE in torch, on one core.

Arguments: sizes (of layer_case), core, experts ('grouped_mm' or another way of transformers), and pass as for
product_side.py, or rows as for decode_side.py. Needs torch, transformers and numpy, and nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.moe_parts.layer_case import GRADIENT, draw, draw_steps, pin, watch
from benchmarks.sides import Start, serve


def prepare(arguments: dict[str, Any]) -> Start:
    pin(arguments)
    torch.set_num_threads(1)
    sizes = arguments['sizes']
    run = run_steps if 'rows' in arguments else run_layer
    call = run(arguments, sizes)
    versions = {'torch': torch.__version__, 'transformers': transformers.__version__}

    def start() -> tuple[Any, Any]:
        call()
        return watch(call), lambda: {'versions': versions, 'threads': torch.get_num_threads()}

    return start


def run_layer(arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> Callable[[], float]:
    inputs = {name: torch.from_numpy(array) for name, array in draw(sizes).items()}
    block = make_block(sizes, inputs, arguments['experts'])
    x = inputs['x'][None].requires_grad_(arguments['pass'] == GRADIENT)

    def call() -> float:
        with torch.set_grad_enabled(arguments['pass'] == GRADIENT):
            square = block(x).square().mean()
        if arguments['pass'] == GRADIENT:
            square.backward()
            block.zero_grad()
            x.grad = None
        return float(square.detach())

    return call


def run_steps(arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> Callable[[], float]:
    """One step after the other."""
    inputs = {name: torch.from_numpy(array) for name, array in draw_steps(sizes, arguments['rows']).items()}
    block = make_block(sizes, inputs, arguments['experts'])

    def call() -> float:
        with torch.inference_mode():
            return sum(float(block(x[None]).square().mean()) for x in inputs['x']) / len(inputs['x'])

    return call


def make_block(sizes: Mapping[str, int], inputs: Mapping[str, torch.Tensor], experts: str) -> Any:
    """With the weights of the inputs; matrices are [out, in] there, and gate and up one matrix."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=sizes['d'], moe_intermediate_size=sizes['width'], num_experts=sizes['experts'],
        num_experts_per_tok=sizes['choices'], norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = experts
    block = Qwen3MoeSparseMoeBlock(config)
    joined = torch.cat([inputs['gate'], inputs['up']], dim=2).transpose(1, 2)
    with torch.no_grad():
        block.gate.weight.copy_(inputs['router'].T)
        block.experts.gate_up_proj.copy_(joined)
        block.experts.down_proj.copy_(inputs['down'].transpose(1, 2))
    return block


if __name__ == '__main__':
    serve(prepare)
