"""Renders docs/commands.md from the declarations of the commands; tests/commands/test_page.py compares the two.

python -m areal_jax.commands.page > docs/commands.md
"""

from __future__ import annotations

from areal_jax.commands.command import (
    Command,
    describe_flag,
    describe_sections,
    find_commands,
    list_examples,
    list_fields,
    list_flags,
)

COMMAND_LINE = 'python -m areal_jax.commands.page > docs/commands.md'
_HEAD = f"""# Every command

After this page you can call any command: it has what `--help` shows, made from the `COMMAND` of each command by
`{COMMAND_LINE}`.

`python -m areal_jax` lists the commands. `python -m areal_jax train ...` is `areal-train ...`, also where no scripts
are installed. Every command answers `--help` and `--version`, without loading JAX. A command with `--config` takes
`--config.SECTION.FIELD=VALUE` for every field of [the config](config.md), in these sections: {describe_sections()}
(with their numbers of fields).

A name that no flag or field has is answered with the one that it is likely to mean, also where another library calls it
so: for `--lr` that is `--config.optimizer.learning_rate`.

## Completion in a shell

Flags, fields, their choices and paths are completed by the Tab key after

```bash
source <(python -m areal_jax completion bash)   # in ~/.bashrc
source <(python -m areal_jax completion zsh)    # in ~/.zshrc, after compinit
python -m areal_jax completion fish | source    # in ~/.config/fish/config.fish
```

## What a terminal shows

What takes long before and after the updates has a bar with the time left: loading weights, compiling, evaluating,
exporting. Each update has a line. A pipe, a file, a notebook and CI get lines alone, at the start of each part and
every five seconds of it. `--config.telemetry.progress=False` shows neither.
"""


def render() -> str:
    """Renders the page: a part on all commands, then one section per command."""
    return '\n'.join([_HEAD, *(_render_command(command) for command in find_commands())])


def _render_command(command: Command) -> str:
    usage = [f'{command.program} {form}'.strip() for form in command.usage]
    examples = [f'# {purpose}\n{line}' for purpose, line in list_examples(command)]
    exits = [(str(int(code)), text) for code, text in sorted(command.exits.items())]
    notes = [command.notes, ''] if command.notes else []
    return '\n'.join([
        f'## {command.program}', '', command.purpose, '', '```text', *usage, '```', '', *notes,
        *_render_table(('flag', 'meaning'), [(f'`{flag.form}`', describe_flag(flag)) for flag in list_flags(command)]),
        *_render_fields(command),
        '```bash', *examples, '```', '',
        *_render_table(('exit code', 'meaning'), exits),
    ])  # fmt: skip


def _render_fields(command: Command) -> list[str]:
    if not command.fields:
        return []
    return _render_table(
        ('field, with its default', 'meaning'), [(f'`{name}`', text) for name, text in list_fields(command)]
    )


def _render_table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    lines = [f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in row)} |' for row in rows]
    return [f'| {" | ".join(head)} |', '|---|---|', *lines, '']


if __name__ == '__main__':
    print(render(), end='')
