"""The byte GPT under torchft's DiLoCo: what wan.py compares with. Started once for each rank, by wan.py.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... LAB_ADDRESS=... in the environment of
    python bench/contenders/torchft_diloco.py H RECORD.jsonl [flags]

LAB_ADDRESS: of this rank's host. Every H steps an allreduce of the dense pseudogradients over gloo in one bucket, then Nesterov
0.7/0.9 (torchft.local_sgd.DiLoCo; 2311.08105). Each rank is a replica group of its own; rank 0 also runs the lighthouse. All
ranks must be there for a round, and start alike by their seed. Steps as in ddp.py. The loss is of the rank's own weights:
let H divide --steps, and it is that of the averaged ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from contenders import ddp

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


def replica_group() -> tuple[Manager, list[object]]:
    """This rank as a replica group of its own, once all ranks are there, and what must live as long: its store, and rank 0's
    lighthouse."""
    distributed.init_process_group("gloo", timeout=ddp.LIMIT)
    rank, of = distributed.get_rank(), distributed.get_world_size()
    master, port, here = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, os.environ["LAB_ADDRESS"]
    lighthouse = LighthouseServer(bind=f"{master}:{port}", min_replicas=of) if rank == 0 else None
    distributed.barrier()
    store = distributed.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
        here, port + 1 + rank, is_master=True, wait_for_workers=False
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=ddp.LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=of,
        use_async_quorum=False,
        timeout=ddp.LIMIT,
        quorum_timeout=ddp.LIMIT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{master}:{port}",
        replica_id=f"bytelm{rank}",
        hostname=here,
        init_sync=False,
    )
    return manager, [store] if lighthouse is None else [store, lighthouse]


def main(local_steps: int, out: Path, argv: list[str]) -> None:
    torch.set_num_threads(1)
    args = bytelm.arguments(argv)
    manager, needed = replica_group()
    torch.manual_seed(args.seed)
    training, held_out, _ = bytelm.library()
    model = bytelm.ByteGPT(args.layers, args.width, args.heads, args.context)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(args.beta1, 0.95), weight_decay=args.weight_decay)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    with out.open("w") as record:
        with DiLoCo(manager, [model], adamw, outer, sync_every=local_steps, use_bucketization=True):
            ddp.train(model, adamw, args, training, record)
        rounds = args.steps // local_steps
        if (done := manager.current_step()) != rounds:
            raise SystemExit(f"torchft took {done} of {rounds} rounds")
        ddp.finish(model, args, held_out, record)
    manager.shutdown()
    for each in needed:
        if isinstance(each, LighthouseServer):
            each.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
