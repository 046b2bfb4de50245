"""Answer one question about a recording, in a process that `scheduler_svc.explanations` starts.

    python -m records.answer FOLDER QUESTION MOMENT

QUESTION is a serialized `Any` in base64. MOMENT is the monotonic time, in seconds, at which the caller stops waiting.
The process reads the recording once stdin is readable: the recorder has then written all that precedes the question.
The reply is a serialized `OperatorReply` on stdout.
"""

import base64
import os
import sys
from pathlib import Path

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.frontend.link import error_reply
from scheduler_svc.recorder.segments import UnreadableRecordError
from shared.errors import FieldViolation, InvalidRequestError, OverloadedError, QuireError


def _answer(call: AnyMessage, place: Path, ends_at: float) -> Message:
    # Load only the modules for this kind of question, because the caller also waits for the imports.
    if call.Is(admin.CompareStrategiesRequest.DESCRIPTOR):
        from records.whatif.strategies import compare_strategies

        return compare_strategies(admin.CompareStrategiesRequest.FromString(call.value), place, ends_at)
    if call.Is(admin.PredictRequest.DESCRIPTOR):
        from records.whatif.predict import predict

        return predict(admin.PredictRequest.FromString(call.value), place, ends_at)
    from records.explain.answers import answer

    return answer(admin.ExplainRequest.FromString(call.value), place).message()


def main() -> int:
    """Answer the question in the command-line arguments."""
    os.nice(10)
    place, question, ends_at = Path(sys.argv[1]), base64.b64decode(sys.argv[2]), float(sys.argv[3])
    reply = link_pb2.OperatorReply()
    sys.stdin.buffer.read(1)
    try:
        reply.response.Pack(_answer(AnyMessage.FromString(question), place, ends_at))
    except DecodeError:
        reply = error_reply(0, InvalidRequestError(FieldViolation("request", "not a valid message")))
    except QuireError as error:
        reply = error_reply(0, error)
    except (OSError, UnreadableRecordError) as error:
        reply = error_reply(0, OverloadedError(f"explain: the record cannot be read: {error}"))
    sys.stdout.buffer.write(reply.SerializeToString())
    return 0


if __name__ == "__main__":
    sys.exit(main())
