"""Shows that the tests can fail: each mutation below is made in a copy of the tree and must turn its tests red.

python -m tests.mutations            # all; prints a table, exit code 1 if a mutation survives
python -m tests.mutations eos        # those whose name or place contains 'eos'
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A text that is replaced at one place of the program.

    The place is a function, 'areal_jax.config.objectives:resolve' or 'areal_jax.files:LineWriter.close', else a
    class, a whole module, or a file by its path. The text stands there exactly once, lines broken anywhere.
    """

    name: str
    where: str
    before: str
    after: str
    tests: str  # arguments of pytest


MUTATIONS = [
    Mutation(
        'let a critic pass values from one answer to the next',
        'areal_jax.learning.objective.gae:generalized_advantages',
        'is_last = mask[:, t], ids[:, t] != next_id',
        'is_last = mask[:, t], next_id < 0',
        'tests/learning/objective/test_gae.py',
    ),
    Mutation(
        'count masked tokens as steps of a critic',
        'areal_jax.learning.objective.gae:generalized_advantages',
        'next_value = np.where(trained, v[:, t], next_value)',
        'next_value = v[:, t]',
        'tests/learning/objective/test_gae.py',
    ),
    Mutation(
        'take the smaller of the two errors of a value',
        'areal_jax.learning.objective.value_loss:value_loss',
        'at_edge > squares',
        'at_edge < squares',
        'tests/learning/objective/test_value_loss.py',
    ),
    Mutation(
        'step the critic at the rate of the policy',
        'areal_jax.learning.optimizer.critic_optimizer:CriticOptimizer.apply',
        'jnp.float32(self.critic_rate)',
        'learning_rate',
        'tests/learning/test_critic.py',
    ),
    Mutation(
        'publish the critic',
        'areal_jax.learning.weights.interchange:export_weights',
        'trees.policy_leaves(trees.join(params, frozen))',
        'trees.join(params, frozen)',
        'tests/learning/test_critic.py',
    ),
    Mutation(
        'give the trunk the whole gradient of the values',
        'areal_jax.learning.critic:scale_gradient',
        'if factor == 1.0:',
        'if factor:',
        'tests/learning/test_critic.py',
    ),
    Mutation(
        'score an answer by the values of all its tokens',
        'areal_jax.learning.objective.preference:RewardModel.score_tokens',
        'tokens.read(_ENDS) * tokens.values',
        'tokens.values',
        'tests/learning/objective/test_preference.py',
    ),
    Mutation(
        'read a critic from a checkpoint that has none',
        'areal_jax.learning.critic:require_critic',
        'if CRITIC not in saved:',
        'if False:',
        'tests/learning/test_critic.py',
    ),
    Mutation(
        'drop the behaviour weight',
        'areal_jax.learning.objective.policy_loss:token_terms',
        'loss = -weight * factor * advantages',
        'loss = -factor * advantages',
        'tests/learning/objective/test_policy_loss.py',
    ),
    Mutation(
        'train the tokens that a gate closes',
        'areal_jax.learning.objective.policy_loss:token_terms',
        "if choices.veto is not None or choices.gate != 'none':",
        'if choices.veto is not None:',
        'tests/learning/objective/test_random_combinations.py',
    ),
    Mutation(
        'take a geometric ratio over the tokens that a correction keeps',
        'areal_jax.learning.objective.policy_loss:token_terms',
        'log_ratio = policy_log_ratio(choices.ratio, policy, denominator, over_sequence)',
        'shown = xp.where(abs(proximal - behavior) < 0.4, policy, denominator)\n'
        '    log_ratio = policy_log_ratio(choices.ratio, shown, denominator, over_sequence)',
        'tests/learning/objective/test_anchors.py',
    ),
    Mutation(
        'differentiate nothing in the token form of GSPO',
        'areal_jax.learning.objective.ratios:policy_log_ratio',
        'return whole + (policy - fixed(policy))',
        'return whole',
        'tests/learning/objective/test_identities.py',
    ),
    Mutation(
        'differentiate the weight of CISPO',
        'areal_jax.learning.objective.surrogates:cispo',
        'xp.exp(fixed(x.log_ratio))',
        'xp.exp(x.log_ratio)',
        'tests/learning/objective/test_identities.py',
    ),
    Mutation(
        'clip at the lower edge whatever the advantage',
        'areal_jax.learning.objective.surrogates:clip',
        'below = (x.advantages < 0) & (ratio < low)',
        'below = ratio < low',
        'tests/learning/objective/test_identities.py',
    ),
    Mutation(
        'whiten without the mean over tokens',
        'areal_jax.learning.objective.advantages:whiten',
        '(a - mean) / np.sqrt(variance + WHITEN_FLOOR)',
        'a / np.sqrt(variance + WHITEN_FLOOR)',
        'tests/learning/objective/test_anchors.py',
    ),
    Mutation(
        'divide the regression of OAPL by tokens',
        'areal_jax.config.objectives',
        "| {'aggregation': 'sequence_mean'}, 'arXiv 2602.19362'",
        "| {'aggregation': 'token_mean'}, 'arXiv 2602.19362'",
        'tests/learning/objective/test_anchors.py',
    ),
    Mutation(
        'take the second moment of a micro-batch',
        'areal_jax.learning.objective.prepared:keep_second_moment',
        'mask = batch.loss_mask',
        'if len(batch.loss_mask) > 1:\n'
        '        one = lambda m: type(batch)(**{name: x[m : m + 1] for name, x in batch.fields().items()})\n'
        '        gate = lambda m: keep_second_moment(one(m), policy_logprobs[m : m + 1], threshold)\n'
        '        return np.concatenate([gate(m) for m in range(len(batch.loss_mask))])\n'
        '    mask = batch.loss_mask',
        'tests/learning/objective/test_anchors.py',
    ),
    Mutation(
        'count answers in the mean over prompts',
        'areal_jax.learning.objective.aggregation:token_weights',
        "counted = of_prompt if aggregation == 'prompt_mean' else counts",
        'counted = counts',
        'tests/learning/objective/test_anchors.py',
    ),
    Mutation(
        'compare distributions from another largest logit',
        'areal_jax.models.vocabulary_divergence:_move',
        '+ sums.total * by)',
        ')',
        'tests/models/test_vocabulary_divergence.py',
    ),
    Mutation(
        'count whole what ties for the last places',
        'areal_jax.models.clamped_entropy:_find_edge',
        'jnp.where(fits, 1.0, (kept - above) / equal)',
        'jnp.ones(len(z))',
        'tests/models/test_clamped_entropy.py',
    ),
    Mutation(
        'compare with a teacher at the temperature of 1',
        'areal_jax.learning.vocabulary_statistics:vocabulary_statistics',
        'jnp.broadcast_to(temperature, states.shape[:2])',
        'jnp.ones(states.shape[:2])',
        'tests/learning/objective/test_distillation.py',
    ),
    Mutation(
        'keep the factor of an unbiased divergence constant',
        'areal_jax.learning.objective.penalties:kl_penalty',
        'token_kl * jnp.exp(clamp(policy - behavior))',
        'token_kl * jnp.exp(clamp(jax.lax.stop_gradient(policy) - behavior))',
        'tests/learning/objective/test_policy_loss.py',
    ),
    Mutation(
        'shift versions by one',
        'areal_jax.types:Trajectory.policy_versions',
        'return concatenate([prompt, *spans], np.int32)',
        'return np.roll(concatenate([prompt, *spans], np.int32), -1)',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'tag tokens with the version before',
        'areal_jax.rollout.stream:DecodeStream._deliver',
        'output.logprobs[place], version, cut(output.columns, place))',
        'output.logprobs[place], max(0, version - 1), cut(output.columns, place))',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'constant random key',
        'areal_jax.rollout.decode.sampling:_noise',
        'jax.random.fold_in(wrapped, index)',
        'wrapped',
        'tests/rollout/decode',
    ),
    Mutation(
        'write on for a row that has ended',
        'areal_jax.rollout.decode.generate:Generate._forward',
        'block = jnp.where(rows.live, block, self.sizes.padding_block)',
        'block = jnp.asarray(block)',
        'tests/rollout/decode/test_jax_backend.py',
    ),
    Mutation(
        'return the rows in the order of the batch',
        'areal_jax.rollout.decode.decode_rows:fill_batch',
        'places[i] = place',
        'places[i] = i',
        'tests/rollout/decode/test_jax_backend.py',
    ),
    Mutation(
        'one key for all samples of a group',
        'areal_jax.rollout.decode.sampling:request_keys',
        'jax.random.fold_in(jax.random.fold_in(key, draw), sample)',
        'jax.random.fold_in(key, draw)',
        'tests/rollout/decode',
    ),
    Mutation(
        'keep stale KV',
        'areal_jax.rollout.local_engine:LocalEngine._swap',
        "keep=self._next_kv_policy == 'keep'",
        'keep=True',
        'tests/control/test_controller.py tests/rollout/test_local_engine.py',
    ),
    Mutation(
        'reuse prefixes of another version',
        'areal_jax.rollout.blocks:PrefixIndex.clear',
        'for prefix in self._prefixes.values():\n            self._pool.release(prefix.held)\n'
        '        self._prefixes.clear()',
        'for prefix in list(self._prefixes.values()):\n            del self._prefixes[prefix.key]\n'
        '            prefix.key = prefix.key[0] + 1, prefix.key[1]\n'
        '            self._prefixes[prefix.key] = prefix',
        'tests/control/test_controller.py tests/rollout/test_local_engine.py',
    ),
    Mutation(
        'keep KV of several versions as that of one',
        'areal_jax.rollout.cache_table:CacheTable._keep',
        'if cached.version == version:',
        'if True:',
        'tests/rollout/test_cache_table.py',
    ),
    Mutation(
        'find what is kept of other weights',
        'areal_jax.rollout.block_index:BlockIndex.find',
        'self._whole.get((version, digest))',
        'self._whole.get((0, digest))',
        'tests/rollout/test_block_index.py',
    ),
    Mutation(
        'go on with a sequence that goes on otherwise',
        'areal_jax.rollout.block_index:BlockIndex.find',
        'if rest.startswith(one) and one in ends',
        'if one in ends',
        'tests/rollout/test_block_index.py',
    ),
    Mutation(
        'give the most recently used of the kept blocks away',
        'areal_jax.rollout.blocks:BlockPool._take',
        'self._kept.popitem(last=False)',
        'self._kept.popitem()',
        'tests/rollout/test_blocks.py',
    ),
    Mutation(
        'take an answer that is kept for one used when it was written',
        'areal_jax.rollout.blocks:BlockPool._note_used',
        'if block in self._kept:',
        'if False:',
        'tests/rollout/test_blocks.py',
    ),
    Mutation(
        'write over an answer that is kept where its group goes on',
        'areal_jax.rollout.cache_table:CacheTable._place_further',
        'tail is not None and tail in self.pool.index:',
        'tail is not None and False:',
        'tests/rollout/test_cache_table.py',
    ),
    Mutation(
        'let what is kept take room from what runs',
        'areal_jax.rollout.cache_table:CacheTable._place_further',
        'self.pool.release(own)',
        'own = [*own]',
        'tests/rollout/test_cache_table.py',
    ),
    Mutation(
        'begin with a kept block and do not copy it',
        'areal_jax.rollout.blocks:PrefixIndex.take_copies',
        'copies = [one.copy for one in prefixes if one.copy is not None]',
        'copies = []',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'keep an answer that has failed',
        'areal_jax.rollout.stream:DecodeStream._require_sound',
        'self._scheduler.remove(running.request_id)',
        'self._scheduler.end(running)',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'go on writing in a block that others read',
        'areal_jax.rollout.blocks:CachedSequence.tail_copy',
        'return self.prefix.tail, self.own[0]',
        'self.own[0] = self.blocks[len(self.prefix.whole)] = self.prefix.tail\n        return None',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'lose the blocks of an answer that has ended',
        'areal_jax.rollout.cache_table:CacheTable.close',
        'self.release(running)\n        self.prefixes.close',
        'self.prefixes.close',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'drop a prompt that a request is about to read',
        'areal_jax.rollout.blocks:PrefixIndex._frees_blocks',
        'return not prefix.expected and any(',
        'return any(',
        'tests/rollout/test_blocks.py',
    ),
    Mutation(
        'preempt the request that was admitted first',
        'areal_jax.rollout.scheduler:Scheduler._give_blocks',
        'youngest = self.table.youngest()',
        'youngest = self.table.admitted()[0]',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'stop all answers for a long prefill',
        'areal_jax.rollout.scheduler:Scheduler.next_step',
        'if needs_prefill and not (entries and self._prefilled >= MOST_PREFILLED * self._backend.largest_piece):',
        'if needs_prefill:',
        'tests/rollout/test_scheduler.py',
    ),
    Mutation(
        'denominator of the micro-batch',
        'areal_jax.learning.train_step:Programs._tokens',
        "denominator=scalars['denominator'],",
        "denominator=rows['loss_mask'].sum() + 0.0,",
        'tests/learning',
    ),
    Mutation(
        'drop EOS from the loss',
        'areal_jax.learning.packing.examples:next_token_form',
        'predicted = np.flatnonzero(trajectory.loss_mask)',
        'predicted = np.flatnonzero(trajectory.loss_mask)[:-1]',
        'tests/learning',
    ),
    Mutation(
        'drop EOS while decoding',
        'areal_jax.rollout.backend:DecodeOutput.counts',
        'return self.valid.sum(axis=0)',
        'return (self.valid & (self.tokens != 0)).sum(axis=0)',
        'tests/control/test_controller.py tests/rollout/test_local_engine.py',
    ),
    Mutation(
        'admit one group too many',
        'areal_jax.control.gate:StalenessGate.closed_by',
        'self.stale_capacity() <= 0',
        'self.stale_capacity() < 0',
        'tests/control/test_gate.py',
    ),
    Mutation(
        'train a group twice',
        'areal_jax.control.buffer:TrajectoryBuffer.take',
        'return taken',
        'return [self.put(group) or group for group in taken]',
        'tests/control',
    ),
    Mutation(
        'forget partial answers in a checkpoint',
        'areal_jax.control.episode:Row.copy',
        'list(self.segments))',
        '[])',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'share the prompt of a group with rows that begin otherwise',
        'areal_jax.learning.packing.packing:_units',
        'sharing.setdefault(example.prompt_key, [])',
        "sharing.setdefault(b'', [])",
        'tests/learning/packing/test_packing.py',
    ),
    Mutation(
        'count an episode once for each of its rows',
        'areal_jax.learning.objective.rewards:rewards_of',
        't.reward for t in group.heads',
        't.reward for t in group.trajectories',
        'tests/learning/objective/test_advantages.py',
    ),
    Mutation(
        'continue a turn that has been continued in its row',
        'areal_jax.agents.conversation:Conversation._continue',
        'if turn.end < len(before):',
        'if False:',
        'tests/agents/test_conversation.py',
    ),
    Mutation(
        'write the close of a turn that was sampled again',
        'areal_jax.agents.conversation:Conversation._continue',
        'closed=turn.closed',
        'closed=False',
        'tests/agents/test_conversation.py',
    ),
    Mutation(
        'answer a call that the record has once more',
        'areal_jax.agents.dialogue:Dialogue._find_recorded',
        'if not self._recorded:',
        'if True:',
        'tests/agents/test_dialogue.py',
    ),
    Mutation(
        'begin an answer anew that was under way',
        'areal_jax.agents.dialogue:Dialogue._answer',
        'prefix=begun,',
        'prefix=(),',
        'tests/agents/test_dialogue.py',
    ),
    Mutation(
        'let each turn have all sampled tokens of the episode',
        'areal_jax.agents.dialogue:Dialogue._room',
        'self._sampling.max_new_tokens - before',
        'self._sampling.max_new_tokens',
        'tests/agents/test_dialogue.py',
    ),
    Mutation(
        'keep the tokens of a record that no program reads',
        'areal_jax.agents.dialogue:Dialogue._find_recorded',
        'self.withdraw(self._recorded)',
        'pass',
        'tests/agents/test_dialogue.py',
    ),
    Mutation(
        'sample a retry again',
        'areal_jax.agents.gateway.session:Session.take',
        'if before:',
        'if False:',
        'tests/agents/gateway/test_gateway.py',
    ),
    Mutation(
        'keep a turn that no program got',
        'areal_jax.agents.program_agent:_Answering.end',
        'self._dialogue.withdraw(undelivered)',
        'pass',
        'tests/agents/gateway/test_gateway.py',
    ),
    Mutation(
        'let a key outlive its episode',
        'areal_jax.agents.gateway.gateway:Gateway._run',
        'self._sessions.pop(one, None)',
        'pass',
        'tests/agents/gateway/test_gateway.py',
    ),
    Mutation(
        'train a turn that the record of its environment lacks',
        'areal_jax.agents.gateway.session:Session._describe_end',
        'sorted({*undelivered, *unknown})',
        'undelivered',
        'tests/agents/environments',
    ),
    Mutation(
        'score an episode whose record has turns that nobody sampled',
        'areal_jax.agents.gateway.session:Session._describe_end',
        'if strangers and outcome is not None:',
        'if False:',
        'tests/agents/environments',
    ),
    Mutation(
        'take any turn of a record for any of the gateway',
        'areal_jax.agents.gateway.record_join:_is_same',
        'return said.text == turn.reply.text and',
        'return',
        'tests/agents/gateway/test_record_join.py',
    ),
    Mutation(
        'score an episode without its reward as 0',
        'areal_jax.agents.environments.episode_record:_read_ending',
        'if unscored or not rewards:',
        'if not rewards:',
        'tests/agents/environments',
    ),
    Mutation(
        'hide a wish from the model',
        'areal_jax.agents.conversation:Conversation.begin',
        'self._renderer.render(_add_wish(messages, wish), tools)',
        'self._renderer.render(messages, tools)',
        'tests/agents/gateway/test_gateway.py',
    ),
    Mutation(
        'count environment tokens among the sampled ones',
        'areal_jax.rollout.workflow:generate_turn',
        'for segment in before if segment.policy_version != NOT_GENERATED',
        'for segment in before',
        'tests/rollout/test_workflow_turns.py',
    ),
    Mutation(
        'let confined code signal others',
        'areal_jax.workers.sandbox.landlock:build_ruleset',
        '_SCOPES if abi >= 6 else 0',
        '0',
        'tests/workers/sandbox',
    ),
    Mutation(
        'let confined code read the system',
        'areal_jax.workers.sandbox.landlock:enter',
        '_call(_RESTRICT_SELF, ruleset, 0)',
        'pass',
        'tests/tasks/scoring/test_sandboxed_scorer.py',
    ),
    Mutation(
        'let confined code open sockets',
        'areal_jax.workers.sandbox.confinement:confine',
        'seccomp.install()',
        'pass',
        'tests/tasks/scoring/test_sandboxed_scorer.py',
    ),
    Mutation(
        'let a subclass of int cross to the tests of code',
        'areal_jax.tasks.code.plain_values:_to_tree',
        'kind = type(value)',
        'kind = next((one for one in (bool, int, str, float) if isinstance(value, one)), type(value))',
        'tests/tasks/code/test_plain_values.py',
    ),
    Mutation(
        'let a test that catches everything pass without a result',
        'areal_jax.tasks.code.checks_program:_run_test',
        'if answer.raised and isinstance(answer.raised[0], _UnusableError):',
        'if False:',
        'tests/tasks/code/test_judge.py -k catches',
    ),
    Mutation(
        'let a program give itself the label of an answer that passes',
        'areal_jax.tasks.code.program_run',
        "'wrong', 'syntax', 'exception', 'memory_limit', 'forbidden'",
        "'wrong', 'syntax', 'exception', 'memory_limit', 'forbidden', 'visible_only'",
        'tests/tasks/code/test_judge.py',
    ),
    Mutation(
        'train an answer that could not be judged as a wrong one',
        'areal_jax.tasks.code.code_task:score',
        'raise MachineFaultError(str(error)) from error',
        "return Score(0.0, 'wrong')",
        'tests/tasks/code/test_code_task.py',
    ),
    Mutation(
        'count a sleeping answer as one that the machine lost',
        'areal_jax.tasks.code.program_run:read_until_end',
        'if not any(map(is_runnable, pids)):',
        'if False:',
        'tests/tasks/code/test_judge.py -k time',
    ),
    Mutation(
        'run code of a model without a sandbox where none is asked for',
        'areal_jax.config.sandbox_fields:resolve_sandbox',
        'return LANDLOCK if runs_model_code(task) else NONE',
        'return NONE',
        'tests/config/test_sandbox_fields.py',
    ),
    Mutation(
        'give rows of one episode the same noise',
        'areal_jax.types:GenerationRequest.noise_sample',
        'self.sample + (self.row << _ROW_SHIFT)',
        'self.sample',
        'tests/agents/test_dialogue.py',
    ),
    Mutation(
        'leave the environment tokens of a cancelled call',
        'areal_jax.agents.conversation:Conversation.undo',
        'del row.segments[call.start - 1 :]',
        'pass',
        'tests/agents/test_conversation.py',
    ),
    Mutation(
        'save a lock-step run without its earlier versions',
        'areal_jax.control.lock_step:LockStep.copy_earlier_versions',
        'held = self._ring.earlier()',
        'held = []',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'admit to a lock-step batch while a checkpoint is taken',
        'areal_jax.control.lock_step:LockStep._admit_batch',
        "bound = self._admission.closed_by() if self._gate.admitted < wanted else 'schedule'",
        "bound = self._gate.closed_by() if self._gate.admitted < wanted else 'schedule'",
        'tests/control/test_controller.py',
    ),
    Mutation(
        'take a checkpoint while a lock-step version is loaded',
        'areal_jax.control.lock_step:LockStep.wait_loaded',
        'while self._loading:',
        'while False:',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'begin a resumed lock-step run with the newest version',
        'areal_jax.control.schedule:VersionRing.in_use',
        'if generated_update is None or generated_update < newest:',
        'if True:',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'go on from a checkpoint without a look at its arrays',
        'areal_jax.checkpoint.store:CheckpointStore._newest_intact',
        'verify_arrays(_leaves(arrays if part is None else arrays[part]))',
        'pass',
        'tests/checkpoint/test_fallback.py',
    ),
    Mutation(
        'every slice of a row attends as the first',
        'areal_jax.learning.forward:_over_mesh',
        "first_tokens(jax.lax.axis_index('context'), k.shape[1], context)",
        "first_tokens(0 * jax.lax.axis_index('context'), k.shape[1], context)",
        'tests/learning/test_meshes.py',
    ),
    Mutation(
        'predict from where a token stood before the row was cut',
        'areal_jax.learning.forward:predicting_states',
        'sources = slice_places(sources, inputs.shape[1], context)',
        'sources = sources + 0',
        'tests/learning/test_meshes.py',
    ),
    Mutation(
        'ask engines that stand still to stand still',
        'areal_jax.rollout.local_engine:LocalEngine.pause',
        'self._pausing, self._pause_mode = True, mode',
        'self._pausing, self._pause_mode = True, mode; self._parked.clear()',
        'tests/rollout/test_local_engine.py',
    ),
    Mutation(
        'flatten rows as if their tokens were not cut',
        'areal_jax.learning.forward:Stream.flatten',
        'x.reshape(shards, self._rows // shards, slices, self._tokens // slices, *x.shape[2:]).swapaxes(1, 2)',
        'x.reshape(shards, slices, self._rows // shards, self._tokens // slices, *x.shape[2:])',
        'tests/learning/test_meshes.py',
    ),
    Mutation(
        'keep the loss scale in the gradient',
        'areal_jax.learning.train_step:Programs._add',
        'unscale = 1.0 / self.settings.loss_scale',
        'unscale = 1.0',
        'tests/learning/test_forms.py',
    ),
    Mutation(
        'forget the centre of the trust region after the first step',
        'areal_jax.learning.update:train',
        'if first and settings.recomputes:',
        'if False:',
        'tests/learning/test_forms.py',
    ),
    Mutation(
        'count ages over all generated tokens',
        'areal_jax.learning.diagnostics.data_metrics:age_metrics',
        'np.bincount(ages[trained])',
        'np.bincount(ages[ids >= 0])',
        'tests/app/test_step_metrics.py',
    ),
    Mutation(
        'let the second producer of a metric win',
        'areal_jax.telemetry.metrics:merge',
        'if name in values:',
        'if False:',
        'tests/telemetry/test_metrics.py',
    ),
    Mutation(
        'look at the tokens of a finished answer one by one',
        'areal_jax.control.groups:RunningGroups._run_episode',
        'lengths = [len(segment.tokens) for segment in segments]',
        'lengths = [sum(1 for _ in segment.tokens) for segment in segments]',
        'tests/control/test_work_per_token.py',
    ),
    Mutation(
        'forget at a resume what was decoded before the save',
        'areal_jax.app.run.observer:StepObserver.restore',
        "self._engines.restore(state['engines'])",
        'pass',
        'tests/app/test_session.py',
    ),
    Mutation(
        'forget at a resume why admission was closed',
        'areal_jax.control.controller:Controller.restore',
        "self._admission.held.restore(state['admission'])",
        'pass',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'put a checkpoint down to the bound before it',
        'areal_jax.control.controller:Controller._pause',
        'self._admission.note_bound(self._admission.closed_by())\n        await self._pool.pause()',
        'await self._pool.pause()',
        'tests/control/test_controller.py',
    ),
    Mutation(
        'call a killed run finished',
        'areal_jax.app.run.rebuild:unfinished_facts',
        'finished=False,',
        'finished=True,',
        'tests/test_main_report.py',
    ),
    Mutation(
        'publish adapters without their scale',
        'areal_jax.models.lora:merge_adapters',
        'lora.scale * jnp.matmul',
        'jnp.matmul',
        'tests/models/test_lora.py',
    ),
    Mutation(
        'stretch short wavelengths too',
        'areal_jax.models.rotary:stretch',
        'frequencies * (kept + (1 - kept) / scaling.factor)',
        'frequencies / scaling.factor',
        'tests/models/test_rotary.py',
    ),
    Mutation(
        'record the cut softmax as behavior',
        'areal_jax.rollout.decode.sampling:sample_tokens',
        'return tokens, logprob_of(logits, tokens, temperature, sums), changed_logprobs',
        'return tokens, changed_logprobs, changed_logprobs',
        'tests/rollout/decode/test_sampling.py',
    ),
    Mutation(
        'forget the cut softmax where segments are joined',
        'areal_jax.control.episode:join_segments',
        'join([first.columns, second.columns])',
        'first.columns',
        'tests/control/test_episode.py',
    ),
    Mutation(
        'forget the cut softmax in a checkpoint',
        'areal_jax.checkpoint.state:decode_segment',
        'columns={n: find(n).read(record[n], len(tokens)) for n in sorted(further) if record[n] is not None}',
        'columns={}',
        'tests/checkpoint/test_state.py',
    ),
    Mutation(
        'leave the columns of a token out of its row',
        'areal_jax.learning.packing.rows',
        'self._row.columns[name][place] = values',
        'pass',
        'tests/test_columns.py',
    ),
    Mutation(
        'train with a cut softmax unasked',
        'areal_jax.learning.learner:SpmdLearner.update',
        "if settings.truncated_sampling == 'refuse':",
        'if False:',
        'tests/learning/objective/test_truncation.py',
    ),
    Mutation(
        'report the mass of tokens that are not trained',
        'areal_jax.learning.objective.truncation:kept_mass_metrics',
        'if s.policy_version >= oldest]',
        'if s.policy_version >= 0]',
        'tests/learning/objective/test_truncation.py',
    ),
    Mutation(
        'publish whatever training made',
        'areal_jax.publication.device_channel:DeviceChannel.transfer',
        'known | finite_manifest(changed, version)',
        'known | device_manifest(changed)',
        'tests/publication/test_device_channel.py',
    ),
    Mutation(
        'write whatever training made',
        'areal_jax.publication.files_channel:FilesChannel.transfer',
        'known | finite_host_manifest(changed, version)',
        'known | host_manifest(changed)',
        'tests/publication/test_files_channel.py',
    ),
    Mutation(
        'write buffers that an engine uses',
        'areal_jax.publication.weight_buffers:WeightBuffers.in_use',
        'return bool(self._lent)',
        'return False',
        'tests/publication/test_weights_reader.py',
    ),
    Mutation(
        'swap weights whose digests nobody compared',
        'areal_jax.publication.weight_buffers:WeightBuffers.apply',
        'require_equal(delta.header.leaves, found, end.version)',
        'pass',
        'tests/publication/test_weights_reader.py',
    ),
    Mutation(
        'move the base with a version that was not sent',
        'areal_jax.publication.record_channel:RecordChannel.transfer',
        'chain, self._chain = self._chain, None',
        'chain = self._chain',
        'tests/publication/test_record_channel.py',
    ),
    Mutation(
        'remove a whole version that deltas need',
        'areal_jax.publication.carriers.files_carrier:FilesSender.release',
        'kept.update(_chain(needed, deltas))',
        'kept.add(needed)',
        'tests/publication/carriers/test_files_carrier.py',
    ),
    Mutation(
        'forget that large gaps are in a list of their own',
        'areal_jax.publication.delta:Changes.positions',
        'gaps[self.gaps == LARGE_GAP] = self.large',
        'pass',
        'tests/publication/test_delta.py',
    ),
    Mutation(
        'write what belongs to other processes too',
        'areal_jax.publication.part_writer:PartWriter._own_files',
        'if owner == jax.process_index()]',
        ']',
        'tests/publication/test_part_writer.py',
    ),
    Mutation(
        'give one process the leaves of all',
        'areal_jax.sharding.shares:Shares._plan',
        'given[slot] += math.prod(shape) * dtype.itemsize',
        'pass',
        'tests/sharding/test_shares.py',
    ),
    Mutation(
        'take a frame again',
        'areal_jax.distributed.wire:Connection.receive',
        ' or counter != self._received',
        '',
        'tests/distributed/test_wire.py',
    ),
    Mutation(
        'believe the length of a frame before its HMAC',
        'areal_jax.distributed.wire:Connection.receive',
        'not hmac.compare_digest(tag, expected) or ',
        '',
        'tests/distributed/test_wire.py',
    ),
    Mutation(
        'let in who does not have the key',
        'areal_jax.distributed.wire:prove_as_server',
        "if not hmac.compare_digest(proof, _mac(key, b'client' + theirs + ours)):",
        'if False:',
        'tests/distributed/test_handshake.py',
    ),
    Mutation(
        'read a key that others know',
        'areal_jax.distributed.key:_read_private',
        'if (mode := stat.S_IMODE(status.st_mode)) != _MODE:',
        'if (mode := stat.S_IMODE(status.st_mode)) & 0o1000:',
        'tests/distributed/test_key.py',
    ),
    Mutation(
        'serialise a command for each process',
        'areal_jax.distributed.peers:Peers._send',
        'body = encode_message(Message(command.lane, number, command))',
        'body = [encode_message(Message(command.lane, number, command)) for _ in peers][0]',
        'tests/distributed/test_peers.py',
    ),
    Mutation(
        'send large commands to each of many processes',
        'areal_jax.distributed.peers:Peers._send',
        'relayed = self._relays and',
        'relayed = False and',
        'tests/distributed/test_relays.py',
    ),
    Mutation(
        'pass nothing on',
        'areal_jax.distributed.peers:Peer._take_in',
        'if frame.relayed and self.relay_to:',
        'if False:',
        'tests/distributed/test_relays.py',
    ),
    Mutation(
        'wait for the others when one process is lost',
        'areal_jax.distributed.peers:Peers._give_up',
        'peer.give_up(self._lost)',
        'pass',
        'tests/distributed/test_peers.py',
    ),
    Mutation(
        'take a late answer for that of another command',
        'areal_jax.distributed.peers:_wait',
        'if message.number == number and isinstance(message.content, Answer):',
        'if isinstance(message.content, Answer):',
        'tests/distributed/test_peers.py',
    ),
    Mutation(
        'role: take the first holder of a name',
        'areal_jax.registry.entries:read_entries',
        'newest = {name: max(orders)',
        'newest = {name: min(orders)',
        'tests/registry/test_entries.py',
    ),
    Mutation(
        'receiver: give up where a delta does not fit',
        'areal_jax.publication.hf_receiver:HfReceiver._hold',
        'first = error',
        'raise',
        'tests/publication/test_hf_receiver.py',
    ),
    Mutation(
        'receiver: fetch the whole record each time',
        'areal_jax.publication.hf_receiver:HfReceiver._hold',
        'held is not None and held.version < wanted.version',
        'False',
        'tests/publication/test_hf_receiver.py',
    ),
    Mutation(
        'receiver: keep the directory of every version',
        'areal_jax.publication.hf_receiver:HfReceiver._remove_old',
        'v not in kept',
        'False',
        'tests/publication/test_hf_receiver.py',
    ),
    Mutation(
        'receiver: write over what an error still refers to',
        'areal_jax.publication.hf_receiver:HfReceiver._hold',
        'self._buffers.in_use',
        'False',
        'tests/publication/test_hf_receiver.py',
    ),
    Mutation(
        'role: leave the files of those before',
        'areal_jax.registry.entries:Registration.remove_earlier',
        'if order < self.entry.order:',
        'if False:',
        'tests/registry/test_entries.py',
    ),
    Mutation(
        'role: of two that count alike both hold the name',
        'areal_jax.registry.entries:Registration._require_newest',
        'if newest <= self.entry.order:',
        'if newest[0] <= self.entry.order[0]:',
        'tests/registry/test_entries.py',
    ),
    Mutation(
        'role: take the rest of a dead process for a living one',
        'areal_jax.registry.presence:Presence.look',
        'if before is not None and before[0] == entry.order and before[1] != entry.heartbeat:',
        'if True:',
        'tests/registry/test_presence.py',
    ),
    Mutation(
        'role: take a lock that two have',
        'areal_jax.registry.self_test:_try_files',
        'fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)',
        'raise BlockingIOError',
        'tests/registry/test_self_test.py',
    ),
    Mutation(
        'role: join an attempt without an invitation',
        'areal_jax.distributed.attempt:join_attempt',
        'if attempt is not None and attempt.members[index : index + 1] == (own.holder,):',
        'if attempt is not None:',
        'tests/distributed/test_attempt.py',
    ),
    Mutation(
        'role: answer what is meant for another process',
        'areal_jax.rollout.http.server.replies:_require_meant',
        "if holder and meant not in ('', holder):",
        'if False:',
        'tests/rollout/http/server/test_limits.py',
    ),
    Mutation(
        'role: play with another config',
        'areal_jax.app.roles.roles:await_controller',
        'if theirs.get(field) != value:',
        'if False:',
        'tests/app/roles/test_roles.py',
    ),
    Mutation(
        'role: a controller with jax',
        'areal_jax.app.run.loop',
        'import contextlib',
        'import contextlib\nimport jax',
        'tests/app/roles/test_roles.py',
    ),
    Mutation(
        'role: share a mesh unevenly',
        'areal_jax.config.cluster:LearnerLayout.__post_init__',
        'if self.devices % self.processes:',
        'if False:',
        'tests/config/test_cluster.py',
    ),
    Mutation(
        'role: begin with the first engine',
        'areal_jax.rollout.servers.server_pool:ServerPool.await_serving',
        '(serving := self._count_serving()) < count',
        '(serving := self._count_serving()) < 1',
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'role: start again what can never run',
        'launch.roles:find_cause',
        'return refused[0], True',
        'return refused[0], False',
        'tests/launch/test_roles.py',
    ),
    Mutation(
        'role: let the learners go on without their controller',
        'launch.roles:_Roles._judge',
        'for program in self._programs.values():\n            program.kill()\n        if self._is_deserted:',
        'if self._is_deserted:',
        'tests/launch/test_roles.py',
    ),
    Mutation(
        'search all objects as often as Python does',
        'areal_jax.app.process.setup:FullCollections.note',
        'self._set(waiting=True)',
        'pass',
        'tests/app/process/test_setup.py',
    ),
    Mutation(
        'save whatever training made',
        'areal_jax.learning.learner:SpmdLearner.save',
        "self.require_finite('the trained weights', 'lower optimizer.learning_rate')",
        'pass',
        'tests/learning/weights/test_finiteness.py',
    ),
    Mutation(
        'look for NaN in weights and not in the optimizer state',
        'areal_jax.learning.learner_state:LearnerState.weights_and_optimizer',
        "trees.join(self.params, self.frozen) | {'optimizer': self.optimizer}",
        'trees.join(self.params, self.frozen)',
        'tests/learning/weights/test_finiteness.py',
    ),
    Mutation(
        'deliver log-probs that are not finite',
        'areal_jax.rollout.backend:DecodeOutput.unsound',
        'wrong = self.valid & ~((logprobs > -np.inf) & (logprobs <= LARGEST_LOGPROB))',
        'wrong = self.valid & (logprobs > LARGEST_LOGPROB)',
        'tests/rollout/test_local_engine.py',
    ),
    Mutation(
        'leave filtered groups out of every denominator',
        'areal_jax.learning.update:train',
        'rows, denominator * scale, version',
        'rows, denominator, version',
        'tests/learning/objective/test_aggregation.py',
    ),
    Mutation(
        'decay the embedding with the matrices',
        'areal_jax.learning.optimizer.directions:decay_matrices',
        "if is_matrix and name != 'embedding' else update",
        'if is_matrix else update',
        'tests/learning/optimizer/test_optimizer.py',
    ),
    Mutation(
        'decay stacked norms as matrices',
        'areal_jax.learning.optimizer.directions:decay_matrices',
        'is_matrix = param.ndim - is_stacked(name) >= 2',
        'is_matrix = param.ndim >= 2',
        'tests/learning/optimizer/test_optimizer.py',
    ),
    Mutation(
        'take any reply for the answer at hand',
        'areal_jax.workers.worker_process:WorkerProcess.ask',
        "reply.get('id') != number",
        'False',
        'tests/tasks/test_hostile_scorers.py -k replies',
    ),
    Mutation(
        'let the forked child of a scorer reply',
        'areal_jax.tasks.scoring.scorer_process:_end_fork',
        'if os.getpid() != own_pid:',
        'if False:',
        'tests/tasks/test_hostile_scorers.py -k forks_below',
    ),
    Mutation(
        'adopt no orphan of a scorer',
        'areal_jax.tasks.scoring.worker:main',
        'adopt_orphans()',
        'pass',
        'tests/tasks/scoring/test_worker.py -k detached',
    ),
    Mutation(
        'never start the count of failures again',
        'areal_jax.evaluation.evaluator:Evaluator.answer_all',
        'failures.note_verified()',
        'pass',
        'tests/evaluation',
    ),
    Mutation(
        'verify a cancelled answer',
        'areal_jax.rollout.workflow:SingleTurn.run',
        "if generation.finish_reason != 'cancelled':",
        'if True:',
        'tests/control/test_controller.py -k cancelled',
    ),
    Mutation(
        'leave the requests of a group where least is outstanding',
        'areal_jax.rollout.pool:Pool.generate',
        'else ledger.engine_of_group(request)',
        'else None',
        'tests/rollout/test_pool.py',
    ),
    Mutation(
        'forget in the ledger what was delivered',
        'areal_jax.rollout.load_ledger:Ledger.note_generated',
        'entry.outstanding -= tokens\n            self._add(entry.engine, -tokens)',
        'pass',
        'tests/rollout/test_pool.py',
    ),
    Mutation(
        'forget what was received when a request moves',
        'areal_jax.rollout.servers.request_placement:Placement._place',
        'member, request = self._members[name], moving.rest()',
        'member, request = self._members[name], moving.request',
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'give requests to a server whose outcome is unknown',
        'areal_jax.rollout.servers.server_pool:ServerPool._give_up',
        'self._stop_routing(member)\n        member.change_state(state, reason)',
        'member.change_state(state, reason)',
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'use a server again without a fence',
        'areal_jax.rollout.servers.keeper:Keeper._recover',
        "await member.act('fence', member.engine.fence, settings.ask_s)",
        'pass',
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'believe that a server holds what it was given',
        'areal_jax.rollout.servers.keeper:Keeper._acknowledge',
        'if not _holds(held, target):',
        'if False:',
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'count each request of a lost connection as a failure of the server',
        'areal_jax.rollout.servers.server_pool:ServerPool._note_failure',
        "if member.state != 'serving' or member.is_suspect:",
        "if member.state != 'serving':",
        'tests/rollout/servers/test_server_pool.py',
    ),
    Mutation(
        'take looks at servers for a sign that the run goes on',
        'areal_jax.control.clocks.real:RealClock._release',
        'if _is_progress(item):',
        'if True:',
        'tests/control/test_clocks.py',
    ),
    Mutation(
        'train the rest of a group that lost an answer',
        'areal_jax.control.controller:Controller._finish_group',
        'if detail := group.describe_loss():',
        "if detail := '':",
        'tests/rollout/servers/test_run.py',
    ),
    Mutation(
        'load one engine after another',
        'areal_jax.rollout.local_engine:LocalEngine.__init__',
        'self.name, self._publish_lane = engine_lane(index), publish_lane(index)',
        'self.name, self._publish_lane = engine_lane(index), publish_lane(0)',
        'tests/control/test_controller.py -k lane_of_its_own',
    ),
    Mutation(
        'lose what was generated before a pause',
        'areal_jax.rollout.stream:DecodeStream.requeue',
        'self.deliver()\n        self._scheduler.requeue()',
        'self._scheduler.requeue()',
        'tests/rollout/test_engines.py',
    ),
    Mutation(
        'keep a cancelled slot alive',
        'areal_jax.rollout.slot_table:SlotTable.remove',
        'self.leave(running)\n        return running',
        'return running',
        'tests/rollout/test_slot_table.py',
    ),
    Mutation(
        'evaluate under the weights of training',
        'areal_jax.rollout.pool:Pool.pin',
        'lambda engine: engine.pin(published))',
        'lambda engine: engine.pin(type(published)(published.version, "", (0, 0))))',
        'tests/evaluation/test_beside.py',
    ),
    Mutation(
        'let an evaluation take every second dispatch',
        'areal_jax.rollout.pinned:PinnedRequests._has_turn',
        'self._dispatches_of_training >= self._every - 1',
        'self._dispatches_of_training >= 1',
        'tests/evaluation/test_beside.py',
    ),
    Mutation(
        'let an evaluation delay training under the virtual clock',
        'areal_jax.rollout.stream',
        "EVALUATION = Kinds('evaluation_prefill', 'evaluation_decode', in_background=True)",
        "EVALUATION = Kinds('evaluation_prefill', 'evaluation_decode', in_background=False)",
        'tests/evaluation/test_beside.py',
    ),
    Mutation(
        'put requests of an evaluation into a checkpoint',
        'areal_jax.rollout.pool:Pool.order',
        'if request.version is None\n        ]',
        ']',
        'tests/evaluation/test_beside.py',
    ),
    Mutation(
        'release a pinned version',
        'areal_jax.publication.device_channel:DeviceChannel.release',
        ' or v in pinned',
        '',
        'tests/publication/test_device_channel.py',
    ),
    Mutation(
        'a pause of a server does not wait for what it aborts',
        'areal_jax.rollout.http.service:GenerationService.pause',
        "if mode in ('abort', 'wait'):",
        "if mode == 'wait':",
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'a paused server begins requests',
        'areal_jax.rollout.http.service:GenerationService._submit',
        'elif self._pause is not None:',
        'elif self._staged is not None:',
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'new weights keep the name of the old ones',
        'areal_jax.rollout.http.service:GenerationService.swap',
        'label if label is not None else self._labels[self._version]',
        'self._labels[self._version]',
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'a failed staging leaves earlier weights staged',
        'areal_jax.rollout.http.service:GenerationService.stage',
        'self._updating, self._staged = True, None',
        'self._updating = True',
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'an abort means every request whose name begins so',
        'areal_jax.rollout.http.service:GenerationService.cancel',
        'name in wanted or submission.group in wanted',
        'name.startswith(tuple(wanted))',
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'prompts of different salts share KV',
        'areal_jax.rollout.running_request:RunningRequest.prompt_key',
        "if salt else b''",
        "if False else b''",
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'keys and values that are kept count as retracted',
        'areal_jax.rollout.scheduler:Scheduler.change_version',
        'if not (keep and _is_ready(running)):\n                self.cache.retract(running)',
        'running.retractions += 1\n            if not (keep and _is_ready(running)):\n'
        '                self.cache.release(running)',
        'tests/rollout/http/test_service.py',
    ),
    Mutation(
        'let the text of a mark count inside of a string',
        'areal_jax.rollout.http.wire.notation:CallParser._scan_call',
        'if self._in_string and len(mark) > 1:',
        'if self._in_string and len(mark) > 99:',
        'tests/rollout/http/wire/test_notation.py',
    ),
    Mutation(
        'decide on text that a mark may begin with',
        'areal_jax.rollout.http.wire.notation:CallParser._scan_text',
        'clear = len(self._text) - _count_begun(self._text, self._begin)',
        'clear = len(self._text)',
        'tests/rollout/http/wire/test_notation.py',
    ),
    Mutation(
        'lose what a call that breaks off has swallowed',
        'areal_jax.rollout.http.wire.notation:CallParser._reopen',
        "self._text, self._call = ''.join([*rest, self._text]), []",
        'self._call = []',
        'tests/rollout/http/wire/test_notation.py',
    ),
    Mutation(
        'take the spelled mark of a model that has a token for it',
        'areal_jax.rollout.http.wire.notation:CallParser.__init__',
        'self._begin = BEGIN_TOKEN if BEGIN_TOKEN in tokens else notation.begin',
        'self._begin = notation.begin',
        'tests/rollout/http/wire/test_answer_reader.py',
    ),
    Mutation(
        'write arguments anew',
        'areal_jax.rollout.http.wire.notation:read_hermes',
        'return require_call(name, arguments, written)',
        'return require_call(name, arguments, json.dumps(arguments))',
        'tests/rollout/http/wire/test_notation.py',
    ),
    Mutation(
        'take a call of a package that no client could send back',
        'areal_jax.rollout.http.wire.renderers_parser:_read_call',
        'return require_call(call.name, STRICT_JSON.decode(written), written)',
        'return str(call.name), written',
        'tests/rollout/http/wire/test_renderers_parser.py',
    ),
    Mutation(
        'lose reasoning that begins in the prompt',
        'areal_jax.rollout.http.wire.renderers_parser:RenderersParser._read',
        'prompt_ids=before',
        'prompt_ids=None',
        'tests/rollout/http/wire/test_renderers_parser.py',
    ),
    Mutation(
        'read a whole answer with the stop string that ended it',
        'areal_jax.rollout.http.wire.text:cut_stop',
        'text[: begin + (len(finish.matched) if keep_stop else 0)]',
        'text',
        'tests/rollout/http/wire/test_text.py',
    ),
    Mutation(
        'show a model what cannot change its answer',
        'areal_jax.rollout.http.wire.tools:read_function',
        'function.take_ignored(*_IGNORED)',
        'order += [name for name in _IGNORED if function.take(name) is not None]',
        'tests/rollout/http/server/test_tool_calls.py',
    ),
    Mutation(
        'call an answer that was cut complete because it has a call',
        'areal_jax.rollout.http.wire.openai:_finish_word',
        "answer.finish.reason == 'stop' and answer.calls",
        'answer.calls',
        'tests/rollout/http/server/test_tool_calls.py',
    ),
    Mutation(
        'end each piece of a text as an item of its own',
        'areal_jax.rollout.http.wire.responses:_add_text',
        'written.in_text, written.parts = True, written.parts + 1',
        'written.parts = written.parts + 1',
        'tests/rollout/http/wire/test_responses.py',
    ),
    Mutation(
        'count cached tokens twice for Anthropic',
        'areal_jax.rollout.http.wire.messages:_count',
        'len(answer.prompt_tokens) - cached',
        'len(answer.prompt_tokens)',
        'tests/rollout/http/wire/test_messages.py',
    ),
    Mutation(
        'count no wish that a stream misses',
        'areal_jax.rollout.http.server.generation:_write_events',
        'exchange.note_misses()',
        'pass',
        'tests/rollout/http/server/test_tool_calls.py',
    ),
    Mutation(
        'stream the beginning of a stop string',
        'areal_jax.rollout.http.wire.text:AnswerText.extend',
        'clear = len(self._held) - self._suspicious()',
        'clear = len(self._held)',
        'tests/rollout/http/wire/test_text.py',
    ),
    Mutation(
        'leave out tokens of an event',
        'areal_jax.rollout.http.wire.sglang:_write_on',
        'written.tokens, written.characters = len(tokens), len(text)',
        'written.tokens, written.characters = len(tokens) + 1, len(text)',
        'tests/rollout/http/wire/test_sglang.py',
    ),
    Mutation(
        'a reader that leaves goes on to be served',
        'areal_jax.rollout.http.server.bridge:Exchange.close',
        'for answer in self.answers if answer.finish is None}',
        'for answer in self.answers if answer.finish is not None}',
        'tests/rollout/http/server/test_generation.py',
    ),
    Mutation(
        'requests without a seed share their noise',
        'areal_jax.rollout.http.server.bridge:Bridge.describe',
        'noise = (draw, self._seed) if',
        'noise = (0, self._seed) if',
        'tests/rollout/http/server/test_generation.py',
    ),
    Mutation(
        'the queue of a server has no bound',
        'areal_jax.rollout.http.server.limits:Load.require_room',
        'if self.answers + answers > limits.requests:',
        'if answers > limits.requests:',
        'tests/rollout/http/server/test_limits.py',
    ),
    Mutation(
        'a server asks nobody for its key',
        'areal_jax.rollout.http.server.replies:guard',
        'and not _has_key(request, api_key)',
        'and not api_key',
        'tests/rollout/http/server/test_limits.py',
    ),
    Mutation(
        'decode with plain programs what changes the softmax',
        'areal_jax.rollout.decode.decode_rows:is_plain',
        'not params.changes_softmax and',
        'not params.cuts and',
        'tests/rollout/decode/test_adjustments.py',
    ),
    Mutation(
        'replay: release the run that began first',
        'areal_jax.control.clocks.replay:ReplayClock._release_next',
        "interval = self._by_number.pop(event['run'], None)",
        'interval = self._by_number.pop(min(self._by_number), None)',
        'tests/control/test_replay.py',
    ),
    Mutation(
        'replay: the time of an event is not that of the log',
        'areal_jax.control.clocks.replay:ReplayClock._release_next',
        "self._now = event['time']",
        "self._now = event['time'] + 1e-9",
        'tests/control/test_replay.py',
    ),
    Mutation(
        'replay: any reply is as good',
        'areal_jax.control.clocks.replay:ReplayClock._take_outcome',
        "interval.result = json.loads(event['reply'])",
        "interval.result = {'reward': 0.0}",
        'tests/control/test_replay.py',
    ),
    Mutation(
        'replay: check no event',
        'areal_jax.control.recording:Recording.check',
        'if ours == theirs:',
        'if ours:',
        'tests/control/test_replay.py',
    ),
    Mutation(
        'replay: drop no start that was cut off',
        'areal_jax.app.run.start_records:note_start',
        "kept = [earlier for earlier in before if earlier['seq'] < seq]",
        'kept = before',
        'tests/app/run/test_replay.py -k noted',
    ),
    Mutation(
        'log rules: any draws are trained',
        'areal_jax.report.rules.log_rules:LogRules._consume',
        'if draws != lowest:',
        'if len(draws) != len(lowest):',
        'tests/report/rules/test_log_rules.py',
    ),
    Mutation(
        'log rules: a draw that is dropped stays counted',
        'areal_jax.report.rules.log_rules:LogRules._break_rules',
        'self._admitted -= 1',
        'self._admitted -= 0',
        'tests/report/rules/test_log_rules.py',
    ),
    Mutation(
        'ledger: forget what a cancelled request was decoding',
        'areal_jax.rollout.stream:DecodeStream._decode',
        "**({'discarded': lost} if lost else {})",
        '**{}',
        'tests/telemetry/test_token_ledger.py',
    ),
    Mutation(
        'ledger: begin anew at a resume',
        'areal_jax.app.run.observer:StepObserver.restore',
        'self.ledger.restore(kept)',
        'pass',
        'tests/app/test_token_ledger.py',
    ),
    Mutation(
        'ledger: end a run that does not close as if it did',
        'areal_jax.app.run.loop:Loop._program',
        'self._context.unsaved = self._context.unsaved or fault',
        'pass',
        'tests/app/test_token_ledger.py',
    ),
    Mutation(
        'ledger: count a skipped minibatch as trained',
        'areal_jax.learning.diagnostics.data_metrics:fate_metrics',
        'in_loss = trained if was_applied else unused',
        'in_loss = trained',
        'tests/learning/diagnostics/test_ratios_by_age.py',
    ),
    Mutation(
        'ledger: forget the answers that a partial group lost',
        'areal_jax.telemetry.token_ledger:TokenLedger.apply',
        "elif event['kind'] == 'buffer' and event['partial']:",
        'elif False:',
        'tests/telemetry/test_token_ledger.py',
    ),
    Mutation(
        'ratio split: let a token drift with its own update',
        'areal_jax.learning.diagnostics.ratio_split:split_ratio',
        '[:, None] > tokens.packed_versions',
        '[:, None] >= tokens.packed_versions',
        'tests/learning/diagnostics/test_ratio_split.py',
    ),
    Mutation(
        'ratio split: take the mismatch under the newest weights',
        'areal_jax.learning.diagnostics.ratio_split:split_ratio',
        '(tokens.versions - first)[None]',
        'np.full_like(tokens.versions, len(scored) - 1)[None]',
        'tests/learning/diagnostics/test_ratio_split.py',
    ),
    Mutation(
        'ratio split: score every answer',
        'areal_jax.learning.diagnostics.ratio_split:is_sampled',
        '< share * 2**64',
        '< 2**64',
        'tests/learning/diagnostics/test_ratio_split.py',
    ),
    Mutation(
        'ratio split: keep more versions than fit',
        'areal_jax.learning.diagnostics.weight_ring:WeightRing.add',
        'while len(self._held) >= self._most and',
        'while False and',
        'tests/learning/diagnostics/test_ratio_split.py',
    ),
    Mutation(
        'leave the cap out of the effective sample size',
        'areal_jax.learning.objective.corrections:behavior_weight',
        'return weight if cap is None else xp.where(weight > cap, cap, weight)',
        'return weight',
        'tests/learning/objective/test_policy_loss.py',
    ),
    Mutation(
        'leave the steps inside the update out of its ages',
        'areal_jax.telemetry.optimizer_ages:OptimizerAges.note_update',
        'max(ages) + inside[1]',
        'max(ages)',
        'tests/telemetry/test_optimizer_ages.py',
    ),
    Mutation(
        'compare the trained answers with the masked ones alone',
        'areal_jax.report.censoring',
        "_LEFT_OUT = ('masked', 'dropped')",
        "_LEFT_OUT = ('masked',)",
        'tests/report/test_censoring.py',
    ),
    Mutation(
        'let an arm outlive its sweep',
        'areal_jax.app.sweep.arm_process:become',
        'die_with_parent()',
        'pass',
        'tests/app/sweep/test_main_sweep.py',
    ),
    Mutation(
        'leave unfinished arms out of the table',
        'areal_jax.app.sweep.tables:_group_rows',
        'for result in group.arms:',
        'for result in group.finished:',
        'tests/app/sweep/test_main_sweep.py',
    ),
    Mutation(
        'let calls of kernels share their memory',
        'areal_jax/native/threads.h',
        'return Keep(memory->Take(size)).get();',
        'return memory->Take(size).get();',
        'tests/native/test_preference.py',
    ),
    Mutation(
        'hold arrays that are on the disk',
        'areal_jax.checkpoint.store:_write_everywhere',
        'leaves.clear()',
        'pass',
        'tests/checkpoint/test_store.py',
    ),
    Mutation(
        'train the last block of a round again',
        'areal_jax.learning.blockwise.blocks:shuffled',
        'order[:2] = order[1], order[0]',
        'pass',
        'tests/learning/blockwise/test_blocks.py',
    ),
    Mutation(
        'forget the moments of other blocks',
        'areal_jax.learning.blockwise.block_learner:BlockLearner._turn_to',
        'self._moments[self._block] = to_host(state.optimizer[_MOMENTS])',
        'pass',
        'tests/learning/blockwise/test_block_learner.py -k moments',
    ),
    Mutation(
        'keep the moments of a block that is dropped',
        'areal_jax.learning.blockwise.block_learner:BlockLearner._turn_to',
        'self._moments.clear()',
        'pass',
        'tests/learning/blockwise/test_block_learner.py -k resumed',
    ),
    Mutation(
        'publish leaves that did not change',
        'areal_jax.learning.blockwise.block_learner:BlockLearner.publish',
        'for block in sorted(self._changed)',
        'for block in range(self.blocks.blocks)',
        'tests/learning/blockwise/test_block_learner.py -k publication',
    ),
    Mutation(
        'let learners of other blocks share programs',
        'areal_jax.learning.train_step:Programs',
        'trained: tuple[str, ...] | None = None',
        'trained: tuple[str, ...] | None = dataclasses.field(default=None, compare=False)',
        'tests/learning/blockwise/test_block_learner.py -k no_bit',
    ),
    Mutation(
        'take every leaf for unchanged',
        'areal_jax.publication.unchanged:UnchangedLeaves.find',
        'if source() is leaves[path]',
        'if True',
        'tests/publication/test_unchanged.py',
    ),
    Mutation(
        'link a file of which one leaf is unchanged',
        'areal_jax.publication.files_channel:FilesChannel._find_links',
        'if all(plan.tensors[t].path in known for t in tensors)',
        'if any(plan.tensors[t].path in known for t in tensors)',
        'tests/publication/test_unchanged.py',
    ),
    Mutation(
        'send nothing again after a resume',
        'areal_jax.distributed.averaged_learner:AveragedLearner.update',
        'if self._client.overlap and self._pending is None and turn',
        'if False',
        'tests/distributed/test_averaged_learner.py -k resumed',
    ),
    Mutation(
        'leave the last blocks without a mean',
        'areal_jax.distributed.averaged_learner:AveragedLearner.update',
        'or version + 1 == self._client.steps',
        '',
        'tests/distributed/test_averaged_learner.py -k last',
    ),
    Mutation(
        'wait for a dead client to make the mean',
        'areal_jax.distributed.averages:Averages._await',
        'is_complete = time.monotonic() >= patience_ends_s',
        'is_complete = False',
        'tests/distributed/test_averages.py',
    ),
    Mutation(
        'wait for no client',
        'areal_jax.distributed.averages:Averages._await',
        'if is_late or is_complete:',
        'if True:',
        'tests/distributed/test_averages.py',
    ),
    Mutation(
        'wait for a client that died at every turn',
        'areal_jax.distributed.averages:Averages._await',
        'set(range(self._clients)) if before is None else set(before)',
        'set(range(self._clients))',
        'tests/distributed/test_averages.py -k died',
    ),
    Mutation(
        'give all clients the same prompts',
        'areal_jax.tasks.client_stream:ClientStream.draw',
        'prompts[self._client]',
        'prompts[0]',
        'tests/tasks/test_client_stream.py',
    ),
    Mutation(
        "end a call in JetStream's step before its last tokens",
        'areal_jax.rollout.jetstream.server.open_call:OpenCall.take',
        'self.is_over and not len(self.waiting)',
        'self.is_over',
        'tests/rollout/jetstream/test_relay.py',
    ),
    Mutation(
        "write JetStream's step without the spare column",
        'areal_jax.rollout.jetstream.server.result_columns:count_columns',
        'steps + 1',
        'steps',
        'tests/rollout/jetstream/test_result_columns.py',
    ),
    Mutation(
        'submit a call to the service although its client is gone',
        'areal_jax.rollout.jetstream.server.relay:Relay.submit',
        'not call.is_withdrawn and not call.is_over',
        'not call.is_over',
        'tests/rollout/jetstream/test_relay.py',
    ),
    Mutation(
        'deliver to the slot of a call that has failed',
        'areal_jax.rollout.jetstream.server.relay:Relay._note',
        'if not call.has_left:',
        'if call is not None:',
        'tests/rollout/jetstream/test_relay.py',
    ),
    Mutation(
        'keep the blocks of a cache that a failed dispatch has consumed',
        'areal_jax.rollout.stream:DecodeStream.recover',
        'self._scheduler.requeue()',
        'pass',
        'tests/rollout/test_failed_dispatch.py',
    ),
    Mutation(
        'count failed dispatches from the start of the engine',
        'areal_jax.rollout.local_engine:LocalEngine._run',
        'self._failed = 0 if isinstance(step, DecodeStep) else self._failed',
        'pass',
        'tests/rollout/test_failed_dispatch.py',
    ),
    Mutation(
        "take a log-prob of JetStream's record that no policy can have",
        'areal_jax.rollout.jetstream.record:decode_record',
        'if not np.all(',
        'if False and not np.all(',
        'tests/rollout/jetstream/test_record.py',
    ),
]


def find_place(where: str) -> tuple[pathlib.Path, int, int]:
    """(file, first line, line behind the last), lines from 0. Raises ValueError where there is not one such place."""
    if '/' in where:
        path = ROOT / where
        return path, 0, len(path.read_text().splitlines())
    module, _, names = where.partition(':')
    folder = ROOT / module.replace('.', '/')
    path = folder / '__init__.py' if folder.is_dir() else folder.with_suffix('.py')
    if not path.is_file():
        raise ValueError(f'there is no module {module}')
    source = path.read_text()
    if not names:
        return path, 0, len(source.splitlines())
    nodes: list[Any] = [ast.parse(source)]
    for name in names.split('.'):
        below = [child for node in nodes for child in ast.iter_child_nodes(node)]
        nodes = [child for child in below if getattr(child, 'name', '') == name]
    if len(nodes) != 1:
        raise ValueError(f'{where} is there {len(nodes)} times')
    return path, nodes[0].lineno - 1, nodes[0].end_lineno


def pattern_of(text: str) -> re.Pattern[str]:
    """Finds the text however its lines are broken, also with a comma before the bracket that ends a broken line."""
    words = [re.escape(word) for word in re.findall(r'\w+|[^\w\s]', text)]
    pattern = words[0]
    for before, word in itertools.pairwise(words):
        gap = r'\s+' if re.match(r'\w', before) and re.match(r'\w', word) else r'\s*'
        pattern += gap + (r'(?:,\s*)?' if word in (r'\)', r'\]', r'\}') else '') + word
    return re.compile(pattern)


def mutate(mutation: Mutation) -> tuple[pathlib.Path, str]:
    """(file, its source with the mutation). Raises ValueError where the text does not stand there exactly once."""
    path, first, end = find_place(mutation.where)
    lines = path.read_text().splitlines(keepends=True)
    part, count = pattern_of(mutation.before).subn(lambda _: mutation.after, ''.join(lines[first:end]))
    if count != 1:
        raise ValueError(f'{mutation.name}: {mutation.before!r} stands {count} times in {mutation.where}')
    return path, ''.join([*lines[:first], part, *lines[end:]])


def survives(mutation: Mutation) -> bool:
    """Whether the tests pass although the code is wrong. Raises ValueError when the mutation does not apply."""
    path, source = mutate(mutation)
    with tempfile.TemporaryDirectory() as directory:
        for part in ('areal_jax', 'launch', 'tests', 'configs', 'pyproject.toml'):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, pathlib.Path(directory) / part)
        (pathlib.Path(directory) / path.relative_to(ROOT)).write_text(source)
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '-m', 'not slow', '-p', 'no:cacheprovider']
        done = subprocess.run([*command, *mutation.tests.split()], cwd=directory, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f'{mutation.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}')
    failed = re.findall(r'^FAILED (\S+)', done.stdout, re.MULTILINE)
    print(f'{"SURVIVES" if done.returncode == 0 else "red":8}  {mutation.name:40}  {", ".join(failed)}', flush=True)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    words = [word.lower() for word in arguments]
    chosen = [m for m in MUTATIONS if all(word in f'{m.name} {m.where}'.lower() for word in words)]
    survivors = [mutation.name for mutation in chosen if survives(mutation)]
    print(f'{len(chosen) - len(survivors)} of {len(chosen)} mutations turn a test red')
    return 1 if survivors or not chosen else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
