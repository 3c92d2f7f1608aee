"""Whole runs that train one block after the other: what is published, and what a resumed run does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from areal_jax.learning.blockwise import BlockLearner
from areal_jax.native.compiled_library import is_available
from areal_jax.report.report import FILE
from tests.app.small import SmallRun, equal, start_killed_and_resumed
from tests.learning.block_examples import leaves_of

BLOCKS = {'optimizer__blocks': 3, 'optimizer__block_order': 'shuffled'}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('blocks') / 'run', checkpoint__every=2, **BLOCKS).train()


def changed(before, after):
    before, after = leaves_of(before), leaves_of(after)
    return {path for path in after if not np.array_equal(before[path], after[path])}


def test_every_version_differs_from_the_one_before_in_one_block(finished):
    learner = finished.session.site.learner
    assert isinstance(learner, BlockLearner)
    rows = [json.loads(line) for line in (finished.workdir / 'metrics.jsonl').read_text().splitlines()]
    assert [row['update/block'] for row in rows] == [learner.blocks.block_of(version) for version in range(5)]
    for version in range(5):
        changes = changed(finished.weights[version], finished.weights[version + 1])
        if rows[version]['update/optimizer_steps']:  # groups of equal rewards train nothing
            assert changes == learner.paths[learner.blocks.block_of(version)]
        else:
            assert changes == set()


def test_the_report_counts_the_updates_of_each_block(finished):
    found = json.loads((finished.workdir / FILE).read_text())['optimizer_steps']['updates_by_block']
    blocks = [finished.session.site.learner.blocks.block_of(version) for version in range(5)]
    assert found == {str(block): blocks.count(block) for block in sorted(set(blocks))}


@pytest.mark.parametrize('state', ['host', pytest.param('drop', marks=pytest.mark.slow)])
def test_a_run_that_was_killed_ends_in_the_same_bits(finished, tmp_path, state):
    fields = BLOCKS | {'optimizer__block_state': state, 'checkpoint__every': 1}
    # without the kernels a log-prob depends in its last bit on the company, and so on when checkpoints are taken
    same = state == 'host' and is_available()
    whole = finished if same else SmallRun(tmp_path / 'whole', **fields).train()
    resumed = start_killed_and_resumed(tmp_path / 'killed', 3, **fields)
    assert resumed.version_at_start in (2, 3)
    resumed.train()
    assert equal(resumed.final, whole.final)


def test_one_block_is_the_run_without_blocks(tmp_path):
    """optimizer.blocks=1 builds the learner of all leaves."""
    one = SmallRun(tmp_path / 'one', run__steps=1, optimizer__blocks=1, checkpoint__every=0)
    assert not isinstance(one.session.site.learner, BlockLearner)
    one.session.close()
