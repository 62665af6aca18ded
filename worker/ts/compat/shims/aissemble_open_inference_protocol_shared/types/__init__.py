"""aiSSEMBLE's package of this name, for where that isn't installed (docs/aissemble.md)."""
