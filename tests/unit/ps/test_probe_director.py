"""ps-probe decides who measures with whom, survives who dies meanwhile, and makes one network.json of all that was seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from narrows.protocols.effects import NS
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow
from narrows.protocols.wire import pack
from narrows.ps.command.planning import plan
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.planner.network import Network
from narrows.ps.probe import flows, measured_network, probe_schedule
from narrows.ps.probe.byte_budget import LEAST_PAIR_BYTES, ByteBudget
from narrows.ps.probe.director import PrintLine, ProbeDirector, SendToMachine
from narrows.ps.probe.flows import (
    AGAIN,
    BOTH,
    FIRST,
    FOUR,
    LEAST_BYTES,
    MIB,
    ONE,
    PHASES,
    PINGED,
    SIZES,
    STREAM_BYTES,
    Flow,
)
from narrows.ps.probe.measured_network import MeasuredHost, MeasuredLink, MeasuredNetwork
from narrows.ps.probe.messages import (
    ProbeBeat,
    ProbeDial,
    ProbeEnd,
    ProbeJoin,
    ProbeListen,
    ProbeListening,
    ProbeReport,
    ProbeStepTime,
    decode,
    encode,
)

MB = 10**6


@pytest.mark.parametrize("count", range(2, 18))
def test_every_pair_is_in_one_round_and_no_machine_twice_in_one(count: int) -> None:
    found = probe_schedule.rounds(range(count))
    pairs = [frozenset(pair) for row in found for pair in row]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert all(len({*row[0]}.union(*row)) == 2 * len(row) for row in found)
    assert len(found) < count + math.ceil(
        math.log2(count)
    )  # count - 1 are needed; each halving of an odd count costs one


def figures(rate: float) -> dict[str, float]:
    return {"bits_per_second": rate, "seconds": 2.0, "bytes": rate / 4} | {
        f"bits_per_second_{size}": rate / 2 for size in SIZES
    }


def seen(listens: bool, first: bool, times: float = 1.0) -> list[Flow]:
    """One end's report on a visit: 8 Mbit/s from the listener, 2 Mbit/s towards it, or so many times that."""
    trips = {"min_rtt": 0.02, "p50_rtt": 0.03, "p95_rtt": 0.04, "pings": 30}
    rows = [Flow(PINGED, 0, trips)] if first and not listens else []
    for number in FIRST if first else (*ONE, *FOUR, BOTH):
        for way in PHASES[number].ways:
            rate, sends = times * (8e6 if way == 0 else 2e6), (way == 0) == listens
            sent = {"retransmits": 1.0, "segments": 1000.0, "sent_bytes": 5e5}
            received = figures(rate) | ({"peak_bits_per_second": 1.2 * rate} if first else {})
            rows.append(Flow(number, way, sent if sends else received))
    return rows


class Machines:
    """The others, in virtual time. `closed`: whose port nobody reaches; `dead`: who says nothing any more. `cities`: the
    names of each; what is inside is 100 times as fast, and all pairs that leave one share its way out."""

    def __init__(
        self, count: int, closed: str = "", known: frozenset[frozenset[str]] = frozenset(), cities: str = ""
    ) -> None:
        self.probe = ProbeDirector(count, 20.0, 100 * MB, "secret", known)
        self.closed, self.dead, self.said, self.now_ns = closed, "", list[str](), 0
        self.city = {name: number for number, names in enumerate(cities.split()) for name in names}
        self.ended: list[str] = []
        self.dials: list[ProbeDial] = []

    def do(self, effects: list[SendToMachine | PrintLine]) -> None:
        for effect in effects:
            if isinstance(effect, PrintLine):
                self.said.append(effect.text)
            elif effect.peer.decode() != self.dead:
                self.do(self.answer(effect.peer, effect.message))

    def answer(self, peer: bytes, message: Any) -> list[SendToMachine | PrintLine]:
        name = peer.decode()
        match message:
            case ProbeListen(token):
                return self.probe.hear(peer, ProbeListening(token, 7000), self.now_ns)
            case ProbeDial(token, host, first=first):
                self.dials.append(message)
                if host in self.closed:
                    return self.probe.hear(
                        peer, ProbeReport(token, f"port 7000 of {host} is closed", pack([])), self.now_ns
                    )
                trial = self.probe.tries[token]
                listener = self.probe.machines[trial.listener].peer
                reports = [(listener, True), (peer, False)]
                found: list[SendToMachine | PrintLine] = []
                for who, listens in reports:
                    if who.decode() != self.dead:
                        packed = pack([flow.plain() for flow in seen(listens, first, self.times(trial))])
                        found += self.probe.hear(who, ProbeReport(token, "", packed), self.now_ns)
                return found
            case ProbeEnd():
                self.ended.append(name)
        return []

    def times(self, trial: Any) -> float:
        """The rates of this pair, over those of a link that nobody shares."""
        row = [
            [self.city.get(self.probe.name(m), 0) for m in pair] for pair in self.probe.rounds[self.probe.number - 1]
        ]
        a, b = (self.city.get(self.probe.name(m), 0) for m in (trial.listener, trial.dialler))
        if a == b:
            return 100.0 if self.city else 1.0
        out = [place for pair in row if pair[0] != pair[1] for place in pair]
        return 1 / max(out.count(a), out.count(b))

    def join(self, *names: str) -> None:
        for name in names:
            self.do(self.probe.hear(name.encode(), ProbeJoin(name, name, 1), self.now_ns))
            self.do(self.probe.hear(name.encode(), ProbeStepTime(0.5), self.now_ns))

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_ns += NS
            for machine in self.probe.machines:
                if (name := machine.peer.decode()) != self.dead:
                    self.do(
                        [
                            e
                            for e in self.probe.hear(name.encode(), ProbeBeat(0), self.now_ns)
                            if isinstance(e, PrintLine)
                        ]
                    )
            self.do(self.probe.tick(self.now_ns))


def assert_bounded(machines: Machines) -> None:
    """What the machines may send is below the bound that is printed before the first stream, and that below the limit."""
    text = next(text for text in machines.said if text.startswith("streams of"))
    told = float(text.rpartition(" MB in all")[0].rpartition(" ")[2].replace(",", "")) * MB
    most = machines.probe.bounds.first_bytes + sum(
        flows.pair_bytes((dial.most_0, dial.most_1), dial.seconds) for dial in machines.dials if not dial.first
    )
    assert most <= told + MB / 2 and told <= 100 * MB + MB / 2


def test_all_pairs_are_measured_and_all_machines_told() -> None:
    machines = Machines(5)
    machines.join(*"abcde")
    assert machines.probe.finished and not machines.probe.failed
    assert {frozenset(each.names) for each in machines.probe.found} == {
        frozenset(a + b) for a in "abcde" for b in "abcde" if a < b
    }
    assert sorted(machines.ended) == [*"abcde"]
    assert len({dial.token for dial in machines.dials}) == 20
    assert_bounded(machines)


def test_pairs_that_shared_a_way_out_have_what_one_of_them_has_alone() -> None:
    machines = Machines(7, cities="abc de fg")
    machines.join(*"abcdefg")
    assert machines.probe.finished and not machines.probe.failed
    assert len(machines.probe.found) == 21 + 3  # one more for each two cities
    assert sum("once more, alone" in text for text in machines.said) == 1
    for (a, b), link in machines.probe.links().items():
        inside = machines.city[a] == machines.city[b]
        assert {*link.rates.values()} < ({8e8, 4e8, 2e8, 1e8} if inside else {8e6, 4e6, 2e6, 1e6}), (a, b)
        assert max(link.rates.values()) in ((8e8, 2e8) if inside else (8e6, 2e6))
    assert len({dial.token for dial in machines.dials}) == 21 + 24
    assert_bounded(machines)
    assert machines.probe.pairs == 24


def test_what_nobody_shared_is_measured_once() -> None:
    machines = Machines(6)
    machines.join(*"abcdef")
    assert machines.probe.finished and len(machines.probe.found) == 15


def test_what_a_run_has_measured_is_left_out() -> None:
    machines = Machines(3, known=frozenset({frozenset("ab")}))
    machines.join(*"abc")
    assert {frozenset(each.names) for each in machines.probe.found} == {frozenset("ac"), frozenset("bc")}


def test_a_closed_port_is_tried_the_other_way_and_named_where_both_are() -> None:
    machines = Machines(3, closed="ab")
    machines.join(*"abc")
    assert machines.probe.finished
    assert {frozenset(each.names) for each in machines.probe.found} == {frozenset("ac"), frozenset("bc")}
    (failed,) = machines.probe.failed
    assert "port 7000 of" in failed


def test_a_machine_that_dies_is_named_and_the_others_are_measured() -> None:
    machines = Machines(4)
    machines.dead = "d"
    machines.join(*"abcd")
    machines.passes(100)
    assert machines.probe.finished
    assert {frozenset(each.names) for each in machines.probe.found} == {frozenset(p) for p in ("ab", "ac", "bc")}
    assert len(machines.probe.failed) == 3 and all("d" in each for each in machines.probe.failed)
    assert sum("was silent for" in text for text in machines.said) == 1


def test_a_pair_without_a_report_ends() -> None:
    machines = Machines(2)
    machines.dead = "a"
    machines.join(*"ab")
    machines.dead = ""  # it lives, and has lost what it was told
    machines.passes(30)
    assert machines.probe.finished and "no report of" in machines.probe.failed[0]


def test_who_is_refused_is_told_why() -> None:
    machines = Machines(3)
    machines.join("a")
    assert "named a too" in machines.probe.hear(b"x", ProbeJoin("a", "a", 1), 0)[0].message.why  # type: ignore[union-attr]
    machines.join("b", "c")
    assert "3 machines are here" in machines.probe.hear(b"d", ProbeJoin("d", "d", 1), 0)[0].message.why  # type: ignore[union-attr]
    assert isinstance(machines.probe.hear(b"y", ProbeBeat(0), 0)[0].message, ProbeEnd)  # type: ignore[union-attr]


def test_those_who_came_begin_without_the_others() -> None:
    machines = Machines(4)
    machines.join(*"abc")
    machines.do(machines.probe.without("d did not start", 0, "d"))
    assert machines.probe.finished and len(machines.probe.found) == 3 and machines.probe.failed == ["d did not start"]


def test_the_first_round_waits_for_all_steps_but_for_those_of_one_that_does_not_say_them() -> None:
    """A script may take 600 s, and the machines that wait for it are there."""
    machines = Machines(3)
    machines.join("a", "b")
    machines.do(machines.probe.hear(b"c", ProbeJoin("c", "c", 1), 0))
    machines.passes(600)
    assert machines.probe.began_ns is None and not machines.probe.failed and not machines.ended
    machines.do(machines.probe.hear(b"c", ProbeStepTime(2.5), machines.now_ns))
    assert machines.probe.finished and [m.step_s for m in machines.probe.machines] == [0.5, 0.5, 2.5]

    hangs = Machines(3)
    hangs.join("a", "b")
    hangs.do(hangs.probe.hear(b"c", ProbeJoin("c", "c", 1), 0))
    hangs.passes(800)
    assert (
        hangs.probe.finished
        and len(hangs.probe.found) == 1
        and "c: its steps were not timed within 720 s" in hangs.said
    )
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(RemoteProtocolError):
            machines.probe.hear(b"a", ProbeStepTime(wrong), 0)


def test_one_whose_script_fails_is_left_out_and_all_that_have_not_come() -> None:
    machines = Machines(4)
    machines.join("a", "b")
    machines.do(machines.probe.hear(b"c", ProbeJoin("c", "c", 1), 0))
    machines.do(machines.probe.without("c: its script made no step", 0, "c"))
    assert machines.probe.count == 3 and not machines.probe.finished
    machines.do(machines.probe.without("3 s are over", 0))
    assert machines.probe.finished and [each.names for each in machines.probe.found] == [("a", "b")]


def test_two_that_are_gone_at_once_before_the_first_round_may_come_again() -> None:
    machines = Machines(4)
    machines.join("a", "b", "c")
    machines.do(machines.probe.tick(100 * NS))
    assert not machines.probe.machines and not machines.probe.failed
    machines.now_ns = 100 * NS
    machines.join("a", "b", "c", "d")
    assert machines.probe.finished and len(machines.probe.found) == 6


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [[0, 0]],
        [[PINGED + 1, 0, {}]],
        [[0, 2, {}]],
        [[0, 0, {"other": 1.0}]],
        [[0, 0, {"bytes": -1.0}]],
        [[0, 0, {"bytes": float("inf")}]],
        [[0, 0, {"bytes": "1"}]],
        [[0, 0, {}]] * 100,
        [[[], 0, {}]],
    ],
)
def test_a_report_that_is_none_is_refused(rows: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        flows.checked(rows)


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", pack([]), pack(["Join"]), pack(["Join", 1, 2, 3]), pack(["Eval", "x"]), pack(7)]
)
def test_bytes_that_are_no_message_are_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode([frame])
    assert decode(encode(ProbeJoin("a", "", 1))) == ProbeJoin("a", "", 1)


def test_slow_start_is_no_part_of_a_rate_and_all_of_a_small_message() -> None:
    marks = [(1.0, 0), *((1.0 + tenth / 10, 2**tenth * 1000) for tenth in range(1, 11))]
    marks += [(2.0 + tenth / 10, 1024_000 + tenth * 200_000) for tenth in range(1, 31)]  # from then on 16 Mbit/s
    assert flows.last_part(marks) == pytest.approx(16e6)
    sizes = flows.by_size(marks)
    assert sizes.keys() == {SIZES[0], SIZES[1]} and sizes[SIZES[0]] < sizes[SIZES[1]] < 16e6
    told = {"bits_per_second": 16e6, "seconds": 4.0, "bytes": float(marks[-1][1])} | {
        f"bits_per_second_{k}": v for k, v in sizes.items()
    }
    rates = flows.rates(told)
    assert [*rates] == [*SIZES, STREAM_BYTES]
    assert rates[8 * MIB] == pytest.approx(8 * 8 * MIB / (4.0 + (8 * MIB - marks[-1][1]) / 2e6))


@pytest.mark.parametrize("marks", [[], [(1.0, 0)], [(1.0, 0), (1.0, 9)]])
def test_a_stream_without_time_has_no_rate(marks: Any) -> None:
    assert flows.last_part(marks) == 0.0


@pytest.mark.parametrize("round_trip_s", [0.0001, 0.4])
@pytest.mark.parametrize("doubts", [0, 1, 2])
@pytest.mark.parametrize("early", [1.0, 0.1])
def test_streams_end_with_their_round_and_within_its_bytes(round_trip_s: float, doubts: int, early: float) -> None:
    """As a dialler goes through the phases of a second visit. `early`: a stream ends so much before its time, at its bytes."""
    allowed, left_s, unit_s, sent = (3e6, 5e5), 20.0 - flows.MARGIN_S, math.inf, 0
    todo, spare = [*ONE, *FOUR, BOTH], flows.SPARE
    while todo:
        unit_s = min(unit_s, flows.unit_seconds(left_s, todo, spare, round_trip_s))
        phase = PHASES[number := todo.pop(0)]
        seconds = unit_s * phase.weight
        sent += sum(phase.streams * phase.share(allowed[way] * seconds) for way in phase.ways)
        left_s -= early * seconds + 2 * round_trip_s + flows.QUEUED_S
        if number == FOUR[-1] and doubts:
            more = AGAIN[:doubts]
            todo, spare, unit_s = [*more, *todo], 0.0, unit_s * flows.spared(more)
    assert left_s >= -1e-6 and (early < 1 or left_s < 20 * flows.SPARE / 13)
    assert sent <= flows.pair_bytes(allowed, 20.0)


@pytest.mark.parametrize("ends", [0, 1])
def test_one_stream_is_read_again_where_four_have_much_more(ends: int) -> None:
    """Each end knows the rate of what it sends by what was delivered, and of what it receives by what came."""
    name = ("delivered_bits_per_second", "bits_per_second")
    rates = {ONE[0]: 80.0, FOUR[0]: 91.0, ONE[1]: 80.0, FOUR[1]: 93.0}
    rows = [
        Flow(number, way, {name[(way + ends) % 2]: rates[number]}) for number in rates for way in PHASES[number].ways
    ]
    assert flows.doubtful(rows) == [AGAIN[1]]
    assert not flows.doubtful([Flow(row.phase, row.way, {"delivered_bits_per_second": 0.0}) for row in rows])


def test_the_faster_of_two_readings_counts() -> None:
    rows = [row for listens in (True, False) for first in (True, False) for row in seen(listens, first)]
    merged: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        merged.setdefault((row.phase, row.way), {}).update(row.figures)
    sent = {"retransmits": 0.0, "segments": 10.0}
    slower, faster = (figures(rate) | sent for rate in (1e6, 9e6))
    more = [Flow(AGAIN[0], 0, faster), Flow(AGAIN[1], 1, slower)]
    links = measured_network.of_pair(("a", "b"), [*(Flow(*key, value) for key, value in merged.items()), *more], 1.0)
    assert links["a", "b"].rates[STREAM_BYTES] == 9e6 and links["b", "a"].rates[STREAM_BYTES] == 2e6
    shown = links["a", "b"].raw["flows"]
    assert [(row["streams"], row["both_ways"]) for row in shown] == [(1, False), (4, False), (1, True), (1, False)]
    assert links["a", "b"].raw["retransmitted"] == 0.0 and links["b", "a"].raw["retransmitted"] == 0.001


def test_the_peak_of_a_slow_start_is_the_rate_of_the_link() -> None:
    """Windows double each 100 ms, and each comes at 8 Mbit/s."""
    marks, size = [(0.0, 0)], 0
    for window in range(6):
        for part in range(1, 2**window + 1):
            size += 1000
            marks.append((window / 10 + part / 1000, size))
    assert flows.peak(marks) == pytest.approx(8e6, rel=0.05) and flows.last_part(marks) < 4e6
    assert flows.peak([]) == flows.peak([(1.0, 0)]) == flows.peak([(1.0, 0), (1.0, 9)]) == 0.0


def test_a_pair_may_send_what_its_first_visit_lets_expect_and_no_more_than_its_share() -> None:
    bounds = ByteBudget(20.0, 1000 * MB)
    bounds.begin(3, 0)
    for pair, rate in (((0, 1), 2e6), ((1, 2), 20e6), ((0, 2), 9e9)):
        bounds.saw(pair, [rate, rate])
    slow, fast, share = (bounds.costs[frozenset(pair)] for pair in ((0, 1), (1, 2), (0, 2)))
    assert 2 * 2e6 / 8 * 10 < slow < 3 * (2 * 2e6 / 8 * 10) < fast < 150 * MB
    assert share == pytest.approx(1000 * MB / 3 - 2 * bounds.first, rel=1e-3)
    assert bounds.bytes <= 1000 * MB and bounds.bytes < 500 * MB
    least = ByteBudget(20.0, 3 * LEAST_PAIR_BYTES)
    least.begin(3, 0)
    least.saw((0, 1), [9e9, 9e9])
    assert least.first == LEAST_BYTES and 3 * (2 * least.first + least.costs[frozenset((0, 1))]) <= 3 * LEAST_PAIR_BYTES


def of_two(names: tuple[str, str], unix_s: float) -> MeasuredNetwork:
    found = MeasuredNetwork()
    for name in names:
        found.add_host(name, MeasuredHost(unix_s, 1 << 30, 0.25 if name == "a" else 0.5))
    machines = Machines(2)
    machines.join(*names)
    for each in machines.probe.found:
        for way, link in measured_network.of_pair(each.names, each.flows, unix_s).items():
            found.add_link(way, link)
    return found


def test_the_file_is_a_network_and_says_each_way() -> None:
    document = of_two(("a", "b"), 100.0).document()
    network = Network.parse(document)
    assert network.hosts == ("a", "b") and network.measured_unix_s == 100.0
    assert network.sizes_bytes == (*SIZES, STREAM_BYTES)
    assert sorted(8 * network.rates[-1][~(network.rates[-1] == 0.125)]) == [2e6, 8e6]
    assert network.delay_s[0, 1] == network.delay_s[1, 0] == 0.01
    assert list(network.compute) == [1.0, 0.5] and list(network.memory_bytes) == [1 << 30] * 2
    assert measured_network.parse(document).document() == document


def test_the_newest_of_each_link_holds() -> None:
    one, two, newer = of_two(("a", "b"), 100.0), of_two(("b", "c"), 200.0), of_two(("a", "b"), 300.0)
    newer.links["a", "b"] = MeasuredLink(0.5, {MIB: 1e6}, 300.0)
    for order in ((one, two, newer), (newer, two, one)):
        merged = MeasuredNetwork()
        for each in order:
            merged.add(measured_network.parse(each.document()))
        assert merged.links["a", "b"].delay_s == 0.5 and merged.links["b", "c"].unix_s == 200.0
        assert sorted(merged.hosts) == ["a", "b", "c"]
    assert Network.parse(merged.document()).missing == ["a to c"]  # nobody has measured it


def test_a_plan_takes_the_addresses_that_machines_were_measured_at(tmp_path: Path) -> None:
    """Their names may be known to nobody, and then the commands of the plan would end with 3."""
    found = of_two(("a", "b"), 100.0)
    found.add_host("a", MeasuredHost(200.0, address="10.0.0.7"))
    found.add_host("b", MeasuredHost(200.0, address="fd00::1"))
    document = found.document() | {"measured_unix_s": 100.0}
    again = measured_network.parse(document)
    again.add_host("a", MeasuredHost(300.0))  # seen again, by whom nothing was told of it
    assert again.hosts["a"].address == "10.0.0.7"
    (tmp_path / "network.json").write_text(json.dumps(again.document()))
    for flags, hosts in (
        ([], {"a": "10.0.0.7", "b": "[fd00::1]"}),
        (["--address", "b=fd00::2"], {"a": "10.0.0.7", "b": "[fd00::2]"}),
    ):
        words = [str(tmp_path / "network.json"), "--parameters", "1e6", "--all-hosts", "--insecure", *flags]
        ended = CliRunner().invoke(plan.command, [*words, "--out", str(tmp_path / "plan.json")], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        assert json.loads((tmp_path / "plan.json").read_text())["hosts"] == hosts
    wrong = document | {"addresses": {"a": 7}}
    with pytest.raises(UsageError, match="addresses"):
        measured_network.parse(wrong)


def test_a_file_of_matrices_alone_can_be_merged() -> None:
    matrices = {
        "format": 1,
        "hosts": ["a", "b"],
        "delay_s": [[0, 0.1], [0.2, 0]],
        "rates": [{"message_bytes": MIB, "bits_per_second": [[0, 1e6], [2e6, 0]]}],
    }
    found = measured_network.parse(matrices)
    found.add(of_two(("b", "c"), 100.0))
    assert found.links["b", "a"] == MeasuredLink(0.2, {MIB: 2e6}, 0.0)
    assert len(found.links) == 4


def test_prices_and_speeds_by_hand_are_kept_and_those_of_steps_made_anew() -> None:
    first = of_two(("a", "b"), 100.0).document()
    assert first["compute"] == [1.0, 0.5]
    by_hand = {"compute": [1.0, 0.25], "price_per_byte": [[None, 1e-9], [2e-9, None]]}
    for order in (1, -1):
        merged = MeasuredNetwork()
        for each in [first | by_hand, of_two(("a", "b"), 300.0).document()][::order]:
            merged.add(measured_network.parse(each))
        document = merged.document()
        assert document["compute"] == by_hand["compute"] and document["price_per_byte"] == by_hand["price_per_byte"]
        assert Network.parse(document).price.tolist() == [[0, 1e-9], [2e-9, 0]]
    merged.add(of_two(("b", "c"), 100.0))
    assert merged.document()["price_per_byte"] == [[None, 1e-9, None], [2e-9, None, None], [None] * 3]
    without = measured_network.parse(first | {"compute": [3.0, 1.0], "step_seconds": [None, 0.1]}).document()
    assert without["compute"] == [3.0, 1.0]


@pytest.mark.parametrize(
    "broken",
    [{"format": 2}, {"hosts": None}, {"links": [{}]}, {"memory_bytes": [1]}, {"links": 3}, {"price_per_byte": [[1]]}],
)
def test_a_file_that_is_none_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"network\.json"):
        measured_network.parse(of_two(("a", "b"), 1.0).document() | broken)


def test_what_a_run_has_measured_costs_nothing() -> None:
    history = RunHistory()
    history.take(
        {"event": "run", "seconds": 0.0, "mode": "ssp", "address": "tcp://root:5555", "local_steps": 1, "fragments": 1}
    )
    for clock in (0, 10):
        for rank, (host, rate) in enumerate((("leipzig", 1e6), ("leipzig", 3e6), ("oslo", 2e6))):
            summary = Summary(seconds=1.0 + clock, clock=clock, steps=clock, compute_seconds=0.2 * clock, bytes_up=clock * MB,
                              rate_up=rate, rate_down=2 * rate, round_trip_seconds=0.04)  # fmt: skip
            row = SummaryRow((), host, "", summary).below(rank, host)
            event = {"event": "summary", "seconds": 1.0 + clock, "clock": clock, "parameters": 5, "rows": [row.told()]}
            history.take(event)
    found = measured_network.of_run(history.frame(), "", 50.0)
    assert found.hosts["leipzig"].step_s == pytest.approx(0.2)
    assert found.links["leipzig", "root"] == MeasuredLink(0.02, {MIB: 24e6}, 50.0, {"measured_by": "run"})
    assert [*found.links["root", "leipzig"].rates.values()] == [48e6]
    assert found.pairs == {frozenset(("leipzig", "root")), frozenset(("oslo", "root"))}
    assert measured_network.table(found)[2].split() == [*found.hosts]
