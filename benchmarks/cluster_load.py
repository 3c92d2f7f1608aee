"""What a run on a cluster asks of its controller, its registry and its disk: arithmetic for the tables of plan.py.

Speeds of engines and learner follow from an H800's peaks (simulation/roofline.py) and published shares of them; what
controller and publication cost was measured by host.py and commands.py.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.config.cluster import EnginesLayout, LearnerLayout, parse_engines, parse_learner
from areal_jax.simulation.chips import H800
from areal_jax.simulation.roofline import WEIGHT_BYTES, Reached, Roofline, step_overhead_s
from areal_jax.simulation.shapes import R1_DISTILL_1_5B, R1_DISTILL_7B, R1_DISTILL_32B, ModelShape

NODE = 8  # accelerators
REACHED = Reached(bandwidth=0.6, prefill=0.5, mfu=0.40)  # its docstring says why
PASSES = 4  # in forward passes, of a trained token: 3 of the update, 1 for the proximal log-probs
MEAN_TOKENS, PROMPT_TOKENS = 9_000, 512  # of an answer at most 27,648 long, lognormal with sigma 0.75
LIVE_POSITIONS = 6_642 + PROMPT_TOKENS  # of a slot on average, E[L^2] / (2 E[L]) of these lengths
MOST_SLOTS = 256
DECODE_STEPS = 16  # rollout.decode_steps: tokens of an answer in a piece
CHECK_EVERY_S, LOOK_EVERY_S = 5.0, 1.0  # ServerSettings.health_every_s, RegistryWatch.every_s
FILE_SERVER_BYTES_S = 10e9  # that all nodes together read from the shared file system: yours will differ
MOST_FRAME_BYTES = 1 << 30  # areal_jax/distributed/wire.py, of the command with a batch
# of a batch of 512 groups of 16 answers of 256 tokens, sent to 64 learner processes: docs/log/, 2026-11-23
BATCH_BYTES, BATCH_CPU_S, BATCH_TOKENS = 17.9e6, 0.092, 512 * 16 * 256
TOKEN_BYTES = 8  # of an answer in the controller: token and log-prob
DAY_S = 86_400


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run: its layout as the config has it, and what an update trains on."""

    model: ModelShape
    learner: str  # cluster.learner
    engines: str  # cluster.engines
    answers: int  # of an update

    @property
    def learner_layout(self) -> LearnerLayout:
        return parse_learner(self.learner)

    @property
    def engines_layout(self) -> EnginesLayout:
        return parse_engines(self.engines)

    @property
    def accelerators(self) -> int:
        return self.learner_layout.devices + self.engines_layout.devices


PLANS = (
    Plan(R1_DISTILL_1_5B, 'hosts=1 x fsdp=2', '6 x tensor=1', 64 * 16),
    Plan(R1_DISTILL_7B, 'hosts=3 x data=3,fsdp=8', '40 x tensor=1', 256 * 16),
    Plan(R1_DISTILL_32B, 'hosts=20 x data=5,fsdp=8,tensor=4', '88 x tensor=4', 512 * 16),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a controller and a publication cost, on this machine; in seconds of one core."""

    answer_s: float
    piece_s: float  # of an answer, besides its tokens
    token_s: float
    question_s: float
    entry_s: float  # of the registry, in a look
    batch_byte_s: float  # of a batch that goes to the learner
    batch_token_bytes: float
    log_bytes: float  # of an answer
    question_log_bytes: float
    write_byte_s: float  # of a version, by the learner
    read_byte_s: float  # of a version, by an engine


def read_measured(host: pathlib.Path) -> Measured:
    """From the results of benchmarks/host.py."""
    rows = json.loads(host.read_text())['rows']
    wire, registry = find(rows, 'wire'), find(rows, 'registry', engines=64)
    version = find(rows, 'publication', dtype='bfloat16')
    return Measured(
        answer_s=1e-6 * wire['us_answer'], piece_s=1e-6 * wire['us_piece'], token_s=1e-6 * wire['us_token'],
        question_s=1e-6 * wire['us_question'], entry_s=1e-6 * registry['us_entry_read'],
        batch_byte_s=BATCH_CPU_S / BATCH_BYTES, batch_token_bytes=BATCH_BYTES / BATCH_TOKENS,
        log_bytes=wire['log_bytes'], question_log_bytes=wire['question_log_bytes'],
        write_byte_s=version['write_cpu_s'] / version['bytes_written'],
        read_byte_s=version['read_cpu_s'] / version['bytes_written'],
    )  # fmt: skip


def find(rows: Sequence[Mapping[str, Any]], row: str, **fields: object) -> Mapping[str, Any]:
    wanted = {'row': row, **fields}
    return next(found for found in rows if all(found.get(name) == value for name, value in wanted.items()))


@dataclasses.dataclass(frozen=True)
class Load:
    """What a plan asks for, at the speed that its accelerators can reach at most."""

    plan: Plan
    measured: Measured
    decode_steps: int = DECODE_STEPS

    # Generation and training.

    @property
    def engine(self) -> Roofline:
        """One engine."""
        model, overhead_s = self.plan.model, step_overhead_s(H800, self.plan.model, REACHED)
        return Roofline(H800, model, REACHED, self.plan.engines_layout.devices_each, overhead_s)

    @property
    def slots(self) -> int:
        return min(MOST_SLOTS, self.engine.cache_tokens() // LIVE_POSITIONS)

    @property
    def generated_s(self) -> float:
        """Tokens a second of all engines, prefills left out."""
        return self.plan.engines_layout.count * self.slots / self.engine.step_s(self.slots, self.slots * LIVE_POSITIONS)

    @property
    def trained_s(self) -> float:
        """Tokens a second that the learner can train on."""
        learner = Roofline(H800, self.plan.model, REACHED, self.plan.learner_layout.devices)
        return 1 / learner.train_s(1, LIVE_POSITIONS, PASSES)

    @property
    def tokens_s(self) -> float:
        """Of the run: the slower side sets the pace."""
        return min(self.generated_s, self.trained_s)

    @property
    def answers_s(self) -> float:
        return self.tokens_s / MEAN_TOKENS

    @property
    def pieces_s(self) -> float:
        return self.tokens_s / self.decode_steps

    @property
    def update_s(self) -> float:
        return self.plan.answers / self.answers_s

    # The controller, in cores: one is all that its Python can use.

    @property
    def answers_cpu(self) -> float:
        return self.answers_s * self.measured.answer_s

    @property
    def pieces_cpu(self) -> float:
        return self.pieces_s * self.measured.piece_s

    @property
    def tokens_cpu(self) -> float:
        return self.tokens_s * self.measured.token_s

    @property
    def upkeep_cpu(self) -> float:
        """Health checks and looks at the registry."""
        engines = self.plan.engines_layout.count
        return engines * (self.measured.question_s / CHECK_EVERY_S + self.measured.entry_s / LOOK_EVERY_S)

    @property
    def batch_cpu(self) -> float:
        return self.batch_bytes * self.measured.batch_byte_s / self.update_s

    @property
    def controller_cpu(self) -> float:
        return self.answers_cpu + self.pieces_cpu + self.tokens_cpu + self.upkeep_cpu + self.batch_cpu

    @property
    def batch_bytes(self) -> float:
        return self.plan.answers * MEAN_TOKENS * self.measured.batch_token_bytes

    @property
    def memory_bytes(self) -> float:
        """Of the controller: half-grown answers in all slots, an update's worth that is complete, and its command."""
        open_tokens = self.plan.engines_layout.count * self.slots * LIVE_POSITIONS
        return TOKEN_BYTES * (open_tokens + self.plan.answers * MEAN_TOKENS) + self.batch_bytes

    # Files.

    @property
    def log_bytes_day(self) -> float:
        checks = self.plan.engines_layout.count / CHECK_EVERY_S * self.measured.question_log_bytes
        return DAY_S * (self.answers_s * self.measured.log_bytes + checks)

    @property
    def registry_operations_s(self) -> float:
        """Heartbeats of all roles; in a look of the controller a listing, and time and content of each entry."""
        entries = 1 + self.plan.learner_layout.processes + self.plan.engines_layout.count
        return entries + (1 + 2 * entries) / LOOK_EVERY_S

    @property
    def version_bytes(self) -> float:
        """publication.dtype='bfloat16'."""
        return WEIGHT_BYTES * self.plan.model.parameters

    @property
    def written_bytes(self) -> float:
        """By each learner process, of a version."""
        return self.version_bytes / self.plan.learner_layout.processes

    @property
    def engine_hosts(self) -> int:
        return -(-self.plan.engines_layout.devices // NODE)

    @property
    def read_bytes(self) -> float:
        """Over the network, of a version: each node keeps what it has read for its other engines."""
        return self.engine_hosts * self.version_bytes

    @property
    def network_s(self) -> float:
        """Of a publication: all nodes read it."""
        return self.read_bytes / FILE_SERVER_BYTES_S

    @property
    def write_s(self) -> float:
        """Of a publication: each learner process on one core."""
        return self.written_bytes * self.measured.write_byte_s

    @property
    def read_s(self) -> float:
        """Of a publication: every engine reads and checks all of it on one core, while it decodes."""
        return self.version_bytes * self.measured.read_byte_s

    # What breaks first.

    def shares(self) -> dict[str, float]:
        """Of each limit, how much is used."""
        return {
            'one core of the controller': self.controller_cpu,
            'reading a version from the shared file system, of the time of an update': self.network_s / self.update_s,
            'writing a version on one core of each learner process, of an update': self.write_s / self.update_s,
            'reading and checking a version on one core of an engine, of an update': self.read_s / self.update_s,
            'the largest command to the learner (1 GiB)': self.batch_bytes / MOST_FRAME_BYTES,
        }
