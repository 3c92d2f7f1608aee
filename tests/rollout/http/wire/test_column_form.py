"""Rows of routes against the model that they are said to be of."""

import dataclasses

import numpy as np
import pytest

from areal_jax.columns import Column
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.rollout.http.wire.exchange import ColumnForm, RouteForm, list_forms
from tests.rollout.http.expert_rig import FORM, MIXED

ROWS = np.array([[[0, 1, 2], [7, 6, 5]], [[3, 1, 2], [0, 2, 4]], [[5, 4, 3], [1, 0, 7]]], np.uint8)
UNKNOWN = np.full((2, 3), 255)


def changed(place, value, rows=ROWS):
    rows = rows.copy()
    rows[place] = value
    return rows


def test_the_form_of_a_model():
    assert (FORM.row, FORM.experts, FORM.layers, FORM.n_layers) == ((2, 3), 8, (0, 2), 3)
    assert (FORM.column.dtype, FORM.column.fill) == ('uint8', 255)
    many = RouteForm.of(dataclasses.replace(MIXED, experts=Experts(256, 3, 16)))
    assert (many.column.dtype, many.column.fill, many.row, many.layers) == ('uint16', 65535, (3, 3), (0, 1, 2))


def test_forms_are_of_what_a_model_publishes(monkeypatch):
    depth = Column('depth', 'uint8', (4,), packed=False)
    hidden = dataclasses.replace(depth, name='hidden', published=False)
    monkeypatch.setattr(ModelConfig, 'columns', property(lambda config: (config.routes, depth, hidden)))
    assert list_forms(MIXED) == {'routed_experts': FORM, 'depth': ColumnForm(depth)}


@pytest.mark.parametrize(
    ('rows', 'of_prompt', 'fault'),
    [
        (ROWS, 1, ''),
        (ROWS.astype(np.int16), 0, ''),
        (changed(0, UNKNOWN), 1, ''),
        (changed(0, -1, ROWS.astype(np.int32)), 1, ''),
        (ROWS[:, 0], 1, 'the shape (3, 3), and rows of this model are (2, 3)'),
        (ROWS[:, :1], 1, 'the shape (3, 1, 3), and rows of this model are (2, 3)'),
        (ROWS[:, :, :2], 1, 'the shape (3, 2, 2), and rows of this model are (2, 3)'),
        (ROWS[:2], 1, '2 rows where 3 belong'),
        (np.concatenate([ROWS, ROWS]), 1, '6 rows where 3 belong'),
        (changed((1, 0, 2), 8), 1, 'the expert 8 in row 1, which is none from 0 to 7'),
        (changed((1, 1, 0), -2, ROWS.astype(np.int16)), 3, 'the expert -2 in row 1, which is none from 0 to 7'),
        (changed(1, UNKNOWN), 1, 'the expert 255 in row 1, which is none'),  # of a generated token
        (changed((0, 0), 255), 1, 'the expert 255 in row 0, which is none'),  # a part of a row
        (changed(0, 255, ROWS.astype(np.int32)), 1, 'the expert 255 in row 0, which is none'),
        (changed((2, 1, 0), 7), 1, 'an expert twice in row 2: [7, 0, 7]'),
    ],
)
def test_faults_are_named(rows, of_prompt, fault):
    found = FORM.find_fault(rows, 3, of_prompt)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


@pytest.mark.parametrize('dtype', ['uint8', 'int16', 'int32'])
def test_rows_become_those_of_the_column(dtype):
    given = changed(0, UNKNOWN if dtype == 'uint8' else -1, ROWS.astype(dtype))
    converted = FORM.convert(given)
    assert converted.dtype == np.uint8
    assert converted.tolist() == changed(0, UNKNOWN).tolist()
