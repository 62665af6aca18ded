"""The names that handlers of aiSSEMBLE's Open Inference Protocol packages import, for where those aren't installed."""
