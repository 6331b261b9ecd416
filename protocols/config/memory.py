"""The arrays of workers and servers that have the size of the model: which there are, by mode and flags. Pure.

An array of one model holds each trained value as float32. `ps-worker --check` prints these arrays for the user's script,
and `ps-plan` plans with them. A server's figures are those of all shards together.
Activations and PyTorch itself are not among them. Under gossip the arrays are those of
protocols/gossip/mixing.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from narrows.protocols.config.key_ranges import parts, split
from narrows.protocols.config.modes import WINDOW, FoldRule, Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.topology import RANDOM, partners
from narrows.protocols.messages.state import CREDIT_MAX

SPARE = 2  # buffers beyond updates in flight: one to fill, and one that the link may still read
DELTA_BYTES_RATIO = 1.0  # differences that a shard keeps have at most this share of the bytes of the whole state
EVENTS_RATIO = 0.25  # a journal begins anew once past events have this share of the bytes of the machine
PEER_RATIO = 4.0  # the same of the pushes in workers' shared memory that past events name, or
PEER_BYTES_MIN = 1 << 27  # so many bytes of them, if that is more
SHARED_BYTES_MIN = 1 << 16  # of a frame in shared memory
PEER_BYTES_MAX = 1 << 29  # of the pushes of one worker that a shard's events name; further ones are copied
# What glibc keeps of messages and scratch that come and go between other arrays, as bench/speed/memory.py measures it:
FREED_HERE = 0.3  # of a worker, in models
FREED_RAW = 0.6  # of a server with a journal, over the raw pushes of a clock: each part leaves as the journal has it
FREED_CODED = 1.5  # the same of coded pushes: a shard's is one message, which is whole before any of it leaves
FREED_BARE = 0.2  # of a server without a journal, in models
# On a device, in models: a bit a value; bytes for each kept value (compression/device/feedback.py); what a pool adds.
DEVICE_MASKS, DEVICE_SCRATCH, POOL_SPARE = 1 / 32, 35 / 4, 9 / 8
# Arrays that a journal and a checkpoint have.
SAVED = ("weights", "published weights", "optimizer's state", "outer momentum")


class ModelArray(NamedTuple):
    """An array, or several alike.

    Attributes:
        name: what is in it.
        models: its bytes over those of the model as float32.
        why: what needs it.
    """

    name: str
    models: float
    why: str


class RungBytes(Protocol):
    """A SPEC, as this module needs it; see narrows.compression.ladder, which protocols/ does not import."""

    @property
    def share(self) -> float: ...
    @property
    def scratch(self) -> float: ...
    @property
    def kept(self) -> float: ...


class SpecLadder(Protocol):
    """A ladder of SPECs, as this module needs it."""

    @property
    def rungs(self) -> Sequence[RungBytes]: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def raw(self) -> bool: ...
    @property
    def auto(self) -> bool: ...


class RunCodecs(Protocol):
    """The SPECs of a run, as this module needs them."""

    @property
    def up(self) -> SpecLadder: ...
    @property
    def down(self) -> SpecLadder: ...


class ArrayFacts(NamedTuple):
    """What the arrays of a worker depend on, beside the mode.

    Attributes:
        lossless: the SPEC of updates leaves nothing out, as dense.
        down_lossless: the SPEC of states leaves nothing out.
        up: the bytes of an update, over those of the model as float32.
        quorum: of the run; -1: none.
        private: --dp-clip is given.
        rounded: a parameter is not float32.
        moments: values that the script's optimizer keeps for each parameter, such as 2 for AdamW.
        workers: of the run. This and what follows counts under gossip.
        topology: a key of TOPOLOGIES, or RANDOM.
        outer: rounds have an outer step with momentum.
        copied: the share of raw gradients that no tensor's memory can be lent for; see `crossing`.
        coding: what coding an update of all keys takes beside it, over the bytes of the model as float32.
        kept: the share of the values that an update has.
        shards: of the run. An update is coded for one after the other.
    """

    lossless: bool
    down_lossless: bool
    up: float = 1.0
    quorum: int = -1
    private: bool = False
    rounded: bool = False
    moments: float = 0.0
    workers: int = 1
    topology: str = ""
    outer: bool = False
    copied: float = 1.0
    coding: float = 0.0
    kept: float = 1.0
    shards: int = 1

    @classmethod
    def of(cls, settings: Settings, codecs: RunCodecs, moments: float, rounded: bool = False) -> ArrayFacts:
        """Return the facts of a run with these validated settings, and the codecs of their SPECs."""
        outer = (settings.outer_lr, settings.outer_momentum) != (1.0, 0.0)
        private, gossip = settings.dp_clip > 0, (settings.workers, settings.topology, outer)
        densest = codecs.up.rungs[0]
        specs = codecs.up.lossless, codecs.down.lossless, densest.share
        coding = max(rung.scratch for rung in codecs.up.rungs)
        facts = cls(*specs, settings.quorum, private, rounded, moments, *gossip)
        return facts._replace(coding=coding, kept=densest.kept, shards=settings.shards)


def gossip_partners(topology: str, workers: int) -> tuple[int, int]:
    """Return the most partners of worker 0 in a round, and its partners of all rounds."""
    if topology == RANDOM:
        return min(WINDOW, workers - 1), workers - 1
    members = tuple(range(workers))
    rounds = [{peer for peer, _ in partners(topology, number, members, 0)} for number in range(8 * workers)]
    return max(map(len, rounds)), len(set().union(*rounds))


def crossing(sizes: Sequence[int], shards: int) -> float:
    """Return the share of a model's values that travel in parts which cross a border of its tensors.

    Args:
        sizes: values of each tensor.
        shards: of the run.
    """
    borders = [*accumulate(sizes)]
    cuts = [cut for keys in split(borders[-1], shards) for cut in parts(*keys) if cut[0] < cut[1]]
    return sum(end - begin for begin, end in cuts if end > borders[bisect_right(borders, begin)]) / borders[-1]


def update_buffers(mode: Mode, quorum: int) -> int:
    """Return the number of buffers that raw updates need.

    Args:
        mode: of the run. At a barrier, and where fragments are merged, an update is folded before this worker has the
            next one of its keys: one buffer is enough.
        quorum: of the run; -1: none. With one a round may close while the link still reads this worker's late update.
    """
    one = mode.merges or (mode.barrier and mode.window == 1)
    return 1 if one and quorum < 0 else mode.window + SPARE


def in_place(mode: Mode, down_lossless: bool, rounded: bool) -> bool:
    """Return whether the parameters are the pulled state, so that a state needs no array."""
    return mode.rule is FoldRule.OPTIMIZER and mode.bound == 0 and down_lossless and not rounded


def worker_arrays(mode: Mode, facts: ArrayFacts) -> list[ModelArray]:
    """Return the arrays that a worker holds while it trains, on the host.

    Args:
        mode: the resolved mode.
        facts: the flags and the script's part.
    """
    gossip = mode.rule is FoldRule.MIX
    each, ever = gossip_partners(facts.topology, facts.workers) if gossip else (0, 0)
    offers = max(1, mode.bound or 0) + each * (1 + (mode.bound or 0))  # a partner may be one round ahead
    steps_here, direct = mode.rule is not FoldRule.OPTIMIZER, in_place(mode, facts.down_lossless, facts.rounded)
    raw, coded = facts.lossless or facts.private, not facts.lossless
    lends = direct and not facts.private
    buffers = update_buffers(mode, facts.quorum) * (facts.copied if lends else 1)
    scratch = 1 + max(facts.outer, facts.coding) if gossip else facts.coding / facts.shards / mode.fragments
    rows = (
        (True, ModelArray("parameters", 1, "the script's")),
        (True, ModelArray("gradients", 1, "the script's")),
        (steps_here, ModelArray("optimizer's state", facts.moments, "the script's: the worker's optimizer steps")),
        (gossip, ModelArray("model", 1, "this worker's own, which it mixes")),
        (not direct and not gossip, ModelArray("pulled state", 1, "the newest state of the shards")),
        (steps_here, ModelArray("replica", 1, "updates are measured from it")),
        (steps_here and facts.rounded, ModelArray("rounded replica", 1, "as the parameters' dtype holds it")),
        (coded and not gossip, ModelArray("residual", 1, "what the SPEC leaves out")),
        (
            raw and not gossip,
            ModelArray("raw updates", buffers, "in flight, to be filled, or with the link"),
        ),
        (coded and not gossip, ModelArray("coded updates", mode.window * facts.up, "in flight")),
        (
            facts.down_lossless and not gossip and not direct,
            ModelArray("received state", 1, "until all parts of a shard's are here"),
        ),
        (coded and gossip, ModelArray("references", 1 + ever, "of each partner, and the first weights")),
        (facts.outer and gossip, ModelArray("outer momentum", 1, "of this worker's rounds")),
        (gossip, ModelArray("offers", offers * facts.up, "this worker's, and those of its partners")),
        (gossip, ModelArray("scratch", scratch, "an update, a mix, or a difference, and its coding")),
        (not gossip, ModelArray("scratch", scratch, "of coding an update for one shard")),
        (True, ModelArray("freed messages", FREED_HERE, "glibc keeps their memory, and that of scratch")),
    )
    return [row for there, row in rows if there and row.models]


def device_arrays(mode: Mode, facts: ArrayFacts) -> list[ModelArray]:
    """Return the arrays that a worker holds on its device while it trains, over the script's own. See `worker_arrays`.

    A float32 update is computed from the parameters as a kernel reads them. Raw and coded bytes on their way are on the
    host.
    """
    gossip, steps_here = mode.rule is FoldRule.MIX, mode.rule is not FoldRule.OPTIMIZER
    coded, ever = not facts.lossless, gossip_partners(facts.topology, facts.workers)[1] if gossip else 0
    update = facts.lossless or facts.private or facts.rounded or not steps_here
    codes = POOL_SPARE * (facts.up if facts.kept == 1 else facts.up + facts.kept)  # an index has 4 bytes there
    held = 1 if gossip else mode.window + 1
    encodes = 1 if gossip else facts.shards * mode.fragments  # one of them has the scratch at a time
    scratch = codes if facts.kept == 1 else DEVICE_MASKS + DEVICE_SCRATCH * facts.kept
    rows = (
        (gossip, ModelArray("model", 1, "this worker's own, which it mixes")),
        (not gossip, ModelArray("pulled state", 1, "the newest state of the shards")),
        (steps_here, ModelArray("replica", 1, "updates are measured from it")),
        (steps_here and facts.rounded, ModelArray("rounded replica", 1, "as the parameters' dtype holds it")),
        (coded and not gossip, ModelArray("residual", 1, "what the SPEC leaves out")),
        (update and not gossip, ModelArray("update", 1, "which is copied, or changed before it is coded")),
        (coded and gossip, ModelArray("references", 1 + ever, "of each partner, and the first weights")),
        (facts.outer and gossip, ModelArray("outer momentum", 1, "of this worker's rounds")),
        (gossip, ModelArray("mixing", 1 + facts.outer, "an update, a mix, or a difference to be coded")),
        (coded and gossip, ModelArray("sum", 1, "of a difference: what its payload leaves out is lost")),
        (coded, ModelArray("codes", held * codes, "own updates, which stand in until a state has them")),
        (coded, ModelArray("scratch", scratch / encodes, "of an encode")),
    )
    return [row for there, row in rows if there and row.models]


class ShardFacts(NamedTuple):
    """What the arrays of the shards depend on, beside the mode.

    Attributes:
        workers: children of the shards.
        up, down: the bytes of an update and of a state of all keys, over those of the model as float32.
        coding: what coding a state takes beside the state, over the same.
        down_lossless: the SPEC of states leaves nothing out.
        fixed: the SPEC of states cannot change; False under `auto`.
        moments: values that the script's optimizer keeps for each parameter.
        raw: updates always travel as float32: their mean is summed as it is used, and needs no array.
        momentum: the outer optimizer has momentum.
        journal: each shard has a journal.
        standby: each shard has a standby. The rows count the standbys too.
        parent: of a cluster: the mode of its parent's run, and the facts of the cluster as a worker there.
    """

    workers: int
    up: float
    down: float
    coding: float
    down_lossless: bool
    fixed: bool = True
    moments: float = 0.0
    raw: bool = False
    momentum: bool = True
    journal: bool = True
    standby: bool = False
    parent: tuple[Mode, ArrayFacts] | None = None

    @classmethod
    def of(cls, settings: Settings, codecs: RunCodecs, moments: float) -> ShardFacts:
        """Return the facts of shards of a run with these validated settings, with a journal alone."""
        up, down = codecs.up.rungs[0].share, codecs.down.rungs[0].share
        lossless, fixed, momentum = codecs.down.lossless, not codecs.down.auto, settings.outer_momentum > 0
        coding = 0.0 if lossless else max(rung.share + rung.scratch for rung in codecs.down.rungs)
        return cls(settings.workers, up, down, coding, lossless, fixed, moments, codecs.up.raw, momentum)


def publishes_weights(mode: Mode, facts: ShardFacts) -> bool:
    """Return whether the weights themselves are what is published. None is under way when they change."""
    return mode.rule is FoldRule.MIX or (mode.barrier and facts.down_lossless and facts.fixed)


def machine_arrays(mode: Mode, facts: ShardFacts) -> list[ModelArray]:
    """Return the arrays that the machines of all shards keep. A journal or a standby copies them."""
    steps_here, averages = mode.rule is FoldRule.OPTIMIZER, mode.rule in (FoldRule.OPTIMIZER, FoldRule.OUTER)
    gossip, shared = mode.rule is FoldRule.MIX, publishes_weights(mode, facts)
    each = facts.down / mode.fragments
    kept = 0.0 if facts.down_lossless else each * max(1, min(CREDIT_MAX, DELTA_BYTES_RATIO // each))
    rows = (
        (True, ModelArray("weights", 1, "the master copy")),
        (not shared, ModelArray("published weights", 1, "as all children have them")),
        (steps_here, ModelArray("optimizer's state", facts.moments, "the script's: the shards step")),
        (mode.rule is FoldRule.OUTER and facts.momentum, ModelArray("outer momentum", 1, "of the outer optimizer")),
        (averages and not facts.raw, ModelArray("mean", 1, "of the coded updates of a clock")),
        (True, ModelArray("kept differences", kept, "of late publications, for children that are behind")),
        (
            not gossip,
            ModelArray("pushes", facts.workers * facts.up / mode.fragments, "that wait for others, or for parts"),
        ),
        *((True, row) for row in (parent_arrays(*facts.parent) if facts.parent is not None else ())),
    )
    return [row for there, row in rows if there and row.models]


def parent_arrays(mode: Mode, child: ArrayFacts) -> list[ModelArray]:
    """Return the arrays of a cluster's shards toward the parent's.

    Args:
        mode: of the parent's run.
        child: the facts of the cluster as a worker there.
    """
    kept = [ModelArray("base", 1, "updates are measured from it")]
    if mode.rule is FoldRule.MIX:
        names = ("model", "references", "outer momentum", "offers")
        kept += [row for row in worker_arrays(mode, child) if row.name in names]
    else:
        raw = ModelArray("raw updates", mode.window, "in flight to the parent, or part of its state here")
        left = ModelArray("residual", 1, "what the parent's SPEC leaves out")
        kept += [ModelArray("state", 1, "the parent's, as pulled"), raw if child.lossless else left]
    return [row._replace(name=f"parent's {row.name}") for row in kept]


def journal_arrays(saved: float, kept: float, clock: float, raw: bool) -> list[ModelArray]:
    """Return what the journals of all shards take at most, in models.

    Args:
        saved: the arrays that the journals copy, in models.
        kept: the kept differences, which they copy too.
        clock: the pushes of one clock, in models. They wait in the journal too, and count as pushes. Where they are more
            than the limit of past events, the journal begins anew with each fold, and has no past events.
        raw: the pushes are float32.
    """
    most, freed = EVENTS_RATIO * (saved + kept), clock * (FREED_RAW if raw else FREED_CODED)
    return [
        ModelArray("journal's copy", saved + kept, "of the arrays, and of kept differences"),
        ModelArray("journal's events", most if 0 < clock < most else 0.0, "that are folded, since that copy"),
        ModelArray("freed messages", freed, "that are in the journal; glibc keeps their memory"),
    ]


def shared_arrays(mode: Mode, facts: ShardFacts, shards: int, size: int) -> list[ModelArray]:
    """Return what a worker holds in shared memory at most, beside `worker_arrays`, if it is on the host of its server.

    Args:
        mode: the resolved mode.
        facts: the flags and the script's part, of the shards.
        shards: the number of shards.
        size: the bytes of the model as float32.
    """
    if mode.rule is FoldRule.MIX or size / shards < SHARED_BYTES_MIN:
        return []
    saved = sum(row.models for row in machine_arrays(mode, facts) if row.name in SAVED)
    each = 2 * max(PEER_BYTES_MIN * shards / size, PEER_RATIO * saved) / facts.workers
    stay = mode.rule in (FoldRule.OPTIMIZER, FoldRule.OUTER) and facts.raw and facts.journal and not facts.standby
    rows = (
        (True, ModelArray("pushes", facts.up / mode.fragments, "on their way")),
        (
            stay,
            ModelArray("pushes in the journal", min(each, PEER_BYTES_MAX * shards / size), "which names them there"),
        ),
    )
    return [row for there, row in rows if there]


def shard_arrays(mode: Mode, facts: ShardFacts) -> list[ModelArray]:
    """Return the most that the shards of a server hold while the run goes on, all shards together.

    Args:
        mode: the resolved mode.
        facts: the flags and the script's part.
    """
    kept = machine_arrays(mode, facts)
    machine = sum(row.models for row in kept)
    saved = sum(row.models for row in kept if row.name in SAVED) + (facts.parent is not None)  # what it owes the parent
    differences = sum(row.models for row in kept if row.name == "kept differences")
    lent = facts.down_lossless and not publishes_weights(mode, facts)
    clock = sum(row.models for row in kept if row.name == "pushes")
    rows = (
        (lent, ModelArray("state on its way", 1, "what a child is sent must not change")),
        (True, ModelArray("scratch", facts.coding / mode.fragments, "of coding a difference, and its payload")),
        *((facts.journal, row) for row in journal_arrays(saved, differences, clock, facts.raw)),
        (not facts.journal and clock > 0, ModelArray("freed messages", FREED_BARE, "glibc keeps their memory")),
        (facts.standby, ModelArray("copy for a standby", machine, "until the standby has it")),
        (facts.standby, ModelArray("standby", machine, "its machine: it frees the bytes that it makes it of")),
    )
    return [*kept, *(row for there, row in rows if there and row.models)]
