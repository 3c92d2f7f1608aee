"""What others have published of runs that can be simulated, with the settings they give.

Values that were read off a figure say so: they are right to a few percent at best. Settings that are not published are
absent here, and chosen in constants.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

AREAL = 'arXiv 2505.24298'
APPLIED_COMPUTE = 'Predicting and Controlling Staleness in Fully Asynchronous RL Training, Applied Compute, 2026-07-03'
MARIN = 'marin, issues 8936 and 8955, September 2026'
NODE = 8  # H800s, of AReaL's cluster

# AReaL. 512 prompts of at most 1,024 tokens, 16 answers each; T = 1; no reference model, no critic.


@dataclasses.dataclass(frozen=True)
class Batch:
    """What an update trains on."""

    groups: int
    group_size: int
    cap: int  # tokens of an answer
    minibatches: int = 4  # optimizer steps

    @property
    def answers(self) -> int:
        return self.groups * self.group_size


TABLE_1_BATCH = Batch(512, 16, 27_648)
GENERATING = 0.75  # share of the devices, 'picked over 50/50 by hand'
PROMPT_CAP = 1024


@dataclasses.dataclass(frozen=True)
class Table1Row:
    """Hours of a whole run. Those of verl were estimated by the authors, from its throughput."""

    model: str
    nodes: int
    updates: int
    verl_h: float
    sync_h: float  # AReaL's own synchronous version
    async_h: float
    eta: int  # 8 for mathematics, 4 for code
    task: str

    @property
    def devices(self) -> int:
        return NODE * self.nodes

    def update_s(self, hours: float) -> float:
        """Seconds an update."""
        return 3600 * hours / self.updates


TABLE_1 = (
    Table1Row('R1-distill-Qwen-1.5B', 16, 250, 33.6, 41.0, 14.8, 8, 'math'),
    Table1Row('R1-distill-Qwen-7B', 24, 250, 52.1, 57.7, 25.4, 8, 'math'),
    Table1Row('R1-distill-Qwen-14B', 32, 80, 44.4, 48.8, 21.9, 4, 'code'),
    Table1Row('R1-distill-Qwen-32B', 48, 60, 46.4, 51.1, 31.1, 4, 'code'),
)
# final scores, asynchronous and synchronous: AIME24 of 1.5B and 7B, LiveCodeBench of 14B and 32B
TABLE_1_SCORES = ((42.2, 42.0), (63.1, 63.0), (58.1, 56.7), (61.0, 61.2))

# Figure 5c: tokens a second by eta, read off the figure. 1.5B, 16 nodes, batch of table 1.
FIGURE_5C: Mapping[float, float] = {
    0: 128.7e3, 1: 269.3e3, 2: 356.6e3, 4: 356.6e3, 8: 371.7e3, 16: 382.4e3, math.inf: 396.8e3,
}  # fmt: skip
# Table 2: AIME24 of these runs without and with the decoupled objective; one seed each
TABLE_2: Mapping[float, tuple[float, float]] = {
    0: (42.0, 42.0), 1: (41.8, 42.1), 2: (40.0, 41.8), 4: (23.3, 42.2), 8: (35.7, 41.0), 16: (35.8, 38.7),
    math.inf: (34.0, 36.9),
}  # fmt: skip

# Table 7: tokens a second and AIME24 by eta. 1.5B, 8 devices, context of 8,192 tokens, 64 prompts of 16 answers.
TABLE_7_BATCH, TABLE_7_DEVICES = Batch(64, 16, 8192 - PROMPT_CAP), 8
TABLE_7: Mapping[float, tuple[float, float]] = {
    0: (27.1e3, 31.7), 1: (47.8e3, 32.6), 2: (47.8e3, 32.4), 4: (49.0e3, 34.1), 8: (51.5e3, 29.9), 16: (52.0e3, 32.8),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Interruption:
    """Figure 6b: tokens a second that 4 nodes generate; context and split are not stated."""

    model: str
    interrupted: float
    waiting: float  # for the longest answer


FIGURE_6B = (Interruption('R1-distill-Qwen-1.5B', 231e3, 207e3), Interruption('R1-distill-Qwen-7B', 130e3, 111e3))
FIGURE_6B_NODES = 4
# Figure 6a: TFLOP/s of a trainer's device, packed to 32,768 tokens and in 32 fixed micro-batches; order of bars as
# extracted: 1B on one node, 7B on two, 32B on eight
FIGURE_6A = {'1B': (427.0, 404.0), '7B': (455.0, 303.0), '32B': (388.0, 283.0)}
# Figure 4, logarithmic axes, approximate: devices -> thousands of tokens a second (AReaL, verl; None = out of memory)
FIGURE_4: Mapping[tuple[str, int], Mapping[int, tuple[float, float | None]]] = {
    ('R1-distill-Qwen-1.5B', 32_768): {32: (30, 27), 64: (55, 39), 128: (102, 42), 256: (150, 58)},
    ('R1-distill-Qwen-7B', 32_768): {64: (19, 19), 128: (34, 26), 256: (63, 34), 512: (87, 37)},
    ('R1-distill-Qwen-32B', 32_768): {256: (18, None), 512: (34, None)},
    ('R1-distill-Qwen-7B', 16_384): {64: (19, 22)},
}

# Applied Compute. Qwen3-8B, GRPO; engines are never gated, and a full queue drops its oldest groups.


@dataclasses.dataclass(frozen=True)
class QueueRow:
    """Staleness in versions, from the first token to training."""

    slots: int  # C
    batch: int  # B, trajectories
    capacity: float  # q, of the queue in batches
    rho: float  # rate of rollout over rate of the trainer
    tail: float  # M_tail, E[longest of a group] / E[length]; the size of a group is not stated
    predicted: float  # as printed
    measured: float


QUEUE_ROWS = (
    QueueRow(120, 240, 2, 0.63, 1.42, 1.34, 1.26),
    QueueRow(240, 120, 2, 0.92, 1.43, 3.86, 3.59),
    QueueRow(128, 128, 2, 1.07, 1.44, 3.29, 3.09),
    QueueRow(240, 120, 1, 0.86, 1.42, 3.34, 3.40),
    QueueRow(120, 120, 1, 0.67, 1.42, 1.95, 1.92),
    QueueRow(128, 128, 1, 1.14, 1.45, 2.24, 2.01),
)
HALF_THE_SLOTS = (-0.39, 0.29)  # what halving C does to staleness and to seconds a step
# a rule that drops by age (at most 1) instead of the oldest of a full queue, tail 90: mean tokens that are trained
BIASED_MEAN, UNBIASED_MEAN = (1354, 897), 1350

# marin. Snowball, 67B with 2B active, H100s, groups of 4, context of 8,192; shape of the model not published.


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Tokens that engines generated, by fate: they sum to `generated`."""

    generated: int
    consumed: int
    stale: int
    surplus: int

    @property
    def open_tokens(self) -> int:
        """What no fate accounts for."""
        return self.generated - self.consumed - self.stale - self.surplus


LEDGERS = (Ledger(5_807_538, 3_629_028, 1_910_321, 268_189), Ledger(1_357_964, 658_641, 416_114, 283_209))


@dataclasses.dataclass(frozen=True)
class AdditiveRow:
    """25 updates on 32 devices that train and 8 that generate; published after every update, age at most 1."""

    cap: int  # tokens of an answer
    core_s: float
    publication: float  # share of `core_s`
    waiting: float  # for rollouts, share
    consumed: int  # tokens, of 3,200 answers
    cut_off: float  # share of the answers
    stale: float  # share of the tokens generated

    @property
    def parts_s(self) -> tuple[float, float, float]:
        """Publication, waiting, and training as the rest."""
        publication_s, waiting_s = self.publication * self.core_s, self.waiting * self.core_s
        return publication_s, waiting_s, self.core_s - publication_s - waiting_s


ADDITIVE_ROWS = (
    AdditiveRow(2048, 914.4, 0.557, 0.186, 3_139_919, 0.146, 0.014),
    AdditiveRow(4096, 1202.4, 0.425, 0.376, 3_629_028, 0.036, 0.329),
)
ADDITIVE_ANSWERS, ADDITIVE_UPDATES = 3200, 25


@dataclasses.dataclass(frozen=True)
class AllocationRow:
    """25 updates, published after every second one, age at most 1; the three parts are 99.4% of the whole."""

    training: int  # devices
    generating: int
    total_s: float
    waiting_s: float
    train_s: float
    publication_s: float


ALLOCATION_ROWS = (
    AllocationRow(32, 8, 984.1, 476.1, 231.7, 271.0),
    AllocationRow(32, 16, 927.0, 411.7, 234.4, 275.3),
)
STALE_GROUPS = (96, 64, 32)  # generated by an installed version, used, stale: every 2 updates, age at most 1
STALE_TOKENS = 0.306
# wall seconds of 100 updates on 32 + 8 devices, by allowance 0 to 4; one seed
ALLOWANCE_MAIN = (8524, 5583, 5093, 4754, 4301)  # at 3 a rerun; the collapsed run took COLLAPSED_S
ALLOWANCE_BRANCH = (6235, 4360, 3544, 3142, 2942)
COLLAPSED_S, COPIES_S = 4913, (2066, 2206)  # of ALLOWANCE_MAIN, weight copies
# points between the synchronous arm and the one of age 1, five matched seeds
SEED_DIFFERENCES = (-2.34, 12.50, -17.58, 10.16, -1.17)
SEED_MARGIN = 15.0  # points, which they took for these five
