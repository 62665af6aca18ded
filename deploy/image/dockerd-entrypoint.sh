#!/bin/sh
# `serve [FLAG …]`, also the default: the server, with the settings of /home/model-server/config.properties; in the variant
# `sagemaker`, with those of SageMaker and the model of /opt/ml/model.
# Anything else is run as a command, given as words or as one string for the shell. `torchserve --start` as the container's first
# process stays in the foreground.
set -eu
case "${1-}" in
    "" | serve)
        [ $# -eq 0 ] || shift
        if [ "${TORCHRELAY_VARIANT-}" = sagemaker ]; then
            cd "${TMPDIR:-/tmp}"  # away from config.properties, whose model store would count more than SageMaker's folder
            exec torchserve serve "$@"
        fi
        # With a read-only root, or as a user without write access, the server writes all its files to one directory. The flag is
        # stronger than the variable LOG_LOCATION, which therefore gets one, too.
        [ -w . ] || set -- --work-dir "${TMPDIR:-/tmp}" ${LOG_LOCATION:+--set "log_location=$LOG_LOCATION"} "$@"
        exec torchserve --foreground --ts-config "${TS_CONFIG_FILE:-/home/model-server/config.properties}" "$@"
        ;;
    -*) exec "$0" serve "$@" ;;
    *\ *)
        [ $# -gt 1 ] || exec /bin/sh -c "$1"
        exec "$@"
        ;;
    *) exec "$@" ;;
esac
