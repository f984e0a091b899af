"""Compiles the kernels of paged attention for a GPU that need not be there.

    python -m tests.kernels.compile_paged cuda 90 32
    python -m tests.kernels.compile_paged hip gfx942 64

The interpreter must be off, so this runs in a process of its own.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specflow.kernels import paged_attention_triton as attention
from specflow.kernels import paged_write_triton as write

SIZES = {"HEADS": 8, "KV_HEADS": 2, "DK": 128, "DKP": 128, "DV": 128, "DVP": 128}
PLAIN = SIZES | {
    "BLOCK_M": 16, "BLOCK_N": 64, "CAUSAL": True, "RAGGED": False, "HAS_WINDOW": False, "HAS_SOFTCAP": False,
    "HAS_SINKS": False, "JOINED": True, "OVERLAP": False,
}  # fmt: skip
RULES = {"CAUSAL": False, "RAGGED": True, "HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True}
VARIANTS: list[tuple[Any, str, dict[str, Any]]] = [
    (attention.attend_kernel, "bf16", PLAIN),
    (attention.attend_kernel, "fp16", PLAIN | RULES | {"JOINED": False, "BLOCK_M": 64, "DK": 96, "DV": 80}),
    (attention.attend_kernel, "fp32", PLAIN | RULES | {"BLOCK_N": 32}),
    (attention.join_kernel, "bf16", SIZES | {"BLOCK_H": 4, "SPLITS": 8, "HAS_SINKS": False, "OVERLAP": False}),
    (attention.join_kernel, "bf16", SIZES | {"BLOCK_H": 1, "SPLITS": 64, "HAS_SINKS": True, "OVERLAP": False}),
    (write.write_kernel, "fp16", SIZES | {"BLOCK_H": 2, "CLEAN": True, "LARGEST": 65504.0}),
    (write.rotate_kernel, "bf16", SIZES | {"D": 128, "DP": 128, "BLOCK_H": 8, "CLEAN": True, "LARGEST": 3e38}),
]
INTEGERS = {
    "positions", "block_table", "seq_len", "query_start", "slots", "ids", "ints", "tokens", "blocks", "turn",
    "turn_now", "row_ints", "slot_mapping", "token_ids", "draft_ids", "emitted_ids", "num_emitted", "num_accepted",
    "committed", "num_drafts", "results", "seeds", "start", "num_kept", "feature_positions", "numbers", "owners",
    "last", "num_tokens", "anchors", "best", "cu_rows", "num_cut", "leading",
}  # fmt: skip
FLOATS = {"chances", "partial", "log_sums", "sinks", "highest", "peaks", "floats", "row_floats"}
MODEL = {
    "query", "key_pages", "value_pages", "output", "keys", "values", "heads", "rotary", "rotated", "delta", "residual",
    "weight", "total", "normed", "gate_up", "qkv", "query_norm", "key_norm", "bias", "norm_weight",
    "first", "second", "first_weight", "second_weight", "logits", "table", "stream",
}  # fmt: skip


def kind_of(name: str, dtype: str) -> str:
    """Type of an argument in Triton's spelling."""
    if name in MODEL:
        return f"*{dtype}"
    if name in INTEGERS:
        return "*i64"
    if name in FLOATS:
        return "*fp32"
    if name == "places":
        return "*i32"
    return "fp32" if name in ("scale", "softcap", "eps") else "i32"


def compile_variants(variants: list[tuple[Any, str, dict[str, Any]]], backend: str, arch: str, warp: str) -> None:
    """Compile kernels (with their dtype and constants); prints the name of each and the size of its code."""
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    for kernel, dtype, constants in variants:
        names = list(kernel.arg_names)
        values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
        signature = {name: "constexpr" if name in constants else kind_of(name, dtype) for name in names}
        compiled = triton.compile(ASTSource(kernel, signature, values), target=target, options={"num_stages": 2})
        binary = compiled.asm["cubin" if backend == "cuda" else "hsaco"]
        print(kernel.__name__, len(binary), flush=True)


if __name__ == "__main__":
    compile_variants(VARIANTS, *sys.argv[1:])
