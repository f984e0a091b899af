"""Compiles what is written for Hopper GPUs alone, where there need not be one: products and attention of many rows.

    python -m tests.kernels.compile_hopper cuda 90 32

The interpreter must be off, so this runs in a process of its own.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from specflow.kernels.many_rows import GROUP_ROWS, ManyRowsShape
from specflow.kernels.many_rows_gluon import REGISTERS, many_rows_kernel
from specflow.kernels.paged_attention_gluon import attend_tiles_kernel
from tests.kernels.compile_paged import PLAIN, kind_of

VARIANTS = [
    ("bf16", ManyRowsShape(panel=64, panels=3, block_k=128, stages=3), True),
    ("bf16", ManyRowsShape(groups=2, panel=64, stages=8, split=2), False),
    ("fp16", ManyRowsShape(panel=16, panels=3, stages=14), False),
]


def compile_product(target: GPUTarget, dtype: str, shape: ManyRowsShape, gated: bool) -> None:
    """Prints the kernel's name, the size of its code, and how often it asks for tiles before the wait."""
    most, work, ask = REGISTERS[shape.groups]
    constants = {
        "K": 4096, "ROWS": GROUP_ROWS, "GROUPS": shape.groups, "LOADED": shape.block_m, "PANEL": shape.panel,
        "PANELS": shape.panels, "BLOCK_K": shape.block_k, "STAGES": shape.stages, "SPLIT": shape.split,
        "HAS_BIAS": False, "GATED": gated, "WORK": work, "ASK": ask, "OVERLAP": True,
    }  # fmt: skip
    layout = gl.NVMMASharedLayout(128, 16, 2)
    heights = {"values": shape.block_m, "weight": shape.panel // (2 if gated else 1)}
    names = many_rows_kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind_of(name, dtype) for name in names}
    signature |= {"parts": "*fp32", "tickets": "*i32"}
    for name, height in heights.items():
        signature[name] = f"tensordesc<{dtype}[{height}, {shape.block_k}],{layout!r}>"
    values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
    source = GluonASTSource(many_rows_kernel, signature, values, {})
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "launch_pdl": True, "maxnreg": most})
    asking = compiled.asm["ptx"].rpartition("griddepcontrol.wait")[0]
    print(many_rows_kernel.__name__, len(compiled.asm["cubin"]), asking.count("cp.async.bulk.tensor"), flush=True)


def compile_attention(target: GPUTarget, joined: bool, causal: bool) -> None:
    """Prints the kernel's name, the size of its code, and how often a thread asks for 16 bytes."""
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "page_size": 16, "LEAST_KEYS": 128, "OVERLAP": True}
    constants = PLAIN | sizes | {"JOINED": joined, "CAUSAL": causal}
    names = attend_tiles_kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind_of(name, "bf16") for name in names}
    values = {(index,): constants[name] for index, name in enumerate(names) if name in constants}
    even = [name for name in names if "stride" in name or name in ("query", "key_pages", "value_pages", "output")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = GluonASTSource(attend_tiles_kernel, signature, values, aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "launch_pdl": True})
    asking = compiled.asm["ptx"].count("cp.async.cg")
    print(attend_tiles_kernel.__name__, len(compiled.asm["cubin"]), asking, flush=True)


if __name__ == "__main__":
    backend, arch, warp = sys.argv[1:]
    for variant in VARIANTS:
        compile_product(GPUTarget(backend, int(arch), int(warp)), *variant)
    for joined, causal in ((True, False), (False, True)):
        compile_attention(GPUTarget(backend, int(arch), int(warp)), joined, causal)
