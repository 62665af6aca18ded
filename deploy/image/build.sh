#!/bin/sh
# The first stage of deploy/Dockerfile: torch and torchrelay, compiled, in a virtual environment, /opt/torchrelay.
#   VARIANT      of the image: `cpu` refuses a torch with CUDA
#   TORCH_SPEC   pip's requirement for torch, with options: "torch==2.13.0 --index-url INDEX" selects another build
#   EXTRAS       of torchrelay: "vision,onnx,s3,mlserver"
#   REQUIREMENTS further packages, for the handlers
# The interpreter is Debian's, which was built with optimisation: the same code costs 11 to 18 % less on it.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/torchrelay
pip() { /opt/torchrelay/bin/python -m pip --disable-pip-version-check --no-cache-dir "$@"; }
# shellcheck disable=SC2086  # both are lists of words
pip install $TORCH_SPEC
cuda=$(/opt/torchrelay/bin/python -c 'import torch; print(torch.version.cuda or "")')
if [ "$VARIANT" = cpu ] && [ -n "$cuda" ]; then
    echo "VARIANT=cpu: TORCH_SPEC=\"$TORCH_SPEC\" installed torch for CUDA $cuda. Name an index of CPU builds in it: --index-url INDEX" >&2
    exit 1
fi
TORCHRELAY_COMPILE=1 pip install "/src${EXTRAS:+[$EXTRAS]}"
# shellcheck disable=SC2086
[ -z "${REQUIREMENTS:-}" ] || pip install $REQUIREMENTS
# Torch's headers and static libraries are only needed for compiling against it.
site=$(/opt/torchrelay/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/torch/include" "$site/torch/test" "$site/caffe2"
find "$site" -name '*.a' -delete
/opt/torchrelay/bin/torchserve --version
