"""Bugs that are planted in a campaign: each is found within its first thousand runs."""

from __future__ import annotations

import pytest

from simulation.planted import find

# The rows of docs/simulation.md.
SHOWN = (
    *("an ack before the standby has the update", "a dedupe entry not copied"),
    *("a server that needs no votes", "a standby that needs no votes"),
    *("keys with two shards", "an update folded on both sides"),
    *("a replayed update folded twice", "an effect sent before its event is written", "an event of the journal lost"),
    *("an identity unchecked", "an epoch unchecked", "an epoch reused by a new life of shard 0"),
    *("a dedupe entry dropped", "the bound off by one", "a barrier closed one early", "an update taken in part"),
    *("a checkpoint that not all shards have", "a checkpoint altered and not noticed"),
    *("a cluster folds twice, in a tree", "updates go up twice, in a tree"),
)


@pytest.mark.parametrize("bug", SHOWN)
def test_a_campaign_finds_it(bug: str) -> None:
    assert find(bug) is not None
