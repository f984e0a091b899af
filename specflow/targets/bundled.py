"""Target `bundled`: the small language model that comes with the package, so that nothing needs a download."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specflow.kernels.triton_choice import KernelChoice
from specflow.targets.hf import HfOptions, HfTarget
from specflow.zoo.bundle import model_folder


@dataclass(kw_only=True)
class BundledOptions:
    """Options of target `bundled`."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # float32: output equal token for token
    prove: bool = True  # compare with the model's own attention before the first step
    weight_layout: Literal["auto", "native"] = "auto"  # auto = transposed in memory where that is faster
    attention: KernelChoice = "auto"  # auto: Triton on a GPU where it is installed, else torch; proposers follow


class BundledTarget(HfTarget):
    """The bundled model: Qwen3 architecture, trained on the Python standard library."""

    def __init__(self, options: BundledOptions, folder: Path | None = None) -> None:
        super().__init__(
            HfOptions(
                path=str(folder or model_folder("target")),
                dtype=options.dtype,
                prove=options.prove,
                weight_layout=options.weight_layout,
                attention=options.attention,
            )
        )
