"""What the columns of one model are: rows that come from another process are held against it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.models.shape import ModelConfig

UNKNOWN = -1  # in integers with a sign, where the column has its fill value: it was not recorded


@dataclasses.dataclass(frozen=True)
class ColumnForm:
    """Of a column of a model. Rows are [rows, *shape], one for each token that was read."""

    axes: ClassVar[str] = ''  # of a row, for errors
    column: Column  # of ModelConfig.columns

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one."""
        assert self.column.shape is not None
        return self.column.shape

    @property
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which servers may send one."""
        return (self.row,)

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """Of files; its own first."""
        return (self.column.dtype,)

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this shape, of rows in any that is sent."""
        return rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        """What is wrong with rows that must be `length`, '' for nothing.

        The first `of_prompt` may be unknown as a whole: all their values are the fill value of the column, or UNKNOWN.
        """
        if rows.ndim != 1 + len(self.row) or rows.shape[1:] != self.row:
            return f'the shape {rows.shape}, and rows of this model are {self.row}{self.axes}'
        return f'{len(rows)} rows where {length} belong' if len(rows) != length else ''

    def convert(self, rows: np.ndarray) -> np.ndarray:
        """Rows without a fault in the dtype of the column."""
        return np.where(rows == self.unknown(rows), self.column.fill, rows).astype(self.column.dtype)

    def unknown(self, rows: np.ndarray) -> float:
        """The value that stands in such rows for what is not known."""
        return UNKNOWN if rows.dtype.kind == 'i' else self.column.fill


@dataclasses.dataclass(frozen=True)
class RouteForm(ColumnForm):
    """Of ROUTED_EXPERTS. A row is [layers with experts, choices]."""

    axes: ClassVar[str] = ' (layers with experts, choices)'
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
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """Servers of others have one for all layers, whatever they hold for those without experts."""
        return self.row, (self.n_layers, self.row[1])

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """vLLM's: the first also where an id is 255; the second in older versions."""
        return self.column.dtype, 'uint8', 'int16'

    def pick(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, list(self.layers)] if rows.shape[1:2] == (self.n_layers,) else rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        if fault := super().find_fault(rows, length, of_prompt):
            return fault
        known = ~(rows == self.unknown(rows)).all(axis=(1, 2))
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


def list_forms(shape: ModelConfig) -> dict[str, ColumnForm]:
    """Of the published columns of a model, by name."""
    form = lambda column: RouteForm.of(shape) if column.name == ROUTED_EXPERTS.name else ColumnForm(column)
    return {column.name: form(column) for column in shape.columns if column.published}
