"""The log files and the console, in TorchServe's formats or by a log4j2 configuration."""
