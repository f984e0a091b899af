"""Options of a sweep, `sweep.…` on the command line."""

from dataclasses import dataclass

__all__ = ["SweepOptions"]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What `-m` does besides running every job."""

    resume: bool = False  # go on with the last sweep of the same command: jobs that have finished are not run again
    reuse_baseline: bool = True  # measure plain decoding once for all jobs that share it; False: in every job
