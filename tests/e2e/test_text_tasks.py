"""The tasks of transformers' pipelines, in every API: small models with random weights answer as the pipelines do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest

from e2e.servers import TRANSFORMERS
from support import GUARD_S, ran, with_packages
from ts.protocol.open_inference_pb2 import ModelInferRequest
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

DATA = Path(__file__).parent.parent / "data"
PROGRAM = DATA / "programs" / "task_models.py"
pytestmark = [pytest.mark.external, pytest.mark.slow]
QUESTION, CONTEXT = "Who went?", "Ann Smith went to Rome by train, and Bob stayed at home."
TEXTS = ["a good film", "bad", "Ann Smith lives in Rome, which is a rather long way from here."]
ASKED = {"question": QUESTION, "context": CONTEXT}
#: The models that a KServe flag, or a model's own settings, change.
OTHERS = {
    "chances": ("classes", "predictions: probabilities"),
    "logits": ("classes", "predictions: raw_logits"),
    "tag_chances": ("tags", "predictions: probabilities"),
    "mask_chances": ("masks", "predictions: probabilities"),
}


class Models(NamedTuple):
    """The folder of the models, what they say, and the variables of a server that has the package transformers."""

    folder: Path
    expected: dict[str, Any]
    env: dict[str, str]


@pytest.fixture(scope="module")
def models(client_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("tasks")
    env = with_packages(client_python("transformers"), client_python("sentences"))
    expected = ran(PROGRAM, env, str(folder), QUESTION, CONTEXT, *TEXTS)
    for name, (model, setting) in OTHERS.items():
        (folder / name).mkdir()
        for file in (folder / model).iterdir():
            (folder / name / file.name).symlink_to(file)
        (folder / name / "model-config.yaml").write_text(f"handler: {{{setting}}}\n")
    return Models(folder, expected, env)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    names = sorted(one.name for one in models.folder.iterdir())
    settings = {"env": models.env, "preloaded": TRANSFORMERS, "load_models": ",".join(names)}
    with serving(tmp_path_factory.mktemp("served"), models.folder, settings, []) as server:
        for name in names:
            server.wait_for_log(f"of {name}_1.0 is ready")
        yield server


@pytest.fixture
def url(server: Any) -> str:
    return str(server.http)


def near(value: Any) -> Any:
    """The value, whose numbers may differ by 1e-5."""
    if isinstance(value, dict):
        return {key: near(one) for key, one in value.items()}
    if isinstance(value, list):
        return [near(one) for one in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def post(url: str, path: str, body: Any, status: int = 200) -> Any:
    sent: dict[str, Any] = {"content": body} if isinstance(body, (str, bytes)) else {"json": body}
    answer = httpx.post(f"{url}/{path}", timeout=GUARD_S, **sent)
    assert answer.status_code == status, answer.text
    return answer.json()


def infer(url: str, model: str, **texts: list[str]) -> tuple[list[int], list[Any]]:
    """The shape and the values of MLServer's output."""
    inputs = [{"name": name, "datatype": "BYTES", "shape": [len(one)], "data": one} for name, one in texts.items()]
    (output,) = post(url, f"v2/models/{model}/infer", {"inputs": inputs})["outputs"]
    assert (output["name"], output["datatype"]) == ("output", "BYTES")
    assert output["parameters"]["content_type"] == "hg_jsonlist"
    return output["shape"], [json.loads(one) for one in output["data"]]


def test_predictions_are_those_of_pipelines(server: Any, url: str, models: Models) -> None:
    expected = models.expected
    request = PredictionsRequest(model_name="classes", input={"data": TEXTS[0].encode()})
    with grpc.insecure_channel(server.inference) as channel:
        answer = InferenceAPIsServiceStub(channel).Predictions(request, timeout=GUARD_S)
    assert json.loads(answer.prediction) == near(expected["classes"][0])
    for name in ("classes", "tags"):
        assert post(url, f"predictions/{name}", TEXTS[0]) == near(expected[name][0]), "a text"
        assert post(url, f"predictions/{name}", json.dumps(TEXTS[0])) == near(expected[name][0]), "a text as JSON"
    several = [one[0] for one in expected["classes"]]
    for body in (TEXTS, {"inputs": TEXTS}, {"instances": TEXTS}):
        assert post(url, "predictions/classes", body) == near(several)
    assert post(url, "predictions/tags", TEXTS) == near(expected["tags"])
    asked: dict[str, Any] = {"inputs": TEXTS, "parameters": {"top_k": None}}
    assert post(url, "predictions/classes", asked) == near(expected["all"])
    assert post(url, "predictions/classes", {"text": QUESTION, "text_pair": CONTEXT}) == near(expected["pair"])
    asked = {"inputs": TEXTS, "parameters": {"top_k": 3}}
    assert post(url, "predictions/several", asked) == near(expected["several"])
    asked = {"inputs": TEXTS, "parameters": {"aggregation_strategy": "simple", "ignore_labels": []}}
    assert post(url, "predictions/tags", asked) == near(expected["groups"])
    masked = [f"{text} [MASK] ." for text in TEXTS]
    assert post(url, "predictions/masks", masked[0]) == near(expected["masks"][0])
    assert post(url, "predictions/masks", masked) == near(expected["masks"])
    asked = {"inputs": masked[0], "parameters": {"targets": ["the", "a"], "top_k": 1}}
    assert post(url, "predictions/masks", asked) == near(expected["targets"])


def test_answers_to_questions_are_the_best_spans(url: str, models: Models) -> None:
    short, long = models.expected["questions"]
    assert post(url, "predictions/questions", ASKED) == near(short)
    assert post(url, "predictions/questions", {"inputs": ASKED}) == near(short)
    parts = {name: (None, text) for name, text in ASKED.items()}
    assert httpx.post(f"{url}/predictions/questions", files=parts, timeout=GUARD_S).json() == near(short)
    assert infer(url, "questions", question=[QUESTION] * 2, context=[CONTEXT, CONTEXT * 40])[1] == near([short, long])
    found = post(url, "v1/models/questions:predict", {"instances": [ASKED, {**ASKED, "context": CONTEXT * 40}]})
    assert found["predictions"] == near([short, long])
    parameters = {"top_k": 3, "max_answer_len": 2, "handle_impossible_answer": True}
    several = post(url, "predictions/questions", {"inputs": ASKED, "parameters": parameters})
    assert len(several) == 3 and [one["score"] for one in several] == sorted(
        (s["score"] for s in several), reverse=True
    )
    assert all(len(one["answer"].split()) <= 2 for one in several)


def test_v1_answers_as_kserves_server(url: str, models: Models) -> None:
    def predicted(model: str, texts: list[str]) -> Any:
        return post(url, f"v1/models/{model}:predict", {"instances": texts})["predictions"]

    logits = [np.array(one) for one in models.expected["logits"]["classes"]]
    assert predicted("classes", TEXTS) == [int(one.argmax()) for one in logits]
    assert predicted("logits", TEXTS) == [near(dict(zip("012", one.tolist(), strict=True))) for one in logits]
    chances = [np.exp(one) / np.exp(one).sum() for one in logits]
    found = predicted("chances", TEXTS)
    assert [list(one) for one in found] == [["0", "1", "2"]] * 3
    for one, row in zip(found, chances, strict=True):
        assert all(value == round(value, 4) for value in one.values())
        assert list(one.values()) == pytest.approx(row.tolist(), abs=6e-5)
    tags = [np.array(one) for one in models.expected["logits"]["tags"]]
    assert predicted("tags", TEXTS) == [[one.argmax(-1).tolist()] for one in tags], "of each text's own tokens"
    shares = [np.exp(one) / np.exp(one).sum(-1, keepdims=True) for one in tags]
    for text, of_text in zip(predicted("tag_chances", TEXTS), shares, strict=True):
        assert [list(one.values()) for one in text] == [pytest.approx(one, abs=6e-5) for one in of_text.tolist()]
    masked = [f"{text} [MASK] ." for text in TEXTS]
    assert predicted("masks", masked) == [one[0]["token_str"] for one in models.expected["masks"]]
    for text, best in zip(predicted("mask_chances", masked), models.expected["masks"], strict=True):
        (words,) = text
        assert float(words[best[0]["token"]][str(best[0]["token"])]) == pytest.approx(best[0]["score"], abs=6e-5)


def test_open_inference_answers_as_mlservers_runtime(server: Any, url: str, models: Models) -> None:
    classes = [one[0] for one in models.expected["classes"]]
    for name in ("args", "array_inputs", "text_inputs", "inputs", "mine"):
        assert infer(url, "classes", **{name: TEXTS}) == ([3, 1], near(classes))
    tags = models.expected["tags"]
    assert infer(url, "tags", array_inputs=TEXTS) == ([3, 1], near(tags))
    assert tags[2] and infer(url, "tags", args=TEXTS[2:]) == ([len(tags[2]), 1], near(tags[2])), "of one call"
    request = ModelInferRequest(model_name="classes")
    request.inputs.add(name="args", datatype="BYTES", shape=[3]).contents.bytes_contents.extend(
        text.encode() for text in TEXTS
    )
    with grpc.insecure_channel(server.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    assert [json.loads(one) for one in answer.outputs[0].contents.bytes_contents] == near(classes)
    generated = post(url, "v2/models/classes/generate", {"text_input": TEXTS[0]})
    assert json.loads(generated["output"]) == near(classes[0])
    (output,) = httpx.get(f"{url}/v2/models/classes").json()["outputs"]
    assert (output["name"], output["datatype"]) == ("output", "BYTES")


@pytest.mark.parametrize("recorded", json.loads((DATA / "text_tasks" / "answers.json").read_text()))
def test_answers_are_those_of_the_other_servers(url: str, recorded: dict[str, Any]) -> None:
    """Which were asked the same (tests/data/text_tasks)."""
    found, expected = post(url, recorded["path"], recorded["body"]), recorded["answer"]
    if recorded["server"] == "kserve":
        assert found == {"predictions": near(expected)}
    else:
        for outputs in (found["outputs"], expected):
            for output in outputs:
                output["data"] = [json.loads(one) for one in output["data"]]
        assert found["outputs"] == near(expected)


def test_requests_side_by_side_keep_their_own_answers(url: str, models: Models) -> None:
    def ask(at: int) -> Any:
        return post(url, "predictions/classes", TEXTS[at % 3])

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(48)))
    assert found == [near(models.expected["classes"][at % 3]) for at in range(48)]


def test_tensors_get_the_outputs_of_forward(url: str, models: Models) -> None:
    tokens = {"input_ids": [2, 6, 3], "attention_mask": [1, 1, 1]}
    (expected,) = post(url, "v1/models/classes:predict", {"instances": [tokens]})["predictions"]
    assert len(expected) == 3
    inputs = [{"name": n, "datatype": "INT64", "shape": [1, 3], "data": one} for n, one in tokens.items()]
    (output,) = post(url, "v2/models/classes/infer", {"inputs": inputs})["outputs"]
    assert (output["name"], output["data"]) == ("logits", near(expected))
    for body in ([tokens["input_ids"]], {"inputs": {name: [one] for name, one in tokens.items()}}, "2,6,3\n"):
        assert post(url, "predictions/classes", body) == near([expected])


def test_vllms_call(url: str, models: Models) -> None:
    found = post(url, "classify", {"model": "classes", "input": TEXTS})
    for one, best, logits in zip(
        found["data"], models.expected["classes"], models.expected["logits"]["classes"], strict=True
    ):
        assert one["label"] == best[0]["label"] and max(one["probs"]) == near(best[0]["score"])
        assert np.argsort(one["probs"]).tolist() == np.argsort(logits).tolist() and one["num_classes"] == 3
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 6
    refused = post(url, "v1/chat/completions", {"model": "tags", "messages": [{"role": "user", "content": "a"}]}, 404)
    assert "a model for token-classification has no /v1/chat/completions" in refused["error"]["message"]


def test_pairs_are_scored_with_their_types(url: str, models: Models) -> None:
    found = post(url, "score", {"model": "pairs", "text_1": QUESTION, "text_2": TEXTS})["data"]
    expected = [1 / (1 + np.exp(-one)) for one in models.expected["logits"]["pairs"]]
    assert [one["score"] for one in found] == near(expected)


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        ("classes", {"inputs": "a", "parameters": {"top": 1}}, "top is no parameter of text-classification"),
        ("classes", {"inputs": "a", "parameters": {"top_k": 0}}, "top_k is null, or a whole number"),
        ("classes", {"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "one of sigmoid, softmax, none"),
        ("classes", {"inputs": "a", "parameters": 5}, "parameters is a JSON object"),
        ("classes", {"inputs": []}, "a request has 1 to 2048 texts"),
        ("classes", {"inputs": ["a"] * 2049}, "a request has 1 to 2048 texts"),
        ("tags", {"inputs": "a", "parameters": {"aggregation_strategy": "all"}}, "one of none, simple, first"),
        ("masks", {"inputs": "no mask"}, "No mask_token"),
        ("masks", {"inputs": "a [MASK]", "parameters": {"top_k": 999}}, "top_k is at most"),
        ("masks", {"inputs": "a [MASK]", "parameters": {"targets": []}}, "targets is a list"),
        ("masks", {"inputs": "[MASK] " * 400, "parameters": {"top_k": 99}}, "39600 words for 400 masks, at most 20000"),
        ("questions", {"inputs": "a"}, "a question is an object with question and context"),
        ("questions", {"inputs": {"question": "word " * 400, "context": "b"}}, "question has"),
        ("questions", {"inputs": {"question": "a", "context": " "}}, "aren't empty"),
        ("questions", "a text", "the texts are two, question and context"),
    ],
)
def test_what_cannot_be_answered_is_named(url: str, model: str, body: Any, says: str) -> None:
    assert says in json.dumps(post(url, f"predictions/{model}", body, 400))
    assert post(url, "predictions/classes", TEXTS[1])[0]["label"]


def test_refusals_of_v1_and_of_tensors(url: str) -> None:
    asked = {"instances": TEXTS, "parameters": {"top_k": 2}}
    assert "predictions of V1 have no parameters" in json.dumps(post(url, "v1/models/classes:predict", asked, 400))
    texts = {"datatype": "BYTES", "shape": [1], "data": ["a"]}
    two = {"inputs": [{"name": "a", **texts}, {"name": "b", **texts}]}
    assert "the texts are one input or two" in json.dumps(post(url, "v2/models/classes/infer", two, 400))
    uneven = [{"name": "question", **texts}, {"name": "context", **texts, "shape": [2], "data": ["a", "b"]}]
    refused = post(url, "v2/models/questions/infer", {"inputs": uneven}, 400)
    assert "different numbers of texts" in json.dumps(refused)
    found = post(url, "v1/models/mask_chances:predict", {"instances": ["[MASK] " * 500] * 20}, 400)
    assert "for 10000 masks, at most" in json.dumps(found)
    wrong = post(url, "v1/models/questions:predict", {"instances": [{"q": "a", "context": "b"}]}, 400)
    assert "the texts are two, question and context" in json.dumps(wrong)


def test_long_texts_are_cut_to_what_the_model_takes(url: str) -> None:
    for name in ("classes", "tags"):
        assert post(url, f"predictions/{name}", "a good film " * 1000)
    assert post(url, "predictions/masks", "[MASK] " + "word " * 3000)


def test_a_named_task_that_the_weights_are_not_for_is_refused(models: Models, tmp_path: Path, serving: Any) -> None:
    words = ["--model_name=m", f"--model_dir={models.folder / 'tags'}", "--task=question_answering"]
    with serving(tmp_path, None, {"env": models.env, "preloaded": TRANSFORMERS}, ["--ncs", *words]) as server:
        server.wait_for_log("2 weights for question-answering aren't in the folder and would be random")


def test_kserves_command_line_and_mlservers_folder(models: Models, tmp_path: Path, serving: Any) -> None:
    folder = models.folder / "classes"
    words = ["--profile=kserve", "--model_name=m", f"--model_dir={folder}", "--return_probabilities"]
    with serving(tmp_path, None, {"env": models.env, "preloaded": TRANSFORMERS}, words) as server:
        server.wait_for_log("of m_1.0 is ready")
        url = f"http://127.0.0.1:{server.port('http_inference')}"
        assert post(url, "invocations", TEXTS[0]) == near(models.expected["classes"][0])
        found = post(url, "v1/models/m:predict", {"instances": TEXTS})["predictions"]
        assert [max(one.values()) for one in found] == [
            pytest.approx(one[0]["score"], abs=6e-5) for one in models.expected["classes"]
        ]
    place = tmp_path / "store" / "mine"
    place.mkdir(parents=True)
    extra = {"task": "question-answering", "pretrained_model": str(models.folder / "questions"), "device": -1}
    settings = {"name": "qa", "implementation": "mlserver_huggingface.HuggingFaceRuntime"}
    (place / "model-settings.json").write_text(json.dumps({**settings, "parameters": {"extra": extra}}))
    with serving(
        tmp_path, tmp_path / "store", {"env": models.env, "preloaded": TRANSFORMERS, "load_models": "all"}, ["--ncs"]
    ) as server:
        server.wait_for_log("of qa_1.0 is ready")
        shape, (found,) = infer(server.http, "qa", question=[QUESTION], context=[CONTEXT])
        assert (shape, found) == ([1, 1], near(models.expected["questions"][0]))
