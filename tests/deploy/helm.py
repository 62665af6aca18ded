"""Renders a chart with Helm, whose library the environment has.

Usage: python helm.py CHART < VALUES, as JSON. Prints the documents.
"""

from __future__ import annotations

import json
import sys

from helm_python.chart import Chart


def main() -> None:
    with Chart.load(sys.argv[1]) as chart:
        files = chart.render(values=json.load(sys.stdin), name="rendered")
    print("\n".join(text for file, text in files.items() if file.endswith(".yaml")))


if __name__ == "__main__":
    main()
