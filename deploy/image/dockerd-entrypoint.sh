#!/bin/sh
# `serve [FLAG …]`, also the default: the server, with the settings of /home/model-server/config.properties.
# Anything else is the command, in words or as one string for the shell. A server that is started by `torchserve --start` as
# the container's first process stays in the foreground.
set -eu
case "${1-}" in
    "" | serve)
        [ $# -eq 0 ] || shift
        # With a read-only root, or as a user that may not write here, everything that is written goes to one directory.
        [ -w . ] || set -- --work-dir "${TMPDIR:-/tmp}" "$@"
        exec torchserve --foreground --ts-config "${TS_CONFIG_FILE:-/home/model-server/config.properties}" "$@"
        ;;
    -*) exec "$0" serve "$@" ;;
    *\ *)
        [ $# -gt 1 ] || exec /bin/sh -c "$1"
        exec "$@"
        ;;
    *) exec "$@" ;;
esac
