"""A small tokenizer directory as Hugging Face lays it out, and the chats that are recorded of it."""

from __future__ import annotations

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

RECORDED = pathlib.Path(__file__).with_name('data') / 'hf_chat.json'
# block settings, a namespace, slices, loop controls, JSON, names of special tokens, a default
TEMPLATE = """{% if not date is defined %}
    {% set date = '26 Jul 2024' %}
{% endif %}
{% set state = namespace(turns=0) %}
{{- bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' and not loop.first %}
        {% continue %}
    {% endif %}
    {% set state.turns = state.turns + 1 %}
{{ '<|turn|>' + message['role'] + ' ' + (message.content | trim) }}{{ {'a<': 'é'} | tojson }}
{% endfor %}
{% if tools is none and messages[-1:][0].role == 'user' and add_generation_prompt %}
{{ '<|turn|>assistant ' + date + eos_token + state.turns | string }}
{% endif %}"""
TEXTS = ('on 1', '<|bos|>on', '', 'a<|end|>')
CHATS = [
    [{'role': 'user', 'content': ' What is 12 + 7? '}],
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'naïve\ncafé 数学'}],
    [
        {'role': 'user', 'content': 'one'}, {'role': 'system', 'content': 'skipped'},
        {'role': 'assistant', 'content': 'two<|end|>'}, {'role': 'user', 'content': 'three'},
    ],
]  # fmt: skip


def write(directory: pathlib.Path, **changes: object) -> None:
    """Byte-level BPE with two merges and three special tokens, the last one only in tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, 'on', 'Ġ1'])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[('o', 'n'), ('Ġ', '1')]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ('<|bos|>', '<|end|>')]
    )
    # adds bos where special tokens are asked for: the template has it already, so a chat must not get two
    tokenizer.post_processor = processors.TemplateProcessing(
        single='<|bos|> $A', special_tokens=[('<|bos|>', tokenizer.token_to_id('<|bos|>'))]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / 'tokenizer.json'))
    turn = {'content': '<|turn|>', 'special': True, 'normalized': False, 'lstrip': False, 'rstrip': False}
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': '<|bos|>',
        'eos_token': {'__type': 'AddedToken', 'content': '<|end|>', 'special': True, 'normalized': False},
        'added_tokens_decoder': {str(len(vocabulary) + 2): turn | {'single_word': False}},
        'clean_up_tokenization_spaces': False,
        'chat_template': TEMPLATE,
    }
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (directory / 'tokenizer_config.json').write_text(json.dumps(config))
