"""Parameters whose values are on their way: each use waits for the parts that it needs, and for no other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from narrows.worker.model import awaited_parameters
from narrows.worker.model.awaited_parameters import AwaitedParameters, why_not
from narrows.worker.model.flat import FlatModel

PARTS = [(0, 4), (4, 10), (10, 15), (15, 17)]  # of the keys of `model`: the second tensor is in two parts


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))  # 6 + 3 + 6 + 2 keys


class Coming:
    """New values 0, 1, 2, ... of all keys, of which each wait lets one more part come."""

    def __init__(self) -> None:
        self.net = model()
        self.flat = FlatModel(self.net, torch.optim.SGD(self.net.parameters(), lr=1.0))
        self.awaited = AwaitedParameters(self.flat, self.wait, self.wait_all)
        self.parts = list(PARTS)
        self.flat.written()
        self.awaited.begin()

    def come(self) -> None:
        begin, end = self.parts.pop(0)
        with torch._C.DisableTorchFunctionSubclass():
            self.flat.write_keys(begin, np.arange(begin, end, dtype=np.float32))
        self.awaited.arrived(begin, end)

    def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self.come()

    def wait_all(self) -> None:
        while self.parts:
            self.come()
        self.awaited.end()


def whole(net: nn.Module) -> list[float]:
    return [float(value) for p in net.parameters() for value in p.detach().reshape(-1)]


USES: dict[str, tuple[int, Callable[[nn.Sequential, list[nn.Parameter]], Any]]] = {
    # parts that are left, and a use
    "the forward pass of the first layer": (2, lambda net, p: net[0](torch.ones(2))),
    "the second layer": (0, lambda net, p: net[1](torch.ones(3))),
    "an operation": (2, lambda net, p: p[0] * 2),
    "a method": (2, lambda net, p: p[0].sum()),
    "a list": (2, lambda net, p: torch.cat([p[0].view(-1), p[1]])),
    "data": (2, lambda net, p: p[0].data.numpy().copy()),
    "a write": (2, lambda net, p: p[0].detach().fill_(1.0)),
    "a foreach": (0, lambda net, p: torch._foreach_mul([*p], 2.0)),
    "text": (2, lambda net, p: repr(p[0])),
    "an item": (2, lambda net, p: p[0][0, 0].item()),
    "the address": (2, lambda net, p: p[0].data_ptr()),
    "copy": (2, lambda net, p: copy.deepcopy(p[0])),
    "copy of the model": (0, lambda net, p: copy.deepcopy(net)),
    "pickle": (0, lambda net, p: pickle.dumps(net)),
    "state_dict": (0, lambda net, p: net.state_dict()),
    "a vector": (0, lambda net, p: nn.utils.parameters_to_vector(p)),
    "torch.func": (0, lambda net, p: torch.func.functional_call(net, dict(net.named_parameters()), torch.ones(2))),
    "loading": (0, lambda net, p: net.load_state_dict(model().state_dict())),
    "a norm": (0, lambda net, p: torch.nn.utils.get_total_norm([*p])),
    "the gradient": (4, lambda net, p: p[0].grad),
    "a gradient that is set": (4, lambda net, p: setattr(p[0], "grad", torch.zeros(3, 2))),
    "zero_grad": (4, lambda net, p: torch.optim.SGD(p, lr=1.0).zero_grad()),
    "zero_grad in place": (4, lambda net, p: torch.optim.SGD(p, lr=1.0).zero_grad(set_to_none=False)),
    "the shape": (4, lambda net, p: (p[0].shape, p[0].numel(), p[0].dim(), p[0].dtype, len(p[0]), p[0].device)),
    "train and eval": (4, lambda net, p: (net.train(), net.eval())),
    "a count": (4, lambda net, p: sum(each.numel() for each in net.parameters() if each.requires_grad)),
}


@pytest.mark.parametrize("name", USES)
def test_a_use_waits_for_its_own_parts(name: str) -> None:
    coming, (left, use) = Coming(), USES[name]
    use(coming.net, [*coming.net.parameters()])
    assert len(coming.parts) == left
    if "write" not in name and name != "loading":
        assert whole(coming.net) == [*range(17)]


def test_what_a_use_gets_are_the_new_values() -> None:
    coming = Coming()
    first, second, third, fourth = coming.net.parameters()
    assert first.tolist() == [[0, 1], [2, 3], [4, 5]] and len(coming.parts) == 2
    assert copy.deepcopy(second).tolist() == [6, 7, 8] and type(copy.deepcopy(second)) is nn.Parameter
    assert type(fourth) is not nn.Parameter and isinstance(fourth, nn.Parameter)
    assert third.detach().numpy().tolist() == [[9, 10, 11], [12, 13, 14]] and len(coming.parts) == 1
    restored = pickle.loads(pickle.dumps(fourth))
    assert restored.tolist() == [15, 16] and type(restored) is type(fourth) is nn.Parameter


def test_a_part_that_comes_twice_counts_once() -> None:
    coming = Coming()
    coming.come()
    coming.parts.insert(0, PARTS[0])  # [0, 4) again, of a tensor of 6 keys
    coming.come()
    first = next(coming.net.parameters())
    assert type(first) is not nn.Parameter
    assert first.sum().item() == 15


def test_after_other_parts_a_use_waits_for_all() -> None:
    coming = Coming()
    coming.come()
    coming.awaited.recount()
    coming.parts = [(0, 9), (9, 17)]
    assert next(coming.net.parameters()).sum().item() == 15
    assert coming.parts == [] and not coming.awaited.pending
    assert all(type(each) is nn.Parameter for each in coming.net.parameters())


def test_values_that_come_change_no_version_and_a_write_of_the_script_does() -> None:
    coming = Coming()
    one, other = coming.net
    coming.flat.written()
    loss = one(torch.ones(2)).sum()
    saved = other(torch.ones(3)).sum()  # these graphs have new values, and may be used once all have come
    coming.awaited.use_all()
    (loss + saved).backward()
    assert coming.flat.overwritten() == ""
    with torch.no_grad():
        coming.net.get_parameter("1.bias").add_(1.0)
    assert coming.flat.overwritten() == "1.bias"


def test_a_graph_of_values_before_cannot_be_used_any_more() -> None:
    coming = Coming()
    coming.awaited.use_all()
    x = torch.ones(2, requires_grad=True)
    loss = coming.net[1](coming.net[0](x)).sum()
    coming.parts = list(PARTS)
    coming.awaited.begin()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_fork_waits_for_all() -> None:
    coming = Coming()
    awaited_parameters._before_fork()
    assert not coming.awaited.pending and coming.parts == []


def test_an_error_of_the_wait_comes_out_of_the_use_again_and_again() -> None:
    coming = Coming()

    def lost(done: Callable[[], bool]) -> None:
        raise ConnectionError("the server is lost")

    coming.awaited._wait = lost
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the server is lost"):
            coming.net(torch.ones(2))


class Own(nn.Parameter):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_cannot_be_awaited_is_found() -> None:
    def of(net: nn.Module) -> str:
        return why_not(FlatModel(net, torch.optim.SGD(net.parameters(), lr=1.0)))

    assert of(model()) == ""
    net = model()
    net[0].weight = Own(torch.zeros(3, 2))
    assert "class" in of(net)
    assert "TorchScript" in of(torch.jit.trace(model(), torch.ones(2)))
