"""The committed weights are as good as documented, and the networks have the documented sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

MEASURE_DIGITS = """
import json, torch, train
from digit_net import DigitNet
_, test = train.load()
eager = DigitNet(); eager.load_state_dict(torch.load(train.HERE / "digits.pt")); eager.eval()
scripted = torch.jit.load(train.HERE / "digits_scripted.pt").eval()
print(json.dumps([len(test.labels), train.accuracy(eager, test), train.accuracy(scripted, test)]))
"""

MEASURE_TEXT = """
import json, torch, train
from character_model import CharacterModel, encode
model = CharacterModel(); model.load_state_dict(torch.load(train.HERE / "text_stream.pt")); model.eval()
text = torch.tensor(encode((train.HERE / "corpus.txt").read_text()))
print(json.dumps(train.bits_per_character(model, text)))
"""

MEASURE_DENSENET = """
import json, torch
from densenet161 import DenseNet161
with torch.device("meta"):  # the sizes are asked for, no numbers
    model = DenseNet161().eval()
old = {name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): v for name, v in model.state_dict().items()}
old = {name: v for name, v in old.items() if "num_batches_tracked" not in name}
model.load_state_dict(old, assign=True)
image = torch.zeros(2, 3, 64, 64, device="meta")
with torch.inference_mode():
    print(json.dumps([sum(p.numel() for p in model.parameters()), list(model(image).shape)]))
"""


#: Runs each script of a JSON list of [folder, script] in a fork that has torch, and gets its own exit status.
RUN_EACH = """
import json, os, sys, torch
for folder, script in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        os.chdir(folder)
        exec(script, {"__name__": "__main__"})
        sys.exit()
    _, status = os.waitpid(pid, 0)
    assert status == 0, folder
"""
SCRIPTS = {"digits": MEASURE_DIGITS, "text_stream": MEASURE_TEXT, "densenet161": MEASURE_DENSENET}


@pytest.fixture(scope="module")
def measured(root: Path) -> dict[str, Any]:
    """The JSON that each script prints in its folder of examples/; warnings are ignored as for users. torch gets one
    thread, since several wait for each other by spinning, which takes minutes on a busy machine."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    asked = json.dumps([[str(root / "examples" / folder), script] for folder, script in SCRIPTS.items()])
    done = subprocess.run([sys.executable, "-c", RUN_EACH, asked], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return dict(zip(SCRIPTS, map(json.loads, done.stdout.splitlines()), strict=True))


def test_digits_are_classified_as_well_as_written_down(root: Path, measured: dict[str, Any]) -> None:
    folder = root / "examples/digits"
    images, eager, scripted = measured["digits"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert images == metrics["test_images"]
    assert eager == scripted == pytest.approx(metrics["test_accuracy"], abs=0.5 / images)
    assert metrics["test_accuracy"] > 0.98
    assert f"**{metrics['test_accuracy']:.2%}**".replace("%", " %") in (folder / "README.md").read_text()


def test_the_text_is_known_as_well_as_written_down(root: Path, measured: dict[str, Any]) -> None:
    folder = root / "examples/text_stream"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert measured["text_stream"] == pytest.approx(metrics["bits_per_character"], abs=0.01)
    assert metrics["bits_per_character"] < 0.3


def test_densenet161_is_the_published_network(measured: dict[str, Any]) -> None:
    """28 681 000 parameters, as the paper and torchvision have it, and the first release's names load."""
    assert measured["densenet161"] == [28_681_000, [2, 1000]]
