"""Writes a byte-level BPE tokenizer as the files from which transformers makes the same one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, CONFIG = 'tokenizer.json', 'tokenizer_config.json'


def describe_tokenizer(
    bpe: tokenizers.Tokenizer, special_ids: Mapping[str, int], *, add_bos: bool, add_eos: bool, template: str
) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, by name.

    Args:
      special_ids: ids by role: 'eos', and 'bos', 'pad' and 'unk' where the model has them. 'pad' and 'unk' are left out
        if they name an ordinary token: transformers makes every named one special, and would cut texts differently.
      add_bos, add_eos: whether transformers puts them around plain text. It never does so around a rendered chat.
      template: the chat template, in jinja2.
    """
    added = bpe.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}
    named = {role: index for role, index in special_ids.items() if role in ('bos', 'eos') or index in special}
    flags = ('content', 'lstrip', 'normalized', 'rstrip', 'single_word', 'special')
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **{f'{role}_token': bpe.id_to_token(index) for role, index in named.items()},
        'add_bos_token': add_bos,
        'add_eos_token': add_eos,
        'added_tokens_decoder': {str(i): {f: getattr(token, f) for f in flags} for i, token in sorted(added.items())},
        'clean_up_tokenization_spaces': False,  # decoded text stays as it is
        'chat_template': template,
    }
    ends = tuple(role if adds and role in named else None for role, adds in (('bos', add_bos), ('eos', add_eos)))
    described = _with_ends(bpe, ends, named).to_str(pretty=True)
    return {TOKENIZER: described, CONFIG: json.dumps(config, indent=1, ensure_ascii=False) + '\n'}


def _with_ends(bpe: tokenizers.Tokenizer, ends: tuple[str | None, ...], ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """A copy that adds the tokens of these roles before and after plain text."""
    from tokenizers import Tokenizer, processors

    copy = Tokenizer.from_str(bpe.to_str())
    before, after = ends
    used = [role for role in (before, after) if role]
    if used:
        around = lambda text: [*filter(None, (before, text, after))]
        copy.post_processor = processors.TemplateProcessing(
            single=around('$A'),
            pair=[*around('$A'), *around('$B')],
            special_tokens=[{'id': role, 'ids': [ids[role]], 'tokens': [bpe.id_to_token(ids[role])]} for role in used],
        )
    return copy
