"""The side of test_vllm.py that runs in vllm's own environment: MODEL_DIRECTORY REQUEST_FILE ANSWER_FILE.

The request is JSON {'texts': [[token, ...], ...], 'new_tokens': n}; the answer has, for each text, the tokens that
follow it greedily and their log-probs. With 'chats' in place of 'texts', each a list of messages, the directory's own
tokenizer, chat template and end tokens are used, and the answer has the prompts' tokens too. Imports nothing of the
package.
"""

from __future__ import annotations

import json
import pathlib
import sys

CONTEXT_TOKENS = 128


def main(directory: str, request_file: str, answer_file: str) -> None:
    from vllm import LLM, SamplingParams, __version__

    request = json.loads(pathlib.Path(request_file).read_text())
    chats = request.get('chats')
    model = LLM(
        model=directory,
        dtype='float32',
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=4,
        skip_tokenizer_init=not chats,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=request['new_tokens'], logprobs=0, ignore_eos=not chats, detokenize=bool(chats)
    )
    if chats:
        done = model.chat(chats, greedy, use_tqdm=False)
    else:
        done = model.generate([{'prompt_token_ids': text} for text in request['texts']], greedy, use_tqdm=False)
    outputs = [one.outputs[0] for one in done]
    answer = {
        'prompts': [list(one.prompt_token_ids) for one in done],
        'tokens': [list(output.token_ids) for output in outputs],
        'logprobs': [
            [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        'version': __version__,
    }
    pathlib.Path(answer_file).write_text(json.dumps(answer))


if __name__ == '__main__':
    main(*sys.argv[1:])
