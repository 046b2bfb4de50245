"""Flags of the shared configuration classes, for every command that starts a process."""

import dataclasses
from typing import Any

from quire_server.cli._parser import OneLineParser
from shared.config import WorkerConfig, add_options

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_config_flags(parser: OneLineParser, *configs: type[Any]) -> None:
    """Add one flag per setting of the given classes, and the dtype aliases that other tools accept."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings; one file serves all processes")
    add_options(parser, *configs)
    if WorkerConfig not in configs:
        return
    dtype = next(field for field in dataclasses.fields(WorkerConfig) if field.name == "dtype")
    parser.add_argument(
        "--dtype",
        type=lambda word: DTYPE_ALIASES.get(word, word),
        choices=dtype.metadata["choices"],
        default=None,
        help=f"{dtype.metadata['help']}; bf16, fp16 and fp32 are accepted as well (default: {dtype.default})",
    )
