"""Finds the known name that a wrong one means: by spelling, by its words, and by the names in other RL libraries.

A name that only looks alike is not returned: 'optimizer.lr' is the learning rate, not 'optimizer.b2'.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping

from ml_collections import config_dict

from areal_jax import files
from areal_jax.config.declarations import FIELDS, SECTIONS
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ask_whether, find_near, suggest

# the names in TRL, verl, OpenRLHF and AReaL, and common abbreviations
OTHER_NAMES: Mapping[str, str] = {
    'run.steps': 'max_steps num_steps total_steps total_training_steps n_updates num_updates iterations num_iterations',
    'run.seed': 'random_seed data_seed rng_seed',
    'run.stall_timeout_s': 'timeout stall_timeout',
    'run.compilation_cache': 'cache_dir jax_cache_dir compile_cache',
    'run.export_dtype': 'save_dtype',
    'model.path': 'model_name model_name_or_path model_path pretrain pretrained pretrained_path checkpoint ckpt '
    'init_from load_from tokenizer_path hf_path',
    'model.chat_template': 'chat_template_path custom_chat_template',
    'model.n_layers': 'num_hidden_layers num_layers depth',
    'model.d_model': 'hidden_size hidden_dim embed_dim width',
    'model.d_ff': 'intermediate_size ffn_dim mlp_dim',
    'model.n_heads': 'num_attention_heads num_heads',
    'model.n_kv_heads': 'num_key_value_heads num_kv_heads',
    'task.path': 'dataset dataset_path dataset_name train_files prompt_data data_path train_data data train_file',
    'task.sources': 'dataset_mixer data_mixture dataset_mixture datasets_mixture prompt_data_probs mixture '
    'dataset_probs task_weights',
    'task.reward': 'reward_fn reward_func reward_function reward_funcs reward_model custom_reward_function',
    'task.system_prompt': 'system_message system',
    'task.held_out_fraction': 'test_size val_size eval_fraction validation_fraction val_fraction',
    'task.verifier_workers': 'reward_workers num_verifiers reward_num_workers',
    'task.verifier_deadline_s': 'reward_timeout verifier_timeout',
    'task.filter': 'dynamic_sampling filter_groups dynamic_filtering',
    'buffer.capacity': 'buffer_size replay_buffer_size queue_size',
    'lora.rank': 'lora_rank lora_r r use_lora use_peft',
    'lora.alpha': 'lora_alpha',
    'lora.targets': 'target_modules lora_target_modules lora_targets',
    **{path: field.other_names for path, field in FIELDS.items() if field.other_names},
    'cluster.learner': 'fsdp fsdp_size num_nodes n_gpus_per_node actor_num_gpus_per_node allocation_mode world_size',
    'cluster.engines': 'tensor_parallel_size tensor_model_parallel_size vllm_num_engines num_engines tp tp_size '
    'vllm_tensor_parallel_size rollout_num_gpus n_engines',
    'publication.dtype': 'rollout_dtype inference_dtype',
    'publication.channel': 'weight_update_mode weight_sync',
    'checkpoint.every': 'save_steps save_freq save_interval save_every checkpoint_every checkpoint_interval '
    'save_frequency',
    'checkpoint.keep': 'save_total_limit max_ckpt_num max_actor_ckpt_to_keep max_to_keep keep_checkpoints',
    'evaluation.problems': 'eval_size num_eval eval_samples eval_problems n_eval',
    'evaluation.samples': 'val_n eval_n eval_num_samples pass_at_k',
    'evaluation.every': 'eval_steps test_freq eval_every eval_freq eval_interval',
    'telemetry.tensorboard': 'report_to use_tensorboard',
    'telemetry.rollouts': 'log_completions num_completions_to_print rollout_data_dir dump_rollouts save_rollouts '
    'log_rollouts dump_to_file',
    'telemetry.tracker': 'use_wandb wandb logger log_with',
    'telemetry.profile_steps': 'profile profiler',
    'telemetry.energy': 'energy_monitor log_energy power carbon codecarbon',
}
_FIELD_OF = {name: path for path, names in OTHER_NAMES.items() for name in names.split()}
_FLAGS: Mapping[str, str] = {  # of the commands, with their names in other programs
    'workdir': 'output_dir out_dir log_dir logdir run_dir work_dir dir save_path default_local_dir save_dir experiment',
    'resume': 'resume_from_checkpoint restart continue resume_mode load_checkpoint',
    'model': 'model_path model_name model_name_or_path checkpoint ckpt pretrain',
    'benchmark': 'dataset data eval_dataset benchmarks',
    'config': 'cfg conf config_file config_path config_name',
}
_FLAG_OF = {name: flag for flag, names in _FLAGS.items() for name in names.split()}
_ABBREVIATIONS = {
    'lr': 'learning rate', 'temp': 'temperature', 'coef': 'coefficient', 'coeff': 'coefficient', 'num': 'n',
    'eps': 'epsilon', 'length': 'tokens', 'len': 'tokens', 'eval': 'evaluation', 'ckpt': 'checkpoint', 'freq': 'every',
    'interval': 'every', 'wd': 'weight decay', 'ctx': 'context',
}  # fmt: skip


def find_field(path: str) -> str:
    """Returns the config field that 'optimizer.lr', 'algorithm.kl_ctrl.kl_coef' or 'batch_size' means; '' = none.

    Tries a field of that name in any section, then the names in other libraries, the spelling, and the words.
    """
    plain = path.replace('-', '_').lower()
    section, _, rest = plain.partition('.')
    field = (rest or section).rpartition('.')[2]
    if (begins := '.'.join(plain.split('.')[:2])) in FIELDS:
        return begins
    if same := [name for name in FIELDS if name.endswith(f'.{field}')]:
        return _nearest_section(section, same)
    for name in (plain.replace('.', '_'), field, re.sub(r'^(actor|policy|ppo|grpo|train|model)_', '', field)):
        if name in _FIELD_OF:
            return _FIELD_OF[name]
    if same := [name for name in FIELDS if _split(name.partition('.')[2]) == _split(field)]:
        return _nearest_section(section, same)
    own = [name.partition('.')[2] for name in FIELDS if name.startswith(f'{section}.')] if rest else []
    for known in (own, [name.partition('.')[2] for name in FIELDS]):
        if near := find_near(field, known):
            return _nearest_section(section, [name for name in FIELDS if name.endswith(f'.{near}')])
    if misspelled := find_near(field, _FIELD_OF):
        return _FIELD_OF[misspelled]
    return _find_by_words(section, field)


def find_flag(flag: str, own: Iterable[str]) -> str:
    """Returns the flag, or --config.SECTION.FIELD, that '--output_dir' or '--learning_rate' means; '' = none.

    Args:
      own: flags of the command, such as '--workdir'.
    """
    own, name = list(own), flag.lstrip('-').replace('-', '_')
    if (meant := f'--{_FLAG_OF.get(name, "")}') in own:
        return meant
    if near := find_near(flag, own) or find_near(flag, [f'--config.{section}' for section in SECTIONS]):
        return near
    if '--config' not in own:
        return ''
    field = name.removeprefix('config.') if name.removeprefix('config.') in FIELDS else find_field(name)
    return f'--config.{field}' if field else ''


def _nearest_section(section: str, paths: list[str]) -> str:
    """Returns the first path whose section is `section`, misspelled or not; else the first path."""
    near = find_near(section, [path.partition('.')[0] for path in paths])
    return next((path for path in paths if near and path.startswith(f'{near}.')), paths[0])


def _find_by_words(section: str, field: str) -> str:
    """Returns the only field, or the only one in `section`, with all words of `field`; '' for none or a single word."""
    words = _split(field)
    if len(words) < 2:
        return ''
    found = [path for path in FIELDS if words <= _split(path)]
    if len(found) == 1:
        return found[0]
    inside = [path for path in found if path.startswith(f'{section}.')]
    return inside[0] if len(inside) == 1 else ''


def _split(name: str) -> set[str]:
    """Returns the words of a name, with abbreviations spelled out: {'learning', 'rate'} of 'lr'."""
    return {word for part in re.split(r'[._]', name) for word in _ABBREVIATIONS.get(part, part).split()}


# Checks of a config against the declarations: unknown names, with the nearest known one, and types.
#
# Also for the config.json of a run, which a user may have edited.


# fields that older runs were saved without -> what these runs did, kept when one is resumed or inspected
FORMER: Mapping[str, str] = {'model.ends': 'eos', 'model.template_date': 'off'}
_HINT = 'start from areal_jax.config.default_config() and set what differs'
_SEE = '; areal-config lists them'
_RESTORE = 'restore the file as the run wrote it'


def suggest_flag(flag: str, own: Iterable[str]) -> str:
    """'; did you mean --workdir?' for the --output_dir of another program; '' if no flag is near."""
    return ask_whether(find_flag(flag, own))


def unknown_field(path: str) -> ConfigError:
    """Returns the error for 'rollout.slotz', or for a path that has no section or more than one dot."""
    section, _, field = path.partition('.')
    if section not in SECTIONS:
        near = ask_whether(find_field(path)) or suggest(section, SECTIONS)
        if not field:
            near = suggest(section, SECTIONS) or near
        return ConfigError(f'{path}: there is no section {section!r} in the config{near or _SEE}')
    return ConfigError(f'{path} is not a field of the config{ask_whether(find_field(path)) or _SEE}')


def require_declared(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a section or field that is missing or unknown, or whose value is of another type."""
    for section in config:
        if section not in SECTIONS:
            raise unknown_field(section)
    for section, fields in SECTIONS.items():
        if section not in config:
            raise ConfigError(f'the config has no section {section!r}: {_HINT}')
        values = config[section]
        if not isinstance(values, Mapping | config_dict.ConfigDict):
            raise ConfigError(f'{section}={values!r} must be a section with fields: {_HINT}')
        for name in values:
            if name not in fields:
                raise unknown_field(f'{section}.{name}')
        for name, field in fields.items():
            if name not in values:
                raise ConfigError(f'the config has no field {section}.{name}: {_HINT}')
            field.require_type(f'{section}.{name}', values[name])


def read_saved(path: pathlib.Path, fix: str = _RESTORE) -> files.JsonObject:
    """Reads a saved config, nested by section; raises FileError, ending with `fix`, for a file that no run wrote."""
    values = files.read_json(path, fix)
    require_saved(values, str(path), fix)
    return with_former(values)


def with_former(values: files.JsonObject) -> files.JsonObject:
    """Returns a saved config, with the fields of FORMER that it lacks added."""
    found = dict(values)
    for path, value in FORMER.items():
        section, _, name = path.partition('.')
        if section in found:
            found[section] = {name: value} | found[section]
    return found


def require_saved(values: Mapping[str, object], where: str, fix: str = _RESTORE) -> None:
    """Raises FileError, which begins with `where`, for a section without fields and a value of another type.

    Missing or unknown fields are accepted: the config is of another version.
    """
    for section, fields in values.items():
        if not isinstance(fields, dict):
            raise files.FileError(f'{where} has {section}={fields!r}, which is no section with fields; {fix}')
        for name, value in fields.items():
            field = SECTIONS.get(section, {}).get(name)
            if field is None:
                continue
            try:
                field.require_type(f'{section}.{name}', _as_given(value))
            except ConfigError as error:
                raise files.FileError(f'{where} is not of a run: {error}; {fix}') from error


def _as_given(value: object) -> object:
    """Turns the lists of JSON back into tuples, also in options."""
    if isinstance(value, list):
        return tuple(map(_as_given, value))
    return {name: _as_given(inner) for name, inner in value.items()} if isinstance(value, dict) else value
