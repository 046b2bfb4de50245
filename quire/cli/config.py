"""Prints every setting that is in effect, and where its value comes from: a flag, the environment, a file, the default.

It takes the flags of `quire serve`, so that a command line can be tried out. A name that is no setting's, in the file
or in a variable QUIRE_…, is an error with the name that was probably meant.
"""

import json

from quire.cli._parser import Namespace, OneLineParser
from quire.cli.serve import add_serve_flags, serve_config
from shared.config import FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from shared.config_sources import ConfigSources, Setting

EXAMPLES = """
  quire config                                    what quire serve would run with
  quire config --config quire.toml --changed      what differs from the defaults
  QUIRE_MAX_NUM_SEQS=8 quire config --json
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags of `quire serve`."""
    parser.add_argument("--changed", action="store_true", help="only settings that are not at their default")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_serve_flags(parser)


def run(options: Namespace) -> int:
    """Prints them; raises `ConfigError` for what cannot be used."""
    serve_config(options)  # every value is looked at, not only shown
    sources = ConfigSources(options)
    settings: dict[str, Setting] = {}
    for config in (ServiceConfig, FrontendConfig, SchedulerConfig, WorkerConfig):
        settings |= {setting.name: setting for setting in sources.settings(config)}
    shown = [each for _, each in sorted(settings.items()) if each.source != "default" or not options.changed]
    if options.json:
        print(json.dumps({each.name: {"value": each.value, "source": each.source} for each in shown}, indent=2))
        return 0
    width = max((len(each.name) for each in shown), default=0)
    for each in shown:
        print(f"{each.name:<{width}}  {_text(each.value):<28}  {each.source}".rstrip())
    return 0


def _text(value: object) -> str:
    """As it would be written in the file."""
    return json.dumps(value, ensure_ascii=False)
