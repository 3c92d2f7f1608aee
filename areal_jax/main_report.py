"""Rebuild the report, the timeline and the plots of a run: python -m areal_jax.main_report --workdir=DIR."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from areal_jax.telemetry.report import PAGE, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, rebuild, say where; returns the exit status."""
    parser = argparse.ArgumentParser(prog='areal_jax.main_report', description=__doc__)
    parser.add_argument('--workdir', required=True, help='work directory of a run: events, metrics, facts.json')
    parser.add_argument('--plots', action=argparse.BooleanOptionalAction, default=True, help='draw the pictures too')
    options = parser.parse_args(arguments)
    try:
        write_report(options.workdir, plots=options.plots)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f'{options.workdir}/{PAGE}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
