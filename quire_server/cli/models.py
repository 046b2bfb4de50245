"""Lists the models that a running service serves."""

import json

from quire.v1 import model_pb2, model_pb2_grpc
from quire_server.cli._connection import add_target, call_options, connected
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire models
  quire models --json --target 10.0.0.5:50051
"""

_CONVERTED = ("eos_token_ids", "sampling_defaults")
"""Fields of a model that JSON has in another form."""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON array with all details")


def run(options: Namespace) -> int:
    """Print one line per model."""
    with connected(options) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        found = stub.ListModels(model_pb2.ListModelsRequest(), **call_options()).models
    if options.json:
        fields = [name for name in model_pb2.Model.DESCRIPTOR.fields_by_name if name not in _CONVERTED]
        models = [
            {name: getattr(each, name) for name in fields}
            | {"eos_token_ids": list(each.eos_token_ids), "sampling_defaults": dict(each.sampling_defaults)}
            for each in found
        ]
        print(json.dumps(models, indent=2))
        return 0
    row = "{:<24} {:<24} {:<9} {:>8} {:>10}  {:<4}  {}".format
    print(row("model", "architecture", "dtype", "context", "vocabulary", "chat", "sampling defaults"))
    for each in found:
        chat = "yes" if each.has_chat_template else "no"
        defaults = " ".join(f"{name}={value:.10g}" for name, value in sorted(each.sampling_defaults.items())) or "-"
        print(row(each.name, each.architecture, each.dtype, each.max_model_len, each.vocab_size, chat, defaults))
    return 0
