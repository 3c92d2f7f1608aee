"""What is compiled ahead is what a run compiles: the same programs, from the same builders."""

import jax
import pytest

from areal_jax.aot import programs as planned
from areal_jax.aot.expected import Expected
from areal_jax.aot.findings import Finding, Memory, compile_program, render
from areal_jax.aot.programs import ENGINE, LEARNER, describe_weights, plan_programs
from areal_jax.aot.topology import Topology
from areal_jax.app.library import build_run
from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts.engines import build_backend
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.config import TrackedConfig
from areal_jax.config.fields import ConfigError
from areal_jax.learning.programs import Programs
from areal_jax.models.decoder import Decoder
from areal_jax.simulation.prices import V5E
from areal_jax.telemetry.progress import format_bytes
from tests.app.small import small_config

CUT = {'cluster__learner': 'fsdp=2', 'cluster__engines': '1 x tensor=1', 'learner__rows_per_microbatch': 2}


def plan(part, **fields):
    """The programs of one part of a run."""
    config = small_config(**fields)
    planned = plan_programs(config, read_shape(TrackedConfig(config)), jax.devices())
    return [one for one in planned.programs if one.part == part]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """The parts of a run that is built and never started."""
    return build_run(small_config(**CUT), tmp_path_factory.mktemp('run')).program.parts


def backend_of_run():
    """The backend of the run's engine, and weights that it has prepared."""
    config = TrackedConfig(small_config(**CUT))
    [devices] = build_allocation(config).engines
    decoder = Decoder(read_shape(config))
    backend = build_backend(config, decoder, devices)
    return backend, backend.prepare(decoder.init(0))


def test_the_learners_programs_are_those_of_a_run_to_the_letter(run):
    declared = [one for part in run.learner.parts for one in part.declared_programs(exports=True)]
    made = {one.name: one.lower() for one in plan(LEARNER, **CUT)}
    assert len(made) == len(declared) > 3
    for programs, name, args in declared:
        shape = next((arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg), ())
        own = getattr(programs.definitions, name)().lower(*args)
        assert own.as_text() == made[f'{name} {" x ".join(map(str, shape))}'.strip()].as_text()


def test_the_form_of_experts_over_devices_is_told_and_taken():
    fields = {'model__family': 'qwen3_moe', 'model__experts': 4, 'learner__expert_parallel': 'all_to_all'}
    config = small_config(**CUT | fields | {'cluster__learner': 'expert=2'})
    planned = plan_programs(config, read_shape(TrackedConfig(config)), jax.devices())
    assert planned.choices['learner.expert_parallel'].startswith('all_to_all (over the links of a device, a layer and')
    accumulate, *_ = [one for one in planned.programs if one.name.startswith('accumulate')]
    assert 'all_to_all' in accumulate.lower().as_text()


def test_the_engines_programs_are_those_of_a_run_to_the_letter():
    backend, weights = backend_of_run()
    made = [one.lower().as_text() for one in plan(ENGINE, **CUT)]
    own = [one.as_text() for one in backend.lower_all(weights)]
    assert own == made


def test_described_weights_are_those_that_the_backend_prepares():
    backend, weights = backend_of_run()
    found = describe_weights(backend).params
    tell = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
    assert jax.tree.map(tell, found) == jax.tree.map(tell, weights.params)


def test_state_that_is_no_argument_counts_beside_a_program():
    found = {one.name.split()[0]: one for one in plan(LEARNER, learner__dtype='bfloat16', **CUT)}
    state = found['accumulate'].beside_bytes  # weights, optimizer: the working copy and gradients are arguments
    assert state > found['export'].beside_bytes > 0  # the optimizer's
    assert found['apply'].beside_bytes == 0


def test_a_kept_working_copy_counts_beside_the_programs_that_neither_read_nor_make_it(monkeypatch):
    fields = CUT | {'learner__dtype': 'bfloat16'}
    before = {one.name.split()[0]: one.beside_bytes for one in plan(LEARNER, **fields)}
    monkeypatch.setattr(Programs, 'on_accelerator', True)
    programs = {one.name.split()[0]: one for one in plan(LEARNER, **fields)}
    after = {name: one.beside_bytes for name, one in programs.items()}
    working = programs['cast'].expected.outputs
    assert after['export'] == before['export'] + working
    assert after['add'] == after['add_first'] == before['cast'] + programs['cast'].expected.arguments + working
    assert after['cast'] == before['cast']
    assert after['apply_and_cast'] == after['apply_only_and_cast'] == before['apply'] == 0
    assert not {'apply', 'apply_only'} & {*after}


def test_what_an_engine_keeps_on_the_learners_devices_counts_beside_its_programs_and_the_other_way_round():
    shared = CUT | {'cluster__engines': '1 x shared'}
    for part in (LEARNER, ENGINE):
        alone, together = ({one.name: one.beside_bytes for one in plan(part, **fields)} for fields in (CUT, shared))
        assert len({together[name] - alone[name] for name in alone}) == 1  # all programs, by the same bytes
        assert all(together[name] > alone[name] for name in alone)


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        ({'cluster__learner': 'fsdp=9', 'learner__rows_per_microbatch': 9}, "cluster.learner='fsdp=9' needs 9 devices"),
        ({'optimizer__blocks': 2}, 'areal-aot does not compile optimizer.blocks=2 yet'),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said_before_anything_compiles(fields, said):
    with pytest.raises(ConfigError) as caught:
        plan(LEARNER, **fields)
    assert said in str(caught.value)


def test_a_program_is_compiled_and_read():
    topology = Topology('four', V5E, tuple(jax.devices()[:4]))
    [apply] = [one for one in plan(LEARNER, **CUT) if one.name == 'apply']
    found = compile_program(apply, topology)
    assert found.fits
    assert found.memory is not None
    assert found.memory.arguments > found.memory.outputs >= 0
    assert any(one.axes == 'fsdp' for one in found.collectives)  # the norm of all gradients
    assert 'learner: apply  fits: ' in render(found)


def test_a_program_that_is_refused_is_a_finding_with_the_sentence_of_the_compiler():
    def refuse():
        raise ValueError('heads of 100 lanes\nare not supported')

    found = compile_program(planned.PlannedProgram(ENGINE, 'generate 8', None, 0, refuse), Topology('x', V5E, ()))
    assert (found.fits, found.refusal) == (False, 'does not compile: heads of 100 lanes')
    assert render(found) == 'engine: generate 8  does not compile: heads of 100 lanes'


def test_a_program_whose_arguments_have_no_room_is_not_compiled():
    def lower():
        raise AssertionError('it is compiled')

    topology = Topology('four', V5E, tuple(jax.devices()[:4]))
    large = int(topology.memory_bytes)
    told = Expected(arguments=large // 2)
    found = compile_program(planned.PlannedProgram(LEARNER, 'apply', None, large // 2, lower, told), topology)
    assert not found.fits
    assert found.refusal.startswith(
        f'DOES NOT FIT: its arguments and what stays beside them take {format_bytes(2 * (large // 2))} of'
    )


def test_what_is_kept_beside_a_program_decides_too():
    finding = lambda beside: Finding(LEARNER, 'apply', 1.0, memory=Memory(4, 1, 2, 7, beside), device_bytes=10.6)
    assert finding(3).fits
    assert not finding(4).fits
    assert 'DOES NOT FIT' in render(finding(4))
