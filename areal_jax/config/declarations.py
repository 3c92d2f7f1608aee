"""Every field of the config, declared once: default, allowed values, meaning. docs/config.md is made from this table.

    buffer.capacity  ->  capacity=Integer(64, COUNT, 'groups; a full buffer closes admission and never drops')

A number has a default and a range, a Choice a default and all allowed names. An Integer or Real with the default
None may also be None. __init__.py builds and validates configs from the table, and holds the rules that join several
fields. Two things may not be declared here: a second default, and a rule that needs another field.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.agent_fields import AGENT_FIELDS, AUTO, HERMES, LEVELS, PACKAGES
from areal_jax.config.cluster import ONE_DEVICE, parse_engines
from areal_jax.config.fields import (
    COUNT,
    COUNT_OR_OFF,
    DTYPES,
    MEBIBYTES,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SEED,
    SHARE,
    SHARE_ABOVE_ZERO,
    THREADS,
    WEIGHT,
    Address,
    Choice,
    ChoiceOrOwn,
    ConfigError,
    Field,
    Flag,
    GroupCount,
    Hosts,
    Integer,
    Lengths,
    Options,
    Path,
    Real,
    Section,
    Sources,
    Text,
    Texts,
    Value,
    declare_section,
)
from areal_jax.config.generation import RolloutSection, cuts_softmax
from areal_jax.config.kinds import CHANNELS, IN_PROCESS, describe_channels, find_server
from areal_jax.config.loss import CriticSection, LossSection
from areal_jax.config.objectives import find_objective
from areal_jax.config.training import DiagnosticsSection, LearnerSection, OptimizerSection, StalenessSection
from areal_jax.config.xla_flags import AUTO as AUTO_FLAGS
from areal_jax.config.xla_flags import FlagsText
from areal_jax.files import is_address

# The section `model` of the config, and the rules of its fields.


# of random models
EXPERT_FAMILIES = (
    'qwen3_moe',
    'mixtral',
    'olmoe',
    'gpt_oss',
    'qwen3_5_moe_text',
    'qwen3_next',
    'glm4_moe',
    'deepseek_v3',
    'glm4_moe_lite',
)

MODEL_FIELDS: dict[str, Field] = {
    'source': Choice('random', ('random', 'gguf', 'hf', 'run'), 'a GGUF file, Hugging Face files, or another run'),
    'path': Address(
        '',
        "gguf: a file or 'package:NAME/FILE'; hf: a directory, or hf:ORG/NAME[@REVISION] of the Hugging Face Hub; "
        'run: a workdir, one of its checkpoints, or its run.mirror',
    ),
    'chat_template': Path('', "a jinja2 file, or 'package:configs/templates/hermes.jinja'; '' = that of the weights"),
    'ends': Choice(
        'all', ('all', 'eos'), 'gguf, hf: of the ids that end an answer, all that the files name, or eos_token alone'
    ),
    'template_date': Text(
        '', "gguf, hf: the day that templates see, '2026-11-30'; 'off' = none; '' = today, and a run keeps its first"
    ),
    'characters': Text('', "random: one token each; '' = those of the task token_reversal"),
    'family': Choice(
        'llama',
        ('llama', 'qwen2', 'qwen3', 'olmo3', 'smollm3', 'gemma3_text', 'qwen3_5_text', *EXPERT_FAMILIES, 'plain'),
        'random: qwen2 = biases of q, k, v; qwen3 = norms of q, k; plain = learned positions, ReLU, no final norm; '
        'with experts: docs/moe.md; windows have a quarter of the longest sequence; '
        'delta nets have the heads of attention',
    ),
    'outputs': Choice('all', ('all', 'symbols'), 'plain: tokens of an answer; symbols = token_reversal'),
    'n_layers': Integer(2, COUNT, 'random: layers of the decoder'),
    'd_model': Integer(64, COUNT, 'random: width of the residual stream'),
    'd_ff': Integer(128, COUNT, 'random: width of the MLP'),
    'experts': Integer(0, COUNT_OR_OFF, 'random: experts of a layer in place of the MLP; 0 = none'),
    'experts_per_token': Integer(2, COUNT, 'random: experts that a token reaches'),
    'd_expert': Integer(64, COUNT, 'random: width of an expert'),
    'n_heads': Integer(4, COUNT, 'random: query heads'),
    'n_kv_heads': Integer(2, COUNT, 'random: key-value heads, a divisor of n_heads'),
    'head_dim': Integer(16, COUNT, 'random: width of a head, an even number'),
    'rope_theta': Real(10000.0, POSITIVE, 'random: base of the rotary angles'),
    'init_scale': Real(1.0, POSITIVE, 'random: multiplies the standard deviation of every matrix'),
    'embedding_scale': Real(1.0, POSITIVE, 'random: multiplies that of embedding and positions as well'),
}


def find_model_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that a config breaks."""
    model = c.model
    if model.source == 'gguf' and not model.path:
        yield "model.source='gguf' needs model.path: a file, or package:NAME/FILE inside an installed package"
    if model.source == 'hf' and not model.path:
        yield "model.source='hf' needs model.path: hf:ORG/NAME, or a directory with config.json and safetensors"
    if model.source == 'run' and not model.path:
        yield "model.source='run' needs model.path: the --workdir of another run"
    if is_address(model.path) and model.source != 'run':
        yield f"model.path={model.path!r} needs model.source='run': it is the mirror of a run, or else a directory"
    if model.source == 'random' and model.chat_template:
        yield f"model.chat_template={model.chat_template!r} is of no use with model.source='random': remove it"
    if model.template_date not in ('', 'off') and not _is_day(model.template_date):
        yield f"model.template_date={model.template_date!r} must be a day such as '2026-11-30', 'off', or ''"
    if model.source == 'random' and len(set(model.characters)) != len(model.characters):
        yield f'model.characters={model.characters!r} must have each character once'
    if model.source == 'random' and model.n_heads % model.n_kv_heads:
        yield f'model.n_heads={model.n_heads} must be a multiple of model.n_kv_heads={model.n_kv_heads}'
    if model.source == 'random' and model.head_dim % 2:
        yield f'model.head_dim={model.head_dim} must be even: rotary positions need pairs'
    if model.source == 'random' and model.outputs == 'symbols':
        yield from _symbol_problems(c)
    if model.source == 'random':
        yield from _expert_problems(c)
    if model.source == 'random' and model.family == 'plain' and c.lora.rank and 'gate' in c.lora.targets:
        yield f"lora.targets={tuple(c.lora.targets)} names 'gate', which model.family='plain' does not have: remove it"


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _expert_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    model = c.model
    if (model.family in EXPERT_FAMILIES) != bool(model.experts):
        families = ', '.join(EXPERT_FAMILIES)
        yield (
            f'model.experts={model.experts} does not fit model.family={model.family!r}: the families with experts are '
            f'{families}'
        )
    elif model.experts and model.experts_per_token > model.experts:
        yield f'model.experts_per_token={model.experts_per_token} is more than model.experts={model.experts}: lower it'


def _symbol_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting that a head with only the symbols of token_reversal excludes."""
    for path, value, fix in (
        ('model.family', c.model.family, 'plain'),
        ('model.characters', c.model.characters, ''),
        ('task.name', c.task.name, 'token_reversal'),
        ('rollout.ignore_eos', c.rollout.ignore_eos, True),
    ):
        if value != fix:
            yield f"model.outputs='symbols' leaves no other token to answer with: use {path}={fix!r}, not {value!r}"


# The fields of the section `friction`, and the settings that they exclude. docs/frictions.md is their page.


SHARES = ('actor_share', 'reward_share', 'unrewarded_share')

FRICTION_FIELDS: Mapping[str, Field] = {
    'actor': Choice(
        'constant',
        ('constant', 'logprobs', 'temperature'),
        'constant: the answer becomes one token, its log-probs 0; logprobs: noise; temperature: drawn at another one',
    ),
    'actor_share': Real(0.0, SHARE, 'share of the answers that this happens to; 0 = off'),
    'actor_token': Integer(0, COUNT_OR_OFF, 'constant: the id of that token'),
    'actor_nats': Real(1.0, POSITIVE, 'logprobs: standard deviation of Gaussian noise; the sum is at most 0'),
    'actor_temperature': Real(
        2.0, POSITIVE, 'temperature: of the tokens; their log-probs are those at rollout.temperature'
    ),
    'reward_share': Real(0.0, SHARE, 'share of the answers whose reward is drawn from the range of the batch; 0 = off'),
    'unrewarded_share': Real(0.0, SHARE, 'share of the prompts whose answers have the reward 0; 0 = off'),
}


def find_friction_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule of a training run that the section breaks."""
    friction, rollout = c.friction, c.rollout
    if not friction.actor_share:
        return
    setting = f'friction.actor={friction.actor!r} with friction.actor_share={friction.actor_share}'
    if cuts_softmax(c):
        yield (
            f'{setting} and rollout.top_k={rollout.top_k}, rollout.top_p={rollout.top_p}: frictions of the actor are '
            'defined on log-probs of the whole softmax; set rollout.top_k=0 and rollout.top_p=1, or '
            'friction.actor_share=0'
        )
    is_small = c.model.source == 'random' and c.model.outputs == 'symbols'
    if friction.actor == 'constant' and is_small and friction.actor_token >= c.task.symbols:
        yield (
            f"{setting} and friction.actor_token={friction.actor_token}: a model with model.outputs='symbols' answers "
            f'with the first task.symbols={c.task.symbols} tokens only; use a smaller id'
        )
    if friction.actor == 'temperature' and not find_server(rollout.server).in_process:
        yield (
            f'{setting} and rollout.server={rollout.server!r}: these servers report log-probs at the temperature that '
            f'they draw at; use rollout.server={IN_PROCESS.name!r}, or another friction.actor'
        )


def find_evaluation_problem(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each friction that is set for a model that is only evaluated."""
    for name in SHARES:
        if share := c.friction[name]:
            yield (
                f'friction.{name}={share} is a friction of training, and an evaluation has none: set friction.{name}=0'
            )


# The fields of the section `simulation`, and the settings that a simulation excludes. docs/simulation.md is their page.


ROOFLINE, VIRTUAL = 'roofline', 'virtual'  # simulation.prices, besides a file
TASK = 'task'  # simulation.prompts, besides a distribution

SIMULATION_FIELDS: Mapping[str, Field] = {
    'prices': Path(
        '',
        "'roofline': from chip and model; 'virtual': the section virtual; FILE.json: of areal-simulate --calibrate; "
        "'' = the config is no simulation",
    ),
    'chip': Text('H800', 'roofline: of the learner, and of engines that engine_chips does not name'),
    'engine_chips': Text(
        '', "'4 x H800, 4 x A100': of the engines in their order, H800/3 is one of a third of the speed; '' = chip"
    ),
    'model': Text('', "roofline: a model by name, such as 'R1-distill-Qwen-7B'; '' = the shape of the section model"),
    'answers': Path(
        'lognormal(1000, 0.75)',
        'tokens of an answer, or of a turn, before the limit: lognormal(mean, sigma), constant(n), ...; A -> B drifts '
        "over the run, 'A; B' has equal phases; log(RUN): those of a run",
    ),
    'prompts': Path('constant(512)', "tokens of a prompt, likewise; 'task': those of the task's own prompts"),
    'turns': Path('', "turns of an agent's episode, likewise; '' = an answer is one turn; log(RUN) brings its own"),
    'results': Path('constant(200)', 'tokens that the tool gives between two turns, likewise'),
    'tool': Path('constant(1000)', 'milliseconds of a call of the tool, likewise; prices virtual: virtual.tool_s'),
    'failures': Path(
        '', "rollout.server other than 'in_process': seconds that a server lives, likewise; '' = none of them dies"
    ),
    'restart': Path('constant(120)', 'seconds from the death of a server until another one has started in its place'),
    'group_share': Real(0.0, SHARE, 'of the variance of the logarithm of a length, what answers to a prompt share'),
    'success': Real(0.5, SHARE, 'share of the answers with the reward 1'),
    'verifier': Path('constant(10)', 'milliseconds of the verifier for an answer, likewise'),
    'bandwidth': Real(0.6, SHARE_ABOVE_ZERO, 'roofline: share of the memory bandwidth that decoding reaches'),
    'prefill': Real(0.5, SHARE_ABOVE_ZERO, 'roofline: share of the flops that prefill reaches'),
    'mfu': Real(0.4, SHARE_ABOVE_ZERO, 'roofline: share of the flops that training reaches'),
    'passes': Real(4.0, POSITIVE, 'roofline: forward passes that an update costs: 3, and 1 for proximal log-probs'),
    'update_s': Real(0.0, NOT_NEGATIVE, 'roofline: seconds of an update besides passes and optimizer'),
    'load_s': Real(0.0, NOT_NEGATIVE, 'roofline: seconds of a publication besides its bytes'),
    'link_bytes_s': Real(
        12.5e9, POSITIVE, "roofline, publication.channel='stream': bytes a second of a host's network, each direction"
    ),
    'switch_s': Real(0.0, NOT_NEGATIVE, 'engines that share the learner: seconds to change from one to the other'),
    'join': Flag(True, 'join dispatches between which nothing is decided: the same events, in less time'),
}


def require_no_simulation(c: config_dict.ConfigDict) -> None:
    """Raises ConfigError for the config of a simulation, which trains nothing."""
    if prices := c.simulation.prices:
        raise ConfigError(
            f'simulation.prices={prices!r} makes this config one of a simulation: run it with areal-simulate, or set '
            "simulation.prices='' to train"
        )


def find_simulation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that a config breaks: the fields, their values and the fix."""
    prices = c.simulation.prices
    if not prices:
        return
    setting = f'simulation.prices={prices!r}'
    if prices not in (ROOFLINE, VIRTUAL) and not prices.endswith('.json'):
        yield f"{setting} is unknown; use '{ROOFLINE}', '{VIRTUAL}' or FILE.json"
    if not find_objective(c.loss.objective).generates:
        yield f'{setting} and loss.objective={c.loss.objective!r}: a simulation is of runs that generate'
    is_logged = c.simulation.answers.strip().startswith('log(')
    if c.rollout.workflow != 'single_turn' and not c.simulation.turns and not is_logged:
        yield (
            f'{setting} and rollout.workflow={c.rollout.workflow!r}: its code is not run; say how many turns an '
            "episode has, simulation.turns='uniform(2, 8)', or take them from a run, simulation.answers='log(RUN)'"
        )
    if c.simulation.turns and is_logged:
        yield (
            f'simulation.turns={c.simulation.turns!r} and simulation.answers={c.simulation.answers!r}: the run brings '
            "its own turns; set simulation.turns=''"
        )
    if c.simulation.failures and find_server(c.rollout.server).in_process:
        yield (
            f'simulation.failures={c.simulation.failures!r} and rollout.server={c.rollout.server!r}: engines in the '
            "process of the learner end the run with them; use rollout.server='own'"
        )
    if c.friction.actor_share:
        yield (
            f'{setting} and friction.actor_share={c.friction.actor_share}: an answer has no tokens to change; set it '
            'to 0'
        )
    if prices != ROOFLINE and c.cluster.reallocate != 'off':
        yield (
            f'{setting} and cluster.reallocate={c.cluster.reallocate!r}: only prices of chips follow the devices that '
            f"move; use simulation.prices='{ROOFLINE}', or cluster.reallocate='off'"
        )
    engines = parse_engines(c.cluster.engines)
    if prices.endswith('.json') and not engines.has_equal_engines:
        yield (
            f'{setting} and cluster.engines={c.cluster.engines!r}: a fitted price is that of all engines; use '
            f"simulation.prices='{ROOFLINE}', or equal engines, such as '4 x tensor=1'"
        )
    if prices == ROOFLINE and engines.shared and (c.staleness.eta != 0 or c.staleness.schedule != 'natural'):
        yield (
            f"{setting} and cluster.engines={c.cluster.engines!r}: engines on the learner's devices are simulated in "
            'turns with it; set staleness.eta=0, or give the engines devices of their own'
        )


# The section `task`, and the fields that each source of a mixture may set for itself.


TASK_FIELDS: Mapping[str, Field] = {
    'name': Path(
        'token_reversal',
        'token_reversal, running_sums, reasoning_gym, jsonl, FILE.py:FUNCTION: docs/your_task.md; '
        'code: docs/code_rewards.md; verifiers:TASKSET: docs/agents.md',
    ),
    'options': Options({}, 'FILE.py:FUNCTION, verifiers: parameters by name, any keys; task.options.digits=3'),
    'reward': Path('', "FILE.py:FUNCTION that scores answers in the task's place; '' = the task"),
    'system_prompt': Text('', "'' = that of the chat template"),
    'datasets': Texts(
        (),
        "reasoning_gym: a mix of its data sets, 'name' or 'name:option=value:...', see docs/answers.md; "
        'code: families of generated problems',
    ),
    'dataset_size': Integer(
        500, COUNT, 'questions; reasoning_gym: drawn from each data set but one-digit arithmetic; running_sums: all'
    ),
    'path': Path(
        '',
        'jsonl: a JSON object {question, answer} a line; sft: or {messages}; pairs: {prompt, chosen, rejected}; '
        'or a table, or hf:ORG/NAME[:CONFIG][:SPLIT] of the Hugging Face Hub: docs/your_data.md; '
        "verifiers: TOML with its [env]; code: see docs/code_rewards.md, '' = generated, 'humaneval'",
    ),
    'columns': Options({}, 'jsonl, code: the column of the file for a name of the task; task.columns.question=problem'),
    'answer': Choice(
        'integer',
        ('integer', 'number', 'exact', 'normalised', 'math'),
        'jsonl: what is compared, see docs/answers.md',
    ),
    'audit_fraction': Real(0.01, SHARE, 'math: share of answers that are compared a second time, see docs/answers.md'),
    'held_out_fraction': Real(0.25, SHARE, 'share of the problems kept for evaluation'),
    'over_length': Choice('refuse', ('refuse', 'drop'), 'problems that fit no slot (sft: no row); drops are counted'),
    'symbols': Integer(2, COUNT, 'token_reversal: size of the alphabet'),
    'length': Integer(4, COUNT, 'token_reversal: symbols in a prompt; running_sums: numbers'),
    'time_limit_s': Real(2.0, SECONDS, 'code: CPU seconds of a check, unless the problem says; agent.tools: of a call'),
    'memory_limit_mb': Integer(1024, COUNT, 'code, agent.tools: MiB of all processes, where the problem does not say'),
    'packages': Texts(PACKAGES, 'code, agent.tools: what programs import beyond the standard library, and its needs'),
    'show_tests': Flag(False, 'code: the visible tests stand in the prompt'),
    'partial_credit': Flag(False, 'code: the share of the tests that pass is the reward; False = all or nothing'),
    'verifier': Choice('process', ('process', 'inline'), "'inline': without workers, for fast trusted code"),
    'sandbox': Choice(AUTO, LEVELS, 'of scorers and tools that run code of models: docs/code_rewards.md'),
    'verifier_workers': Integer(1, THREADS, 'worker processes'),
    'verifier_deadline_s': Real(20.0, SECONDS, 'seconds for one answer before its worker is killed'),
    'verifier_attempts': Integer(2, COUNT, 'tries for one answer before it is dropped'),
    'verifier_memory_mb': Integer(2048, MEBIBYTES, 'MiB of heap (RLIMIT_DATA) of each scorer process; 0 = no limit'),
    'max_failed_groups': Integer(32, COUNT, 'groups (evaluation: answers) in a row without reward that end a run'),
    'filter': Choice(
        'none', ('none', 'equal_rewards', 'success_rate'), 'drop a finished group that teaches nothing, and refill'
    ),
    'filter_low': Real(0.05, SHARE, 'success_rate: least share of the answers of a group with a reward above 0'),
    'filter_high': Real(0.95, SHARE, 'success_rate: largest share of them'),
    'max_filtered_groups': Integer(256, COUNT, 'groups in a row that the filter drops before the run ends'),
}
OF_SOURCE = (
    'name', 'options', 'reward', 'system_prompt', 'datasets', 'dataset_size', 'path', 'columns', 'answer',
    'held_out_fraction', 'over_length', 'symbols', 'length', 'time_limit_s', 'memory_limit_mb', 'show_tests',
    'partial_credit',
)  # fmt: skip
SOURCE_FIELDS: Mapping[str, Field] = {
    'weight': Real(1.0, WEIGHT, 'share of the draws, as a part of the sum of all weights'),
    **{name: TASK_FIELDS[name] for name in OF_SOURCE},
}


_PROJECTIONS = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')

SECTIONS: Mapping[str, Section] = {
    'run': Section(
        'What runs',
        seed=Integer(0, SEED, 'of weights, prompts and sampling noise'),
        steps=Integer(20, COUNT, 'updates to publish'),
        clock=Choice('real', ('real', 'virtual'), "'virtual': deterministic asynchrony, repeatable bit for bit"),
        stall_timeout_s=Real(300.0, SECONDS, 'real clock: the run ends after so many seconds without a completion'),
        compilation_budget=Integer(0, COUNT_OR_OFF, 'XLA programs compiled after warm-up before the report warns'),
        compilation_cache=Path('', "directory of XLA's persistent cache; '' = off"),
        export=Flag(True, 'write WORKDIR/export, a Hugging Face directory, when the run has finished'),
        export_every=Integer(0, COUNT_OR_OFF, 'runs in roles: the checkpoints of these updates go to WORKDIR/exports'),
        export_dtype=Choice('float32', DTYPES, 'of exported weights'),
        mirror=Address('', "copies checkpoints, report and exports there: gs://, s3:// or a directory; '' = off"),
        mirror_wait_s=Real(600.0, SECONDS, 'longest wait for the mirror when the run ends'),
    ),
    'model': Section('The model; fields marked random are read with model.source=random only', **MODEL_FIELDS),
    'task': Section(
        'Prompts and rewards',
        sources=Sources(
            {},
            'a mixture: several tasks by name, each with a weight and its own values of fields of this section; '
            'task.sources.gsm8k.weight=2.0: docs/mixtures.md',
            SOURCE_FIELDS,
        ),
        **TASK_FIELDS,
    ),
    'rollout': declare_section(RolloutSection),
    'agent': Section('Programs that talk to the policy over several turns, see docs/agents.md', **AGENT_FIELDS),
    'staleness': declare_section(StalenessSection),
    'buffer': Section(
        'Finished groups that wait for the learner',
        capacity=Integer(64, COUNT, 'groups; a full buffer closes admission and never drops'),
    ),
    'learner': declare_section(LearnerSection),
    'lora': Section(
        'Low-rank adapters',
        rank=Integer(0, COUNT_OR_OFF, 'of the adapters; 0 = train all weights'),
        alpha=Real(16.0, POSITIVE, 'adapters are multiplied by alpha / rank'),
        targets=Texts(_PROJECTIONS, 'projections that get adapters'),
    ),
    'loss': declare_section(LossSection),
    'friction': Section('What goes wrong on purpose, see docs/frictions.md', **FRICTION_FIELDS),
    'optimizer': declare_section(OptimizerSection),
    'critic': declare_section(CriticSection),
    'cluster': Section(
        'Which devices train and which generate',
        learner=Text(
            ONE_DEVICE,
            "sizes of the learner's mesh over data, fsdp, expert, context, tensor: 'data=2,fsdp=2'; over processes: "
            "'hosts=2 x fsdp=8'",
        ),
        engines=Text(
            '1 x shared',
            "'N x shared' with the learner's first device | 'N x tensor=K' or 'N x expert=K': K devices for each, or "
            "groups of unequal size: '2 x tensor=2 + 4 x tensor=1'",
        ),
        strategy=Choice('fsdp', ('fsdp', 'fsdp_tensor', 'tensor', 'replicated'), 'see sharding/rules.py'),
        reallocate=Path('off', "moves engines between generation and training: 'off' | 'auto' | 'plan(FILE)'"),
        reallocate_gain=Real(0.1, SHARE_ABOVE_ZERO, 'auto: predicted gain of the time of an update to move for'),
        reallocate_updates=Integer(4, COUNT, 'auto: updates in a row that must predict it, and least between moves'),
        xla_flags=FlagsText(
            AUTO_FLAGS,
            "of XLA on accelerators: 'auto' by hardware, 'off', or own ones 'name=value name=value'; those of the "
            'environment win, CPUs have none: docs/pods.md',
        ),
    ),
    'distributed': Section(
        'A learner over several processes, or several runs that average',
        coordinator=Text(
            '', "main_train: host:port of process 0, with --process_id; '' = found from SLURM, GKE or the TPU pod"
        ),
        command_deadline_s=Real(600.0, SECONDS, 'longest command of the learner, compilation included'),
        clients=Integer(1, THREADS, 'independent runs that average their blocks, see docs/blockwise.md; 1 = off'),
        client=Integer(0, COUNT_OR_OFF, 'number of this run among them, from 0'),
        overlap=Flag(True, 'average a block while the next one trains; False: wait for it'),
        average_directory=Path('', 'of the blocks and their means, seen by all clients'),
        average_deadline_s=Real(120.0, SECONDS, 'for the blocks of other clients; who is late is left out'),
        kept_turns=Integer(0, COUNT_OR_OFF, 'newest means kept, for clients that are resumed; 0 = all'),
    ),
    'publication': Section(
        'How weights get to the engines',
        channel=ChoiceOrOwn('device', tuple(CHANNELS), describe_channels()),
        directory=Path('', "files: where versions are written; '' = WORKDIR/publication"),
        dtype=Choice('float32', DTYPES, 'of the weights that engines decode with'),
        delta=Flag(False, 'send what changed since the version before; 16-bit dtypes; files: from one learner process'),
        base_every=Integer(20, COUNT, 'publication.delta: versions from a whole one to the next'),
        verify=Flag(False, 'engines recompute the digest of every leaf that they receive'),
        listen=Text(
            '',
            "stream: host or host:port, an interface that engines on other hosts reach; '' = this host only, own = the "
            'host of each process of the learner',
        ),
        reader_deadline_s=Real(
            10.0, SECONDS, 'shm, stream: an engine that stops while it reads a version is not waited for longer'
        ),
        record_deadline_s=Real(600.0, SECONDS, 'stream: for one version to reach an engine'),
    ),
    'checkpoint': Section(
        'What is saved',
        every=Integer(0, COUNT_OR_OFF, 'updates between saves; 0 = only when the run ends or is stopped'),
        keep=Integer(2, COUNT, 'newest ones kept, 1 where the disk is nearly full; fixed(k) adds k versions to each'),
    ),
    'sft': Section(
        'Training on given data, read with loss.objective=sft, dpo and reward_model only',
        evaluate_every=Integer(0, COUNT_OR_OFF, 'updates between held-out measures; 0 = only at start and end'),
    ),
    'evaluation': Section(
        'Held-out problems: before, after and beside training',
        problems=Integer(
            64, COUNT_OR_OFF, 'problems (sft: demonstrations; dpo, reward_model: pairs); 0 = no evaluation'
        ),
        samples=Integer(4, COUNT_OR_OFF, 'answers sampled per problem at rollout.temperature, beside one greedy'),
        every=Integer(0, COUNT_OR_OFF, 'updates between two evaluations beside training; 0 = only before and after'),
        every_problems=Integer(16, COUNT, 'problems that are answered there, the first of evaluation.problems'),
        every_samples=Integer(0, COUNT_OR_OFF, 'answers sampled per problem there, beside one greedy'),
        slots=Integer(8, COUNT, 'answers that one engine decodes at once there, in slots and a KV cache of their own'),
        every_dispatches=Integer(4, COUNT, 'beside training requests at most one dispatch in so many is theirs'),
        engines=Integer(
            0, COUNT_OR_OFF, 'of cluster.engines the last so many do nothing else (servers of runs in roles)'
        ),
    ),
    'server': Section(
        'Bounds of python -m areal_jax.main_serve',
        max_requests=Integer(1024, COUNT, 'answers under way or queued; more are refused with 503'),
        max_streams=Integer(256, COUNT, 'open responses with server-sent events; more are refused with 429'),
        max_share=Real(
            0.5, SHARE_ABOVE_ZERO, 'of the free places of the queue, that one request may take; one place always'
        ),
        max_connections=Integer(
            4096, COUNT, 'open at once, fewer where the process may not open so many files; silent ones make room'
        ),
        max_scored_tokens=Integer(2**17, COUNT, 'of a request that asks for log-probs of its prompts; more: 400'),
        max_body_bytes=Integer(16 * 2**20, COUNT, 'of a request; a larger one is refused with 413'),
        header_timeout_s=Real(10.0, SECONDS, 'for the head of a request to arrive, else the connection is closed'),
        body_timeout_s=Real(30.0, SECONDS, 'for the body of a request to arrive, else 408'),
        request_timeout_s=Real(3600.0, SECONDS, 'for the answers of a request, else 504'),
        write_timeout_s=Real(120.0, SECONDS, 'for a client to read on, else the connection is closed'),
        drain_timeout_s=Real(30.0, SECONDS, 'for running answers when the server is told to stop'),
        required=Choice(
            'refuse',
            ('refuse', 'wish'),
            'requests whose answers must be a call or JSON: refused with 400, or shown to the model, misses counted',
        ),
        hosts=Hosts((), 'by which clients without a key may call it, next to --host, localhost and 127.0.0.1'),
        notation=Text(HERMES, 'of calls in answers to requests with tools: see agent.notation'),
    ),
    'diagnostics': declare_section(DiagnosticsSection),
    'telemetry': Section(
        'What a run shows',
        progress=Flag(True, 'a line per update on the terminal'),
        tensorboard=Flag(True, 'event files in WORKDIR/tensorboard'),
        plots=Flag(True, 'PNG plots and report.html when the run ends'),
        rollouts=GroupCount(
            '4', "groups of an update whose answers are kept, 'all', or '0' = off; see docs/rollouts.md"
        ),
        hook=Path('', "'my_file.py:function', called with the metrics of every update, see docs/tracking.md; '' = off"),
        tracker=Choice('none', ('none', 'wandb', 'mlflow', 'trackio'), 'an experiment tracker, see docs/tracking.md'),
        tracker_answers=Flag(
            False, 'whether the report that the tracker gets shows texts of answers, see docs/rollouts.md'
        ),
        project=Text('', "of the tracker; '' = that of the tracker's environment variable, or areal_jax"),
        profile_steps=Lengths((), 'first and last update of a trace of jax.profiler in WORKDIR/profile; () = off'),
        energy=Choice('off', ('off', 'auto'), 'joules and seconds by what devices do, see docs/energy.md'),
    ),
    'simulation': Section('What a simulation draws and what work costs, see docs/simulation.md', **SIMULATION_FIELDS),
    'virtual': Section(
        'Seconds that work costs under the virtual clock',
        decode_step_s=Real(0.01, NOT_NEGATIVE, 'one decode step of all rows'),
        prefill_token_s=Real(0.0002, NOT_NEGATIVE, 'one token of a packed prefill, padding included'),
        train_token_s=Real(0.0005, NOT_NEGATIVE, 'one packed token, forward and backward'),
        publish_s=Real(0.02, NOT_NEGATIVE, 'one transfer, receive or snapshot of weights'),
        reward_s=Real(0.001, NOT_NEGATIVE, 'one answer'),
        tool_s=Real(0.01, NOT_NEGATIVE, 'one call of a tool'),
        save_s=Real(0.05, NOT_NEGATIVE, 'one checkpoint'),
    ),
}

FIELDS: Mapping[str, Field] = {
    f'{section}.{name}': field for section, fields in SECTIONS.items() for name, field in fields.items()
}
# sections with any keys
FREE = tuple(path for path, field in FIELDS.items() if isinstance(field, Options | Sources))


def find_free(path: str) -> str:
    """Returns the free section that a path is inside of: 'task.options' of 'task.options.digits'; '' = none."""
    return next((free for free in FREE if path.startswith(f'{free}.')), '')


def find_declared(path: str) -> Field | None:
    """Returns the declaration of a field, also of a source's; None for an option or an unknown path."""
    declared = FIELDS.get(find_free(path))
    if not isinstance(declared, Sources):
        return FIELDS.get(path)
    return declared.fields.get(path.removeprefix(f'{find_free(path)}.').partition('.')[2])


def set_free(config: config_dict.ConfigDict, path: str, value: object) -> None:
    """Sets a value inside of a free section of the config, whatever its type; sections on the way are made."""
    free = find_free(path)
    section, _, field = free.partition('.')
    at = config[section][field]
    *outer, key = path.removeprefix(f'{free}.').split('.')
    for name in outer:
        if name not in at:
            at[name] = config_dict.ConfigDict()
        at = at[name]
    with at.unlocked(), at.ignore_type():
        at[key] = value


def choices(path: str) -> tuple[str, ...]:
    """The allowed names of a Choice; the code that implements them takes its list from here."""
    field = FIELDS[path]
    assert isinstance(field, Choice), f'{path} is no Choice'
    return field.choices


def require_allowed(values: Mapping[str, Value]) -> None:
    """Raises ConfigError for the first value of {'learner.loss_scale': 1.0, ...} that its field does not allow."""
    for path, value in values.items():
        if field := find_declared(path):
            field.require_allowed(path, value)
