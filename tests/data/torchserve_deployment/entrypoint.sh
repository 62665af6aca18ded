#!/bin/bash
set -e
torchserve --start --ncs --foreground \
    --ts-config /home/model-server/config/config.properties \
    --models shouting=shouting.mar counting=counting.mar
tail -f /dev/null
