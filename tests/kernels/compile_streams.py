"""Compiles the products that stream their weights for an NVIDIA GPU that need not be there.

    python -m tests.kernels.compile_streams cuda 90 32

The interpreter must be off, so this runs in a process of its own.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specflow.kernels.few_rows_gluon import few_rows_stream_kernel
from tests.kernels.compile_paged import kind_of

PRODUCT = {
    "K": 4096, "BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 256, "HAS_BIAS": False, "GATED": False, "STAGES": 4,
    "NEXT_EARLY": False, "ONE": False, "OVERLAP": True,
}  # fmt: skip
VARIANTS: list[tuple[str, int, dict[str, Any]]] = [
    ("bf16", 1, PRODUCT | {"ONE": True, "STAGES": 12}),
    ("bf16", 2, PRODUCT | {"BLOCK_N": 32, "BLOCK_K": 128, "GATED": True, "NEXT_EARLY": True}),
    ("fp16", 2, PRODUCT | {"BLOCK_N": 32, "BLOCK_M": 16, "HAS_BIAS": True, "OVERLAP": False}),
]


def compile_variant(target: GPUTarget, dtype: str, warps: int, constants: dict[str, Any]) -> None:
    """Prints the kernel's name, the size of its code, and whether its weights are asked for before the wait."""
    names = few_rows_stream_kernel.arg_names
    values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
    signature = {name: "constexpr" if name in constants else kind_of(name, dtype) for name in names}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name][0] == "*"}
    aligned[(names.index("N"),)] = [["tt.divisibility", 16]]
    source = GluonASTSource(few_rows_stream_kernel, signature, values, aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "launch_pdl": constants["OVERLAP"]})
    before = compiled.asm["ptx"].partition("griddepcontrol.wait")[0]
    print(few_rows_stream_kernel.__name__, len(compiled.asm["cubin"]), before.count("cp.async.cg"), flush=True)


if __name__ == "__main__":
    backend, arch, warp = sys.argv[1:]
    for variant in VARIANTS:
        compile_variant(GPUTarget(backend, int(arch), int(warp)), *variant)
