"""Asynchronous reinforcement learning for language models in JAX, after AReaL (arXiv 2505.24298).

The loop, and where each step lives:

  1 prompt        tasks/        a resumable, seeded stream of prompts; each draw has a number, unique for ever
  2 admission     control/      may this group start now? Eq. 3: floor((N - 1) / B) <= version + eta
  3 generation    rollout/      pool -> engine: segments of tokens with their log-probs and policy version
  4 reward        tasks/        answers are scored in worker processes, with a deadline
  5 buffer        control/      whole groups, lowest draw first, each used once; a dropped group carries a reason
  6 packing       learning/     groups -> rows of one fixed length with segment ids, no padding to the longest
  7 update        learning/     proximal log-probs, advantages, decoupled PPO (Eq. 5), optimizer: version v + 1
  8 publication   publication/  version v + 1 -> every engine: interrupt, swap, rebuild the KV cache, go on; back to 2

`control/controller.py` joins the steps and imports no jax. `app/` builds a run from a config; `main_train.py` runs it,
or `areal_jax.train(config, workdir)` from Python. `areal_jax.evaluate` and `areal_jax.export` use what it leaves.
`studies/arms/` trains many runs of a study as one program, without the loop.

plugins.py loads the user's own functions; config/ declares the fields, and kinds of servers and channels; text/ has
tokenizers and chat templates, workers/ the processes that run other people's code; columns.py says what a token carries
beside its id, frictions.py what goes wrong on purpose; models/ and formats/ have the decoder and the files of its
weights; sharding/ and distributed/ place arrays on devices and join processes; checkpoint/ saves and resumes;
evaluation/ scores held-out problems; telemetry/ measures a run while it runs, report/ afterwards; simulation/ models
runs on clusters that are not at hand.
commands/ has the help of every command, and the completion of shells.

Shapes. The letters of learning/ and models/; rollout/decode/ says which others it uses:

  B  groups of an update              M  micro-batches of a minibatch     d  width of the model
  G  answers of a group               R  rows of a micro-batch            H  query heads, K key-value heads
  P  tokens of a prompt               T  tokens of a row or trajectory    D  width of a head
  A  tokens of an answer              N  loss tokens of a row             V  vocabulary
                                      S  segments of a row                L  layers

Glossary:

  answer         what the policy generated for one prompt; a group has G answers to the same prompt
  draw           the number of a prompt in the stream; names its group for the whole run
  segment        consecutive tokens of an answer that one policy version generated; in packing, the tokens of a row that
                 belong to one prompt or one answer (`segment_ids`)
  trajectory     a prompt, the segments of its answer, and the reward
  version        number of updates published; `policy_version` of a token: the version that generated it
  age            version when a batch is formed, minus the policy version of a token; `eta` bounds counts, not ages
  interruption   new weights replace the old ones between two dispatches, in the middle of answers
  dispatch       one call of a compiled program: prefill of some prompts, or `decode_steps` tokens for every slot
  slot           a place among the answers that an engine decodes at once
  block          a place in an engine's KV cache for `block_tokens` positions; a group shares the blocks of its prompt
  preemption     an answer gives up its slot and its blocks because the KV cache is full; it is rebuilt later
  lane           a resource that serves in order of request: an engine, the learner, the disk
  column         what else is known of each token, an array by name: routed experts, masks; declared once (columns.py)
  behavior_logprobs    recorded while sampling; the column `sampling_logprobs` where another distribution was sampled
  proximal_logprobs    under the weights before the update: the centre of the trust region
  policy_logprobs      under the weights that are being trained: differentiated
  reference_logprobs   under the weights at the start: for the KL penalty
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.installation import __version__

if TYPE_CHECKING:
    from areal_jax.app.library import evaluate, export, train

__all__ = ['__version__', 'evaluate', 'export', 'train']


def __getattr__(name: str) -> object:
    """Imports train, evaluate and export at their first use: they import jax, which takes seconds."""
    if name not in ('evaluate', 'export', 'train'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from areal_jax.app import library

    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
