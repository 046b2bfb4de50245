"""Flags and output that the commands in this folder share."""

import argparse
import json
from pathlib import Path
from typing import Any


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser for `python -m MODULE`. Every command accepts `--json`."""
    made = argparse.ArgumentParser(f"python -m {module}", description=description)
    made.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    return made


def tell(figures: dict[str, Any], path: Path | None) -> None:
    """Print the results; if a path is given, write them there."""
    text = json.dumps(figures, indent=2)
    print(text, flush=True)
    if path is not None:
        path.write_text(text + "\n")
