"""Warnings of a report: caveats to know before trusting the numbers of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from areal_jax.control.buffer import BY_REWARD
from areal_jax.events.schema import Event
from areal_jax.report.aggregates import Metrics, conservation
from areal_jax.report.engine_work import warn_of_wrong_versions
from areal_jax.report.report_keys import OptimizerSteps, Report
from areal_jax.report.token_fates import warn_of_censoring
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import RunFacts
from areal_jax.telemetry.hook import FIELD as HOOK
from areal_jax.telemetry.hook import warn_of_rows
from areal_jax.telemetry.metrics import counts, number
from areal_jax.telemetry.progress import format_number
from areal_jax.telemetry.trackers import FIELD as TRACKER

LAG_BUDGET_S = 0.2  # of the event loop after warm-up
AT_BOUND_SHARE = 0.99  # of the tokens of an update: it sits at the bound
MOST_FILTERED = 0.5  # of the finished groups
UNPARSED_SHARE = 0.5  # of the answers of the second half of the run: the task or its answer parser is at fault
UNPARSED_RISE = 0.2  # of that share from the first to the last quarter of the updates
IDLE_SHARE = 0.1  # of the time of the slots
COLLAPSE_RISE = 0.2  # of the share of the most frequent answer


def find_caveats(events: Sequence[Event], metrics: Metrics, report: Report, facts: RunFacts) -> list[str]:
    """One sentence per caveat, the gravest first."""
    checks = (
        _unfinished(events, report, facts),
        _frictions(metrics),
        _broken_conservation(events),
        _open_ledger(report),
        warn_of_wrong_versions(report['ratio_split']),
        _errors(events),
        warn_of_skipped_steps(report['optimizer_steps']),
        warn_of_equal_rewards(metrics),
        _unparsed(metrics),
        _audit(report),
        _kept_mass(metrics),
        _compilations(facts),
        _at_bound(metrics, facts.eta),
        _idle_bound(report),
        _idle_slots(report),
        _never_interrupted(report, facts.eta),
        _unmeasured_mismatch(report),
        _lag(facts),
        _gain(report),
        _collapse(report),
        _drops(report),
        warn_of_censoring(report['censoring']),
        _several_steps(metrics, report),
        _filtered(report),
        warn_of_rows(HOOK, facts.hook),
        warn_of_rows(TRACKER, facts.tracker),
    )
    return [caveat for caveat in (*checks, *facts.warnings) if caveat]


def sits_at_bound(metrics: Metrics, eta: float | None) -> bool:
    """Whether every update in the second half of the run holds (nearly) nothing but tokens of age eta.

    Update u trains at version u - 1, so tokens of age eta exist from update eta + 1 on: earlier ones do not count.
    """
    if eta is None or not math.isfinite(eta) or eta < 1:
        return False
    age = int(eta)
    late = metrics[len(metrics) // 2 :]
    histograms = [counts(line, names.TOKEN_AGE_HISTOGRAM) for line in late if (number(line, names.STEP) or 0) > age]
    trained = [histogram for histogram in histograms if sum(histogram)]
    return bool(trained) and all(len(ages) > age and ages[age] >= AT_BOUND_SHARE * sum(ages) for ages in trained)


def warn_of_skipped_steps(optimizer_steps: OptimizerSteps) -> str:
    """The sentence on steps whose gradient was not finite, '' without any; `optimizer_steps`: applied, skipped."""
    applied, skipped = optimizer_steps['applied'], optimizer_steps['skipped']
    if not skipped:
        return ''
    effect = 'those steps changed no weights' if applied else 'the weights never changed'
    return (
        f'{skipped} of {applied + skipped} optimizer steps were skipped because their gradient was not finite: '
        f'{effect}. Look at the weights that the model starts from, learner.loss_scale and optimizer.learning_rate.'
    )


def warn_of_equal_rewards(metrics: Metrics) -> str:
    """The sentence on a run whose rewards were all equal; '' if two differ or a reward is unknown."""
    means = [mean for line in metrics if (mean := number(line, names.REWARD_MEAN)) is not None]
    spreads = [spread for line in metrics if (spread := number(line, names.REWARD_STD)) is not None]
    if not metrics or len(means) < len(metrics) or len(spreads) < len(metrics):
        return ''
    rounding = 1e-9 * max(1.0, abs(means[0]))
    if max(spreads) > rounding or max(means) - min(means) > rounding:
        return ''
    return (
        f'Every reward was {means[0]:g}: the task gave no signal to learn from. Look at answers and verdicts, '
        '`areal-rollouts RUN` (task.name, task.system_prompt, rollout.max_new_tokens).'
    )


class UnfinishedFacts(Protocol):
    """Facts about an unfinished run, shared by RunFacts and SftFacts; see RunFacts."""

    @property
    def planned_steps(self) -> int | None: ...

    @property
    def running(self) -> str | None: ...

    @property
    def missing(self) -> Sequence[str]: ...

    @property
    def newest_checkpoint(self) -> int | None: ...


def describe_unfinished(steps: int, facts: UnfinishedFacts, ended: str) -> str:
    """Tells an unfinished run's progress, how it `ended` unless it still runs, and the missing parts of its report."""
    how = ended if facts.running is None else f'it is still running ({facts.running})'
    if facts.running == '':
        how = f'{ended} or is still running'
    resume = 'update 0' if facts.newest_checkpoint is None else f'its checkpoint of update {facts.newest_checkpoint}'
    goes_on = '' if facts.running else f' --resume goes on from {resume}.'
    missing = f' Missing here: {", ".join(facts.missing)}.' if facts.missing else ''
    return (
        f'The run has not finished: it stands at update {steps} of {facts.planned_steps}, and {how}.{goes_on}{missing}'
    )


def _unfinished(events: Sequence[Event], report: Report, facts: RunFacts) -> str:
    if report['finished']:
        return ''
    last = [event for event in events if event['kind'] in ('signal', 'error', 'restore')][-1:]
    ends = {'signal': 'it was stopped by a signal', 'error': 'it ended with an error'}
    return describe_unfinished(report['steps'], facts, ends.get(last[0]['kind'] if last else '', 'it was killed'))


def _frictions(metrics: Metrics) -> str:
    """Counts the batches' answers that were disturbed on purpose, by friction; '' if friction is off."""
    known = (names.FRICTION_ACTOR, names.FRICTION_REWARD, names.FRICTION_UNREWARDED)
    if not any(name in line for line in metrics for name in known):
        return ''
    sums = {name: sum(number(line, name) or 0 for line in metrics) for name in known}
    said = ', '.join(f'{name.removeprefix(names.FRICTION)} {count:g}' for name, count in sums.items())
    return (
        f'Friction is on (section `friction`): answers that were disturbed on purpose, by friction: {said}. Rewards '
        'and log-probs of this page are those that the learner got; evaluations have no friction.'
    )


def _unparsed(metrics: Metrics) -> str:
    rates = [rate for line in metrics if (rate := number(line, names.REWARD_UNPARSED)) is not None]
    if not rates:
        return ''
    late, quarter = rates[len(rates) // 2 :], max(len(rates) // 4, 1)
    first, last = sum(rates[:quarter]) / quarter, sum(rates[-quarter:]) / quarter
    advice = 'look at such answers, and say in task.system_prompt how the final answer is to be written.'
    if (share := sum(late) / len(late)) > UNPARSED_SHARE:
        return (
            f'In {share:.0%} of the answers of the second half of the run no answer could be read, and they were '
            f'trained as reward 0: {advice}'
        )
    if last - first >= UNPARSED_RISE:
        return (
            f'Answers that could not be read rose from {first:.0%} to {last:.0%} of a batch, trained as reward 0: '
            f'the policy may be leaving the form that the scorer reads; {advice}'
        )
    return ''


def _audit(report: Report) -> str:
    audit = report['audit']
    if audit is None or not audit['disagreements']:
        return ''
    return (
        f'A second comparison contradicts {audit["disagreements"]} of {audit["answers"]} rewards that were checked: '
        'read audit.jsonl.'
    )


def _kept_mass(metrics: Metrics) -> str:
    means = [(number(line, names.KEPT_MASS_MEAN), number(line, names.UPDATE_TOKENS) or 0) for line in metrics]
    pairs = [(mean, tokens) for mean, tokens in means if mean is not None]
    total = sum(tokens for _, tokens in pairs)
    kept = sum(share * tokens for share, tokens in pairs) / total if total else 1.0
    if kept >= 1:
        return ''
    return (
        'Sampling was cut by rollout.top_k or rollout.top_p, and the recorded log-probs are those of the uncut policy: '
        f'the importance weights are biased by the kept mass, {kept:.2g} on average.'
    )


def _idle_bound(report: Report) -> str:
    """Warns of a staleness bound that never held admission back: a larger eta would give the same run."""
    eta, held = report['eta'], report['admission_held']
    if (
        report['schedule'] != 'natural'
        or eta is None
        or not math.isfinite(eta)
        or not held
        or 'eta' in held
        or report['steps'] <= eta + 1
    ):
        return ''
    others = ', '.join(f'{bound} {share:.0%} of the time' for bound, share in held.items() if bound != 'steps')
    return (
        f'staleness.eta = {eta:g} never held admission back ({others or "nothing did"}), so any larger eta gives the '
        f'same run; the oldest trained token had age {format_number(report["token_age"]["max"])}.'
    )


def _idle_slots(report: Report) -> str:
    """Warns of slots that had nothing to decode because a bound on memory held admission back."""
    fixes = {
        'max_running_groups': 'rollout.max_running_groups admits too few groups: set it to 0, which fills the slots',
        'buffer_capacity': 'buffer.capacity is too small: raise it',
    }
    idle = {bound: share for bound, share in report['idle_slots'].items() if bound in fixes and share >= IDLE_SHARE}
    if not idle:
        return ''
    bound, share = next(iter(idle.items()))
    return f'Slots had no answer to decode for {share:.0%} of their time, because {fixes[bound]}.'


def _broken_conservation(events: Sequence[Event]) -> str:
    violations = conservation(events)
    if not violations:
        return ''
    return f'{len(violations)} moves of draws break the rule that each is in one state, first: {violations[0]}.'


def _open_ledger(report: Report) -> str:
    fates = report['token_fates']
    return f'The token ledger does not close: {fates["fault"]}.' if fates and fates['fault'] else ''


def _several_steps(metrics: Metrics, report: Report) -> str:
    """Warns that ages count publications although the weights may change several times between two of them."""
    made = [(number(line, names.OPTIMIZER_STEPS), number(line, names.SKIPPED_STEPS)) for line in metrics]
    most = max((int((applied or 0) + (skipped or 0)) for applied, skipped in made), default=0)
    if most <= 1:
        return ''
    age, steps = report['token_age'], report['token_age_steps']
    return (
        f'Ages count publications, and an update makes up to {most} optimizer steps (learner.n_minibatches * '
        f'learner.epochs): trained tokens were {format_number(age["mean"])} publications and '
        f'{format_number(steps["mean"])} optimizer steps old on average, at most {format_number(steps["max"])} steps.'
    )


def _errors(events: Sequence[Event]) -> str:
    errors = [event['message'] for event in events if event['kind'] == 'error']
    return f'The run logged {len(errors)} errors, last: {errors[-1]}' if errors else ''


def _compilations(facts: RunFacts) -> str:
    if facts.compilations <= facts.compilation_budget:
        return ''
    return (
        f'{facts.compilations} programs were compiled after warm-up (budget {facts.compilation_budget}): '
        'some shape was not declared as a bucket, and the times include compilation.'
    )


def _at_bound(metrics: Metrics, eta: float | None) -> str:
    if eta is None or not sits_at_bound(metrics, eta):
        return ''
    return (
        f'In the second half of the run every trained token was exactly eta = {eta:g} versions old: generation '
        'outpaces training and the pipeline sits at its bound, so a smaller eta should '
        'give fresher data at the same speed.'
    )


def _never_interrupted(report: Report, eta: float | None) -> str:
    """Not used under a lock-step schedule (eta is None) or eta = 0: new weights then meet no unfinished answer."""
    if report['interruptions'] or eta is None or eta < 1 or not report['steps']:
        return ''
    return (
        'No request was ever interrupted: new weights never met unfinished answers, so interruption was not exercised.'
    )


def _unmeasured_mismatch(report: Report) -> str:
    if report['mismatch']['n'] or not report['steps']:
        return ''
    return (
        'The mismatch of log-probs between engine and learner was never measured: no update held tokens of the '
        'version it was trained at.'
    )


def _lag(facts: RunFacts) -> str:
    if facts.event_loop_lag_max is None or facts.event_loop_lag_max <= LAG_BUDGET_S:
        return ''
    return f'The event loop lagged by up to {facts.event_loop_lag_max:.2g} s (budget {LAG_BUDGET_S} s).'


def _gain(report: Report) -> str:
    gain = report['accuracy'] and report['accuracy']['sampled']['gain']
    if not gain or gain['low'] is None or gain['high'] is None or not gain['low'] <= 0 <= gain['high']:
        return ''
    return 'The held-out gain is not distinguishable from zero: its 95% interval contains 0.'


def _collapse(report: Report) -> str:
    shares = report['most_frequent_answer_share']
    if shares['before'] is None or shares['after'] is None or shares['after'] - shares['before'] < COLLAPSE_RISE:
        return ''
    return (
        f'The most frequent answer rose from {shares["before"]:.0%} to {shares["after"]:.0%} of all answers: '
        'the policy may be collapsing to one answer.'
    )


def _filtered(report: Report) -> str:
    rate = report['groups']['filtered_rate']
    if rate is None or rate <= MOST_FILTERED:
        return ''
    return (
        f'task.filter dropped {rate:.0%} of the finished groups for their rewards: most of the generation trained '
        'nothing. Problems nearer to what the policy can do, or a larger rollout.group_size, would waste less.'
    )


def _drops(report: Report) -> str:
    dropped = sum(count for reason, count in report['groups']['dropped'].items() if reason not in BY_REWARD)
    drawn = report['groups']['drawn']
    if not drawn or dropped <= 0.1 * drawn:
        return ''
    return f'{dropped} of {drawn} groups were dropped; what is lost may be biased (by length, by difficulty).'
