"""Loads of the experts over a run: by layer and update, experts without a token, and loads by age of the tokens.

Made from expert_loads.jsonl.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence

import numpy as np

from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.report.pages.blocks import Table, tabulate
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import counts, number
from areal_jax.telemetry.names import first_age
from areal_jax.telemetry.progress import format_number, format_percent

_MOST_DEAD = 200  # experts in report.json; those without a token for longest come first
_MOST_ROWS = 20  # of a table of the page
_NORMAL = math.sqrt(2 / math.pi)  # mean distance of a normal variable from its mean, in standard deviations


def loads_of_layers(loads: Metrics) -> tuple[list[int], dict[int, np.ndarray]]:
    """The updates with loads, and for each layer the tokens that reached each expert, int [updates, experts]."""
    lines = [line for line in loads if any(name.startswith(names.EXPERT_LOADS) for name in line)]
    layers = _layers(lines, names.EXPERT_LOADS)
    of = lambda layer: np.array([counts(line, f'{names.EXPERT_LOADS}{layer}') for line in lines], np.int64)
    return [int(number(line, names.STEP) or 0) for line in lines], {layer: of(layer) for layer in layers}


def loads_of_ages(loads: Metrics) -> tuple[list[str], dict[int, np.ndarray]]:
    """The ranges of ages, and for each layer the tokens of the run that reached each expert, int [ranges, experts].

    ([], {}) without recorded routes.
    """
    prefix = names.EXPERT_LOADS_OF_AGE
    found = {name.removeprefix(prefix).split('/')[0] for line in loads for name in line if name.startswith(prefix)}
    labels = sorted(found, key=first_age)
    layers = _layers(loads, f'{prefix}{labels[0]}/') if labels else []

    def total(name: str) -> np.ndarray:
        of_updates = np.array([counts(line, name) for line in loads if name in line], np.int64)
        return np.asarray(of_updates.sum(axis=0))

    return labels, {layer: np.stack([total(f'{prefix}{label}/{layer}') for label in labels]) for layer in layers}


def summarize_layers(loads: Metrics) -> list[contents.LayerLoad]:
    """One row for each layer with experts."""
    rows: list[contents.LayerLoad] = []
    for layer, tokens in loads_of_layers(loads)[1].items():
        total = tokens.sum(axis=0)
        rows.append(
            {
                'layer': layer,
                'load': float(relative_loads(tokens).max(axis=1).mean()),
                'fullest': int(total.argmax()),
                'share': float(total.max() / max(1, total.sum())),
                'dead': int((tokens[-1] == 0).sum()),
            }
        )
    return rows


def relative_loads(tokens: np.ndarray) -> np.ndarray:
    """Tokens of each expert over the mean of its layer, for tokens [..., experts]; 0 where no expert has a token."""
    found: np.ndarray = tokens / np.maximum(tokens.mean(axis=-1, keepdims=True), 1e-30)
    return found


def list_dead(loads: Metrics) -> list[contents.DeadExpert]:
    """The experts without a token in the last update, those without one for longest first."""
    updates, layers = loads_of_layers(loads)
    rows: list[contents.DeadExpert] = []
    for layer, tokens in layers.items():
        reached = tokens > 0
        for expert in np.flatnonzero(~reached[-1]).tolist():
            (at,) = np.nonzero(reached[:, expert])
            since = updates[int(at[-1]) + 1 if len(at) else 0]
            missed = len(updates) - len(at)
            rows.append({'layer': layer, 'expert': expert, 'since': since, 'updates': missed})
    return sorted(rows, key=lambda row: (row['since'], row['layer'], row['expert']))[:_MOST_DEAD]


def summarize_ages(loads: Metrics) -> list[contents.AgeLoad]:
    """One row for each range of ages of the trained tokens, the youngest first; [] without recorded routes.

    A range is compared with all tokens of the same updates, so that updates with different weights are not mixed:

        moved = ½ Σ_e |Σ_u (c_e - n q_e)| / (k Σ_u n)       mean of the layers; k choices

        c_e: of the n tokens of the age in update u, those with expert e
        q_e: of all trained tokens of update u, the share with expert e

    `by_chance` is the mean of `moved` if the tokens of the age were drawn at random from those of the update, each
    independently of the others. Tokens of one answer are alike, so that it is a lower bound.
    """
    prefix, (labels, layers) = names.EXPERT_LOADS_OF_AGE, loads_of_ages(loads)
    found: dict[str, list[_Compared]] = collections.defaultdict(list)
    for line in loads:
        given = {label: number(line, f'{prefix}{label}/tokens') or 0.0 for label in labels}
        present = {label: tokens for label, tokens in given.items() if tokens}
        if not present:
            continue
        by_age = {
            label: np.array([counts(line, f'{prefix}{label}/{layer}') for layer in layers], np.float64)
            for label in present
        }
        whole, tokens = sum(by_age.values(), np.zeros(())), sum(present.values())
        for label, own in by_age.items():
            found[label].append(_Compared(own, present[label], whole / tokens, tokens))
    return [_age_row(label, found[label]) for label in labels]


class _Compared:
    """The tokens of one age in one update: their loads [layers, experts], expected loads, and variance by chance."""

    def __init__(self, own: np.ndarray, tokens: float, shares: np.ndarray, of: float):
        self.own, self.tokens = own, tokens
        self.expected = tokens * shares
        self.variance = self.expected * (1 - shares) * ((of - tokens) / max(1.0, of - 1))


def _age_row(label: str, compared: Sequence[_Compared]) -> contents.AgeLoad:
    total = sum((one.own for one in compared), np.zeros(()))
    distance = np.abs(total - sum(one.expected for one in compared))
    chance = _NORMAL * np.sqrt(sum((one.variance for one in compared), np.zeros(())))
    choices = np.maximum(total.sum(axis=-1), 1.0)  # of each layer
    return {
        'age': label,
        'tokens': int(sum(one.tokens for one in compared)),
        'load': float(relative_loads(total).max(axis=-1).mean()),
        'moved': float((distance.sum(axis=-1) / choices).mean() / 2),
        'by_chance': float((chance.sum(axis=-1) / choices).mean() / 2),
    }


def _layers(lines: Metrics, prefix: str) -> list[int]:
    found = {name.removeprefix(prefix) for line in lines for name in line if name.startswith(prefix)}
    return sorted(int(layer) for layer in found if layer.isdigit())


def fullest_layers(rows: Sequence[contents.LayerLoad], most: int) -> list[contents.LayerLoad]:
    """At most `most` layers, those with the fullest experts, in the order of the model."""
    chosen = sorted(rows, key=lambda row: -row['load'])[:most]
    return sorted(chosen, key=lambda row: row['layer'])


def tabulate_layers(experts: contents.Experts | None) -> Table:
    """Returns the page's table of the fullest layers."""
    columns: dict[str, Callable[[contents.LayerLoad], str]] = {
        'load of experts': lambda row: f'layer {row["layer"]}',
        'fullest expert to the mean': lambda row: format_number(row['load']),
        'most tokens of the run': lambda row: f'expert {row["fullest"]}, {format_percent(row["share"])}',
        'without a token in the last update': lambda row: str(row['dead']),
    }
    return tabulate(fullest_layers(experts['layers'], _MOST_ROWS) if experts else [], columns, 'Load of experts')


def tabulate_dead(experts: contents.Experts | None) -> Table:
    """Returns the page's table of experts without a token in the last update."""
    columns: dict[str, Callable[[contents.DeadExpert], str]] = {
        'without a token': lambda row: f'layer {row["layer"]}, expert {row["expert"]}',
        'since update': lambda row: str(row['since']),
        'updates without one': lambda row: str(row['updates']),
    }
    return tabulate(experts['dead_experts'][:_MOST_ROWS] if experts else [], columns)


def tabulate_load_ages(experts: contents.Experts | None) -> Table:
    """Returns the page's table of loads by age; empty without recorded routes."""
    columns: dict[str, Callable[[contents.AgeLoad], str]] = {
        'load of experts, age': lambda row: row['age'],
        'trained tokens': lambda row: str(row['tokens']),
        'fullest expert to the mean': lambda row: format_number(row['load']),
        'choices that go to other experts': lambda row: format_percent(row['moved']),
        'by chance': lambda row: format_percent(row['by_chance']),
    }
    return tabulate(experts['ages'] if experts else [], columns, 'Load of experts by age')


def describe_loads(experts: contents.Experts | None) -> str:
    """The sentences on what the tables leave out and on how to read loads by age; '' without loads by expert."""
    if experts is None or not experts['layers']:
        return ''
    told = []
    if (layers := len(experts['layers'])) > _MOST_ROWS:
        told.append(f'The table has the {_MOST_ROWS} fullest of {layers} layers; report.json has all.')
    if (dead := sum(row['dead'] for row in experts['layers'])) > _MOST_ROWS:
        told.append(f'Of {dead} experts without a token, the {_MOST_ROWS} that had none for longest are listed.')
    if experts['ages']:
        told.append(
            'By age: the share of the choices that would have to go to other experts for the loads of all trained '
            'tokens of the same updates. Where it is well above the share by chance, tokens of this age reach other '
            'experts than the rest. By chance is for tokens drawn one by one: a few answers, whose tokens are alike, '
            'differ by more.'
        )
    else:
        told.append('Loads by age and routes that differ need `rollout.record_routes=True`.')
    return ' '.join(told)
