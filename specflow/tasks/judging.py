"""From first differences to the verdict of a run."""

from collections.abc import Sequence

from specflow.engine.losslessness import Difference
from specflow.metrics.verdict import LosslessVerdict

__all__ = ["judge"]


def judge(differences: Sequence[Difference], requests: int, tokens: int, left_out: int = 0) -> LosslessVerdict:
    """Equal, equal up to ties, or different; a fault is shown before a tie.

    requests and tokens: compared; left_out: requests that followed a difference, see `find_differences`.
    """
    if not differences:
        return LosslessVerdict("verified", requests, tokens)
    faults = [difference for difference in differences if not difference.is_tie]
    shown = (faults or differences)[0]
    detail = {
        "request": shown.request_id,
        "position": shown.position,
        "expected": shown.plain_token,
        "actual": shown.speculative_token,
        "gap": shown.gap,
    }
    reason = f"a gap up to {shown.tolerance:.3g} counts as a tie"
    if left_out:
        reason += f"; {left_out} later turns not compared, whose conversations had differed before"
    status = "failed" if faults else "verified_up_to_ties"
    return LosslessVerdict(status, requests, tokens, detail, reason, len(differences))  # type: ignore[arg-type]
