"""The names that handlers import from `ts.utils.util`."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from ts.utils import util


def module_of(source: str) -> types.ModuleType:
    module = types.ModuleType("model_under_test")
    exec(compile(source, "model_under_test", "exec"), module.__dict__)  # noqa: S102 - the test's own text
    return module


def test_classes_defined_in_a_module() -> None:
    module = module_of("from pathlib import Path\nclass A: pass\nclass B(A): pass\nC = 3")
    assert [found.__name__ for found in util.list_classes_from_module(module)] == ["A", "B"]
    assert [found.__name__ for found in util.list_classes_from_module(module, module.B)] == ["B"]


def mapping_of(tmp_path: Path, content: object) -> dict[str, str] | None:
    path = tmp_path / "index_to_name.json"
    path.write_text(json.dumps(content))
    return util.load_label_mapping(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"0": "cat", "1": "dog"}, {"0": "cat", "1": "dog"}),
        ({"0": ["n02123045", "tabby"]}, {"0": "tabby"}),
        ({"object_type_names": ["a", "b"]}, {"0": "a", "1": "b"}),
        ({}, {}),
    ],
)
def test_label_files(tmp_path: Path, content: object, expected: dict[str, str]) -> None:
    assert mapping_of(tmp_path, content) == expected


@pytest.mark.parametrize("content", [["cat"], {"0": 7}, {"0": []}, {"0": ["a", 7]}])
def test_label_files_of_another_shape(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        mapping_of(tmp_path, content)


def test_missing_label_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert util.load_label_mapping(tmp_path / "index_to_name.json") is None
    assert "index_to_name.json is missing" in caplog.text


def test_classes_without_label_are_named_by_index() -> None:
    assert util.map_class_to_label([[0.9, 0.1]]) == [{"0": 0.9, "1": 0.1}]
    assert util.map_class_to_label([[0.9, 0.1]], {"0": "cat"}) == [{"cat": 0.9, "1": 0.1}]
    assert util.map_class_to_label([]) == []


def test_yaml_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("handler: {profile: true}")
    assert util.get_yaml_config(path) == {"handler": {"profile": True}}
    path.write_text("")
    assert util.get_yaml_config(path) == {}
    path.write_text("- a")
    with pytest.raises(ValueError, match="mapping, not list"):
        util.get_yaml_config(path)


def test_known_backends_need_no_torch() -> None:
    before = set(sys.modules)
    assert util.check_valid_pt2_backend("inductor")
    assert "torch._dynamo" not in set(sys.modules) - before


def test_a_deprecated_function_works_and_warns_where_it_is_called() -> None:
    @util.deprecated("2.0", "elsewhere", DeprecationWarning)
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    with pytest.warns(DeprecationWarning, match="^add is deprecated in 2.0 and moved to elsewhere$") as caught:
        assert add(2, b=3) == 5
    assert caught[0].filename == __file__
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
