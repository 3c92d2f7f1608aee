"""Records what transformers makes of the chats and texts of hf_directory.py into data/hf_chat.json.

python -m tests.tasks.record_hf_chat      (transformers==5.23.0, tokenizers, jinja2)
"""

from __future__ import annotations

import json
import pathlib
import tempfile

from tests.tasks import hf_directory


def main() -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        hf_directory.write(pathlib.Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chats = [
            {
                'text': tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                'tokens': tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
            }
            for chat in hf_directory.CHATS
        ]
        texts = {
            text: {
                'with': tokenizer(text)['input_ids'],
                'without': tokenizer(text, add_special_tokens=False)['input_ids'],
            }
            for text in hf_directory.TEXTS
        }
        recorded = {'eos_id': tokenizer.eos_token_id, 'size': len(tokenizer), 'chats': chats, 'texts': texts}
    hf_directory.RECORDED.parent.mkdir(exist_ok=True)
    hf_directory.RECORDED.write_text(json.dumps(recorded, indent=1) + '\n')


if __name__ == '__main__':
    main()
