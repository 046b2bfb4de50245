#!/bin/bash
# Runs one part with whatever Python there is: that of .venv, or one that has torch, triton, transformers, grpcio,
# protobuf and numpy, with what else is needed from wheels that `make gpu-wheels` has put into build/gpu/wheels.
set -e
cd "$(dirname "$0")/../.."
python=${GPU_PYTHON:-python3}
if [ -z "$GPU_PYTHON" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi
export PYTHONPATH="$PWD:$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c "import zmq, structlog, opentelemetry.sdk, starlette, prometheus_client, pydantic, llguidance, grpc_status" 2>/dev/null; then
  ls build/gpu/wheels/*.whl > /dev/null || { echo "make gpu-wheels, where there is a package index, comes first" >&2; exit 1; }
  "$python" -m pip install --quiet --no-index --no-deps --target build/gpu/site build/gpu/wheels/*.whl
fi
exec "$python" -W ignore -m tools.gpu "$@"
