"""The built-in handlers behind HTTP and gRPC, against the same weights called directly."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from support import Reply, http_call, module_of

MODELS = Path(__file__).parents[1] / "data" / "models"
#: Of scikit-learn, which takes two seconds to import.
PHOTOS = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/images")))
LABELS = [f"thing {index}" for index in range(20)]
OVERLAPPED = """
from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.image_classifier import ImageClassifier


class Overlapped(ImageClassifier):
    def initialize(self, context):
        super().initialize(context)
        settings = context.model_yaml_config["micro_batching"]
        self.handle = MicroBatching(self, settings["micro_batch_size"], settings["parallelism"])
"""


def call(server: Any, target: str, body: bytes = b"", **headers: str) -> Reply:
    """A POST to the inference API; `content_type="…"` is the header Content-Type."""
    return http_call(server.port("http_inference"), "POST", target, body, headers)


def multipart(**parts: bytes) -> dict[str, Any]:
    """Fields and files of a form: a file's name is `NAME.bin`."""
    lines = [
        b'--limit\r\nContent-Disposition: form-data; name="%b"; filename="%b.bin"\r\n\r\n%b\r\n'
        % (key.encode(), key.encode(), value)
        for key, value in parts.items()
    ]
    return {"body": b"".join([*lines, b"--limit--\r\n"]), "content_type": "multipart/form-data; boundary=limit"}


# --- the models


def network(name: str, class_name: str) -> Any:
    """A network of tests/data/models with weights from a fixed seed, in evaluation mode."""
    module = module_of(MODELS / f"{name}.py")
    torch.manual_seed(7)
    net = getattr(module, class_name)()
    with torch.no_grad():
        for weights in net.parameters():
            weights.mul_(2)  # far from equal shares
    return net.eval()


def add(store: Path, name: str, handler: str, config: str = "", **names: str) -> Path:
    """A directory model; `names` are members of the manifest's model."""
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": name, "handler": handler, **names}
    if config:
        (folder / "model-config.yaml").write_text(config)
        model["configFile"] = "model-config.yaml"
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    return folder


def add_eager(store: Path, name: str, handler: str, net: Any, config: str = "") -> Path:
    source = MODELS / f"{type(net).__module__}.py"
    folder = add(store, name, handler, config, modelFile=source.name, serializedFile="weights.pt")
    (folder / source.name).write_bytes(source.read_bytes())
    torch.save(net.state_dict(), folder / "weights.pt")
    return folder


def add_labels(folder: Path) -> Path:
    (folder / "index_to_name.json").write_text(json.dumps({str(at): ["n", label] for at, label in enumerate(LABELS)}))
    return folder


def add_classifiers(store: Path, net: Any) -> None:
    """One network as weights and as TorchScript; and with a handler that overlaps its steps."""
    add_labels(add_eager(store, "eager", "image_classifier", net, "batchSize: 4\nmaxBatchDelay: 2000\n"))
    folder = add_labels(add(store, "scripted", "image_classifier", serializedFile="net.pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(net).save(folder / "net.pt")
    config = "batchSize: 4\nmaxBatchDelay: 2000\nmicro_batching: {micro_batch_size: 3, parallelism: {preprocess: 2}}\n"
    (add_labels(add_eager(store, "overlapped", "handler.py", net, config)) / "handler.py").write_text(OVERLAPPED)


def add_exported_classifiers(store: Path, net: Any) -> None:
    """The same network as an exported program and as ONNX, which take seconds to make."""
    example = (torch.zeros(2, 3, 224, 224),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = add_labels(add(store, "exported", "image_classifier", serializedFile="net.pt2"))
        many = {"images": {0: torch.export.Dim("n")}}
        torch.export.save(torch.export.export(net, example, dynamic_shapes=many), folder / "net.pt2")
        file = add_labels(add(store, "onnx", "image_classifier", serializedFile="net.onnx")) / "net.onnx"
        torch.onnx.export(net, example, file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}})


class Nets(NamedTuple):
    classifier: Any
    segmenter: Any
    detector: Any
    text: Any


VOCABULARY = {"<unk>": 0} | {
    word: at for at, word in enumerate(["the", "market", "fell", "do", "not", "panic", "good", "fell_", "news"], 1)
}
VOCABULARY |= {"do not": 20, "the market": 21}


@pytest.fixture(scope="module")
def nets() -> Nets:
    found = Nets(
        network("residual_net", "ResidualNet"),
        network("segments_net", "SegmentsNet"),
        network("boxes_net", "BoxesNet"),
        network("bag_net", "BagNet"),
    )
    with torch.no_grad():
        logits = found.detector.cells(rgb_tensor(photo("china.jpg")).unsqueeze(0)).amax(dim=1)
        found.detector.cells.bias.sub_(logits.median())  # so that half of the boxes are unlikely
    return found


@pytest.fixture(scope="module")
def models(nets: Nets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("models") / "store"
    store.mkdir()
    add_classifiers(store, nets.classifier)
    add_eager(store, "segmenter", "image_segmenter", nets.segmenter)
    folder = add_eager(store, "detector", "object_detector", nets.detector, "batchSize: 4\nmaxBatchDelay: 2000\n")
    (folder / "index_to_name.json").write_text(json.dumps({"object_type_names": ["person", "tree"]}))
    folder = add_eager(store, "text", "text_classifier", nets.text)
    (folder / "index_to_name.json").write_text(json.dumps({str(at): f"kind {at}" for at in range(4)}))
    torch.save(VOCABULARY, folder / "source_vocab.pt")
    return store


@pytest.fixture(scope="module")
def served(models: Path, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    settings = {"max_response_size": 50_000_000, "preload_torch": "true", "lone_requests_wait": "true"}
    with serving(tmp_path_factory.mktemp("served"), models, settings, ["--ncs"]) as server:
        for model in sorted(path.name for path in models.iterdir()):
            server.register(model)
        yield server


@pytest.fixture(scope="module")
def exported(served: Any, models: Path, nets: Nets) -> None:
    """The server has the other forms of the classifier, too."""
    add_exported_classifiers(models, nets.classifier)
    for model in ("exported", "onnx"):
        served.register(model)


# --- what must come out, without the code under test


def photo(name: str, width: int = 640, form: str = "JPEG") -> bytes:
    """A photograph that comes with scikit-learn, as a file."""
    with Image.open(PHOTOS / name) as image:
        out = io.BytesIO()
        image.crop((0, 0, width, image.height)).save(out, form)
    return out.getvalue()


def rgb_tensor(file: bytes) -> torch.Tensor:
    """[3, height, width] from 0 to 1."""
    with Image.open(io.BytesIO(file)) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32).transpose(2, 0, 1) / 255)


def imagenet_tensor(file: bytes) -> torch.Tensor:
    """[1, 3, 224, 224]: the shorter side 256, 224 from the middle, normalised; in numpy."""
    with Image.open(io.BytesIO(file)) as image:
        width, height = image.size
        short = min(width, height)
        sized = image.convert("RGB").resize((256 * width // short, 256 * height // short), Image.Resampling.BILINEAR)
    left, top = round((sized.width - 224) / 2), round((sized.height - 224) / 2)
    pixels = np.asarray(sized, dtype=np.float32)[top : top + 224, left : left + 224] / np.float32(255)
    normal = (pixels - np.array([0.485, 0.456, 0.406], np.float32)) / np.array([0.229, 0.224, 0.225], np.float32)
    return torch.from_numpy(normal.transpose(2, 0, 1).copy()).unsqueeze(0)


def best_five(net: Any, file: bytes) -> dict[str, float]:
    with torch.inference_mode():
        shares = torch.softmax(net(imagenet_tensor(file)), dim=1)[0]
    order = sorted(range(len(shares)), key=lambda at: -shares[at].item())[:5]
    return {LABELS[at]: shares[at].item() for at in order}


def same(found: dict[str, float], expected: dict[str, float]) -> None:
    """The same labels in the same order, and the same probabilities."""
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)


# --- image_classifier


@pytest.mark.parametrize("model", ["eager", "scripted", "exported", "onnx", "overlapped"])
@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
@pytest.mark.usefixtures("exported")
@pytest.mark.long
def test_the_five_best_are_those_of_the_same_weights(served: Any, nets: Nets, model: str, name: str) -> None:
    file = photo(name)
    answer = call(served, f"/predictions/{model}", file)
    assert answer.status == 200, answer.body
    same(answer.json(), best_five(nets.classifier, file))
    assert answer.body.decode() == json.dumps(answer.json(), indent=2)
    assert answer.headers["content-type"] == "application/octet-stream"


def test_every_way_to_send_an_image(served: Any, nets: Nets) -> None:
    """As a body, as a form's file, in base64, as numbers, over gRPC; JPEG, PNG and grey."""
    file, model = photo("china.jpg", 500), "/predictions/scripted"
    encoded, numbers = base64.b64encode(file), json.dumps({"data": imagenet_tensor(file)[0].tolist()}).encode()
    answers = [
        call(served, model, file, content_type="image/jpeg"),
        call(served, model, **multipart(data=file)),
        call(served, model, **multipart(body=file)),
        call(served, model, encoded, content_type="text/plain"),
        call(served, model, json.dumps(encoded.decode()).encode(), content_type="application/json"),
        call(served, model, json.dumps(imagenet_tensor(file)[0].tolist()).encode(), content_type="application/json"),
        Reply(200, {}, served.predict("scripted", file)),
    ]
    assert len(numbers) > 1_000_000
    for answer in answers:
        assert answer.status == 200, answer.body
        same(answer.json(), best_five(nets.classifier, file))
    png = photo("flower.jpg", 400, "PNG")
    same(call(served, model, png).json(), best_five(nets.classifier, png))
    grey = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("L").save(grey, "PNG")
    same(call(served, model, grey.getvalue()).json(), best_five(nets.classifier, grey.getvalue()))


@pytest.mark.parametrize("model", ["eager", "overlapped"])
@pytest.mark.long
def test_each_request_of_a_batch_gets_its_own(served: Any, nets: Nets, model: str) -> None:
    files = [photo(name, width) for name in ("china.jpg", "flower.jpg") for width in (640, 330)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda file: call(served, f"/predictions/{model}", file), files))
    for answer, file in zip(answers, files, strict=True):
        same(answer.json(), best_five(nets.classifier, file))


def test_what_is_no_image_is_the_callers_error(served: Any) -> None:
    answer = call(served, "/predictions/scripted", b"no image")
    assert answer.status == 400
    assert answer.json()["message"].startswith("the input is not an image: cannot identify image file")


@pytest.mark.long
def test_how_much_each_pixel_counts(served: Any, nets: Nets) -> None:
    """Captum's integrated gradients, of the class that the request names."""
    from captum.attr import IntegratedGradients

    file = photo("flower.jpg", 330)
    for form, target in (({"body": file}, 0), (multipart(data=file, target=b"3"), 3)):
        answer = call(served, "/explanations/eager", **form)
        assert answer.status == 200, answer.body
        pixels = imagenet_tensor(file)
        expected = IntegratedGradients(nets.classifier).attribute(pixels, target=target, n_steps=15)[0]
        torch.testing.assert_close(torch.tensor(answer.json(), dtype=expected.dtype), expected, rtol=1e-3, atol=1e-6)


# --- image_segmenter, object_detector


@pytest.mark.long
def test_every_pixel_gets_a_class(served: Any, nets: Nets) -> None:
    file = photo("china.jpg")
    with torch.inference_mode():
        shares, classes = torch.softmax(nets.segmenter(imagenet_tensor(file))["out"], dim=1)[0].max(dim=0)
    found = torch.tensor(call(served, "/predictions/segmenter", file).json())
    assert found.shape == (224, 224, 2)
    assert len(classes.unique()) > 1
    assert (found[..., 0] == classes).float().mean() > 0.999
    torch.testing.assert_close(found[..., 1], shares, rtol=1e-3, atol=1e-4)


def boxes(net: Any, file: bytes) -> list[tuple[str, list[float], float]]:
    with torch.inference_mode():
        (found,) = net([rgb_tensor(file)])
    names = ["person", "tree", "2", "3"]
    rows = zip(found["labels"].tolist(), found["boxes"].tolist(), found["scores"].tolist(), strict=True)
    return [(names[label], box, score) for label, box, score in rows if score >= 0.5]


@pytest.mark.long
def test_boxes_of_images_of_any_size(served: Any, nets: Nets) -> None:
    """Sizes differ within the batch; unlikely boxes are left out."""
    files = [photo("china.jpg"), photo("china.jpg", 200), photo("china.jpg", 330, "PNG")]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda file: call(served, "/predictions/detector", file), files))
    for answer, file in zip(answers, files, strict=True):
        expected = boxes(nets.detector, file)
        assert 0 < len(expected) < (640 // 64) * (427 // 64)
        found = answer.json()
        assert [[next(iter(one)), one[next(iter(one))]] for one in found] == [[name, box] for name, box, _ in expected]
        assert [one["score"] for one in found] == pytest.approx([score for *_, score in expected], rel=1e-3)


# --- text_classifier


def text_shares(net: Any, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        shares: list[float] = torch.softmax(net(torch.tensor(ids), torch.tensor([0])), dim=1)[0].tolist()
    return shares


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<p>The market FELL!</p>", [1, 2, 3, 21, 0]),
        ("Don't panic.", [4, 5, 6, 20, 0]),
        ("Good n\u00e9ws", [7, 9, 0]),
    ],
)
def test_text_in_every_form(served: Any, nets: Nets, text: str, ids: list[int]) -> None:
    """Tags, contractions, accents and marks are gone; words and pairs of words are looked up."""
    ways: list[Callable[[], Reply]] = [
        lambda: call(served, "/predictions/text", text.encode(), content_type="text/plain"),
        lambda: call(served, "/predictions/text", text.encode()),
        lambda: call(served, "/predictions/text", **multipart(data=text.encode())),
        lambda: call(served, "/predictions/text", json.dumps(text).encode(), content_type="application/json"),
        lambda: Reply(200, {}, served.predict("text", text.encode())),
    ]
    for way in ways:
        answer = way()
        assert answer.status == 200, answer.body
        assert list(answer.json()) == [f"kind {at}" for at in range(4)]
        assert list(answer.json().values()) == pytest.approx(text_shares(nets.text, ids), rel=1e-4)


@pytest.mark.long
def test_how_much_the_words_count(served: Any) -> None:
    """A bag of embeddings is one layer for all words: one number, of length 1."""
    answer = call(served, "/explanations/text", b"The market fell")
    assert answer.status == 200, answer.body
    found = answer.json()
    assert found["words"] == ["the", "market", "fell", "the market", "market fell"]
    assert abs(found["importances"]) == pytest.approx(1, rel=1e-3)
