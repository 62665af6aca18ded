"""The log files and the console, as TorchServe and log4j2 configurations have them."""
