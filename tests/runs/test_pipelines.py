"""PyTorch's own schedules over a PipelineGroup, against the model in one piece. Each stage is a thread of this process, with
sockets and a world of torch.distributed of its own."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit import reference_payload
from kit.in_process import together
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from narrows.compression.value_codings import EDGE_CODINGS, Key
from narrows.protocols import pipeline_channels
from narrows.protocols.config.deployment import Deployment, StageEdge, StageServer, WorkerProcess
from narrows.protocols.effects import NS
from narrows.protocols.errors import AuthenticationError, IncompatibleError, NarrowsError, StageLostError, UsageError
from narrows.protocols.runtime.network.channel_runner import ChannelRunner
from narrows.protocols.runtime.network.curve_auth import new_pair
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.command import stage_servers as stages_of_hosts
from narrows.ps.planner.pipelines.stages import order
from narrows.worker.pipelining.coding import BACKWARD, FORWARD, decode, encode
from narrows.worker.pipelining.group import PipelineGroup, register
from narrows.worker.pipelining.schedule import ScheduleEager1F1B
from narrows.worker.pipelining.subspace import Subspace, Writer

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS, MICRO, LIMIT_S, LEASE_S = 12, 16, 8, 30.0, 20.0
DENSE, INT8 = StageEdge(), StageEdge("int8", "int8")
_registering = threading.Lock()  # torch keeps how a group is made for all threads


def addresses(count: int) -> list[str]:
    """On loopback, free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def peers_of(rank: int, where: list[str], plan: int = 7, lease_s: float = LEASE_S, **keys: Any) -> ChannelRunner:
    return ChannelRunner(
        rank, where, [f"stage {i}" for i in range(len(where))], plan, lease_s, lambda text: None, **keys
    )


@contextmanager
def group_of(
    rank: int,
    where: list[str],
    edge: StageEdge = DENSE,
    step: Callable[[], int] = lambda: 0,
    limit_s: float = LIMIT_S,
) -> Iterator[PipelineGroup]:
    peers = peers_of(rank, where)
    failed, code = True, 1
    try:
        peers.wait(limit_s)
        group = PipelineGroup(peers, rank, len(where), [edge] * (len(where) - 1), step, limit_s)
        with _registering:
            register(group)
        yield group
        failed = False
    except NarrowsError as error:
        code = error.exit_code
        raise
    finally:
        peers.close(failed, code)


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed_c10d, "_world", ThreadLocalWorld())
    # What was sent before a process listened is lost, and comes with the next heartbeat: all stages begin within some.
    monkeypatch.setattr(pipeline_channels, "BEAT_NS_MAX", NS // 20)
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    yield
    isolate(False)


def whole_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return nn.Sequential(*layers)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def mean_square(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def of_whole() -> tuple[list[torch.Tensor], float]:
    model, (x, y) = whole_model(), batch()
    loss = mean_square(model(x), y)
    loss.backward()
    return gradients(model), loss.item()


def piped(
    stages: int, schedule: Any, edge: StageEdge, told_of: Callable[[int, nn.Module], None] = lambda rank, module: None
) -> tuple[list[torch.Tensor], float]:
    """Gradients of the model in so many stages, and its loss. `told_of`: it is given each stage before it runs."""
    where = addresses(stages)

    def stage(rank: int) -> tuple[list[torch.Tensor], float]:
        per = 4 // stages
        module, (x, y) = whole_model()[rank * per : (rank + 1) * per], batch()
        told_of(rank, module)
        with group_of(rank, where, edge) as group:
            cpu, example = torch.device("cpu"), torch.zeros(ROWS // MICRO, WIDTH, requires_grad=True)
            piece = PipelineStage(module, rank, stages, cpu, input_args=example, output_args=example, group=group)
            losses: list[torch.Tensor] = []
            told = {"target": y, "losses": losses} if piece.is_last else {}
            schedule(piece, MICRO, loss_fn=mean_square).step(*([x] if piece.is_first else []), **told)
            dist.barrier()
        return gradients(module), sum(loss.item() for loss in losses) / MICRO

    found = together(stage, stages)
    return [gradient for own, _ in found for gradient in own], found[-1][1]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_dense_gradients_are_those_of_the_model_in_one_piece(stages: int, schedule: Any) -> None:
    found, loss = piped(stages, schedule, DENSE)
    expected, whole = of_whole()
    assert abs(loss - whole) < 1e-6 and len(found) == len(expected) == 8
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-6


@pytest.mark.parametrize("in_flight", [(0, 0, 0), (0, 2, 0), (1, 0, 2), (9, 9, 9)])
def test_eager_1f1b_has_the_same_gradients_and_as_many_micro_batches_as_it_says(in_flight: tuple[int, ...]) -> None:
    most, now = [0] * 4, [0] * 4
    passes: list[list[int]] = [[] for _ in range(4)]

    def told_of(rank: int, module: nn.Module) -> None:
        def back(gradient: torch.Tensor) -> None:
            now[rank] -= 1
            passes[rank].append(BACKWARD)

        def forth(module: nn.Module, taken: object, given: torch.Tensor) -> None:
            now[rank] += 1
            most[rank] = max(most[rank], now[rank])
            passes[rank].append(FORWARD)
            given.register_hook(back)

        module.register_forward_hook(forth)

    def schedule(*args: Any, **more: Any) -> ScheduleEager1F1B:
        return ScheduleEager1F1B(*args, in_flight=in_flight, **more)

    found, loss = piped(4, schedule, DENSE, told_of)
    expected, whole = of_whole()
    assert abs(loss - whole) < 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-6
    assert most == [min(MICRO, 4 - stage + sum(in_flight[stage:])) for stage in range(4)] and now == [0] * 4
    assert passes == [order(stage, MICRO, in_flight) for stage in range(4)]  # as ps-plan simulates it


def test_each_edge_has_a_number_of_micro_batches_in_flight() -> None:
    stage: Any = SimpleNamespace(num_stages=3, stage_index=1)
    assert ScheduleEager1F1B(stage, 8, in_flight=(5, 1)).warm_up == 3
    assert ScheduleEager1F1B(stage, 8, in_flight=(0, 70)).warm_up == 8
    for wrong in ((1,), (1, -1)):
        with pytest.raises(UsageError, match="in_flight: 3 stages have 2 edges"):
            ScheduleEager1F1B(stage, 8, in_flight=wrong)


def test_int8_gradients_are_near_and_not_the_same() -> None:
    found, _ = piped(4, Schedule1F1B, INT8)
    expected, _ = of_whole()
    a, b = (torch.cat([g.reshape(-1) for g in each]) for each in (found, expected))
    assert 1e-5 < float((a - b).norm() / b.norm()) < 0.05


@pytest.mark.parametrize("name", [*EDGE_CODINGS])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 85), (2, 128), (3, 257)])
def test_a_coding_is_its_reference_in_both_directions(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values, key = tensor.numpy().reshape(-1), Key(11, 4)
    for direction in (FORWARD, BACKWARD):
        stochastic = name == "int8" and direction == BACKWARD
        coding = "fp32" if name == "dense" else name
        expected = reference_payload.value_part(coding, values, stochastic, key)
        payload = encode(tensor, EDGE_CODINGS[name][direction], key)
        assert bytes(payload) == expected
        into = torch.full(shape, 9.0)
        decode(payload, EDGE_CODINGS[name][direction], into)
        told, _ = reference_payload.values_in(coding, expected, values.size)
        assert np.array_equal(into.numpy().reshape(-1), told)


def test_gradients_are_rounded_without_bias() -> None:
    """The mean over many keys comes to the value; rounding to the nearest never does."""
    tensor = torch.tensor([1.0, 0.3003, -0.1234] * 20)
    mean, nearest = torch.zeros(60), torch.zeros(60)
    into = torch.zeros(60)
    for step in range(400):
        decode(encode(tensor, EDGE_CODINGS["int8"][BACKWARD], Key(1, step)), EDGE_CODINGS["int8"][BACKWARD], into)
        mean += into / 400
    decode(encode(tensor, EDGE_CODINGS["int8"][FORWARD], Key(1, 0)), EDGE_CODINGS["int8"][FORWARD], nearest)
    assert float((mean - tensor).abs().mean()) < 0.25 * float((nearest - tensor).abs().mean())


def test_other_dtypes_travel_as_they_are_or_rounded() -> None:
    ids = torch.arange(6).reshape(2, 3)
    into = torch.zeros(2, 3, dtype=torch.int64)
    decode(encode(ids, EDGE_CODINGS["int8"][FORWARD], Key(0, 0)), EDGE_CODINGS["int8"][FORWARD], into)
    assert torch.equal(into, ids)
    half = torch.tensor([1.0, -0.5], dtype=torch.bfloat16)
    back = torch.zeros(2, dtype=torch.bfloat16)
    decode(encode(half, EDGE_CODINGS["dense"][FORWARD], Key(0, 0)), EDGE_CODINGS["dense"][FORWARD], back)
    assert torch.equal(back, half)
    for name in EDGE_CODINGS:  # where values cannot be decoded in place
        turned, double = torch.full((3, 2), 9.0).T, torch.full((2, 3), 9.0, dtype=torch.float64)
        payload = encode(torch.arange(6.0).reshape(2, 3), EDGE_CODINGS[name][FORWARD], Key(0, 0))
        decode(payload, EDGE_CODINGS[name][FORWARD], turned)
        assert torch.allclose(turned, torch.arange(6.0).reshape(2, 3), atol=0.05)
        if name != "dense":
            decode(payload, EDGE_CODINGS[name][FORWARD], double)
            assert torch.equal(double, turned.double())
    with pytest.raises(NarrowsError, match="dense sends it as it is"):
        encode(torch.tensor([float("nan")]), EDGE_CODINGS["int8"][FORWARD], Key(0, 0))
    with pytest.raises(IncompatibleError, match="8 bytes is expected"):
        decode(b"123", EDGE_CODINGS["dense"][FORWARD], torch.zeros(2))


def test_tensors_of_a_tag_come_in_order_and_a_wait_ends() -> None:
    where = addresses(2)

    def stage(rank: int) -> Any:
        with group_of(rank, where, limit_s=LIMIT_S) as group:
            if rank == 0:
                for value, tag in ((1.0, 5), (2.0, 0), (3.0, 5)):
                    dist.send(torch.full((2,), value), 1, tag=tag)
                dist.barrier()
                return None
            into = [torch.zeros(2) for _ in range(3)]
            works = [dist.irecv(tensor, 0, tag=tag) for tensor, tag in zip(into, (5, 0, 5), strict=True)]
            for work in reversed(works):
                assert work is not None and work.wait() and work.is_completed()
            late = group.recv([torch.zeros(2)], 0)
            group.limit_s = 0.05
            with pytest.raises(StageLostError, match="a tensor of stage 0 did not come within 0 s"):
                late.wait()
            group.limit_s = LIMIT_S
            dist.barrier()
            return [float(tensor[0]) for tensor in into]

    assert together(stage, 2)[1] == [1.0, 2.0, 3.0]


def test_pickles_and_other_steps_are_refused() -> None:
    where = addresses(2)

    def stage(rank: int) -> None:
        with group_of(rank, where, step=lambda: 10 + rank):
            if rank == 0:
                with pytest.raises(UsageError, match="input_args and output_args"):
                    dist.send_object_list([{"a": 1}], 1)
                dist.send(torch.zeros(2), 1)
            else:
                dist.irecv(torch.zeros(1, dtype=torch.int64), 0).wait()  # type: ignore[union-attr]  # how long a pickle is
        return None

    with pytest.raises(IncompatibleError, match="stage 0 is at step 10 of the run, and stage 1 at step 11"):
        together(stage, 2)


def trained(
    rank: int, module: nn.Module, where: list[str], edge: StageEdge, rows: Sequence[int], keeps_ties: bool = False,
    then: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A step of a stage with so many rows after the other, and `then`."""
    x, y = batch()
    with group_of(rank, where, edge) as group:
        group.parameters = module.named_parameters
        if keeps_ties:
            group.allow_ties()
        cpu, example = torch.device("cpu"), torch.zeros(ROWS // MICRO, WIDTH, requires_grad=True)
        piece = PipelineStage(module, rank, len(where), cpu, input_args=example, output_args=example, group=group)
        schedule = Schedule1F1B(piece, MICRO, loss_fn=mean_square)
        for count in rows:
            told: dict[str, Any] = {"target": y[:count]} if piece.is_last else {}
            schedule.step(*([x[:count]] if piece.is_first else []), **told)
        then()
        dist.barrier()


def ends(stage: Callable[[int], None], stages: int) -> list[str]:
    """What each stage ends with. All end with the same exit code."""
    codes = set()

    def run(rank: int) -> str:
        try:
            stage(rank)
        except NarrowsError as error:
            codes.add(error.exit_code)
            return str(error)
        return ""

    said = together(run, stages)
    assert len(codes) < 2, said
    return said


@pytest.mark.parametrize(("case", "keeps"), [("tied", False), ("tied", True), ("constant", False)])
def test_parameters_that_two_stages_begin_with_alike_are_refused(case: str, keeps: bool) -> None:
    """Of three stages the first and the last, which send each other nothing. Biases that begin at 0 are no tie."""
    where = addresses(3)

    def stage(rank: int) -> None:
        module, whole = whole_model()[rank : rank + 1], dict(whole_model().named_parameters())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                tied = "0.0.weight" if case == "tied" and rank == 2 else name
                parameter.copy_(whole[tied] if parameter.ndim > 1 else torch.zeros(WIDTH))
        trained(rank, module, where, DENSE, [ROWS] * 3, keeps)

    told = [
        re.match(r"\d.0.weight of stage (\d) and \d.0.weight of stage (\d) begin with", text) for text in ends(stage, 3)
    ]
    found = {frozenset(each.groups()) for each in told if each}
    assert found == ({frozenset("02")} if case == "tied" and not keeps else set())


def test_what_a_script_sends_itself_is_not_coded() -> None:
    """Over an int8 edge, both ways, while a schedule's tensors are; in batches of torch as well."""
    where, (exact, _) = addresses(2), of_whole()
    sent = torch.randn(1000, generator=torch.Generator().manual_seed(1))

    def stage(rank: int) -> None:
        module, came, also = whole_model()[rank * 2 : (rank + 1) * 2], torch.zeros(1000), torch.zeros(1000)

        def exchange() -> None:
            for turn in (rank, 1 - rank):
                dist.recv(came, 1 - rank) if turn else dist.send(sent, 1 - rank)
            ops = [dist.P2POp(dist.isend, sent, 1 - rank, tag=3), dist.P2POp(dist.irecv, also, 1 - rank, tag=3)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        trained(rank, module, where, INT8, [ROWS], then=exchange)
        assert torch.equal(came, sent) and torch.equal(also, sent)
        assert not any(torch.equal(a, b) for a in gradients(module) for b in exact)

    assert ends(stage, 2) == ["", ""]


@pytest.mark.parametrize(("edge", "rows"), [(DENSE, 8), (INT8, 8), (INT8, 15)])
def test_a_smaller_last_batch_is_told_with_both_shapes_and_what_to_do(edge: StageEdge, rows: int) -> None:
    where = addresses(2)
    other, said = ends(
        lambda rank: trained(rank, whole_model()[rank * 2 : (rank + 1) * 2], where, edge, [ROWS, rows]), 2
    )
    assert other.startswith("stage 1 has failed with exit code 5") and "--resume" not in other
    assert (
        said.startswith("stage 0 has sent float32 (1, 12), and float32 (2, 12) is expected")
        and "drop_last=True" in said
    )


@pytest.mark.parametrize("sent", [torch.zeros(3, 4), torch.zeros(12), torch.zeros(4, 3, dtype=torch.int32)])
def test_equal_bytes_in_another_shape_or_dtype_are_refused(sent: torch.Tensor) -> None:
    where = addresses(2)

    def stage(rank: int) -> None:
        with group_of(rank, where):
            if rank == 0:
                dist.send(sent, 1)
            else:
                dist.recv(torch.zeros(4, 3), 0)

    with pytest.raises(IncompatibleError, match=r"stage 0 has sent .*, and float32 \(4, 3\) is expected"):
        together(stage, 2)


def test_a_stage_that_makes_no_steps_is_told_that_it_needs_a_parameter() -> None:
    where = addresses(2)

    def stage(rank: int) -> None:
        steps = 0
        with group_of(rank, where, step=lambda: steps):
            for _ in range(2):
                if rank == 0:
                    dist.send(torch.zeros(2), 1)
                    steps += 1
                else:
                    dist.recv(torch.zeros(2), 0)

    with pytest.raises(IncompatibleError, match=r"stage 0 is at step 1 .* so each needs a parameter"):
        together(stage, 2)


def test_a_stage_that_dies_is_noticed_within_a_lease() -> None:
    """Its process is gone without a word: the others wait for a tensor, and are told."""
    where, lease_s = addresses(3), 1.5
    peers = [peers_of(rank, where, lease_s=lease_s) for rank in range(3)]
    for each in peers:
        each.wait(LIMIT_S)
    peers[1]._sockets.receive = lambda limit_ms: iter(())  # type: ignore[method-assign]  # it hears and says nothing
    peers[1]._channels.tick = lambda now_ns: []  # type: ignore[method-assign]
    for rank in (0, 2):
        with pytest.raises(StageLostError, match=r"stage 1 was not heard for 1.5 s.*--resume"):
            peers[rank].receive(1, 0, 4 * lease_s)
    for each in peers:  # not before: who has failed says so to the others
        each.close(failed=True)
    assert StageLostError.exit_code == 6


@pytest.mark.parametrize(("failed", "how"), [(True, "stage 1 has failed"), (False, "stage 1 has ended")])
def test_one_that_ends_says_so(failed: bool, how: str) -> None:
    where = addresses(2)
    first, second = (peers_of(rank, where) for rank in range(2))
    first.wait(LIMIT_S)
    second.wait(LIMIT_S)
    second.close(failed)
    with pytest.raises(StageLostError, match=how):
        first.receive(1, 0, LIMIT_S)
    first.close(failed=True)


def test_keys_let_in_who_is_named_and_nobody_else() -> None:
    where, pairs = addresses(2), [new_pair() for _ in range(3)]
    keys = [pairs[0].public, pairs[1].public]
    first, second = (peers_of(rank, where, pair=pairs[rank], keys=keys) for rank in range(2))
    first.send(1, 0, 0, b"abc", LIMIT_S)
    assert bytes(second.receive(0, 0, LIMIT_S).payload) == b"abc"
    second.close()
    stranger = peers_of(1, [where[0], *addresses(1)], pair=pairs[2], keys=keys)
    with pytest.raises(AuthenticationError, match="the key is not one"):
        stranger.receive(0, 0, LIMIT_S)
    stranger.close(failed=True)
    first.close(failed=True)


def test_two_hosts_tell_each_other_which_clocks_their_stages_have(tmp_path: Path) -> None:
    """Stage 0 has clocks 10, 20 and 30, stage 1 has 20 and 40: both go back to 20."""
    first, second = addresses(2)
    ports = [int(address.rpartition(":")[2]) for address in (first, second)]
    stages = [StageServer(name, port) for name, port in zip("ab", ports, strict=True)]
    processes = [WorkerProcess(index, 0, name, 1 + index) for index, name in enumerate("ab")]
    layout = Deployment({"a": "127.0.0.1", "b": "127.0.0.1"}, stages, processes)
    arrays, facts = (
        {"x": np.zeros(3, np.float32), "p": np.zeros(3, np.float32)},
        {"publication": 1, "plan": b"", "shards": 1},
    )
    for stage, host, clocks in ((0, "a", (10, 20, 30)), (1, "b", (20, 40))):
        for clock in clocks:
            checkpoint_files.write(tmp_path / host / f"stage-{stage}", 0, clock, arrays, facts)
    assert together(lambda rank: stages_of_hosts.go_back(layout, "ab"[rank], tmp_path / "ab"[rank], ""), 2) == [20, 20]
    assert checkpoint_files.whole(tmp_path / "a" / "stage-0") == [10, 20] and checkpoint_files.whole(
        tmp_path / "b" / "stage-1"
    ) == [20]
    checkpoint_files.drop_all_after(tmp_path / "b" / "stage-1", -1)
    with pytest.raises(UsageError, match="stage 0: 10, 20; stage 1: none"):
        together(lambda rank: stages_of_hosts.go_back(layout, "ab"[rank], tmp_path / "ab"[rank], ""), 2)


def test_a_subspace_loses_nothing_of_what_was_written_into_it() -> None:
    """And the gradient of its coefficients is the whole gradient: Protocol Models (2506.01260)."""
    torch.manual_seed(2)
    space = Subspace(16, WIDTH, 3, seed=4)
    layers = nn.ModuleList(Writer(WIDTH, space, 0.5) for _ in range(2))
    ids = torch.randint(0, 16, (5, 7)).to(torch.uint8)
    start = torch.randn(5, 7, 3, requires_grad=True)

    def run(cut: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start.grad = None
        layers.zero_grad()
        x = space.enter(start, ids)
        for layer in layers:
            x = x + layer(torch.tanh(x))
            x = space.enter(space.leave(x, ids), ids) if cut else x
        x.square().sum().backward()
        assert start.grad is not None
        return x.detach(), [start.grad.clone(), *(g.clone() for g in gradients(layers))]

    (whole, expected), (piped, found) = run(False), run(True)
    assert float(whole.norm()) > 1 and float((whole - piped).abs().max()) < 1e-5
    for a, b in zip(expected, found, strict=True):
        assert float((a - b).abs().max()) < 1e-5 * float(a.abs().max())
    outside = torch.randn(5, 7, WIDTH)
    assert float((space.enter(space.leave(outside, ids), ids) - outside).norm()) > 1, "else nothing was left out"
    with pytest.raises(UsageError, match="subspace:13: a model of width 12"):
        Subspace(16, WIDTH, 13)
