"""Workflow specifications: settings and their sources, graphs, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.errors import InvalidGraph, InvalidWorkflow
from ts_frontend.graphs.graph import NODES_MAX, make_graph
from ts_frontend.workflows.specification import WorkflowSpec, parse_spec


def parse(text: str, *, has_handler: bool = True) -> WorkflowSpec:
    return parse_spec(yaml.safe_load(text), has_handler=has_handler)


# --- graphs


@st.composite
def layered(draw: st.DrawFn) -> dict[str, list[str]]:
    """Graphs with one start: every node but the first has at least one parent among those before it."""
    count = draw(st.integers(1, 12))
    edges: dict[str, list[str]] = {f"n{number}": [] for number in range(count)}
    for number in range(1, count):
        for parent in draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=3)):
            edges[f"n{parent}"].append(f"n{number}")
    names = draw(st.permutations(list(edges)))
    coin: st.SearchStrategy[Any] = st.booleans()
    return {name: edges[name] for name in names if edges[name] or draw(coin) or count == 1}


@given(layered())
def test_parents_and_children_say_the_same(edges: dict[str, list[str]]) -> None:
    graph = make_graph(edges)
    assert graph.starts == ("n0",)
    pairs = {(parent, child) for parent, children in edges.items() for child in children}
    assert pairs == {(parent, child) for parent, children in graph.children.items() for child in children}
    assert pairs == {(parent, child) for child, parents in graph.parents.items() for parent in parents}
    assert set(graph.leaves) == {name for name, children in graph.children.items() if not children}


@given(layered(), st.data())
def test_any_edge_back_is_a_cycle_that_is_named(edges: dict[str, list[str]], data: st.DataObject) -> None:
    graph = make_graph(edges)
    last = data.draw(st.sampled_from(sorted(graph.children)))
    ancestors, found = {last}, [last]
    while found:
        new = set(graph.parents[found.pop()]) - ancestors
        ancestors |= new
        found += new
    first = data.draw(st.sampled_from(sorted(ancestors)))
    broken = {**edges, last: [*edges.get(last, []), first]}
    with pytest.raises(InvalidGraph, match="cycle: ") as error:
        make_graph(broken)
    cycle = error.value.message.partition("cycle: ")[2].split(" -> ")
    assert cycle[0] == cycle[-1] and len(cycle) > 1
    assert all(child in broken.get(parent, []) for parent, child in zip(cycle, cycle[1:], strict=False))


def test_a_name_that_is_said_twice_is_one_edge() -> None:
    assert make_graph({"a": ["b", "b"]}).parents == {"a": (), "b": ("a",)}


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({}, "no nodes"),
        ({"a": ["a"]}, "cycle: a -> a"),
        ({"a": ["c"], "b": ["c"]}, "any of: a, b"),
        ({"a": ["b"], "c": ["d"], "d": ["c"]}, "cycle: "),
        ({"a": [f"n{number}" for number in range(NODES_MAX)]}, f"at most {NODES_MAX}"),
    ],
)
def test_graphs_that_are_refused(edges: dict[str, list[str]], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message):
        parse_spec({"dag": edges}, has_handler=True)


# --- settings


FULL = """
models:
    min-workers: 2
    max-workers: 3
    batch-size: 4
    max-batch-delay: 5
    retry-attempts: 6
    timeout-ms: 7
    own:
        {url: own.mar, min-workers: 1, max-workers: 8, batch-size: 9, max-batch-delay: 10,
         retry-attempts: 0, timeout-ms: 12}
    shared: {url: shared.mar}
dag:
    own: [shared]
    shared: [fun]
"""


def test_a_nodes_own_setting_beats_the_shared_one() -> None:
    spec = parse(FULL)
    own, shared, fun = (spec.nodes[name] for name in ("own", "shared", "fun"))
    assert (own.url, own.min_workers, own.max_workers, own.batch_size) == ("own.mar", 1, 8, 9)
    assert (own.max_batch_delay_ms, own.retry_attempts, own.timeout_ms) == (10, 0, 12)
    assert (shared.min_workers, shared.max_workers, shared.batch_size) == (2, 3, 4)
    assert (shared.max_batch_delay_ms, shared.max_batch_delay_set) == (5, True)
    assert (shared.retry_attempts, shared.timeout_ms) == (6, 7)
    assert (fun.url, fun.max_workers, fun.batch_size, fun.max_batch_delay_ms) == (None, 1, 1, 0)
    assert (fun.retry_attempts, fun.timeout_ms) == (6, 7)
    assert spec.dag_text == "{own=[shared], shared=[fun]}"
    assert spec.warnings == ()


def test_defaults_are_those_of_torchserve() -> None:
    spec = parse("models: {m: {url: m.mar}}\ndag: {m: []}")
    for node in (spec.nodes["m"], spec.defaults):
        assert (node.min_workers, node.max_workers, node.batch_size, node.max_batch_delay_ms) == (1, 1, 1, 50)
        assert (node.retry_attempts, node.timeout_ms, node.max_batch_delay_set) == (1, 10_000, False)
    assert (spec.nodes["m"].name, spec.nodes["m"].url) == ("m", "m.mar")


def test_without_max_workers_there_are_min_workers() -> None:
    assert parse("models: {min-workers: 3, m: {url: m}}\ndag: {m: }").nodes["m"].max_workers == 3


def test_functions_alone_need_no_models() -> None:
    assert list(parse("dag: {a: [b, '', null]}").nodes) == ["a", "b"]


def test_warnings_name_what_is_left_out() -> None:
    spec = parse("models: {m: {url: m, batch_size: 2}, unused: {url: u}}\ndag: {m: []}")
    assert spec.warnings == (
        "model unused is not in dag: it is left out",
        "model m: there is no setting batch_size; batch-size is one",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "dag is missing"),
        ("models: [m]\ndag: {m: []}", "models must be"),
        ("dag: [a]", "dag is missing"),
        ("dag: {a: b}", "node a: its children must be a list, not 'b'"),
        ("dag: {a: [[b]]}", "node .*'b'.*must be a text"),
        ("dag: {1: []}", "node 1: .*must be a text"),
        ("dag: {a/b: []}", "node 'a/b'"),
        ("dag: {not-a-name: []}", "node not-a-name is not in models, and can't be a function"),
        ("models: {m: {}}\ndag: {m: []}", "model m has no url"),
        ("models: {m: {url: 3}}\ndag: {m: []}", "model m has no url"),
        ("models: {batchsize: 3}\ndag: {m: []}", "batchsize must have a url .*did you mean batch-size"),
        ("models: {m: {url: m, batch-size: 0}}\ndag: {m: []}", "batch-size must be a whole number, at least 1"),
        ("models: {m: {url: m, timeout-ms: true}}\ndag: {m: []}", "model m: timeout-ms"),
        ("models: {timeout-ms: 1.5}\ndag: {m: []}", "models: timeout-ms"),
        ("models: {m: {url: m, min-workers: 3, max-workers: 2}}\ndag: {m: []}", "min-workers 3 is more than"),
    ],
)
def test_what_is_refused_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=message):
        parse(text)


def test_a_function_needs_a_handler_file() -> None:
    with pytest.raises(InvalidWorkflow, match="node a is not in models.*no handler file"):
        parse("dag: {a: []}", has_handler=False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["models", "dag", "a", "b", "url", "batch-size"]), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_nothing_but_a_spec_or_its_refusal_comes_out(tree: Any) -> None:
    if isinstance(tree, dict):
        try:
            parse_spec(tree, has_handler=True)
        except InvalidWorkflow as error:
            assert error.message
