"""Keyed randomness: every number is a function of (seed, position, domain[, token]) and of nothing else.

There is no generator state, so a request draws the same numbers alone or in a batch, before or after a pre-emption,
with or without speculation. Domains keep the coin, the draft's noise and the target's noise independent: sharing one
stream between proposal and residual biases the output (vLLM PR 54282).
"""

import torch

from specflow.kernels.triton_choice import triton_available

COIN, DRAFT, TARGET, TREE, FRESH = 1, 2, 3, 4, 5

CHUNK_IDS = 512  # ids of one chunk of `two_level_draw`; another number draws other tokens from the same law

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1
_TWO_POW_MINUS_32 = 2.0**-32


def uniform(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """Float32 uniforms in (0, 1), one per entry; seeds and positions are int64 of the same shape."""
    if _by_triton(seeds):
        from specflow.kernels import noise_triton

        return noise_triton.uniform(seeds, positions, domain)
    first, second = _keys(seeds, positions, domain)
    return _open_unit(_mix(first ^ _mix(second)), torch.float32)


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, domain: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard Gumbel noise [B, V] of the given dtype for seeds [B] and positions [B] (int64).

    Written as -log(-log1p(-u)), so that the winning tail comes from u near 0, where a 32-bit uniform keeps its
    resolution in float32: the noise reaches 22.9 instead of 16.6. float64 only refines the logarithms.
    """
    if _by_triton(seeds):
        from specflow.kernels import noise_triton

        return noise_triton.gumbel_noise(seeds, positions, domain, vocab_size, dtype)
    first, second = _keys(seeds, positions, domain)
    tokens = torch.arange(vocab_size, device=seeds.device, dtype=torch.int64)
    hashed = _mix(_mix(((tokens * _GOLDEN) & _MASK32).unsqueeze(0) ^ first.unsqueeze(1)) ^ second.unsqueeze(1))
    return _open_unit(hashed, dtype).neg_().log1p_().neg_().log_().neg_()


def gumbel_argmax(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample one id per row of logits [B, V]: argmax of logits plus noise, lowest id among equals; int64 [B]."""
    return torch.argmax(logits.to(noise.dtype) + noise, dim=-1)


def two_level_draw(
    law: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sample one id per row of a law: first its chunk of `CHUNK_IDS` ids, then the id inside; int64 [R].

    law: [R, V] float32, log probabilities up to a constant per row, no NaN; seeds and positions [R] int64. The chunk is
    the argmax of the chunks' log masses plus noise, the id that of the chunk's logits plus noise: together they follow
    the softmax of the row, as one argmax over the row with noise for every id would, but need 512 + V/512 numbers.
    Chunks depend on the ids alone, so that neither the batch nor the way a kernel splits the row can change a token.
    Of equals the lowest id wins; a row that is all -inf gives 0.

    Only one chunk is looked into, so one set of 512 numbers serves them all: column j of the noise belongs to the j-th
    id of the chosen chunk, column 512 + c to chunk c.
    """
    vocab_size = law.shape[1]
    noise = gumbel_noise(seeds, positions, TARGET, CHUNK_IDS + chunks_of(vocab_size), dtype)
    if vocab_size <= CHUNK_IDS:
        return gumbel_argmax(law, noise[:, :vocab_size])
    chunk = gumbel_argmax(chunk_masses(law), noise[:, CHUNK_IDS:]).unsqueeze(1)
    ids = chunk * CHUNK_IDS + torch.arange(CHUNK_IDS, device=law.device)
    inside = law.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, float("-inf"))
    return chunk.squeeze(1) * CHUNK_IDS + gumbel_argmax(inside, noise[:, :CHUNK_IDS])


def chunk_masses(law: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials of every chunk: [R, V] float32 -> [R, chunks]; -inf for a chunk without mass."""
    whole = law.shape[1] // CHUNK_IDS * CHUNK_IDS
    masses = torch.logsumexp(law[:, :whole].unflatten(1, (whole // CHUNK_IDS, CHUNK_IDS)), -1)
    if whole == law.shape[1]:
        return masses
    return torch.cat([masses, torch.logsumexp(law[:, whole:], -1, keepdim=True)], 1)


def chunks_of(vocab_size: int) -> int:
    """Chunks that cover the vocabulary."""
    return -(-vocab_size // CHUNK_IDS)


def fresh_seeds(seeds: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """Other seeds for every verification step of a request; int64 tensors of one shape -> int64, same shape.

    Needed where a number could be looked at in one step and used again in a later one (block verification).
    """
    first, second = _keys(seeds, rounds, FRESH)
    return (first << 31) ^ second


def _by_triton(seeds: torch.Tensor) -> bool:
    """On a GPU, one launch instead of some thirty."""
    return seeds.is_cuda and triton_available()


def _keys(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit keys per entry, as int64: a token hash uses both, so that streams are not shifts of each other."""
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    first = _mix(low ^ _mix((positions * _GOLDEN + domain) & _MASK32))
    second = _mix(high ^ _mix((first + 0x7F4A7C15 * domain) & _MASK32))
    return first, second


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 on int64 tensors that hold 32-bit values; a new tensor comes back."""
    value = (value ^ (value >> 16)).mul_(0x85EBCA6B).bitwise_and_(_MASK32)
    value = value.bitwise_xor_(value >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK32)
    return value.bitwise_xor_(value >> 16)


def _open_unit(hashed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Map 32-bit integers into (0, 1); the largest values are kept below 1 in float32."""
    unit = hashed.to(torch.float64).add_(0.5).mul_(_TWO_POW_MINUS_32)
    return unit.to(dtype).clamp_(max=1 - 2**-24) if dtype == torch.float32 else unit.to(dtype)
