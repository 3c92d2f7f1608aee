"""The form of one model's columns, against which rows from another process are checked."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.models.families import ModelConfig

UNKNOWN = -1  # in signed integers, instead of the column's fill value: not recorded


@dataclasses.dataclass(frozen=True)
class ColumnForm:
    """The form of a model's column. Rows are [rows, *shape], one for each token that was read."""

    axes: ClassVar[str] = ''  # of a row, for errors
    column: Column  # of ModelConfig.columns

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row."""
        assert self.column.shape is not None
        return self.column.shape

    @property
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which servers may send one row."""
        return (self.row,)

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """The dtypes of sent files; the column's dtype first."""
        return (self.column.dtype,)

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Converts rows of any sent shape to this shape."""
        return rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        """Describes the fault of rows, of which there must be `length`; '' = none.

        Each of the first `of_prompt` rows may be unknown: all its values are the column's fill value, or UNKNOWN.
        """
        if rows.ndim != 1 + len(self.row) or rows.shape[1:] != self.row:
            return f'the shape {rows.shape}, and rows of this model are {self.row}{self.axes}'
        return f'{len(rows)} rows where {length} belong' if len(rows) != length else ''

    def convert(self, rows: np.ndarray) -> np.ndarray:
        """Converts rows without a fault to the dtype of the column."""
        return np.where(rows == self.unknown(rows), self.column.fill, rows).astype(self.column.dtype)

    def unknown(self, rows: np.ndarray) -> float:
        """The value that marks unknown entries in these rows."""
        return UNKNOWN if rows.dtype.kind == 'i' else self.column.fill


@dataclasses.dataclass(frozen=True)
class RouteForm(ColumnForm):
    """The form of ROUTED_EXPERTS. A row is [layers with experts, choices]."""

    axes: ClassVar[str] = ' (layers with experts, choices)'
    experts: int
    layers: tuple[int, ...]  # layers with experts, ascending
    n_layers: int  # all layers

    @classmethod
    def of(cls, shape: ModelConfig) -> RouteForm:
        """Returns the form for a model with experts."""
        assert shape.experts is not None
        layers = tuple(filter(shape.has_experts, range(shape.n_layers)))
        return cls(shape.routes, shape.experts.count, layers, shape.n_layers)

    @property
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sent row: other servers send all layers, with any values for layers without experts."""
        return self.row, (self.n_layers, self.row[1])

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """The dtypes of sent files: the column's; vLLM's uint8, even with an id of 255, and int16 of older versions."""
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
    """Lists the forms of a model's published columns by name."""
    form = lambda column: RouteForm.of(shape) if column.name == ROUTED_EXPERTS.name else ColumnForm(column)
    return {column.name: form(column) for column in shape.columns if column.published}
