"""areal-plan: finds layout and settings of a run for given devices, model and lengths, by simulation."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import EXITS, Command, Parser, local_path, parse
from areal_jax.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches and prints the plan; returns the exit code."""
    options = parse(COMMAND, arguments)
    return end_command(lambda: _plan(options), doing='writing to the directory for temporary files')


def _plan(options: argparse.Namespace) -> int:
    from areal_jax.app.process.setup import silence_libraries
    from areal_jax.app.simulate.planning import MOST_SIMULATIONS, as_json, find_plan, read_answers, read_model, render
    from areal_jax.simulation.planner.advice import make_setting, parse_cluster
    from areal_jax.simulation.planner.neighbours import MOST_ETA
    from areal_jax.telemetry.progress import Bar

    silence_libraries()
    devices, chip = parse_cluster(options.cluster)
    shape = read_model(options.model)
    answers = read_answers(
        options.lengths, options.answers, options.group_size, options.max_new_tokens, options.prompt_tokens
    )
    most_eta = MOST_ETA if options.max_eta is None else options.max_eta
    setting = make_setting(devices, chip, shape, answers, options.max_age, most_eta, options.age_price)
    bar, told = Bar(sys.stderr), itertools.count()

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        bar.count(next(told), MOST_SIMULATIONS, 'simulations at most')

    bar.begin('simulating plans')
    try:
        planned = find_plan(
            setting, seed=options.seed, prompts=f'constant({options.prompt_tokens})', is_full=options.full, note=note
        )
    finally:
        bar.end()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(json.dumps(as_json(planned), indent=1) if options.json else render(planned, width))
    return ExitCode.STOPPED if planned.is_stopped else ExitCode.FINISHED


def _count(text: str) -> int:
    """Parses a whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text!r} must be a whole number, at least 1')
    return number


def _build_parser() -> Parser:
    parser = Parser('areal-plan')
    parser.add_argument('--cluster', required=True, help='Devices and their kind: "64 x H800".')
    parser.add_argument(
        '--model',
        required=True,
        type=local_path,
        help='A model by name, R1-distill-Qwen-7B; of the Hugging Face Hub, hf:ORG/NAME; or a directory.',
    )
    parser.add_argument(
        '--lengths',
        required=True,
        type=local_path,
        help='Tokens of an answer: "lognormal(9000, 0.75)", or the workdir of a run.',
    )
    parser.add_argument('--answers', type=_count, required=True, help='Answers of an update.')
    parser.add_argument('--group_size', type=_count, help='Answers to a prompt: 16 without it, or those of the run.')
    parser.add_argument('--max_eta', type=int, help='Largest staleness bound that is tried: 32 without it.')
    parser.add_argument('--max_age', type=float, help='Bound on the mean age of a trained token, in versions.')
    parser.add_argument(
        '--age_price', type=float, default=0.0, help='Share of the speed that a version less of age is worth.'
    )
    parser.add_argument(
        '--max_new_tokens', type=int, default=0, help='Most tokens of an answer; 0 = three mean lengths, or as the run.'
    )
    parser.add_argument('--prompt_tokens', type=_count, default=512, help='Tokens of a prompt.')
    parser.add_argument('--seed', type=int, default=1, help='Of the lengths that are drawn.')
    parser.add_argument('--full', action='store_true', help='Simulate the plan once at full size as well.')
    parser.add_argument('--json', action='store_true', help='All that is known of the plan.')
    return parser


COMMAND = Command(
    program='areal-plan',
    purpose='Plans a run: split of the devices, engines, slots and staleness bound, with speed, ages and limits.',
    usage=(
        '--cluster=DEVICES --model=NAME --lengths=DISTRIBUTION|RUN --answers=N [--group_size=N] [--max_eta=N] '
        '[--max_age=NUMBER] [--age_price=NUMBER] [--max_new_tokens=N] [--prompt_tokens=N] [--seed=N] [--full] [--json]',
    ),
    flags=_build_parser,
    examples="""
    # sixteen accelerators, at their real size
    areal-plan --cluster="16 x H800" --model=R1-distill-Qwen-1.5B --lengths="lognormal(2000, 0.75)" --answers=256
    # with ages of two versions at most on average, for a program
    areal-plan --cluster="64 x H800" --model=R1-distill-Qwen-7B --lengths="lognormal(9000, 0.75)" --answers=8192 \
        --max_age=2 --json
    # any model of the Hub; only its config.json is fetched
    areal-plan --cluster="16 x H100" --model=hf:Qwen/Qwen3-8B --lengths="lognormal(6000, 0.75)" --answers=2048
    """,
    exits={**EXITS, ExitCode.STOPPED: 'stopped by Ctrl-C: the best plan so far was printed, where there was one'},
    notes='Plans are searched for in simulations of the controller on a part of the devices, which take minutes.',
)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


if __name__ == '__main__':
    run()
