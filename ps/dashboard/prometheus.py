"""The figures of a history for Prometheus, in base units. docs/howto/dashboard.md has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from narrows.protocols.member.heartbeat_summary import STALE
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.member_timeline import MemberTimeline

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = {"compute": "compute_seconds", "encode": "encode_seconds", "wait": "wait_seconds"}
WAYS = ("up", "down")
PEER = ("level", "peer")
LINK = (*PEER, "direction")


def text(history: RunHistory, began: float) -> bytes:
    """Return the text of a scrape. `began` is when the run began, in seconds since 1970."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(history, began))
    return generate_latest(registry)


class _Collector:
    """Makes the metrics of a history for each scrape."""

    def __init__(self, history: RunHistory, began: float) -> None:
        self.history, self.began = history, began

    def collect(self) -> Iterator[Metric]:
        history = self.history
        yield GaugeMetricFamily("narrows_clock", "The clock that all live members have reached", history.clock)
        info = GaugeMetricFamily("narrows_run_info", "1, with the run's name and mode", labels=["name", "mode"])
        info.add_metric([str(history.run.get("name", "")), str(history.run.get("mode", ""))], 1)
        yield info
        moved = self.began + history.moved
        yield GaugeMetricFamily("narrows_last_clock_timestamp_seconds", "When the clock moved last", moved)
        yield GaugeMetricFamily("narrows_members", "Live workers", sum(lane.live for lane in history.workers))
        yield CounterMetricFamily("narrows_restarts", "Shards started again, and runs gone back", history.died)
        if history.loss is not None:
            yield GaugeMetricFamily("narrows_loss", "Mean loss of the live workers", history.loss)
        if history.ratio:
            name, about = "narrows_compression_ratio", "Bytes of the same updates as fp32, by bytes pushed"
            yield GaugeMetricFamily(name, about, history.ratio)
        yield from self._of_members()
        yield from self._of_links()

    def _of_members(self) -> Iterator[Metric]:
        workers = self.history.workers
        steps = SummaryMetricFamily(
            "narrows_step_seconds", "Time of steps, by what it went to", labels=[*PEER, "phase"]
        )
        stale = HistogramMetricFamily("narrows_staleness", "Steps by their staleness in clocks", labels=PEER)
        samples = CounterMetricFamily(
            "narrows_samples", "Samples of the steps, where a script says how many", labels=PEER
        )
        skipped = CounterMetricFamily(
            "narrows_skipped_steps", "Steps left out, since their gradient was not finite", labels=PEER
        )
        for lane in workers:
            skipped.add_metric(_peer(lane), lane.total["skipped"])
            for phase, name in PHASES.items():
                steps.add_metric([*_peer(lane), phase], int(lane.total["steps"]), lane.total[name])
            samples.add_metric(_peer(lane), lane.total["samples"])
            count, buckets = 0, list[tuple[str, float]]()
            for end, more in zip((*map(str, STALE), "+Inf"), lane.stale, strict=True):
                count += more
                buckets.append((end, count))
            # A step counts with the least staleness of its bucket, that above the last end included.
            total = sum(least * more for least, more in zip((*STALE, STALE[-1] + 1), lane.stale, strict=True))
            stale.add_metric(_peer(lane), buckets, total)
        yield from (steps, stale, samples, skipped)
        gauges: dict[str, tuple[str, Callable[[MemberTimeline], float]]] = {
            "narrows_peer_clock": ("Clock of a member", lambda lane: lane.newest["clock"]),
            "narrows_peer_live": ("1 where a member is live", lambda lane: lane.live),
            "narrows_residual_norm_ratio": (
                "Length of the residual, in updates",
                lambda lane: lane.newest["held_back"],
            ),
            "narrows_gpu_graphs": ("CUDA graphs that a worker keeps", lambda lane: lane.newest["graphs"]),
            "narrows_gpu_scratch_bytes": ("Scratch memory of kernels", lambda lane: lane.newest["scratch_bytes"]),
            "narrows_link_rtt_seconds": ("Round trip", lambda lane: lane.newest["round_trip_seconds"]),
        }
        for name, (about, value) in gauges.items():
            family = GaugeMetricFamily(name, about, labels=PEER)
            for lane in self.history.lanes.values():
                family.add_metric(_peer(lane), value(lane))
            yield family
        counters = {
            "narrows_dropped_messages": ("Messages that found no room", "dropped"),
            "narrows_relay_bytes": ("Bytes of a member's peers that went through a relay", "relay_bytes"),
            "narrows_gpu_launches": ("Kernels launched on a worker's GPU", "launches"),
            "narrows_gpu_graph_replays": ("CUDA graphs replayed there", "replays"),
        }
        for name, (about, figure) in counters.items():
            counter = CounterMetricFamily(name, about, labels=PEER)
            for lane in self.history.lanes.values():
                counter.add_metric(_peer(lane), lane.total[figure])
            yield counter
        yield from self._of_teachers()

    def _of_teachers(self) -> Iterator[Metric]:
        """Yield the figures of workers that have teachers; nothing where none has."""
        students = [lane for lane in self.history.workers if lane.taught]
        if not students:
            return
        moved = CounterMetricFamily("narrows_teacher_bytes", "Bytes between a worker and its teachers", labels=LINK)
        missed = CounterMetricFamily("narrows_teacher_missed_batches", "Batches without soft targets", labels=PEER)
        waited = CounterMetricFamily("narrows_teacher_wait_seconds", "Waiting for answers of teachers", labels=PEER)
        for lane in students:
            for way in WAYS:
                moved.add_metric([*_peer(lane), way], lane.total[f"teacher_bytes_{way}"])
            missed.add_metric(_peer(lane), lane.total["teacher_missed"])
            waited.add_metric(_peer(lane), lane.total["teacher_seconds"])
        yield from (moved, missed, waited)

    def _of_links(self) -> Iterator[Metric]:
        moved = CounterMetricFamily("narrows_link_bytes", "Bytes between a member and its server", labels=LINK)
        rate = GaugeMetricFamily("narrows_link_rate_bytes_per_second", "While payloads were on their way", labels=LINK)
        busy = GaugeMetricFamily("narrows_link_busy_ratio", "Share of the time with payloads on their way", labels=LINK)
        for lane in self.history.lanes.values():
            for way, share in zip(WAYS, lane.busy, strict=True):
                labels = [*_peer(lane), way]
                moved.add_metric(labels, lane.total[f"bytes_{way}"])
                rate.add_metric(labels, lane.newest[f"rate_{way}"])
                busy.add_metric(labels, share)
        yield from (moved, rate, busy)


def _peer(lane: MemberTimeline) -> list[str]:
    """Return the labels of a member: its level below this server, from 1 on, and its ranks down the tree."""
    return [str(len(lane.path)), ".".join(map(str, lane.path))]
