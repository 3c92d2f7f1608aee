"""Texts and tables of the pages of a report, made once from report.json's content.

markdown_page.py (report.md), html_page.py (report.html) and comparison_page.py show them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from areal_jax.report.agents import HEAD as AGENTS_HEAD
from areal_jax.report.agents import describe_agents
from areal_jax.report.aggregates import HEAD as SERVERS_HEAD
from areal_jax.report.aggregates import describe_servers
from areal_jax.report.engine_work import HEAD as CODE_HEAD
from areal_jax.report.engine_work import (
    age_rows,
    describe_attention,
    describe_code,
    describe_experts,
    describe_split,
    route_rows,
    split_rows,
    work_rows,
)
from areal_jax.report.engines.classes import HEAD as CLASSES_HEAD
from areal_jax.report.engines.classes import class_rows, describe_left_out
from areal_jax.report.event_log import HEAD as PUBLICATIONS_HEAD
from areal_jax.report.event_log import describe_publications
from areal_jax.report.limit import HEAD, curve_rows, describe_cost
from areal_jax.report.pages.energy_section import HEAD as ENERGY_HEAD
from areal_jax.report.pages.energy_section import describe_energy, energy_rows
from areal_jax.report.report_keys import Groups, Interval, OptimizerSteps, Report, Time
from areal_jax.report.token_fates import censoring_rows, fate_rows
from areal_jax.telemetry.progress import format_bytes, format_gibibytes, format_number, format_percent
from areal_jax.workers.sandbox.sandbox_trial import describe_sandbox


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; code is between backticks."""

    text: str

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under `head`; the first cell of a row is its label."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.rows)


Part = Text | Items | Table  # false if empty


@dataclasses.dataclass(frozen=True)
class Parts:
    """The texts and tables of one run."""

    what_ran: Text
    which_config: Text
    warnings: Items
    accuracy: Table
    intervals: Text
    evaluation: Table
    evaluation_cost: Text
    learning: Table
    code: Table
    staleness: Table
    ratios: Table
    split: Table
    split_cost: Text
    experts: Text
    routes: Table
    fates: Table
    answers: Table
    cause_of_gap: Text
    time: Table
    ideal_rule: Text
    work: Table
    rates: Table
    memory: Table
    publications: Table
    agents: Table
    servers: Table
    classes: Table
    left_out: Text
    energy: Table
    energy_sources: Items
    groups: Table
    problems: Text
    versions: Text


def tell_parts(report: Report) -> Parts:
    """Every text and table of the report of a run."""
    answers = ('answers', 'number', 'length, mean', 'KS to generated', 'reward, mean', 'KS to generated')
    versions = ', '.join(f'{package} {version}' for package, version in report['versions'].items())
    return Parts(
        what_ran=Text(_what_ran(report)),
        which_config=Text(_which_config(report)),
        warnings=Items(report['warnings']),
        accuracy=Table(('', 'before', 'after', 'gain'), _accuracy_rows(report)),
        intervals=Text(
            'Intervals are 95%: Wilson or Student for one answer a problem, problems as clusters for several, paired '
            'over problems for the gain.'
        ),
        evaluation=Table(HEAD, curve_rows(report)),
        evaluation_cost=Text(describe_cost(report) if report['evaluation_cache_bytes'] is not None else ''),
        learning=Table(('learning', ''), _learning_rows(report)),
        code=Table(CODE_HEAD, describe_code(report['code'])),
        staleness=Table(('', ''), _staleness_rows(report)),
        ratios=Table(
            ('age', 'trained tokens', 'effective sample size', 'clipped', 'KL'), age_rows(report['ratios_by_age'])
        ),
        split=Table(('importance ratio (nats)', 'tokens', 'mean', 'RMS'), split_rows(report['ratio_split'])),
        split_cost=Text(describe_split(report['ratio_split'])),
        experts=Text(describe_experts(report['experts'])),
        routes=Table(
            ('experts, age', 'tokens', 'sets that differ', 'tokens with one', 'routing, RMS (nats)'),
            route_rows(report['experts']),
        ),
        fates=Table(('fate', 'tokens', 'share', 'age, mean'), fate_rows(report['token_fates'])),
        answers=Table(answers, censoring_rows(report['censoring'])),
        cause_of_gap=Text(report['cause_of_gap']),
        time=Table(('lane seconds an update', ''), _time_rows(report['time'])),
        ideal_rule=Text(f'Ideal by the rule "{report["time"]["ideal_rule"]}".'),
        work=Table(('work of the engines', 'tokens', 'lane seconds'), work_rows(report['engine_work'])),
        rates=Table(('', ''), _rate_rows(report)),
        memory=Table(('memory, by what it is for', 'GiB'), _memory_rows(report)),
        publications=Table(PUBLICATIONS_HEAD, describe_publications(report['publications'])),
        agents=Table(AGENTS_HEAD, describe_agents(report['agents'])),
        servers=Table(SERVERS_HEAD, describe_servers(report['servers'])),
        classes=Table(CLASSES_HEAD, class_rows(report.get('engine_classes', []))),
        left_out=Text(describe_left_out(report.get('engine_classes', []))),
        energy=Table(ENERGY_HEAD, energy_rows(report['energy'])),
        energy_sources=Items(describe_energy(report['energy'])),
        groups=Table(('', 'groups'), _group_rows(report['groups'])),
        problems=Text(_describe_problems(report['problems'])),
        versions=Text(versions or 'not recorded'),
    )


def _what_ran(report: Report) -> str:
    attempt = f', the last of {report["attempts"]} attempts' if report['attempts'] > 1 and report['finished'] else ''
    wall = '' if (spent := report['wall_seconds']) is None else f' in {format_number(spent)} s of wall time{attempt}'
    planned = '' if report['finished'] else f' of {report["planned_steps"]}'
    simulated = report['simulation'] and f'**Simulated**, without weights: {report["simulation"]}. '
    return simulated + (
        f'`{report["config"]}`, seed {report["seed"]}, {_staleness_bound(report)}, {report["clock"]} clock: '
        f'{report["steps"]}{planned} updates{wall} '
        f'({format_number(report["window_seconds"])} clock seconds from the first admission to the last '
        'publication without evaluation). '
        f'On {_describe_hardware(report["hardware"])}. '
        f'Commit {_code(report["git_commit"])}, weights {_code((report["weights_sha256"] or "")[:16])}.'
    )


def _describe_hardware(hardware: Mapping[str, object]) -> str:
    """'2 cores (x86_64), device cpu:0, platform Linux-6.1'."""
    if not hardware:
        return 'hardware that was not recorded'
    others = dict(hardware)
    cores, machine, devices = others.pop('cores', '?'), others.pop('machine', ''), others.pop('devices', None)
    parts = [f'{cores} core{"" if cores == 1 else "s"}' + (f' ({machine})' if machine else '')]
    if isinstance(devices, list) and devices:
        several = f'{len(devices)} devices from {devices[0]} to {devices[-1]}'
        parts.append(several if len(devices) > 1 else f'device {devices[0]}')
    return ', '.join([*parts, *(f'{name} {value}' for name, value in others.items())])


def _code(text: str | None) -> str:
    return f'`{text}`' if text else 'not recorded'


def _staleness_bound(report: Report) -> str:
    if report['schedule'] != 'natural':
        return f'schedule {report["schedule"]}'
    return 'eta unbounded' if report['eta'] is None else f'eta {format_number(report["eta"])}'


def _which_config(report: Report) -> str:
    sentences = [f'It optimizes {report["objective"]}.'] if report['objective'] else []
    ends = ' or '.join(f'`{text}` (token {token})' for token, text in report['ends'].items())
    sentences += [f'An answer ends with {ends}.'] if ends else []
    sentences += [describe_sandbox(report['sandbox'])] if report['sandbox'] else []
    sentences += [describe_prolongation(prolongation) for prolongation in report['prolonged']]
    sentences += [describe_idle_fields(report['idle_fields'])] if report['idle_fields'] else []
    return ' '.join(sentences)


def describe_idle_fields(fields: Sequence[str]) -> str:
    """The sentence on config fields that the run does not use."""
    return f'Fields of the config file that this run does not use: {", ".join(fields)}.'


def describe_prolongation(prolongation: Mapping[str, int]) -> str:
    return (
        f'The run was prolonged from {prolongation["from_steps"]} to {prolongation["to_steps"]} updates at update '
        f'{prolongation["at_update"]}.'
    )


def _accuracy_rows(report: Report) -> list[tuple[str, ...]]:
    accuracy, shares = report['accuracy'], report['most_frequent_answer_share']
    rows: list[tuple[str, ...]] = []
    if accuracy:
        greedy, sampled = accuracy['greedy'], accuracy['sampled']
        rows.append(
            ('held-out accuracy, greedy', format_interval(greedy['before']), format_interval(greedy['after']), '')
        )
        rows.append(
            (
                'held-out accuracy, sampled',
                format_interval(sampled['before']),
                format_interval(sampled['after']),
                format_interval(sampled['gain'], '+'),
            )
        )
    if shares['before'] is not None or shares['after'] is not None:
        rows.append(('most frequent answer', format_percent(shares['before']), format_percent(shares['after']), ''))
    return rows


def _block_rows(steps: OptimizerSteps) -> list[tuple[str, ...]]:
    counts = steps.get('updates_by_block', {})
    told = ', '.join(f'{block}: {count}' for block, count in counts.items())
    return [('updates by the block that they trained', told)] if told else []


def _learning_rows(report: Report) -> list[tuple[str, ...]]:
    reward, mismatch, steps = report['reward'], report['mismatch'], report['optimizer_steps']
    unparsed, audit = report['unparsed_rate'], report['audit']
    compared = audit and f'{audit["answers"]} / {audit["disagreements"]} / {audit["undecided"]}'
    return [
        ('optimizer steps, applied / skipped (gradient not finite)', f'{steps["applied"]} / {steps["skipped"]}'),
        *_block_rows(steps),
        ('reward, first to last update', f'{format_number(reward["first"])} to {format_number(reward["last"])}'),
        (
            'answers that could not be read, first to last update',
            f'{format_percent(unparsed["first"])} to {format_percent(unparsed["last"])}',
        ),
        *([('answers compared twice / disagreements (audit.jsonl) / undecided', compared)] if compared else []),
        (
            'tokens generated / trained',
            f'{report["tokens"]["generated"]} / {format_number(report["tokens"]["trained"])}',
        ),
        (
            'log-prob mismatch engine to learner, mean / max',
            f'{format_number(mismatch["mean"])} / {format_number(mismatch["max"])} nats, '
            f'{format_percent(mismatch["exact_share"])} exactly equal (n = {mismatch["n"]})',
        ),
        *_quantized_rows(report),
        *(
            (f'mean mismatch of {engine}', f'{format_number(of["mean"])} nats (n = {of["n"]})')
            for engine, of in mismatch.get('by_engine', {}).items()
        ),
    ]


def _quantized_rows(report: Report) -> list[tuple[str, ...]]:
    found = report['mismatch'].get('quantized')
    if not found:
        return []
    return [
        (
            "quantized engines (rollout.weights='int8'): KL / effective sample size / share of the ratio",
            f'{format_number(found["kl"])} nats / {format_percent(found["effective_sample_size"])} / '
            f'{format_percent(found["ratio_share"])}',
        )
    ]


def _staleness_rows(report: Report) -> list[tuple[str, ...]]:
    age, versions, pause = report['token_age'], report['versions_per_trajectory'], report['publish_pause_seconds']
    waited, steps = report['request_pause_seconds'], report['token_age_steps']
    return [
        ('age of trained tokens, mean / max (versions)', f'{format_number(age["mean"])} / {format_number(age["max"])}'),
        (
            'age of trained tokens, mean / max (optimizer steps)',
            f'{format_number(steps["mean"])} / {format_number(steps["max"])}',
        ),
        (
            'versions in one trajectory, mean / max',
            f'{format_number(versions["mean"])} / {format_number(versions["max"])}',
        ),
        (
            'interruptions',
            f'{report["interruptions"]}, in {report["steps_with_interruption"]} of {report["steps"]} updates',
        ),
        (
            'pause of an engine for new weights, median / max (s)',
            f'{format_number(pause["median"])} / {format_number(pause["max"])}',
        ),
        (
            'pause of a request, from the swap to its next token, p50 / max (s)',
            f'{format_number(waited["median"])} / {format_number(waited["max"])}',
        ),
        ('admission was held back by (share of the time)', describe_held(report['admission_held'])),
        ('slots without an open answer meanwhile (share of slot time)', describe_held(report['idle_slots'])),
    ]


def describe_held(shares: Mapping[str, float]) -> str:
    """Formats 'eta 12%, max_running_groups 80%': the bounds that kept admission closed at least 0.5% of the time."""
    ends = {'steps': 'end of the run (its last group was admitted)'}
    return (
        ', '.join(f'{ends.get(bound, bound)} {share:.0%}' for bound, share in shares.items() if share >= 0.005) or '-'
    )


def _time_rows(time: Time) -> list[tuple[str, ...]]:
    ideal, achieved = time['ideal'], time['achieved']
    share = f' ({ideal / achieved:.0%} of what was possible)' if ideal and achieved else ''
    seconds = {'generate': time['generate'], 'train': time['train'], 'publish': time['publish'], 'ideal': ideal}
    rows = [(name, format_number(value)) for name, value in seconds.items()]
    return [*rows, ('achieved', f'{format_number(achieved)}{share}')]


def _rate_rows(report: Report) -> list[tuple[str, ...]]:
    rate, busy, memory = report['throughput'], report['busy'], report['peak_memory_bytes']
    preempted, cache = report['preemptions'], report['kv_cache_bytes']
    return [
        (
            'tokens generated / trained per second',
            f'{format_number(rate["generate_tokens_per_second"])} / {format_number(rate["train_tokens_per_second"])}',
        ),
        (
            'tokens per second and device: generated / read by an update',
            f'{format_number(rate["generate_tokens_per_second_per_device"])} / '
            f'{format_number(rate["learner_tokens_per_second_per_device"])}',
        ),
        ('positions that attention read while decoding', describe_attention(report['attention_positions'])),
        *(
            [('preemptions, tokens to compute again', f'{preempted["requests"]}, {preempted["tokens"]}')]
            if preempted
            else []
        ),
        ('model FLOPs utilisation of an update', format_percent(rate['mfu'])),
        ('lane occupied: rollout / learner', f'{format_percent(busy["rollout"])} / {format_percent(busy["learner"])}'),
        *([('KV cache of an engine', format_bytes(cache))] if cache is not None else []),
        ('peak memory of the process tree', '-' if memory is None else format_gibibytes(memory)),
        ('largest lag of the event loop (s)', format_number(report['event_loop_lag_seconds']['max'])),
        ('compilations after warm-up', str(report['compilations'])),
    ]


def _memory_rows(report: Report) -> list[tuple[str, ...]]:
    """Rows of the parts of at least 10 MiB, largest first; not all parts are in use at the same time."""
    parts, peak = report['memory_parts'], report['peak_memory_bytes']
    if not parts:
        return []
    ordered = sorted((item for item in parts.items() if item[1] >= 10 * 2**20), key=lambda item: -item[1])
    whole = [*ordered, ('all of these together', sum(parts.values()))]
    if peak is not None:
        whole.append(('peak of the process tree, with interpreter, libraries and buffers', peak))
    return [(name, f'{size / 2**30:.2f}') for name, size in whole]


def _group_rows(groups: Groups) -> list[tuple[str, ...]]:
    dropped = [(f'dropped: {reason}', str(count)) for reason, count in groups['dropped'].items()]
    filtered = [('left out of their batch for equal rewards', str(groups['filtered']))] if groups['filtered'] else []
    if (rate := groups['filtered_rate']) is not None:
        dropped.append(('share of the finished groups that task.filter dropped', format_percent(rate)))
    if lost := groups.get('lost'):
        for name, count, mean in (
            ('answers that no engine finished', lost['lost'], lost['lost_tokens_mean']),
            ('finished answers', lost['finished'], lost['finished_tokens_mean']),
        ):
            dropped.append((name, f'{count}, {format_number(mean)} tokens on average'))
    return [('drawn', str(groups['drawn'])), ('trained', str(groups['trained'])), *filtered, *dropped]


def _describe_problems(problems: Mapping[str, int]) -> str:
    if not problems:
        return ''
    return (
        f'{problems["train"]} problems to train on, {problems["held_out"]} held out, {problems["dropped"]} dropped '
        'because their prompts are too long.'
    )


def format_interval(interval: Interval | None, sign: str = '', *, mean: bool = True) -> str:
    """Formats '0.719 [0.599, 0.814] (n = 64)', without the mean if `mean` is False; '-' for None."""
    if not interval:
        return '-'
    shown = format(interval['mean'], f'{sign}.3f') if mean else ''
    bounds = '' if interval['low'] is None else f'[{interval["low"]:{sign}.3f}, {interval["high"]:{sign}.3f}]'
    return ' '.join(filter(None, (shown, bounds, f'(n = {interval["n"]})')))
