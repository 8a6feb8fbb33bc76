"""Two ranks on gloo that begin functional collectives before they wait for the last one.

python gloo_two_gathers.py [rounds]
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp

COLLECTIVES = {
    "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, dist.group.WORLD),
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD),
}


def rank_main(rank: int, port: int, name: str, in_flight: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x = torch.ones(8)
    for _ in range(rounds):
        for begun in [COLLECTIVES[name](x) for _ in range(in_flight)]:
            begun.wait()
    dist.destroy_process_group()


def main(rounds: int = 20000) -> int:
    print(f"torch {torch.__version__}")
    ended_early = 0
    for name in COLLECTIVES:
        for in_flight in (1, 2):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = mp.spawn(rank_main, (store.port, name, in_flight, rounds), nprocs=2, join=False)
            try:
                while not ranks.join():
                    pass
                ended = "both ranks ended well"
            except mp.ProcessExitedException as death:
                ended = f"rank {death.error_index} was killed by {death.signal_name}"
                ended_early += 1
            print(f"  {name}, {in_flight} at a time: {ended}")
    print(f"  {ended_early} of 4 runs of {rounds} rounds ended early")
    return ended_early


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
