"""Which cores preprocess for a DataLoader."""

from __future__ import annotations

import pytest

from offload.errors import ConfigError
from offload.loader.job.node_choice import NodeChoice
from offload.model.placement import NodeResources


def node(name: str, cpus: float) -> NodeResources:
    return NodeResources(name=name, node_id=name, cpus=cpus, store_bytes=1e9)


NODES = [node("home", 2), node("a", 3), node("b", 0)]


@pytest.mark.parametrize(
    ("choice", "cores"), [("all", "home home a a a"), ("other_nodes", "a a a"), ("this_node", "home home")]
)
def test_the_choice_selects_nodes(choice: str, cores: str) -> None:
    assert NodeChoice(choice=choice, home="home").cores(NODES, {}).nodes == tuple(cores.split())


def test_without_other_nodes_and_without_free_cpus_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"placement='other_nodes' leaves no node .* placement=\"all\""):
        NodeChoice(choice="other_nodes", home="home").cores(NODES[:1], {})
    with pytest.raises(ConfigError, match="no CPU is free to preprocess"):
        NodeChoice(choice="all", home="b").cores(NODES[2:], {})


def test_it_follows_nodes_that_join_and_leave() -> None:
    choice = NodeChoice(choice="all", home="home")
    cores = choice.cores(NODES[:2], {})
    grown = choice.follow(cores, joined=[node("c", 1)], gone={"a"}, alive=[NODES[0], node("c", 1)])
    assert grown.nodes == ("home", "home", "c")
    assert set(grown.stores) == {"home", "c"}
    assert choice.follow(grown, joined=[], gone={"home", "c"}, alive=[]).nodes == ()


def test_a_node_that_the_choice_leaves_out_stays_out_when_it_joins() -> None:
    choice = NodeChoice(choice="this_node", home="home")
    cores = choice.cores(NODES, {})
    assert choice.follow(cores, joined=[node("c", 1)], gone=set(), alive=[*NODES, node("c", 1)]).nodes == cores.nodes
