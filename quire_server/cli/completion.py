"""Prints a script for bash that completes commands, flags and their values.

Write it to a file once, because it takes a second to make; bash-completion loads the file in the first example. Without
that package, source the file in ~/.bashrc. Make the file anew after an upgrade.
"""

import argparse
import importlib
from collections.abc import Iterator, Sequence

from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.cli.main import CommandModule, installed_commands

EXAMPLES = """
  quire completion bash > ~/.local/share/bash-completion/completions/quire
  quire completion bash > ~/.quire-completion && echo '. ~/.quire-completion' >> ~/.bashrc
"""
_SCRIPT = """# bash completion of Quire, made by `quire completion bash`
_quire() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
  local first=1
  # bash takes the "=" in --flag=value for a word.
  if [[ $previous == "=" ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [[ $current == "=" ]]; then current=""; fi
  if [[ $command == help ]]; then command=${{COMP_WORDS[2]}}; first=2; fi
  if (( COMP_CWORD == first )); then
    words="{commands}"
  elif (( COMP_CWORD == first + 1 )); then
    case $command in
{groups}
    esac
  fi
  if [[ -z $words && $first == 1 ]]; then
    case "$command ${{COMP_WORDS[2]}} " in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _quire quire
"""


def configure(parser: OneLineParser) -> None:
    """Add the `shell` argument to the parser."""
    parser.add_argument("shell", choices=("bash",), help="shell for which to print the script")


def run(_options: Namespace) -> int:
    """Print the script."""
    print(script(), end="")
    return 0


def script() -> str:
    names = [command.name for command in installed_commands()]
    tops = sorted({name.split()[0] for name in names} | {"help"})
    groups = sorted({name.split()[0] for name in names if " " in name})
    grouped = (
        f'      {group}) words="{" ".join(name.split()[1] for name in names if name.startswith(f"{group} "))}" ;;'
        for group in groups
    )
    cases = (
        line for command in installed_commands() for line in _case(command.name, _parser(command.name, command.module))
    )
    return _SCRIPT.format(commands=" ".join(tops), groups="\n".join(grouped), cases="\n".join(cases))


def _parser(name: str, module_name: str) -> OneLineParser:
    module: CommandModule = importlib.import_module(module_name)
    parser = OneLineParser(f"quire {name}", description="", examples="")
    module.configure(parser)
    return parser


def _case(name: str, parser: OneLineParser) -> Iterator[str]:
    """Yield the lines that complete one command: values of a flag with choices, no words for other values, or flags."""
    flags = [action for action in parser.actions() if action.option_strings]
    values = [
        action for action in flags if action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    ]
    free = [flag for action in values if not action.choices for flag in action.option_strings]
    words = [str(choice) for action in parser.actions() if not action.option_strings for choice in action.choices or ()]
    yield f'      "{name} "*)'
    yield "        case $previous in"
    for action in values:
        if action.choices:
            yield f'          {"|".join(action.option_strings)}) words="{" ".join(map(str, action.choices))}" ;;'
    if free:
        yield f"          {'|'.join(free)}) return ;;"
    yield f'          *) if [[ $current == -* ]]; then words="{_joined(flags)}"; else words="{" ".join(words)}"; fi ;;'
    yield "        esac ;;"


def _joined(flags: Sequence[argparse.Action]) -> str:
    return " ".join(flag for action in flags for flag in action.option_strings if flag.startswith("--"))
