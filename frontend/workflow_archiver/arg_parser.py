"""The command line of `torch-workflow-archiver`."""

from __future__ import annotations

import argparse
import os


class ArgParser:
    """Named as in TorchServe: scripts there replace `workflow_archiver_args_parser`."""

    @staticmethod
    def workflow_archiver_args_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog="torch-workflow-archiver",
            description="Packs a workflow's specification and functions into one archive for the server.",
        )
        parser.add_argument(
            "--workflow-name",
            required=True,
            metavar="NAME",
            help="name of the workflow and of the archive, NAME.war: letters, digits, '_', '-', '.'; begins with a "
            "letter or a digit",
        )
        parser.add_argument(
            "--spec-file", required=True, metavar="FILE", help="YAML file with the workflow's models and its graph"
        )
        parser.add_argument("--handler", metavar="FILE.py", help="Python file with the functions of the graph")
        parser.add_argument(
            "--extra-files",
            metavar="PATHS",
            help="comma-separated files, directories and patterns (* ? [ ]); a directory's content goes to the root",
        )
        parser.add_argument(
            "--export-path",
            metavar="DIR",
            default=os.getcwd(),
            help="directory for the archive; it must exist (default: the current directory)",
        )
        parser.add_argument("-f", "--force", action="store_true", help="replace an existing archive")
        return parser
