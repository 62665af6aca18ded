"""The options of the server and of a worker, as objects of argparse: for scripts that read the same command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class ArgParser:
    """Makes the parsers."""

    @staticmethod
    def ts_parser() -> argparse.ArgumentParser:
        """TorchServe's options of `torchserve`; the command itself has more."""
        parser = argparse.ArgumentParser(prog="torchserve", description="Torchserve")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("-v", "--version", action="store_true", help="show the version")
        what.add_argument("--start", action="store_true", help="start the server")
        what.add_argument("--stop", action="store_true", help="stop the server that runs")
        parser.add_argument("--foreground", action="store_true", help="don't go to the background")
        parser.add_argument("--ts-config", help="configuration file")
        parser.add_argument("--model-store", help="directory of model archives")
        parser.add_argument("--workflow-store", help="directory of workflow archives")
        parser.add_argument("--log-config", help="logging configuration")
        parser.add_argument("--cpp-log-config", help="has no effect")
        parser.add_argument("--models", nargs="+", metavar="[NAME=]LOCATION", help="models to load")
        parser.add_argument(
            "--no-config-snapshots", "--ncs", action="store_true", help="neither read nor write snapshots"
        )
        parser.add_argument("--plugins-path", "--ppath", help="has no effect")
        parser.add_argument(
            "--disable-token-auth", "--dt", action="store_true", dest="token_auth", help="ask no tokens"
        )
        parser.add_argument(
            "--enable-model-api",
            action="store_true",
            dest="model_mode",
            help="allow registering and unregistering while it runs",
        )
        return parser

    @staticmethod
    def model_service_worker_args() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="model-server-worker", description="Model Server Worker")
        parser.add_argument("--sock-type", required=True, choices=["unix", "tcp"], help="what to listen on")
        parser.add_argument("--sock-name", help="path of the socket; unix")
        parser.add_argument("--host", help="address; tcp")
        parser.add_argument("--port", help="port; tcp")
        parser.add_argument("--metrics-config", help="metrics file")
        parser.add_argument(
            "--async", action="store_true", dest="async_comm", help="accepted; handlers say it themselves"
        )
        return parser

    @staticmethod
    def extract_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the arguments of the `torchserve` command; None: this process's."""
        return ArgParser.ts_parser().parse_args(args or None)
