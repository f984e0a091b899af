"""What every logged number means: the tables of docs/metrics.md are made from here, and a test holds both together.

The numbers themselves are computed in the other modules of this room; a metric without a definition fails a test.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "ACCEPTANCE",
    "DEFINITIONS",
    "PROFILE",
    "PROOF",
    "SPEED",
    "SWEEP",
    "Definition",
    "meaning_of",
    "with_tables",
]

_PLACES = {"{i}": r"\d+", "{percent}": r"(?:50|90|99)"}


@dataclass(frozen=True)
class Definition:
    """One metric. `a` and `k` in formulas: accepted and drafted tokens of a round; sums run over all rounds."""

    name: str  # as logged, without the METHOD/batch_N/ before it; {i}: a draft position, {percent}: 50, 90 or 99
    meaning: str  # a formula or a sentence
    unit: str = "1"
    vllm: str = "–"  # what vLLM calls it
    sglang: str = "–"
    papers: str = "–"

    def matches(self, name: str) -> bool:
        """Whether the logged name is this metric; whatever stands before the last part of the name is left out."""
        pattern = re.escape(self.name)
        for place, digits in _PLACES.items():
            pattern = pattern.replace(re.escape(place), digits)
        return re.search(rf"(?:^|/){pattern}$", name) is not None


ACCEPTANCE = (
    Definition("num_rounds", "rounds", "rounds", "`spec_decode_num_drafts`", "`spec_verify_ct`", "verification steps"),
    Definition("num_draft_tokens", "Σ k", "tokens", "`spec_decode_num_draft_tokens`", papers="proposed"),
    Definition("num_accepted_tokens", "Σ a", "tokens", "`spec_decode_num_accepted_tokens`", papers="accepted"),
    Definition(
        "acceptance_rate",
        "Σ a / Σ k",
        "0 … 1",
        "draft acceptance rate",
        "`spec_accept_rate` (some versions count the bonus token in both sums)",
    ),
    Definition(
        "mean_acceptance_length",
        "1 + Σ a / rounds",
        "tokens per round",
        "mean acceptance length",
        "`spec_accept_length`",
        "τ, average acceptance length (some papers leave the bonus token out: `mean_accepted_drafts` in summary.json)",
    ),
    Definition("macro_acceptance_rate", "mean over requests of Σ a / Σ k", "0 … 1"),
    Definition("macro_mean_acceptance_length", "mean over requests of 1 + Σ a / rounds", "tokens per round"),
    Definition(
        "acceptance_unconditional/position_{i}",
        "rounds with a > i / rounds",
        "0 … 1",
        "per-position acceptance rate: `spec_decode_num_accepted_tokens_per_pos` / `spec_decode_num_drafts`",
    ),
    Definition("acceptance_per_drafted/position_{i}", "rounds with a > i / rounds with k > i", "0 … 1"),
    Definition(
        "acceptance_conditional/position_{i}",
        "rounds with a > i / rounds with k > i and a ≥ i",
        "0 … 1",
        papers="n-α of EAGLE",
    ),
    Definition(
        "system_efficiency",
        "(Σ a + rounds) / (Σ k + rounds)",
        "0 … 1",
        "system efficiency of V0, there with a fixed K: `system_efficiency_at(K)`",
    ),
)

SPEED = (
    Definition(
        "tokens_per_second",
        "committed output tokens / wall time of the whole pass, prompts included in the time; median over repeats",
        "1/s",
    ),
    Definition("decode_tokens_per_second", "the same over the engine steps that ran no prompt token", "1/s"),
    Definition(
        "speedup",
        "`tokens_per_second` over that of plain decoding by the same engine at the same batch size, measured in the "
        "same run or once in the same sweep",
        "×",
    ),
    Definition("wall_seconds", "first arrival to last token of a pass; median over repeats", "s"),
    Definition("output_tokens", "committed output tokens of a pass; median over repeats", "tokens"),
    Definition(
        "ttft_p{percent}_seconds",
        "arrival of a request to its first output token, queueing included",
        "s",
        "`time_to_first_token_seconds`",
    ),
    Definition(
        "itl_p{percent}_seconds",
        "time between moments at which a request receives tokens. Tokens of one step arrive together and are one "
        "arrival, as a client that reads a stream sees it",
        "s",
        "`inter_token_latency_seconds`",
    ),
    Definition(
        "tpot_p{percent}_seconds",
        "(last token − first token) / (tokens − 1) of each request; comparable between plain and speculative decoding",
        "s",
        "`request_time_per_output_token_seconds`",
    ),
    Definition("target_time_share", "the target's passes as a part of the engine's step time", "0 … 1"),
    Definition("sample_time_share", 'judging the drafts, likewise; tables add it to the target as "verify"', "0 … 1"),
    Definition("propose_time_share", "drafting, likewise", "0 … 1"),
    Definition("other_time_share", "scheduling, packing and committing, likewise", "0 … 1"),
    Definition("undivided_time_share", "steps that ran as one device graph, whose parts are not told apart", "0 … 1"),
    Definition("peak_memory_bytes", "highest of the repeats", "bytes"),
    Definition("step_seconds", "one engine step; a curve by step only", "s"),
)

PROOF = (
    Definition("lossless", "1: every output equals plain decoding's, ties of rounding apart; 0: one differs", "0 or 1"),
    Definition("verify.compared_tokens", "tokens compared with plain decoding one by one", "tokens"),
    Definition("verify.samples", "sampled answers whose law was tested", "answers"),
    Definition(
        "verify.detectable_total_variation", "bias of the joint law that the test would see with its power", "0 … 1"
    ),
    Definition("verify.least_p_value", "smallest p-value of the statistical tests", "0 … 1"),
)

SWEEP = (
    Definition("jobs", "jobs that were begun", "jobs"),
    Definition("finished_jobs", "jobs that finished, in this attempt or an earlier one", "jobs"),
    Definition("best_objective", "best value of the metric that `objective` names, of all jobs", "as the metric"),
)

PROFILE = (
    Definition("profile.step_seconds", "one decode step, median", "s"),
    Definition("profile.target_seconds", "its target pass", "s"),
    Definition("profile.verify_seconds", "judging the drafts", "s"),
    Definition("profile.draft_seconds", "drafting", "s"),
    Definition("profile.books_seconds", "the rest that the device does: inputs, token table, lengths", "s"),
    Definition("profile.host_gap_seconds", "the step less its parts: the host, and waiting for it", "s"),
    Definition("profile.target_bytes", "weights once, and keys and values of the batch", "bytes"),
    Definition("profile.target_bytes_per_second", "these bytes over the time of the target pass", "bytes/s"),
    Definition("profile.copy_bytes_per_second", "a large copy in the device's memory, read plus written", "bytes/s"),
    Definition("profile.cost_of_{i}_seconds", "a target pass over so many query tokens of one request", "s"),
)

DEFINITIONS = (*ACCEPTANCE, *SPEED, *PROOF, *SWEEP, *PROFILE)


def meaning_of(name: str) -> Definition | None:
    """The definition of a logged metric, None for one that has none."""
    return next((one for one in DEFINITIONS if one.matches(name)), None)


def with_tables(page: str) -> str:
    """A Markdown page with what stands between `<!-- table: NAME -->` and `<!-- end of table -->` made anew.

    NAME: acceptance, speed, proof, sweep or profile. Raises `KeyError` for another one.
    """
    tables = {"acceptance": ACCEPTANCE, "speed": SPEED, "proof": PROOF, "sweep": SWEEP, "profile": PROFILE}
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)",
        lambda found: f"{found[1]}{_table(tables[found[2]])}\n{found[3]}",
        page,
        flags=re.DOTALL,
    )


def _table(definitions: Iterable[Definition]) -> str:
    """One line per metric; columns that no metric fills are left out."""
    rows = list(definitions)
    columns = {
        "name": [f"`{one.name}`" for one in rows],
        "meaning": [one.meaning for one in rows],
        "unit": [one.unit for one in rows],
        "vLLM": [one.vllm for one in rows],
        "SGLang": [one.sglang for one in rows],
        "papers": [one.papers for one in rows],
    }
    shown = {title: cells for title, cells in columns.items() if set(cells) != {"–"}}
    lines = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*shown.values(), strict=True)]
    return "\n".join(lines)
