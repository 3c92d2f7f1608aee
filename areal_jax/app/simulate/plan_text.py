"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from areal_jax.app.simulate.plan_search import Planned, energy_of
from areal_jax.app.simulate.planning import WINDOW
from areal_jax.simulation.planner.advice import count_devices, count_running_groups, device_hours
from areal_jax.simulation.planner.neighbours import Outcome

MOST_TRADES = 3  # that the text has
_STOPPED = 'stopped before the search had ended: this is the best plan so far, and another one may be limited otherwise'


def render(planned: Planned, width: int = 0) -> str:
    """Returns sentences and the fields of the config: one a line, or in lines of a terminal of so many characters."""
    setting, plan, shown = planned.setting, planned.plan, planned.full or planned.outcome
    answers = setting.answers
    used = count_devices(setting, plan)
    running = count_running_groups(setting, plan)
    low, high = planned.interval
    filled = 100 / answers.moments.tail
    scale = f'1/{planned.divisor} of the devices and of the batch' if planned.divisor > 1 else 'all devices'
    where = 'at full size' if planned.full else f'with {scale}'
    lines = [
        f'{setting.devices} x {setting.chip.name}, {setting.shape.name}; {answers.count:,} answers an update in groups '
        f'of {answers.group_size}, {answers.moments.mean:,.0f} tokens on average, {answers.limit:,} at most',
        '',
        f'split              {plan.engines} engines of {setting.engine_devices}, learner on {plan.training}'
        + (f', {setting.devices - used} left over' if used < setting.devices else ''),
        f'slots              {plan.slots} an engine; {running} groups run at a time (rollout.max_running_groups=0 '
        f'admits them by need: slots / group size would fill {filled:.0f}% of the slots)',
        f'eta                {plan.eta} of --max_eta={setting.most_eta}; weights are published after every update, the '
        'config has no other interval',
        f'tokens a second    {shown.tokens_s:,.0f}; {low:,.0f} to {high:,.0f} in {WINDOW} updates in a row, with the '
        f'published ranges; an update takes {shown.period_s:,.1f} s',
        f'idle               engines {_percent(1 - shown.engines_busy)}, learner {_percent(1 - shown.learner_busy)}',
        f'age                {shown.age_mean:.2f} versions on average, {shown.age_p95:.0f} for 95% of the tokens',
        f'price of age       --age_price={setting.age_price:g} of the speed for a version; {_tell_trades(planned)}',
        f'a million tokens   {device_hours(setting, plan, shown.tokens_s):.3g} device-hours; {_tell_energy(planned)}',
        f'limits             {planned.advice.binds}',
        f'                   {planned.advice.breaks_next}',
        f'synchronous        {planned.advice.asynchrony}',
        '',
        f'{planned.simulations} simulations of {shown.updates} updates {where}, after a warm-up; real engines and '
        'learners reach less than the published shares of their peaks, by 1.5 to 2.5 in AReaL\'s published runs',
        *([_STOPPED] if planned.is_stopped else []),
        '',
        *(_fill_lines(list_lines(planned.fields), width) if width else list_lines(planned.fields)),
        *(['', _tell_verdict(planned)] if width else []),
    ]  # fmt: skip
    return '\n'.join(lines)


def list_lines(fields: Mapping[str, object]) -> list[str]:
    """'--config.rollout.slots=256', as a shell reads them."""
    return [f'--config.{name}={_quote(value)}' for name, value in fields.items()]


def _tell_verdict(planned: Planned) -> str:
    """The plan in a line, for the end of a screen."""
    plan, shown = planned.plan, planned.full or planned.outcome
    low, high = planned.interval
    return (
        f'plan: {plan.engines} engines, learner on {plan.training}, eta {plan.eta}, {plan.slots} slots: '
        f'{shown.tokens_s:,.0f} tokens a second ({low:,.0f} to {high:,.0f})'
    )


def _fill_lines(words: Sequence[str], width: int) -> list[str]:
    """The words behind a command, as a shell reads them, in few lines."""
    lines = ['areal-train --config=FILE --workdir=DIR']
    for word in words:
        if len(lines[-1]) + len(word) + 3 > width:
            lines.append(' ')
        lines[-1] += f' {word}'
    return [*(f'{line} \\' for line in lines[:-1]), lines[-1]]


def as_json(planned: Planned) -> dict[str, object]:
    """All that is known of a plan."""
    setting, plan, shown = planned.setting, planned.plan, planned.full or planned.outcome
    energy = energy_of(planned)
    return {
        'devices': setting.devices,
        'chip': setting.chip.name,
        'model': setting.shape.name,
        'answers': setting.answers.count,
        'group_size': setting.answers.group_size,
        'lengths': setting.answers.text,
        'max_age': setting.max_age,
        'max_eta': setting.most_eta,
        'age_price': setting.age_price,
        'plan': {**dataclasses.asdict(plan), 'engine_devices': setting.engine_devices},
        'devices_used': count_devices(setting, plan),
        'running_groups': count_running_groups(setting, plan),
        'outcome': _as_json(shown),
        'interval_tokens_s': list(planned.interval),
        'device_hours_a_million_tokens': device_hours(setting, plan, shown.tokens_s),
        'joules_a_token': None if energy is None else [energy.low, energy.mid, energy.high],
        'synchronous': None if planned.in_turns is None else _as_json(planned.in_turns),
        'train_synchronously': planned.advice.trains_in_turns,
        'binding': planned.advice.binding,
        'tried': [{**dataclasses.asdict(one), 'outcome': _as_json(found)} for one, found in planned.tried.items()],
        'trades': [dataclasses.asdict(trade) for trade in planned.trades],
        'limits': planned.load.shares(),
        'sentences': [planned.advice.binds, planned.advice.breaks_next, planned.advice.asynchrony],
        'divisor': planned.divisor,
        'simulations': planned.simulations,
        'stopped': planned.is_stopped,
        'full': planned.full is not None,
        'fields': dict(planned.fields),
    }


def _as_json(outcome: Outcome) -> dict[str, object]:
    return dataclasses.asdict(outcome)


def _tell_energy(planned: Planned) -> str:
    energy = energy_of(planned)
    if energy is None:
        return f'no joules: no watts are published of {planned.setting.chip.name}'
    return f'{energy.low:.2g} to {energy.high:.2g} J a token, of the boards alone'


def _tell_trades(planned: Planned) -> str:
    """What a higher price takes, among the plans that were simulated."""
    younger = [
        f'from {trade.price:.3g} on eta {trade.plan.eta} ({trade.outcome.tokens_s:,.0f} tokens a second, mean age '
        f'{trade.outcome.age_mean:.1f})'
        for trade in planned.trades[:MOST_TRADES]
    ]
    return '; '.join(younger) or 'no younger plan was simulated'


def _percent(share: float) -> str:
    return f'{100 * max(0.0, share):.0f}%'


def _quote(value: object) -> str:
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    text = str(value)
    return f'"{text}"' if ' ' in text else text
