"""Lists the models that a running service serves."""

import json

import grpc

from quire import _calls
from quire.cli._connection import add_tls, credentials, token
from quire.cli._parser import Namespace, OneLineParser
from quire.v1 import model_pb2, model_pb2_grpc

EXAMPLES = """
  quire models
  quire models --json --target 10.0.0.5:50051
"""
_TIMEOUT_S = 10.0


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="gRPC address of the service")
    add_tls(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON array, with every detail")


def run(options: Namespace) -> int:
    """Prints a line for each."""
    secure, target = credentials(options), options.target
    metadata = _calls.call_metadata(token())
    with grpc.insecure_channel(target) if secure is None else grpc.secure_channel(target, secure) as channel:
        try:
            stub = model_pb2_grpc.ModelServiceStub(channel)
            found = stub.ListModels(model_pb2.ListModelsRequest(), timeout=_TIMEOUT_S, metadata=metadata).models
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None
    if options.json:
        fields = [name for name in model_pb2.Model.DESCRIPTOR.fields_by_name if name != "eos_token_ids"]
        models = [
            {name: getattr(each, name) for name in fields} | {"eos_token_ids": list(each.eos_token_ids)}
            for each in found
        ]
        print(json.dumps(models, indent=2))
        return 0
    row = "{:<24} {:<24} {:<9} {:>8} {:>10}  {}".format
    print(row("model", "architecture", "dtype", "context", "vocabulary", "chat"))
    for each in found:
        chat = "yes" if each.has_chat_template else "no"
        print(row(each.name, each.architecture, each.dtype, each.max_model_len, each.vocab_size, chat))
    return 0
