"""What rows of routes are for one model: rows that come from another process are held against it."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.columns import Column
from areal_jax.models.shape import ModelConfig

UNKNOWN = -1  # in integers with a sign, where the column has its fill value: the experts were not recorded


@dataclasses.dataclass(frozen=True)
class RouteForm:
    """Of a model with experts. Rows are int [rows, layers with experts, choices], one for each token that was read."""

    column: Column  # ModelConfig.routes
    experts: int
    layers: tuple[int, ...]  # that have experts, ascending
    n_layers: int  # with those that have none

    @classmethod
    def of(cls, shape: ModelConfig) -> RouteForm:
        """Of a model that has experts."""
        assert shape.experts is not None
        layers = tuple(filter(shape.has_experts, range(shape.n_layers)))
        return cls(shape.routes, shape.experts.count, layers, shape.n_layers)

    @property
    def row(self) -> tuple[int, int]:
        """(layers with experts, choices)."""
        assert self.column.shape is not None
        layers, choices = self.column.shape
        return layers, choices

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the layers with experts, of rows for these or for all layers."""
        return rows[:, list(self.layers)] if rows.shape[1:2] == (self.n_layers,) else rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        """What is wrong with rows that must be `length`, '' for nothing.

        The first `of_prompt` may be unknown as a whole: all their values are the fill value of the column, or UNKNOWN.
        """
        if rows.ndim != 3 or rows.shape[1:] != self.row:
            return f'the shape {rows.shape}, and rows of this model are {self.row} (layers with experts, choices)'
        if len(rows) != length:
            return f'{len(rows)} rows where {length} belong'
        known = ~(rows == self._unknown(rows)).all(axis=(1, 2))
        known[of_prompt:] = True
        outside = known[:, None, None] & ((rows < 0) | (rows >= self.experts))
        if outside.any():
            row, layer, choice = np.argwhere(outside)[0].tolist()
            return f'the expert {rows[row, layer, choice]} in row {row}, which is none from 0 to {self.experts - 1}'
        ordered = np.sort(rows, axis=-1)
        twice = known[:, None] & (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        if twice.any():
            row, layer = np.argwhere(twice)[0].tolist()
            return f'an expert twice in row {row}: {rows[row, layer].tolist()}'
        return ''

    def convert(self, rows: np.ndarray) -> np.ndarray:
        """Rows without a fault in the dtype of the column."""
        return np.where(rows == self._unknown(rows), self.column.fill, rows).astype(self.column.dtype)

    def _unknown(self, rows: np.ndarray) -> float:
        return UNKNOWN if rows.dtype.kind == 'i' else self.column.fill
