"""Gemma 3 270M from its GGUF file through a run: the text of its tokenizer, asynchronous updates, an export."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.library import build_run
from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.text.file_tokenizers import HfTokenizer
from tests.app.small import small_config
from tests.models import record_gemma3
from tests.tasks.texts import TEXTS

pytestmark = pytest.mark.slow

FIELDS = {
    'model__source': 'gguf', 'model__chat_template': 'package:configs/templates/plain.jinja',
    'task__name': 'running_sums', 'task__length': 2, 'run__clock': 'real', 'run__steps': 3, 'run__export': True,
    'rollout__context_tokens': 48, 'rollout__block_tokens': 48, 'rollout__prefill_buckets': (64,),
    'rollout__slots': 8, 'rollout__decode_steps': 4, 'rollout__max_new_tokens': 9, 'learner__row_tokens': 96,
    'learner__row_loss_tokens': 48, 'optimizer__learning_rate': 1e-5, 'optimizer__moment_dtype': 'bfloat16',
}  # fmt: skip


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """(the run's directory, its report)"""
    pytest.importorskip(record_gemma3.PACKAGE)
    directory = tmp_path_factory.mktemp('gemma')
    config = small_config(model__path=str(record_gemma3.assemble(directory)), **FIELDS)
    report = build_run(config, directory / 'run').train()
    return directory / 'run', report


def test_it_trains_on_what_its_engine_sampled(run):
    directory, report = run
    rows = read_metrics(directory / 'metrics.jsonl')
    assert len(rows) == 3
    assert report['mismatch']['max'] < 1e-3
    assert report['mismatch']['mean'] < 1e-5
    assert max(row['reward/mean'] for row in rows) > 0, 'a base model goes on with the sums of its example'


def test_transformers_reads_the_export(run):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    export = run[0] / 'export'
    theirs, ours = transformers.AutoTokenizer.from_pretrained(export), HfTokenizer(export)
    for text in TEXTS:
        assert theirs(text)['input_ids'] == ours.encode_prompt(text).tolist()
    question = [{'role': 'user', 'content': '3 + 4'}]
    assert theirs.apply_chat_template(question, return_dict=False) == ours.encode_chat(question).tolist()

    tokens = ours.encode_prompt(' '.join(TEXTS[9:14]))
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([tokens.tolist()])).logits[0].numpy()
    del model
    config, params = load_hf(export)
    np.testing.assert_allclose(logits_of(Decoder(config), params, tokens), expected, rtol=0, atol=2e-3)


def logits_of(decoder, params, tokens):
    positions, ones = jnp.arange(len(tokens)), jnp.ones(len(tokens), jnp.int32)

    def attend(q, k, v, entry, window):
        scale = decoder.config.head_dim**-0.5
        return packed_attention(q, k, v, ones, ones, scale=scale, positions=positions, window=window), entry

    run = jax.jit(lambda params: decoder.logits(params, decoder.hidden(params, tokens, positions, attend)[0]))
    return np.asarray(run(params))
