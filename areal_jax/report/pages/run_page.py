"""The sections of the report of a run: texts and tables, made once from report.json's content.

report.md has them as they are, report.html with charts, a comparison of runs only their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from areal_jax.report.agents import tabulate_agents
from areal_jax.report.aggregates import tabulate_servers
from areal_jax.report.engine_work import (
    describe_attention,
    describe_experts,
    describe_split,
    tabulate_ages,
    tabulate_code,
    tabulate_routes,
    tabulate_split,
    tabulate_work,
)
from areal_jax.report.engines.classes import describe_left_out, tabulate_classes
from areal_jax.report.event_log import tabulate_publications
from areal_jax.report.expert_balance import describe_loads, tabulate_dead, tabulate_layers, tabulate_load_ages
from areal_jax.report.limit import describe_cost, format_interval, tabulate_curve
from areal_jax.report.pages.blocks import (
    Absent,
    Block,
    Items,
    Section,
    Table,
    Text,
    Tiles,
    render_markdown,
    show_pictures,
)
from areal_jax.report.pages.energy_section import describe_energy, tabulate_energy
from areal_jax.report.pages.headline import lacks_evaluation, tell_headline
from areal_jax.report.report_keys import Groups, Report, Time
from areal_jax.report.sources import tabulate_source_scores, tabulate_sources
from areal_jax.report.token_fates import describe_censoring, tabulate_censoring, tabulate_fates
from areal_jax.telemetry.progress import format_bytes, format_gibibytes, format_number, format_percent
from areal_jax.workers.sandbox.sandbox_trial import describe_sandbox

Charts: TypeAlias = Callable[[str], Iterable[Block]]  # by the name of the section that they go to


def render_page(report: Report, pictures: Sequence[str]) -> str:
    """Returns report.md; `pictures` are paths relative to it."""
    return render_markdown('Run report', [tell_what_ran(report)], [*tell_sections(report), show_pictures(pictures)])


def tell_sections(report: Report, charts: Charts = lambda section: ()) -> list[Section]:
    """Returns every section in the order of the page; `charts` come before the tables of their section."""
    bound = [Text(report['cause_of_gap']), Text(f'Ideal by the rule "{report["time"]["ideal_rule"]}".')]
    energy: list[Block] = [tabulate_energy(report['energy']), Items(describe_energy(report['energy']))]
    ages = [_ages(report), tabulate_ages(report['ratios_by_age'])]
    no_caveat = Absent('No check failed, and nothing in the numbers calls for a caveat.')
    return [
        Section('headline', 'At a glance', [Tiles(tell_headline(report))]),
        Section('warnings', 'Caveats', [Items(report['warnings']) or no_caveat]),
        Section('learning', 'Learning', [*charts('learning'), *_learning(report)]),
        *_sources(report),
        Section('answers', 'Answers', [*charts('answers')]),
        Section('speed', 'Speed and limit', [*bound, *charts('speed'), *_speed(report)]),
        *([Section('energy', 'Energy', energy)] if any(energy) else []),
        Section('slots', 'Slots', [*charts('slots')]),
        Section('staleness', 'Staleness', [*charts('staleness'), *ages]),
        Section('agreement', 'Engine and learner', [*charts('agreement'), *_agreement(report)]),
        *([Section('experts', 'Experts', [*charts('experts'), *_experts(report)])] if report['experts'] else []),
        Section('optimisation', 'Optimisation', [*charts('optimisation')]),
        Section('ledger', 'Token ledger', [_ledger(report), *charts('ledger'), tabulate_fates(report['token_fates'])]),
        Section('censoring', 'Censoring', _censoring(report)),
        Section('groups', 'Groups', [_groups(report['groups']), _problems(report)]),
        Section('config', 'Config', [Text(_which_config(report)), _versions(report), *charts('config')]),
    ]


def tell_what_ran(report: Report) -> Text:
    """Returns the paragraph above the sections."""
    attempt = f', the last of {report["attempts"]} attempts' if report['attempts'] > 1 and report['finished'] else ''
    wall = '' if (spent := report['wall_seconds']) is None else f' in {format_number(spent)} s of wall time{attempt}'
    planned = '' if report['finished'] else f' of {report["planned_steps"]}'
    simulated = report['simulation'] and f'**Simulated**, without weights: {report["simulation"]}. '
    return Text(
        f'{simulated}`{report["config"]}`, seed {report["seed"]}, {_staleness_bound(report)}, {report["clock"]} clock: '
        f'{report["steps"]}{planned} updates{wall} '
        f'({format_number(report["window_seconds"])} clock seconds from the first admission to the last '
        'publication without evaluation). '
        f'On {_describe_hardware(report["hardware"])}. '
        f'Commit {_code(report["git_commit"])}, weights {_code((report["weights_sha256"] or "")[:16])}.'
    )


def _learning(report: Report) -> Iterable[Block]:
    if accuracy := _accuracy(report):
        yield accuracy
        yield Text(
            'Intervals are 95%: Wilson or Student for one answer a problem, problems as clusters for several, paired '
            'over problems for the gain.'
        )
    elif lacks_evaluation(report):
        yield Absent('No evaluation before or after training has finished yet.')
    else:
        yield Absent('The run was not evaluated on held-out problems (evaluation.problems).')
    yield tabulate_curve(report)
    yield Text(describe_cost(report) if report['evaluation_cache_bytes'] is not None else '')
    yield _what_it_learnt(report)
    yield tabulate_code(report['code'])


def _sources(report: Report) -> list[Section]:
    """The section of a mixture; [] for a run of one task."""
    if not (rows := report.get('sources')):
        return []
    told = Text(
        'A source has its share of the draws by weight; its share of the trained groups is smaller where more of its '
        'groups are dropped.'
    )
    return [Section('sources', 'Sources', [told, tabulate_sources(rows), tabulate_source_scores(rows)])]


def _speed(report: Report) -> Iterable[Block]:
    classes = report.get('engine_classes', [])
    yield _lane_seconds(report['time'])
    yield tabulate_work(report['engine_work'])
    yield _rates(report)
    yield tabulate_classes(classes)
    yield Text(describe_left_out(classes))
    yield tabulate_publications(report['publications'])
    yield tabulate_agents(report['agents'])
    yield _memory(report)
    yield tabulate_servers(report['servers'])


def _agreement(report: Report) -> Iterable[Block]:
    if report['ratio_split'] is None:
        yield Absent('The run did not split the importance ratio by cause (diagnostics.ratio_sample).')
    yield Text(describe_split(report['ratio_split']))
    yield tabulate_split(report['ratio_split'])


def _experts(report: Report) -> Iterable[Block]:
    experts = report['experts']
    yield Text(describe_experts(experts))
    yield tabulate_routes(experts)
    yield tabulate_layers(experts)
    yield tabulate_dead(experts)
    yield Text(describe_loads(experts))
    yield tabulate_load_ages(experts)


def _ledger(report: Report) -> Block:
    fates = report['token_fates']
    if fates is None:
        return Absent('There is no ledger: an earlier program, which did not log lengths of segments, wrote the log.')
    return Text(f'The ledger does not close: {fates["fault"]}.' if fates['fault'] else 'The ledger closes.')


def _censoring(report: Report) -> list[Block]:
    no_lengths = 'The log does not tell which tokens were trained and which were left out, or no answer has a fate.'
    table = tabulate_censoring(report['censoring'])
    return [table or Absent(no_lengths), Text(describe_censoring(report['censoring']))]


def _problems(report: Report) -> Text:
    problems = report['problems']
    if not problems:
        return Text('')
    return Text(
        f'{problems["train"]} problems to train on, {problems["held_out"]} held out, {problems["dropped"]} dropped '
        'because their prompts are too long.'
    )


def _versions(report: Report) -> Text:
    versions = ', '.join(f'{package} {version}' for package, version in report['versions'].items())
    return Text(f'Versions: {versions or "not recorded"}.')


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
    sentences += [describe_revisions(report['revisions'])] if report['revisions'] else []
    sentences += [describe_sandbox(report['sandbox'])] if report['sandbox'] else []
    sentences += [describe_prolongation(prolongation) for prolongation in report['prolonged']]
    sentences += [describe_idle_fields(report['idle_fields'])] if report['idle_fields'] else []
    return ' '.join(sentences)


def describe_revisions(revisions: Mapping[str, str]) -> str:
    """The sentence on models and data sets of the Hub, by the field that names each."""
    named = ', '.join(f'{field} at revision {_code(commit)}' for field, commit in revisions.items())
    return f'From the Hugging Face Hub: {named}.'


def describe_idle_fields(fields: Sequence[str]) -> str:
    """The sentence on config fields that the run does not use."""
    return f'Fields of the config file that this run does not use: {", ".join(fields)}.'


def describe_prolongation(prolongation: Mapping[str, int]) -> str:
    return (
        f'The run was prolonged from {prolongation["from_steps"]} to {prolongation["to_steps"]} updates at update '
        f'{prolongation["at_update"]}.'
    )


def _tabulate(head: str, cells: Mapping[str, str], title: str) -> Table:
    """Returns a table of labels and cells without its empty cells."""
    return Table((head, ''), [(label, cell) for label, cell in cells.items() if cell], title)


def _both(one: float | None, other: float | None, form: Callable[[float | None], str] = format_number) -> str:
    return f'{form(one)} / {form(other)}'


def _accuracy(report: Report) -> Table:
    accuracy, shares = report['accuracy'], report['most_frequent_answer_share']
    rows: list[tuple[str, ...]] = []
    if accuracy:
        greedy, sampled = accuracy['greedy'], accuracy['sampled']
        gains = (('greedy', greedy, ''), ('sampled', sampled, format_interval(sampled['gain'], '+')))
        for kind, found, gain in gains:
            before, after = format_interval(found['before']), format_interval(found['after'])
            rows.append((f'held-out accuracy, {kind}', before, after, gain))
    if shares['before'] is not None or shares['after'] is not None:
        rows.append(('most frequent answer', format_percent(shares['before']), format_percent(shares['after']), ''))
    return Table(('', 'before', 'after', 'gain'), rows, 'Held-out accuracy')


def _what_it_learnt(report: Report) -> Table:
    reward, mismatch, steps = report['reward'], report['mismatch'], report['optimizer_steps']
    unparsed, audit, quantized = report['unparsed_rate'], report['audit'], report['mismatch'].get('quantized')
    number, percent = format_number, format_percent
    blocks = ', '.join(f'{block}: {count}' for block, count in steps.get('updates_by_block', {}).items())
    cells = {
        'optimizer steps, applied / skipped (gradient not finite)': _both(steps['applied'], steps['skipped'], str),
        'updates by the block that they trained': blocks,
        'reward, first to last update': f'{number(reward["first"])} to {number(reward["last"])}',
        'answers that could not be read, first to last update': (
            f'{percent(unparsed["first"])} to {percent(unparsed["last"])}'
        ),
        'answers compared twice / disagreements (audit.jsonl) / undecided': (
            f'{audit["answers"]} / {audit["disagreements"]} / {audit["undecided"]}' if audit else ''
        ),
        'tokens generated / trained': f'{report["tokens"]["generated"]} / {number(report["tokens"]["trained"])}',
        'log-prob mismatch engine to learner, mean / max': (
            f'{_both(mismatch["mean"], mismatch["max"])} nats, {percent(mismatch["exact_share"])} exactly equal '
            f'(n = {mismatch["n"]})'
        ),
    }
    if (of_rule := mismatch.get('delta_rule')) is not None:
        cells["mean difference of log-probs by the form of delta nets' rule, chunks and single tokens"] = (
            f'{number(of_rule)} nats'
        )
    if (of_latents := mismatch.get('latent_form')) is not None:
        cells['mean difference of log-probs by the form of latent attention, absorbed and expanded'] = (
            f'{number(of_latents)} nats'
        )
    if quantized:
        shares = _both(quantized['effective_sample_size'], quantized['ratio_share'], percent)
        label = "quantized engines (rollout.weights='int8'): KL / effective sample size / share of the ratio"
        cells[label] = f'{number(quantized["kl"])} nats / {shares}'
    for engine, of in mismatch.get('by_engine', {}).items():
        cells[f'mean mismatch of {engine}'] = f'{number(of["mean"])} nats (n = {of["n"]})'
    return _tabulate('learning', cells, 'Learning')


def _ages(report: Report) -> Table:
    age, steps, versions = report['token_age'], report['token_age_steps'], report['versions_per_trajectory']
    pause, waited = report['publish_pause_seconds'], report['request_pause_seconds']
    interrupted = f'{report["interruptions"]}, in {report["steps_with_interruption"]} of {report["steps"]} updates'
    cells = {
        'age of trained tokens, mean / max (versions)': _both(age['mean'], age['max']),
        'age of trained tokens, mean / max (optimizer steps)': _both(steps['mean'], steps['max']),
        'versions in one trajectory, mean / max': _both(versions['mean'], versions['max']),
        'interruptions': interrupted,
        'pause of an engine for new weights, median / max (s)': _both(pause['median'], pause['max']),
        'pause of a request, from the swap to its next token, p50 / max (s)': _both(waited['median'], waited['max']),
        'admission was held back by (share of the time)': _describe_held(report['admission_held']),
        'slots without an open answer meanwhile (share of slot time)': _describe_held(report['idle_slots']),
    }
    return _tabulate('', cells, 'Staleness and interruption')


def _describe_held(shares: Mapping[str, float]) -> str:
    """Formats 'eta 12%, max_running_groups 80%': the bounds that kept admission closed at least 0.5% of the time."""
    ends = {'steps': 'end of the run (its last group was admitted)'}
    told = [f'{ends.get(bound, bound)} {share:.0%}' for bound, share in shares.items() if share >= 0.005]
    return ', '.join(told) or '-'


def _lane_seconds(time: Time) -> Table:
    ideal, achieved = time['ideal'], time['achieved']
    share = f' ({ideal / achieved:.0%} of what was possible)' if ideal and achieved else ''
    seconds = {'generate': time['generate'], 'train': time['train'], 'publish': time['publish'], 'ideal': ideal}
    cells = {name: format_number(value) for name, value in seconds.items()}
    cells['achieved'] = f'{format_number(achieved)}{share}'
    return _tabulate('lane seconds an update', cells, 'Lane seconds an update')


def _rates(report: Report) -> Table:
    rate, busy, memory = report['throughput'], report['busy'], report['peak_memory_bytes']
    preempted, cache = report['preemptions'], report['kv_cache_bytes']
    generated, trained = rate['generate_tokens_per_second'], rate['train_tokens_per_second']
    of_device = rate['generate_tokens_per_second_per_device'], rate['learner_tokens_per_second_per_device']
    cells = {
        'tokens generated / trained per second': _both(generated, trained),
        'tokens per second and device: generated / read by an update': _both(*of_device),
        'positions that attention read while decoding': describe_attention(report['attention_positions']),
        'preemptions, tokens to compute again': f'{preempted["requests"]}, {preempted["tokens"]}' if preempted else '',
        'model FLOPs utilisation of an update': format_percent(rate['mfu']),
        'lane occupied: rollout / learner': _both(busy['rollout'], busy['learner'], format_percent),
        'KV cache of an engine': '' if cache is None else format_bytes(cache),
        'peak memory of the process tree': '-' if memory is None else format_gibibytes(memory),
        'largest lag of the event loop (s)': format_number(report['event_loop_lag_seconds']['max']),
        'compilations after warm-up': str(report['compilations']),
    }
    return _tabulate('', cells, 'Rates')


def _memory(report: Report) -> Table:
    """Returns the parts of at least 10 MiB, largest first; not all parts are in use at the same time."""
    parts, peak = report['memory_parts'], report['peak_memory_bytes']
    ordered = sorted((item for item in parts.items() if item[1] >= 10 * 2**20), key=lambda item: -item[1])
    whole = [*ordered, ('all of these together', sum(parts.values()))] if parts else []
    if parts and peak is not None:
        whole.append(('peak of the process tree, with interpreter, libraries and buffers', peak))
    return Table(('memory, by what it is for', 'GiB'), [(name, f'{of / 2**30:.2f}') for name, of in whole], 'Memory')


def _groups(groups: Groups) -> Table:
    cells = {'drawn': str(groups['drawn']), 'trained': str(groups['trained'])}
    if groups['filtered']:
        cells['left out of their batch for equal rewards'] = str(groups['filtered'])
    cells |= {f'dropped: {reason}': str(count) for reason, count in groups['dropped'].items()}
    if (rate := groups['filtered_rate']) is not None:
        cells['share of the finished groups that task.filter dropped'] = format_percent(rate)
    if lost := groups.get('lost'):
        told = '{}, {} tokens on average'
        cells['answers that no engine finished'] = told.format(lost['lost'], format_number(lost['lost_tokens_mean']))
        cells['finished answers'] = told.format(lost['finished'], format_number(lost['finished_tokens_mean']))
    return Table(('', 'groups'), [*cells.items()], 'Groups')
