#!/bin/bash
# Runs one part with whatever Python there is: that of .venv, or one that has torch, triton, transformers, grpcio,
# protobuf and numpy, with what else is needed from wheels that `make gpu-wheels` has put into build/gpu/wheels.
set -e
cd "$(dirname "$0")/../.."
if [ -z "$1" ]; then echo "which part? make gpu PART=kernels | steps | weights | tiles | decode | workloads | peers" >&2; exit 2; fi
python=${GPU_PYTHON:-python3}
if [ -z "$GPU_PYTHON" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi
export PYTHONPATH="$PWD:$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
needed="numpy, grpc, google.protobuf, zmq, structlog, opentelemetry.sdk, \
opentelemetry.exporter.otlp.proto.grpc, starlette, uvicorn, prometheus_client, pydantic, llguidance, grpc_status, \
grpc_health, grpc_reflection"
if ! "$python" -W ignore -c "import $needed" 2>/dev/null; then
  ls build/gpu/wheels/*.whl > /dev/null || { echo "make gpu-wheels, where there is a package index, comes first" >&2; exit 1; }
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu/site build/gpu/wheels/*.whl
  "$python" -W ignore -c "import $needed"  # says what is missing still
fi
# An item that ends its process (a kernel that hangs, a device that is lost) does not keep the others from being done.
export QUIRE_GPU_UNTIL=$(($(date +%s) + ${GPU_BUDGET_S:-430}))
while :; do
  code=0
  "$python" -W ignore -m measure.gpu "$@" || code=$?
  [ $code = 4 ] || exit $code
done
