#!/bin/sh
# The last stage of deploy/Dockerfile: the interpreter, and the account and directories of TorchServe's images.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
# python3-venv makes the environments of models with requirements (install_py_dep_per_model, useVenv).
apt-get install -y --no-install-recommends ca-certificates libstdc++6 python3 python3-venv
rm -rf /var/lib/apt/lists/*
groupadd --gid 1000 model-server
useradd --uid 1000 --gid 1000 --groups 0 --no-create-home --home-dir /home/model-server --shell /bin/sh model-server
mkdir -p /home/model-server/model-store /home/model-server/tmp /home/model-server/logs /mnt/models
# Any user id with group 0 may write here, as OpenShift and `docker run --user ID:0` require.
chown -R 1000:0 /home/model-server
chmod -R g=u /home/model-server
