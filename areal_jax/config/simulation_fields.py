"""The fields of the section `simulation`, and what a simulation can not do. docs/simulation.md is their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import Field, Flag, Path, Real, Text
from areal_jax.config.kinds import find_server
from areal_jax.config.objectives import find_objective
from areal_jax.config.ranges import NOT_NEGATIVE, POSITIVE, SHARE, SHARE_ABOVE_ZERO, ConfigError

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
