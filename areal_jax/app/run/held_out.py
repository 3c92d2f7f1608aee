"""What training on given data prints and reports of a batch and of held-out data, for demonstrations and for pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number

_OF_BATCH = ('loss/pair_accuracy', 'loss/margin', 'loss/value')


def describe_held_out(step: int, measured: Mapping[str, float]) -> str:
    """'held-out nll after 20 updates: 0.1234 nats a token', or the accuracy of pairs."""
    if 'nll' in measured:
        return f'held-out nll after {step} updates: {measured["nll"]:.4f} nats a token'
    return (
        f'held-out pairs after {step} updates: chosen above rejected in {measured["pair_accuracy"]:.1%}, '
        f'margin {measured["margin"]:.4f}, loss {measured["preference_loss"]:.4f}'
    )


def describe_update(values: Mapping[str, float]) -> str:
    """'nll 1.2345', or 'loss 0.6931 accuracy 0.50' of pairs, of the batch of an update."""
    if 'loss/pair_accuracy' in values:
        return f'loss {values["loss/value"]:.4f} accuracy {values["loss/pair_accuracy"]:.2f}'
    return f'nll {values.get("loss/nll", float("nan")):.4f}'


def tabulate_pairs(held_out: Mapping[str, Mapping[str, float]], metrics: Sequence[Line]) -> list[str]:
    """Lines of Markdown: accuracy, margin and loss of held-out pairs by update, and of the first and the last batch."""
    rows = [
        (f'held-out, after {step} updates', values['pair_accuracy'], values['margin'], values['preference_loss'])
        for step, values in held_out.items()
    ]
    batches = [line for line in metrics if 'loss/pair_accuracy' in line]
    for place, line in zip(('first', 'last'), batches[:1] + batches[-1:], strict=False):
        accuracy, margin, loss = (number(line, name) or 0.0 for name in _OF_BATCH)
        rows.append((f'train, {place} batch', accuracy, margin, loss))
    return [
        '| pairs | chosen above rejected | margin | loss |',
        '|---|---|---|---|',
        *(f'| {name} | {accuracy:.4f} | {margin:.4f} | {loss:.4f} |' for name, accuracy, margin, loss in rows),
    ]


def read_pairs_measured(metrics: Sequence[Line]) -> dict[int, dict[str, float]]:
    """By update what metrics.jsonl has of held-out pairs."""
    found = (names.HELD_OUT_ACCURACY, names.HELD_OUT_MARGIN, names.HELD_OUT_LOSS, names.HELD_OUT_PAIRS)
    return {
        int(number(line, names.STEP) or 0): {
            name.removeprefix(names.HELD_OUT): number(line, name) or 0.0 for name in found
        }
        for line in metrics
        if names.HELD_OUT_ACCURACY in line
    }
