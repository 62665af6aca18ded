"""The names that handlers import from aiSSEMBLE's Open Inference Protocol packages, for environments without these."""
