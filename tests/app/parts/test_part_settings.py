from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.app.library import build_run
from areal_jax.app.model.model import build_model
from areal_jax.app.parts.learner_builder import build_learner
from areal_jax.app.parts.part_settings import build_mesh, build_ring, build_sampling
from areal_jax.app.parts.task_builder import build_task
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_config import HfError
from areal_jax.learning.packed_rows import BatchError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import export_hf
from areal_jax.tasks.registry import make_task
from areal_jax.tasks.task import TaskError
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.app.small import SmallRun, small_config
from tests.tasks import hf_directory


@pytest.mark.parametrize(('ignore', 'stops'), [(False, (0,)), (True, ())])
def test_eos_ends_an_answer_where_it_is_not_ignored(ignore, stops):
    config = TrackedConfig(small_config(rollout__ignore_eos=ignore))
    assert build_sampling(config, CharacterTokenizer('ab=')).stop_tokens == stops


def test_every_end_of_the_files_ends_an_answer(tmp_path):
    hf_directory.write(tmp_path)
    (tmp_path / 'config.json').write_text('{"eos_token_id": 260}')
    (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [259, 258]}')
    for ignore, stops in ((False, (259, 258, 260)), (True, ())):
        config = TrackedConfig(small_config(rollout__ignore_eos=ignore))
        assert build_sampling(config, HfTokenizer(tmp_path)).stop_tokens == stops


def test_a_hugging_face_directory_becomes_a_sharded_learner(tmp_path):
    path = tmp_path / 'model'
    shape = ModelConfig(
        vocab_size=512, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2,
        head_dim=8, d_ff=24, rope_theta=1e4, family='qwen3', qk_norm=True,
    )  # fmt: skip
    params = Decoder(shape).init(3)
    export_hf(path, params, shape, dtype='float32')
    hf_directory.write(path)  # the tokenizer's files beside
    config = default_config()
    config.model.source, config.model.path = 'hf', str(path)
    config.cluster.learner, config.cluster.strategy = 'fsdp=4,tensor=2', 'fsdp_tensor'
    config.learner.rows_per_microbatch, config.learner.layers = 4, 'stacked'
    tracked = TrackedConfig(config)
    model = build_model(tracked)
    query = model.params['layers']['0']['attention']['query']['weight']
    assert query.addressable_shards[0].data.shape == (4, 16)  # [16, 32] over fsdp=4 and tensor=2
    published = build_learner(tracked, model, build_mesh(tracked)).publish(0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(published), jax.device_get(params))


def test_a_directory_without_a_model_is_named(tmp_path):
    config = default_config()
    config.model.source, config.model.path = 'hf', str(tmp_path)
    with pytest.raises(HfError, match=str(tmp_path)):
        build_model(TrackedConfig(config))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'cluster.learner': 'tensor=8'},
            r'^tensor=8 of cluster\.learner does not divide the 4 query heads and 2 key heads of the model',
        ),
        (
            {'cluster.learner': 'tensor=3', 'model.n_heads': 3, 'model.n_kv_heads': 3},
            r'tensor=3 of cluster\.learner .* 4 tokens of the vocabulary',
        ),
    ],
)
def test_a_model_that_the_mesh_cannot_cut_is_named_before_anything_compiles(fields, message):
    config = default_config()
    config.update_from_flattened_dict({'cluster.strategy': 'tensor'} | fields)
    tracked = TrackedConfig(config)
    with pytest.raises(ConfigError, match=message):
        build_learner(tracked, build_model(tracked), build_mesh(tracked))


def test_an_impossible_random_shape_is_an_error_of_the_config():
    config = default_config()
    config.model.head_dim = 7
    with pytest.raises(ConfigError, match='head_dim=7 is odd'):
        build_model(TrackedConfig(config))


@pytest.mark.parametrize('schedule', ['fixed(x)', 'trace(/no/such/file)'])
def test_a_schedule_that_cannot_be_read_is_an_error_of_the_config(schedule):
    config = default_config()
    config.staleness.schedule = schedule
    with pytest.raises(ConfigError, match=r"^staleness\.schedule='(fixed\(x\)' is not known|trace.*No such file)"):
        build_ring(TrackedConfig(config), lambda published: published)


def test_a_batch_that_the_learner_refuses_ends_the_run(tmp_path):
    session = build_run(small_config(), tmp_path)
    update = session.site.learner.update

    def update_with_a_reward_that_is_no_number(groups, version):
        first, *others = groups[0].trajectories
        broken = (dataclasses.replace(first, reward=float('nan')), *others)
        return update([dataclasses.replace(groups[0], trajectories=broken), *groups[1:]], version)

    session.site.learner.update = update_with_a_reward_that_is_no_number
    with pytest.raises(BatchError, match='reward is nan'):
        session.train()


def mixed_lengths(tmp_path, **fields):
    """Ten questions of 2 characters, and of 9 and 11: a config whose slots have room for prompts of 8."""
    questions = [*(f'q{n}' for n in range(10)), 'too  long', 'longer than']
    path = tmp_path / 'questions.jsonl'
    path.write_text(''.join(f'{{"question": "{question}", "answer": 1}}\n' for question in questions))
    given = {'task.name': 'jsonl', 'task.path': str(path), 'task.held_out_fraction': 0.5, 'rollout.max_new_tokens': 8}
    config = default_config()
    config.update_from_flattened_dict(given | {'rollout.context_tokens': 16} | fields)
    return TrackedConfig(config), CharacterTokenizer('0123456789 abcdefghijklmnopqrstuvwxyz')


def test_prompts_that_fit_no_slot_are_refused_at_the_start_by_name_number_and_fix(tmp_path):
    config, tokenizer = mixed_lengths(tmp_path)
    with pytest.raises(TaskError) as error:
        build_task(config, tokenizer)
    # hash fractions .52 and .80: both are trained on, in the order of the file
    assert str(error.value) == (
        "task 'jsonl': the problem 'too  long' has a prompt of 9 tokens, but rollout.context_tokens less "
        'rollout.max_new_tokens leaves 8; 2 of 12 prompts are too long: raise rollout.context_tokens by at least 3, or '
        'leave them out with task.over_length=drop'
    )
    build_task(mixed_lengths(tmp_path, **{'rollout.context_tokens': 19})[0], tokenizer)


def test_prompts_that_fit_no_slot_are_dropped_and_counted(tmp_path, capsys):
    config, tokenizer = mixed_lengths(tmp_path, **{'task.over_length': 'drop'})
    task = build_task(config, tokenizer)
    said = capsys.readouterr().out
    assert 'dropped 2 of 12 problems: their prompts have more than 8 tokens\n' in said
    sizes = task.sizes()
    assert sizes['dropped'] == 2
    assert sizes['train'] + sizes['held_out'] == 10
    assert f'evaluation.problems=64: all {sizes["held_out"]} held-out problems are evaluated\n' in said
    stream = task.prompts('train', seed=0)
    drawn = [stream.draw() for _ in range(2 * stream.size)]
    assert stream.size == sizes['train']
    assert {len(prompt.tokens) for prompt in drawn} == {2}


def test_a_run_tells_in_its_report_what_was_dropped(tmp_path):
    questions = tmp_path / 'questions.jsonl'
    questions.write_text(''.join(f'{{"question": "{"ab" * n}", "answer": {n}}}\n' for n in range(1, 9)))
    fields = {'task__name': 'jsonl', 'task__path': str(questions), 'task__over_length': 'drop', 'run__steps': 1}
    fields |= {'task__held_out_fraction': 0.0, 'learner__filter_equal_rewards': False}
    run = SmallRun(tmp_path / 'run', **fields).train()
    assert run.report['problems'] == {'train': 4, 'held_out': 0, 'dropped': 4}
    assert '4 problems to train on, 0 held out, 4 dropped' in (tmp_path / 'run' / 'report.md').read_text()


@pytest.mark.parametrize('over_length', ['refuse', 'drop'])
def test_without_long_prompts_both_settings_draw_the_same(tmp_path, over_length, capsys):
    fields = {'rollout.context_tokens': 32, 'task.over_length': over_length, 'evaluation.problems': 1}
    config, tokenizer = mixed_lengths(tmp_path, **fields)
    task = build_task(config, tokenizer)
    plain = make_task(
        'jsonl', tokenizer, path=config.task.path, answer='integer', system_prompt='', held_out_fraction=0.5
    )
    for side in ('train', 'held_out'):
        streams = [task.prompts(side, seed=3), plain.prompts(side, seed=3)]
        for _ in range(9):
            prompt, other = (stream.draw() for stream in streams)
            assert (prompt.draw, prompt.problem) == (other.draw, other.problem)
            np.testing.assert_array_equal(prompt.tokens, other.tokens)
    assert capsys.readouterr().out == ''
