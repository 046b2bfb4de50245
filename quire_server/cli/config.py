"""Prints every effective setting and its source: a flag, the environment, a file, or the default.

It accepts the flags of `quire serve`, so that a command line can be tried out. An unknown name in the file, or in a
variable QUIRE_…, is an error that suggests the closest setting.
"""

import json

from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.cli.serve import add_serve_flags, serve_config
from shared.config import FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from shared.config_sources import ConfigSources, Setting

EXAMPLES = """
  quire config                                    what quire serve would run with
  quire config --config quire.toml --changed      what differs from the defaults
  QUIRE_MAX_NUM_SEQS=8 quire config --json
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags of `quire serve`."""
    parser.add_argument("--changed", action="store_true", help="print only settings that differ from their defaults")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_serve_flags(parser)


def run(options: Namespace) -> int:
    """Print the settings; raise `ConfigError` for invalid ones."""
    serve_config(options)  # This call checks every value.
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
    """Return the value as in a configuration file."""
    return json.dumps(value, ensure_ascii=False)
