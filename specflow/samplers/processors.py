"""Request options applied to logits, row by row, as if the drafts before each row had been committed.

The hypothetical prefix of row i is `token_table[slot, : num_tokens + i]`: drafts stand in the token table behind the
committed tokens, so penalties, bad words and min_tokens read one place and nothing has to be rolled back.
Order (vLLM's V2 runner): bias and masks, penalties, bad words; then for sampling rows temperature, min-p, top-k, top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specflow.core.request import Request


@dataclass(frozen=True)
class RequestRows:
    """The logits rows of one request in this step."""

    request: Request
    first_row: int
    num_rows: int  # drafts + 1

    @property
    def rows(self) -> slice:
        """Rows of the [N, V] logits."""
        return slice(self.first_row, self.first_row + self.num_rows)


def needs_processing(request: Request, *, temperature: bool = True) -> bool:
    """True when the request's logits differ from the raw ones; temperature False: by more than the temperature."""
    sampling = request.sampling
    scaled = not sampling.greedy if temperature else sampling.has_filters
    return scaled or masks_or_penalises(request)


def masks_or_penalises(request: Request) -> bool:
    """True when more than temperature and filters (top-k, top-p, min-p) sets the logits apart from the raw ones."""
    sampling = request.sampling
    waits = sampling.min_tokens > len(request.output_ids) and bool(request.stop_ids)
    return sampling.has_penalties or bool(sampling.logit_bias) or bool(request.bad_word_ids) or waits


def process_logits(logits: torch.Tensor, batch: Sequence[RequestRows], token_table: torch.Tensor) -> torch.Tensor:
    """Apply every request's options to logits [N, V] float32, in place; token_table is [slots, width] int64."""
    for item in batch:
        if not needs_processing(item.request):
            continue
        rows = logits[item.rows]
        if masks_or_penalises(item.request):
            _bias(rows, item.request)
            _min_tokens(rows, item.request)
            _penalties(rows, item, token_table)
            _bad_words(rows, item, token_table)
        if not item.request.sampling.greedy:
            _scale_and_filter(rows, item.request)
    return logits


def _bias(rows: torch.Tensor, request: Request) -> None:
    bias = request.sampling.logit_bias
    if bias:
        ids = torch.tensor(list(bias), device=rows.device)
        rows[:, ids] += torch.tensor(list(bias.values()), device=rows.device, dtype=rows.dtype)


def _min_tokens(rows: torch.Tensor, request: Request) -> None:
    """Mask EOS and stop ids in the rows whose token would come before the minimum."""
    masked = request.sampling.min_tokens - len(request.output_ids)
    if masked > 0 and request.stop_ids:
        rows[:masked, sorted(request.stop_ids)] = float("-inf")


def _penalties(rows: torch.Tensor, item: RequestRows, token_table: torch.Tensor) -> None:
    """Repetition counts prompt and output, frequency and presence count output only."""
    request, sampling = item.request, item.request.sampling
    if not sampling.has_penalties:
        return
    tokens = token_table[request.slot, : request.num_tokens + item.num_rows - 1]
    counts = _output_counts(tokens[request.prompt_len :], len(request.output_ids), rows)
    seen = counts > 0
    if sampling.repetition_penalty != 1:
        in_prompt = torch.zeros(rows.shape[1], dtype=torch.bool, device=rows.device)
        in_prompt[tokens[: request.prompt_len]] = True
        penalty = sampling.repetition_penalty
        rows.copy_(torch.where(seen | in_prompt, torch.where(rows > 0, rows / penalty, rows * penalty), rows))
    rows -= sampling.frequency_penalty * counts + sampling.presence_penalty * seen


def _output_counts(output: torch.Tensor, num_committed: int, rows: torch.Tensor) -> torch.Tensor:
    """How often each id was put out before each row: [rows, V] float, row i counts i drafts as well."""
    counts = rows.new_zeros(rows.shape)
    ones = rows.new_ones(1)
    counts += rows.new_zeros(rows.shape[1]).index_add_(0, output[:num_committed], ones.expand(num_committed))
    drafts = output[num_committed:]
    earlier = torch.ones(len(counts), len(drafts), device=rows.device, dtype=rows.dtype).tril(-1)
    return counts.scatter_add_(1, drafts.expand(len(counts), -1), earlier)


def _bad_words(rows: torch.Tensor, item: RequestRows, token_table: torch.Tensor) -> None:
    """Mask the last id of every bad word whose other ids end the row's prefix."""
    request = item.request
    for word in request.bad_word_ids:
        prefix = torch.tensor(word[:-1], device=rows.device, dtype=torch.int64)
        for row in range(item.num_rows):
            length = request.num_tokens + row
            if len(prefix) > length:
                continue
            matches = (token_table[request.slot, length - len(prefix) : length] == prefix).all()
            rows[row, word[-1]] = torch.where(matches, float("-inf"), rows[row, word[-1]])


def _scale_and_filter(rows: torch.Tensor, request: Request) -> None:
    sampling = request.sampling
    if sampling.temperature != 1:
        rows /= sampling.temperature
    if sampling.min_p > 0:
        least = rows.amax(-1, keepdim=True) + torch.log(torch.tensor(sampling.min_p))
        rows.masked_fill_(rows < least, float("-inf"))
    if sampling.top_k > 0 or sampling.top_p < 1:
        _top_k_top_p(rows, sampling.top_k, sampling.top_p)


def _top_k_top_p(rows: torch.Tensor, top_k: int, top_p: float) -> None:
    """Keep the k most likely ids, then the fewest of those whose mass reaches top_p; the lowest ids among equals."""
    ordered, ids = torch.sort(rows, dim=-1, descending=True, stable=True)
    if 0 < top_k < rows.shape[1]:
        ordered[:, top_k:] = float("-inf")
    if top_p < 1:
        mass = torch.softmax(ordered, -1)
        ordered[mass.cumsum(-1) - mass >= top_p] = float("-inf")
    rows.scatter_(1, ids, ordered)
