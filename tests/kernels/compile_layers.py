"""Compiles the kernels of a target's decoder layers for a GPU that need not be there.

python -m tests.kernels.compile_layers cuda 90 32
python -m tests.kernels.compile_layers hip gfx942 64
"""

import sys
from typing import Any

from specflow.kernels import argmax_triton as argmax
from specflow.kernels import decode_books_triton as books
from specflow.kernels import draft_rows_triton as draft_rows
from specflow.kernels import few_rows_triton as few_rows
from specflow.kernels import layer_ops_triton as layer_ops
from specflow.kernels import noise_triton as noise
from specflow.kernels import synthetic_triton as synthetic
from tests.kernels.compile_paged import compile_variants

HEADS = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "DP": 128, "BLOCK_H": 4}
PRODUCT = {
    "K": 4096, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 256, "HAS_BIAS": False, "GATED": False, "EVEN": True,
    "STAGES": 4, "NEXT_EARLY": False,
}  # fmt: skip
WIDE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}


def variants(overlap: bool) -> list[tuple[Any, str, dict[str, Any]]]:
    """Kernel, dtype and constants; overlap: NVIDIA's early start."""
    found: list[tuple[Any, str, dict[str, Any]]] = [
        (layer_ops.add_norm_kernel, "bf16", {"BLOCK": 4096, "ADD": True}),
        (layer_ops.embed_norm_kernel, "bf16", {"BLOCK": 4096}),
        (layer_ops.gated_silu_kernel, "bf16", {"BLOCK": 1024}),
        (layer_ops.pair_norm_kernel, "bf16", {"BLOCK": 4096}),
        (layer_ops.norm_rotate_kernel, "bf16", HEADS | {"NORM": True, "CLEAN": False, "LARGEST": 3e38}),
        (layer_ops.norm_rotate_kernel, "bf16", HEADS | {"HEADS": 0, "NORM": True, "CLEAN": True, "LARGEST": 3e38}),
        (layer_ops.norm_rotate_kernel, "fp16", HEADS | {"NORM": False, "CLEAN": True, "LARGEST": 65504.0}),
        (few_rows.few_rows_kernel, "bf16", PRODUCT | {"BLOCK_M": 8}),
        (few_rows.few_rows_kernel, "fp16", PRODUCT | {"GATED": True, "NEXT_EARLY": True}),
        (few_rows.few_rows_kernel, "bf16", PRODUCT | WIDE),
        (books.open_kernel, "bf16", {"WIDTH": 3, "PLACES": 4, "BLOCKS": 1024, "PIECES": 2}),
        (books.commit_kernel, "bf16", {"WIDTH": 3, "PLACES": 4}),
        (books.close_kernel, "bf16", {"WIDTH": 3, "PLACES": 4, "K": 3, "HAS_DRAFTS": True}),
        (books.close_kernel, "bf16", {"WIDTH": 0, "PLACES": 1, "K": 0, "HAS_DRAFTS": False}),
        (argmax.part_kernel, "bf16", {"PART": 4096, "NOWHERE": 2**31 - 1, "SKIP_NAN": True}),
        (argmax.row_kernel, "bf16", {"PARTS": 64, "NOWHERE": 2**31 - 1}),
        (argmax.leading_kernel, "bf16", {"K": 15, "PLACES": 16}),
        (draft_rows.kept_kernel, "bf16", {"WIDTH": 16, "PLACES": 16}),
        (draft_rows.block_kernel, "bf16", {"ROWS": 16, "PLACES": 16}),
        (synthetic.accept_kernel, "bf16", {"K": 15, "KP": 16}),
        (noise.uniform_kernel, "bf16", {"DOMAIN": 1, "BLOCK": 1024}),
        (noise.gumbel_kernel, "bf16", {"DOMAIN": 1, "BLOCK": 1024, "FP64": False, "FAST": overlap}),
        (few_rows.few_rows_kernel, "bf16", PRODUCT | {"EVEN": False, "HAS_BIAS": True}),
    ]
    return [(kernel, dtype, constants | {"OVERLAP": overlap}) for kernel, dtype, constants in found]


if __name__ == "__main__":
    compile_variants(variants(sys.argv[1] == "cuda"), *sys.argv[1:])
