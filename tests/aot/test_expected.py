"""Arguments and results of compiled programs are the bytes of the dry run; arithmetic is that of the model."""

import jax
import pytest

from areal_jax.aot.expected import UNKNOWN, expect_learner
from areal_jax.aot.findings import CLOSE, Finding, Memory, compile_program, render
from areal_jax.aot.programs import ENGINE, LEARNER, PlannedProgram, plan_programs
from areal_jax.aot.topology import Topology
from areal_jax.app.model.text_model import read_shape
from areal_jax.config import TrackedConfig
from areal_jax.learning.programs import Programs
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh
from areal_jax.simulation.prices import V5E
from tests.app.small import small_config

CUT = {
    'cluster__learner': 'fsdp=2', 'cluster__engines': '1 x tensor=2', 'learner__rows_per_microbatch': 2,
    'learner__dtype': 'bfloat16', 'publication__dtype': 'bfloat16', 'model__n_kv_heads': 2, 'model__d_model': 64,
    'model__d_ff': 128, 'model__n_layers': 1, 'rollout__context_tokens': 128,
}  # fmt: skip
FORMS = [
    (LEARNER, 'export', {'lora__rank': 4, 'cluster__engines': '1 x shared'}),
    (LEARNER, 'cast', {}),
    (LEARNER, 'zeros', {}),
    (LEARNER, 'apply', {'optimizer__name': 'lion'}),
    (ENGINE, 'of 2: prefill 16', {}),
    (ENGINE, 'generate 1', {'lora__rank': 4, 'cluster__engines': '1 x tensor=1'}),
]  # fmt: skip


def plan(**fields):
    config = small_config(**(CUT | fields))
    return plan_programs(config, read_shape(TrackedConfig(config)), jax.devices()[:4]).programs


@pytest.mark.parametrize(('part', 'name', 'fields'), FORMS, ids=[f'{part} {name}' for part, name, _ in FORMS])
def test_compiled_arguments_and_results_are_those_of_the_dry_run(part, name, fields):
    [program] = [one for one in plan(**fields) if (one.part, one.name) == (part, name)]
    found = compile_program(program, Topology('four', V5E, tuple(jax.devices()[:4])))
    assert found.differs
    assert all(abs(share) <= CLOSE for share in found.differs.values()), found.differs
    assert '    as the dry run says: ' in render(found)


@pytest.mark.parametrize('name', ['apply_and_cast', 'apply_only_and_cast', 'add_first'])
def test_what_only_accelerators_run_has_the_bytes_of_the_dry_run_too(monkeypatch, name):
    monkeypatch.setattr(Programs, 'on_accelerator', True)
    test_compiled_arguments_and_results_are_those_of_the_dry_run(LEARNER, name, {})


def test_what_a_micro_batch_tells_of_each_token_is_among_its_results():
    rows = {'learner__row_tokens': 1024, 'learner__row_loss_tokens': 1024}  # an eighth of the bytes of gradients
    programs = plan(model__family='qwen3_moe', model__experts=4, **rows)
    [program] = [one for one in programs if one.name == 'accumulate 2 x 1024']
    found = compile_program(program, Topology('four', V5E, tuple(jax.devices()[:4])))
    assert abs(found.differs['outputs']) <= CLOSE


def test_an_update_needs_three_passes_over_every_weight_that_multiplies():
    config = TrackedConfig(small_config(learner__row_loss_tokens=64, cluster__learner='fsdp=2'))
    shape, mesh = read_shape(config), make_mesh(fsdp=2)
    rows = {'tokens': jax.ShapeDtypeStruct((2, 64), 'int32')}
    found = expect_learner(config, shape, mesh)('gradients', (None, None, rows))
    norms = (2 * shape.n_layers + 1) * shape.d_model
    matrices = Decoder(shape).parameter_count() - norms  # the embedding is the head
    assert found.flops == 6 * matrices * 64  # on each of two devices


def test_what_the_dry_run_does_not_know_is_not_compared():
    config = TrackedConfig(small_config())
    assert expect_learner(config, read_shape(config), make_mesh())('steps', ()) == UNKNOWN
    planned = PlannedProgram(LEARNER, 'steps', None, 0, lambda: jax.jit(lambda x: x + 1).lower(1.0))
    assert compile_program(planned, Topology('one', V5E, ())).differs == {}


def test_another_size_than_the_dry_runs_is_said():
    found = Finding(LEARNER, 'apply', 1.0, memory=Memory(4, 1, 2, 7, 0), device_bytes=99, differs={'arguments': 0.031})
    assert '    NOT AS the dry run says: arguments +3.1%' in render(found)
