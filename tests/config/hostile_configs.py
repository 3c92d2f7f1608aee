"""Configs that cannot run, each with a part of the one sentence that says why; paths are relative to the repository."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class HostileConfig:
    """Arguments of `python -m areal_jax.main_train` beside --config and --workdir."""

    arguments: tuple[str, ...]
    message: str  # is part of the line 'error: ...'
    config: str = 'configs/tiny_cpu.py'


def _one(setting: str, message: str, config: str = 'configs/tiny_cpu.py') -> HostileConfig:
    """Of 'run.steps=0 rollout.slots=3'."""
    return HostileConfig(tuple(f'--config.{part}' for part in setting.split()), message, config)


_SFT = 'configs/sft_tiny.py'
_COUNT, _CHOICE, _NOT_READ = 'must be at least 1 and below 2^31', 'is not known; use one of', 'set but never read: '

# name of a case = the settings
_SETTINGS: Mapping[str, str] = {
    # the command line
    'rollout.slotz=3': 'rollout.slotz is not a field of the config; did you mean rollout.slots?',
    'rolout.slots=3': "there is no section 'rolout' in the config; did you mean rollout.slots?",
    'slots=3': "there is no section 'slots' in the config; did you mean rollout.slots?",
    'learner.slots=3': 'learner.slots is not a field of the config; did you mean rollout.slots?',
    'run=3': 'run is a section; set one of its fields',
    'run.steps=abc': '--config.run.steps=abc must be a whole number',
    'run.steps=3.5': '--config.run.steps=3.5 must be a whole number',
    'run.steps=': '--config.run.steps= must be a whole number',
    'rollout.temperature=hot': '--config.rollout.temperature=hot must be a number',
    'telemetry.plots=maybe': '--config.telemetry.plots=maybe must be True or False',
    'staleness.max_token_age=old': '--config.staleness.max_token_age=old must be a whole number',
    'rollout.prefill_buckets=16.5': 'rollout.prefill_buckets=(16.5,) must be a tuple of whole numbers',
    'rollout.prefill_buckets=': "rollout.prefill_buckets=('',) must be a tuple of whole numbers",
    'lora.targets=3': 'lora.targets=(3,) must be a tuple of texts',
    # numbers out of their range
    'run.steps=0': f'run.steps=0 {_COUNT}',
    'run.steps=-1': f'run.steps=-1 {_COUNT}',
    'run.steps=99999999999999999999': f'run.steps=99999999999999999999 {_COUNT}',
    'run.seed=-1': 'run.seed=-1 must lie in [0, 2^31 - 1]',
    'run.stall_timeout_s=nan': 'run.stall_timeout_s=nan must be above 0',
    'run.stall_timeout_s=1e30': 'run.stall_timeout_s=1e+30 must be above 0 and at most 1e6',
    'model.n_layers=0': f'model.n_layers=0 {_COUNT}',
    'model.rope_theta=0': 'model.rope_theta=0.0 must be above 0 and finite',
    'model.init_scale=inf': 'model.init_scale=inf must be above 0 and finite',
    'task.held_out_fraction=2': 'task.held_out_fraction=2.0 must lie in [0, 1]',
    'task.verifier_workers=0': 'task.verifier_workers=0 must be at least 1 and at most 1024',
    'task.verifier_workers=100000': 'task.verifier_workers=100000 must be at least 1 and at most 1024',
    'task.verifier_deadline_s=1e30': 'task.verifier_deadline_s=1e+30 must be above 0 and at most 1e6',
    'rollout.slots=0': f'rollout.slots=0 {_COUNT}',
    'rollout.max_running_groups=0': f'rollout.max_running_groups=0 {_COUNT}',
    'rollout.max_new_tokens=0': f'rollout.max_new_tokens=0 {_COUNT}',
    'rollout.temperature=0': 'rollout.temperature=0.0 must be above 0',
    'rollout.top_k=-1': 'rollout.top_k=-1 must not be negative',
    'rollout.top_p=1.5': 'rollout.top_p=1.5 must lie in (0, 1]',
    'staleness.eta=-1': 'staleness.eta=-1.0 must be at least 0',
    'staleness.eta=nan': 'staleness.eta=nan must be at least 0',
    'staleness.max_token_age=-1 staleness.over_age=mask': 'staleness.max_token_age=-1 must not be negative',
    'buffer.capacity=0': f'buffer.capacity=0 {_COUNT}',
    'learner.epochs=0': f'learner.epochs=0 {_COUNT}',
    'learner.loss_scale=1e12': 'learner.loss_scale=1000000000000.0 must lie in (0, 2^32]',
    'lora.rank=-1': 'lora.rank=-1 must not be negative',
    'lora.rank=4 lora.alpha=0': 'lora.alpha=0.0 must be above 0',
    'loss.clip_epsilon=2': 'loss.clip_epsilon=2.0 must lie in (0, 1]',
    'loss.behavior_weight_cap=-1': 'loss.behavior_weight_cap=-1.0 must be above 0',
    'loss.entropy_coefficient=-1': 'loss.entropy_coefficient=-1.0 must not be negative',
    'optimizer.learning_rate=-1': 'optimizer.learning_rate=-1.0 must not be negative',
    'optimizer.b1=1': 'optimizer.b1=1.0 must lie in [0, 1)',
    'optimizer.eps=0': 'optimizer.eps=0.0 must be above 0',
    'optimizer.clip_norm=-1': 'optimizer.clip_norm=-1.0 must not be negative',
    'cluster.learner=data=0': "cluster.learner='data=0': the size of data must be a whole number, at least 1",
    'cluster.engines=5000xshared': "'5000' engines must be a whole number from 1 to 1024",
    'cluster.learner=fdsp=2': "there is no axis 'fdsp'; did you mean fsdp?",
    'cluster.engines=2xtensor=2': 'an engine over several is not built yet',
    'mesh.tensor=2': "mesh.tensor=2: this field was replaced; use cluster.learner='tensor=2'",
    'rollout.engines=2': "rollout.engines=2: this field was replaced; use cluster.engines='2 x shared'",
    'distributed.processes=0': f'distributed.processes=0 {_COUNT}',
    'distributed.command_deadline_s=0': 'distributed.command_deadline_s=0.0 must be above 0',
    'checkpoint.every=-1': 'checkpoint.every=-1 must not be negative',
    'checkpoint.keep=0': f'checkpoint.keep=0 {_COUNT}',
    'evaluation.samples=-1': 'evaluation.samples=-1 must not be negative',
    'run.clock=virtual virtual.decode_step_s=-1': 'virtual.decode_step_s=-1.0 must not be negative',
    # choices
    'run.clock=fast': _CHOICE,
    'model.source=onnx': _CHOICE,
    'model.family=gpt2': _CHOICE,
    'rollout.kv_policy=forget': _CHOICE,
    'staleness.over_age=discard': _CHOICE,
    'learner.packing=dense': _CHOICE,
    'learner.dtype=int8': _CHOICE,
    'learner.attention=flash': _CHOICE,
    'loss.objective=dpo': _CHOICE,
    'loss.advantage=gae': _CHOICE,
    'optimizer.name=adam': _CHOICE,
    'cluster.strategy=magic': _CHOICE,
    'publication.channel=pigeon': _CHOICE,
    # what cannot go together
    'model.source=gguf': "model.source='gguf' needs model.path",
    'model.source=hf': "model.source='hf' needs model.path",
    'model.n_heads=3': 'model.n_heads=3 must be a multiple of model.n_kv_heads=2',
    'model.head_dim=7': 'model.head_dim=7 must be even',
    'task.name=jsonl': "task.name='jsonl' needs task.path",
    'rollout.context_tokens=3': 'rollout.max_new_tokens=8 leaves no room for a prompt',
    'rollout.prefill_buckets=()': 'rollout.prefill_buckets=() must hold an unfinished answer',
    'rollout.prefill_buckets=16,8': 'rollout.prefill_buckets=(16, 8) must be positive lengths in ascending order',
    'rollout.prefill_buckets=-3,16': 'rollout.prefill_buckets=(-3, 16) must be positive lengths in ascending order',
    'rollout.group_size=1': 'gives every answer the advantage 0; use rollout.group_size >= 2',
    'rollout.group_size=1 learner.filter_equal_rewards=False': 'gives every answer the advantage 0',
    'staleness.max_token_age=3': "staleness.max_token_age=3 and staleness.over_age='off' go together",
    'staleness.over_age=drop': "staleness.max_token_age=None and staleness.over_age='drop' go together",
    'staleness.schedule=fixed(2) staleness.eta=2': 'remove one of them',
    'staleness.schedule=fixed(2) staleness.over_age=drop staleness.max_token_age=1': "use 'mask' or 'off'",
    'buffer.capacity=1': 'buffer.capacity=1 can never hold learner.groups_per_update=8 groups',
    'learner.row_tokens=8': 'learner.row_tokens=8 must hold one trajectory',
    'learner.row_loss_tokens=4': 'learner.row_loss_tokens=4 must hold one answer',
    'cluster.learner=fsdp=4': 'learner.rows_per_microbatch=1 must be a multiple of data * fsdp = 4',
    'cluster.learner=tensor=2': "cluster.learner='tensor=2' is left idle by cluster.strategy='fsdp'",
    'cluster.learner=context=3': 'learner.row_tokens=128 must be a multiple of context=3',
    # what is seen when the parts are built
    'run.compilation_cache=README.md': "run.compilation_cache='README.md' is no directory",
    'model.source=gguf model.path=nothing.gguf': 'there is no file nothing.gguf',
    'model.source=gguf model.path=README.md': 'README.md is no GGUF file',
    'model.source=gguf model.path=package:nothing/x.gguf': 'needs the package nothing, which is not installed',
    'model.source=hf model.path=configs': 'configs/config.json cannot be read',
    'task.name=sudoku': "task.name='sudoku' is not known",
    'task.symbols=9': 'task.symbols=9, task.length=4: choose 2 to 8 symbols',
    'task.length=100': 'task.symbols=2, task.length=100: choose',
    'task.held_out_fraction=1': "has no problem on the side 'train': 16 are on the side 'held_out'",
    'task.length=12': 'raise rollout.context_tokens',
    'staleness.schedule=sometimes': "staleness.schedule='sometimes' is not known",
    'staleness.schedule=uniform(1,3)': "staleness.schedule='uniform(1,3)' is not known",
    'staleness.schedule=trace(/nowhere)': 'cannot be read (No such file or directory)',
    'staleness.schedule=trace(configs)': 'cannot be read (Is a directory)',
    'staleness.schedule=trace(README.md)': 'the file needs integers >= 0, one a line',
    'learner.attention=splash': "attention 'splash' does not run on 'cpu'",
    'learner.tail_buckets=2 learner.accumulate=scan': 'learner.tail_buckets=2 needs programs of one micro-batch',
    'learner.fill=padded': "set learner.packing='ordinary'",
    'lora.rank=4 lora.targets=queries': "lora.targets=('queries',) must name some of query",
    'lora.rank=100000': 'lora.rank=100000 is above the width of the model, 64',
    'optimizer.schedule=cosine optimizer.warmup_steps=1000': 'raise run.steps or shorten the warm-up',
    'cluster.learner=data=1000000 learner.rows_per_microbatch=1000000': 'needs 1000000 devices',
    'publication.channel=files publication.directory=README.md': 'name another publication.directory',
    # the user's own functions
    'task.name=nothing.py:build': "task.name=nothing.py:build: there is no file 'nothing.py'",
    'task.name=configs/tiny_cpu.py:build': "there is no function 'build' in configs/tiny_cpu.py",
    'task.name=configs/tiny_cpu.py:get_config': 'get_config() takes 0 positional arguments',
    'task.name=configs/templates/two_turns.py:build': "needs the option 'sampling'",
    'task.name=:build': 'must name a function: path/to/file.py:name or package.module:name',
    'task.name=README.md:build': "there is no module 'README'",
    'task.name=./README.md:build': ' of ./README.md is not Python: ',
    'task.name=no_package.tasks:build': "there is no module 'no_package'; install its package",
    'task.name=token_reversal.py': 'name the function that builds the task, token_reversal.py:build',
    'task.options.digits=3': "task.options.digits=3: task.name='token_reversal' takes no options",
    'task.options=3': 'task.options is a section; set one of its keys',
    'task.options.a.b=3': 'the name of an option must be that of a parameter in Python',
    'task.options.a={}': 'task.options.a={} must be a number, a text, True, False, None or a tuple of them',
    'task.reward=math': "task.reward='math' must name a function",
    'task.reward=json:dumps': 'the scorer json:dumps fails at an empty answer to the first problem: TypeError',
    'loss.advantage=configs/tiny_cpu.py:get_config': 'get_config() takes 0 positional arguments',
    'loss.advantage=no_file.py:f': "there is no file 'no_file.py'",
    'rollout.workflow=two_turns': _CHOICE,
    'rollout.workflow=json:dumps': "has a parameter 'obj', which nobody gives",
    'model.characters=aab=': "model.characters='aab=' must have each character once",
    'model.characters=xyz': "that are not among 'xyz'",
    # sizes
    'model.d_model=65536 model.n_layers=200': 'To fit, ',
    'rollout.slots=100000000': 'lower rollout.slots, rollout.context_tokens or cluster.engines',
    'rollout.group_size=2147483647': 'lower rollout.group_size or rollout.max_running_groups',
    'rollout.decode_steps=2147483647': 'lower rollout.slots or rollout.decode_steps',
    'learner.row_tokens=2147483647': 'lower learner.row_tokens or learner.rows_per_microbatch',
    # set, and not used
    'task.system_prompt=x': f"{_NOT_READ}task.system_prompt='x'",
    'optimizer.name=sgd optimizer.b1=0.5': f'{_NOT_READ}optimizer.b1=0.5',
    'evaluation.problems=0 evaluation.samples=5': f'{_NOT_READ}evaluation.samples=5',
}
_SUPERVISED: Mapping[str, str] = {
    'task.over_length=cut': _CHOICE,
    'sft.evaluate_every=5 evaluation.problems=0': 'sft.evaluate_every=5 measures nothing with evaluation.problems=0',
    'learner.row_tokens=4': 'learner.row_tokens',
    'rollout.slots=3': f'{_NOT_READ}rollout.slots=3',
    'task.reward=json:dumps': f"{_NOT_READ}task.reward='json:dumps'",
    'task.name=json:dumps': 'task.name=json:dumps: ',
}

HOSTILE_CONFIGS: dict[str, HostileConfig] = {
    **{name: _one(name, message) for name, message in _SETTINGS.items()},
    **{f'sft {name}': _one(name, message, _SFT) for name, message in _SUPERVISED.items()},
    'no such config file': HostileConfig((), "there is no file 'configs/tiny_cpy.py'", 'configs/tiny_cpy.py'),
    'a directory as config': HostileConfig((), 'configs is not a file', 'configs'),
    'not Python': HostileConfig((), 'of README.md is not Python', 'README.md'),
    'without get_config': HostileConfig((), 'has no function get_config()', 'tests/__init__.py'),
    'an unknown flag': HostileConfig(('--steps=3',), '--steps is not a flag'),
    'a positional argument': HostileConfig(('more',), "unexpected argument 'more'"),
    'a flag without a value': HostileConfig(('--config.run.steps',), 'Missing value for flag --config.run.steps'),
}  # fmt: skip
