"""Collectives of gloo on tensors of the CPU and of a GPU, each on two new ranks that share the GPU.

python gloo_cuda_tensors.py

Needs CUDA for the second column; without, it says so and ends with 2.
"""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp


def all_gather_into_tensor(x: torch.Tensor) -> torch.Tensor:
    gathered = torch.empty(2 * len(x), device=x.device)
    dist.all_gather_into_tensor(gathered, x)
    return gathered


def reduce_scatter_tensor(x: torch.Tensor) -> torch.Tensor:
    scattered = torch.empty(len(x) // 2, device=x.device)
    dist.reduce_scatter_tensor(scattered, x)
    return scattered


def all_to_all_single(x: torch.Tensor) -> torch.Tensor:
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x)
    return exchanged


def send(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def broadcast(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0)
    return x


COLLECTIVES = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "send": send,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all_single": all_to_all_single,
    "functional all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, dist.group.WORLD),
    "functional reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
    "functional all_to_all_single": lambda x: funcol.all_to_all_single(x, None, None, dist.group.WORLD),
}


def rank_main(rank: int, port: int, name: str, device: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    result = COLLECTIVES[name](torch.full((4,), float(rank + 1), device=device))
    store.set(f"{rank}", str(result.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def ended(name: str, device: str) -> tuple[bool, str]:
    """Whether the collective ended well, and its result on rank 1 or how it ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = mp.spawn(rank_main, (store.port, name, device), nprocs=2, join=False)
    try:
        while not ranks.join():
            pass
        return True, store.get("1").decode()
    except mp.ProcessExitedException as death:
        return False, f"rank {death.error_index} was killed by {death.signal_name}"
    except mp.ProcessRaisedException as error:
        return False, f"rank {error.error_index} raised {str(error).strip().splitlines()[-1][:90]}"


def main() -> int:
    print(f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        print("  needs CUDA: no GPU was found, so only the CPU is shown")
    ended_badly = 0
    for name in COLLECTIVES:
        print(f"  {name}")
        print(f"    cpu: {ended(name, 'cpu')[1]}", flush=True)
        if torch.cuda.is_available():
            well, what = ended(name, "cuda:0")
            print(f"    cuda: {what}", flush=True)
            ended_badly += not well
    return ended_badly if torch.cuda.is_available() else 2


if __name__ == "__main__":
    sys.exit(main())
