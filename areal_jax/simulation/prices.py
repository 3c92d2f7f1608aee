"""The prices of work in a simulation, from flops and bytes of chips, or from constants fitted to logs.

A price is a function of the lane and the work (control/clocks/virtual.py), so that engines can differ.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from areal_jax.config.cluster import EnginesLayout, LearnerLayout
from areal_jax.config.fields import ConfigError
from areal_jax.control.clocks.virtual import Price
from areal_jax.errors import suggest
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.models.families import LAYERS, ModelConfig, count_parameters
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weight_rows import Init
from areal_jax.simulation.drawn_task import Answers
from areal_jax.simulation.stream_prices import MEASURED_STREAM, NODE, StreamedVersion
from areal_jax.types import Work

# For chips whose network is not published, assumed as in the nodes of arXiv 2505.24298: 3.2 Tb/s for 8 chips.
ASSUMED_NIC_BYTES_S = 50e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peak rates of one chip."""

    name: str
    flops: float  # a second, dense, 16 bit
    bytes_s: float  # memory bandwidth
    memory_bytes: float
    interconnect_bytes_s: float  # both directions together, to chips of the same node or slice
    nic_bytes_s: float | None  # its share of the network between nodes; None = not published with the chip
    source: str = ''

    @property
    def network_bytes_s(self) -> float:
        """The bandwidth used for the chip's network: `nic_bytes_s`, or ASSUMED_NIC_BYTES_S if none is published."""
        return ASSUMED_NIC_BYTES_S if self.nic_bytes_s is None else self.nic_bytes_s


A100 = Chip('A100-80 SXM', 312e12, 2.04e12, 80e9, 600e9, None, 'data sheet of NVIDIA')
H800 = Chip(
    'H800 SXM', 989e12, 3.35e12, 80e9, 400e9, 50e9,
    'data sheet of the vendor; network: nodes of 8 with RoCE of 3.2 Tb/s, arXiv 2505.24298',
)  # fmt: skip
H100 = Chip('H100 SXM', 989e12, 3.35e12, 80e9, 900e9, None, 'data sheet of NVIDIA')
H200 = Chip('H200 SXM', 989e12, 4.8e12, 141e9, 900e9, None, 'data sheet of NVIDIA')
V5E = Chip(
    'TPU v5e', 197e12, 0.82e12, 16e9, 400e9, 2 * 100e9 / 8 / 8,
    'documentation of Google Cloud; network: two of 100 Gb/s for a host of 8 chips',
)  # fmt: skip
V5P = Chip('TPU v5p', 459e12, 2.765e12, 95e9, 1200e9, 50e9 / 8, 'documentation of Google Cloud; network: DCN 50 Gb/s')
V6E = Chip('TPU v6e', 918e12, 1.638e12, 32e9, 800e9, 100e9 / 8, 'documentation of Google Cloud; network: DCN 100 Gb/s')
TPU7X = Chip(
    'TPU7x', 2307e12, 7.38e12, 192e9, 1200e9, 100e9 / 8, 'documentation of Google Cloud; network: DCN 100 Gb/s'
)

CHIPS = (A100, H800, H100, H200, V5E, V5P, V6E, TPU7X)


def find_chip(name: str) -> Chip:
    """Finds a chip by its name, in either case: 'H800', 'h800 sxm', 'TPU v5e', 'v5e'.

    Raises ConfigError that lists the chips if the name is unknown.
    """
    for chip in CHIPS:
        if name.strip().lower() in _names(chip):
            return chip
    known = {short: chip for chip in CHIPS for short in _names(chip)}
    raise ConfigError(
        f'the chip {name!r} is not known{suggest(name.lower(), known)}; use one of '
        f'{", ".join(chip.name for chip in CHIPS)}'
    )


def _names(chip: Chip) -> list[str]:
    """The lower-case names of a chip: in full, without 'TPU' or 'SXM', and also without '-80'."""
    full = chip.name.lower()
    bare = full.removesuffix(' sxm').removeprefix('tpu ')
    return [full, bare, bare.removesuffix('-80')]


# The model sizes from which prices are computed, counted from the config; published models by name.


CACHE_BYTES = 2  # of each number of the KV cache, 16 bit
WINDOWS_OF_ROW = 1.5  # held by the layers with a window, see rollout.window_blocks.size_windows
STATES_OF_ROW = 2.5  # held by the layers with delta nets, see rollout.state_pool.size_states


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. Windows count in memory, not in time: a long context takes as long with and without."""

    name: str
    parameters: float
    product_parameters: float  # of matrices that tokens are multiplied with: layers and output head, all experts
    head_parameters: float
    layers: int
    attention_width: int  # heads * head_dim, on average over the layers
    kv_bytes: int  # of one position, in all layers, 16 bit
    hidden: int  # width of the residual stream
    expert_parameters: float = 0.0  # the part of `product_parameters` that is in experts
    experts: int = 0  # of a layer; 0 = none
    experts_per_token: int = 0
    window: int = 0  # the longest; 0 = no layer has one
    window_kv_bytes: int = 0  # the part of `kv_bytes` in layers with a window
    state_bytes: int = 0  # of the states of a row, in all layers with delta nets
    rule_flops: int = 0  # of their rule, for a token
    latent_width: int = 0  # heads * numbers of a cached latent, which engines attend over; 0 = no latent attention

    def held_kv_bytes(self, row_tokens: float) -> float:
        """Returns the bytes of one of `row_tokens` positions of a row: half as many windows as rows are held beside."""
        share = min(1.0, WINDOWS_OF_ROW * self.window / row_tokens) if row_tokens else 1.0
        states = STATES_OF_ROW * self.state_bytes / row_tokens if row_tokens else 0
        return self.kv_bytes - (1 - share) * self.window_kv_bytes + states

    @property
    def active_parameters(self) -> float:
        """The parameters of the matrices that one token is multiplied with."""
        return self.product_parameters - self.expert_parameters + self.expert_parameters * self._reached(1)

    def read_parameters(self, tokens: float) -> float:
        """The parameters read for `tokens` tokens together: experts that no token reaches are not read.

        Every token reaches `experts_per_token` experts, uniformly and independently of the other tokens.
        """
        return self.product_parameters - self.expert_parameters + self.expert_parameters * self._reached(tokens)

    def _reached(self, tokens: float) -> float:
        """The share of the experts that at least one of the tokens reaches."""
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 1.0


_OF_MATRICES = (Init.MATRIX, Init.RESIDUAL)  # initial values of what tokens are multiplied with in a layer


def shape_of(name: str, config: ModelConfig) -> ModelShape:
    """The sizes of any model of a known family, counted from the table of its weights.

    Engines compute latent attention in its absorbed form, wide heads over a small cache; the learner in its expanded
    form.
    """
    counts = [(row.path, parameters) for row, parameters in count_parameters(config)]
    of_layers = sum(
        count for row, count in count_parameters(config) if row.path.startswith(LAYERS) and row.init in _OF_MATRICES
    )
    absorbed = config.absorb()
    in_windows = sum(kind.window is not None for kind in config.kinds) * (config.n_layers // len(config.kinds))
    of_layer = absorbed.cached_numbers * CACHE_BYTES
    heads = [count for path, count in counts if path == ('embedding' if config.tie_embeddings else 'head')]
    return ModelShape(
        name,
        parameters=sum(count for _, count in counts),
        product_parameters=of_layers + sum(heads),
        head_parameters=sum(heads),
        layers=config.n_layers,
        attention_width=config.n_heads
        * config.mixed_dim
        * (config.n_layers - config.n_delta_layers)
        // config.n_layers,
        kv_bytes=(config.n_layers - config.n_delta_layers) * of_layer,
        hidden=config.d_model,
        expert_parameters=sum(count for path, count in counts if '/experts/' in path),
        experts=config.experts.count if config.experts else 0,
        experts_per_token=config.experts.per_token if config.experts else 0,
        window=max(filter(None, config.windows), default=0),
        window_kv_bytes=in_windows * of_layer,
        state_bytes=config.n_delta_layers * config.delta.state_bytes(CACHE_BYTES) if config.delta else 0,
        rule_flops=config.n_delta_layers * config.delta.rule_flops if config.delta else 0,
        latent_width=config.n_heads * absorbed.head_dim if config.latent else 0,
    )


def _qwen2(name: str, vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> ModelShape:
    """A model that was distilled from R1 into Qwen 2.5: head dimension 128, output head not tied."""
    config = ModelConfig(
        vocabulary, width, layers, heads, kv_heads, 128, mlp, 1e4, family='qwen2', qkv_bias=True, tie_embeddings=False
    )
    return shape_of(name, config)


R1_DISTILL_1_5B = _qwen2('R1-distill-Qwen-1.5B', 151936, 1536, 28, 12, 2, 8960)
R1_DISTILL_7B = _qwen2('R1-distill-Qwen-7B', 152064, 3584, 28, 28, 4, 18944)
R1_DISTILL_14B = _qwen2('R1-distill-Qwen-14B', 152064, 5120, 48, 40, 8, 13824)
R1_DISTILL_32B = _qwen2('R1-distill-Qwen-32B', 152064, 5120, 64, 40, 8, 27648)
QWEN3_0_6B = shape_of('Qwen3-0.6B', ModelConfig(151936, 1024, 28, 16, 8, 128, 3072, 1e6, family='qwen3', qk_norm=True))
QWEN3_8B = shape_of(
    'Qwen3-8B',
    ModelConfig(151936, 4096, 36, 32, 8, 128, 12288, 1e6, family='qwen3', qk_norm=True, tie_embeddings=False),
)
LLAMA_3_1_8B = shape_of('Llama-3.1-8B', ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 5e5, tie_embeddings=False))
QWEN3_30B_A3B = shape_of(
    'Qwen3-30B-A3B',
    ModelConfig(
        151936, 2048, 48, 32, 4, 128, 6144, 1e6,
        family='qwen3_moe', qk_norm=True, tie_embeddings=False, experts=Experts(128, 8, 768),
    ),
)  # fmt: skip

SHAPES = (
    *(R1_DISTILL_1_5B, R1_DISTILL_7B, R1_DISTILL_14B, R1_DISTILL_32B),
    *(QWEN3_0_6B, QWEN3_8B, LLAMA_3_1_8B, QWEN3_30B_A3B),
)  # sizes as in the config.json published with each model


def find_shape(name: str) -> ModelShape:
    """Finds a published model by its name: 'R1-distill-Qwen-7B', 'r1-distill-7b', or the full name with the maker.

    Raises ConfigError that lists the models if the name is unknown.
    """
    wanted = _plain(name)
    for shape in SHAPES:
        if wanted == _plain(shape.name):
            return shape
    raise ConfigError(
        f'the model {name!r} is not known{suggest(wanted, {_plain(shape.name) for shape in SHAPES})}; use one of '
        f'{", ".join(shape.name for shape in SHAPES)}'
    )


def _plain(name: str) -> str:
    """The name in lower case, without the maker and without the base model of a distilled model."""
    return name.strip().lower().rpartition('/')[2].removeprefix('deepseek-').replace('distill-qwen-', 'distill-')


# Seconds that work takes on a chip, from flops and bytes: prices of the virtual clock for work of real size.
#
# A decode step takes the longer of reading the weights and the KV cache of all rows, and computing; prefill and
# training compute; the optimizer and a publication move bytes. `positions` is the number of positions that each token
# sees, summed over the tokens in question.


WEIGHT_BYTES = 2  # 16-bit weights, in decoding and in publication
OPTIMIZER_BYTES = 28  # of a parameter, float32: weight, two moments and gradient are read, all but the last written
MEMORY_SHARE = 0.9  # of an engine's memory, for weights and KV cache
# share of the bandwidth that models of 7 to 8 billion parameters reach with one row: eager, times the gain of graphs
# (arXiv 2605.30571)
BATCH_ONE = 0.27 * 1.26
BATCH_ONE_SHAPE = QWEN3_8B


@dataclasses.dataclass(frozen=True)
class Reached:
    """The shares of the peaks that are reached, as published for other engines and trainers.

    The defaults: 0.6 of the bandwidth is the low end of the range reported for served engines (0.6 to 0.85); 0.5 of the
    flops in prefill is also a low end (0.5 to 0.73); 0.40 in training is within the range of AReaL on H800s with packed
    sequences, 0.39 to 0.46 (arXiv 2505.24298, figure 6a).
    """

    bandwidth: float = 0.6  # while decoding
    prefill: float = 0.5  # of the flops, also in a decode step that computes longer than it reads
    mfu: float = 0.40  # of the flops, while training


def step_overhead_s(chip: Chip, shape: ModelShape, reached: Reached) -> float:
    """The fixed seconds of a decode step: its time with one row minus the time to read weights, scaled by layers."""
    read_s = WEIGHT_BYTES * BATCH_ONE_SHAPE.product_parameters / chip.bytes_s
    return shape.layers / BATCH_ONE_SHAPE.layers * read_s * (1 / BATCH_ONE - 1 / reached.bandwidth)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One engine, or the learner, on chips of one kind that share its work evenly."""

    chip: Chip
    shape: ModelShape
    reached: Reached = Reached()
    devices: int = 1  # of the engine: tensor parallel; of the learner: all of them
    step_overhead_s: float = 0.0  # of a decode step, in addition to its work

    def step_s(self, rows: float, positions: float) -> float:
        """Seconds of a decode step that reads `positions` of the cache, summed over all rows."""
        shape, chip = self.shape, self.chip
        read = WEIGHT_BYTES * shape.read_parameters(rows) + shape.kv_bytes * positions + 2 * shape.state_bytes * rows
        read_s = read / (self.reached.bandwidth * chip.bytes_s * self.devices)
        computed = (2 * shape.active_parameters + shape.rule_flops) * rows + self._read_attention(positions)
        computed_s = computed / (self.reached.prefill * chip.flops * self.devices)
        return self.step_overhead_s + max(read_s, computed_s) + self._reduce_s(rows)

    def prefill_s(self, tokens: float, positions: float) -> float:
        """Seconds to prefill or rebuild `tokens`; omits the head, which only the last token of each prompt needs."""
        of_token = 2 * (self.shape.active_parameters - self.shape.head_parameters) + self.shape.rule_flops
        products = of_token * tokens
        flops = self.reached.prefill * self.chip.flops * self.devices
        return (products + self._read_attention(positions)) / flops + self._reduce_s(tokens)

    def train_s(self, tokens: float, positions: float, passes: float) -> float:
        """Seconds of training on `tokens` tokens.

        `passes` counts forward passes: 3 for the update, or 4 if activations are recomputed; 1 more for proximal
        log-probs, and 1 more for a reference model.
        """
        attention = 4 * self.shape.layers * self.shape.attention_width * positions
        computed = (2 * self.shape.active_parameters + self.shape.rule_flops) * tokens + attention
        return passes * computed / (self.reached.mfu * self.chip.flops * self.devices)

    def optimizer_s(self) -> float:
        """Seconds of a sharded Adam step with float32 state: the bytes that it touches, at the full bandwidth."""
        return OPTIMIZER_BYTES * self.shape.parameters / (self.chip.bytes_s * self.devices)

    def publication_s(self, receiver: int, senders: int, changed: float = 1.0) -> float:
        """Seconds to transfer a version over the networks of the slower side, without the pause of an engine.

        Args:
          receiver: devices of one engine, each of which receives a part.
          senders: devices of the learner, each of which sends a part.
          changed: share of the weights that is sent.
        """
        sent = changed * WEIGHT_BYTES * self.shape.parameters
        return sent / (self.chip.network_bytes_s * min(receiver, senders))

    def cache_tokens(self, row_tokens: float = 0) -> int:
        """Positions of the KV cache that fit next to the weights in nine tenths of the memory.

        Args:
          row_tokens: positions of a row, of which layers with a window hold the last; 0 = they hold all.
        """
        memory = MEMORY_SHARE * self.chip.memory_bytes * self.devices
        return int((memory - WEIGHT_BYTES * self.shape.parameters) / self.shape.held_kv_bytes(row_tokens))

    def prices(self) -> Mapping[str, Price]:
        """The prices of an engine's work, for VirtualClock."""

        def decode(lane: str, work: Work) -> float:
            rows = work.size['rows']
            # each step reads one more position per row; the price is linear in positions, so the mean step is priced
            return work.amount * self.step_s(rows, work.size['positions'] + rows * (work.amount - 1) / 2)

        def prefill(lane: str, work: Work) -> float:
            return self.prefill_s(work.size['tokens'], work.size['positions'])

        load_s = self.publication_s(self.devices, self.devices)
        return {'decode': decode, 'prefill': prefill, 'load': lambda lane, work: load_s}

    def _read_attention(self, positions: float) -> float:
        """The flops of an engine's attention."""
        return 4 * self.shape.layers * (self.shape.latent_width or self.shape.attention_width) * positions

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of two all-reduces a layer of the 16-bit residual stream, without their latency.

        In a ring each of n devices sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009), in one direction
        of its interconnect.
        """
        n, one_direction = self.devices, self.chip.interconnect_bytes_s / 2
        reduced = 2 * self.shape.layers * tokens * self.shape.hidden * WEIGHT_BYTES
        return 2 * (n - 1) / n * reduced / one_direction


STATE_BYTES = 12  # of a parameter: weight and two moments, float32
_ENGINES = re.compile(r'\s*(\d+)\s*x\s*(.+?)\s*')


class StreamLinks(NamedTuple):
    """The hosts of a run whose versions travel over sockets."""

    processes: int  # of the learner
    bytes_s: float  # of a host's network, in each direction


@dataclasses.dataclass(frozen=True)
class RooflineSettings:
    """The fields of the section `simulation` that prices by flops and bytes use."""

    chip: Chip  # of the learner
    engine_chips: tuple[Chip, ...]  # one for each engine
    shape: ModelShape
    reached: Reached
    passes: float
    update_s: float
    load_s: float
    switch_s: float
    optimizer_steps: int  # of an update
    stream: StreamLinks | None = None  # None: versions move over the networks of the devices themselves


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The engines and the learner of a simulated run, each with its devices."""

    engines: tuple[Roofline, ...]
    learner: Roofline
    shares: bool  # the engines decode on the learner's devices


def parse_chips(text: str, count: int, default: Chip) -> tuple[Chip, ...]:
    """Parses '4 x H800, 4 x H800/3' into one chip for each of `count` engines, in order; '' = the default for all.

    Raises ConfigError for another number of engines, an unknown chip, or a text of another form.
    """
    if not text.strip():
        return (default,) * count
    found: list[Chip] = []
    for part in text.split(','):
        match = _ENGINES.fullmatch(part)
        if match is None:
            raise ConfigError(f"simulation.engine_chips={text!r}: {part.strip()!r} is not of the form '4 x H100'")
        found += [_find_share(match[2])] * int(match[1])
    if len(found) != count:
        raise ConfigError(
            f'simulation.engine_chips={text!r} names {len(found)} engines, and cluster.engines has {count}: name each'
        )
    return tuple(found)


def _find_share(name: str) -> Chip:
    """Finds 'H800/3', a chip with a third of the speed of an H800 and all of its memory."""
    whole, _, divisor = name.partition('/')
    chip = find_chip(whole)
    if not divisor:
        return chip
    if not divisor.isdecimal() or not int(divisor):
        raise ConfigError(f'simulation.engine_chips: {name!r} must divide the speed by a whole number, as H800/3 does')
    by = int(divisor)
    return dataclasses.replace(
        chip, name=f'{chip.name}/{by}', flops=chip.flops / by, bytes_s=chip.bytes_s / by,
        interconnect_bytes_s=chip.interconnect_bytes_s / by,
    )  # fmt: skip


def build_cluster(settings: RooflineSettings, learner: LearnerLayout, engines: EnginesLayout) -> Cluster:
    """Builds the engines and the learner; engines on the learner's devices get equal shares of them.

    Raises ConfigError if the devices cannot be divided equally.
    """
    sizes = engines.sizes
    if engines.shared:
        if learner.devices % engines.count:
            raise ConfigError(
                f'cluster.engines={str(engines)!r} shares {learner.devices} devices of the learner: use a number of '
                'engines that divides them'
            )
        sizes = (learner.devices // engines.count,) * engines.count

    def roofline(chip: Chip, devices: int) -> Roofline:
        overhead_s = step_overhead_s(chip, settings.shape, settings.reached)
        return Roofline(chip, settings.shape, settings.reached, devices, max(0.0, overhead_s))

    return Cluster(
        engines=tuple(roofline(chip, size) for chip, size in zip(settings.engine_chips, sizes, strict=True)),
        learner=roofline(settings.chip, learner.devices),
        shares=engines.shared,
    )


class LearnerDevices:
    """The current number of the learner's devices; the site of a run changes it when devices move."""

    def __init__(self, number: int):
        self.number = number


def price_roofline(settings: RooflineSettings, cluster: Cluster, devices: LearnerDevices) -> Mapping[str, Price]:
    """The prices of all work of a run. A checkpoint and the copy of the weights in the learner's memory cost nothing.

    Publication: engines fetch a version while they decode, at the rate of the slower network; over sockets all engines
    fetch it at the same time, and it takes what `StreamedVersion` says. A learner that moves to
    other devices sends weights and moments, float32, over the network of its new number of devices.
    """
    engines = {engine_lane(index): engine.prices() for index, engine in enumerate(cluster.engines)}
    switch_s = settings.switch_s if cluster.shares else 0.0
    fetching = {publish_lane(index): engine for index, engine in enumerate(cluster.engines)}

    def find_learner() -> Roofline:
        return dataclasses.replace(cluster.learner, devices=devices.number)

    def fetch(lane: str, work: Work) -> float:
        engine = fetching[lane]
        if settings.stream is None:
            moved_s = find_learner().publication_s(engine.devices, devices.number)
        else:
            moved_s = stream_version(settings.stream, engine, len(fetching)).late_s
        return moved_s + settings.load_s + switch_s

    def reshard(lane: str, work: Work) -> float:
        moved = STATE_BYTES * settings.shape.parameters
        return moved / (settings.chip.network_bytes_s * devices.number) + settings.switch_s

    def of_engine(lane: str, work: Work) -> float:
        price = engines[lane][work.kind]
        assert callable(price)
        return price(lane, work)

    def train(lane: str, work: Work) -> float:
        learner = find_learner()
        computed_s = learner.train_s(work.amount, work.size['positions'], settings.passes)
        return computed_s + settings.optimizer_steps * learner.optimizer_s() + settings.update_s + switch_s

    return {
        'decode': of_engine, 'prefill': of_engine, 'train': train, 'load': fetch, 'reshard': reshard,
        'reward': price_verifier, 'snapshot': 0.0, 'publish': 0.0, 'save': 0.0, 'compile': 0.0,
    }  # fmt: skip


def stream_version(links: StreamLinks, engine: Roofline, engines: int) -> StreamedVersion:
    """A version on its way to `engines` engines like this one, as many on a host as have room there."""
    return StreamedVersion(
        nbytes=WEIGHT_BYTES * engine.shape.parameters,
        processes=links.processes,
        engines=engines,
        engines_of_host=min(engines, max(1, NODE // engine.devices)),
        devices=engine.devices,
        memory_bytes_s=engine.chip.bytes_s,
        costs=MEASURED_STREAM,
        link_bytes_s=links.bytes_s,
    )


def price_evaluations(by_kind: Mapping[str, Price]) -> Mapping[str, Price]:
    """Adds the prices of evaluations that run during training; they equal the prices of training's own work."""
    like = {'evaluation_decode': 'decode', 'evaluation_prefill': 'prefill', 'pin': 'load'}
    return {**by_kind, **{kind: _as(by_kind[other], other) for kind, other in like.items()}}


def _as(price: Price, kind: str) -> Price:
    if not callable(price):
        return price
    return lambda lane, work: price(lane, dataclasses.replace(work, kind=kind))


def price_tool(answers: Answers) -> Price:
    """Returns the price of a tool call: the seconds that were drawn for it."""

    def price(lane: str, work: Work) -> float:
        return answers.tool_s(work.detail['draw'], work.detail['sample'], int(work.size['call']))

    return price


def price_verifier(lane: str, work: Work) -> float:
    """The seconds that were drawn for the answer."""
    return work.size['seconds']


def check_memory(cluster: Cluster, cache_tokens: int, context_tokens: int) -> None:
    """Raises ConfigError if an engine has no room for weights and one sequence, or for the configured KV cache.

    Args:
      cache_tokens: of the KV cache of an engine; 0 = all that fit.
    """
    for index, engine in enumerate(cluster.engines):
        fits = engine.cache_tokens(context_tokens)
        needed = cache_tokens or context_tokens
        if needed > fits:
            what = 'rollout.cache_tokens' if cache_tokens else 'rollout.context_tokens'
            memory = engine.chip.memory_bytes * engine.devices
            raise ConfigError(
                f'{engine_lane(index)} of {engine.devices} x {engine.chip.name} has {memory / 1e9:.0f} GB, in which '
                f'{max(fits, 0):,} positions of {engine.shape.name} fit beside its weights, and {what}={needed:,}: '
                'use more devices an engine, another chip or a shorter context'
            )
