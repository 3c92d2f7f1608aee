"""What a user of another RL library types finds the field that it means here, and what means nothing finds nothing."""

import pytest

from areal_jax.config.declarations import FIELDS, SECTIONS
from areal_jax.config.near_names import OTHER_NAMES, find_field, find_flag, unknown_field
from areal_jax.errors import find_near

MEANT = {
    # misspelled, or in another section
    'rollout.slotz': 'rollout.slots',
    'rolout.slots': 'rollout.slots',
    'learner.slots': 'rollout.slots',
    'slots': 'rollout.slots',
    'run.steps.x': 'run.steps',
    'optimizer.learning_rates': 'optimizer.learning_rate',
    'optimiser.learningrate': 'optimizer.learning_rate',
    'learner.learning-rate': 'optimizer.learning_rate',
    'rollout.max_tokens_new': 'rollout.max_new_tokens',
    'loss.kl_coefficent': 'loss.kl_coefficient',
    'evaluation.num_problems': 'evaluation.problems',
    # TRL
    'optimizer.lr': 'optimizer.learning_rate',
    'learner.lr': 'optimizer.learning_rate',
    'train.per_device_train_batch_size': 'learner.groups_per_update',
    'rollout.num_generations': 'rollout.group_size',
    'rollout.max_completion_length': 'rollout.max_new_tokens',
    'loss.beta': 'loss.kl_coefficient',
    'loss.epsilon': 'loss.clip_epsilon',
    'loss.epsilon_high': 'loss.clip_epsilon_high',
    'optimizer.max_grad_norm': 'optimizer.clip_norm',
    'train.gradient_checkpointing': 'learner.remat',
    'train.save_steps': 'checkpoint.every',
    'train.save_total_limit': 'checkpoint.keep',
    'optimizer.lr_scheduler_type': 'optimizer.schedule',
    'optimizer.adam_beta2': 'optimizer.b2',
    'loss.scale_rewards': 'loss.advantage',
    'loss.importance_sampling_level': 'loss.ratio',
    'loss.mask_truncated_completions': 'loss.truncated_answers',
    # verl
    'data.train_batch_size': 'learner.groups_per_update',
    'data.max_response_length': 'rollout.max_new_tokens',
    'data.train_files': 'task.path',
    'actor_rollout_ref.actor.optim.lr': 'optimizer.learning_rate',
    'actor_rollout_ref.rollout.n': 'rollout.group_size',
    'actor_rollout_ref.rollout.tensor_model_parallel_size': 'cluster.engines',
    'actor.ppo_mini_batch_size': 'learner.n_minibatches',
    'actor.clip_ratio': 'loss.clip_epsilon',
    'actor.entropy_coeff': 'loss.entropy_coefficient',
    'algorithm.kl_ctrl.kl_coef': 'loss.kl_coefficient',
    'algorithm.adv_estimator': 'loss.advantage',
    'trainer.total_training_steps': 'run.steps',
    'trainer.test_freq': 'evaluation.every',
    'actor.loss_agg_mode': 'loss.aggregation',
    'actor.clip_ratio_c': 'loss.dual_clip',
    'actor.policy_loss.loss_mode': 'loss.surrogate',
    'algorithm.rollout_is': 'loss.correction',
    'algorithm.use_kl_in_reward': 'loss.kl_in',
    'reward.overlong_buffer': 'loss.overlong_tokens',
    # OpenRLHF
    'n_samples_per_prompt': 'rollout.group_size',
    'rollout_batch_size': 'learner.groups_per_update',
    'generate_max_len': 'rollout.max_new_tokens',
    'init_kl_coef': 'loss.kl_coefficient',
    'eps_clip': 'loss.clip_epsilon',
    'actor_learning_rate': 'optimizer.learning_rate',
    'pretrain': 'model.path',
    'zero_lr_warmup_steps': 'optimizer.warmup_steps',
    'lora_rank': 'lora.rank',
    # AReaL
    'async_training.max_head_offpolicyness': 'staleness.eta',
    'actor.behav_imp_weight_cap': 'loss.behavior_weight_cap',
    'gconfig.n_samples': 'rollout.group_size',
    # short
    'rollout.temp': 'rollout.temperature',
    'temp': 'rollout.temperature',
    'kl': 'loss.kl_coefficient',
    'batch_size': 'learner.groups_per_update',
    'learner.batch_size': 'learner.groups_per_update',
    'rollout.group': 'rollout.group_size',
}


@pytest.mark.parametrize('name', MEANT)
def test_a_wrong_name_finds_the_field_that_it_means(name):
    assert find_field(name) == MEANT[name]
    assert f'did you mean {MEANT[name]}?' in str(unknown_field(name))


NOTHING = [
    'optimizer.momentum_of_inertia', 'rollout.frobnicate', 'learner.zz', 'q', 'xyz', 'loss.gamma_ray', 'run.b7',
    'trainer.n_critics', 'critic.value_head', 'optimizer.x', 'rollout.speculative', 'loss.entirely',
]  # fmt: skip


@pytest.mark.parametrize('name', NOTHING)
def test_a_name_that_means_no_field_finds_nothing(name):
    assert find_field(name) == ''
    assert str(unknown_field(name)).endswith('; areal-config lists them')


def test_names_of_other_libraries_are_of_fields_that_exist_and_are_no_names_of_ours():
    assert [path for path in OTHER_NAMES if path not in FIELDS] == []
    names = [name for names in OTHER_NAMES.values() for name in names.split()]
    assert [name for name in names if names.count(name) > 1] == []
    ours = {path.partition('.')[2] for path in FIELDS}
    assert sorted(ours & set(names)) == []


FLAGS = ['--config', '--workdir', '--resume', '--model', '--dry_run']


@pytest.mark.parametrize(
    ('flag', 'meant'),
    [
        ('--wrkdir', '--workdir'), ('--output_dir', '--workdir'), ('--output-dir', '--workdir'),
        ('--resume_from_checkpoint', '--resume'), ('--dry-run', '--dry_run'), ('--cfg', '--config'),
        ('--learning_rate', '--config.optimizer.learning_rate'), ('--lr', '--config.optimizer.learning_rate'),
        ('--num_generations', '--config.rollout.group_size'), ('--run.steps', '--config.run.steps'),
        ('--confg.run.steps', '--config.run'), ('--frobnicate', ''), ('--x', ''),
    ],
)  # fmt: skip
def test_a_wrong_flag_finds_a_flag_or_a_field(flag, meant):
    assert find_flag(flag, FLAGS) == meant


def test_a_command_without_a_config_has_no_fields_to_offer():
    assert find_flag('--learning_rate', ['--workdir', '--out']) == ''


def test_near_is_one_slip_or_a_beginning():
    assert find_near('tran', ['train', 'eval']) == 'train'
    assert find_near('trian', ['train', 'eval']) == 'train'
    assert find_near('comp', ['completion', 'eval']) == 'completion'
    assert find_near('comp', ['completion', 'comparison']) == ''
    assert find_near('b', ['b1', 'b2']) == ''
    assert find_near('lr', SECTIONS) == ''
