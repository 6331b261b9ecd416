"""plan.json: what is read comes back, and what is wrong is named in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from narrows.protocols.config.deployment import Deployment, parse
from narrows.protocols.errors import UsageError


def grid() -> dict[str, Any]:
    return {
        "version": 1,
        "hosts": {"leipzig": "127.0.0.1", "oslo": "127.0.0.2"},
        "stages": [
            {"host": "leipzig", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8", "shards": 2}},
            {"host": "oslo", "port": 5555, "flags": {"sync": "bsp"}},
        ],
        "edges": [{"forward": "int8", "backward": "fp16"}],
        "processes": [
            {"stage": stage, "replica": replica, "host": ["leipzig", "oslo"][replica], "port": 6000 + stage}
            for replica in range(2)
            for stage in range(2)
        ],
        "lease": 5,
    }


def read(change: Callable[[dict[str, Any]], Any] = lambda plan: None) -> Deployment:
    plan = grid()
    change(plan)
    return parse(json.dumps(plan))


def test_a_plan_says_who_is_where() -> None:
    plan = read()
    assert plan.replicas == 2 and [(p.stage, p.replica) for p in plan.on("oslo")] == [(0, 1), (1, 1)]
    assert [plan.address(p) for p in plan.pipeline(1)] == ["tcp://127.0.0.2:6000", "tcp://127.0.0.2:6001"]
    assert plan.served("leipzig") == [0] and plan.settings(plan.stages[1], 2) == {
        "sync": "bsp",
        "workers": 2,
        "lease": 5,
        "checkpoint_clocks": 100,
    }
    assert (
        parse(plan.text()) == plan and parse(plan.text()).digest == plan.digest != read(lambda p: p.pop("lease")).digest
    )


def test_layers_are_those_of_the_plan_or_even() -> None:
    assert read().layers(5) == [range(2), range(2, 5)]
    plan = read(lambda p: [stage.update(layers=3 - 2 * i) for i, stage in enumerate(p["stages"])])
    assert plan.layers(4) == [range(3), range(3, 4)]
    for wrong, total in ((plan, 5), (read(), 1)):
        with pytest.raises(UsageError, match=f"layers, and the model has {total}; each stage needs one"):
            wrong.layers(total)


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda p: p.update(version=2), "it has version 2, and this release reads 1"),
    (lambda p: p.update(more=1), "the plan has the fields hosts, stages"),
    (lambda p: p["stages"][0].update(port="5555"), r'port of stages\[0\] is "5555", and no int'),
    (lambda p: p["stages"][0].pop("host"), r"stages\[0\] lacks a field"),
    (lambda p: p["processes"].pop(), "each replica has one process for each stage"),
    (lambda p: p.update(processes=[], stages=[], edges=[]), "each replica has one process for each stage"),
    (lambda p: p["edges"].append({}), "2 stages have 1 edges between them, and the plan has 2"),
    (lambda p: p["edges"][0].update(forward="topk:0.1"), "topk:0.1 codes no edge; there are dense, fp16, int8"),
    (lambda p: p["edges"][0].update(in_flight=-1), "in_flight of an edge is from 0 to 256 micro-batches, not -1"),
    (lambda p: p["stages"][0].update(layers=3), "layers is the number of layers of each stage"),
    (lambda p: p["stages"][0].update(host="rome"), "host rome has no address"),
    (lambda p: p["processes"][0].update(port=5556), "port leipzig:5556 is given twice"),
    (lambda p: p["processes"][0].update(port=99999), "write it as tcp://HOST:PORT"),
    (
        lambda p: p["stages"][0]["flags"].update(workers=3),
        r"stages\[0\] has the flag workers, which such a server does not take",
    ),
    (lambda p: p["stages"][0]["flags"].update(staleness="many"), "a flag of stages.0. has the wrong type"),
    (lambda p: p["stages"][0]["flags"].update(sync="fast"), "--sync fast: unknown mode"),
    (lambda p: p.update(lease=0), "lease is a number of seconds above 0"),
    (lambda p: p["processes"][0].update(key="a" * 64), "key is the public key of each process"),
    (lambda p: p["hosts"].update(oslo="10.0.0.2"), "anyone who reaches these hosts could join"),
]


def tree() -> dict[str, Any]:
    """A cluster of two, and a worker beside it."""
    names = ["a", "b", "c"]
    return {
        "version": 1,
        "hosts": {name: f"10.0.0.{number}" for number, name in enumerate(names)},
        "stages": [{"host": "a", "port": 5555, "flags": {"sync": "ssp"}}],
        "processes": [{"stage": 0, "replica": i, "host": name, "port": 6000} for i, name in enumerate(names)],
        "clusters": [{"host": "a", "port": 5556, "flags": {"sync": "bsp"}, "replicas": [0, 1]}],
        "samples": [3, 2, 1],
        "keys": "KEYS",
    }


def test_servers_below_one_another_know_who_is_above_and_which_keys_they_let_in() -> None:
    plan = parse(json.dumps(tree()))
    assert parse(plan.text()) == plan
    root, cluster = plan.servers()
    workers = [("c", "worker"), ("a-cluster", "cluster")]
    assert (root.name, root.above, root.children, root.keys) == ("stage 0", "", workers, "KEYS")
    assert root.flags[:6] == ["--bind", "tcp://0.0.0.0:5555", "--keys", "KEYS", "--sync", "ssp"]
    assert (cluster.name, cluster.above, cluster.keys) == ("cluster 0", "tcp://10.0.0.0:5555", "KEYS-a-cluster")
    assert cluster.children == [("a", "worker"), ("b", "worker")]
    assert " --parent tcp://10.0.0.0:5555 --parent-key KEYS/a-cluster.key " in " ".join(cluster.flags)
    assert [plan.address(plan.server_of(process)) for process in plan.processes] == [
        "tcp://10.0.0.0:5556", "tcp://10.0.0.0:5556", "tcp://10.0.0.0:5555",
    ]  # fmt: skip
    assert [plan.key_of(process) for process in plan.processes] == [
        "KEYS-a-cluster/a.key", "KEYS-a-cluster/b.key", "KEYS/c.key",
    ]  # fmt: skip
    assert plan.handed_over() == [("KEYS/c.key", "a", "c"), ("KEYS-a-cluster/b.key", "a", "b")]
    with_guest = parse(json.dumps(tree() | {"clusters": [], "guests": [{"host": "b", "port": 5555}]}))
    assert with_guest.handed_over() == [("KEYS/c.key", "a", "c"), ("KEYS", "a", "b")]
    twice = [{"host": "a", "port": 5556 + i, "flags": {"sync": "bsp"}, "replicas": [i]} for i in range(2)]
    names = [server.keys for server in parse(json.dumps(tree() | {"clusters": twice})).servers()]
    assert names == ["KEYS", "KEYS-a-cluster", "KEYS-a-cluster2"]
    *_, guest = with_guest.servers("OTHER")
    assert guest.flags == [
        *("--bind", "tcp://0.0.0.0:5555", "--keys", "OTHER", "--join", "tcp://10.0.0.0:5555", "--shards", "1"),
    ]


FELLED: list[tuple[dict[str, Any], str]] = [
    ({"clusters": [{"host": "a", "port": 5556, "replicas": [0, 3]}]}, "each of the replicas 0 to 2 is in one cluster"),
    ({"clusters": [{"host": "a", "port": 5556, "replicas": [1, 1]}]}, "each of the replicas 0 to 2 is in one cluster"),
    ({"clusters": [{"host": "a", "port": 5556, "replicas": [[]]}]}, "each of the replicas 0 to 2 is in one cluster"),
    ({"clusters": [{"host": "a", "port": 5556}]}, "a cluster without replicas"),
    ({"clusters": [{"host": "a", "port": 5555, "replicas": [0]}]}, "port a:5555 is given twice"),
    ({"guests": [{"host": "b", "port": 5555}]}, "do not move to guests"),
    ({"clusters": [], "guests": [{"host": "b", "port": 5555, "flags": {"sync": "bsp"}}]}, "has the flag sync"),
    ({"samples": [1, 2]}, "samples has a number above 0 for each of 3 replicas"),
    ({"keys": ""}, "anyone who reaches these hosts could join"),
]


@pytest.mark.parametrize(("change", "why"), FELLED)
def test_a_tree_that_is_wrong_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(json.dumps(tree() | change))


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_a_plan_that_is_wrong_is_refused(change: Callable[[dict[str, Any]], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(change)


def test_a_host_that_the_plan_lacks_and_text_that_is_no_plan() -> None:
    with pytest.raises(UsageError, match="--host rome: the plan has leipzig, oslo"):
        read().on("rome")
    for text in ("{", "[]", '{"version": 1}', "[" * 100_000):
        with pytest.raises(UsageError, match="--plan"):
            parse(text)
