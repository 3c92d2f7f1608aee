"""The report of a run as a page of Markdown (report.md)."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.report.pages.markdown_page import headline_table
from areal_jax.report.pages.report_texts import Items, Part, Parts, Table, tell_parts
from areal_jax.report.report_keys import Report


def render_page(report: Report, pictures: Sequence[str]) -> str:
    """Markdown of one page; `pictures` are paths relative to it."""
    parts = tell_parts(report)
    sections = [
        '# Run report',
        *(render_part(part) for part in (parts.what_ran, parts.which_config)),
        *_headed('## At a glance', headline_table(report)),
        *_headed('## Warnings', parts.warnings),
        '## Results',
        *(render_part(part) for part in _results(parts)),
        '## Staleness and interruption',
        *(render_part(part) for part in (parts.staleness, parts.ratios, parts.split, parts.split_cost)),
        *_headed('## Experts', parts.experts, parts.routes),
        *_headed('## Tokens', parts.fates, parts.answers),
        '## Time and limit',
        *(render_part(part) for part in _time(parts)),
        *_headed('## Energy', parts.energy, parts.energy_sources),
        '## Groups',
        *(render_part(part) for part in (parts.groups, parts.problems)),
        *(f'![{picture}]({picture})' for picture in pictures),
        '## Versions',
        render_part(parts.versions),
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def render_part(part: Part) -> str:
    """Its Markdown; '' for an empty one."""
    if not part:
        return ''
    if isinstance(part, Table):
        lines = [part.head, ['---'] * len(part.head), *part.rows]
        return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    if isinstance(part, Items):
        return '\n'.join(f'- {item}' for item in part.items)
    return part.text


def _headed(heading: str, *parts: Part) -> list[str]:
    """The parts under their heading; nothing where all are empty."""
    return [heading, *map(render_part, parts)] if any(parts) else []


def _results(parts: Parts) -> tuple[Part, ...]:
    return parts.accuracy, parts.intervals, parts.evaluation, parts.evaluation_cost, parts.learning, parts.code


def _time(parts: Parts) -> tuple[Part, ...]:
    engines = parts.work, parts.rates, parts.classes, parts.left_out, parts.publications, parts.agents
    return parts.cause_of_gap, parts.time, parts.ideal_rule, *engines, parts.memory, parts.servers
