"""The completion of all commands in bash, zsh and fish: flags, fields of the config, choices and paths.

A script holds all the data, so a key press starts no program; it is made again whenever a shell starts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from areal_jax.app.process.ending import end_command
from areal_jax.commands.command import Command, Flag, Parser, find_commands, list_flags, parse
from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import Choice, Field
from areal_jax.config.fields import Flag as Switch
from areal_jax.errors import ExitCode

_SHELLS = ('bash', 'zsh', 'fish')
_FIELD = '--config.SECTION.FIELD'

_BASH = r"""# Completion of areal_jax in bash: source <(python -m areal_jax completion bash)
_areal_jax_fields='@FIELDS@'
_areal_jax_flags() {
  case $1 in
@FLAGS@
  esac
}
_areal_jax_values() {
  case "$1 $2" in
@VALUES@
    *) echo '' ;;
  esac
}
_areal_jax() {
  local line=${COMP_LINE:0:COMP_POINT} program=${1##*/} word name value kept candidate previous
  word=${line##*[[:space:]]}
  previous=${line%"$word"}
  previous=${previous%"${previous##*[![:space:]]}"}
  previous=${previous##*[[:space:]]}
  COMPREPLY=()
  if [[ $word == --*=* ]]; then
    name=${word%%=*} value=${word#*=}
  elif [[ $word == -* ]]; then
    local names
    case $word in
      --config.*.*) names=$_areal_jax_fields ;;
      *) names=$(_areal_jax_flags "$program") ;;
    esac
    case $word in
      --config.*.*) ;;
      --config.*)
        [[ " $names " == *' --config= '* ]] || return
        names=$(for candidate in $_areal_jax_fields; do echo "${candidate%.*}."; done) ;;
    esac
    while IFS= read -r candidate; do
      [[ $candidate == *[=.] ]] && COMPREPLY+=("$candidate") || COMPREPLY+=("$candidate ")
    done < <(compgen -W "$names" -- "$word" | sort -u)
    return
  elif [[ $previous == --* && $previous != *=* ]]; then
    name=$previous value=$word
  else
    name='' value=$word
  fi
  kept=''
  # readline replaces what follows the last character of COMP_WORDBREAKS, and not the whole word
  if [[ $word == --*=* && $COMP_WORDBREAKS != *=* ]]; then kept="$name="; fi
  local values cut=''
  values=$(_areal_jax_values "$program" "$name")
  if [[ -z $kept && $value == *[=:]* ]]; then cut=${value%"${value##*[=:]}"}; fi
  case $values in
    @file) while IFS= read -r candidate; do
             [[ -d $candidate ]] && candidate+=/ || candidate+=' '
             COMPREPLY+=("$kept${candidate#"$cut"}")
           done < <(compgen -f -- "$value") ;;
    @directory) while IFS= read -r candidate; do
                  COMPREPLY+=("$kept${candidate#"$cut"}/")
                done < <(compgen -d -- "$value") ;;
    *) while IFS= read -r candidate; do
         COMPREPLY+=("$kept${candidate#"$cut"} ")
       done < <(compgen -W "$values" -- "$value") ;;
  esac
}
complete -o nospace -F _areal_jax @PROGRAMS@
"""

_ZSH = r"""#compdef @PROGRAMS@
# Completion of areal_jax in zsh, after compinit: source <(python -m areal_jax completion zsh)
_areal_jax_fields=(@FIELDS@)
_areal_jax_flags() {
  case $1 in
@FLAGS@
  esac
}
_areal_jax_values() {
  case "$1 $2" in
@VALUES@
    *) echo '' ;;
  esac
}
_areal_jax() {
  local program=${words[1]:t} name='' found
  if [[ $PREFIX == --*=* ]]; then
    name=${PREFIX%%=*}
    compset -P 1 '*='
  elif [[ $PREFIX == -* ]]; then
    local -a names flags switches
    names=(${=$(_areal_jax_flags $program)})
    if [[ $PREFIX == --config.* ]]; then
      (( ${names[(Ie)--config=]} )) && compadd -S '' -- $_areal_jax_fields
      return
    fi
    flags=(${(M)names:#*=}) switches=(${names:#*=})
    compadd -S '' -- $flags
    compadd -- $switches
    return
  elif (( CURRENT > 2 )) && [[ ${words[CURRENT-1]} == --* && ${words[CURRENT-1]} != *=* ]]; then
    name=${words[CURRENT-1]}
  fi
  found=$(_areal_jax_values $program "$name")
  case $found in
    @file) _files ;;
    @directory) _files -/ ;;
    *) compadd -- ${=found} ;;
  esac
}
compdef _areal_jax @PROGRAMS@
"""


def render(shell: str) -> str:
    """Renders the script for a shell: 'bash', 'zsh' or 'fish'."""
    commands = [command for command in find_commands() if command.word and not command.program.startswith('python')]
    if shell == 'fish':
        return _render_fish(commands)
    parts = {
        '@FIELDS@': ' '.join(f'--config.{path}=' for path in FIELDS),
        '@FLAGS@': '\n'.join(_render_flags(command) for command in commands),
        '@VALUES@': '\n'.join([line for command in commands for line in _render_values(command)] + _field_values()),
        '@PROGRAMS@': ' '.join(command.program for command in commands),
    }
    script = _BASH if shell == 'bash' else _ZSH
    for name, text in parts.items():
        script = script.replace(name, text)
    return script


def _shown(command: Command) -> list[Flag]:
    """The flags to complete, including --no-... for switches that are on, --help and --version."""
    flags = [flag for flag in list_flags(command) if flag.name.startswith('--') and flag.name != _FIELD]
    opposites = [dataclasses.replace(flag, name=f'--no-{flag.name[2:]}') for flag in flags if flag.default == 'on']
    both = [Flag('--help', '', 'Shows what this command does.', ''), Flag('--version', '', 'Shows the version.', '')]
    return [*flags, *opposites, *both]


def _render_flags(command: Command) -> str:
    words = [f'{flag.name}=' if flag.metavar and not flag.is_repeated else flag.name for flag in _shown(command)]
    return f"    {command.program}) echo '{' '.join(words)}' ;;"


def _render_values(command: Command) -> list[str]:
    """Cases of the script with the values of a command's flags and arguments; '@file', '@directory' mean paths."""
    flags = [(flag.name, _values_of(flag)) for flag in list_flags(command) if flag.name.startswith('--')]
    arguments = [('', f'@{flag.kind or "file"}') for flag in list_flags(command) if not flag.name.startswith('--')]
    return [f"    '{command.program} {name}') echo '{values}' ;;" for name, values in [*flags, *arguments] if values]


def _values_of(flag: Flag) -> str:
    if flag.choices:
        return ' '.join(flag.choices)
    return f'@{flag.kind}' if flag.kind in ('file', 'directory') else ''


def _field_values() -> list[str]:
    """Cases of the script with the values of the config's fields, which all commands share."""
    rows = [(path, _field_words(path, field)) for path, field in FIELDS.items()]
    return [f"    *' --config.{path}') echo '{words}' ;;" for path, words in rows if words]


def _field_words(path: str, field: Field) -> str:
    if isinstance(field, Choice):
        return ' '.join(field.choices)
    if isinstance(field, Switch):
        return 'True False'
    name = path.partition('.')[2]
    return '@file' if name == 'path' else '@directory' if name in ('directory', 'compilation_cache') else ''


def _render_fish(commands: Sequence[Command]) -> str:
    lines = ['# Completion of areal_jax in fish: python -m areal_jax completion fish | source']
    for command in commands:
        lines += [_fish_line(command.program, flag.name[2:], flag.meaning, _values_of(flag), bool(flag.metavar))
                  for flag in _shown(command)]  # fmt: skip
        if any(not flag.name.startswith('--') for flag in list_flags(command)):
            lines.append(f'complete -c {command.program} -F')
    programs = ' '.join(command.program for command in commands if command.fields)
    lines.append(f'for command in {programs}')
    for path, field in FIELDS.items():
        words = _field_words(path, field)
        lines.append(f'    {_fish_line("$command", f"config.{path}", field.meaning, words, True)}')
    return '\n'.join([*lines, 'end', ''])


def _fish_line(program: str, name: str, meaning: str, values: str, takes_value: bool) -> str:
    quoted = meaning.replace('\\', '\\\\').replace("'", "\\'")
    ways = {
        '@file': ' -r -F',
        '@directory': " -x -a '(__fish_complete_directories)'",
        '': ' -x' if takes_value else ' -f',
    }
    way = ways.get(values, f" -x -a '{values}'")
    return f"complete -c {program} -l '{name}'{way} -d '{quoted}'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the script; returns the exit code."""
    print(render(parse(COMMAND, arguments).shell), end='')
    return ExitCode.FINISHED


def _build_parser() -> Parser:
    parser = Parser(COMMAND.program)
    parser.add_argument(
        'shell', metavar='SHELL', choices=_SHELLS, help='What is completed there: all areal-* commands.'
    )
    return parser


COMMAND = Command(
    program='python -m areal_jax completion',
    purpose='Prints a script for a shell that completes flags, fields of the config, their choices and paths.',
    usage=('SHELL',),
    flags=_build_parser,
    examples="""
    # in bash, for good: add this line to ~/.bashrc
    source <(python -m areal_jax completion bash)
    # in fish
    python -m areal_jax completion fish > ~/.config/fish/completions/areal-train.fish
    """,
    notes='In zsh the line is source <(python -m areal_jax completion zsh), after compinit.',
)


def run() -> None:
    """Entry point of `python -m areal_jax completion`."""
    sys.exit(end_command(main, doing='printing'))
