"""The processes of one training run, as `torchrun` starts them. Imports torch only when there are several."""

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specflow.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Processes", "helper_process"]

# How long a process waits for the others: the first one alone writes responses, evaluates and saves.
_PATIENCE = datetime.timedelta(hours=6)


def helper_process() -> bool:
    """Whether this process only helps another one, which reports and saves."""
    return int(os.environ.get("RANK", "0")) > 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass(frozen=True)
class Processes:
    """Who this process is among `size` equal ones."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # number of its device

    @classmethod
    def from_environment(cls) -> "Processes":
        """From the variables that torchrun sets; one process without them. `ConfigError` when some are missing."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size} is set, but {missing[0]} is not: start several processes with "
                "torchrun --nproc-per-node N -m specflow task=train …, or unset WORLD_SIZE."
            )
        return cls(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes, evaluates and reports."""
        return self.rank == 0

    def join(self, device: "torch.device") -> None:
        """Meet the others, over NCCL on a GPU and gloo elsewhere."""
        if self.size > 1:
            import torch.distributed as dist

            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=_PATIENCE, rank=self.rank, world_size=self.size)

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def wait(self) -> None:
        """Go on when everybody is here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def add_up(self, *values: "torch.Tensor") -> None:
        """Replace every tensor by its sum over the processes."""
        if self.size > 1:
            import torch.distributed as dist

            for value in values:
                dist.all_reduce(value)
