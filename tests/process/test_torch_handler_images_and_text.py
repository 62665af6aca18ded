"""Image, text and tensor handlers: pixels computed by hand, answers of small known models."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ts.context import Context
from ts.metrics.metric_cache import MetricCache
from ts.torch_handler import image_transforms as transforms
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.densenet_handler import DenseNetHandler
from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.model_files import ModelFileError
from ts.torch_handler.object_detector import ObjectDetector
from ts.torch_handler.text_classifier import TextClassifier
from ts.torch_handler.text_handler import expand_contractions
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import PredictionException


def grey(rows: list[list[int]]) -> Image.Image:
    image = Image.new("L", (len(rows[0]), len(rows)))
    image.putdata([value for row in rows for value in row])
    return image


def values(image: Image.Image) -> list[list[int]]:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    found: list[list[int]] = pixels.view(image.height, image.width).tolist()
    return found


# --- transforms


def test_shrinking_weighs_all_pixels() -> None:
    """Twice as wide a triangle: left (0.75 * 10 + 0.75 * 50 + 0.25 * 90) / 1.75, right its mirror."""
    shrunk = transforms.Resize((1, 2))(grey([[10, 50, 90, 250]]))
    assert values(shrunk) == [[39, 153]]


def test_growing_interpolates() -> None:
    """Centres at 0.25, 0.75, 1.25, 1.75 of pixels whose centres are 0.5 and 1.5."""
    assert values(transforms.Resize((1, 4))(grey([[0, 100]]))) == [[0, 25, 75, 100]]


@pytest.mark.parametrize(
    ("size", "result"),
    [((500, 375), (341, 256)), ((375, 500), (256, 341)), ((256, 900), (256, 900)), ((10, 10), (256, 256))],
)
def test_the_shorter_side_gets_the_size(size: tuple[int, int], result: tuple[int, int]) -> None:
    assert transforms.Resize(256)(Image.new("L", size)).size == result


def test_centre_crop() -> None:
    numbered = grey([[10 * row + column for column in range(5)] for row in range(4)])
    assert values(transforms.CenterCrop(2)(numbered)) == [[12, 13], [22, 23]]
    assert values(transforms.CenterCrop((4, 1))(numbered)) == [[2], [12], [22], [32]]


def test_centre_crop_of_a_smaller_image_has_a_black_border() -> None:
    assert values(transforms.CenterCrop(3)(grey([[7, 8]]))) == [[0, 0, 0], [7, 8, 0], [0, 0, 0]]


def test_tensor_of_colours() -> None:
    image = Image.new("RGB", (2, 1))
    image.putdata([(0, 51, 255), (102, 0, 204)])
    expected = torch.tensor([[[0.0, 0.4]], [[0.2, 0.0]], [[1.0, 0.8]]])
    torch.testing.assert_close(transforms.ToTensor()(image), expected)


def test_tensors_of_other_modes() -> None:
    assert transforms.ToTensor()(Image.new("1", (2, 2), 1)).tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert transforms.ToTensor()(Image.new("F", (1, 1), 3.5)).tolist() == [[[3.5]]]
    assert transforms.ToTensor()(Image.new("I", (1, 1), 70000)).tolist() == [[[70000]]]
    assert transforms.ToTensor()(Image.new("RGBA", (1, 1))).shape == (4, 1, 1)


def test_normalise() -> None:
    tensor = torch.tensor([[[1.0]], [[0.5]]])
    result = transforms.Normalize([0.5, 0.25], [0.25, 0.5])(tensor)
    assert result.tolist() == [[[2.0]], [[0.5]]]
    assert transforms.Normalize([0.5], [0.5])(tensor).tolist() == [[[1.0]], [[0.0]]]
    with pytest.raises(ValueError, match="1 channels, where 2"):
        transforms.Normalize([0.5, 0.25], [1, 1])(torch.zeros(1, 2, 2))


def test_imagenet_of_one_colour() -> None:
    """(value / 255 - mean) / std everywhere."""
    tensor = transforms.imagenet()(Image.new("RGB", (300, 400), (255, 0, 51)))
    assert tensor.shape == (3, 224, 224)
    colour = torch.tensor([(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225])
    torch.testing.assert_close(tensor, colour.view(3, 1, 1).expand(3, 224, 224))


# --- handlers

MEANS = """
import torch


class Means(torch.nn.Module):
    '''The mean of each channel, and zeros up to eight classes.'''

    def forward(self, x):
        means = x.mean(dim=(2, 3))
        return torch.nn.functional.pad(means, (0, 8 - means.shape[1]))
"""
BOXES = """
import torch


class Boxes(torch.nn.Module):
    def forward(self, images):
        boxes = torch.tensor([[1.0, 2.0, 30.0, 40.0], [5.0, 5.0, 9.0, 9.0]])
        found = {"boxes": boxes, "labels": torch.tensor([1, 3]), "scores": torch.tensor([0.9, 0.2])}
        return [found for _ in images]
"""
BAG = """
import torch


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(8, 2, mode="sum")

    def forward(self, ids, offsets):
        return self.embedding(ids, offsets)
"""


def ready(
    handler: BaseHandler, folder: Path, source: str, labels: dict[str, Any] | None = None, weights: Any = None
) -> BaseHandler:
    """The handler, initialised with the model of `source`; every test's model file has a name of its own."""
    name = f"model_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(source)
    model = {"modelName": "m", "modelFile": f"{name}.py"}
    if weights is not None:
        torch.save(weights, folder / "m.pt")
        model["serializedFile"] = "m.pt"
    if labels is not None:
        (folder / "index_to_name.json").write_text(json.dumps(labels))
    context = Context("m", str(folder), {"model": model}, 4, None, metrics=MetricCache("m"))
    handler.initialize(context)
    sys.modules.pop(name)
    return handler


def answer(handler: BaseHandler, rows: list[Any], **header: str) -> Any:
    handler.context.request_processor = [header for _ in rows]
    return handler.handle(rows, handler.context)


def file_of(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30), form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form)
    return out.getvalue()


def test_classifier_answers_the_most_probable_first(tmp_path: Path) -> None:
    handler = ready(ImageClassifier(), tmp_path, MEANS, {"0": ["n1", "red"], "2": "blue"})
    (shares,) = answer(handler, [{"data": file_of((255, 0, 51))}])
    means = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225, 0, 0, 0, 0, 0])
    expected = torch.softmax(means, dim=0)
    assert next(iter(shares)) == "red"
    assert len(shares) == 5
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares["red"] == pytest.approx(expected[0].item(), rel=1e-4)
    assert shares["4"] == pytest.approx(expected[4].item(), rel=1e-4)
    assert "blue" not in shares


def test_classifier_of_a_batch_in_all_forms_of_input(tmp_path: Path) -> None:
    handler = ready(ImageClassifier(), tmp_path, MEANS)
    picture = file_of((10, 200, 30))
    tensor = transforms.imagenet()(Image.open(io.BytesIO(picture)))
    rows = [{"data": picture}, {"body": bytearray(picture)}, {"body": base64.b64encode(picture).decode()}]
    answers = answer(handler, [*rows, {"body": tensor.tolist()}, picture])
    assert answers == [answers[0]] * 5
    assert next(iter(answers[0])) == "1"


def test_how_many_classes(tmp_path: Path) -> None:
    handler = ready(ImageClassifier(), tmp_path, MEANS)
    assert isinstance(handler, ImageClassifier)
    for wanted, given in ((2, 2), (8, 8), (100, 8)):
        handler.set_max_result_classes(wanted)
        assert handler.get_max_result_classes() == wanted
        assert len(answer(handler, [{"data": file_of((1, 2, 3))}])[0]) == given
    assert ImageClassifier.topk == 5


class OwnSteps(ImageClassifier):
    """As users derive it: their own image steps and answer."""

    image_processing = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])

    def postprocess(self, data: Any) -> Any:
        return data.argmax(1).tolist()


@pytest.mark.parametrize("value", [b"no image", file_of((1, 2, 3))[:60], "no base64!", None, {"a": 1}, ["a"]])
def test_what_is_no_image_is_the_callers_error(tmp_path: Path, value: Any) -> None:
    handler = ready(ImageClassifier(), tmp_path, MEANS)
    with pytest.raises(PredictionException, match="the input is not an image") as caught:
        answer(handler, [{"data": value}])
    assert caught.value.error_code == 400


def test_guard_against_huge_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    handler = ready(OwnSteps(), tmp_path, MEANS)
    with pytest.raises(PredictionException, match="decompression bomb") as caught:
        answer(handler, [{"data": file_of((1, 2, 3))}])
    assert caught.value.error_code == 400
    handler.context.system_properties["limit_max_image_pixels"] = False
    assert isinstance(handler, VisionHandler)
    VisionHandler.initialize(handler, handler.context)
    assert answer(handler, [{"data": file_of((1, 0, 0))}]) == [0]


def test_detector_leaves_out_what_is_unlikely(tmp_path: Path) -> None:
    handler = ready(ObjectDetector(), tmp_path, BOXES, {"object_type_names": ["sky", "person"]})
    rows = [{"data": file_of((0, 0, 0))}, {"data": file_of((0, 0, 0), (7, 9))}]
    answers = answer(handler, rows)
    score = pytest.approx(0.9)
    assert answers == [[{"person": [1.0, 2.0, 30.0, 40.0], "score": score}]] * 2
    handler.threshold = 0.1  # type: ignore[attr-defined]
    assert [list(box)[0] for box in answer(handler, rows)[0]] == ["person", "3"]


def test_detector_gets_a_tensor_when_images_are_of_one_size(tmp_path: Path) -> None:
    handler = ready(ObjectDetector(), tmp_path, BOXES)
    row = {"data": file_of((0, 0, 51), (7, 9))}
    assert handler.preprocess([row, row]).shape == (2, 3, 9, 7)
    assert handler.preprocess([row])[0, 2, 0, 0].item() == pytest.approx(0.2)
    assert isinstance(handler.preprocess([row, {"data": file_of((0, 0, 0))}]), list)


CAPTUM = """
class IntegratedGradients:
    def __init__(self, model):
        self.model = model

    def attribute(self, images, target, n_steps):
        return images * target + n_steps


class LayerIntegratedGradients:
    def __init__(self, model, layer):
        self.layer = layer

    def attribute(self, ids, additional_forward_args, target):
        return self.layer.weight[ids]
"""


@pytest.fixture
def captum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, with the two classes that are used of it."""
    package = tmp_path / "packages" / "captum"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "attr.py").write_text(CAPTUM)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in ("captum", "captum.attr"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("captum")
def test_explanations_of_images(tmp_path: Path) -> None:
    handler = ready(OwnSteps(), tmp_path, MEANS)
    (insight,) = answer(handler, [{"data": file_of((255, 0, 0)), "target": 2}], explain="True")
    assert (len(insight), len(insight[0]), len(insight[0][0])) == (3, 8, 8)
    assert (insight[0][0][0], insight[1][0][0]) == (17.0, 15.0)


def test_explanations_need_captum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["captum", *(name for name in sys.modules if name.startswith("captum."))]:
        monkeypatch.setitem(sys.modules, name, None)
    handler = ready(OwnSteps(), tmp_path, MEANS)
    with pytest.raises(PredictionException, match="need the package captum"):
        answer(handler, [{"data": file_of((255, 0, 0))}], explain="True")


def test_tensors_in_and_out(tmp_path: Path) -> None:
    handler = ready(DenseNetHandler(), tmp_path, MEANS)
    out = io.BytesIO()
    torch.save(torch.full((3, 4, 4), 2.0), out)
    first, second = answer(handler, [{"data": out.getvalue()}, {"body": out.getvalue()}])
    assert first.tolist() == second.tolist() == [[2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    with pytest.raises(PredictionException, match="not a saved tensor"):
        answer(handler, [{"data": b"x"}])


# --- text


def test_contractions_take_the_longest_form() -> None:
    assert expand_contractions("you can't've won't shouldn't") == "you cannot have will not should not"
    assert expand_contractions("gonnawanna") == "gonnawanna"
    assert expand_contractions("Don't WON'T") == "Do not Will not"


def test_a_preprocess_made_of_torchserves_steps() -> None:
    class Own(TextClassifier):
        def preprocess(self, data: Any) -> Any:
            text = self._expand_contractions(self._remove_html_tags(data))
            return self._tokenize(self._remove_punctuation(self._remove_accented_characters(text)))

    assert Own().preprocess("<b>Don't</b> go, it's O'Neil's caf\u00e9!") == [
        "do",
        "not",
        "go",
        "it",
        "is",
        "oneils",
        "cafe",
    ]
    assert Own()._remove_puncutation("a.b") == "ab"


def text_handler(folder: Path, vocabulary: Any) -> BaseHandler:
    torch.save(vocabulary, folder / "source_vocab.pt")
    weight = torch.zeros(8, 2)
    weight[1], weight[2], weight[3] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([3.0, 3.0])
    return ready(TextClassifier(), folder, BAG, {"0": "bad", "1": "good"}, {"embedding.weight": weight})


def test_a_text_handler_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    class Elsewhere(TextClassifier):
        def get_source_vocab_path(self, context: Any) -> str:
            return os.path.join(context.system_properties["model_dir"], "words.pt")

    torch.save({"<unk>": 0, "good": 1}, tmp_path / "words.pt")
    handler = ready(Elsewhere(), tmp_path, BAG, {"0": "bad", "1": "good"}, {"embedding.weight": torch.eye(8, 2)})
    (found,) = answer(handler, [{"data": "good"}])
    assert max(found, key=found.__getitem__) == "good"
    assert Elsewhere().get_word_token(["\u0120the", "end"]) == ["the", "end"]


@pytest.mark.parametrize("value", [b"\xff", 7, None])
def test_what_is_no_text_is_the_callers_error(tmp_path: Path, value: Any) -> None:
    handler = text_handler(tmp_path, {})
    with pytest.raises(PredictionException, match="the input") as caught:
        answer(handler, [{"data": value}])
    assert caught.value.error_code == 400


class Vocabulary:
    """A vocabulary object, as older archives have it."""

    def __getitem__(self, token: str) -> int:
        return 2


def test_pickled_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"source_vocab\.pt holds Python objects"):
        text_handler(tmp_path, Vocabulary())


@pytest.mark.usefixtures("captum")
def test_explanations_of_text(tmp_path: Path) -> None:
    handler = text_handler(tmp_path, {"bad": 1, "good": 2})
    (insight,) = answer(handler, [{"data": "bad good"}], explain="True")
    assert insight["words"] == ["bad", "good", "bad good"]
    assert insight["importances"] == pytest.approx([1 / 5**0.5, 2 / 5**0.5, 0])
